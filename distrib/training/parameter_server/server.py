"""The process of a parameter server: `python -m distrib.training.parameter_server`, started by the launcher beside the workers.

It is the primary of one shard from the start. With `--replicas 1` it also stores a replica of another server's shard, and
becomes its primary when the launcher reports that server dead (`replication`). If primary and replica have both died, the shard
is rebuilt from the parameters that workers have (`failover`). One thread, which waits in the kernel when it is idle.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
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
from distrib.training.parameter_server.failover import REBUILD_AFTER_SECONDS, RebuildTimer
from distrib.training.parameter_server.replication import ReplicaLink, ReplicationTarget
from distrib.training.parameter_server.server_table import BufferPool, as_memoryview
from distrib.training.parameter_server.shard_service import ShardService
from distrib.training.parameter_server.snapshots import Snapshots
from distrib.training.parameter_server.transport import Connection, EventLoop, Frame, FrameKind, decode, encode
from distrib.utils.framing import HANDSHAKE_TIMEOUT_SECONDS, ProtocolError
from distrib.utils.log import PLAIN, get_logger

log = get_logger("parameter_server")


TICK_SECONDS = 0.5


class _Peer:
    """A connection that was accepted, from a worker or from the primary of a shard whose replica is here."""

    def __init__(self, server: ParameterServer, sock: socket.socket) -> None:
        self.server = server
        self.service: ShardService | None = None
        self.worker: int | None = None
        self.is_refused = False
        self.gradient: torch.Tensor | None = None
        self.connection = Connection(
            sock, server.key, listener=True, allocate=self.allocate, on_frame=self.on_frame,
            on_queued=lambda: server.schedule_flush(self),
        )  # fmt: skip

    def on_events(self, events: int) -> None:
        self.server.on_events(self, events)

    def allocate(self, frame: Frame) -> memoryview | None:
        if frame.kind is FrameKind.PUSH and not self.is_refused and self.service and self.worker is not None:
            self.gradient = memory = self.service.requests.allocate_gradient(frame)
            return as_memoryview(memory)
        return None

    def on_frame(self, frame: Frame, payload: Any) -> None:
        if self.is_refused:  # the peer has not received the refusal yet
            return
        if frame.kind is FrameKind.HELLO:
            self.server.on_hello(self, decode(payload))
        elif self.service is None:
            raise ProtocolError(f"{frame.kind.name} before HELLO")
        elif self.worker is not None:
            self.service.on_frame(self.worker, frame, self.gradient if frame.kind is FrameKind.PUSH else payload)
        elif self.service.target:
            self.service.target.on_frame(frame, payload, self.connection)


class ParameterServer:
    """One server of the job.

    Args:
        number: Number of this server, which is that of its shard.
        addresses: Host and port of every server.
        workers: Number of workers.
        key: The key of the job.
        strategy: The settings of the job.
    """

    def __init__(
        self, number: int, addresses: Sequence[tuple[str, int]], workers: int, key: bytes, strategy: Strategy
    ) -> None:
        self.number, self.addresses, self.workers, self.key, self.strategy = number, addresses, workers, key, strategy
        self.loop = EventLoop()
        self.pool = BufferPool()
        self.services: dict[int, ShardService] = {}
        """Shards of which this server is primary or stores a replica, by number."""
        self.snapshots = Snapshots(number)
        restarted = bool(os.environ.get(DISTRIB_RESTARTED))
        if not restarted or not strategy.replicas:  # else the server with its replica is primary by now
            self._add_own_shard(restarted)
        self.was_called = restarted
        """True once a worker has connected, perhaps to an earlier process of this server."""
        self._peers: set[_Peer] = set()
        self._to_flush: set[_Peer] = set()
        self._dead_workers: set[int] = set()
        self._dead_servers: set[int] = set()
        self._links: dict[int, ReplicaLink] = {}
        self._rebuild_timers: dict[int, RebuildTimer] = {}
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", addresses[number][1]),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
        self._listener.setblocking(False)

    def _add_own_shard(self, restarted: bool) -> None:
        service = self._new_service(self.number, self.workers)
        service.is_primary = True
        if restarted:
            service.expect_reconnection()
            age = self.snapshots.restore(service)
            source = "the parameters of the workers" if age is None else f"a snapshot from {age:.1f} s before"
            report(f"restarted; its shard is restored from {source}, without a replica (--replicas 1 loses nothing)")

    def _new_service(self, shard: int, workers: int) -> ShardService:
        service = self.services[shard] = ShardService(shard, workers, self.strategy, self.pool)
        return service

    def run(self) -> None:
        """Serve until the loop is ended."""
        self.loop.watch(self._listener, self._accept)
        self._tick()
        if self.strategy.replicas and len(self.addresses) > 1 and self.number in self.services:
            self._replicate(self.services[self.number])
        self.loop.run()
        self.snapshots.remove()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        peer = _Peer(self, sock)
        self._peers.add(peer)
        self.schedule_flush(peer)
        self.flush()

    def on_events(self, peer: _Peer, events: int) -> None:
        """Read from a connection and send queued frames.

        Args:
            peer: The connection.
            events: Events of its socket.
        """
        self.schedule_flush(peer)
        try:
            if events & selectors.EVENT_READ:
                peer.connection.read()
        except (OSError, ProtocolError):
            self._close(peer)
        except Exception as error:
            # The other workers still need this server, and this one would repeat its request on the next connection.
            reason = str(error) if isinstance(error, DistribError) else repr(error)
            report(
                f"invalid request of {'a server' if peer.worker is None else f'worker rank {peer.worker}'}: {reason}"
            )
            if peer.worker is None:
                self._close(peer)
            else:
                peer.is_refused = True
                refusal = f"parameter server {self.number} cannot handle a request: {reason}"
                peer.connection.send(Frame(FrameKind.REFUSED), encode(refusal))
        self.flush()

    def schedule_flush(self, peer: _Peer) -> None:
        """Schedule the queued frames of a peer for the next `flush`.

        Args:
            peer: The connection.
        """
        self._to_flush.add(peer)

    def flush(self) -> None:
        """Send as much as the sockets accept."""
        while self._to_flush:
            peer = self._to_flush.pop()
            if peer not in self._peers:
                continue
            try:
                peer.connection.flush()
                self.loop.watch(peer.connection.sock, peer.on_events, writing=peer.connection.has_unsent)
            except (OSError, ValueError):
                self._close(peer)
        for link in self._links.values():
            link.flush()

    def _close(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self.loop.unwatch(peer.connection.sock)
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
            peer.service.epoch, peer.service.target = epoch, ReplicationTarget(peer.service, hello["server"])
            self._rebuild_timers.pop(shard, None)
            return
        worker = hello["worker"]
        self._rebuild_if_lost(shard, worker, epoch, set(hello["silent"]))
        service = self.services.get(shard)
        if service is None or not service.is_primary:
            peer.connection.send(Frame(FrameKind.REFUSED), encode(""))
            return
        for old in [one for one in self._peers if one.service is service and one.worker == worker and one is not peer]:
            self._close(old)  # it has not broken here yet
        peer.service, peer.worker = service, worker
        self.was_called = True
        service.on_connected(worker, hello, peer.connection)

    # -- primary and replica -------------------------------------------------------------------------------------------

    def watch_events(self, sock: socket.socket) -> None:
        """Receive the launcher's reports of ranks that died or were restarted, one JSON value per datagram.

        Args:
            sock: A local datagram socket.
        """

        def read(_: int) -> None:
            event = sock.recv(4096)
            if not event:  # the rank agent has ended, and ends this process soon
                self.loop.unwatch(sock)
                return
            about = decode(event)
            self.on_rank_event(about["rank"], dead=about["dead"])
            self.flush()

        self.loop.watch(sock, read)

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
            elif rank >= self.workers and service.target and service.target.primary == number:
                self._take_over(service)
        if rank >= self.workers:
            for shard, link in self._links.items():
                if link.on_server_died(number):
                    report(f"shard {shard} has no replica: server {number} has died")

    def _take_over(self, service: ShardService) -> None:
        for peer in [peer for peer in self._peers if peer.service is service]:
            self._close(peer)
        membership = service.membership
        membership.members = membership.members or set(range(self.workers))
        source = "its replica" if service.is_complete else "an incomplete replica and the parameters of the workers"
        service.become_primary(service.epoch + 1)
        report(f"takes over shard {service.shard}, whose server has died, from {source}")
        self._replicate(service)

    def _rebuild_if_lost(self, shard: int, worker: int, epoch: int, silent: set[int]) -> None:
        """Rebuild a shard from the workers' parameters if neither its primary nor a replica is left."""
        if not self.strategy.replicas or shard in self.services:
            return
        timer = self._rebuild_timers.setdefault(shard, RebuildTimer(len(self.addresses)))
        asked_seconds = timer.on_request(worker, epoch, silent, time.monotonic())
        count = len(self.addresses)
        alive = [
            server for n in range(count) if (server := (shard + n) % count) not in self._dead_servers - {self.number}
        ]
        patience_seconds = REBUILD_AFTER_SECONDS * (1 + alive.index(self.number))
        if asked_seconds < patience_seconds or not timer.silent <= self._dead_servers | {self.number}:
            return
        del self._rebuild_timers[shard]
        service = self._new_service(shard, self.workers)
        service.become_primary(timer.epoch + 2)  # above a replica that takes over at the same time
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
            self._links[service.shard] = ReplicaLink(
                service, self.number, list(self.addresses), self.key, self.loop, self._dead_servers,
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
        service = self.services.pop(shard, None)
        if service:
            service.is_primary = False
            for peer in [peer for peer in self._peers if peer.service is service]:
                self._close(peer)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        for peer in [p for p in self._peers if not p.connection.proven]:
            if now - peer.connection.opened > HANDSHAKE_TIMEOUT_SECONDS:
                self._close(peer)
        for service in list(self.services.values()):
            if service.is_primary:
                service.tick(now)
                if service.shard == 0:
                    self.snapshots.write_results(service, now)
                if not self.strategy.replicas:
                    self.snapshots.write(service, now)
        for link in list(self._links.values()):
            link.tick(now)
        for service in self.services.values():
            if service.shard == 0:  # the others' are the same
                for note in service.membership.notes:
                    report(note)
            service.membership.notes.clear()
        self.flush()
        self.loop.call_later(TICK_SECONDS, self._tick)


def report(text: str) -> None:
    """Print a line to the output of the job.

    Args:
        text: The line, without the name of the server.
    """
    log.info(f"parameter server {os.environ.get(DISTRIB_SERVER, '?')}: {text}", extra=PLAIN)


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
        if host and port.isdigit():
            found.append((host.strip("[]"), int(port)))
    if not found or not environ.get(DISTRIB_KEY):
        raise TrainingError(
            "this job has no parameter servers", hint="start the script with distrib-launch --mode async"
        )
    return found, environ[DISTRIB_KEY].encode()


def main() -> int:
    """Run the server that the environment describes until SIGTERM.

    Returns:
        The exit code.
    """
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
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
        server.watch_events(socket.socket(fileno=int(descriptor)))
    server.run()
    if number == 0 and not server.was_called:
        report("no worker has connected: --mode async is for scripts with distrib.init() and job.prepare()")
    return 0
