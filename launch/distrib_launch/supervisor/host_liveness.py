"""Liveness of the hosts: distinguish a lost host from one that is busy or whose packets were dropped.

A process may get no CPU for seconds, and a congested network drops several packets in a row. So the launcher probes a silent host: it
tries to connect to the host's ports. The host's kernel accepts or refuses the connection; both are signs of life.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Sequence

import msgspec


class LivenessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times after which a host counts as lost, in seconds."""

    silence_seconds: float = 1.8
    """Silence of a host after which it is probed, without `--host-timeout`."""
    async_silence_seconds: float = 30.0
    """The same in mode async, in which the job continues and the workers of the host may rejoin."""
    probe_attempts: int = 5
    """Number of connections that one probe tries."""
    probe_interval_seconds: float = 0.1
    """Time between two of these attempts."""
    probe_timeout_seconds: float = 0.6
    """Time for a reply; the kernel repeats a lost SYN after a second, so several attempts are made instead."""


LIVENESS = LivenessSettings()


class HostProbe:
    """Probe of one host: tries to connect until the host answers or the time is over."""

    def __init__(self, address: str, ports: Sequence[int], now: float) -> None:
        self._address, self._ports, self._begun = address, ports, now
        self._attempts = 0
        self._sockets: list[socket.socket] = []

    def poll(self, now: float) -> bool | None:
        """Continue the probe.

        Args:
            now: Monotonic time.

        Returns:
            True if the host answered, False if it did not in time, None while the probe runs.
        """
        if (
            self._attempts < LIVENESS.probe_attempts
            and now - self._begun >= self._attempts * LIVENESS.probe_interval_seconds
        ):
            target = (self._address, self._ports[self._attempts % len(self._ports)])
            self._attempts += 1
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
        return False if now - self._begun > LIVENESS.probe_timeout_seconds else None

    def _is_answer(self, sock: socket.socket, number: int) -> bool:
        """Return True if the host itself answered, not a router. Keep a socket that still waits."""
        if number == errno.EINPROGRESS:
            self._sockets.append(sock)
            return False
        sock.close()
        return number in (0, errno.ECONNREFUSED)

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.close()


class HostLiveness:
    """Liveness of all watched hosts."""

    def __init__(self, silence_seconds: float) -> None:
        self.silence_seconds = silence_seconds
        self._last_seen: dict[str, float] = {}
        self._targets: dict[str, tuple[str, Sequence[int]]] = {}
        self._probes: dict[str, HostProbe] = {}

    def watch(self, host: str, address: str, ssh_port: int | None, *ports: int) -> None:
        """Begin to watch a host.

        Args:
            host: Its name.
            address: Address at which it is probed.
            ssh_port: Port of its sshd, None for 22.
            ports: Further ports; an answer of one is enough.
        """
        self._targets[host] = (address, (ssh_port or 22, *ports))
        self.on_life(host)

    def on_life(self, host: str) -> None:
        """Note a sign of life of a host; one that is not watched is ignored.

        Args:
            host: Its name.
        """
        if host not in self._targets:
            return
        self._last_seen[host] = time.monotonic()
        if probe := self._probes.pop(host, None):
            probe.close()

    def take_lost_hosts(self) -> list[str]:
        """Return hosts that were silent and did not answer the probe, each once. Call several times a second."""
        now = time.monotonic()
        found = []
        for host, last in list(self._last_seen.items()):
            if now - last <= self.silence_seconds:
                continue
            probe = self._probes.setdefault(host, HostProbe(*self._targets[host], now))
            alive = probe.poll(now)
            if alive:
                self.on_life(host)
            elif alive is False:
                found.append(host)
                self._forget(host)
        return found

    def _forget(self, host: str) -> None:
        del self._last_seen[host], self._targets[host]
        self._probes.pop(host).close()
