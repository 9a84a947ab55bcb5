"""A worker's side of the wire: one thread that keeps a connection to the server of each shard, come what may.

What was asked and not answered is asked again on the next connection: the servers apply nothing twice. When a server cannot be
reached, the one that may have its replica is asked too, and the connection is kept with whoever is in charge.
"""

from __future__ import annotations

import concurrent.futures
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from distrib.errors import TrainingError
from distrib.training.parameter_server.failover import CALL_SECONDS
from distrib.training.parameter_server.host_aggregation.member import HostGroup
from distrib.training.parameter_server.server_table import raw
from distrib.training.parameter_server.shared_memory import Arena
from distrib.training.parameter_server.transport import (
    APPLIED,
    FINAL,
    SHARED,
    Connection,
    Frame,
    Kind,
    Loop,
    Outgoing,
    check_size,
    packed,
    unpacked,
)
from distrib.utils.framing import ProtocolError

T = TypeVar("T")

RETRY_SECONDS = 0.2
SUSPEND_SECONDS = 4.0
"""After which a worker that cannot reach a server asks the others not to wait for it."""

KEEP_SECONDS = 30.0
"""In which a server has given what main has read for all to its replica and its disk."""

WORRY_SECONDS = 15.0
"""After which main tells of a server that nobody reaches."""

LOST_SECONDS = 120.0
"""After which a worker that cannot reach a server fails: with no replica and nobody to start it again, it will not come back."""


class Slot:
    """A chunk on a worker: the memory that its gradient is sent from, and that its new value is received into."""

    def __init__(self, table: int, chunk: int, shard: int, gradient: torch.Tensor, value: torch.Tensor) -> None:
        self.table, self.chunk, self.shard = table, chunk, shard
        self.gradient, self.value = gradient, value
        self.version = 0
        self.waits = False
        """Whether a push has not been answered yet."""
        self.fresh = False
        """Whether `value` holds an answer that the model has not got yet."""
        self.refused = 0
        """How many of its gradients came too late to count."""
        self.answered: Callable[[Slot, bool], None] | None = None
        """Who is told of an answer, and whether the push counted, where it is not the worker that waits."""


class Push:
    """A slot's gradient of a step, until it is answered; it stands for `weight` workers' gradients, and `mark` tells which."""

    def __init__(self, slot: Slot, step: int, final: bool, weight: int = 1, mark: int = 0) -> None:
        self.slot, self.step, self.final, self.weight, self.mark = slot, step, final, weight, mark
        self.outgoing: Outgoing | None = None


class _Link:
    """The connection to whoever is in charge of one shard. Lives in the client's thread."""

    def __init__(self, client: Client, shard: int) -> None:
        self.client, self.shard = client, shard
        self.epoch = 0
        self.connection: Connection | None = None
        self.welcomed = self.was_welcomed = self.was_told_of = False
        self.down_since = time.monotonic()
        self.pushes: dict[tuple[int, int], Push] = {}
        self.requests: dict[int, tuple[Frame, Any, Future[tuple[Frame, Any]]]] = {}
        self.options: dict[int, bytes] = {}
        self.last_gather: tuple[Frame, Any] | None = None
        self.shared: set[int] = set()  # tables of which the server sees this worker's memory
        self._sock: socket.socket | None = None
        self._tries = 0
        self._called = 0.0
        self._voted: set[int] = set()
        self._silent = set(range(len(client.addresses)))  # who has not answered since the one in charge is gone
        self._place = shard

    # -- the connection -----------------------------------------------------------------------------------------------

    def call(self) -> None:
        addresses = self.client.addresses
        places = (
            [(self.shard + n) % len(addresses) for n in range(len(addresses))] if self.client.replicas else [self.shard]
        )
        place = self._place = places[self._tries % len(places)]
        host, port = addresses[place]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        sock.connect_ex((host, port))
        self._sock, self._called = sock, time.monotonic()
        self.connection = Connection(sock, self.client.key, listener=False, room=self._room, receive=self._receive)
        if place != self.shard:
            self._voted.add(self.epoch + 1)
        hello = {
            "worker": self.client.rank, "life": self.client.life, "again": self.client.again,
            "shard": self.shard, "epoch": self.epoch, "main": self.client.main, "silent": sorted(self._silent - {place}),
            "tables": sorted(self.client.tables),
        }  # fmt: skip
        self.connection.send(Frame(Kind.HELLO), packed(hello), priority=-2)
        self.client.loop.watch(sock, self._attend, writing=True)

    def hang_up(self) -> None:
        if self._sock is None:
            return
        self.client.loop.forget(self._sock)
        self._sock.close()
        if self.welcomed:
            self.down_since = time.monotonic()
            self._silent = set(range(len(self.client.addresses)))
            self._tries = 0
        else:
            self._tries += 1
        self._sock = self.connection = None
        self.welcomed = False
        self.shared.clear()

    def tick(self, now: float) -> None:
        if self._sock is None:
            if not self.client.failed:
                self.call()
        elif not self.welcomed and now - self._called > CALL_SECONDS:
            self.hang_up()
            self.call()

    def _attend(self, events: int) -> None:
        assert self.connection
        try:
            if events & selectors.EVENT_READ:
                self.connection.read()
            if self.connection:
                self.connection.flush()
        except (OSError, ProtocolError):
            self.hang_up()
            return
        self.watch()

    def watch(self) -> None:
        """Send what the socket takes, and wait for the rest."""
        if self.connection and self._sock:
            try:
                self.connection.flush()
                self.client.loop.watch(self._sock, self._attend, writing=self.connection.waits_to_send)
            except OSError:
                self.hang_up()

    # -- what comes in --------------------------------------------------------------------------------------------------

    def _room(self, frame: Frame) -> memoryview | None:
        if frame.kind is Kind.VALUE:
            push = self.pushes.get((frame.table, frame.chunk))
            return raw(push.slot.value) if push and push.step == frame.step else None
        return None

    def _receive(self, frame: Frame, payload: Any) -> None:
        if frame.kind is Kind.VALUE:
            push = self.pushes.get((frame.table, frame.chunk))
            if push and push.step == frame.step:
                del self.pushes[frame.table, frame.chunk]
                push.slot.version = frame.version
                push.slot.refused += not frame.flags & APPLIED
                if push.slot.answered:
                    push.slot.answered(push.slot, bool(frame.flags & APPLIED))
                else:
                    self.client.arrived(push.slot)
        elif frame.kind is Kind.DONE:
            if not frame.step and len(payload) and unpacked(payload) is True:  # the answer to SHARE
                self.shared.add(frame.table)
            if (request := self.requests.pop(frame.step, None)) is not None:
                request[2].set_result((frame, payload))
        elif frame.kind is Kind.WELCOME:
            self._welcome(unpacked(payload))
        elif frame.kind is Kind.MAIN:
            self.client.main = max(self.client.main, (frame.version, frame.step))
        elif frame.kind is Kind.REFUSED:
            why = unpacked(payload)
            self._silent.discard(self._place)
            if why:
                self.client.fail(TrainingError(why))
            elif frame.flags:
                self._voted.discard(self.epoch + 1)
            raise ConnectionRefusedError
        elif frame.kind is Kind.ALONE and self.connection and frame.version not in self._voted:
            self.epoch = max(self.epoch, frame.version)
            self.connection.send(Frame(Kind.AGREED, version=frame.version))

    def _welcome(self, said: dict[str, Any]) -> None:
        assert self.connection
        if said["epoch"] < self.epoch:
            raise ConnectionRefusedError
        self.epoch = said["epoch"]
        self.client.main = max(self.client.main, (said["main"][0], said["main"][1]))
        self.welcomed = self.was_welcomed = True
        self.was_told_of = False
        if not said["member"]:
            self.client.outside = True
            self.client.astray |= said["round"] > self.client.round
            self.client.round = max(self.client.round, said["round"])
        for number, about in self.client.tables.items():
            if number not in said["tables"]:  # a server that was started again, and has lost everything
                for frame, payload in about(self.shard):
                    self.connection.send(frame, payload)
        for number, (_, pieces) in self.client.kept.items():
            if self.shard == 0 and number not in said["kept"]:
                for frame, piece in pieces:
                    self.connection.send(frame, piece)
        if self.client.group:
            self.connection.send(Frame(Kind.GROUP, version=self.client.group.number))
        for table in self.client.arenas:
            self.share(table)
        if self.last_gather:
            self.connection.send(*self.last_gather)
        for frame, payload, _ in self.requests.values():
            self.connection.send(frame, payload)
        for table, payload in self.options.items():
            self.connection.send(Frame(Kind.OPTIONS, table=table), payload)
        for push in self.pushes.values():
            self.send_push(push)

    def forget(self, table: int) -> None:
        """There is nothing to tell of this table any more."""
        self.options.pop(table, None)
        self.shared.discard(table)
        for at, push in self.pushes.items():
            if at[0] == table and push.outgoing:
                push.outgoing.cancelled = True
        self.pushes = {at: push for at, push in self.pushes.items() if at[0] != table}

    def share(self, table: int) -> None:
        """Offers the server the memory of this worker, if it is on the same host."""
        if self.connection and self.welcomed and self._sock:
            arena = self.client.arenas.get(table, {}).get(self.shard)
            if arena and self._sock.getsockname()[0] == self._sock.getpeername()[0]:
                self.connection.send(Frame(Kind.SHARE, table=table), packed(arena.about))

    # -- what goes out ----------------------------------------------------------------------------------------------------

    def send_push(self, push: Push) -> None:
        if self.connection and self.welcomed:
            slot = push.slot
            flags, payload = FINAL if push.final else 0, raw(slot.gradient)
            if slot.table in self.shared:
                flags, payload = flags | SHARED, memoryview(b"")
            frame = Frame(Kind.PUSH, flags, slot.table, slot.chunk, push.step, slot.version, push.weight, push.mark)
            push.outgoing = self.connection.send(frame, payload, priority=slot.chunk)

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """What is not asked again when the connection breaks."""
        if self.connection and self.welcomed:
            self.connection.send(frame, payload)


class Client:
    """This worker's connections to all servers. What it offers may be called from the thread that trains."""

    def __init__(
        self, rank: int, addresses: Sequence[tuple[str, int]], key: bytes, *, replicas: bool, again: bool = False
    ) -> None:
        self.rank, self.addresses, self.key, self.replicas = rank, addresses, key, replicas
        self.life = os.urandom(8).hex()
        self.again = again
        """Whether this worker takes the place of one that died."""
        self.main = 0, 0
        """How often main was another worker, and which it is, as far as is known here."""
        self.outside = False
        """Whether some server does not wait for this worker: it has to join again."""
        self.tables: dict[int, Callable[[int], list[tuple[Frame, Any]]]] = {}
        """Of each table, what a server must be told that knows nothing of it."""
        self.kept: dict[int, tuple[float, list[tuple[Frame, Any]]]] = {}
        """What this worker has read for all: when the server had it, and in which pieces, until it cannot be lost any more."""
        self.arenas: dict[int, dict[int, Arena]] = {}
        """Memory that servers of this host may see, by table and shard."""
        self.group: HostGroup | None = None
        """The workers of this host, where they push as one."""
        self.rejoin: Callable[[], None] = lambda: None
        self.round = 0
        """Of what all workers do together, which comes next for this one."""
        self.astray = False
        """Whether it has missed some: the others may be in another place of the script."""
        self.waited_seconds = 0.0
        """How long training has stood still for answers."""
        self.loop = Loop()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._requests = 0
        self._suspended = False
        self._links = [_Link(self, shard) for shard in range(len(addresses))]
        self._thread = threading.Thread(target=self._run, name="parameter-server client", daemon=True)
        self._thread.start()

    # -- from the training thread -----------------------------------------------------------------------------------------

    def ask(self, shard: int, frame: Frame, payload: Any = b"") -> Future[tuple[Frame, Any]]:
        """Ask a shard's server; the answer comes in time, whatever becomes of connections and servers.

        Raises TrainingError for what is too large for a frame.
        """
        check_size(len(payload))
        self._requests += 1
        request = frame._replace(step=self._requests)
        future: Future[tuple[Frame, Any]] = Future()

        def send() -> None:
            link = self._links[shard]
            link.requests[request.step] = request, payload, future
            if request.kind is Kind.GATHER:
                link.last_gather = request, payload
            link.send(request, payload)
            link.watch()

        self.loop.call(send)
        return future

    def keep(self, number: int, pieces: list[tuple[Frame, Any]]) -> None:
        """Gives them again to a server that has lost them, for as long as it may."""
        self.loop.call(lambda: self.kept.update({number: (time.monotonic(), pieces)}))

    def result(self, future: Future[T]) -> T:
        """Wait for an answer. Raises TrainingError when there will be none."""
        while not future.done():
            self.check()
            try:
                return future.result(timeout=0.2)
            except concurrent.futures.TimeoutError:  # in Python 3.10 another than the built-in one
                continue
        return future.result()

    def push(
        self, slot: Slot, step: int, *, final: bool, weight: int = 1, ready: Callable[[], None] | None = None
    ) -> None:
        """Send a slot's gradient, which must not change until it is answered if it is final."""
        slot.waits = True

        def send() -> None:
            if ready:
                ready()
            if self.group:
                self.group.push(Push(slot, step, final, weight))
            else:
                self.send_push(slot, step, final=final, weight=weight)

        self.loop.call(send)

    def commit(self, slots: Iterable[Slot], step: int) -> None:
        """What was pushed of these slots is final."""
        slots = list(slots)
        self.loop.call(lambda: (self.group.commit if self.group else self.send_commit)(slots, step))

    def options(self, table: int, groups: list[dict[str, Any]]) -> None:
        """The settings of a table's parameter groups, for the pushes that follow."""
        payload = packed(groups)

        def send() -> None:
            for link in self._links:
                link.options[table] = payload
                link.send(Frame(Kind.OPTIONS, table=table), payload)

        self.loop.call(send)

    def share(self, table: int, arenas: dict[int, Arena]) -> None:
        """Offer this memory to servers of this host."""

        self.loop.call(lambda: self.offer(table, arenas))

    def join_group(self, group: HostGroup) -> None:
        """From now on this worker pushes with others of its host."""

        def join() -> None:
            for link in self._links:
                link.send(Frame(Kind.GROUP, version=group.number))
                link.watch()
            group.begin()

        self.group = group
        self.loop.call(join)

    @property
    def failed(self) -> bool:
        """Whether what is waited for will never come."""
        return self._error is not None

    def forget(self, table: int) -> None:
        """A table is trained no more: returns when nothing here holds its memory."""
        done: Future[None] = Future()

        def forget() -> None:
            self.tables.pop(table, None)
            self.arenas.pop(table, None)
            for link in self._links:
                link.forget(table)
            if self.group:
                self.group.forget(table)
            done.set_result(None)

        self.loop.call(forget)
        self.result(done)

    def wait(self, slots: Iterable[Slot]) -> None:
        """Until every push of these slots is answered. Raises TrainingError when one will never be."""
        for slot in slots:
            if not slot.waits:
                continue
            begun = time.monotonic()
            while slot.waits:
                with self._changed:
                    if slot.waits:
                        self._changed.wait(1.0)
                self.check()
            self.waited_seconds += time.monotonic() - begun

    def check(self) -> None:
        """Raises what went wrong meanwhile."""
        if self._error:
            raise self._error

    def is_main(self) -> bool:
        """Whether this worker is main. One that is cut off cannot know: it waits until it hears whether another was chosen."""
        link = self._links[0]
        while self.main[1] == self.rank and not self.again:
            knows = link.welcomed or not link.was_welcomed or self.loop.ended
            if knows and self.main[1] == self.rank:  # in this order: who welcomes tells of another main first
                return True
            self.check()
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """End the thread; nothing more is sent, and who asks is told."""

        def end() -> None:
            self.loop.ended = True

        self.loop.call(end)
        self._thread.join(5.0)
        self.fail(TrainingError("the job is closed: the parameter servers are not asked any more",
                                hint="do it before job.close()"))  # fmt: skip

    # -- in the client's thread ---------------------------------------------------------------------------------------------

    def send_push(self, slot: Slot, step: int, *, final: bool, weight: int = 1, mark: int = 0) -> None:
        """Send a slot's gradient to its server."""
        link = self._links[slot.shard]
        old = link.pushes.get((slot.table, slot.chunk))
        if old and old.outgoing:
            old.outgoing.cancelled = True
        push = link.pushes[slot.table, slot.chunk] = Push(slot, step, final, weight, mark)
        link.send_push(push)
        link.watch()

    def send_commit(self, slots: Iterable[Slot], step: int) -> None:
        """Tell the servers that what they got of these slots is final."""
        told: dict[tuple[int, int], list[int]] = {}
        for slot in slots:
            link = self._links[slot.shard]
            push = link.pushes.get((slot.table, slot.chunk))
            if push is None or push.final:
                continue
            push.final = True
            if push.outgoing and not push.outgoing.cancelled:
                push.outgoing.frame = push.outgoing.frame._replace(flags=push.outgoing.frame.flags | FINAL)
            elif link.welcomed:
                told.setdefault((slot.shard, slot.table), []).append(slot.chunk)
        for (shard, table), chunks in told.items():
            self._links[shard].send(Frame(Kind.COMMIT, table=table, step=step), packed(chunks))
        for link in self._links:
            link.watch()

    def offer(self, table: int, arenas: dict[int, Arena]) -> None:
        """Offer this memory to servers of this host."""
        self.arenas[table] = arenas
        for link in self._links:
            link.share(table)
            link.watch()

    def arrived(self, slot: Slot) -> None:
        with self._changed:
            slot.waits, slot.fresh = False, True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._tick()
            self.loop.run()
        except Exception as error:  # the training thread must not wait for ever
            self.fail(error)
        for link in self._links:
            link.hang_up()
        if self.group:
            self.group.close()

    def _tick(self) -> None:
        now = time.monotonic()
        self.kept = {number: kept for number, kept in self.kept.items() if now - kept[0] < KEEP_SECONDS}
        for link in self._links:
            link.tick(now)
            host, port = self.addresses[link.shard]
            away_seconds = 0.0 if link.welcomed else now - link.down_since
            if away_seconds > WORRY_SECONDS and not link.was_told_of and self.main[1] == self.rank:
                link.was_told_of = True
                print(f"distrib: parameter server {link.shard} at {host}:{port} has not been reached for {away_seconds:.0f} s; "
                      f"the job fails after {LOST_SECONDS:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
            if away_seconds > LOST_SECONDS:
                hint = "see its log; --replicas 1 survives the loss of a server"
                if self.replicas:
                    hint = "its replica takes charge where more than half of the workers are there to ask it; see the servers' logs"
                self.fail(TrainingError(f"parameter server {link.shard} at {host}:{port} cannot be reached", hint=hint))
        # At a server that it has not reached yet, it was not counted out: it has taken no step without the others.
        away = any(
            link.was_welcomed and not link.welcomed and now - link.down_since > SUSPEND_SECONDS for link in self._links
        )
        if away and not self._suspended:
            self.outside = True
            for link in self._links:
                link.send(Frame(Kind.SUSPEND))
                link.watch()
        self._suspended = away
        if self.group:
            self.group.tick(now)
        self.loop.later(RETRY_SECONDS, self._tick)
