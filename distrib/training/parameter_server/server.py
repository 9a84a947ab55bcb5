"""The process of a parameter server: `python -m distrib.training.parameter_server`, started by the launcher beside the workers.

It is the primary of one shard from the start. With `--replicas 1` it also stores a replica of another server's shard, and
becomes its primary when the launcher reports that server dead (`replication`). If primary and replica have both died, the shard
is rebuilt from the parameters that workers have (`failover`). One thread, which waits in the kernel when it is idle.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
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
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts, RebuildTimer
from distrib.training.parameter_server.membership import report
from distrib.training.parameter_server.replica_link import ReplicaLink, ReplicationTarget
from distrib.training.parameter_server.server_table import BufferPool, as_memoryview
from distrib.training.parameter_server.shard_service import ShardService
from distrib.training.parameter_server.snapshots import Snapshots
from distrib.training.parameter_server.transport import Connection, Frame, FrameKind, decode, encode
from distrib.utils.framing import ProtocolError
from distrib.utils.log import PLAIN, get_logger

log = get_logger("parameter_server")

T = TypeVar("T")


class _Hello(msgspec.Struct):
    """Types of the values in a HELLO of a worker, or of a server that looks for a place for its replica."""

    shard: int
    epoch: int
    server: int = 0
    worker: int = 0
    incarnation: str = ""
    restarted: bool = False
    main: tuple[int, int] = (0, 0)
    silent: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()


class _Peer:
    """A connection that was accepted, from a worker or from the primary of a shard whose replica is here."""

    def __init__(self, server: ParameterServer, sock: socket.socket) -> None:
        self._server = server
        self.service: ShardService | None = None
        self.worker: int | None = None
        self.is_refused = False
        self._gradient: torch.Tensor | None = None
        self.connection = Connection(
            server.loop, sock, server.key, listener=True, on_closed=lambda: server.close_peer(self),
            allocate=lambda frame: self._guard(lambda: self._allocate(frame)),
            on_frame=lambda frame, payload: self._guard(lambda: self._on_frame(frame, payload)),
        )  # fmt: skip

    def _guard(self, work: Callable[[], T]) -> T | None:
        """Refuse an invalid request. Workers still need this server, and this one would repeat its request on a new connection."""
        if self.is_refused:  # the peer has not received the refusal yet
            return None
        try:
            return work()
        except (OSError, ProtocolError):
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, DistribError) else repr(error)
            name = "a server" if self.worker is None else f"worker rank {self.worker}"
            report(f"invalid request of {name}: {reason}")
            if self.worker is None:
                raise ProtocolError(reason) from None
            self.is_refused = True
            refusal = f"parameter server {self._server.number} cannot handle a request: {reason}"
            self.connection.send(Frame(FrameKind.REFUSED), encode(refusal))
        return None

    def _allocate(self, frame: Frame) -> memoryview | None:
        if frame.kind is not FrameKind.PUSH or self.service is None or self.worker is None:
            return None
        self._gradient = memory = self.service.requests.allocate_gradient(frame)
        return as_memoryview(memory)

    def _on_frame(self, frame: Frame, payload: Any) -> None:
        if frame.kind is FrameKind.HELLO:
            hello = decode(payload)
            msgspec.convert(hello, _Hello)
            self._server.on_hello(self, hello)
        elif self.service is None:
            raise ProtocolError(f"{frame.kind.name} before HELLO")
        elif self.worker is not None:
            self.service.on_frame(self.worker, frame, self._gradient if frame.kind is FrameKind.PUSH else payload)
        elif target := self._server.targets.get(self.service.shard):
            target.on_frame(frame, payload, self.connection)


class ParameterServer:
    """One server of the job."""

    def __init__(
        self, number: int, addresses: Sequence[tuple[str, int]], workers: int, key: bytes, strategy: Strategy,
        timeouts: FailoverTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:  # fmt: skip
        self.number, self.addresses, self.workers, self.key, self.strategy = number, addresses, workers, key, strategy
        self._timeouts = timeouts
        self.loop = EventLoop()
        self.pool = BufferPool()
        self.services: dict[int, ShardService] = {}
        """Shards of which this server is primary or stores a replica, by number."""
        self.targets: dict[int, ReplicationTarget] = {}
        """Handlers of the primaries' messages, by shard whose replica is here."""
        self.snapshots = Snapshots(number)
        restarted = bool(os.environ.get(DISTRIB_RESTARTED))
        if not restarted or not strategy.replicas:  # else the server with its replica is primary by now
            self._add_own_shard(restarted)
        self.was_called = restarted
        """True once a worker has connected, perhaps to an earlier process of this server."""
        self.peers: set[_Peer] = set()
        self._dead_workers: set[int] = set()
        self._dead_servers: set[int] = set()
        self.replica_links: dict[int, ReplicaLink] = {}
        self._rebuild_timers: dict[int, RebuildTimer] = {}
        own = addresses[number]  # not all interfaces: the job's network was chosen
        family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
        self.listener = socket.create_server(own, family=family, backlog=1024)
        self.listener.setblocking(False)

    def _add_own_shard(self, restarted: bool) -> None:
        service = self._new_service(self.number, self.workers)
        service.is_primary = True
        if restarted:
            service.expect_reconnection()
            age = self.snapshots.restore(service)
            source = "the parameters of the workers" if age is None else f"a snapshot from {age:.1f} s before"
            report(f"restarted; its shard is restored from {source}, without a replica (--replicas 1 loses nothing)")

    def _new_service(self, shard: int, workers: int) -> ShardService:
        service = self.services[shard] = ShardService(shard, workers, self.strategy, self.pool, self._timeouts)
        return service

    def run(self) -> None:
        """Serve until the loop is ended."""
        self.loop.watch(self.listener, self._accept)
        self.loop.call_soon(self._tick)
        if self.strategy.replicas and len(self.addresses) > 1 and self.number in self.services:
            self._replicate(self.services[self.number])
        self.loop.run()
        self.snapshots.remove()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self.listener.accept()
        except OSError:
            return
        self.peers.add(_Peer(self, sock))

    def close_peer(self, peer: _Peer) -> None:
        """Close a connection, or record that it is closed.

        Args:
            peer: The connection.
        """
        if peer in self.peers:
            self.peers.discard(peer)
            peer.connection.close()
            if peer.service and peer.worker is not None:
                peer.service.on_disconnected(peer.worker, peer.connection)

    def on_hello(self, peer: _Peer, hello: dict[str, Any]) -> None:
        """Handle the introduction of a worker, or of a primary that looks for a server for its replica.

        Args:
            peer: The connection.
            hello: The shard, the epoch that the peer knows, and its rank or its number.
        """
        shard, epoch = hello["shard"], hello["epoch"]
        service = self.services.get(shard)
        if service and service.is_primary and epoch > service.epoch:
            self.on_replaced(shard, epoch)
            service = None
        if "server" in hello:
            if service and service.is_primary:
                peer.is_refused = True
                peer.connection.send(Frame(FrameKind.REFUSED, version=service.epoch), encode(""))
                return
            self._close_service(shard)
            peer.service = self._new_service(shard, 0)
            peer.service.epoch = epoch
            self.targets[shard] = ReplicationTarget(peer.service, hello["server"])
            self._rebuild_timers.pop(shard, None)
            return
        worker = hello["worker"]
        self._rebuild_if_lost(shard, worker, epoch, set(hello["silent"]))
        service = self.services.get(shard)
        if service is None or not service.is_primary:
            peer.connection.send(Frame(FrameKind.REFUSED), encode(""))
            return
        for old in [one for one in self.peers if one.service is service and one.worker == worker and one is not peer]:
            self.close_peer(old)  # it has not broken here yet
        peer.service, peer.worker = service, worker
        self.was_called = True
        service.on_connected(worker, hello, peer.connection)

    # -- primary and replica -------------------------------------------------------------------------------------------

    def watch_events(self, pipe: int) -> None:
        """Receive the launcher's reports of ranks that died or were restarted, as JSON lines.

        Args:
            pipe: Descriptor of a pipe. Each line is written at once, so that only whole lines are read.
        """

        def read(_: int) -> None:
            events = os.read(pipe, 1 << 16)  # all that a pipe holds
            if not events:  # the rank agent has ended, and ends this process soon
                self.loop.unwatch(pipe)
            for event in events.splitlines():
                about = decode(event)
                self.on_rank_event(about["rank"], dead=about["dead"])

        self.loop.watch(pipe, read)

    def on_rank_event(self, rank: int, *, dead: bool) -> None:
        """Handle the launcher's report of a rank.

        Args:
            rank: A worker, or the rank of a server: the number of workers plus its number.
            dead: False if the launcher is about to restart it.
        """
        dead_ranks, number = (
            (self._dead_workers, rank) if rank < self.workers else (self._dead_servers, rank - self.workers)
        )
        if not dead:
            dead_ranks.discard(number)
            return
        dead_ranks.add(number)
        for service in list(self.services.values()):
            if rank < self.workers and service.is_primary:
                service.on_worker_died(rank)
            elif (target := self.targets.get(service.shard)) and rank >= self.workers and target.primary == number:
                self._take_over(service)
        if rank >= self.workers:
            for shard, link in self.replica_links.items():
                if link.on_server_died(number):
                    report(f"shard {shard} has no replica: server {number} has died")

    def _take_over(self, service: ShardService) -> None:
        for peer in [peer for peer in self.peers if peer.service is service]:
            self.close_peer(peer)
        membership = service.membership
        membership.members = membership.members or set(range(self.workers))
        source = "its replica" if service.is_complete else "an incomplete replica and the parameters of the workers"
        del self.targets[service.shard]
        service.become_primary(service.epoch + 1)
        report(f"takes over shard {service.shard}, whose server has died, from {source}")
        self._replicate(service)

    def _rebuild_if_lost(self, shard: int, worker: int, epoch: int, silent: set[int]) -> None:
        """Rebuild a shard from the workers' parameters if neither its primary nor a replica is left."""
        if not self.strategy.replicas or shard in self.services:
            return
        timer = self._rebuild_timers.setdefault(
            shard, RebuildTimer(len(self.addresses), self._timeouts.connect_seconds)
        )
        asked_seconds = timer.on_request(worker, epoch, silent, time.monotonic())
        count = len(self.addresses)
        alive = [
            server for n in range(count) if (server := (shard + n) % count) not in self._dead_servers - {self.number}
        ]
        patience_seconds = self._timeouts.rebuild_seconds * (1 + alive.index(self.number))
        if asked_seconds < patience_seconds or not timer.silent <= self._dead_servers | {self.number}:
            return
        del self._rebuild_timers[shard]
        service = self._new_service(shard, self.workers)
        service.become_primary(timer.epoch + 2)  # above a replica that takes over at the same time
        service.rebuilt_epoch = service.epoch
        if shard == 0:
            self.snapshots.restore_results(service)
        for dead in self._dead_workers:
            service.on_worker_died(dead)
        report(f"takes over shard {shard}, of which no replica is left, from the parameters of the workers")
        self._replicate(service)

    def _replicate(self, service: ShardService) -> None:
        """Store a replica on another server, on another host if there is one."""
        if len(self.addresses) > 1:
            service.replication.require()
            self.replica_links[service.shard] = ReplicaLink(
                service, self.number, self.workers, list(self.addresses), self.key, self.loop, self._dead_servers, self._timeouts,
                lambda epoch: self.on_replaced(service.shard, epoch),
            )  # fmt: skip

    def on_replaced(self, shard: int, epoch: int) -> None:
        """Give up a shard of which another server is primary now.

        Args:
            shard: Number of the shard.
            epoch: The epoch of the other server.
        """
        report(f"shard {shard}: another server is primary since epoch {epoch}")
        self._close_service(shard)

    def _close_service(self, shard: int) -> None:
        self.targets.pop(shard, None)
        if service := self.services.pop(shard, None):
            service.is_primary = False
            for peer in [peer for peer in self.peers if peer.service is service]:
                self.close_peer(peer)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        for service in list(self.services.values()):
            if service.is_primary:
                service.tick(now)
                if service.shard == 0:
                    self.snapshots.write_results(service, now)
                if not self.strategy.replicas:
                    self.snapshots.write(service, now)
        for link in list(self.replica_links.values()):
            link.tick(now)
        self.loop.call_later(self._timeouts.tick_seconds, self._tick)


def read_server_addresses(environ: Mapping[str, str]) -> tuple[list[tuple[str, int]], bytes]:
    """Read the addresses of the servers and the key of the job.

    Args:
        environ: The environment of a rank.

    Returns:
        Host and port of every server, and the key.

    Raises:
        TrainingError: The launcher has set neither, as the job has no parameter servers.
    """
    found = []
    for text in environ.get(DISTRIB_SERVERS, "").split(","):
        host, _, port = text.rpartition(":")
        if host and port.isdecimal() and len(port) < 6:
            found.append((host.strip("[]"), int(port)))
    if not found or not environ.get(DISTRIB_KEY):
        raise TrainingError(
            "this job has no parameter servers",
            hint="start the script with distrib-launch --mode async",
            code="no-parameter-server",
        )
    return found, os.fsencode(environ[DISTRIB_KEY])


def main() -> int:
    """Run the server that the environment describes until SIGTERM, and return the exit code."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    # The first optimizer imports torch._dynamo, which takes seconds on busy CPUs: not while workers wait for a reply.
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        addresses, key = read_server_addresses(os.environ)
        number, workers = int(os.environ[DISTRIB_SERVER]), int(os.environ[WORLD_SIZE])
        server = ParameterServer(number, addresses, workers, key, strategy_from_environment(os.environ))
    except (DistribError, OSError) as error:
        log.info(f"parameter server: {error}", extra=PLAIN)
        return 1

    def end(*_: Any) -> None:
        server.loop.ended = True
        server.loop.call_soon(lambda: None)

    signal.signal(signal.SIGTERM, end)
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to all processes: scripts shall save
        signal.signal(ignored, signal.SIG_IGN)
    if descriptor := os.environ.get(DISTRIB_EVENTS_FD):
        server.watch_events(int(descriptor))
    server.run()
    if number == 0 and not server.was_called:
        report("no worker has connected: --mode async is for scripts with distrib.init() and job.prepare()")
    return 0
