"""Host leader: averages the gradients of all workers of this host, pushes the mean to the servers and distributes the replies."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from distrib.training.parameter_server.chunk_buffers import ChunkBuffer, InFlightPush
from distrib.training.parameter_server.host_aggregation.aggregator import (
    CommitMean,
    HostAggregator,
    LeaderAction,
    PushMean,
)
from distrib.training.parameter_server.host_aggregation.host_group import HostGroup, HostTable
from distrib.training.parameter_server.server_connections import ServerConnections
from distrib.training.parameter_server.shared_memory import MappedArena
from distrib.training.parameter_server.transport import Connection, Frame, FrameFlag, FrameKind, decode, encode
from distrib.training.parameter_server.update_rules import PushReply, WeightedGradient


class HostLeader(HostGroup):
    """Host leader: averages the gradients of all workers of its host, pushes the mean and distributes the replies."""

    is_leader = True

    def __init__(
        self,
        client: ServerConnections,
        push_id: int,
        listener: socket.socket,
        members: Iterable[int],
        *,
        synchronous: bool,
    ) -> None:
        super().__init__(client, push_id, synchronous=synchronous)
        self._listener = listener
        self._members = set(members)
        self._aggregators: dict[int, HostAggregator] = {}
        self._buffers: dict[int, dict[int, ChunkBuffer]] = {}  # send buffers of the mean
        self._connections: dict[int, Connection] = {}
        self._memory: dict[tuple[int, int], MappedArena] = {}  # memory of the members, by worker and table
        self.early_frames: list[
            tuple[Connection, Frame, Any]
        ] = []  # frames of tables that this worker does not have yet
        self._retired: set[int] = set()
        self._away: dict[int, float] = {}  # workers that wait in another operation, with the start time
        self._connect_deadline = float("inf")
        self._drained: Future[None] | None = None

    def begin(self) -> None:
        self._connect_deadline = time.monotonic() + self.client.timeouts.reconnect_seconds
        self.client.loop.watch(self._listener, self._accept)

    def tick(self, now: float) -> None:
        """Remove members that have not connected in time, and exclude members that block a round while they wait in another operation.

        Args:
            now: Seconds of the monotonic clock.
        """
        if now > self._connect_deadline:
            self._connect_deadline = float("inf")
            for worker in self._members - self._connections.keys() - {self.client.rank}:
                self._remove_member(worker)
        for worker in [
            worker for worker, since in self._away.items() if now - since > self.client.timeouts.away_seconds
        ]:
            if any(aggregator.is_blocked_by(worker) for aggregator in self._aggregators.values()):
                self._exclude(worker)

    def close(self) -> None:
        self.client.loop.unwatch(self._listener)
        self._listener.close()
        for connection in self._connections.values():
            connection.close()

    def _forget_table(self, table: int) -> None:
        self._aggregators.pop(table, None)
        self._buffers.pop(table, None)
        self._memory = {key: memory for key, memory in self._memory.items() if key[1] != table}
        self._retired.add(table)

    def _restart(self, table: int, step: int) -> None:
        self._members = {self.client.rank}
        self._run(table, self._aggregators[table].restart(self.client.rank, step))
        for connection in self._connections.values():
            connection.send(Frame(FrameKind.EXCLUDED))

    def wait_for_members(self) -> None:
        drained: Future[None] = Future()

        def drain() -> None:
            self._drained = drained
            self._exclude(self.client.rank)
            self._check_drained()

        self.client.loop.call_soon(drain)
        self.client.result(drained)

    def _check_drained(self) -> None:
        if self._drained and not self._connections and not self._drained.done():
            self._drained.set_result(None)

    # -- this worker's own part ----------------------------------------------------------------------------------------

    def _add_table(self, number: int, table: HostTable) -> None:
        # All workers begin a table together, also those that were excluded before.
        self._members |= self._connections.keys() | {self.client.rank}
        self._tables[number] = table
        self._aggregators[number] = HostAggregator(table.sizes, self._members)
        buffers, arenas = table.create_server_buffers()
        for own in table.buffers:
            buffer = buffers[own.chunk]
            buffer.version = own.version
            buffer.value.copy_(own.value)
            buffer.on_reply = self._on_server_reply
        self._buffers[number] = buffers
        self.client.offer_memory(number, arenas)
        waiting, self.early_frames = self.early_frames, []
        for connection, frame, payload in waiting:
            if self._connections.get(connection.peer) is connection:  # it may have died meanwhile
                self._on_frame(connection, frame, payload)

    def _announce_wait(self) -> None:
        self._away[self.client.rank] = time.monotonic()

    def _end_wait(self) -> None:
        self._away.pop(self.client.rank, None)

    def _join(self, table: int, future: Future[int]) -> None:
        future.set_result(self._add_member(self.client.rank, table))

    def _push(self, push: InFlightPush) -> None:
        buffer = push.buffer
        self._on_push(
            self.client.rank,
            buffer.table,
            buffer.chunk,
            push.step,
            buffer.gradient,
            final=push.final,
            weight=push.weight,
        )

    def _commit(self, table: int, step: int, chunks: list[int]) -> None:
        self._run(table, self._aggregators[table].commit(self.client.rank, step, chunks))

    # -- any worker of the host ----------------------------------------------------------------------------------------

    def _on_push(
        self, worker: int, table: int, chunk: int, step: int, gradient: torch.Tensor, *, final: bool, weight: int
    ) -> None:
        self._away.pop(worker, None)
        actions = self._aggregators[table].push(worker, chunk, step, gradient, final=final, weight=weight)
        self._run(table, actions)

    def _add_member(self, worker: int, table: int) -> int:
        self._members.add(worker)
        last, actions = self._aggregators[table].join(worker)
        self._run(table, actions)
        return last

    def _remove_member(self, worker: int, *, keep_pending: bool = False) -> None:
        self._members.discard(worker)
        self._away.pop(worker, None)
        for table, aggregator in self._aggregators.items():
            self._run(table, aggregator.remove_member(worker, keep_pending=keep_pending))

    def _exclude(self, worker: int) -> None:
        self._remove_member(worker, keep_pending=True)
        if worker == self.client.rank:
            self._excluded.update(self._tables)
        elif connection := self._connections.get(worker):
            connection.send(Frame(FrameKind.EXCLUDED))

    # -- connections of the members ------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        connection = Connection(
            self.client.loop, sock, self.client.key, listener=True, on_closed=lambda: self._on_closed(connection),
            on_frame=lambda frame, payload: self._on_frame(connection, frame, payload),
        )  # fmt: skip

    def _on_frame(self, connection: Connection, frame: Frame, payload: Any) -> None:
        worker, table = connection.peer, frame.table
        if frame.kind is FrameKind.HELLO:
            connection.peer = worker = decode(payload)
            self._connections[worker] = connection
            connection.send(Frame(FrameKind.WELCOME), encode(worker in self._members))
        elif frame.kind is FrameKind.SUSPEND:
            self._away[worker] = time.monotonic()
        elif frame.kind is FrameKind.RESUME:
            self._away.pop(worker, None)
        elif table in self._retired:
            return
        elif table not in self._aggregators:
            self.early_frames.append((connection, frame, payload))
        elif frame.kind is FrameKind.SHARE_MEMORY:
            try:
                self._memory[worker, table] = MappedArena(decode(payload), self._tables[table].sizes)
            except (FileNotFoundError, ProcessLookupError):  # it has died meanwhile
                connection.close()
                self._on_closed(connection)
                return
            if worker not in self._members:  # it was excluded before it had this table
                connection.send(Frame(FrameKind.EXCLUDED))
        elif frame.kind is FrameKind.PUSH:
            dtype = self._buffers[table][frame.chunk].gradient.dtype
            gradient = self._memory[worker, table].gradients[frame.chunk].view(dtype)
            final = bool(frame.flags & FrameFlag.FINAL)
            self._on_push(worker, table, frame.chunk, frame.step, gradient, final=final, weight=frame.weight)
        elif frame.kind is FrameKind.COMMIT:
            self._run(table, self._aggregators[table].commit(worker, frame.step, decode(payload)))
        elif frame.kind is FrameKind.JOIN:
            last = self._add_member(worker, table)
            connection.send(Frame(FrameKind.DONE, table=table, step=frame.step, version=last))

    def _on_closed(self, connection: Connection) -> None:
        self.early_frames = [entry for entry in self.early_frames if entry[0] is not connection]
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._memory = {key: memory for key, memory in self._memory.items() if key[0] != connection.peer}
            self._remove_member(connection.peer)
            self._check_drained()

    # -- the servers ---------------------------------------------------------------------------------------------------

    def _on_server_reply(self, buffer: ChunkBuffer, applied: bool) -> None:
        self._run(buffer.table, self._aggregators[buffer.table].on_reply(buffer.chunk, applied=applied))

    def _run(self, table: int, actions: Iterable[LeaderAction]) -> None:
        committed: dict[int, list[ChunkBuffer]] = {}
        for action in actions:
            buffer = self._buffers[table][action.chunk]
            if isinstance(action, PushMean):
                _average(action.updates, buffer.gradient)
                weight = sum(update.weight for update in action.updates)
                self.client.send_push(buffer, action.step, final=action.final, weight=weight)
            elif isinstance(action, CommitMean):
                committed.setdefault(action.step, []).append(buffer)
            else:
                self._reply(buffer, action)
        for step, buffers in committed.items():
            self.client.send_commit(buffers, step)

    def _reply(self, buffer: ChunkBuffer, reply: PushReply) -> None:
        if reply.worker == self.client.rank:
            if push := self._pushes.get((buffer.table, buffer.chunk)):
                push.buffer.value.copy_(buffer.value)
            self._on_push_reply(buffer.table, buffer.chunk, reply.step, buffer.version, reply.applied)
        elif (memory := self._memory.get((reply.worker, buffer.table))) is not None:
            memory.values[buffer.chunk].view(buffer.value.dtype).copy_(buffer.value)
            flags = FrameFlag.SHARED | (FrameFlag.APPLIED if reply.applied else 0)
            frame = Frame(FrameKind.VALUE, flags, buffer.table, buffer.chunk, reply.step, buffer.version)
            self._connections[reply.worker].send(frame)


def _average(updates: Sequence[WeightedGradient], target: torch.Tensor) -> None:
    """Write the mean of the gradients with a weight; half precision is summed in single."""
    first, *others = [update.gradient for update in updates if update.weight] or [updates[0].gradient]
    if others:
        first = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for gradient in others:
            first.add_(gradient)
        first.div_(1 + len(others))
    target.copy_(first)
