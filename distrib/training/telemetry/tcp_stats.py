"""What the TCP connections of this process carry, as the kernel counts it: to whom, how much, and how long that took.

Linux keeps for every connection the bytes that were acknowledged and the time in which it had something to send (struct
tcp_info in linux/tcp.h); their quotient is the rate of the way to the other host, also where the connection rests most of
the time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch

_ACKED, _BUSY, _RECEIVER_LIMITED = 120, 168, 176
"""Where tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited stand: 64 bits each, times in microseconds (Linux 4.10)."""

FEWEST_BYTES = 1 << 20
"""Of less nothing is said: it goes into the socket's buffer."""


class Sent(NamedTuple):
    """What went to one host since the connections were made: bytes acknowledged, seconds in which there was something to send."""

    size_bytes: int = 0
    busy_seconds: float = 0.0


def sent() -> dict[str, Sent]:
    """By the other end's address, over all TCP connections of this process that leave the host."""
    found: dict[str, Sent] = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            descriptor = int(entry)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                other, own = sock.getpeername()[0], sock.getsockname()[0]
                if other == own:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < _RECEIVER_LIMITED + 8:
                continue  # an older kernel
            acked, busy, limited = (struct.unpack_from("=Q", info, at)[0] for at in (_ACKED, _BUSY, _RECEIVER_LIMITED))
            before = found.get(other, Sent())
            found[other] = Sent(before.size_bytes + acked, before.busy_seconds + max(0, busy - limited) / 1e6)
    return found


def sizes(before: Mapping[str, Sent], after: Mapping[str, Sent]) -> dict[str, int]:
    """Bytes that went between two looks to each host that any went to: connections there are to all."""
    gone = {address: now.size_bytes - before.get(address, Sent()).size_bytes for address, now in after.items()}
    return {address: size for address, size in gone.items() if size > 0}


def are_all(device: torch.device) -> bool:
    """Whether these connections carry what collectives of tensors on `device` send: NCCL may go by RDMA, past the kernel."""
    return device.type != "cuda" or os.environ.get("NCCL_IB_DISABLE") == "1" or not _has_rdma()


def _has_rdma() -> bool:
    with contextlib.suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


def rates(before: Mapping[str, Sent], after: Mapping[str, Sent]) -> dict[str, float]:
    """Bytes per second to each host between two looks, of those that much was sent to."""
    found = {}
    for address, now in after.items():
        then = before.get(address, Sent())
        size, seconds = now.size_bytes - then.size_bytes, now.busy_seconds - then.busy_seconds
        if size >= FEWEST_BYTES and seconds > 0:
            found[address] = size / seconds
    return found
