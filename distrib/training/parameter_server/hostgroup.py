"""The workers of one host, which push as one: their gradients are averaged in its memory, and cross the wire once.

The lowest of them speaks for all. The others connect to its door, a local socket without a file, and tell it what is ready in
memory that it sees; `merging.py` decides what it sends. When it is gone, which the kernel says at once, the lowest of those
that are left takes its place, and what was under way is pushed to it again.

A worker that waits for other workers itself (in an evaluation, in `job.all_reduce`) says so. If the others of its host then
stand still for it, they go on without it, and it joins them again with its next step.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distrib.training.gradients.neighbours import this_host
from distrib.training.parameter_server.merging import Commit, Merger, Order, Send
from distrib.training.parameter_server.shard import Answer, Update
from distrib.training.parameter_server.sharing import Arena, Shared
from distrib.training.parameter_server.wire import (
    APPLIED,
    FINAL,
    SHARED,
    Connection,
    Frame,
    Kind,
    Loop,
    WireError,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from distrib.training.parameter_server.client import Client, Push, Slot

CALL_SECONDS = 5.0
"""How long a worker that takes another's place waits for those that are left."""

AWAY_SECONDS = 0.5
"""How long the others wait for one that waits elsewhere."""


def host_identity() -> str:
    """The same for two processes exactly if they reach each other's doors and memory."""
    return f"{this_host()} {Path('/proc/self/ns/pid').stat().st_ino}"


def open_door() -> socket.socket:
    """Where this worker is found by the others of its host, by the socket's name."""
    door = socket.socket(socket.AF_UNIX)
    door.bind("")  # the kernel chooses a free name
    door.listen(1024)
    door.setblocking(False)
    return door


class GroupTable(NamedTuple):
    """A table as its worker tells the group of it."""

    slots: Sequence[Slot]
    arena: Arena
    """The memory of all slots, which whoever speaks for the host reads and writes."""
    sizes: Mapping[int, int]
    """Bytes of each chunk."""
    to_servers: Callable[[], tuple[dict[int, Slot], dict[int, Arena]]]
    """Makes what the one who speaks for the host pushes and receives with: slots by chunk, arenas by server."""


class _Line:
    """A connection between two workers of the host."""

    def __init__(
        self, loop: Loop, sock: socket.socket, key: bytes, *, listener: bool,
        receive: Callable[[_Line, Frame, Any], None], closed: Callable[[_Line], None],
    ) -> None:  # fmt: skip
        self.worker = -1
        self._loop, self._sock, self._closed = loop, sock, closed
        self._queued = False
        self.connection = Connection(
            sock,
            key,
            listener=listener,
            room=lambda _: None,
            receive=lambda f, p: receive(self, f, p),
            queued=self._queue,
        )
        loop.watch(sock, self._attend, writing=True)

    def send(self, frame: Frame, payload: Any = b"") -> None:
        self.connection.send(frame, payload)

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            self._loop.later(0.0, self._flush)

    def _flush(self) -> None:
        self._queued = False
        self._attend(0)

    def _attend(self, events: int) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            if events & selectors.EVENT_READ:
                self.connection.read()
            self.connection.flush()
            self._loop.watch(self._sock, self._attend, writing=self.connection.waits_to_send)
        except (OSError, WireError):
            self.close()
            self._closed(self)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.forget(self._sock)
            self._sock.close()


class HostGroup:
    """This worker among those of its host. `doors` are the names of all their doors, by worker.

    Lives in the client's thread, but for what says that it is for the thread that trains.
    """

    def __init__(
        self, client: Client, number: int, door: socket.socket, doors: Mapping[int, bytes], *, in_step: bool
    ) -> None:
        """`number` is under which they push; `in_step` whether no update may be without one of them."""
        self.client, self.number, self.in_step = client, number, in_step
        self.outside = False
        """Whether the others do not wait for this worker: it has to join them."""
        self._door, self._doors = door, doors
        self._away = False
        self._pushes: dict[tuple[int, int], Push] = {}
        self._tables: dict[int, GroupTable] = {}
        self._joins: dict[int, tuple[int, Future[int]]] = {}  # by number, the tables that this worker wants to join in
        self._line: _Line | None = None  # to the one who speaks for the host
        self._welcomed = False
        self.speaks = False
        """Whether this worker speaks for its host."""
        self._mergers: dict[int, Merger] = {}
        self._slots: dict[int, dict[int, Slot]] = {}  # with which it pushes for all
        self._lines: dict[int, _Line] = {}
        self._memory: dict[tuple[int, int], Shared] = {}  # the others', by worker and table
        self._early: list[tuple[_Line, Frame, Any]] = []  # of tables that this worker does not have yet
        self._members: set[int] = set()
        self._expected_until = 0.0
        self._elsewhere: dict[int, float] = {}  # who waits elsewhere, and since when

    def begin(self) -> None:
        """Opens the door, and finds the one who speaks for the host."""
        self.client.loop.watch(self._door, self._accept)
        self._look()

    # -- for the thread that trains -----------------------------------------------------------------------------------

    def add(self, number: int, table: GroupTable) -> None:
        """Tells the group of a table, before the first push."""
        self.client.loop.call(lambda: self._add(number, table))

    def leave(self) -> None:
        """This worker is about to wait for others, in whatever step they are: its own need not wait for it meanwhile."""
        if not self._away and not self.in_step:
            self._away = True
            self.client.loop.call(self._leave)

    def join(self, table: int) -> int:
        """Takes part in the table's steps again; the last step of the others, after which this worker goes on."""
        future: Future[int] = Future()
        self.client.loop.call(lambda: self._join(table, future))
        self.outside = False
        return self.client.result(future)

    def restart(self, table: int, step: int) -> None:
        """The host was cut off, and this worker, which speaks for it, has joined the other hosts: they go on after `step`."""
        self.client.loop.call(lambda: self._restart(table, step))

    # -- this worker's own --------------------------------------------------------------------------------------------

    def push(self, push: Push) -> None:
        """A chunk of this worker is ready."""
        slot = push.slot
        self._away = False
        self._pushes[slot.table, slot.chunk] = push
        if self.speaks:
            self._hear_push(self.client.rank, slot.table, slot.chunk, push.step, slot.gradient, push.final)
        elif self._line and self._welcomed:
            self._send_push(push)

    def _send_push(self, push: Push) -> None:
        assert self._line
        flags = SHARED | (FINAL if push.final else 0)
        self._line.send(Frame(Kind.PUSH, flags, push.slot.table, push.slot.chunk, push.step, push.slot.version))

    def commit(self, slots: Iterable[Slot], step: int) -> None:
        """What was pushed of these slots is final."""
        chunks: dict[int, list[int]] = {}
        for slot in slots:
            push = self._pushes.get((slot.table, slot.chunk))
            if push is not None and not push.final:
                push.final = True
                chunks.setdefault(slot.table, []).append(slot.chunk)
        for table, numbers in chunks.items():
            if self.speaks:
                self._carry_out(table, self._mergers[table].commit(self.client.rank, step, numbers))
            elif self._line and self._welcomed:
                self._line.send(Frame(Kind.COMMIT, table=table, step=step), packed(numbers))

    def _add(self, number: int, table: GroupTable) -> None:
        self._tables[number] = table
        if self.speaks:
            self._begin(number)
        elif self._line and self._welcomed:
            self._line.send(Frame(Kind.SHARE, table=number), packed(table.arena.about))

    def _leave(self) -> None:
        if self.speaks:
            self._elsewhere[self.client.rank] = time.monotonic()
        elif self._line and self._welcomed:
            self._line.send(Frame(Kind.SUSPEND))

    def _join(self, table: int, future: Future[int]) -> None:
        if self.speaks:
            future.set_result(self._let_join(self.client.rank, table))
            return
        number = max(self._joins, default=0) + 1
        self._joins[number] = table, future
        if self._line and self._welcomed:
            self._line.send(Frame(Kind.JOIN, table=table, step=number))

    def tick(self, now: float) -> None:
        """Looks for the one who speaks for the host, and stops waiting for those that do not call."""
        if not self.speaks and self._line is None:
            self._look()
        if self._expected_until and now > self._expected_until:
            self._expected_until = 0.0
            for worker in self._members - self._lines.keys() - {self.client.rank}:
                self._drop(worker)
        for worker in [worker for worker, since in self._elsewhere.items() if now - since > AWAY_SECONDS]:
            if any(merger.awaits(worker) for merger in self._mergers.values()):
                self._excuse(worker)

    def _look(self) -> None:
        for worker in sorted(self._doors):
            if worker == self.client.rank:
                self._speak()
                return
            if (sock := _knock(self._doors[worker])) is not None:
                self._welcomed = False
                self._line = line = _Line(
                    self.client.loop, sock, self.client.key, listener=False, receive=self._hear, closed=self._lost
                )
                line.send(Frame(Kind.HELLO), packed(self.client.rank))
                return

    def _lost(self, line: _Line) -> None:
        if line is self._line:
            self._line = None
            if self._welcomed:
                self._look()  # else it is the next one, who has yet to learn that it speaks now: later

    def _hear(self, line: _Line, frame: Frame, payload: Any) -> None:
        """What the one who speaks for the host says."""
        if line is not self._line:
            return
        if frame.kind is Kind.WELCOME:
            self._welcomed = True
            self.outside = self.outside or not unpacked(payload)
            for number, table in self._tables.items():
                line.send(Frame(Kind.SHARE, table=number), packed(table.arena.about))
            if self._away:
                line.send(Frame(Kind.SUSPEND))
            for number, (of, _) in self._joins.items():
                line.send(Frame(Kind.JOIN, table=of, step=number))
            for push in self._pushes.values():
                self._send_push(push)
        elif frame.kind is Kind.VALUE:
            self._arrived(frame.table, frame.chunk, frame.step, frame.version, bool(frame.flags & APPLIED))
        elif frame.kind is Kind.DONE and frame.step in self._joins:
            self._joins.pop(frame.step)[1].set_result(frame.version)
        elif frame.kind is Kind.OUTSIDE:
            self.outside = True

    def _arrived(self, table: int, chunk: int, step: int, version: int, applied: bool) -> None:
        push = self._pushes.get((table, chunk))
        if push and push.step == step:
            del self._pushes[table, chunk]
            push.slot.version = version
            push.slot.refused += not applied
            self.client.arrived(push.slot)

    def close(self) -> None:
        """Leaves the host's other workers to themselves."""
        self.client.loop.forget(self._door)
        self._door.close()
        for line in [*self._lines.values(), *([self._line] if self._line else [])]:
            line.close()

    # -- of the one who speaks for the host ---------------------------------------------------------------------------

    def _speak(self) -> None:
        rank = self.client.rank
        self.speaks = True
        self._members = {w for w, name in self._doors.items() if w > rank and _is_there(name)}
        if not self.outside:
            self._members.add(rank)
        self._expected_until = time.monotonic() + CALL_SECONDS
        for number in self._tables:
            self._begin(number)
        joins, self._joins = self._joins, {}
        for table, future in joins.values():
            future.set_result(self._let_join(rank, table))
        for push in list(self._pushes.values()):
            slot = push.slot
            self._hear_push(rank, slot.table, slot.chunk, push.step, slot.gradient, push.final)

    def _begin(self, number: int) -> None:
        table = self._tables[number]
        self._mergers[number] = Merger(table.sizes, self._members)
        slots, arenas = table.to_servers()
        for own in table.slots:
            slot = slots[own.chunk]
            slot.version = own.version
            slot.value.copy_(own.value)
            slot.answered = self._answered
        self._slots[number] = slots
        self.client.offer(number, arenas)
        waiting, self._early = self._early, []
        for line, frame, payload in waiting:
            self._listen(line, frame, payload)

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._door.accept()
        except OSError:
            return
        if not self.speaks and self._line is None:
            self._look()
        if not self.speaks:
            sock.close()  # who speaks is still there, or was a moment ago: it will call again
            return
        _Line(self.client.loop, sock, self.client.key, listener=True, receive=self._listen, closed=self._hung_up)

    def _listen(self, line: _Line, frame: Frame, payload: Any) -> None:
        """What another worker of the host says to the one who speaks for it."""
        if frame.kind is Kind.HELLO:
            line.worker = unpacked(payload)
            if (old := self._lines.get(line.worker)) is not None:
                old.close()
            self._lines[line.worker] = line
            line.send(Frame(Kind.WELCOME), packed(line.worker in self._members))
        elif frame.kind is Kind.SUSPEND:
            self._elsewhere[line.worker] = time.monotonic()
        elif frame.table not in self._mergers:
            self._early.append((line, frame, payload))
        elif frame.kind is Kind.SHARE:
            self._memory[line.worker, frame.table] = Shared(unpacked(payload), self._tables[frame.table].sizes)
        elif frame.kind is Kind.PUSH:
            slot = self._slots[frame.table][frame.chunk]
            gradient = self._memory[line.worker, frame.table].gradients[frame.chunk].view(slot.gradient.dtype)
            final = bool(frame.flags & FINAL)
            self._hear_push(line.worker, frame.table, frame.chunk, frame.step, gradient, final)
        elif frame.kind is Kind.COMMIT:
            orders = self._mergers[frame.table].commit(line.worker, frame.step, unpacked(payload))
            self._carry_out(frame.table, orders)
        elif frame.kind is Kind.JOIN:
            newest = self._let_join(line.worker, frame.table)
            line.send(Frame(Kind.DONE, table=frame.table, step=frame.step, version=newest))

    def _hung_up(self, line: _Line) -> None:
        if self._lines.get(line.worker) is line:
            del self._lines[line.worker]
            self._memory = {key: memory for key, memory in self._memory.items() if key[0] != line.worker}
            self._drop(line.worker)

    def _hear_push(self, worker: int, table: int, chunk: int, step: int, gradient: torch.Tensor, final: bool) -> None:
        self._elsewhere.pop(worker, None)
        self._carry_out(table, self._mergers[table].push(worker, chunk, step, 0, gradient, final=final))

    def _drop(self, worker: int) -> None:
        self._members.discard(worker)
        self._elsewhere.pop(worker, None)
        for table, merger in self._mergers.items():
            self._carry_out(table, merger.drop(worker))

    def _excuse(self, worker: int) -> None:
        self._members.discard(worker)
        self._elsewhere.pop(worker, None)
        for table, merger in self._mergers.items():
            self._carry_out(table, merger.excuse(worker))
        if worker == self.client.rank:
            self.outside = True
        elif line := self._lines.get(worker):
            line.send(Frame(Kind.OUTSIDE))

    def _let_join(self, worker: int, table: int) -> int:
        self._members.add(worker)
        newest, orders = self._mergers[table].join(worker)
        self._carry_out(table, orders)
        return newest

    def _restart(self, table: int, step: int) -> None:
        self._members = {self.client.rank}
        if self.speaks:
            self._carry_out(table, self._mergers[table].restart(self.client.rank, step))
            for line in self._lines.values():
                line.send(Frame(Kind.OUTSIDE))

    def _answered(self, slot: Slot, applied: bool) -> None:
        """A server has answered a push for all."""
        self._carry_out(slot.table, self._mergers[slot.table].answered(slot.chunk, applied=applied))

    def _carry_out(self, table: int, orders: Iterable[Order]) -> None:
        committed: dict[int, list[Slot]] = {}
        for order in orders:
            slot = self._slots[table][order.chunk]
            if isinstance(order, Send):
                _average(order.updates, slot.gradient)
                self.client.send_push(slot, order.step, final=order.final, weight=len(order.updates), mark=order.mark)
            elif isinstance(order, Commit):
                committed.setdefault(order.step, []).append(slot)
            else:
                self._answer(slot, order)
        for step, slots in committed.items():
            self.client.send_commit(slots, step)

    def _answer(self, slot: Slot, answer: Answer) -> None:
        if answer.worker == self.client.rank:
            if push := self._pushes.get((slot.table, slot.chunk)):
                push.slot.value.copy_(slot.value)
            self._arrived(slot.table, slot.chunk, answer.step, slot.version, answer.applied)
        elif (memory := self._memory.get((answer.worker, slot.table))) is not None:
            memory.values[slot.chunk].view(slot.value.dtype).copy_(slot.value)
            flags = SHARED | (APPLIED if answer.applied else 0)
            frame = Frame(Kind.VALUE, flags, slot.table, slot.chunk, answer.step, slot.version)
            self._lines[answer.worker].send(frame)


def _knock(name: bytes) -> socket.socket | None:
    """A connection to a worker's door; None when the worker is gone."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


def _is_there(name: bytes) -> bool:
    sock = _knock(name)
    if sock is not None:
        sock.close()
    return sock is not None


def _average(updates: Sequence[Update], target: torch.Tensor) -> None:
    """The mean of gradients; of half precision it is calculated in single."""
    total = updates[0].gradient
    if len(updates) > 1:
        total = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
        for update in updates[1:]:
            total.add_(update.gradient)
        total.div_(len(updates))
    target.copy_(total)
