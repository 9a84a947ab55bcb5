"""Requests of workers to the tables of a shard: pushes, pulls, values and optimizer state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from distrib.errors import DistribError
from distrib.training.parameter_server.membership import Membership
from distrib.training.parameter_server.replication import ReplicationSource
from distrib.training.parameter_server.server_collectives import AllGatherRounds
from distrib.training.parameter_server.server_table import BufferPool, ServerTable
from distrib.training.parameter_server.shared_memory import MappedArena
from distrib.training.parameter_server.transport import (
    Connection,
    Frame,
    FrameFlag,
    FrameKind,
    decode,
    encode,
)
from distrib.training.parameter_server.update_rules import ApplyUpdate, Effect, PushReply


class TableRequests:
    """Handler of requests to the tables of one shard. Carries out the effects that their update controllers return."""

    def __init__(
        self, tables: dict[int, ServerTable], membership: Membership, rounds: AllGatherRounds,
        replication: ReplicationSource, pool: BufferPool,
    ) -> None:  # fmt: skip
        self._tables, self._membership, self._rounds = tables, membership, rounds
        self._replication, self._pool = replication, pool
        self._pushers: dict[int, int] = {}  # by push id, the worker that pushed last
        self._pulls: dict[tuple[int, int], list[tuple[int, Frame]]] = {}  # by table and chunk, until it has a value
        self._memory: dict[tuple[int, int], MappedArena] = {}  # memory of workers on this host, by worker and table

    def handle(self, worker: int, frame: Frame, payload: Any) -> None:
        """Handle a request to a table.

        Args:
            worker: Rank of the worker.
            frame: Its header.
            payload: Its payload; for a PUSH the gradient, as a tensor.

        Raises:
            DistribError: The request is invalid.
        """
        if (handler := _HANDLERS.get(frame.kind)) is None:
            raise DistribError(f"unexpected frame {frame.kind.name} from a worker")
        if (table := self._tables.get(frame.table)) is None:
            raise DistribError(f"{frame.kind.name} for table {frame.table}, which is not described")
        handler(self, table, worker, frame, payload)

    def allocate_gradient(self, frame: Frame) -> torch.Tensor:
        """Return memory for the gradient of a PUSH that is about to be received.

        Args:
            frame: Its header.

        Raises:
            DistribError: The table has no such chunk, or its size differs.
        """
        table = self._tables.get(frame.table)
        if table is None or frame.chunk not in table.chunks or frame.length != table.transfer_bytes[frame.chunk]:
            raise DistribError(
                f"unexpected gradient of {frame.length} bytes for chunk {frame.chunk} of table {frame.table}"
            )
        return self._pool.take(frame.length)

    def forget_worker(self, worker: int) -> None:
        """Drop the pulls of a worker that has connected anew, and its memory.

        Args:
            worker: Rank of the worker.
        """
        for waiting in self._pulls.values():
            waiting[:] = [(other, frame) for other, frame in waiting if other != worker]
        self.forget_memory(worker)

    def forget_memory(self, worker: int) -> None:
        """Drop the memory that a worker shares: its connection is lost.

        Args:
            worker: Rank of the worker.
        """
        self._memory = {key: memory for key, memory in self._memory.items() if key[0] != worker}

    def forget_table(self, number: int) -> None:
        """Drop the memory that workers share for a table.

        Args:
            number: Number of the table.
        """
        self._memory = {key: memory for key, memory in self._memory.items() if key[1] != number}

    def run(self, table: ServerTable, effects: list[Effect]) -> None:
        """Carry out the effects that a table's update controller returned.

        Args:
            table: The table.
            effects: The effects, in order.
        """
        for effect in effects:
            if isinstance(effect, ApplyUpdate) and not any(update.weight for update in effect.updates):
                for update in effect.updates:  # all workers have left out this step: it counts, and changes nothing
                    self._pool.give_back(update.gradient)
                self._replication.log(table, effect, None, {})
            elif isinstance(effect, ApplyUpdate):
                push_id = effect.updates[0].worker
                options = table.options.get(self._pushers.get(push_id, push_id))
                gradient, options_used, memory = table.effective_update(effect.chunk, effect.updates, options)
                table.apply(effect.chunk, gradient, options_used)
                release = functools.partial(self._pool.give_back, memory)
                self._replication.log(table, effect, gradient, options_used, release)
            elif isinstance(effect, PushReply):
                worker = self._pushers.get(effect.worker, effect.worker)
                if connection := self._membership.connections.get(worker):
                    self.send_value(table, effect, worker, connection)
            else:
                self._pool.give_back(effect.gradient)

    def send_value(self, table: ServerTable, reply: PushReply, worker: int, connection: Connection) -> None:
        """Send the value of a chunk to a worker, through shared memory if it has some.

        Args:
            table: The table of the chunk.
            reply: The reply to the worker's push.
            worker: Its rank.
            connection: Its connection.
        """
        chunk, flags = reply.chunk, FrameFlag.APPLIED if reply.applied else 0
        payload, on_sent = None, None
        if memory := self._memory.get((worker, table.number)):
            table.publish_into(chunk, reply.worker, memory.values[chunk])
            flags |= FrameFlag.SHARED
        else:
            payload, on_sent = table.publish(chunk, reply.worker)
        frame = Frame(FrameKind.VALUE, flags, table.number, chunk, reply.step, table.controller.version(chunk))
        connection.send(frame, payload or b"", priority=chunk, on_sent=on_sent)

    # -- handlers, by kind of frame ------------------------------------------------------------------------------------

    def _push(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        if frame.flags & FrameFlag.SHARED:
            payload = self._memory[worker, frame.table].gradients[frame.chunk]
        push_id = self._membership.push_id(worker)
        self._pushers[push_id] = worker
        # A worker that waits in a round may have a neighbour that trains, or older pushes in flight.
        gathered = self._membership.gathered
        if idle := gathered - self._rounds.waiting:
            gathered -= {other for other in idle if self._membership.push_id(other) == push_id}
        effects = table.controller.push(
            push_id,
            frame.chunk,
            frame.step,
            frame.version,
            payload,
            final=bool(frame.flags & FrameFlag.FINAL),
            weight=frame.weight,
        )
        self.run(table, effects)

    def _commit(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        push_id = self._membership.push_id(worker)
        scale, chunks = decode(payload)
        self.run(table, table.controller.commit(push_id, frame.step, chunks, scale))

    def _pull(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        self._pulls.setdefault((table.number, frame.chunk), []).append((worker, frame))
        self._answer_pulls(table, frame.chunk)

    def _answer_pulls(self, table: ServerTable, chunk: int) -> None:
        if chunk not in table.optimizers:
            return
        for worker, frame in self._pulls.pop((table.number, chunk), []):
            reply = Frame(FrameKind.DONE, 0, frame.table, chunk, frame.step, table.controller.version(chunk))
            self._membership.send(worker, reply, table.snapshot(chunk), priority=chunk)

    def _share_memory(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        with contextlib.suppress(OSError, KeyError, ValueError):
            self._memory[worker, table.number] = MappedArena(decode(payload), table.transfer_bytes)
        self._membership.reply(worker, frame, encode((worker, table.number) in self._memory))

    def _set_options(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        replacements = self._membership.replacements
        if worker not in replacements:
            table.last_options = decode(payload)
            for other in (worker, *replacements):
                table.options[other] = table.last_options

    def _set_value(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        table.set_value(frame.chunk, payload, replace=bool(frame.flags & FrameFlag.FINAL))
        self._replication.send_chunk(table, frame.chunk)
        self._answer_pulls(table, frame.chunk)
        self._membership.reply(worker, frame)

    def _get_state(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        self._membership.reply(worker, frame, table.optimizer_state(frame.chunk))

    def _set_state(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        table.set_optimizer_state(frame.chunk, payload)
        self._replication.send_chunk(table, frame.chunk)
        self._membership.reply(worker, frame)

    def _last_step(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        controller, push_id = table.controller, self._membership.push_id(worker)
        self._membership.reply(worker, frame, encode((controller.last_step(), controller.last_step(push_id))))

    def _join(self, table: ServerTable, worker: int, frame: Frame, payload: Any) -> None:
        self._membership.members.add(worker)
        self.run(table, table.controller.join(self._membership.push_id(worker), frame.version))
        self._membership.reply(worker, frame)
        self._replication.send_members()


_HANDLERS: dict[FrameKind, Callable[[TableRequests, ServerTable, int, Frame, Any], None]] = {
    FrameKind.PUSH: TableRequests._push,
    FrameKind.COMMIT: TableRequests._commit,
    FrameKind.PULL: TableRequests._pull,
    FrameKind.SHARE_MEMORY: TableRequests._share_memory,
    FrameKind.OPTIONS: TableRequests._set_options,
    FrameKind.SET_VALUE: TableRequests._set_value,
    FrameKind.GET_STATE: TableRequests._get_state,
    FrameKind.SET_STATE: TableRequests._set_state,
    FrameKind.LAST_STEP: TableRequests._last_step,
    FrameKind.JOIN: TableRequests._join,
}
