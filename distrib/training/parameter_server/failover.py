"""Decision to rebuild a shard that no server holds, from the parameters that workers have. No I/O, no clock.

A server without data of a shard rebuilds it only after continuous requests of workers. Every other server must have
refused them or been reported dead. The wait is longer on each further server, so that only one rebuilds the shard.
"""

from __future__ import annotations

from collections.abc import Set

CONNECT_TIMEOUT_SECONDS = 2.0
"""Time that a server has to accept a worker before the worker tries the next server."""

REBUILD_AFTER_SECONDS = 10.0
"""Duration of continuous requests before a rebuild. A server with a replica takes over far earlier, at a message of the launcher."""


class RebuildTimer:
    """Timer of continuous requests of workers for one shard that this server does not hold.

    Args:
        servers: Number of servers.
    """

    def __init__(self, servers: int) -> None:
        self.epoch = 0
        """The highest epoch that a worker knows."""
        self._repeat_seconds = CONNECT_TIMEOUT_SECONDS * (1 + servers)  # interval of a worker's requests
        self._requests: dict[int, tuple[float, Set[int]]] = {}
        self._since = 0.0

    def on_request(self, worker: int, epoch: int, silent: Set[int], now: float) -> float:
        """Record a request.

        Args:
            worker: Rank of the worker.
            epoch: The epoch that it knows.
            silent: Numbers of the servers that have not answered it since it lost the primary.
            now: Seconds of the monotonic clock.

        Returns:
            Seconds of continuous requests.
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
