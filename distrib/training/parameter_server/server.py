"""The process of a server: `python -m distrib.training.parameter_server`, started by the launcher beside the workers.

It is in charge of one shard of the parameters from the start and, with `--replicas 1`, keeps a copy of another server's, of
which it takes charge when that server is gone. One thread; it waits in the kernel when there is nothing to do.

**Who is in charge** of a shard is counted in epochs. A replica takes charge when more than half of the members say that they
cannot reach the primary and it cannot either; those do not count of which the launcher says that they have died. A primary
whose replica is gone answers nobody until more than half of the members have agreed that it goes on alone, which they do unless
they have given it up. Two such majorities have a worker in common, which obeys the higher epoch: so at most one server goes on,
and it has every update that was acknowledged. Where primary and replica are both gone, what workers have is what there is
(`succession`).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distrib.environment import (
    DISTRIB_EVENTS_FD,
    DISTRIB_KEY,
    DISTRIB_RESTARTED,
    DISTRIB_SERVER,
    DISTRIB_SERVERS,
    WORLD_SIZE,
)
from distrib.errors import DistribError, TrainingError
from distrib.strategy import Strategy, strategy_from_environment
from distrib.training.parameter_server.failover import Ballot, Replica, patience_seconds
from distrib.training.parameter_server.server_table import Pool, raw
from distrib.training.parameter_server.shard_service import DROP_SECONDS, Part
from distrib.training.parameter_server.snapshots import Snapshots
from distrib.training.parameter_server.transport import Connection, Frame, Kind, Loop, packed, unpacked
from distrib.utils.framing import HANDSHAKE_TIMEOUT_SECONDS, ProtocolError

TICK_SECONDS = 0.5


class _Peer:
    """Whoever is at the other end of a connection that was accepted."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self.server = server
        self.part: Part | None = None
        self.worker: int | None = None
        self.primary = False
        self.is_refused = False
        self.gradient: torch.Tensor | None = None
        self.connection = Connection(
            sock, server.key, listener=True, room=self.room, receive=self.receive, queued=lambda: server.talk_to(self)
        )

    def attend(self, events: int) -> None:
        self.server.attend(self, events)

    def room(self, frame: Frame) -> memoryview | None:
        if frame.kind is Kind.PUSH and not self.is_refused and self.part and self.worker is not None:
            self.gradient = memory = self.part.room(frame)
            return raw(memory)
        return None

    def receive(self, frame: Frame, payload: Any) -> None:
        if self.is_refused:  # it does not know yet
            return
        if frame.kind is Kind.HELLO:
            self.server.introduce(self, unpacked(payload))
        elif self.part is None:
            raise ProtocolError(f"{frame.kind.name} before HELLO")
        elif self.primary:
            self.part.learn(frame, payload, self.connection)
        elif frame.kind is Kind.AGREED:
            self.server.agreed(self.part, self.worker, frame.version)
        elif self.worker is not None:
            self.part.hear(self.worker, frame, self.gradient if frame.kind is Kind.PUSH else payload)


class Server:
    """Server number `number` of those at `addresses`, for `workers` workers."""

    def __init__(
        self, number: int, addresses: Sequence[tuple[str, int]], workers: int, key: bytes, strategy: Strategy
    ) -> None:
        self.number, self.addresses, self.workers, self.key, self.strategy = number, addresses, workers, key, strategy
        self.loop = Loop()
        self.pool = Pool()
        self.parts: dict[int, Part] = {}
        self.snapshots = Snapshots(number)
        again = bool(os.environ.get(DISTRIB_RESTARTED))
        if not again or not strategy.replicas:  # else its replica is in charge by now
            self._take_own_part(again)
        self.was_called = again  # in its life before, it may be
        """Whether a worker ever was."""
        self._peers: set[_Peer] = set()
        self._talkative: set[_Peer] = set()
        self._dead: set[int] = set()
        """The ranks that have died, as the launcher says, and were not started again."""
        self._links: dict[int, _ReplicaLink] = {}
        self._ballots: dict[int, Ballot] = {}  # by shard: who cannot reach its primary
        self._agreed: dict[int, set[int]] = {}  # by shard: who agrees that it has no replica
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", addresses[number][1]),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
        self._listener.setblocking(False)

    def _take_own_part(self, again: bool) -> None:
        own = Part(self.number, self.workers, len(self.addresses), self.strategy, self.pool)
        own.in_charge = True
        self.parts[self.number] = own
        if again:
            own.await_again()
            age = self.snapshots.restore(own)
            source = "the parameters that workers have" if age is None else f"a snapshot of {age:.1f} s before"
            say(f"was started again; its shard comes from {source}, without a replica (--replicas 1 loses nothing)")

    def hear_news(self, sock: socket.socket) -> None:
        """Listens to what the launcher knows of ranks, one piece of JSON at a time."""

        def read(_: int) -> None:
            news = sock.recv(4096)
            if not news:  # whoever told is gone, and this process soon, too
                self.loop.forget(sock)
                return
            rank, is_dead = unpacked(news)["rank"], unpacked(news)["dead"]
            if not is_dead:
                self._dead.discard(rank)
                return
            self._dead.add(rank)
            for part in self.parts.values():
                if part.in_charge and rank < self.workers:
                    part.give_up(rank)
            self.flush()

        self.loop.watch(sock, read)

    def run(self) -> None:
        """Until SIGTERM."""
        self.loop.watch(self._listener, self._accept)
        self._tick()
        if self.strategy.replicas and len(self.addresses) > 1 and self.number in self.parts:
            self._replicate(self.parts[self.number])
        self.loop.run()
        self.snapshots.remove()

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        peer = _Peer(self, sock)
        self._peers.add(peer)
        self.talk_to(peer)
        self.flush()

    def attend(self, peer: _Peer, events: int) -> None:
        """A connection can be read or written."""
        self.talk_to(peer)
        try:
            if events & selectors.EVENT_READ:
                peer.connection.read()
        except (OSError, ProtocolError):
            self._end(peer)
        except Exception as error:
            # The other workers still need this server, and this one would ask again on the next connection.
            what = str(error) if isinstance(error, DistribError) else repr(error)
            say(f"{'a server' if peer.worker is None else f'worker rank {peer.worker}'} sent what cannot be: {what}")
            if peer.worker is None:
                self._end(peer)
            else:
                peer.is_refused = True
                refusal = f"parameter server {self.number} cannot do what was asked: {what}"
                peer.connection.send(Frame(Kind.REFUSED), packed(refusal))
        self.flush()

    def talk_to(self, peer: _Peer) -> None:
        """There may be something to send to this peer."""
        self._talkative.add(peer)

    def flush(self) -> None:
        """Send what the sockets take, to everybody for whom there is something."""
        while self._talkative:
            peer = self._talkative.pop()
            if peer not in self._peers:
                continue
            try:
                peer.connection.flush()
                self.loop.watch(peer.connection.sock, peer.attend, writing=peer.connection.waits_to_send)
            except (OSError, ValueError):
                self._end(peer)
        for link in self._links.values():
            link.flush()

    def _end(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self.loop.forget(peer.connection.sock)
        peer.connection.close()
        if peer.part and peer.worker is not None:
            peer.part.lose(peer.worker, peer.connection)

    # -- who is in charge -----------------------------------------------------------------------------------------------

    def introduce(self, peer: _Peer, hello: dict[str, Any]) -> None:
        """Somebody says who it is, which shard it wants, and the epoch that it knows of."""
        shard, epoch = hello["shard"], hello["epoch"]
        part = self.parts.get(shard)
        if "worker" not in hello:  # a primary that looks for a replica
            if part is None or not part.in_charge or epoch > part.epoch:
                self.give_up(shard)
                part = self.parts[shard] = Part(shard, 0, len(self.addresses), self.strategy, self.pool)
                part.epoch = epoch
                self._ballots.pop(shard, None)
                peer.part, peer.primary = part, True
            else:
                peer.is_refused = True
                peer.connection.send(Frame(Kind.REFUSED, version=part.epoch), packed(""))
            return
        worker = hello["worker"]
        if part is not None and part.in_charge and epoch > part.epoch:
            say(f"shard {shard}: another server is in charge since epoch {epoch}")
            self.give_up(shard)
        counted = self._vote(shard, worker, epoch, set(hello["silent"]))
        part = self.parts.get(shard)
        if part is None or not part.in_charge:
            peer.connection.send(Frame(Kind.REFUSED, flags=not counted), packed(""))
            return
        for old in [one for one in self._peers if one.part is part and one.worker == worker and one is not peer]:
            self._end(old)  # it has not broken here yet
        peer.part, peer.worker = part, worker
        self.was_called = True
        part.welcome(worker, hello, peer.connection)

    def give_up(self, shard: int) -> None:
        """Another server is in charge of the shard: those who thought that this one was must call again."""
        part = self.parts.pop(shard, None)
        if part:
            part.in_charge = False
            for peer in [peer for peer in self._peers if peer.part is part]:
                self._end(peer)

    def _vote(self, shard: int, worker: int, epoch: int, silent: set[int]) -> bool:
        """A worker asks for a shard, and does not reach the servers `silent`: this one takes charge where that is its turn.

        Whether the worker's voice counts; then it must not agree that the primary goes on alone.
        """
        part = self.parts.get(shard)
        if not self.strategy.replicas or (part and part.in_charge):
            return False
        if part and any(peer.primary and peer.part is part for peer in self._peers):
            return False
        voices = self._voices(part)
        ballot = self._ballots.setdefault(shard, Ballot(len(self.addresses)))
        asking_seconds = ballot.ask(worker, epoch, silent, voices, time.monotonic())
        if part and ballot.epoch > part.epoch:
            part = None  # of a server that went on without this replica
        replica: Replica = "none"
        if part:
            replica = "whole" if part.is_whole else "partial"
        dead = {rank - self.workers for rank in self._dead} - {self.number}
        servers = len(self.addresses)
        place = [at for at in ((shard + n) % servers for n in range(servers)) if at not in dead].index(self.number)
        may = replica != "none" or ballot.silent <= dead | {self.number}
        if may and asking_seconds is not None and asking_seconds >= patience_seconds(replica, place):
            self._take_charge(shard, part, ballot.epoch)
        return replica != "none"

    def _voices(self, part: Part | None) -> set[int]:
        """The workers of whom more than half decide about a part.

        All of them where none is a member: the part is not known here, or each has asked not to be waited for, as it cannot reach
        another server.
        """
        return ((part.members if part else set()) or set(range(self.workers))) - self._dead

    def _take_charge(self, shard: int, part: Part | None, epoch: int) -> None:
        """From a replica of the shard, or from the parameters that workers have."""
        del self._ballots[shard]
        if part:
            part.members = part.members or set(range(self.workers))
            part.take_charge(part.epoch + 1)
            source = "its replica" if part.is_whole else "what was copied of it, and the parameters that workers have"
            say(f"takes charge of shard {shard}, whose server is gone, from {source}")
        else:
            self.give_up(shard)
            part = self.parts[shard] = Part(shard, self.workers, len(self.addresses), self.strategy, self.pool)
            part.take_charge(epoch + 2)  # a replica that was out of reach may have taken charge with the next one
            if shard == 0:
                self.snapshots.restore_kept(part)
            for worker in self._dead & set(range(self.workers)):
                part.give_up(worker)
            say(f"takes charge of shard {shard}, of which no replica is left, from the parameters that workers have")
        self._replicate(part)

    def _replicate(self, part: Part) -> None:
        """Keeps a replica of a part on the next server that can be one, on another host if there is any."""
        others = [(self.number + n) % len(self.addresses) for n in range(1, len(self.addresses))]
        host = self.addresses[self.number][0]
        # Where this server has taken charge, the one that was in charge is gone, or started anew.
        others.sort(key=lambda other: (self.addresses[other][0] == host, other == part.shard))
        if others:
            part.await_follower()
            self._links[part.shard] = _ReplicaLink(self, part, others)

    def ask_to_go_on_alone(self, part: Part) -> None:
        """The replica is gone: ask the workers whether this server is still theirs."""
        self._agreed[part.shard] = set()
        for peer in self._peers:
            if peer.part is part and peer.worker is not None:
                peer.connection.send(Frame(Kind.ALONE, version=part.epoch + 1))

    def take_back(self, part: Part) -> bool:
        """The question whether the part may go on alone, as a replica may be found. Whether it was open."""
        return self._agreed.pop(part.shard, None) is not None

    def agreed(self, part: Part, worker: int | None, epoch: int) -> None:
        """A worker knows that the part has no replica, and will not go to an old one."""
        agreed = self._agreed.get(part.shard)
        if agreed is None or worker is None or epoch != part.epoch + 1:
            return
        agreed.add(worker)
        voices = self._voices(part)
        if len(agreed & voices) * 2 > len(voices):
            del self._agreed[part.shard]
            part.epoch = epoch
            part.follow(None)
            say(f"shard {part.shard} has no replica now: the server that kept it is gone")

    # -- time -------------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        for peer in [
            p for p in self._peers if not p.connection.proven and now - p.connection.opened > HANDSHAKE_TIMEOUT_SECONDS
        ]:
            self._end(peer)
        for part in list(self.parts.values()):
            if part.in_charge:
                part.tick(now)
                if part.shard == 0:
                    self.snapshots.keep(part, now)
                if not self.strategy.replicas:
                    self.snapshots.take(part, now)
            for note in part.notes:
                if part.shard == 0:
                    say(note)
            part.notes.clear()
        for link in list(self._links.values()):
            link.tick(now)
        self.flush()
        self.loop.later(TICK_SECONDS, self._tick)


class _ReplicaLink:
    """A primary's connection to the server that keeps its replica; looks for one as long as there is none."""

    def __init__(self, server: Server, part: Part, candidates: Sequence[int]) -> None:
        self.server, self.part, self.candidates = server, part, candidates
        self.connection: Connection | None = None
        self._sock: socket.socket | None = None
        self._since = time.monotonic()
        self._asked = 0.0
        self._tries = 0
        self._broken = False

    def tick(self, now: float) -> None:
        silent = (
            self.connection and not self.connection.proven and now - self.connection.opened > HANDSHAKE_TIMEOUT_SECONDS
        )
        if not self.part.in_charge or silent:
            self._close()
        elif self._sock is None:
            alone = self.part.follower is None and all(t.shard.replicated_to is None for t in self.part.tables.values())
            if not alone and now - self._since > DROP_SECONDS and now - self._asked > DROP_SECONDS:
                self._asked = now
                self.server.ask_to_go_on_alone(self.part)
            else:
                self._call()

    def _call(self) -> None:
        address = self.server.addresses[self.candidates[self._tries % len(self.candidates)]]
        self._tries += 1
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        sock.setblocking(False)
        sock.connect_ex(address)
        self._sock = sock
        self.connection = Connection(sock, self.server.key, listener=False, room=lambda _: None, receive=self._hear)
        # Workers may have given their voice for the next epoch meanwhile, to the replica or to this server alone.
        was_open = self.server.take_back(self.part)
        if self._broken or was_open:
            self.part.epoch += 1
            self._broken = False
        hello = {"shard": self.part.shard, "epoch": self.part.epoch}
        self.connection.send(Frame(Kind.HELLO), packed(hello), priority=-2, sent=self._connected)
        self.server.loop.watch(sock, self._attend, writing=True)

    def _connected(self) -> None:
        assert self.connection
        self.part.follow(self.connection)
        self.part.tell_members()

    def _hear(self, frame: Frame, payload: Any) -> None:
        if frame.kind is Kind.LOGGED:
            self.part.acknowledge(frame)
        elif frame.kind is Kind.REFUSED and frame.version > self.part.epoch:
            say(f"shard {self.part.shard}: another server is in charge since epoch {frame.version}")
            self.server.give_up(self.part.shard)

    def _attend(self, events: int) -> None:
        assert self.connection
        try:
            if events & selectors.EVENT_READ:
                self.connection.read()
            self.connection.flush()
        except (OSError, ProtocolError):
            self._close()
        self.server.flush()

    def flush(self) -> None:
        if self.connection and self._sock:
            try:
                self.connection.flush()
                self.server.loop.watch(self._sock, self._attend, writing=self.connection.waits_to_send)
            except OSError:
                self._close()

    def _close(self) -> None:
        if self._sock:
            self.server.loop.forget(self._sock)
            self._sock.close()
            self._sock = self.connection = None
            if self.part.follower:
                self.part.lose_follower()
                self._broken = True
                self._since = time.monotonic()


def say(text: str) -> None:
    """A line in the job's output."""
    print(f"distrib: parameter server {os.environ.get('DISTRIB_SERVER', '?')}: {text}", file=sys.stderr, flush=True)


def servers_from(environ: Mapping[str, str]) -> tuple[list[tuple[str, int]], bytes]:
    """Where the servers listen, and the job's key. Raises TrainingError where the launcher has not said it."""
    found = []
    for text in environ.get(DISTRIB_SERVERS, "").split(","):
        host, _, port = text.rpartition(":")
        if host and port.isdigit():
            found.append((host.strip("[]"), int(port)))
    if not found or not environ.get(DISTRIB_KEY):
        raise TrainingError(
            "no parameter servers are known here", hint="start the script with distrib-launch --mode async"
        )
    return found, environ[DISTRIB_KEY].encode()


def main() -> int:
    """Runs the server that the environment describes, until it is told to end."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    try:
        addresses, key = servers_from(os.environ)
        number, workers = int(os.environ[DISTRIB_SERVER]), int(os.environ[WORLD_SIZE])
        server = Server(number, addresses, workers, key, strategy_from_environment(os.environ))
    except (DistribError, OSError) as error:
        print(f"distrib: parameter server: {error}", file=sys.stderr)
        return 1

    def end(*_: Any) -> None:
        server.loop.ended = True
        server.loop.call(lambda: None)

    signal.signal(signal.SIGTERM, end)
    for own in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to all that it runs: scripts are to save
        signal.signal(own, signal.SIG_IGN)
    if news := os.environ.get(DISTRIB_EVENTS_FD):
        server.hear_news(socket.socket(fileno=int(news)))
    server.run()
    if number == 0 and not server.was_called:
        say("no worker has called: --mode async is for scripts with distrib.init() and job.prepare()")
    return 0
