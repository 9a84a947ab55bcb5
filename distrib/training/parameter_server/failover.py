"""Timeouts of the failover, and the decision to rebuild a shard from the parameters that workers have. No I/O, no clock.

A server without data of a shard rebuilds it only after continuous requests of workers. Every other server must have
refused them or been reported dead. The wait is longer on each further server, so that only one rebuilds the shard.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec


class FailoverTimeouts(msgspec.Struct, frozen=True):
    """Times of workers and servers after a connection is lost, in ascending order, in seconds."""

    tick_seconds: float = 0.2
    """Interval in which a worker or server compares the other times."""
    away_seconds: float = 0.5
    """Time that a host group waits for a worker in another operation. A barrier of workers in the same step takes less."""
    connect_seconds: float = 2.0
    """Time that a server has to accept a worker before the worker tries the next server."""
    report_away_seconds: float = 4.0
    """Time without a server after which a worker reports to the other servers that they must not wait for it."""
    reconnect_seconds: float = 5.0
    """Time that workers wait for a worker whose connection is lost, and that a primary looks for its first replica."""
    rebuild_seconds: float = 10.0
    """Duration of continuous requests before a rebuild. A server with a replica takes over earlier, at a message of the launcher."""
    warn_seconds: float = 15.0
    """Time without a server after which the main rank prints a warning."""
    replica_seconds: float = 30.0
    """Time without its replica after which a primary that reaches few workers exits: longer than a network switch takes to restart.
    One that reaches most workers waits three times as long, and the higher number of two servers 30 s more, so that only one exits."""
    give_up_seconds: float = 120.0
    """Time without a server after which a worker fails: a server that is restarted returns far earlier."""
    first_connect_seconds: float = 1800.0
    """Time that workers wait for a worker that has never connected: it may read its data first. Deaths are reported earlier."""


DEFAULT_TIMEOUTS = FailoverTimeouts()


class RebuildTimer:
    """Timer of continuous requests of workers for one shard that this server does not hold.

    Args:
        connect_seconds: Time after which a worker tries the next server.
    """

    def __init__(self, servers: int, connect_seconds: float) -> None:
        self.epoch = 0
        """The highest epoch that a worker knows."""
        self._repeat_seconds = connect_seconds * (1 + servers)  # interval of a worker's requests
        self._requests: dict[int, tuple[float, Set[int]]] = {}
        self._since = 0.0

    def on_request(self, worker: int, epoch: int, silent: Set[int], now: float) -> float:
        """Record a request, and return the seconds of continuous requests.

        Args:
            worker: Rank of the worker.
            epoch: The epoch that it knows.
            silent: Numbers of the servers that have not answered it since it lost the primary.
            now: Seconds of the monotonic clock.
        """
        self._requests = {w: r for w, r in self._requests.items() if now - r[0] <= self._repeat_seconds}
        if not self._requests:
            self._since = now
        self._requests[worker] = now, silent
        self.epoch = max(self.epoch, epoch)
        return now - self._since

    @property
    def silent(self) -> set[int]:
        """Servers that have not answered a requesting worker. One of them may be the primary."""
        return set().union(*(silent for _, silent in self._requests.values()))
