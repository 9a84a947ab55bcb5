"""One shard of the parameters on the server that is in charge of it: tables, the workers that are there, and the replica."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import torch

from distrib.errors import DistribError
from distrib.strategy import Strategy
from distrib.training.parameter_server.server_collectives import Gathering
from distrib.training.parameter_server.server_table import Description, Pool, Table, raw
from distrib.training.parameter_server.shared_memory import Shared
from distrib.training.parameter_server.transport import (
    APPLIED,
    FINAL,
    MORE,
    SHARED,
    Connection,
    Frame,
    Kind,
    packed,
    unpacked,
)
from distrib.training.parameter_server.update_rules import Answer, Apply, Effect
from distrib.units import format_size

DROP_SECONDS = 5.0
"""How long the others wait for a worker whose connection is gone."""

START_SECONDS = 1800.0
"""How long they wait for one that has never called, as ranks do in mode sync: it may read its data first. Of those that have died the
launcher tells."""


class Part:
    """Shard number `shard` of the parameters, and who trains it."""

    def __init__(self, shard: int, workers: int, servers: int, strategy: Strategy, pool: Pool) -> None:
        self.shard, self.servers, self.strategy = shard, servers, strategy
        self.epoch = 0
        self.in_charge = False
        self.anyone = False
        """Whether any worker may say what a table is: all have agreed on it before."""
        self.tables: dict[int, Table] = {}
        self.over: set[int] = set()
        """Tables that are trained no more. A substitute still passes through them, and trains a copy of its own."""
        self._users: dict[int, set[int]] = {}  # by table, the workers that have not said so yet
        self._staleness: Counter[int] = Counter()  # of tables that are gone
        self.members = set(range(workers))
        self.substitutes: set[int] = set()
        """Workers that were started again: their gradients count, but they are in another place of the script."""
        self.main = 0, 0
        """How often the worker that prints and saves was another one, and which it is. Decided for shard 0."""
        self.pool = pool
        self.follower: Connection | None = None
        self._awaits_follower = False
        self._there: dict[int, Connection] = {}
        self._lives: dict[int, str] = {}
        self._groups: dict[int, int] = {}  # under which number the workers of a host push that push as one
        self._speakers: dict[int, int] = {}  # and the worker of each that did so last
        self._gone = dict.fromkeys(range(workers), time.monotonic() + START_SECONDS - DROP_SECONDS)
        self._descriptions: list[tuple[int, Frame, bytes]] = []  # that wait for that of the first member
        self._pulls: dict[tuple[int, int], list[tuple[int, Frame]]] = {}  # by table and chunk, until it has a value
        self._shared: dict[tuple[int, int], Shared] = {}  # memory of workers on this host, by worker and table
        self.kept: dict[int, list[Any]] = {}  # what main has read for all, in pieces
        self._keeping: dict[tuple[int | None, int], dict[int, Any]] = {}  # what is not whole yet, by who brings it
        self._fetches: list[tuple[int, Frame]] = []
        self._dead: set[int] = set()  # workers of which the launcher says that they have died
        self._main_is_lost = False
        self._left: set[int] = set()
        self._gathered: set[int] = set()
        """Who has come to what all do together since it trained or was lost, member or not."""
        self._gathering = Gathering(self._gatherers)
        self._asked: dict[int, int] = {}  # the round of the gathering that each worker waits for
        self._requests: dict[int, int] = {}  # and the number of its request
        self._log: tuple[Frame, Any] | None = None  # the first half of an entry
        self.notes: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether anything is trained, or was, and all of it has its first values."""
        return bool(self.tables or self.over) and all(table.is_set for table in self.tables.values())

    # -- who is there -------------------------------------------------------------------------------------------------

    def welcome(self, worker: int, hello: dict[str, Any], connection: Connection) -> None:
        """A worker has called; its connection before is lost. Its `life` tells one that was started anew from one that was cut off."""
        life, again = hello["life"], hello["again"]
        if self._lives.get(worker, None if again else life) != life:
            self._drop(worker, is_lost=True)
            self._groups.pop(worker, None)
        if again:
            self._replace(worker)
        self._dead.discard(worker)
        self._lives[worker] = life
        self._there[worker] = connection
        self._gone.pop(worker, None)
        self._asked.pop(worker, None)
        for waiting in self._pulls.values():
            waiting[:] = [(who, frame) for who, frame in waiting if who != worker]
        self._fetches = [(who, frame) for who, frame in self._fetches if who != worker]
        self._forget_shared(worker)
        for number in self._users.keys() | set(hello["tables"]):
            users = self._users.setdefault(number, set())
            (users.add if number in hello["tables"] else users.discard)(worker)
        known = hello["main"][0], hello["main"][1]
        if known > self.main:  # the server that was in charge before has chosen it
            self._make_main(*known)
        self._choose_main()
        if not self.tables and not self.over and not self.anyone and not again:
            self.members.add(worker)  # it was cut off before there was anything to train
        connection.send(
            Frame(Kind.WELCOME),
            packed(
                {
                    "member": worker in self.members,
                    "epoch": self.epoch,
                    "round": self._gathering.newest(),
                    "tables": [table.number for table in self.tables.values() if table.is_set],
                    "main": self.main,
                    "kept": sorted(self.kept),
                }
            ),
        )

    def _replace(self, worker: int) -> None:
        """A worker is a substitute from now on: it goes by the settings of the others, as its schedule is at its beginning."""
        self.substitutes.add(worker)
        for table in self.tables.values():
            table.options[worker] = table.last_options

    def lose(self, worker: int, connection: Connection) -> None:
        """A worker's connection is gone; the worker may come back."""
        if self._there.get(worker) is connection:
            del self._there[worker]
            self._forget_shared(worker)
            if worker in self._dead:
                self._drop(worker, is_lost=True)
            elif worker in self.members | self._gathered or (worker == self.main[1] and worker not in self._left):
                self._gone[worker] = time.monotonic()

    def give_up(self, worker: int) -> None:
        """The launcher says that the worker has died: nobody need wait for it to call."""
        if worker in self._there:
            self._dead.add(worker)  # its connection will break in a moment, unless it has been started again already
        else:
            self._drop(worker, is_lost=True)

    def _forget_shared(self, worker: int) -> None:
        self._shared = {key: shared for key, shared in self._shared.items() if key[0] != worker}

    def tick(self, now: float) -> None:
        """Stops waiting for workers that have been gone for too long."""
        for worker in [worker for worker, since in self._gone.items() if now - since > DROP_SECONDS]:
            self._drop(worker, is_lost=True)
            self.notes.append(f"worker rank {worker} is gone; the others go on without it")

    def _drop(self, worker: int, *, is_lost: bool = False, comes_back: bool = False) -> None:
        gave_values = worker == self._main() and not self.anyone
        self._gone.pop(worker, None)
        self.members.discard(worker)
        if not comes_back:  # one that does may be in the middle of what all do together, where it needs no other server
            self._gathered.discard(worker)
        for table in self.tables.values():
            self._wait_for_members(table, come_back=comes_back)
        self._main_is_lost |= is_lost and worker == self.main[1] and worker not in self._left
        self._choose_main()
        self._tell_rounds()
        self.tell_members()
        self._describe_all()
        for table in self.tables.values():
            if gave_values and not table.is_set:
                refusal = packed(
                    f"worker rank {worker} is gone before the parameters had their first values; start again"
                )
                for other in self.members:
                    self._send(other, Frame(Kind.REFUSED), refusal)
        self._end_tables()

    def _pusher(self, worker: int) -> int:
        """The number under which what this worker pushes is counted: its own, or that of its host's workers together."""
        return self._groups.get(worker, worker)

    def _wait_for_members(self, table: Table, *, come_back: bool = False) -> None:
        """Those that are no members any more are not waited for; what they have pushed may be committed yet if they `come_back`."""
        wanted = set() if table.number in self.over else {self._pusher(worker) for worker in self.members}
        gone = table.shard.members - wanted
        table.shard.members |= wanted
        for pusher in gone:
            self._carry_out(table, table.shard.excuse(pusher) if come_back else table.shard.drop(pusher))

    def _choose_main(self) -> None:
        """When main is lost, the first worker is main that is there and has been from the start.

        One that has left stays main, as what it had to print and save is done, until somebody waits for what main has to say.
        One that comes back does not become it again.
        One that only cannot reach another server stays it, too: the others may not reach that server either.
        """
        there = self._there.keys() - self.substitutes - self._left
        if self.shard or not self._main_is_lost or not there:
            return
        self._main_is_lost = False
        self._make_main(self.main[0] + 1, min(there & self.members or there))
        self.notes.append(f"worker rank {self.main[1]} prints and saves now")

    def _make_main(self, number: int, main: int) -> None:
        self.main = number, main
        for worker in self._there:
            self._send(worker, Frame(Kind.MAIN, step=main, version=number))

    # -- what workers ask ---------------------------------------------------------------------------------------------

    def room(self, frame: Frame) -> torch.Tensor:
        """Memory for a gradient that is about to come."""
        table = self.tables.get(frame.table)
        if table is None or frame.chunk not in table.chunks or frame.length != table.wire_bytes(frame.chunk):
            raise DistribError(f"a gradient of {frame.length} bytes for chunk {frame.chunk} of table {frame.table}")
        return self.pool.take(frame.length)

    def hear(self, worker: int, frame: Frame, payload: Any) -> None:
        """Does what a worker's frame asks for. A PUSH's payload is its gradient's tensor."""
        if of_part := ASKED_OF_PART.get(frame.kind):
            of_part(self, worker, frame, payload)
        elif of_table := ASKED_OF_TABLES.get(frame.kind):
            if (table := self.tables.get(frame.table)) is None:
                raise DistribError(f"{frame.kind.name} for table {frame.table}, which nobody has described")
            of_table(self, table, worker, frame, payload)
        else:
            raise DistribError(f"a frame {frame.kind.name}, which no worker sends")

    def _present(self) -> set[int]:
        """The members but for substitutes; where all have lost another server nobody is one, and yet they come."""
        return (self.members - self.substitutes) or (self._there.keys() - self._left - self.substitutes)

    def _gatherers(self) -> set[int]:
        """Who is waited for in what all do together."""
        return self._present() | (self._gathered - self.substitutes)

    def _gather(self, worker: int, frame: Frame, payload: Any) -> None:
        self._gathered.add(worker)
        self._gathering.bring(worker, frame.version, payload)
        self._asked[worker] = frame.version
        self._requests[worker] = frame.step
        self._tell_rounds()

    def _keep_again(self, worker: int, frame: Frame, payload: Any) -> None:
        flags = FINAL if frame.version in self.kept else self._keep(worker, frame, payload)
        self._send(worker, Frame(Kind.DONE, flags, step=frame.step))

    def _fetch(self, worker: int, frame: Frame, payload: Any) -> None:
        self._fetches.append((worker, frame))
        self._answer_fetches()

    def _suspend(self, worker: int, frame: Frame, payload: Any) -> None:
        if self.is_whole:  # else it may yet give the first values
            self._drop(worker, comes_back=True)

    def _group(self, worker: int, frame: Frame, payload: Any) -> None:
        self._groups[worker] = frame.version
        for table in self.tables.values():
            self._wait_for_members(table)
        self.tell_members()

    def _leave(self, worker: int, frame: Frame, payload: Any) -> None:
        self._left.add(worker)
        self._drop(worker)
        self._answer_fetches()
        self._reply(worker, frame)

    def _tell_statistics(self, worker: int, frame: Frame, payload: Any) -> None:
        counts = sum((table.staleness for table in self.tables.values()), self._staleness)
        self._reply(worker, frame, packed({str(staleness): count for staleness, count in counts.items()}))

    def _hear_description(self, worker: int, frame: Frame, payload: Any) -> None:
        self._descriptions.append((worker, frame, bytes(payload)))
        self._describe_all()

    def _retire(self, worker: int, frame: Frame, payload: Any) -> None:
        self._users.get(frame.table, set()).discard(worker)
        if worker not in self.substitutes:  # the others have met before they say so, and none of them trains it
            self.over.add(frame.table)
            if table := self.tables.get(frame.table):
                self._wait_for_members(table)
        self._end_tables()
        self._reply(worker, frame)

    def _end_tables(self) -> None:
        """Forgets what is trained no more once nobody has it. Who was away so long describes it anew when it calls."""
        for number in self.over & self.tables.keys():
            if self._users.get(number, set()).isdisjoint(self.members | self._there.keys()):
                self._staleness += self.tables.pop(number).staleness
                self._shared = {key: shared for key, shared in self._shared.items() if key[1] != number}
                self.pool.clear()
                if self.follower:
                    self.follower.send(Frame(Kind.RETIRE, table=number))

    def _push(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        if frame.flags & SHARED:
            payload = self._shared[worker, frame.table].gradients[frame.chunk]
        final, pusher = bool(frame.flags & FINAL), self._pusher(worker)
        self._speakers[pusher] = worker
        # Who waits in a round may have a neighbour who trains, or older pushes on their way.
        trains = {other for other in self._gathered - self._asked.keys() if self._pusher(other) == pusher}
        self._gathered -= trains
        self._carry_out(
            table,
            table.shard.push(
                pusher,
                frame.chunk,
                frame.step,
                frame.version,
                payload,
                final=final,
                weight=frame.weight,
                mark=frame.mark,
            ),
        )

    def _commit(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        self._carry_out(table, table.shard.commit(self._pusher(worker), frame.step, unpacked(payload)))

    def _pull(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        self._pulls.setdefault((table.number, frame.chunk), []).append((worker, frame))
        self._answer_pulls(table, frame.chunk)

    def _share(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        sizes = {chunk: table.wire_bytes(chunk) for chunk in table.chunks}
        with contextlib.suppress(OSError, KeyError, ValueError):
            self._shared[worker, table.number] = Shared(unpacked(payload), sizes)
        self._reply(worker, frame, packed((worker, table.number) in self._shared))

    def _set_options(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        if worker not in self.substitutes:
            table.last_options = unpacked(payload)
            for one in (worker, *self.substitutes):
                table.options[one] = table.last_options

    def _set_values(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        """The first values, of which one worker's are enough, or with FINAL those that replace all before."""
        table.set(frame.chunk, payload, replace=bool(frame.flags & FINAL))
        self._send_state(table, frame.chunk)
        self._answer_pulls(table, frame.chunk)
        self._reply(worker, frame)

    def _give_state(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        self._reply(worker, frame, table.state(frame.chunk))

    def _take_state(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        table.restore(frame.chunk, payload)
        self._send_state(table, frame.chunk)
        self._reply(worker, frame)

    def _tell_newest(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        self._reply(worker, frame, packed((table.shard.newest(), table.shard.newest(self._pusher(worker)))))

    def _join(self, table: Table, worker: int, frame: Frame, payload: Any) -> None:
        self.members.add(worker)
        self._carry_out(table, table.shard.join(self._pusher(worker), frame.version))
        self._reply(worker, frame)
        self.tell_members()

    def _reply(self, worker: int, frame: Frame, payload: Any = b"") -> None:
        self._send(worker, Frame(Kind.DONE, table=frame.table, chunk=frame.chunk, step=frame.step), payload)

    def _send(self, worker: int, frame: Frame, payload: Any = b"", **how: Any) -> None:
        if connection := self._there.get(worker):
            connection.send(frame, payload, **how)

    def _describe_all(self) -> None:
        """A table is what the first of the members says it is; the others have to agree."""
        while waiting := [
            said
            for said in self._descriptions
            if said[1].table in self.tables.keys() | self.over or self.anyone or said[0] == self._main()
        ]:
            self._descriptions.remove(waiting[0])
            self._describe(*waiting[0])

    def _main(self) -> int | None:
        return min(self._present(), default=None)

    def _describe(self, worker: int, frame: Frame, payload: Any) -> None:
        description = msgspec.json.decode(payload, type=Description)
        table, is_over = self.tables.get(frame.table), frame.table in self.over
        self._users.setdefault(frame.table, set()).add(worker)
        if table is None:
            pushers = set() if is_over else {self._pusher(member) for member in self.members}
            table = Table(frame.table, description, self.shard, pushers, self.strategy, self.pool)
            needed, free = table.memory_bytes(), psutil.virtual_memory().available
            if needed > free:
                where = f"parameter server {self.shard} on {socket.gethostname()}"
                what = f"{where} needs {format_size(needed)} for its part of the model and has {format_size(free)} free"
                refusal = Frame(Kind.REFUSED, table=frame.table, step=frame.step)
                self._send(worker, refusal, packed(f"{what}; use more servers (--servers) or larger hosts"))
                return
            self.tables[frame.table] = table
            self._begin_replica(table)
        elif why := table.description.differs(description):
            refusal = Frame(Kind.REFUSED, table=frame.table, step=frame.step)
            self._send(
                worker,
                refusal,
                packed(
                    f"worker rank {worker} has another model or optimizer than the others: {why}; make the same everywhere"
                ),
            )
            return
        self._reply(worker, frame, packed({"give": not table.is_set and (is_over or worker == self._main())}))

    def _answer_pulls(self, table: Table, chunk: int) -> None:
        if chunk not in table.updaters:
            return
        for worker, frame in self._pulls.pop((table.number, chunk), []):
            answer = Frame(Kind.DONE, 0, frame.table, chunk, frame.step, table.shard.version(chunk))
            self._send(worker, answer, table.copied(chunk), priority=chunk)

    def _answer_fetches(self) -> None:
        waiting, self._fetches = self._fetches, []
        for worker, frame in waiting:
            if (kept := self.kept.get(frame.version)) is not None:
                answer = Frame(Kind.DONE, 0, 0, frame.chunk, frame.step, frame.version, len(kept))
                self._send(worker, answer, kept[frame.chunk])
            else:
                if self.main[1] in self._left:  # and never says what this worker waits for
                    self._main_is_lost = True
                    self._choose_main()
                self._fetches.append((worker, frame))

    def _keep(self, worker: int | None, frame: Frame, payload: Any) -> int:
        """A piece of what main has read for all, or of the primary's copy; the flags of the answer say whether it was the last."""
        pieces = self._keeping.setdefault((worker, frame.version), {})
        pieces[frame.chunk] = payload
        if len(pieces) < frame.weight:
            return 0
        del self._keeping[worker, frame.version]
        self.kept[frame.version] = [pieces[number] for number in range(frame.weight)]
        self._send_kept(frame.version)
        self._answer_fetches()
        return FINAL | APPLIED

    # -- rounds of all workers ----------------------------------------------------------------------------------------

    def _tell_rounds(self) -> None:
        results = self._gathering.complete()
        bodies: dict[int, bytes] = {}  # the same for all who asked: there may be many, and much in it
        for worker, number in list(self._asked.items()):
            if (parts := results.get(number)) is not None:
                del self._asked[worker]
                if number not in bodies:
                    index = [[who, len(parts[who])] for who in sorted(parts)]
                    head = packed(index)
                    bodies[number] = b"".join([len(head).to_bytes(4, "big"), head, *(parts[who] for who, _ in index)])
                self._send(worker, Frame(Kind.DONE, step=self._requests[worker]), bodies[number])

    # -- effects --------------------------------------------------------------------------------------------------------

    def _carry_out(self, table: Table, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply) and not any(update.weight for update in effect.updates):
                for update in effect.updates:  # everybody has left out this step, which is counted and changes nothing
                    self.pool.give(update.gradient)
                if self.follower:
                    self._replicate(table, effect, b"", {}, None)
            elif isinstance(effect, Apply):
                pusher = effect.updates[0].worker
                settings = table.options.get(self._speakers.get(pusher, pusher))
                gradient, options, memory = table.effective(effect.chunk, effect.updates, settings)
                table.apply(effect.chunk, gradient, options)
                if self.follower:
                    self._replicate(table, effect, raw(gradient), options, memory)
                else:
                    table.give_back(memory)
            elif isinstance(effect, Answer):
                speaker = self._speakers.get(effect.worker, effect.worker)
                if connection := self._there.get(speaker):
                    self._answer(table, effect, speaker, connection)
            else:
                self.pool.give(effect.gradient)

    def _answer(self, table: Table, answer: Answer, speaker: int, connection: Connection) -> None:
        chunk, flags = answer.chunk, APPLIED if answer.applied else 0
        payload, sent = None, None
        if shared := self._shared.get((speaker, table.number)):
            table.publish_into(chunk, answer.worker, shared.values[chunk])
            flags |= SHARED
        else:
            payload, sent = table.publish(chunk, answer.worker)
        frame = Frame(Kind.VALUE, flags, table.number, chunk, answer.step, table.shard.version(chunk))
        connection.send(frame, payload or b"", priority=chunk, sent=sent)

    # -- the replica: this server's side --------------------------------------------------------------------------------

    def lose_follower(self) -> None:
        """The replica is gone. Tables that are new meanwhile wait for another, too, or for leave to go on without."""
        self.follower, self._awaits_follower = None, True

    def await_follower(self) -> None:
        """Nobody is answered before there is a replica, or it is agreed that there is none."""
        self._awaits_follower = True
        for table in self.tables.values():
            table.shard.replicate(table.shard.index)

    def follow(self, follower: Connection | None) -> None:
        """From now on `follower` gets all that this part learns; None: nobody does, and nobody is waited for."""
        self.follower, self._awaits_follower = follower, False
        for number in self.over:
            if follower:
                follower.send(Frame(Kind.RETIRE, table=number))
        for table in self.tables.values():
            self._begin_replica(table)
        for number in self.kept:
            self._send_kept(number)

    def _begin_replica(self, table: Table) -> None:
        if self.follower is None:
            self._carry_out(table, table.shard.replicate(-1 if self._awaits_follower else None))
            return
        state = table.shard.state()
        about = {"description": msgspec.to_builtins(table.description), "shard": state}
        self.follower.send(Frame(Kind.STATE, MORE, table.number), packed(about))
        for chunk in table.updaters:
            self._send_state(table, chunk)
        self.follower.send(
            Frame(Kind.STATE, APPLIED, table.number, step=state["index"])
        )  # asks for a word that it is there
        table.shard.replicate(
            min(-1 if table.shard.replicated_to is None else table.shard.replicated_to, state["index"])
        )

    def _send_state(self, table: Table, chunk: int) -> None:
        if self.follower:
            self.follower.send(Frame(Kind.STATE, 0, table.number, chunk), table.saved(chunk))

    def _send_kept(self, number: int) -> None:
        if self.follower:
            for piece, content in enumerate(kept := self.kept[number]):
                frame = Frame(Kind.STATE, SHARED, chunk=piece, version=number, weight=len(kept))
                self.follower.send(frame, content)

    def tell_members(self) -> None:
        """Tells the replica who is waited for."""
        if self.follower:
            groups = [[worker, group] for worker, group in self._groups.items()]
            self.follower.send(Frame(Kind.STATE, FINAL), packed({"members": sorted(self.members), "groups": groups}))

    def _replicate(
        self, table: Table, entry: Apply, gradient: Any, options: dict[str, Any], memory: torch.Tensor | None
    ) -> None:
        assert self.follower
        about = {"updates": [[u.worker, u.step, u.mark] for u in entry.updates], "options": options}
        frame = Frame(Kind.LOG, MORE, table.number, entry.chunk, entry.entry, entry.version)
        self.follower.send(frame, packed(about))
        self.follower.send(frame._replace(flags=0), gradient, sent=lambda: table.give_back(memory))

    def acknowledge(self, frame: Frame) -> None:
        """The replica has an entry."""
        if table := self.tables.get(frame.table):
            self._carry_out(table, table.shard.replicate(frame.step))

    # -- the replica: the other side --------------------------------------------------------------------------------------

    def learn(self, frame: Frame, payload: Any, primary: Connection) -> None:
        """As a replica: takes over what the primary sends."""
        if frame.kind is Kind.STATE and frame.flags & FINAL:
            told = unpacked(payload)
            self.members, self._groups = set(told["members"]), dict(told["groups"])
        elif frame.kind is Kind.STATE and frame.flags & SHARED:
            self._keep(None, frame, payload)
        elif frame.kind is Kind.STATE and frame.flags & MORE:
            about = unpacked(payload)
            description = msgspec.convert(about["description"], Description)
            table = Table(frame.table, description, self.shard, (), self.strategy, self.pool)
            table.shard.restore(about["shard"])
            self.tables[frame.table] = table
        elif frame.kind is Kind.STATE and frame.flags & APPLIED:
            primary.send(Frame(Kind.LOGGED, table=frame.table, step=frame.step))
        elif frame.kind is Kind.RETIRE:
            self.tables.pop(frame.table, None)
            self.over.add(frame.table)
        elif frame.kind is Kind.STATE:
            self.tables[frame.table].load(frame.chunk, payload)
        elif frame.flags & MORE:
            self._log = frame, unpacked(payload)
        elif self._log:
            table, about = self.tables[frame.table], self._log[1]
            updates = [(worker, step, mark) for worker, step, mark in about["updates"]]
            if table.shard.follow(frame.chunk, updates, frame.version, frame.step) and len(payload):
                target = table.updaters[frame.chunk].value
                table.apply(
                    frame.chunk, torch.frombuffer(payload, dtype=target.dtype).view(target.shape), about["options"]
                )
            primary.send(Frame(Kind.LOGGED, table=frame.table, step=frame.step))

    def await_again(self) -> None:
        """The workers call at once if they are there: they knew this part from another server, or an earlier one here."""
        self.anyone = True
        self._gone = dict.fromkeys(self.members, time.monotonic())

    def take_charge(self, epoch: int) -> None:
        """The replica is the primary from now on; members that do not call are soon dropped."""
        self.epoch, self.in_charge = epoch, True
        self.await_again()
        for table in self.tables.values():
            table.shard.members = {self._pusher(worker) for worker in self.members}


ASKED_OF_PART: dict[Kind, Callable[[Part, int, Frame, Any], None]] = {
    Kind.GATHER: Part._gather,
    Kind.KEEP: Part._keep_again,
    Kind.FETCH: Part._fetch,
    Kind.SUSPEND: Part._suspend,
    Kind.GROUP: Part._group,
    Kind.LEAVE: Part._leave,
    Kind.STATISTICS: Part._tell_statistics,
    Kind.DESCRIBE: Part._hear_description,
    Kind.RETIRE: Part._retire,
}
ASKED_OF_TABLES: dict[Kind, Callable[[Part, Table, int, Frame, Any], None]] = {
    Kind.PUSH: Part._push,
    Kind.COMMIT: Part._commit,
    Kind.PULL: Part._pull,
    Kind.SHARE: Part._share,
    Kind.OPTIONS: Part._set_options,
    Kind.SET: Part._set_values,
    Kind.GET_STATE: Part._give_state,
    Kind.SET_STATE: Part._take_state,
    Kind.NEWEST: Part._tell_newest,
    Kind.JOIN: Part._join,
}
"""What a worker's frame asks for, of the part, or of a table that it names."""
