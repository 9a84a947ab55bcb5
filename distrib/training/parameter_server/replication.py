"""Replication of a shard: the primary sends its log to a replica on another server, and waits for acknowledgements.

A primary replies to a push only after its replica has acknowledged every update that the reply may show. While the replica is
unreachable the primary replies to no push. It resumes when the replica is reachable again, or continues without one when the
launcher reports that server dead. The replica becomes primary when the launcher reports the primary dead. A server that the
launcher has reported dead does not come back with its old state, so at most one server is primary, with every acknowledged
update.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from distrib.training.parameter_server.membership import RECONNECT_TIMEOUT_SECONDS, Membership
from distrib.training.parameter_server.server_collectives import StoredResults
from distrib.training.parameter_server.server_table import ServerTable, TableDescription
from distrib.training.parameter_server.transport import (
    APPLIED,
    FINAL,
    MORE,
    SHARED,
    Connection,
    EventLoop,
    Frame,
    FrameKind,
    decode,
    encode,
)
from distrib.training.parameter_server.update_rules import ApplyUpdate, Effect
from distrib.utils.framing import HANDSHAKE_TIMEOUT_SECONDS, ProtocolError

if TYPE_CHECKING:
    from distrib.training.parameter_server.shard_service import ShardService

REPLICA_TIMEOUT_SECONDS = 30.0
"""Time after which a primary exits if the launcher reaches its replica and it does not: longer than a switch takes to restart."""


class ReplicationSource:
    """The primary's side: sends all changes of a shard to its replica.

    Args:
        tables: The tables of the shard by number.
        retired: Numbers of the tables that are trained no more.
        results: Stored results of the main rank.
        membership: The workers of the shard.
    """

    def __init__(
        self, tables: dict[int, ServerTable], retired: set[int], results: StoredResults, membership: Membership
    ) -> None:
        self._tables, self._retired, self._results, self._membership = tables, retired, results, membership
        self.replica: Connection | None = None
        self.required = False
        """True if replies must wait until a replica is connected."""
        self.run: Callable[[ServerTable, list[Effect]], None] = lambda table, effects: None
        """Carries out effects of a table's update controller."""

    def require(self) -> None:
        """Hold back replies until there is a replica, or until `continue_without`."""
        self.required, self.replica = True, None
        for table in self._tables.values():
            if table.controller.replicated_to is None:
                table.controller.set_replicated(table.controller.index)

    def continue_without(self) -> None:
        """Continue without a replica: send all replies that wait for one."""
        self.required, self.replica = False, None
        for table in self._tables.values():
            self.run(table, table.controller.set_replicated(None))

    def attach(self, replica: Connection) -> None:
        """Send the shard to a replica, and all changes from now on.

        Args:
            replica: The connection to the server that stores it.
        """
        self.required, self.replica = False, replica
        for number in self._retired:
            self.send_retired(number)
        for table in self._tables.values():
            self.add_table(table)
        for number in self._results.pieces:
            self.send_result(number)
        self.send_members()

    def add_table(self, table: ServerTable) -> None:
        """Send a table to the replica, if there is one.

        Args:
            table: The table, new or from before the replica.
        """
        controller = table.controller
        if self.replica is None:
            self.run(table, controller.set_replicated(-1 if self.required else None))
            return
        state = controller.state()
        about = {"description": msgspec.to_builtins(table.description), "controller": state}
        self.replica.send(Frame(FrameKind.STATE, MORE, table.number), encode(about))
        for chunk in table.optimizers:
            self.send_chunk(table, chunk)
        # Requests an acknowledgement of all of it.
        self.replica.send(Frame(FrameKind.STATE, APPLIED, table.number, step=state["index"]))
        replicated = -1 if controller.replicated_to is None else controller.replicated_to
        controller.set_replicated(min(replicated, state["index"]))

    def send_chunk(self, table: ServerTable, chunk: int) -> None:
        """Send a chunk's value and optimizer state.

        Args:
            table: The table.
            chunk: Number of the chunk.
        """
        if self.replica:
            self.replica.send(Frame(FrameKind.STATE, 0, table.number, chunk), table.serialize(chunk))

    def send_result(self, number: int) -> None:
        """Send a stored result.

        Args:
            number: Number of the result.
        """
        if self.replica:
            for chunk, piece in enumerate(pieces := self._results.pieces[number]):
                frame = Frame(FrameKind.STATE, SHARED, chunk=chunk, version=number, weight=len(pieces))
                self.replica.send(frame, piece)

    def send_members(self) -> None:
        """Send the members and their host groups."""
        if self.replica:
            groups = [[worker, group] for worker, group in self._membership.groups.items()]
            about = {"members": sorted(self._membership.members), "groups": groups}
            self.replica.send(Frame(FrameKind.STATE, FINAL), encode(about))

    def send_retired(self, number: int) -> None:
        """Send that a table is trained no more.

        Args:
            number: Number of the table.
        """
        if self.replica:
            self.replica.send(Frame(FrameKind.RETIRE, table=number))

    def log(
        self,
        table: ServerTable,
        entry: ApplyUpdate,
        gradient: Any,
        options: dict[str, Any],
        memory: torch.Tensor | None,
    ) -> None:
        """Send an update, and release its memory when it is sent.

        Args:
            table: The table.
            entry: The update.
            gradient: Bytes of the gradient that was applied; empty if none was.
            options: Optimizer settings that it was applied with.
            memory: Memory of the gradient to give back; None if there is none.
        """
        if self.replica is None:
            table.give_back(memory)
            return
        about = {"updates": [[update.worker, update.step] for update in entry.updates], "options": options}
        frame = Frame(FrameKind.LOG, MORE, table.number, entry.chunk, entry.entry, entry.version)
        self.replica.send(frame, encode(about))
        self.replica.send(frame._replace(flags=0), gradient, on_sent=lambda: table.give_back(memory))

    def on_acknowledged(self, frame: Frame) -> None:
        """Send the replies that waited for an acknowledgement of the replica.

        Args:
            frame: The header of the acknowledgement.
        """
        if table := self._tables.get(frame.table):
            self.run(table, table.controller.set_replicated(frame.step))


class ReplicationTarget:
    """Replica's side of the replication: applies the messages of the primary.

    Args:
        service: The service of the shard on this server.
        primary: Number of the primary server.
    """

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
        elif frame.kind is FrameKind.LOG and frame.flags & MORE:
            self._log = decode(payload)
        elif frame.kind is FrameKind.LOG and self._log:
            self._apply(frame, payload, self._log)
            primary.send(Frame(FrameKind.LOG_ACK, table=frame.table, step=frame.step))
        elif frame.kind is FrameKind.STATE and frame.flags & FINAL:
            about = decode(payload)
            service.membership.members = set(about["members"])
            service.membership.groups = dict(about["groups"])
        elif frame.kind is FrameKind.STATE and frame.flags & SHARED:
            service.results.store(None, frame, payload)
        elif frame.kind is FrameKind.STATE and frame.flags & MORE:
            about = decode(payload)
            description = msgspec.convert(about["description"], TableDescription)
            table = ServerTable(frame.table, description, service.shard, (), service.strategy, service.pool)
            table.controller.restore(about["controller"])
            service.tables[frame.table] = table
        elif frame.kind is FrameKind.STATE and frame.flags & APPLIED:
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
        service: The service of the shard.
        number: Number of this server.
        addresses: Host and port of every server.
        key: The key of the job.
        loop: The event loop of the server.
        dead: Numbers of the servers that the launcher has reported dead, kept up to date by the server.
        on_replaced: Called with the epoch of another server that is primary of the shard now.
    """

    def __init__(
        self, service: ShardService, number: int, addresses: list[tuple[str, int]], key: bytes, loop: EventLoop,
        dead: set[int], on_replaced: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.service = service
        self._number, self._addresses, self._key, self._loop = number, addresses, key, loop
        self._dead, self._on_replaced = dead, on_replaced
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
        """Connect to a candidate, and stop waiting for a first replica after `RECONNECT_TIMEOUT_SECONDS`.

        Args:
            now: Seconds of the monotonic clock.
        """
        connection = self._connection
        timed_out = connection and not connection.proven and now - connection.opened > HANDSHAKE_TIMEOUT_SECONDS
        if not self.service.is_primary or timed_out:
            self.close()
        elif connection is None:
            self._connect()
        unreachable_seconds = now - self._since if self.service.replication.required else 0.0
        if self._replica is None and unreachable_seconds > RECONNECT_TIMEOUT_SECONDS:
            self.service.replication.continue_without()
        elif unreachable_seconds > REPLICA_TIMEOUT_SECONDS * (1 + self._number):  # not two servers at once
            raise SystemExit(
                f"distrib: parameter server {self._number}: its replica on server {self._replica} was unreachable for "
                f"{unreachable_seconds:.0f} s; exits, so that the replica takes over"
            )

    def on_server_died(self, number: int) -> bool:
        """Continue without the replica if it was on a server that has died.

        Args:
            number: Number of the server that the launcher has reported dead.

        Returns:
            True if the replica was there.
        """
        if number != self._replica or not self.service.is_primary:
            return False
        self.close()
        self._replica = None
        self.service.replication.continue_without()
        return True

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        if self._connection:
            try:
                self._connection.flush()
                self._loop.watch(self._connection.sock, self._on_events, writing=self._connection.has_unsent)
            except OSError:
                self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection:
            self._loop.unwatch(self._connection.sock)
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
        address = self._addresses[self._connecting_to]
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        sock.setblocking(False)
        sock.connect_ex(address)
        self._connection = Connection(sock, self._key, listener=False, allocate=lambda _: None, on_frame=self._on_frame)
        hello = {"shard": self.service.shard, "epoch": self.service.epoch, "server": self._number}
        self._connection.send(Frame(FrameKind.HELLO), encode(hello), priority=-2, on_sent=self._on_connected)
        self._loop.watch(sock, self._on_events, writing=True)

    def _on_connected(self) -> None:
        assert self._connection
        self._replica = self._connecting_to
        self.service.replication.attach(self._connection)

    def _on_frame(self, frame: Frame, payload: Any) -> None:
        if frame.kind is FrameKind.LOG_ACK:
            self.service.replication.on_acknowledged(frame)
        elif frame.kind is FrameKind.REFUSED and frame.version > self.service.epoch:
            self._on_replaced(frame.version)

    def _on_events(self, events: int) -> None:
        assert self._connection
        try:
            if events & selectors.EVENT_READ:
                self._connection.read()
            if self._connection:
                self._connection.flush()
        except (OSError, ProtocolError):
            self.close()
        self.flush()
