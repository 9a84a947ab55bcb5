"""Replica of a shard on another server: the primary's connection to it, and its handler of the primary's messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.failover import FailoverTimeouts
from distrib.training.parameter_server.server_table import ServerTable, TableDescription
from distrib.training.parameter_server.shard_service import ShardService
from distrib.training.parameter_server.transport import (
    Connection,
    Frame,
    FrameFlag,
    FrameKind,
    decode,
    encode,
    start_connecting,
)


class ReplicationTarget:
    """Replica's side of the replication: applies the messages of the primary."""

    def __init__(self, service: ShardService, primary: int) -> None:
        self.service, self.primary = service, primary
        self._log: dict[str, Any] | None = None  # the first half of an entry

    def on_frame(self, frame: Frame, payload: Any, primary: Connection) -> None:
        """Apply a frame of the primary.

        Args:
            frame: Its header.
            payload: Its payload.
            primary: The connection to acknowledge on.
        """
        service = self.service
        if frame.kind is FrameKind.RETIRE:
            service.tables.pop(frame.table, None)
            service.retired.add(frame.table)
        elif frame.kind is FrameKind.LOG and frame.flags & FrameFlag.MORE:
            self._log = decode(payload)
        elif frame.kind is FrameKind.LOG and self._log:
            self._apply(frame, payload, self._log)
            primary.send(Frame(FrameKind.LOG_ACK, table=frame.table, step=frame.step))
        elif frame.kind is FrameKind.STATE and frame.flags & FrameFlag.FINAL:
            about = decode(payload)
            service.membership.members = set(about["members"])
            service.membership.groups = dict(about["groups"])
        elif frame.kind is FrameKind.STATE and frame.flags & FrameFlag.SHARED:
            service.results.store(None, frame, payload)
        elif frame.kind is FrameKind.STATE and frame.flags & FrameFlag.MORE:
            about = decode(payload)
            description = msgspec.convert(about["description"], TableDescription)
            table = ServerTable(frame.table, description, service.shard, (), service.strategy, service.pool)
            table.controller.restore(about["controller"])
            service.tables[frame.table] = table
        elif frame.kind is FrameKind.STATE and frame.flags & FrameFlag.APPLIED:
            primary.send(Frame(FrameKind.LOG_ACK, table=frame.table, step=frame.step))
        elif frame.kind is FrameKind.STATE:
            service.tables[frame.table].deserialize(frame.chunk, payload)

    def _apply(self, frame: Frame, payload: Any, about: dict[str, Any]) -> None:
        table = self.service.tables[frame.table]
        updates = [(worker, step) for worker, step in about["updates"]]
        if table.controller.follow(frame.chunk, updates, frame.version, frame.step) and len(payload):
            target = table.optimizers[frame.chunk].value
            gradient = torch.frombuffer(payload, dtype=target.dtype).view(target.shape)
            table.apply(frame.chunk, gradient, about["options"])


class ReplicaLink:
    """A primary's connection to the server that stores its replica. It looks for one as long as there is none.

    Args:
        dead: Numbers of the servers that the launcher has reported dead, kept up to date by the server.
        on_replaced: Called with the epoch of another server that is primary of the shard now.
    """

    def __init__(
        self, service: ShardService, number: int, workers: int, addresses: list[tuple[str, int]], key: bytes, loop: EventLoop,
        dead: set[int], timeouts: FailoverTimeouts, on_replaced: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.service = service
        self._number, self._workers, self.addresses, self._key, self._loop = number, workers, addresses, key, loop
        self._dead, self._timeouts, self._on_replaced = dead, timeouts, on_replaced
        self._candidates = [(number + n) % len(addresses) for n in range(1, len(addresses))]
        # Servers on other hosts first. The shard's first server is last, as it has died if this one is primary.
        host = addresses[number][0]
        self._candidates.sort(key=lambda other: (addresses[other][0] == host, other == service.shard))
        self._replica: int | None = None  # the server that may have a replica, until the launcher reports it dead
        self._connecting_to = number
        self._connection: Connection | None = None
        self._since = time.monotonic()
        self._tries = 0

    def tick(self, now: float) -> None:
        """Connect to a candidate, and stop waiting for a first replica after `reconnect_seconds`.

        Args:
            now: Seconds of the monotonic clock.
        """
        replication = self.service.replication
        if not self.service.is_primary:
            self.close()
        elif self._connection is None:
            self._connect()
        unreachable_seconds = now - self._since if replication.required else 0.0
        if self._replica is None and unreachable_seconds > self._timeouts.reconnect_seconds:
            replication.continue_without()
        elif self._replica is not None and unreachable_seconds > self._patience_seconds(self._replica):
            raise SystemExit(
                f"distrib: parameter server {self._number}: its replica on server {self._replica} was unreachable for "
                f"{unreachable_seconds:.0f} s; exits, so that the replica takes over"
            )

    def _patience_seconds(self, replica: int) -> float:
        """Return the time after which this server exits. Of two servers, the one that reaches fewer workers exits first."""
        reaches_workers = 2 * len(self.service.membership.connections) >= self._workers
        return self._timeouts.replica_seconds * (1 + 2 * reaches_workers + (self._number > replica))

    def on_server_died(self, number: int) -> bool:
        """Continue without the replica, and return True, if it was on a server that has died.

        Args:
            number: Number of the server that the launcher has reported dead.
        """
        if number != self._replica or not self.service.is_primary:
            return False
        self.close()
        self._replica = None
        self.service.replication.continue_without()
        return True

    def close(self) -> None:
        """Close the connection. The next tick connects again."""
        if self._connection:
            self._connection.close()
            self._connection = None
            if self.service.replication.replica:
                self.service.replication.require()
                self._since = time.monotonic()

    def _connect(self) -> None:
        candidates = [other for other in self._candidates if other not in self._dead]
        if self._replica is not None:
            candidates = [self._replica]  # no other server may become primary while this one has a replica
        if not candidates:
            return
        self._connecting_to = candidates[self._tries % len(candidates)]
        self._tries += 1
        sock = start_connecting(self.addresses[self._connecting_to])
        self._connection = Connection(
            self._loop, sock, self._key, listener=False, on_frame=self._on_frame, on_closed=self.close
        )
        hello = {"shard": self.service.shard, "epoch": self.service.epoch, "server": self._number}
        self._connection.send(Frame(FrameKind.HELLO), encode(hello), priority=-2, on_sent=self._on_connected)

    def _on_connected(self) -> None:
        assert self._connection
        self._replica = self._connecting_to
        self.service.replication.attach(self._connection)

    def _on_frame(self, frame: Frame, payload: Any) -> None:
        if frame.kind is FrameKind.LOG_ACK:
            self.service.replication.on_acknowledged(frame)
        elif frame.kind is FrameKind.REFUSED and frame.version > self.service.epoch:
            self._on_replaced(frame.version)
