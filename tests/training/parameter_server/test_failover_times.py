"""Times after which workers and servers of mode async react to a loss, on a simulated clock, as the documentation promises them."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import types
from collections.abc import Iterator
from typing import Any

import pytest

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.parameter_server import (
    membership,
    replica_link,
    server,
    server_connections,
    server_link,
    snapshots,
)
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS
from distrib.training.parameter_server.replica_link import ReplicaLink
from distrib.training.parameter_server.server import ParameterServer
from distrib.training.parameter_server.server_connections import ServerConnections
from distrib.training.parameter_server.server_link import ServerLink
from distrib.training.parameter_server.server_table import BufferPool
from distrib.training.parameter_server.shard_service import ShardService
from distrib.training.parameter_server.transport import Connection, FrameKind
from tests.conftest import ROOT
from tests.support.simulated_clock import SimulatedClock

ADDRESSES = [("127.0.0.1", 9), ("127.0.0.1", 9), ("127.0.0.1", 9)]


def promised(pattern: str) -> tuple[float, ...]:
    """Return the numbers of a sentence of the documentation."""
    (found,) = re.findall(pattern, (ROOT / "docs/explanation/architecture.md").read_text())
    return tuple(map(float, found if isinstance(found, tuple) else (found,)))


def test_a_worker_reports_itself_away_warns_and_fails_at_the_promised_times(monkeypatch):
    away, warns, fails = promised(
        r"after (\d+) s the worker reports itself as away, after (\d+) s it warns, after (\d+) s it fails"
    )
    clock = SimulatedClock(monkeypatch, server_connections, server_link)
    monkeypatch.setattr(server_connections.threading, "Thread", lambda **_: types.SimpleNamespace(start=lambda: None))
    lines: list[str] = []
    monkeypatch.setattr(server_connections.log, "info", lambda line, **_: lines.append(line))
    attempts: list[float] = []

    def connect(link: ServerLink) -> None:
        attempts.append(clock.now)
        link.connection, link._connecting_since = types.SimpleNamespace(close=lambda: None), clock.now  # type: ignore[assignment]

    monkeypatch.setattr(ServerLink, "connect", connect)
    client = ServerConnections(0, ADDRESSES[:2], b"key", replicas=False)
    reached, lost = client.links
    frames: list[Any] = []
    reached.connection = types.SimpleNamespace(send=lambda frame, payload: frames.append(frame.kind))  # type: ignore[assignment]
    reached.welcomed = reached.was_welcomed = lost.was_welcomed = True
    lost.down_since = begun = clock.now

    def tick_until(what: Any) -> float:
        clock.seconds_until(lambda: client._tick() or what())
        return clock.now - begun

    assert away < tick_until(lambda: frames) < away + 0.5 and client.must_rejoin
    assert warns < tick_until(lambda: lines) < warns + 0.5 and "unreachable for 15 s" in lines[0]
    assert fails < tick_until(lambda: client.failed) < fails + 0.5
    with pytest.raises(TrainingError, match=r"server 1 .* is unreachable from worker rank 0 .* for 120 s"):
        client.check()
    assert frames == [FrameKind.SUSPEND] and len(lines) == 1
    between = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert len(between) > 40 and all(2.0 < seconds < 2.5 for seconds in between)  # the next server is tried after 2 s


def test_workers_wait_five_seconds_for_one_that_was_connected_and_half_an_hour_for_one_that_was_not(monkeypatch):
    (waits,) = promised(r"after (\d+) s the others continue without the worker")
    clock = SimulatedClock(monkeypatch, membership)
    service = ShardService(0, 3, Strategy(mode="async"), BufferPool())
    for worker in (0, 1):
        service.membership.connect(worker, "", types.SimpleNamespace(send=lambda *_, **__: None))  # type: ignore[arg-type]
    begun = clock.now
    service.membership.disconnect(1)

    def is_removed(worker: int) -> bool:
        service.tick(clock.now)
        return worker not in service.membership.members

    clock.seconds_until(lambda: is_removed(1))
    assert waits < clock.now - begun < waits + 0.5 and service.membership.members == {0, 2}
    clock.seconds_until(lambda: is_removed(2))
    assert 1800 < clock.now - begun < 1800.5 and service.membership.members == {0}


def test_the_kernel_closes_a_connection_without_acknowledgements_after_five_seconds():
    (promise,) = promised(r"TCP acknowledgements\|after (\d+) s the connection is closed")
    loop = EventLoop()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        connection = Connection(loop, sock, b"key", listener=False, on_frame=lambda *_: None, on_closed=lambda: None)
        options = [sock.getsockopt(socket.IPPROTO_TCP, one) for one in (
            socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)]  # fmt: skip
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connection.close()
    idle, interval, count, unacknowledged = options
    assert idle + interval * count == promise and unacknowledged == promise * 1000
    loop.call_soon(lambda: setattr(loop, "ended", True))
    loop.run()


@pytest.mark.parametrize(
    ("replica", "workers", "number", "seconds"),
    [(None, 4, 0, 5), (1, 1, 0, 30), (1, 2, 0, 90), (1, 4, 0, 90), (0, 1, 1, 60), (0, 4, 1, 120)],
)
def test_a_primary_waits_for_its_replica_so_long_that_only_one_of_two_exits(
    monkeypatch, replica, workers, number, seconds
):
    """It does not wait at first; the server that reaches less than half of the workers exits first, the lower number before the other."""
    clock = SimulatedClock(monkeypatch, replica_link)
    monkeypatch.setattr(ReplicaLink, "_connect", lambda self: None)
    continued: list[None] = []
    replication = types.SimpleNamespace(required=True, replica=None, continue_without=lambda: continued.append(None))
    about = types.SimpleNamespace(connections=dict.fromkeys(range(workers)))
    service = types.SimpleNamespace(shard=number, is_primary=True, replication=replication, membership=about)
    link = ReplicaLink(service, number, 4, ADDRESSES[:2], b"key", None, set(), DEFAULT_TIMEOUTS, lambda _: None)  # type: ignore[arg-type]
    link._replica = replica

    def has_reacted() -> bool:
        try:
            link.tick(clock.now)
        except SystemExit:
            return True
        return bool(continued)

    assert seconds < clock.seconds_until(has_reacted) < seconds + 0.5
    assert bool(continued) == (replica is None)


@pytest.fixture
def third_server(monkeypatch, tmp_path) -> Iterator[tuple[ParameterServer, SimulatedClock]]:
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    clock = SimulatedClock(monkeypatch, server, membership)
    monkeypatch.setattr(ParameterServer, "_replicate", lambda self, service: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    made = ParameterServer(2, [*ADDRESSES[:2], address], 1, b"key", Strategy(mode="async", replicas=1))
    yield made, clock
    with contextlib.suppress(OSError):
        made.listener.close()


@pytest.mark.parametrize(("dead", "seconds"), [((), 30), ((0,), 20), ((0, 1), 10)])
def test_a_shard_is_rebuilt_by_the_first_living_server_after_ten_seconds(third_server, dead, seconds):
    """Each further server waits ten seconds longer. The third one is last while the others live."""
    made, clock = third_server
    made._dead_servers.update(dead)

    def has_shard() -> bool:
        made._rebuild_if_lost(0, 0, 0, set())
        return 0 in made.services

    assert seconds <= clock.seconds_until(has_shard, 1.0) <= seconds + 1


def test_a_server_writes_a_snapshot_of_changed_values_every_ten_seconds(monkeypatch, tmp_path):
    page = (ROOT / "docs/how-to/parameter-servers.md").read_text()
    assert "it restarts from its last snapshot, about 10 s old" in page
    clock = SimulatedClock(monkeypatch, snapshots)
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    kept = snapshots.Snapshots(0)
    monkeypatch.setattr(kept, "_write_snapshot", lambda _: None)
    monkeypatch.setattr(snapshots.time, "time", lambda: 0.0, raising=False)
    service = ShardService(0, 1, Strategy(mode="async"), BufferPool())
    for _ in range(2):
        kept.written_updates, kept.writer = [1], None  # the shard has changed since
        begun = clock.now
        clock.seconds_until(lambda: kept.write(service, clock.now) or kept.writer)
        assert 9.9 < clock.now - begun < 10.3
        kept.writer.join(10)
