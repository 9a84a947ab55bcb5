"""Numeric options of mode async on two workers against plain Python, with pushes in a fixed order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from distrib.strategy import Gradients
from distrib.training.job import Job
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from tests.support import parameter_server_cluster
from tests.support.parameter_server_cluster import Cluster, comes_true, prepared, straight, take_step

make = parameter_server_cluster.make
again = parameter_server_cluster.again
pytestmark = pytest.mark.usefixtures("inductor_cache")

ORDER = [0, 1, 0, 0, 1, 0, 1, 1, 0]
"""The worker of each push. Worker 1 sees a staleness of 1, 2 and 1, worker 0 of 0, 1, 0, 1 and 2."""
LR, START = 0.1, 1.0


def pull(worker: int, step: int) -> float:
    """Return where the loss of a batch has its minimum."""
    return 3.0 * worker - 0.5 * step


class ReferenceServer:
    """A server with one number, and workers that read it after each of their pushes. The loss is (x - pull)^2."""

    def __init__(
        self, *, stale_rate: bool = False, strength: float = 0.0, momentum: float = 0.0, own_momentum: bool = True
    ) -> None:
        self.stale_rate, self.strength, self.momentum, self.own_momentum = stale_rate, strength, momentum, own_momentum
        self.value, self.version = START, 0
        self.read = {0: (START, 0), 1: (START, 0)}  # value and version that each worker trains with
        self.sent: dict[int, float] = {}
        self.staleness: list[int] = []
        self.common: float | None = None
        self.velocity: dict[int, float | None] = {}

    def push(self, worker: int, step: int) -> float:
        seen, version = self.read[worker]
        gradient = 2 * (seen - pull(worker, step))
        self.staleness.append(self.version - version)
        late = max(self.staleness[-1], sum(self.staleness) / len(self.staleness))
        if worker in self.sent:  # DC-ASGD
            gradient += self.strength * gradient * gradient * (self.value - self.sent[worker])
        rate = LR / (1 + late) if self.stale_rate else LR
        if not self.momentum:
            change = gradient
        elif self.own_momentum and late:  # DANA: Nesterov momentum of the worker, which begins with the common one
            before = self.velocity.get(worker, self.common)
            self.velocity[worker] = velocity = gradient if before is None else self.momentum * before + gradient
            change = gradient + self.momentum * velocity
        else:
            self.common = change = gradient if self.common is None else self.momentum * self.common + gradient
        self.value -= rate * change
        self.version += 1
        self.read[worker] = self.value, self.version
        self.sent[worker] = self.value
        return self.value


def value_after(cluster: Cluster, version: int) -> float:
    """Return the first server's number once it has applied `version` updates, and has carried out what follows from them."""
    server = cluster.servers[0]
    table, value = server.services[0].tables[0], Future[float]()
    assert comes_true(lambda: table.controller.version(0) == version, 60)  # the first optimizer imports torch._dynamo
    server.loop.call_soon(lambda: value.set_result(table.value(0).item()))
    return value.result(10)


def push_in_order(cluster: Cluster, momentum: float = 0.0) -> list[float]:
    """Return the server's value after each push of `ORDER`."""

    def begin(backend: ParameterServerStrategy) -> tuple[ParameterServerStrategy, nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, START)
        optimizer = torch.optim.SGD(model.parameters(), LR, momentum=momentum)
        prepared(backend, model, optimizer)
        return backend, model, optimizer

    workers = {backend.world.rank: (model, optimizer) for backend, model, optimizer in cluster.each(begin)}
    steps = {0: itertools.count(), 1: itertools.count()}
    found = []
    for number, worker in enumerate(ORDER):
        model, optimizer = workers[worker]
        optimizer.zero_grad()
        (model(torch.ones(1, 1, dtype=torch.float64)) - pull(worker, next(steps[worker]))).square().sum().backward()
        optimizer.step()
        found.append(value_after(cluster, number + 1))
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stale_rate": False}, {}),
        ({"stale_rate": True}, {"stale_rate": True}),
        ({"stale_rate": False, "delay_compensation": 0.3}, {"strength": 0.3}),
        ({"stale_rate": True, "delay_compensation": 0.05}, {"stale_rate": True, "strength": 0.05}),
        ({"stale_rate": False, "momentum_correction": True}, {"momentum": 0.6}),
        ({"stale_rate": False, "momentum_correction": False}, {"momentum": 0.6, "own_momentum": False}),
        ({"stale_rate": True, "momentum_correction": True, "delay_compensation": 0.1},
         {"stale_rate": True, "momentum": 0.4, "strength": 0.1}),
    ],
)  # fmt: skip
def test_updates_of_stale_gradients_are_those_of_the_papers(make, options, expected):
    reference = ReferenceServer(**expected)
    steps = {0: itertools.count(), 1: itertools.count()}
    values = [reference.push(worker, next(steps[worker])) for worker in ORDER]
    assert reference.staleness == [0, 1, 1, 0, 2, 1, 1, 0, 2]
    found = push_in_order(make(servers=1, workers=2, **options), expected.get("momentum", 0.0))
    assert found == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize(("format_", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_gradients_and_values_travel_in_16_bits_and_servers_keep_all(make, format_, dtype):
    """The worker's second gradient is of the rounded value, and both gradients are rounded."""
    cluster = make(servers=1, gradients=Gradients(format_))
    backend = cluster.worker(0)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1 / 3)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    prepared(backend, model, optimizer)
    value, seen = torch.tensor(1 / 3), torch.tensor(1 / 3)
    for step in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) - 0.7).square().sum().backward()
        optimizer.step()
        value = value - LR * (2 * (seen - 0.7)).to(dtype).float()
        seen = value.to(dtype).float()
        assert value_after(cluster, step + 1) == pytest.approx(value.item(), rel=1e-7)


@pytest.mark.parametrize("bound", [0, 1, 3, None])
def test_a_worker_is_at_most_as_many_steps_ahead_as_the_bound_says(make, bound):
    cluster = make(servers=1, workers=2, staleness=bound)
    (_, model, optimizer), (_, *other) = cluster.each(lambda backend: (backend, *straight(backend)))
    taken: list[int] = []

    def run() -> None:
        for step in range(1, 9):
            take_step(model, optimizer)
            taken.append(step)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if bound is None:
        thread.join(20)
        assert len(taken) == 8
        return
    # `step` returns once the gradient is on its way: the reply to one step more is awaited before the next forward pass.
    ahead = bound + 1
    for slow in range(3):
        assert comes_true(lambda: len(taken) >= ahead + slow)  # noqa: B023
        time.sleep(0.15)
        assert len(taken) == ahead + slow
        take_step(*other)
    for _ in range(5):
        take_step(*other)
    thread.join(20)
    assert len(taken) == 8


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_parameters_are_divided_over_as_many_servers_as_the_option_says(make, servers):
    cluster = make(servers=servers)
    model = nn.Linear(300, 300, bias=False)
    backend = cluster.worker(0)
    prepared(backend, model, torch.optim.SGD(model.parameters(), LR))
    own = [
        sum(chunk.elements for chunk in server.services[server.number].tables[0].chunks.values())
        for server in cluster.servers
    ]
    assert sum(own) == 90_000 and len(own) == servers and max(own) < 1.2 * 90_000 / servers


@pytest.mark.parametrize(
    ("options", "factor"),
    [({"stale_rate": True}, 3), ({"stale_rate": False}, 1), ({"stale_rate": False, "staleness": 0}, 3), ({"stale_rate": False, "staleness": 2}, 1)],
)  # fmt: skip
def test_rates_are_scaled_by_the_ranks_of_a_step(make, options, factor):
    job = job_of(make(servers=1, workers=3, **options).worker(0))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], job.scale_lr(0.5))
    assert job.scale_lr(0.5) == 0.5 * factor
    schedule = job.warmup(optimizer, 4)
    seen = []
    for _ in range(6):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.5 * (1 + (factor - 1) * min(step / 4, 1)) for step in range(6)])


def job_of(backend: ParameterServerStrategy) -> Job:
    """Return a job that does not close when this process ends, and that checks no optimizers of other tests."""
    job = Job(backend)
    job._parts.shutdown._usage.close()
    job._parts.shutdown._exit_watch.close()  # type: ignore[union-attr]
    return job


def weighted_mean(cluster: Cluster, gradients: dict[int, float], weigh: Callable[[int], Any]) -> float:
    """Return the change of a parameter by one synchronous step of workers whose batches have other weights."""

    def train(backend: ParameterServerStrategy) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        job = job_of(backend)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        job.weigh(weigh(backend.world.rank))
        (model(torch.ones(1, 1, dtype=torch.float64)) * gradients[backend.world.rank]).sum().backward()
        optimizer.step()
        backend.synchronize()
        return job.unwrap(model).weight.item()

    first, *others = cluster.each(train)
    assert set(others) == {first}
    return -first


def test_synchronous_steps_average_the_workers_gradients_by_weight(make):
    gradients = {0: 1.0, 1: 5.0, 2: 9.0}
    assert weighted_mean(make(servers=1, workers=3, staleness=0), gradients, lambda _: 1.0) == pytest.approx(5.0)
    found = weighted_mean(make(servers=1, workers=3, staleness=0), gradients, lambda rank: 1 + rank)
    assert found == pytest.approx((1 * 1 + 2 * 5 + 3 * 9) / 6)
