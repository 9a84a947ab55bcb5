"""Parameter servers that die: replicas, rebuilt shards and snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.failover import FailoverTimeouts
from distrib.training.parameter_server.replica_link import ReplicaLink
from distrib.training.parameter_server.server_table import BufferPool
from distrib.training.parameter_server.shard_service import ShardService
from distrib.training.parameter_server.snapshots import Snapshots
from distrib.training.parameter_server.table_requests import TableRequests
from distrib.training.parameter_server.transport import Frame, FrameKind
from distrib.training.parameter_server.worker_table import WorkerTable
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from tests.support import parameter_server_cluster
from tests.support.parameter_server_cluster import (
    batch,
    comes_true,
    cut_off,
    network,
    prepared,
    reached,
    straight,
    take_step,
    weight,
)

make = parameter_server_cluster.make
again = parameter_server_cluster.again


def test_a_server_that_takes_over_hears_from_the_workers_who_is_main(make):
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    second.client.main = (1, 1)  # sent by the server before, but not rank 0
    cut_off(second)
    assert comes_true(lambda: not second.client.links[0].welcomed)
    reached(second, cluster)
    assert comes_true(lambda: second.is_main and not first.is_main)


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_is_advised_where_a_server_is_lost(replicas):
    timeouts = FailoverTimeouts(warn_seconds=0.2, give_up_seconds=0.3)
    addresses = [("127.0.0.1", 9), ("127.0.0.1", 9)]
    client = ParameterClient(0, addresses, b"key", replicas=bool(replicas), timeouts=timeouts)
    with pytest.raises(TrainingError, match=r"server 0 at 127.0.0.1:9 .* worker rank 0 on ") as raised:
        client.result(client.request(0, Frame(FrameKind.STATISTICS)))
    assert socket.gethostname() in str(raised.value)
    assert ("--replicas 1" in str(raised.value)) == (not replicas)
    client.close()


def test_what_main_has_kept_is_on_the_replica(make):
    cluster = make(workers=1, replicas=1)
    backend = cluster.worker(0)
    straight(backend)  # also stores its buffers
    backend.from_main(lambda: 5)
    own, copies = cluster.servers[0].services[0].results.pieces, cluster.servers[1].services
    assert len(own) == 2 and comes_true(lambda: 0 in copies and copies[0].results.pieces == own)


def test_what_a_server_keeps_is_its_own_and_goes_with_it(monkeypatch, tmp_path):
    """A server deletes the file that it is writing, too. It does not read a file of another process."""
    monkeypatch.setenv("DISTRIB_RUN_DIR", "/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DISTRIB_JOB", "job")
    service = ShardService(0, 1, Strategy(mode="async"), BufferPool())
    service.results.pieces[0] = [b"x" * (1 << 20)] * 100
    first = Snapshots(0)
    first.write_results(service, time.monotonic())
    assert comes_true(lambda: first.write_results(service, time.monotonic()) or any(first.folder.glob("result-0")))
    again, other = Snapshots(0), ShardService(0, 1, Strategy(mode="async"), BufferPool())
    assert again.restore(other) is None and other.results.pieces == service.results.pieces
    service.results.pieces[1] = service.results.pieces[0] * 5
    first.write_results(service, time.monotonic())
    first.remove()
    assert first.result_writer
    first.result_writer.join(30)
    assert not any(tmp_path.iterdir())
    planted = tmp_path / first.folder.name
    planted.mkdir(mode=0o755)
    (planted / "result-3").write_bytes(b"[1]\nx")
    other.results.pieces.clear()
    assert Snapshots(0).restore(other) is None and not other.results.pieces
    planted.chmod(0o700)
    planted.rename(tmp_path / "elsewhere")
    planted.symlink_to(tmp_path / "elsewhere")
    assert Snapshots(0).restore(other) is None and not other.results.pieces


def test_snapshots_take_no_more_than_a_part_of_the_time(monkeypatch, tmp_path):
    """The snapshot file is on a slow, shared file system."""
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    snapshots = Snapshots(0, interval_seconds=0.0, max_writing_fraction=0.2)
    service = ShardService(0, 1, Strategy(mode="async"), BufferPool())
    write = snapshots.write_file
    monkeypatch.setattr(snapshots, "write_file", lambda *words: (time.sleep(0.2), write(*words))[1])
    service.retired.add(0)
    snapshots.written_updates = [1]  # marks an update since the last snapshot
    begun = time.monotonic()
    snapshots.write(service, begun)
    assert snapshots.writer
    snapshots.writer.join(10)
    assert snapshots.path.exists() and snapshots.next_seconds >= begun + 0.2 / 0.2


def test_a_snapshot_for_which_the_disk_has_no_room_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    snapshots = Snapshots(0)
    with contextlib.suppress(OSError), Path("/dev/full").open("wb") as full:  # torch raises a RuntimeError
        assert not snapshots.write_file("snapshot.pt", lambda _: torch.save(torch.ones(1000), full))
    assert not any(snapshots.folder.iterdir())


def trained_by(backend: ParameterServerStrategy) -> Callable[[], Any]:
    """Prepare a model and return a function that takes a step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared(backend, model, optimizer)
    return lambda: (model(batch(0, 0)).sum().backward(), optimizer.step(), model(batch(0, 0)))


def test_a_replica_takes_over_when_the_launcher_reports_the_server_dead(make):
    """The replica does not take over before the report: only some workers may have lost the server."""
    cluster = make(workers=2, replicas=1)
    train, _ = cluster.each(trained_by)
    train()
    first, second = cluster.servers
    theirs, ours = os.pipe()
    first.loop.call_soon(lambda: first.watch_events(theirs))
    assert comes_true(
        lambda: (1 in first.services and 1 in first.replica_links) or first.services[0].replication.replica is not None
    )
    cluster.report = lambda rank, *, dead: None
    cluster.lose(1)
    waits = threading.Thread(target=train)
    waits.start()
    waits.join(3)
    assert waits.is_alive() and not first.services[1].is_primary
    os.write(ours, json.dumps({"rank": 2 + second.number, "dead": True}).encode() + b"\n")
    waits.join(60)
    os.close(ours)
    assert not waits.is_alive() and first.services[1].is_primary


def test_a_primary_replies_to_no_push_while_its_replica_is_unreachable(make):
    """The replica may have taken over. The launcher decides, or the primary exits after a timeout."""
    cluster = make(workers=1, replicas=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    first = cluster.servers[0]
    assert comes_true(lambda: first.services[0].replication.replica is not None)
    link, addresses = first.replica_links[0], first.replica_links[0].addresses

    def cut() -> None:
        link.addresses = [("127.0.0.1", 9)] * 2
        link.close()

    first.loop.call_soon(cut)
    assert comes_true(lambda: first.services[0].replication.required)
    take_step(model, optimizer)
    waits = threading.Thread(target=lambda: weight(model))
    waits.start()
    waits.join(1)
    assert first.services[0].is_primary and any(buffer.is_waiting for buffer in backend.tables[0].buffers)
    first.loop.call_soon(lambda: setattr(link, "addresses", addresses))
    waits.join(20)
    assert not waits.is_alive() and weight(model) == -1


@pytest.mark.parametrize("lost", [(0,), (0, 1)])
@pytest.mark.parametrize("replicas", [0, 1])
def test_servers_that_die_before_they_have_all_first_values(make, monkeypatch, replicas, lost):
    """The workers know the table, rank 0 is about to send its values, and the other workers wait for them."""
    cluster = make(
        timeouts=FailoverTimeouts(rebuild_seconds=1.0, report_away_seconds=0.3), workers=2, replicas=replicas
    )
    give, given, have_values = WorkerTable.give_values, [], threading.Barrier(2)

    def interrupted(table: WorkerTable, numbers: Any, *, replace: bool) -> None:
        numbers = list(numbers)
        give(table, numbers[:1], replace=replace)
        for number in lost:
            cluster.lose(number)
        for number in lost:
            cluster.start_again(number, monkeypatch)
        given.append(table)
        time.sleep(0.8)  # rank 0 cannot reach a server meanwhile
        give(table, numbers, replace=replace)

    monkeypatch.setattr(WorkerTable, "give_values", interrupted)

    def train(backend: ParameterServerStrategy) -> list[torch.Tensor]:
        model = network(seed=backend.world.rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prepared(backend, model, optimizer)
        held = [parameter.detach().clone() for parameter in model.parameters()]
        have_values.wait(30)
        model(batch(0, backend.world.rank)).sum().backward()
        optimizer.step()
        model(batch(1, 0))
        return held

    values = cluster.each(train)
    assert len(given) == 1
    for mine, theirs, first in zip(*values, network(seed=0).parameters(), strict=True):
        torch.testing.assert_close(mine, first)
        torch.testing.assert_close(theirs, first)


def test_training_goes_on_with_what_workers_have_when_a_server_and_its_replica_die(make, monkeypatch, capfd):
    cluster = make(timeouts=FailoverTimeouts(rebuild_seconds=1.0), workers=2, replicas=1)
    both = cluster.each(lambda backend: straight(backend))
    for model, optimizer in both:
        take_step(model, optimizer)
    for number in (0, 1):
        cluster.lose(number)
    for number in (0, 1):
        cluster.start_again(number, monkeypatch)
    for model, optimizer in both:
        take_step(model, optimizer)
    # The first steps are lost if their replies were. The replaced server may have received the second steps.
    assert -4 <= weight(both[0][0]) <= -2
    said = capfd.readouterr().err
    assert "takes over shard 0, of which no replica is left, from the parameters of the workers" in said
    assert comes_true(lambda: all(len(server.services) == 2 for server in cluster.servers))  # with new replicas


def test_a_rebuilt_shard_applies_no_update_again_that_other_workers_have_received(make, monkeypatch):
    cluster = make(timeouts=FailoverTimeouts(rebuild_seconds=1.0), workers=2, replicas=1)
    (first, *mine), (_, *theirs) = cluster.each(lambda backend: (backend, *straight(backend)))
    for pair in (mine, theirs):
        take_step(*pair)
        weight(pair[0])
    send = TableRequests.send_value

    def lossy(self: Any, table: Any, reply: Any, worker: int, connection: Any) -> None:
        if worker:
            send(self, table, reply, worker, connection)

    monkeypatch.setattr(TableRequests, "send_value", lossy)
    take_step(*mine)
    assert comes_true(lambda: weight(theirs[0]) == -3)
    cut_off(first)
    monkeypatch.setattr(TableRequests, "send_value", send)
    for number in (0, 1):
        cluster.lose(number)
    for number in (0, 1):
        cluster.start_again(number, monkeypatch)
    take_step(*theirs)
    assert weight(theirs[0]) == -4
    reached(first, cluster)
    assert comes_true(lambda: sum(buffer.rejected for buffer in first.tables[0].buffers) == 1)
    assert weight(theirs[0]) == weight(mine[0]) == -4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("isolated", [0, 1])
def test_of_two_servers_that_lose_each_other_the_one_that_reaches_the_workers_continues(make, isolated):
    cluster = make(timeouts=FailoverTimeouts(replica_seconds=1.0), workers=1, replicas=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    assert comes_true(lambda: all(s.services[s.number].replication.replica for s in cluster.servers))
    take_step(model, optimizer)
    assert weight(model) == -1
    cut_off(backend, servers=[isolated])
    for server in cluster.servers:

        def cut(link: ReplicaLink = server.replica_links[server.number]) -> None:
            link.addresses = [("127.0.0.1", 9)] * 2
            link.close()

        server.loop.call_soon(cut)
    assert comes_true(lambda: not cluster.threads[isolated].is_alive())
    assert cluster.threads[1 - isolated].is_alive()
    cluster.lose(isolated)  # the launcher reports its exit
    take_step(model, optimizer)
    assert weight(model) == -2 and cluster.threads[1 - isolated].is_alive()


def test_no_server_rebuilds_a_shard_whose_primary_is_only_unreachable(make):
    cluster = make(timeouts=FailoverTimeouts(rebuild_seconds=0.5), servers=3, workers=1, replicas=1)
    [train] = cluster.each(trained_by)
    train()
    left = cluster.servers[2]
    assert comes_true(lambda: 1 in left.services)  # the replica of shard 1; that of shard 0 is on server 1
    report = cluster.report
    cluster.report = lambda rank, *, dead: None
    for number in (0, 1):
        cluster.lose(number)
    waits = threading.Thread(target=train)
    waits.start()
    waits.join(4)
    assert waits.is_alive() and 0 not in left.services and not left.services[1].is_primary
    for rank in (1, 2):  # the worker first, then the servers
        report(rank, dead=True)
    waits.join(60)
    assert not waits.is_alive() and left.services[0].is_primary and left.services[1].is_primary


def test_a_primary_that_was_given_up_hears_of_it_from_who_is_in_charge_now(make):
    cluster = make(workers=1, replicas=1)
    [(model, optimizer)] = cluster.each(lambda backend: straight(backend))
    first, second = cluster.servers
    assert comes_true(lambda: 0 in second.services and second.services[0].membership.members == {0})
    second.loop.call_soon(lambda: second.services[0].become_primary(5))
    first.loop.call_soon(lambda: first.replica_links[0].close())
    assert comes_true(
        lambda: 0 not in first.replica_links or 0 not in first.services or not first.services[0].is_primary
    )
    take_step(model, optimizer)
    assert second.services[0].is_primary and weight(model) == -1
