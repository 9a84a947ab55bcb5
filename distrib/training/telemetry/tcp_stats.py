"""Bytes and rates of this process's TCP connections, from the kernel's TCP_INFO.

Linux counts for every connection the acknowledged bytes and the time in which it had data to send (struct tcp_info in linux/tcp.h).
Their quotient is the rate of the path to the other host, even if the connection is mostly idle.
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


class Sent(NamedTuple):
    """Traffic to one host since the connections were made: acknowledged bytes, seconds with data to send."""

    size_bytes: int = 0
    busy_seconds: float = 0.0


def sent() -> dict[str, Sent]:
    """Return the traffic by the peer's address, over all TCP connections of this process to other hosts."""
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
            if len(info) < 184:
                continue  # a kernel before Linux 4.10
            # tcpi_bytes_acked, tcpi_busy_time and tcpi_rwnd_limited; times in microseconds
            acked, busy, limited = struct.unpack_from("=120xQ40xQQ", info)
            before = found.get(other, Sent())
            found[other] = Sent(before.size_bytes + acked, before.busy_seconds + max(0, busy - limited) / 1e6)
    return found


def sizes(before: Mapping[str, Sent], after: Mapping[str, Sent]) -> dict[str, int]:
    """Compute the bytes sent to each host between two measurements.

    Args:
        before: The first result of `sent`.
        after: The second one.

    Returns:
        Bytes by address, only of hosts that received any.
    """
    gone = {address: now.size_bytes - before.get(address, Sent()).size_bytes for address, now in after.items()}
    return {address: size for address, size in gone.items() if size > 0}


def are_all(device: torch.device) -> bool:
    """Test if TCP carries the collectives of a device's tensors: NCCL may use RDMA, past the kernel.

    Args:
        device: The device of the gradients.

    Returns:
        True if TCP carries them.
    """
    return device.type != "cuda" or os.environ.get("NCCL_IB_DISABLE") == "1" or not _has_rdma()


def _has_rdma() -> bool:
    with contextlib.suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


def rates(before: Mapping[str, Sent], after: Mapping[str, Sent], *, min_bytes: int = 1 << 20) -> dict[str, float]:
    """Compute the rate to each host between two measurements.

    Args:
        before: The first result of `sent`.
        after: The second one.
        min_bytes: Least traffic for a rate. Smaller amounts stay in the socket's buffer, so their rate is not that of the network.

    Returns:
        Bytes per second by address.
    """
    found = {}
    for address, now in after.items():
        then = before.get(address, Sent())
        size, seconds = now.size_bytes - then.size_bytes, now.busy_seconds - then.busy_seconds
        if size >= min_bytes and seconds > 0:
            found[address] = size / seconds
    return found
