"""Workers of parameter servers that are disconnected, leave, return or are restarted."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.job import Job
from distrib.training.parameter_server.failover import FailoverTimeouts
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from tests.support import parameter_server_cluster
from tests.support.parameter_server_cluster import (
    comes_true,
    cut_off,
    prepared,
    reached,
    straight,
    suspend,
    take_step,
    weight,
)

make = parameter_server_cluster.make
again = parameter_server_cluster.again


def test_the_next_worker_is_main_when_rank_0_is_lost_and_stays_it(make):
    cluster = make(timeouts=FailoverTimeouts(reconnect_seconds=0.4), workers=3)
    first, second, third = backends = cluster.each(lambda backend: straight(backend) and backend)
    assert [backend.is_main for backend in backends] == [True, False, False]
    cut_off(first)
    assert comes_true(lambda: second.is_main)
    waits = threading.Thread(target=lambda: told.append(first.is_main))
    told: list[bool] = []
    waits.start()
    time.sleep(0.3)
    assert not told  # is_main waits for the server
    reached(first, cluster)
    waits.join(10)
    assert told == [False] and second.is_main and not third.is_main
    second.client.close()
    assert comes_true(lambda: third.is_main) and not first.is_main  # the first worker has not rejoined


def test_main_stays_who_it_is_when_it_leaves(make):
    first, second = make(timeouts=FailoverTimeouts(reconnect_seconds=0.4), workers=2).each(
        lambda backend: straight(backend) and backend
    )
    first.close()
    time.sleep(1.5)
    assert first.is_main and not second.is_main


def test_what_a_worker_has_pushed_may_be_committed_when_it_has_suspended_itself(make):
    cluster = make(servers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    take_step(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()  # pushes during backward
    held = cluster.servers[0].services[0].tables[0].controller.chunks[0].pending
    assert comes_true(lambda: 0 in held)

    suspend(backend, cluster)
    taken = threading.Thread(
        target=lambda: (optimizer.step(), take_step(model, optimizer), backend.synchronize()), daemon=True
    )
    taken.start()
    taken.join(10)
    assert not taken.is_alive() and weight(model) == -3


def test_a_gradient_that_was_pushed_before_its_worker_joined_the_others_again_is_pushed_in_their_step(make):
    cluster = make(servers=1, workers=2)
    (backend, first, second), (_, *others) = cluster.each(
        lambda backend: (backend, straight(backend), straight(backend))
    )
    for model, _ in (first, others[0]):
        model(torch.ones(1, 4)).sum()
    first[0](torch.ones(1, 4)).sum().backward()
    held = cluster.servers[0].services[0].tables[0].controller.chunks[0].pending
    assert comes_true(lambda: 0 in held)
    for _ in range(3):
        for model, optimizer in others:
            take_step(model, optimizer)
    assert weight(others[0][0]) == -3
    suspend(backend, cluster)

    def go_on() -> None:
        second[0](torch.ones(1, 4)).sum().backward()  # joins with both models
        first[1].step()
        second[1].step()
        backend.synchronize()

    taken = threading.Thread(target=go_on, daemon=True)
    taken.start()
    taken.join(10)
    assert not taken.is_alive() and weight(first[0]) == weight(second[0]) == -4


def test_a_worker_that_comes_back_in_the_middle_of_an_evaluation_waits_for_the_next(make):
    cluster = make(servers=1, workers=3)
    begun, back = threading.Event(), threading.Event()

    def evaluate(backend: ParameterServerStrategy) -> tuple[int, float]:
        _, count = backend.view(0, training=False)
        return count, backend.reduce(torch.tensor(1.0), "sum").item()

    def work(backend: ParameterServerStrategy) -> list[Any]:
        straight(backend)
        if backend.world.rank == 2:
            cut_off(backend, servers=[0])
            begun.wait(20)
            reached(backend, cluster)
            assert comes_true(lambda: backend.client.missed_rounds)
            threading.Timer(0.5, back.set).start()
            return [evaluate(backend)]  # its first reduction is the second of the other workers
        first, count = backend.view(0, training=False)
        begun.set()
        assert back.wait(20) and (first, count) == (backend.world.rank, 2)
        return [backend.reduce(torch.tensor(1.0), "sum").item(), evaluate(backend)]

    assert cluster.each(work) == [[2.0, (3, 3.0)], [2.0, (3, 3.0)], [(3, 3.0)]]


def test_after_the_job_is_closed_models_stay_and_the_servers_are_not_asked(make):
    backend = make().worker(0)
    model, optimizer = straight(backend)
    take_step(model, optimizer)
    backend.synchronize()
    backend.close()
    assert weight(model) == -1
    for ask in (optimizer.state_dict, lambda: take_step(model, optimizer)):
        with pytest.raises(TrainingError, match="asked after job"):
            ask()


def test_a_connection_that_another_of_its_worker_replaces_is_over(make):
    cluster = make(servers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    link, kept = backend.client.links[0], []

    def cut() -> None:
        assert link.connection
        kept.append(link.connection.sock.dup())  # keeps the socket open for the server
        link.disconnect()
        link.connect()

    for _ in range(3):
        replaced = link.connection
        backend.client.loop.call_soon(cut)
        assert comes_true(lambda replaced=replaced: link.connection is not replaced and link.welcomed)
        assert comes_true(lambda: len(cluster.servers[0].peers) == 1)
        take_step(model, optimizer)
    assert weight(model) == -3
    for sock in kept:
        sock.close()


def test_a_server_listens_on_its_own_address_only(make):
    address, port = make(servers=1).servers[0].addresses[0]
    socket.create_connection((address, port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_normalization_over_all_ranks_is_refused(make):
    backend = make().worker(0)
    job = Job(backend)
    with pytest.raises(TrainingError, match="sync_batchnorm"):
        job.prepare(nn.BatchNorm1d(2), sync_batchnorm=True)


def test_the_last_worker_that_is_cut_off_is_main_again(make):
    cluster = make(timeouts=FailoverTimeouts(reconnect_seconds=0.4), workers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    take_step(model, optimizer)
    cut_off(backend)
    assert comes_true(lambda: not cluster.servers[0].services[0].membership.members)
    reached(backend, cluster)
    take_step(model, optimizer)
    assert weight(model) == -2 and backend.is_main


def test_a_worker_that_comes_back_is_main_when_rank_0_was_lost_meanwhile(make):
    cluster = make(timeouts=FailoverTimeouts(reconnect_seconds=0.4), workers=2)
    (first, *_), (second, model, optimizer) = cluster.each(lambda backend: (backend, *straight(backend)))
    cut_off(second)
    assert comes_true(lambda: cluster.servers[0].services[0].membership.members == {0})
    first.client.close()
    assert comes_true(lambda: not cluster.servers[0].services[0].membership.members)
    reached(second, cluster)
    assert comes_true(lambda: second.is_main)
    take_step(model, optimizer)
    assert weight(model) == -1


def test_workers_that_lose_a_server_while_they_evaluate_sum_up_all_of_it(make):
    """The workers do not train meanwhile, and therefore all reach the next reduction."""
    cluster = make(timeouts=FailoverTimeouts(report_away_seconds=0.3), workers=2)
    together = threading.Barrier(2, timeout=20)

    def evaluate(backend: ParameterServerStrategy) -> list[float]:
        take_step(*straight(backend))
        assert backend.view(0, training=False)[1] == 2
        together.wait()
        cut_off(backend, servers=[1])
        assert comes_true(lambda: not cluster.servers[0].services[0].membership.members)
        together.wait()
        sums = []
        for first in (0, 1):  # arrives half a second before the other worker
            time.sleep(0.5 * (backend.world.rank != first))
            sums.append(backend.reduce(torch.tensor(1.0 + backend.world.rank), "sum").item())
        return sums

    assert cluster.each(evaluate) == [[3.0, 3.0]] * 2


def test_workers_that_all_lose_a_server_before_they_evaluate_share_the_evaluation(make):
    cluster = make(servers=1, workers=2)
    together = threading.Barrier(2, timeout=20)

    def evaluate(backend: ParameterServerStrategy) -> tuple[int, float]:
        straight(backend)
        suspend(backend, cluster)
        together.wait()
        time.sleep(0.5 * backend.world.rank)
        count = backend.view(0, training=False)[1]
        time.sleep(0.5 * backend.world.rank)
        return count, backend.reduce(torch.tensor(1.0), "sum").item()

    assert cluster.each(evaluate) == [(2, 2.0)] * 2


def test_a_worker_that_cannot_reach_another_server_stays_main_until_it_is_lost(make):
    cluster = make(timeouts=FailoverTimeouts(reconnect_seconds=0.4, report_away_seconds=0.3), workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    cut_off(first, servers=[1])
    assert comes_true(lambda: cluster.servers[0].services[0].membership.members == {1})
    time.sleep(1.0)
    assert first.is_main and not second.is_main
    first.client.close()
    assert comes_true(lambda: second.is_main)


def test_what_others_wait_for_is_done_by_the_next_worker(make):
    cluster = make(timeouts=FailoverTimeouts(reconnect_seconds=0.4), workers=2)
    first, second = cluster.worker(0), cluster.worker(1)
    assert first.from_main(lambda: "of rank 0") == second.from_main(lambda: "of rank 1") == "of rank 0"
    told: list[str] = []
    waits = threading.Thread(target=lambda: told.append(second.from_main(lambda: "of rank 1")))
    waits.start()
    time.sleep(0.3)
    assert not told
    first.client.close()
    waits.join(10)
    assert told == ["of rank 1"]


def test_a_worker_that_is_started_again_gives_gradients_and_nothing_else(make, again):
    cluster = make(workers=2)
    (first, model, optimizer), (second, _, _) = cluster.each(lambda backend: (backend, *straight(backend)))
    for _ in range(3):
        take_step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    take_step(model, optimizer)
    assert weight(model) == -3.5
    second.client.close()
    second = again(cluster, 1)
    own = nn.Linear(4, 1, bias=False)
    other = torch.optim.SGD(own.parameters(), 100.0)
    prepared(second, own, other)
    assert weight(own) == -3.5
    own.load_state_dict({"weight": torch.full((1, 4), 7.0)})
    other.load_state_dict(other.state_dict())
    assert weight(own) == -3.5
    other.param_groups[0]["lr"] = 10.0
    for _ in range(2):
        take_step(own, other)
    assert weight(own) == -4.5
    optimizer.param_groups[0]["lr"] = 0.25
    take_step(model, optimizer)
    assert weight(model) == -4.75
    take_step(own, other)
    assert weight(own) == -5.0
    # A restarted worker takes no part in collectives of all workers: neither waits for the other.
    assert second.reduce(torch.tensor(5.0), "mean") == 5.0 and second.view(3, training=False) == (0, 1)
    assert first.reduce(torch.tensor(3.0), "mean") == 3.0 and first.view(3, training=False) == (0, 1)
    assert first.is_main and not second.is_main


def test_rank_0_that_is_started_again_is_not_main_and_gets_what_was_kept(make, again):
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    assert first.from_main(lambda: 5) == 5
    first.client.close()
    first = again(cluster, 0)
    model = nn.Linear(4, 1, bias=False)
    prepared(first, model, torch.optim.SGD(model.parameters(), 1.0))
    assert weight(model) == 0  # not its own value
    assert first.from_main(lambda: 7) == 5
    assert comes_true(lambda: second.is_main) and not first.is_main
    assert second.from_main(lambda: 6) == 5  # the value that the workers stored


def test_synchronous_steps_wait_for_a_worker_that_was_started_again_once_it_has_joined(make, again):
    cluster = make(workers=2, staleness=0)

    def train(backend: ParameterServerStrategy) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = straight(backend)
        for _ in range(3):
            take_step(model, optimizer)
        return model, optimizer

    (model, optimizer), _ = cluster.each(train)
    cluster.backends[1 if cluster.backends[1].world.rank else 0].client.close()
    second = again(cluster, 1)
    own, other = straight(second, lr=5.0)
    assert weight(own) == -3
    take_step(model, optimizer)  # does not wait
    assert weight(model) == -4
    take_step(own, other)
    assert not comes_true(lambda: cluster.servers[0].services[0].tables[0].controller.last_step() > 5, 0.3)
    take_step(model, optimizer)
    assert weight(model) == weight(own) == -5  # one step, the mean of both
