"""Tells a host that vanished from one that is busy or whose packets were lost.

A process may be starved of the processor for seconds, and on a congested wire several packets in a row get lost; neither
is the end of a host. So when nothing was heard from any rank of a host for a while, its kernel is asked: connections to
ports of it are tried one after another. Accepted or refused, an answer is a sign of life.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Sequence

KNOCKS = 5
KNOCK_INTERVAL_SECONDS = 0.1
ANSWER_SECONDS = 0.6
SSH_PORT = 22


class Knocking:
    """Tries to connect to a host's address, again and again, until it answers or the time is over."""

    def __init__(self, address: str, ports: Sequence[int], now: float) -> None:
        self._address, self._ports = address, ports
        self._begun = now
        self._knocks = 0
        self._sockets: list[socket.socket] = []

    def answered(self, now: float) -> bool | None:
        """True once the host has answered, False when it did not in time, None while that is open."""
        if self._knocks < KNOCKS and now - self._begun >= self._knocks * KNOCK_INTERVAL_SECONDS:
            target = (self._address, self._ports[self._knocks % len(self._ports)])
            self._knocks += 1
            sock = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
            sock.setblocking(False)
            if self._is_answer(sock, sock.connect_ex(target)):
                return True
        poll = select.poll()
        for sock in self._sockets:
            poll.register(sock, select.POLLOUT)
        for descriptor, _ in poll.poll(0):
            sock = next(s for s in self._sockets if s.fileno() == descriptor)
            self._sockets.remove(sock)
            if self._is_answer(sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                return True
        return False if now - self._begun > ANSWER_SECONDS else None

    def _is_answer(self, sock: socket.socket, number: int) -> bool:
        """Whether the host said this; keeps a socket that waits. A way that the kernel knows to lead nowhere is no answer."""
        if number == errno.EINPROGRESS:
            self._sockets.append(sock)
            return False
        sock.close()
        return number in (0, errno.ECONNREFUSED)

    def stop(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.close()


class Liveness:
    """Which hosts are still there. Call `heard` for every sign of life and `vanished` a few times a second."""

    def __init__(self, silence_seconds: float) -> None:
        self.silence_seconds = silence_seconds
        self._heard: dict[str, float] = {}
        self._where: dict[str, tuple[str, Sequence[int]]] = {}
        self._knocking: dict[str, Knocking] = {}

    def watch(self, host: str, address: str, ssh_port: int | None, *others: int) -> None:
        """Begin to watch a host, which can be reached at `address`; an answer of one of its ports is enough."""
        self._where[host] = (address, (ssh_port or SSH_PORT, *others))
        self.heard(host)

    def heard(self, host: str) -> None:
        """There was a sign of life; of a host that is not watched it counts for nothing."""
        if host not in self._where:
            return
        self._heard[host] = time.monotonic()
        if knocking := self._knocking.pop(host, None):
            knocking.stop()

    def vanished(self) -> list[str]:
        """Hosts that were silent for too long and did not answer; each is named once."""
        now = time.monotonic()
        gone = []
        for host, last in list(self._heard.items()):
            if now - last <= self.silence_seconds:
                continue
            knocking = self._knocking.setdefault(host, Knocking(*self._where[host], now))
            answer = knocking.answered(now)
            if answer:
                self.heard(host)
            elif answer is False:
                gone.append(host)
                self.forget(host)
        return gone

    def forget(self, host: str) -> None:
        """Stop watching a host."""
        self._heard.pop(host, None)
        self._where.pop(host, None)
        if knocking := self._knocking.pop(host, None):
            knocking.stop()
