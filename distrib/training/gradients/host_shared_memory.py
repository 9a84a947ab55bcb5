"""Shared memory of the ranks of one host, with counters, and with wake-ups instead of busy polling.

The memory has no name (memfd), and the sockets have abstract addresses. Both vanish with the last process, even after a crash.
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

COUNTER_STRIDE_BYTES = 64
"""Distance of counters: one cache line, so that ranks do not invalidate each other's counters."""


class PeerListener:
    """Socket at which other ranks of the host connect to this rank."""

    def __init__(self) -> None:
        """Listen at a free abstract address."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("")  # the kernel chooses a free abstract name
        self._listener.listen(1024)
        self.address: bytes = self._listener.getsockname()

    def connect_all(self, addresses: list[bytes], index: int, timeout_seconds: float) -> list[socket.socket | None]:
        """Connect all ranks of the host with each other. Collective.

        Args:
            addresses: The listener's address of each rank.
            index: This rank's place among them.
            timeout_seconds: Limit for each connection.

        Returns:
            A socket to each rank; None for this one.

        Raises:
            TrainingError: A process of another user listens at an address.
        """
        peers: list[socket.socket | None] = [None] * len(addresses)
        for other in range(index):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(timeout_seconds)
            peer.connect(addresses[other])
            if (user := _user_of(peer)) != os.geteuid():
                raise TrainingError(
                    f"a rank of this host is not connected: user {user} listens, expected {os.geteuid()}"
                )
            peer.sendall(struct.pack("i", index))
            peers[other] = peer
        self._listener.settimeout(timeout_seconds)
        while None in peers[index + 1 :]:
            peer = self._listener.accept()[0]
            if _user_of(peer) != os.geteuid():  # the abstract addresses are open to every user of the host
                peer.close()
                continue
            peer.settimeout(timeout_seconds)
            peers[struct.unpack("i", peer.recv(4, socket.MSG_WAITALL))[0]] = peer
        self._listener.close()
        return peers


def _user_of(peer: socket.socket) -> int:
    return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


class HostSharedMemory:
    """Memory and counters that the ranks of one host share."""

    def __init__(self, peers: list[socket.socket | None], index: int, counters: int, shared_bytes: int) -> None:
        """Create the memory, or map that of the first rank. Collective.

        Args:
            peers: A socket to each rank of the host, None for this one.
            index: This rank's place among them.
            counters: Number of counters of each rank, all 0 at first.
            shared_bytes: Size of the memory for tensors.
        """
        self.count, self.index = len(peers), index
        self._peers = {other: peer for other, peer in enumerate(peers) if peer is not None}
        head = mmap.PAGESIZE * -(-counters * self.count * COUNTER_STRIDE_BYTES // mmap.PAGESIZE)
        self._head_bytes = head
        self._memory = self._map(head + shared_bytes) if self._peers else mmap.mmap(-1, head + shared_bytes)
        words = torch.frombuffer(self._memory, dtype=torch.int64, count=head // 8).numpy()
        step = COUNTER_STRIDE_BYTES // 8
        self._counters = [words[i * self.count * step : (i + 1) * self.count * step : step] for i in range(counters)]
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._event).atexit = False
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._by_descriptor = {}
        for other, peer in self._peers.items():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
            self._by_descriptor[peer.fileno()] = other
        self.exited: set[int] = set()
        """Ranks of the host whose connection was closed."""

    def tensor(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """View a part of the memory as a tensor.

        Args:
            start: First byte.
            end: Byte after the last one.
            dtype: Element type.

        Returns:
            A tensor with a storage of its own, because DDP ignores offsets in storages.
        """
        count = (end - start) // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._head_bytes + start)

    def _map(self, size: int) -> mmap.mmap:
        """Map zero-filled memory that the first rank of the host creates."""
        if self.index == 0:
            descriptor = os.memfd_create("distrib-gradients", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            for peer in self._peers.values():
                socket.send_fds(peer, [b"m"], [descriptor])
        else:
            _, descriptors, _, _ = socket.recv_fds(self._peers[0], 1, 1)
            if not descriptors:
                raise TrainingError(
                    "the first rank of this host exited before it shared its memory",
                    hint="see that rank's log",
                    code="peer-exited",
                )
            descriptor = descriptors[0]
        mapped = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return mapped

    def set_counter(self, counter: int, value: int) -> None:
        """Set this rank's counter and wake the other ranks of the host.

        Args:
            counter: Number of the counter.
            value: Its new value.
        """
        self._counters[counter][self.index] = value
        for other, peer in self._peers.items():
            try:
                peer.send(b"!")
            except BlockingIOError:
                pass  # that rank has unread wake-ups
            except OSError:
                self.exited.add(other)

    def min_counter(self, counter: int, among: int | None = None) -> int:
        """Return the smallest value of a counter.

        Args:
            counter: Number of the counter.
            among: Number of first ranks to consider (default: all).

        Returns:
            The value of the slowest rank.
        """
        return int(self._counters[counter][:among].min())

    def wake(self) -> None:
        """End this rank's own `wait`, from another thread."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Disconnect from the other ranks, in whose `exited` this rank then appears."""
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already disconnected

    def wait(self) -> None:
        """Wait until a rank of the host sets a counter or exits, or `wake` is called."""
        for descriptor, event in self._poll.poll():
            if descriptor == self._event:
                os.eventfd_read(self._event)
                continue
            other = self._by_descriptor[descriptor]
            try:
                closed = not self._peers[other].recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                closed = True
            if closed or event & select.POLLNVAL:
                self.exited.add(other)
                self._poll.unregister(descriptor)


def kernel_identity() -> str:
    """Return an identity of this kernel and network namespace. Processes with equal identities can share memory and abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
