"""The ranks of one host: memory that they share, and a doorbell that wakes without anybody spinning.

The memory has no name (memfd), the sockets are abstract: when the last process is gone, however it went, both are.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import weakref
from pathlib import Path

import torch

from distrib.errors import TrainingError

COUNTER_BYTES = 64
"""A cache line for each counter."""


class Doorway:
    """Where the other ranks of the host find this one, before they know it. `name` is what they must be told."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel chooses a free abstract name
        self._listener.listen(1024)
        self.name: bytes = self._listener.getsockname()

    def meet(self, names: list[bytes], index: int, timeout_seconds: float) -> list[socket.socket | None]:
        """A connection to each of the ranks whose doorways have these names; None for this one, which is `index`.

        Raises TrainingError for a process of another user.
        """
        peers: list[socket.socket | None] = [None] * len(names)
        for other in range(index):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(timeout_seconds)
            peer.connect(names[other])
            _check_user(peer)
            peer.sendall(struct.pack("i", index))
            peers[other] = peer
        self._listener.settimeout(timeout_seconds)
        for _ in range(index + 1, len(names)):
            peer = self._listener.accept()[0]
            peer.settimeout(timeout_seconds)
            _check_user(peer)
            peers[struct.unpack("i", peer.recv(4, socket.MSG_WAITALL))[0]] = peer
        self._listener.close()
        return peers


def _check_user(peer: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise TrainingError(f"a process of user {user} knocked where only the ranks of this host should")


class Neighbours:
    """The ranks of this host, this one being `index`, with `counters` each (of pieces, from 0) and shared bytes."""

    def __init__(self, peers: list[socket.socket | None], index: int, counters: int, shared_bytes: int) -> None:
        self.count, self.index = len(peers), index
        self._peers = {other: peer for other, peer in enumerate(peers) if peer is not None}
        head = mmap.PAGESIZE * -(-counters * self.count * COUNTER_BYTES // mmap.PAGESIZE)
        self._head_bytes = head
        self._memory = self._share(head + shared_bytes) if self._peers else mmap.mmap(-1, head + shared_bytes)
        words = torch.frombuffer(self._memory, dtype=torch.int64, count=head // 8).numpy()
        step = COUNTER_BYTES // 8
        self._counters = [words[i * self.count * step : (i + 1) * self.count * step : step] for i in range(counters)]
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._by_descriptor = {}
        for other, peer in self._peers.items():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
            self._by_descriptor[peer.fileno()] = other
        self.gone: set[int] = set()

    def shared(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The shared bytes `start` to `end`, as a tensor whose storage begins there: DDP minds no offset in a storage."""
        count = (end - start) // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._head_bytes + start)

    def _share(self, size: int) -> mmap.mmap:
        """Memory that all neighbours see, zeros at first; the first of them makes it."""
        if self.index == 0:
            descriptor = os.memfd_create("distrib-gradients", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            for peer in self._peers.values():
                socket.send_fds(peer, [b"m"], [descriptor])
        else:
            _, descriptors, _, _ = socket.recv_fds(self._peers[0], 1, 1)
            if not descriptors:
                raise TrainingError(
                    "the first rank of this host has gone before it shared its memory",
                    hint="why, is in that rank's log",
                )
            descriptor = descriptors[0]
        mapped = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return mapped

    def tell(self, counter: int, value: int) -> None:
        """Sets this rank's counter, and wakes the others."""
        self._counters[counter][self.index] = value
        for other, peer in self._peers.items():
            try:
                peer.send(b"!")
            except BlockingIOError:
                pass  # the bell rings already
            except OSError:
                self.gone.add(other)

    def slowest(self, counter: int, among: int | None = None) -> int:
        """The least that the first `among` ranks (default: all) have told of a counter."""
        return int(self._counters[counter][:among].min())

    def wake(self) -> None:
        """Ends this rank's own `sleep`, from another thread."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Leaves the others, who will find this rank gone."""
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it left first

    def sleep(self) -> None:
        """Until a neighbour tells something, leaves, or `wake` is called. Those that left are in `gone`."""
        for descriptor, event in self._poll.poll():
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                continue
            other = self._by_descriptor[descriptor]
            try:
                left = not self._peers[other].recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                left = True
            if left or event & select.POLLNVAL:
                self.gone.add(other)
                self._poll.unregister(descriptor)


def this_host() -> str:
    """What two processes have in common exactly if they run on one kernel and reach each other's abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
