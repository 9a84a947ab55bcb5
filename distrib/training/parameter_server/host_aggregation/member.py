"""The workers of one host, which push as one: their gradients are averaged in its memory, and cross the wire once.

The lowest of them speaks for all (`speaker.py`). The others connect to its door, a local socket, and tell it what is ready in
memory that it sees. When it is gone, which the kernel says at once, the lowest of those that are left takes its place, and what
was under way is pushed to it again.

A worker that waits for other workers itself (in an evaluation, in `job.all_reduce`) says so. If the others of its host then
stand still for it, they go on without it, and it joins them again with its next step.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distrib.training.gradients.host_shared_memory import kernel_identity
from distrib.training.parameter_server.host_aggregation.leader import GroupTable, Speaker
from distrib.training.parameter_server.host_aggregation.local_socket import Line, is_there, knock
from distrib.training.parameter_server.transport import APPLIED, FINAL, SHARED, Frame, Kind, packed, unpacked
from distrib.training.parameter_server.update_rules import Answer

if TYPE_CHECKING:
    from distrib.training.parameter_server.client import Client, Push, Slot


def host_identity() -> str:
    """The same for two processes exactly if they reach each other's doors and memory."""
    spaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "user"))
    return " ".join([kernel_identity(), *map(str, spaces)])


class HostGroup:
    """This worker among those of its host. `doors` are the names of all their doors, by worker.

    Lives in the client's thread, but for what says that it is for the thread that trains.
    """

    def __init__(
        self, client: Client, number: int, door: socket.socket, doors: Mapping[int, bytes], *, in_step: bool
    ) -> None:
        """`number` is under which they push; `in_step` whether no update may be without one of them."""
        self.client, self.number, self.in_step = client, number, in_step
        self._outside: set[int] = set()  # tables of which the others do not wait for this worker
        self._door, self._doors = door, doors
        self._away = False
        self._tables: dict[int, GroupTable] = {}
        self._pushes: dict[tuple[int, int], Push] = {}
        self._joins: dict[int, tuple[int, Future[int]]] = {}  # by number, the tables that this worker wants to join in
        self._speaker: Speaker | None = None  # if it is this worker
        self._line: Line | None = None  # to the one who speaks for the host
        self._welcomed = False

    @property
    def speaks(self) -> bool:
        """Whether this worker speaks for its host."""
        return self._speaker is not None

    def begin(self) -> None:
        """Opens the door, and finds the one who speaks for the host."""
        self.client.loop.watch(self._door, self._accept)
        self._look()

    # -- for the thread that trains -----------------------------------------------------------------------------------

    def add(self, number: int, table: GroupTable) -> None:
        """Tells the group of a table, before the first push."""
        self.client.loop.call(lambda: self._add(number, table))

    def is_outside(self, table: int) -> bool:
        """Whether the others do not wait for this worker's gradients of a table: it has to join them."""
        return table in self._outside

    def leave(self) -> None:
        """This worker is about to wait for others, in whatever step they are: its own need not wait for it meanwhile."""
        if not self._away and not self.in_step:
            self._away = True
            self.client.loop.call(self._leave)

    def join(self, table: int) -> int:
        """Takes part in the table's steps again; the last step of the others, after which this worker goes on."""
        future: Future[int] = Future()
        self.client.loop.call(lambda: self._join(table, future))
        self._outside.discard(table)
        return self.client.result(future)

    def restart(self, table: int, step: int) -> None:
        """The host was cut off, and this worker, which speaks for it, has joined the other hosts: they go on after `step`."""
        self.client.loop.call(lambda: self._speaker.restart(table, step) if self._speaker else None)

    # -- what this worker has to say ----------------------------------------------------------------------------------

    def push(self, push: Push) -> None:
        """A chunk of this worker is ready."""
        self._away = False
        self._pushes[push.slot.table, push.slot.chunk] = push
        self._tell(push)

    def _tell(self, push: Push) -> None:
        slot = push.slot
        flags = SHARED | (FINAL if push.final else 0)
        frame = Frame(Kind.PUSH, flags, slot.table, slot.chunk, push.step, slot.version, push.weight)
        if self._speaker:
            self._speaker.push(self.client.rank, frame, slot.gradient)
        elif self._line and self._welcomed:
            self._line.send(frame)

    def commit(self, slots: Iterable[Slot], step: int) -> None:
        """What was pushed of these slots is final."""
        chunks: dict[int, list[int]] = {}
        for slot in slots:
            push = self._pushes.get((slot.table, slot.chunk))
            if push is not None and not push.final:
                push.final = True
                chunks.setdefault(slot.table, []).append(slot.chunk)
        for table, numbers in chunks.items():
            if self._speaker:
                self._speaker.commit(self.client.rank, table, step, numbers)
            elif self._line and self._welcomed:
                self._line.send(Frame(Kind.COMMIT, table=table, step=step), packed(numbers))

    def _add(self, number: int, table: GroupTable) -> None:
        self._tables[number] = table
        if self._speaker:
            self._speaker.begin(number, table, outside=False)
        elif self._line and self._welcomed:
            self._line.send(Frame(Kind.SHARE, table=number), packed(table.arena.about))

    def forget(self, table: int) -> None:
        """This worker trains the table no more; nor do the others, who are all at the same place."""
        self._tables.pop(table, None)
        self._outside.discard(table)
        self._pushes = {at: push for at, push in self._pushes.items() if at[0] != table}
        if self._speaker:
            self._speaker.forget(table)

    def _leave(self) -> None:
        if self._speaker:
            self._speaker.leave(self.client.rank)
        elif self._line and self._welcomed:
            self._line.send(Frame(Kind.SUSPEND))

    def _join(self, table: int, future: Future[int]) -> None:
        if self._speaker:
            future.set_result(self._speaker.join(self.client.rank, table))
            return
        number = max(self._joins, default=0) + 1
        self._joins[number] = table, future
        if self._line and self._welcomed:
            self._line.send(Frame(Kind.JOIN, table=table, step=number))

    # -- who speaks ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Looks for the one who speaks for the host, if there is none."""
        if self._speaker:
            self._speaker.tick(now)
        elif self._line is None:
            self._look()

    def _look(self) -> None:
        for worker in sorted(self._doors):
            if worker == self.client.rank:
                self._speak()
                return
            if (sock := knock(self._doors[worker])) is not None:
                self._welcomed = False
                self._line = Line(
                    self.client.loop, sock, self.client.key, listener=False, receive=self._hear, closed=self._lost
                )
                self._line.send(Frame(Kind.HELLO), packed(self.client.rank))
                return

    def _speak(self) -> None:
        rank = self.client.rank
        members = {worker for worker, door in self._doors.items() if worker > rank and is_there(door)}
        self._speaker = speaker = Speaker(self.client, {rank, *members}, self._answered, self._excused)
        for number, table in self._tables.items():
            speaker.begin(number, table, outside=number in self._outside)
        joins, self._joins = self._joins, {}
        for number, future in joins.values():
            future.set_result(speaker.join(rank, number))
        for push in list(self._pushes.values()):
            self._tell(push)

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._door.accept()
        except OSError:
            return
        if not self._speaker and self._line is None:
            self._look()
        if self._speaker:
            self._speaker.accept(sock)
        else:
            sock.close()  # who speaks is still there, or was a moment ago: it will call again

    def _lost(self, line: Line) -> None:
        if line is self._line:
            self._line = None
            if self._welcomed:
                self._look()  # else it is the next one, who has yet to learn that it speaks now: later

    # -- what is said to this worker ----------------------------------------------------------------------------------

    def _hear(self, line: Line, frame: Frame, payload: Any) -> None:
        if line is not self._line:
            return
        if frame.kind is Kind.WELCOME:
            self._welcomed = True
            if not unpacked(payload):
                self._excused()
            for number, table in self._tables.items():
                line.send(Frame(Kind.SHARE, table=number), packed(table.arena.about))
            if self._away:
                line.send(Frame(Kind.SUSPEND))
            for number, (of, _) in self._joins.items():
                line.send(Frame(Kind.JOIN, table=of, step=number))
            for push in self._pushes.values():
                self._tell(push)
        elif frame.kind is Kind.VALUE:
            self._arrived(frame.table, frame.chunk, frame.step, frame.version, bool(frame.flags & APPLIED))
        elif frame.kind is Kind.DONE and frame.step in self._joins:
            self._joins.pop(frame.step)[1].set_result(frame.version)
        elif frame.kind is Kind.OUTSIDE:
            self._excused()

    def _answered(self, slot: Slot, answer: Answer) -> None:
        if push := self._pushes.get((slot.table, slot.chunk)):
            push.slot.value.copy_(slot.value)
        self._arrived(slot.table, slot.chunk, answer.step, slot.version, answer.applied)

    def _arrived(self, table: int, chunk: int, step: int, version: int, applied: bool) -> None:
        push = self._pushes.get((table, chunk))
        if push and push.step == step:
            del self._pushes[table, chunk]
            push.slot.version = version
            push.slot.refused += not applied
            self.client.arrived(push.slot)

    def _excused(self) -> None:
        self._outside.update(self._tables)

    def close(self) -> None:
        """Leaves the host's other workers to themselves."""
        self.client.loop.forget(self._door)
        self._door.close()
        if self._line:
            self._line.close()
        if self._speaker:
            self._speaker.close()
