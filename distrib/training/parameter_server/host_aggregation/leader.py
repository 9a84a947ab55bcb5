"""The worker that speaks for its host: it hears the others' gradients, pushes their mean, and hands out the answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distrib.training.parameter_server.host_aggregation.aggregator import Commit, Merger, Order, Send
from distrib.training.parameter_server.host_aggregation.local_socket import Line
from distrib.training.parameter_server.shared_memory import Arena, Shared
from distrib.training.parameter_server.transport import APPLIED, FINAL, SHARED, Frame, Kind, packed, unpacked
from distrib.training.parameter_server.update_rules import Answer, Update

if TYPE_CHECKING:
    from distrib.training.parameter_server.client import Client, Slot

NEIGHBOUR_SECONDS = 5.0
"""How long one that takes another's place waits for the workers that are left."""

AWAY_SECONDS = 0.5
"""How long the others wait for a worker that waits elsewhere."""


class GroupTable(NamedTuple):
    """A table as a worker tells its host's group of it."""

    slots: Sequence[Slot]
    arena: Arena
    """The memory of all slots, which whoever speaks for the host reads and writes."""
    sizes: Mapping[int, int]
    """Bytes of each chunk."""
    to_servers: Callable[[], tuple[dict[int, Slot], dict[int, Arena]]]
    """Makes what the one who speaks for the host pushes and receives with: slots by chunk, arenas by server."""


class Speaker:
    """Lives in the client's thread. `members` are those of the host that are waited for, perhaps this worker among them.

    `arrived` is told of answers to this worker's own pushes, `excused` when nobody waits for it any more.
    """

    def __init__(
        self,
        client: Client,
        members: Iterable[int],
        arrived: Callable[[Slot, Answer], None],
        excused: Callable[[], None],
    ) -> None:
        self._client, self._arrived, self._excused = client, arrived, excused
        self._members = set(members)
        self._tables: dict[int, GroupTable] = {}
        self._mergers: dict[int, Merger] = {}
        self._slots: dict[int, dict[int, Slot]] = {}  # with which it pushes for all
        self._lines: dict[int, Line] = {}
        self._memory: dict[tuple[int, int], Shared] = {}  # the others', by worker and table
        self._early: list[tuple[Line, Frame, Any]] = []  # of tables that this worker does not have yet
        self._over: set[int] = set()  # tables that nobody trains any more
        self._elsewhere: dict[int, float] = {}  # who waits elsewhere, and since when
        self._expected_until = time.monotonic() + NEIGHBOUR_SECONDS

    def begin(self, number: int, table: GroupTable, *, outside: bool) -> None:
        """From now on there is this table; whether this worker has yet to join in it."""
        if not outside:  # all begin it together, also those that others went on without before
            self._members |= self._lines.keys() | {self._client.rank}
        self._tables[number] = table
        self._mergers[number] = Merger(table.sizes, self._members - ({self._client.rank} if outside else set()))
        slots, arenas = table.to_servers()
        for own in table.slots:
            slot = slots[own.chunk]
            slot.version = own.version
            slot.value.copy_(own.value)
            slot.answered = self._answered
        self._slots[number] = slots
        self._client.offer(number, arenas)
        waiting, self._early = self._early, []
        for line, frame, payload in waiting:
            if self._lines.get(line.worker) is line:  # it may have died meanwhile
                self._listen(line, frame, payload)

    def forget(self, number: int) -> None:
        """Nobody trains this table any more."""
        for known in (self._tables, self._mergers, self._slots):
            known.pop(number, None)
        self._memory = {at: memory for at, memory in self._memory.items() if at[1] != number}
        self._over.add(number)

    # -- what workers of the host want, this one among them -----------------------------------------------------------

    def push(self, worker: int, frame: Frame, gradient: torch.Tensor) -> None:
        """A worker's gradient is ready in its memory."""
        self._elsewhere.pop(worker, None)
        final = bool(frame.flags & FINAL)
        orders = self._mergers[frame.table].push(
            worker, frame.chunk, frame.step, 0, gradient, final=final, weight=frame.weight
        )
        self._carry_out(frame.table, orders)

    def commit(self, worker: int, table: int, step: int, chunks: Iterable[int]) -> None:
        """What the worker has pushed of these chunks is final."""
        self._carry_out(table, self._mergers[table].commit(worker, step, chunks))

    def leave(self, worker: int) -> None:
        """The worker waits elsewhere."""
        self._elsewhere[worker] = time.monotonic()

    def join(self, worker: int, table: int) -> int:
        """The worker takes part again, after the step that is returned."""
        self._members.add(worker)
        newest, orders = self._mergers[table].join(worker)
        self._carry_out(table, orders)
        return newest

    def restart(self, table: int, step: int) -> None:
        """The host was cut off: this worker goes on after `step`, and the others have to join."""
        self._members = {self._client.rank}
        self._carry_out(table, self._mergers[table].restart(self._client.rank, step))
        for line in self._lines.values():
            line.send(Frame(Kind.OUTSIDE))

    def tick(self, now: float) -> None:
        """Stops waiting for those that do not call, and for those that wait elsewhere while others wait for them."""
        if now > self._expected_until:
            self._expected_until = float("inf")
            for worker in self._members - self._lines.keys() - {self._client.rank}:
                self._drop(worker)
        for worker in [worker for worker, since in self._elsewhere.items() if now - since > AWAY_SECONDS]:
            if any(merger.awaits(worker) for merger in self._mergers.values()):
                self._excuse(worker)

    # -- the lines of the others --------------------------------------------------------------------------------------

    def accept(self, sock: socket.socket) -> None:
        """Another worker of the host has called."""
        Line(self._client.loop, sock, self._client.key, listener=True, receive=self._listen, closed=self._hung_up)

    def _listen(self, line: Line, frame: Frame, payload: Any) -> None:
        if frame.kind is Kind.HELLO:
            line.worker = unpacked(payload)
            if (old := self._lines.get(line.worker)) is not None:
                old.close()
                self._forget(old)
            self._lines[line.worker] = line
            line.send(Frame(Kind.WELCOME), packed(line.worker in self._members))
        elif frame.kind is Kind.SUSPEND:
            self.leave(line.worker)
        elif frame.table in self._over:
            return
        elif frame.table not in self._mergers:
            self._early.append((line, frame, payload))
        elif frame.kind is Kind.SHARE:
            try:
                self._memory[line.worker, frame.table] = Shared(unpacked(payload), self._tables[frame.table].sizes)
            except (FileNotFoundError, ProcessLookupError):  # it has died meanwhile
                line.close()
                self._hung_up(line)
                return
            if line.worker not in self._members:  # it was left out before it had this table to be outside of
                line.send(Frame(Kind.OUTSIDE))
        elif frame.kind is Kind.PUSH:
            slot = self._slots[frame.table][frame.chunk]
            gradient = self._memory[line.worker, frame.table].gradients[frame.chunk].view(slot.gradient.dtype)
            self.push(line.worker, frame, gradient)
        elif frame.kind is Kind.COMMIT:
            self.commit(line.worker, frame.table, frame.step, unpacked(payload))
        elif frame.kind is Kind.JOIN:
            newest = self.join(line.worker, frame.table)
            line.send(Frame(Kind.DONE, table=frame.table, step=frame.step, version=newest))

    def _forget(self, line: Line) -> None:
        self._early = [said for said in self._early if said[0] is not line]

    def _hung_up(self, line: Line) -> None:
        self._forget(line)
        if self._lines.get(line.worker) is line:
            del self._lines[line.worker]
            self._memory = {key: memory for key, memory in self._memory.items() if key[0] != line.worker}
            self._drop(line.worker)

    def _drop(self, worker: int) -> None:
        self._members.discard(worker)
        self._elsewhere.pop(worker, None)
        for table, merger in self._mergers.items():
            self._carry_out(table, merger.drop(worker))

    def _excuse(self, worker: int) -> None:
        self._members.discard(worker)
        del self._elsewhere[worker]
        for table, merger in self._mergers.items():
            self._carry_out(table, merger.excuse(worker))
        if worker == self._client.rank:
            self._excused()
        elif line := self._lines.get(worker):
            line.send(Frame(Kind.OUTSIDE))

    # -- the servers --------------------------------------------------------------------------------------------------

    def _answered(self, slot: Slot, applied: bool) -> None:
        self._carry_out(slot.table, self._mergers[slot.table].answered(slot.chunk, applied=applied))

    def _carry_out(self, table: int, orders: Iterable[Order]) -> None:
        committed: dict[int, list[Slot]] = {}
        for order in orders:
            slot = self._slots[table][order.chunk]
            if isinstance(order, Send):
                _average(order.updates, slot.gradient)
                self._client.send_push(
                    slot, order.step, final=order.final, weight=sum(u.weight for u in order.updates), mark=order.mark
                )
            elif isinstance(order, Commit):
                committed.setdefault(order.step, []).append(slot)
            else:
                self._answer(slot, order)
        for step, slots in committed.items():
            self._client.send_commit(slots, step)

    def _answer(self, slot: Slot, answer: Answer) -> None:
        if answer.worker == self._client.rank:
            self._arrived(slot, answer)
        elif (memory := self._memory.get((answer.worker, slot.table))) is not None:
            memory.values[slot.chunk].view(slot.value.dtype).copy_(slot.value)
            flags = SHARED | (APPLIED if answer.applied else 0)
            self._lines[answer.worker].send(Frame(Kind.VALUE, flags, slot.table, slot.chunk, answer.step, slot.version))

    def close(self) -> None:
        """Leaves the others to themselves."""
        for line in self._lines.values():
            line.close()


def _average(updates: Sequence[Update], target: torch.Tensor) -> None:
    """The mean of the gradients of those that have one; of half precision it is calculated in single."""
    first, *others = [update.gradient for update in updates if update.weight] or [updates[0].gradient]
    if others:
        first = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
        for gradient in others:
            first.add_(gradient)
        first.div_(1 + len(others))
    target.copy_(first)
