"""Asynchronous training: workers and servers over real sockets in this process, and whole jobs in which some die."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.strategy import Gradients, Strategy
from distrib.training.checkpoint import checkpoint_format
from distrib.training.gradient_accumulation import Samples
from distrib.training.job import Job
from distrib.training.optimizer_step import Steps, follow_scaler
from distrib.training.parameter_server import client as client_module
from distrib.training.parameter_server import transport as wire
from distrib.training.parameter_server.client import Client
from distrib.training.parameter_server.server import Server
from distrib.training.parameter_server.server_optimizer import Recipe, by_own_momentum
from distrib.training.parameter_server.server_table import Pool
from distrib.training.parameter_server.shard_service import Part
from distrib.training.parameter_server.snapshots import PART_OF_TIME, Snapshots
from distrib.training.parameter_server.transport import Frame, Kind
from distrib.training.parameter_server.worker_table import HeldTable
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from distrib.training.world import World

pytestmark = pytest.mark.forked

LAUNCH = Path(sys.executable).parent / "distrib-launch"
SCRIPT = Path(__file__).parent / "scripts" / "asynchronous.py"
OWN_HANDS = SCRIPT.with_name("own_hands.py")
SEEDING = threading.Lock()  # the workers of a test share torch's random numbers
CPU = torch.device("cpu")


class Cluster:
    """Servers in threads of this process, and workers that know them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, servers: int, workers: int, strategy: Strategy) -> None:
        self.workers, self.strategy = workers, strategy
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(servers)]
        addresses = [("127.0.0.1", sock.getsockname()[1]) for sock in sockets]
        for sock in sockets:
            sock.close()
        monkeypatch.setenv("DISTRIB_SERVERS", ",".join(f"{host}:{port}" for host, port in addresses))
        monkeypatch.setenv("DISTRIB_KEY", "key")
        self.servers = [Server(number, addresses, workers, b"key", strategy) for number in range(servers)]
        self.threads = [threading.Thread(target=server.run, daemon=True) for server in self.servers]
        for thread in self.threads:
            thread.start()
        self.backends: list[ParameterServerStrategy] = []

    def worker(self, rank: int) -> ParameterServerStrategy:
        world = World(rank=rank, size=self.workers, local_rank=rank, local_size=self.workers)
        self.backends.append(ParameterServerStrategy(self.strategy, world, CPU))
        return self.backends[-1]

    def each(self, work: Callable[[ParameterServerStrategy], Any], hosts: str = "") -> list[Any]:
        """What `work` returns on every worker, all at once; raises what one of them raised. Threads are named `host rank`."""
        results: list[Any] = [None] * self.workers

        def run(rank: int) -> None:
            try:
                results[rank] = work(self.worker(rank))
            except Exception as error:
                results[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"{hosts[rank : rank + 1]} {rank}")
            for rank in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a worker is stuck"
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def lose(self, number: int) -> None:
        """A server dies: its connections break, and nobody listens any more."""
        lost = self.servers[number]

        def end() -> None:
            for peer in list(lost._peers):
                lost._end(peer)
            for link in lost._links.values():
                link._close()
            lost.loop.forget(lost._listener)
            lost._listener.close()
            lost.loop.ended = True

        lost.loop.call(end)
        self.threads[number].join(10)

    def start_again(self, number: int, monkeypatch: pytest.MonkeyPatch) -> Server:
        """A server takes the place of one that died, as the launcher starts it."""
        with monkeypatch.context() as environment:
            environment.setenv("DISTRIB_RESTARTED", "1")
            server = Server(number, self.servers[number].addresses, self.workers, b"key", self.strategy)
        self.servers[number], self.threads[number] = server, threading.Thread(target=server.run, daemon=True)
        self.threads[number].start()
        return server

    def stop(self) -> None:
        for backend in self.backends:
            backend.client.close()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.loop.call(lambda server=server: setattr(server.loop, "ended", True))  # type: ignore[misc]
            thread.join(5)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made: list[Cluster] = []

    def build(servers: int = 2, workers: int = 1, **strategy: Any) -> Cluster:
        counts = {"stale_rate": False}  # every update goes as far, so that it is seen in the values
        made.append(Cluster(monkeypatch, servers, workers, Strategy(mode="async", **counts | strategy)))
        return made[-1]

    yield build
    for cluster in made:
        cluster.stop()


def network(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 50), nn.Tanh(), nn.Linear(50, 2))


def prepared(backend: ParameterServerStrategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backend.prepare_model(model, find_unused_parameters=False)
    backend.prepare_optimizer(optimizer)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


ADAFACTOR: type[Any] = getattr(torch.optim, "Adafactor", torch.optim.Adagrad)  # which came with torch 2.5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    # With their own epsilon the smallest gradients, of which rounding alone decides the sign, would make whole steps.
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-3),
    "Adafactor": lambda p: ADAFACTOR(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_staleness_zero_is_synchronous_sgd(make, name):
    def train(backend: ParameterServerStrategy) -> tuple[nn.Module, dict[str, Any]]:
        model = network(backend.world.rank)  # rank 0's counts
        optimizer = OPTIMIZERS[name](model.parameters())
        prepared(backend, model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        for step in range(12):
            optimizer.zero_grad()
            model(batch(step, backend.world.rank)).square().mean().backward()
            optimizer.step()
            schedule.step()
        return model.state_dict(), optimizer.state_dict()

    results = make(workers=3, staleness=0).each(train)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(12):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(3)])).square().mean().backward()
        optimizer.step()
        schedule.step()
    for parameters, state in results:
        for key, value in model.state_dict().items():
            assert torch.allclose(parameters[key], value, atol=1e-5), key
        expected = optimizer.state_dict()["state"]
        assert state["state"].keys() == expected.keys()
        for number, names in expected.items():
            for key, value in names.items():
                if value is not None:
                    assert torch.allclose(
                        torch.as_tensor(state["state"][number][key]), torch.as_tensor(value), atol=1e-5
                    )


def test_gradients_that_are_changed_after_the_backward_pass_count_as_they_are_then(make):
    backend = make().worker(0)
    model, alone = network(), network()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    prepared(backend, model, optimizer)
    for step in range(6):
        for net, opt in ((model, optimizer), (alone, own)):
            opt.zero_grad()
            for part in (0, 1):  # accumulated, too
                net(batch(step, part)).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if step != 3:  # a step that is left out
                opt.step()
    for mine, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_closures_evaluation_and_restored_states(make):
    backend = make(workers=1).worker(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    prepared(backend, model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(0, 0)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    kept, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    assert optimizer.step(closure) < first
    model.eval()
    after = model(batch(0, 0))
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    model.train()
    optimizer.step(closure)
    model.eval()
    assert torch.allclose(model(batch(0, 0)), after, atol=1e-6)
    assert backend.staleness()["max"] == 0


def test_a_checkpoint_has_the_mean_of_the_momenta_of_all(make):
    cluster = make(servers=1)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    prepared(cluster.worker(0), model, optimizer)
    step(model, optimizer)
    optimizer.state_dict()  # waits until it was taken
    updater = cluster.servers[0].parts[0].tables[0].updaters[0]
    for worker, number in ((0, 1.0), (1, -2.0)):
        updater.apply(torch.full((4,), number), by_own_momentum(Recipe("SGD"), dict(updater._options), worker))
    saved = optimizer.state_dict()["state"][0]["momentum_buffer"]
    one, other = updater.parts()["momenta"].values()
    assert not torch.equal(one, other) and torch.allclose(saved.flatten(), (one + other) / 2)


def test_all_who_ask_for_a_value_get_one_copy_of_it(make):
    """Hundreds of ranks may begin an evaluation at once, and their answers wait for the wire."""
    cluster = make(servers=1)
    model, optimizer = straight(cluster.worker(0))
    step(model, optimizer)
    weight(model)  # waits until it was taken
    table = cluster.servers[0].parts[0].tables[0]
    copies = [table.copied(0) for _ in range(3)]
    before = bytes(copies[0])
    assert len({id(copy.obj) for copy in copies}) == 1
    step(model, optimizer)
    weight(model)
    assert bytes(copies[0]) == before != bytes(table.copied(0))
    del copies
    assert table._copies[0][1]() is None  # nothing is kept that is on its way to nobody


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_half_precision_on_the_wire_and_fp32_on_the_servers(make, wire):
    backend = make(gradients=Gradients(wire)).worker(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-12)
    prepared(backend, model, optimizer)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.state_dict()["weight"], torch.full((1, 4), 1 - 3 * 2.0**-12))


def test_reductions_of_all_workers(make):
    def reduce(backend: ParameterServerStrategy) -> tuple[float, str, float]:
        value = torch.tensor(float(backend.world.rank))
        told = backend.from_main(lambda: f"from {backend.world.rank}")
        return backend.reduce(value, "mean").item(), told, backend.reduce(value, "max").item()

    assert make(workers=3).each(reduce) == [(1.0, "from 0", 2.0)] * 3


def test_what_is_saved_after_a_meeting_has_what_the_others_did_before_it(make):
    def train(backend: ParameterServerStrategy) -> float:
        model, optimizer = straight(backend)
        for _ in range(2 if backend.world.rank == 0 else 8):
            step(model, optimizer)
            time.sleep(0.05 * backend.world.rank)
        backend.synchronize()  # as at the end of an epoch
        backend.reduce(torch.tensor(0.0), "sum")  # as job.barrier does
        return weight(model)

    assert make(workers=2).each(train) == [-10, -10]


def test_checkpoints_of_a_compiled_model_are_the_servers_values(make, tmp_path):
    cluster = make(servers=1)
    backend, inner, other = cluster.worker(0), nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    model = torch.compile(inner, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    prepared(backend, model, optimizer)
    checkpoint_format.write(tmp_path / "other.pt", {"model": other})
    checkpoint_format.read(
        (tmp_path / "other.pt").read_bytes(), {"model": model}, torch.device("cpu"), source="other.pt"
    )
    assert torch.equal(cluster.servers[0].parts[0].tables[0].value(0), other.weight[0])
    step(model, optimizer)
    checkpoint_format.write(tmp_path / "mine.pt", {"model": model})
    saved = torch.load(tmp_path / "mine.pt", weights_only=True)["states"]["model"]
    assert torch.equal(saved["weight"], other.weight - 1)


def test_a_module_of_a_model_is_saved_and_loaded_as_the_model_is(make):
    backend = make().worker(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    for layer in model:
        nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    prepared(backend, model, optimizer)
    around = nn.ModuleDict({"last": model[1]})

    def train(steps: int) -> None:
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    train(1)
    assert model[0].state_dict()["weight"].unique().tolist() == [-1]
    train(2)
    assert around.state_dict()["last.weight"].unique().tolist() == [-3]
    train(1)
    model[0].load_state_dict({"weight": torch.full((4, 4), 7.0)})  # in one chunk with the other layer
    model(torch.ones(1, 4))
    train(1)
    state = model.state_dict()
    assert [state[name].unique().tolist() for name in ("0.weight", "1.weight")] == [[6], [-5]]


def test_what_is_loaded_leaves_the_other_models_as_they_are(make):
    backend = make().worker(0)
    (first, optimizer), (second, other) = straight(backend), straight(backend)
    for _ in range(3):
        step(first, optimizer)
    step(second, other)
    second.load_state_dict({"weight": torch.full((1, 4), 5.0)})
    optimizer.load_state_dict(optimizer.state_dict())
    second(torch.ones(1, 4))  # what was answered before must not come over what was loaded
    assert (second.weight == 5).all() and (weight(first), weight(second)) == (-3, 5)
    second.load_state_dict({}, strict=False)
    assert weight(second) == 5


def test_nobody_trains_on_before_main_has_restored(make):
    gate = threading.Event()

    def restore(backend: ParameterServerStrategy) -> list[float]:
        model, optimizer = straight(backend)
        step(model, optimizer)
        seen = backend.from_main(lambda: {"weight": torch.full((1, 4), 7.0)})
        if backend.world.rank == 0:
            gate.wait(1.0)
        model.load_state_dict(seen)
        backend.load_state_dict({})
        model(torch.ones(1, 4))
        gate.set()
        return model.weight[0].tolist()

    assert make(workers=2).each(restore) == [[7.0] * 4] * 2


def test_a_copy_of_a_model_is_by_itself(make):
    backend = make().worker(0)
    model, optimizer = straight(backend)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.module.load_state_dict({"weight": torch.full((1, 4), 3.0)})
    step(model, optimizer)
    assert weight(model) == -1 and weight(copy.deepcopy(model).eval()) == -1
    assert average.eval()(torch.ones(1, 4)) == 12
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)  # what all steps have come to, though the model itself waits for its next forward pass
    assert b"distrib" not in file.getvalue()
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    step(model, optimizer)
    assert weight(model) == -3 and weight(saved) == -2 and saved(torch.ones(1, 4)) == -8


def test_what_the_script_changes_by_itself_is_refused(make):
    backend = make().worker(0)
    model = nn.Linear(4, 1)
    backend.prepare_model(model, find_unused_parameters=False)
    model(torch.ones(1, 4)).sum().backward()
    backend.synchronize()  # nothing has learnt: gradients may be what was asked for
    with torch.no_grad():
        model.bias -= 0.1 * model.bias.grad
    with pytest.raises(TrainingError, match="bias has learnt, but no prepared optimizer has it"):
        backend.synchronize()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, ADAFACTOR])
def test_the_state_of_an_optimizer_is_as_it_was_when_it_is_given_back(make, kind):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = (
                nn.Parameter(torch.tensor(1.0)),
                nn.Linear(6, 300),
            )  # of one chunk, the first without dimension

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.scale * self.layer(inputs)

    backend, model, alone = make(servers=1).worker(0), Scaled(), Scaled()
    optimizer, own = kind(model.parameters(), 0.01), kind(alone.parameters(), 0.01)
    prepared(backend, model, optimizer)
    alone.load_state_dict(model.state_dict())
    for number in range(6):
        for net, opt in ((model, optimizer), (alone, own)):
            opt.zero_grad()
            net(batch(number, 0)).square().mean().backward()
            opt.step()
        if number == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    counts = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert len({id(count) for count in counts if isinstance(count, torch.Tensor)}) in (0, len(counts))
    for mine, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_parameter_without_state_begins_anew(make, kind):
    cluster = make(servers=1)
    backend, model = cluster.worker(0), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = kind(model.parameters(), 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {number: state["state"][number] for number in (0, 1)}  # as where the rest was frozen
    prepared(backend, model, optimizer)
    optimizer.load_state_dict(state)
    held = cluster.servers[0].parts[0].tables[0].updaters[0]
    assert {value.numel() for name, value in held.state().items() if name != "step"} == {held.value.numel()}
    state["state"] = {}
    optimizer.load_state_dict(state)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert all(one["step"] == 1 for one in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, ADAFACTOR])
def test_the_servers_keep_what_they_need_of_a_model_in_half_precision(make, kind):
    backend, model = make().worker(0), nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = kind(model.parameters(), 0.1)
    prepared(backend, model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(one["step"] == 2 for one in optimizer.state_dict()["state"].values())


def test_a_state_of_another_size_is_refused_before_anything_is_changed(make):
    backend = make().worker(0)
    model, optimizer = straight(backend)
    optimizer.param_groups[0]["momentum"] = 0.9
    step(model, optimizer)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.ones(2, 4)
    with pytest.raises(TrainingError, match=r"momentum_buffer of weight is \[2, 4\] .* the parameter \[1, 4\]"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0] * 4]


def test_a_state_of_another_model_is_refused_where_tensors_are_whole(make):
    def trained(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, width)
        optimizer = ADAFACTOR(model.parameters(), 0.1)
        model(batch(0, 0)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (_, other) = trained(60), trained(50)
    prepared(make().worker(0), model, optimizer)
    with pytest.raises(TrainingError, match=r"of weight is \[50, \d\] .* the parameter \[60, 6\]"):
        optimizer.load_state_dict(other.state_dict())


def test_the_next_optimizer_is_made_though_all_have_lost_another_server_meanwhile(make):
    cluster, together = make(servers=1, workers=2), threading.Barrier(2, timeout=20)

    def work(backend: ParameterServerStrategy) -> bool:
        straight(backend)
        suspend(backend, cluster)
        together.wait()
        model, optimizer = straight(backend)
        step(model, optimizer)
        backend.synchronize()
        return weight(model) < 0

    assert cluster.each(work) == [True, True]


def test_gradients_on_their_way_do_not_come_after_the_end_of_their_optimizer(make, monkeypatch):
    monkeypatch.setattr(client_module._Link, "share", lambda self, table: None)
    held_until, own = [0.0], wire.Connection._next

    def slow(self: wire.Connection) -> bool:
        is_push = self._queue and self._queue[0][2].frame.kind is Kind.PUSH
        return False if is_push and time.monotonic() < held_until[0] else own(self)

    monkeypatch.setattr(wire.Connection, "_next", slow)

    def work(backend: ParameterServerStrategy) -> float:
        model, optimizer = straight(backend)
        step(model, optimizer)
        backend.synchronize()
        held_until[0] = time.monotonic() + 0.5
        model(torch.ones(1, 4)).sum().backward()
        backend.on_step_skipped(optimizer)
        backend.release_optimizer(optimizer)
        backend.release_model(model)
        time.sleep(0.7)
        return backend.reduce(torch.tensor(1.0), "sum").item()

    assert make(servers=1, workers=2).each(work) == [2.0, 2.0]


def test_a_server_survives_what_it_cannot_do_and_says_so_to_who_asked(make, capfd):
    (backend, model, optimizer), (other, *_) = make(servers=1, workers=2).each(lambda one: (one, *straight(one)))
    with pytest.raises(TrainingError, match="cannot do what was asked"):
        other.client.result(other.client.ask(0, Frame(Kind.SET_STATE, table=0), b"no tensors"))
    step(model, optimizer)
    backend.synchronize()
    assert weight(model) == -1
    time.sleep(1)
    assert capfd.readouterr().err.count("sent what cannot be") == 1  # and it does not ask again


def test_what_main_reads_for_all_travels_in_pieces(make, again, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.worker_collectives.PIECE_BYTES", 100)
    cluster = make(workers=2, replicas=1)
    large = bytes(range(250)) * 4
    assert cluster.each(lambda backend: straight(backend) and backend.from_main(lambda: large)) == [large] * 2
    first = next(backend for backend in cluster.backends if backend.world.rank == 0)
    assert first._meeting._keep(1, b"another's") is False  # who becomes main asks after what was kept
    cluster.backends[0].client.close()
    substitute = again(cluster, cluster.backends[0].world.rank)
    straight(substitute)
    assert substitute.from_main(lambda: b"") == large
    own, copies = cluster.servers[0].parts[0].kept, cluster.servers[1].parts
    assert len(own[1]) > 10 and comes_true(lambda: 0 in copies and copies[0].kept == own)


def test_what_no_frame_can_carry_is_refused(make, monkeypatch):
    cluster = make(workers=2)

    def refused(backend: ParameterServerStrategy) -> float:
        straight(backend)
        for elements in (10_000, 1800):  # alone it would fit
            with pytest.raises(TrainingError, match="in one piece"):
                backend.reduce(torch.zeros(elements), "sum")
        with pytest.raises(TrainingError, match="in one piece"):
            backend.client.ask(0, Frame(Kind.SET), bytes(10_001))
        return backend.reduce(torch.ones(100), "sum").sum().item()

    monkeypatch.setattr("distrib.training.parameter_server.transport.LONGEST_BYTES", 10_000)
    assert cluster.each(refused) == [200.0] * 2
    with pytest.raises(TrainingError, match=r"cannot do what was asked: .* in one piece"):  # by the server
        monkeypatch.setattr("distrib.training.parameter_server.transport.LONGEST_BYTES", 1000)
        client = cluster.backends[0].client
        client.result(client.ask(0, Frame(Kind.GET_STATE)))


@pytest.mark.parametrize(
    "value", [torch.tensor(3, dtype=torch.uint8), torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(0, 2),
              torch.ones(3, dtype=torch.complex64).conj(), torch.tensor([True, False])],
)  # fmt: skip
def test_tensors_of_any_type_and_shape_are_reduced(make, value):
    for reduced in make(workers=2).each(lambda backend: backend.reduce(value, "sum")):
        assert reduced.dtype == value.dtype and torch.equal(reduced, value + value)


def test_parameters_that_no_optimizer_trains_begin_as_main_s(make):
    def begin(backend: ParameterServerStrategy) -> list[float]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(backend.world.rank))
        prepared(backend, model, torch.optim.SGD(model[1].parameters(), 0.1))
        return [parameter.unique().item() for parameter in model.parameters()]

    assert make(workers=2).each(begin) == [[0.0] * 4] * 2


def test_only_what_differs_of_what_no_optimizer_trains_goes_through_the_servers(make):
    cluster = make(servers=1, workers=2)

    def begin(backend: ParameterServerStrategy) -> tuple[list[int], bool]:
        model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1))
        model[0].requires_grad_(False).register_buffer("order", torch.arange(4).roll(backend.world.rank))
        nn.init.ones_(model[0].weight)
        for _ in range(3):  # as a script does that prepares it again for each of its stages
            backend.prepare_model(model, find_unused_parameters=False)
        return model[0].order.tolist(), len(model[0]._forward_pre_hooks) == 1 == len(backend._models)

    assert cluster.each(begin) == [([0, 1, 2, 3], True)] * 2
    kept = cluster.servers[0].parts[0].kept.values()
    assert sum(len(piece) for pieces in kept for piece in pieces) < 50_000  # of 360 kB, three times


def test_what_learns_only_since_it_was_prepared_and_what_does_not_any_more_are_named(make):
    cluster, models = make(), [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(3)]
    backend = cluster.worker(0)
    unfrozen, added, frozen = models

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    unfrozen[0].requires_grad_(False)
    optimizer = torch.optim.SGD(unfrozen.parameters(), 0.1)
    prepared(backend, unfrozen, optimizer)
    train(unfrozen, optimizer)
    unfrozen[0].requires_grad_(True)
    with pytest.raises(TrainingError, match=r"0\.weight has a gradient, and the servers do not know of it"):
        train(unfrozen, optimizer)
    optimizer = torch.optim.SGD(added[1].parameters(), 0.1)
    prepared(backend, added, optimizer)
    optimizer.add_param_group({"params": list(added[0].parameters())})
    with pytest.raises(TrainingError, match=r"0\.weight has a gradient, and the servers do not know of it"):
        train(added, optimizer)
    optimizer = torch.optim.AdamW(frozen.parameters(), 0.1)
    prepared(backend, frozen, optimizer)
    frozen[0].requires_grad_(False)
    with pytest.raises(TrainingError, match=r"0\.weight was frozen after job\.prepare"):
        train(frozen, optimizer)


class Rate(float):
    pass


@pytest.mark.parametrize("rate", [np.float64(0.5), np.float32(0.5), Rate(0.5), torch.tensor(0.5)])
def test_settings_may_be_any_numbers(make, rate):
    backend = make().worker(0)
    model, optimizer = straight(backend, lr=rate)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = rate / 2
    step(model, optimizer)
    assert weight(model) == -0.75


def stepping(
    backend: ParameterServerStrategy, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any
) -> Steps:
    prepared(backend, model, optimizer)
    steps = Steps(
        optimizer,
        backend,
        Samples(own=1, all=backend.world.size),
        told=lambda *_: None,
        begins=lambda: None,
        **{"on_nan": "raise", **options},
    )
    steps.pair([model])
    return steps


def test_steps_that_are_left_out_count_where_others_wait_for_them(make):
    def train(backend: ParameterServerStrategy) -> float:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        stepping(backend, optimizer, model, on_nan="skip")
        for number in range(10):
            optimizer.zero_grad()
            model(torch.full((1, 4), torch.nan if number < 4 and not backend.world.rank else 1.0)).sum().backward()
            optimizer.step()
        backend.reduce(torch.tensor(0.0), "sum")
        return weight(model)

    assert make(workers=2, staleness=2).each(train) == [-16, -16]


def test_a_scaler_leaves_out_steps_of_a_fused_optimizer(make):
    def train(backend: ParameterServerStrategy) -> float:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=True)
        steps = stepping(backend, optimizer, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        follow_scaler(scaler, [steps])
        for number in range(4):
            optimizer.zero_grad()
            bad = number == 1 and not backend.world.rank
            scaler.scale(model(torch.full((1, 4), torch.inf if bad else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight(model)

    assert make(workers=2, staleness=0).each(train) == [-4, -4]


@pytest.mark.parametrize("strategy", [{"staleness": 0}, {"staleness": 0, "replicas": 1}, {"staleness": 3}])
def test_a_step_that_everybody_leaves_out_changes_nothing(make, strategy):
    cluster = make(workers=2, **strategy)

    def train(backend: ParameterServerStrategy) -> tuple[float, int]:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), 1.0, weight_decay=0.0, eps=0.0)
        stepping(backend, optimizer, model, on_nan="skip")
        for bad in (False, True, True):
            optimizer.zero_grad()
            model(torch.full((1, 4), torch.nan if bad else 1.0)).sum().backward()
            optimizer.step()
        backend.reduce(torch.tensor(0.0), "sum")
        return round(weight(model), 3), int(optimizer.state_dict()["state"][0]["step"])

    at = (-1.0, 1) if strategy["staleness"] == 0 else (-2.0, 2)
    assert cluster.each(train) == [at] * 2
    if strategy.get("replicas"):
        own, copies = cluster.servers[0].parts[0].tables[0], cluster.servers[1].parts
        assert comes_true(lambda: 0 in copies and 0 in copies[0].tables)
        assert comes_true(lambda: copies[0].tables[0].shard.index == own.shard.index == 3)
        assert comes_true(lambda: 0 in copies[0].tables[0].updaters)
        assert torch.equal(own.value(0), copies[0].tables[0].value(0))


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda p: Own(p, 0.1), "Own is not one of torch.optim's"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot be"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam cannot be"),
    ],
)
def test_an_optimizer_that_servers_cannot_make(make, optimizer, says):
    backend = make().worker(0)
    model = network()
    with pytest.raises(TrainingError, match=says):
        prepared(backend, model, optimizer(list(model.parameters())))


def test_a_worker_with_another_model_is_told_what_differs(make):
    def begin(backend: ParameterServerStrategy) -> None:
        model = nn.Linear(3, 4 + backend.world.rank)
        prepared(backend, model, torch.optim.SGD(model.parameters(), 0.1))

    with pytest.raises(
        TrainingError, match=r"worker rank \d has another model .* parameter weight is float32 \[[45], 3\]"
    ):
        make(workers=2).each(begin)


def test_sparse_gradients_are_refused(make):
    backend = make().worker(0)
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared(backend, model, optimizer)
    with pytest.raises(TrainingError, match="sparse"):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()


def test_who_does_not_know_the_key_is_not_heard(make):
    cluster = make()
    host, port = cluster.servers[0].addresses[0]
    with socket.create_connection((host, port), timeout=5) as sock:
        sock.sendall(bytes(16) + bytes(32) + bytes(100))
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # the greeting; then it hangs up
                pass
    assert cluster.servers[0].parts[0].tables == {}


# -- workers that are lost, and started again -------------------------------------------------------------------------


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster, int], ParameterServerStrategy]:
    """Starts a worker of a cluster again, as the launcher does."""

    def start(cluster: Cluster, rank: int) -> ParameterServerStrategy:
        with monkeypatch.context() as environment:
            environment.setenv("DISTRIB_RESTARTED", "1")
            return cluster.worker(rank)

    return start


def comes_true(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def cut_off(backend: ParameterServerStrategy, servers: Sequence[int] = (0, 1)) -> None:
    """The worker's connections break, and there is nobody where it looks for the servers."""
    client = backend.client

    def cut() -> None:
        client.addresses = [("127.0.0.1", 9) if n in servers else at for n, at in enumerate(client.addresses)]
        for server in servers:
            client._links[server].hang_up()

    client.loop.call(cut)


def reached(backend: ParameterServerStrategy, cluster: Cluster) -> None:
    backend.client.loop.call(lambda: setattr(backend.client, "addresses", cluster.servers[0].addresses))


def straight(backend: ParameterServerStrategy, lr: float = 1.0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model whose gradient is all ones, with its optimizer."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    prepared(backend, model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def weight(model: nn.Module) -> float:
    values = set(model.state_dict()["weight"].view(-1).tolist())
    assert len(values) == 1
    return float(values.pop())


def test_the_next_worker_is_main_when_rank_0_is_lost_and_stays_it(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.shard_service.DROP_SECONDS", 0.4)
    cluster = make(workers=3)
    first, second, third = backends = cluster.each(lambda backend: straight(backend) and backend)
    assert [backend.is_main for backend in backends] == [True, False, False]
    cut_off(first)
    assert comes_true(lambda: second.is_main)
    waits = threading.Thread(target=lambda: told.append(first.is_main))
    told: list[bool] = []
    waits.start()
    time.sleep(0.3)
    assert not told  # it does not know
    reached(first, cluster)
    waits.join(10)
    assert told == [False] and second.is_main and not third.is_main
    second.client.close()
    assert comes_true(lambda: third.is_main) and not first.is_main  # which has not joined the others again


def test_main_stays_who_it_is_when_it_leaves(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.shard_service.DROP_SECONDS", 0.4)
    first, second = make(workers=2).each(lambda backend: straight(backend) and backend)
    first.close()
    time.sleep(1.5)
    assert first.is_main and not second.is_main


def test_a_server_that_takes_over_hears_from_the_workers_who_is_main(make):
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    second.client.main = (1, 1)  # as the server before has told it, but not rank 0
    cut_off(second)
    assert comes_true(lambda: not second.client._links[0].welcomed)
    reached(second, cluster)
    assert comes_true(lambda: second.is_main and not first.is_main)


def suspend(backend: ParameterServerStrategy, cluster: Cluster) -> None:
    """As a worker does that could not reach another server."""

    def away() -> None:
        backend.client.outside = True
        backend.client._links[0].send(Frame(Kind.SUSPEND))
        backend.client._links[0].watch()

    backend.client.loop.call(away)
    assert comes_true(lambda: backend.world.rank not in cluster.servers[0].parts[0].members)


def test_what_a_worker_has_pushed_may_be_committed_when_it_has_suspended_itself(make):
    cluster = make(servers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    step(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()  # pushed at once
    held = cluster.servers[0].parts[0].tables[0].shard._chunks[0].held
    assert comes_true(lambda: 0 in held)

    suspend(backend, cluster)
    taken = threading.Thread(
        target=lambda: (optimizer.step(), step(model, optimizer), backend.synchronize()), daemon=True
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
    held = cluster.servers[0].parts[0].tables[0].shard._chunks[0].held
    assert comes_true(lambda: 0 in held)
    for _ in range(3):
        for model, optimizer in others:
            step(model, optimizer)
    assert weight(others[0][0]) == -3
    suspend(backend, cluster)

    def go_on() -> None:
        second[0](torch.ones(1, 4)).sum().backward()  # joins with both
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
            assert comes_true(lambda: backend.client.astray)
            threading.Timer(0.5, back.set).start()
            return [evaluate(backend)]  # its first is the second of the others
        first, count = backend.view(0, training=False)
        begun.set()
        assert back.wait(20) and (first, count) == (backend.world.rank, 2)
        return [backend.reduce(torch.tensor(1.0), "sum").item(), evaluate(backend)]

    assert cluster.each(work) == [[2.0, (3, 3.0)], [2.0, (3, 3.0)], [(3, 3.0)]]


def test_after_the_job_is_closed_models_stay_and_the_servers_are_not_asked(make):
    backend = make().worker(0)
    model, optimizer = straight(backend)
    step(model, optimizer)
    backend.synchronize()
    backend.close()
    assert weight(model) == -1
    for ask in (optimizer.state_dict, lambda: step(model, optimizer)):
        with pytest.raises(TrainingError, match="the job is closed"):
            ask()


def test_a_connection_that_another_of_its_worker_replaces_is_over(make):
    cluster = make(servers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    link, kept = backend.client._links[0], []

    def cut() -> None:
        assert link._sock
        kept.append(link._sock.dup())  # the server does not see it close
        link.hang_up()
        link.call()

    for _ in range(3):
        backend.client.loop.call(cut)
        assert comes_true(lambda: link.welcomed and len(cluster.servers[0]._peers) == 1)
        step(model, optimizer)
    assert weight(model) == -3
    for sock in kept:
        sock.close()


def test_updates_by_hand_are_told_of_before_the_end(launch):
    run = launch("-np", "2", "--mode", "async", OWN_HANDS.with_name("modes.py"), ".", "by_hand")
    assert run.code != 0 and "0.weight has learnt, but no prepared optimizer has it" in run.err, run
    assert "AssertionError" not in run.err, run.err  # of the tenth backward pass


@pytest.mark.parametrize("options", [(), ("--staleness", "0")], ids=["unbounded", "in step"])
def test_an_optimizer_that_is_prepared_later_takes_over(launch, options):
    run = launch("-np", "2", "--mode", "async", *options, OWN_HANDS.with_name("modes.py"), ".", "two_optimizers")
    assert run.code == 0 and "two_optimizers: learnt" in run.out, run


SAVES = """
import signal, sys, distrib, torch
signal.signal(signal.SIGTERM, signal.default_int_handler)
job = distrib.init()
model = torch.nn.Linear(2000, 100)
model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9))
step = 0
try:
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 2000)).sum().backward()
        optimizer.step()
        step += 1
except KeyboardInterrupt:
    job.save(sys.argv[1], model=model, optimizer=optimizer, step=step)
"""


def test_a_job_that_is_stopped_may_still_save(launch, tmp_path):
    script, saved = tmp_path / "saves.py", tmp_path / "last.pt"
    script.write_text(SAVES)
    run = launch("-np", "2", "--mode", "async", "--timeout", "12s", script, saved)
    assert run.code == 124 and torch.load(saved, weights_only=True)["values"]["step"] > 0, run


DELAYED = """
import torch, distrib
from torch import nn
job = distrib.init()
torch.manual_seed(0)
inputs = torch.randn(2048, 32)
labels = inputs[:, :8].argmax(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), 32, shuffle=True)
model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), loader)
for _ in range(6):
    for batch, truth in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), truth).backward()
        optimizer.step()
job.barrier()
model.eval()
job.print(f"accuracy {float((model(inputs).argmax(1) == labels).float().mean()):.3f}")
"""


def test_a_learning_rate_that_mode_sync_bears_is_borne(launch, tmp_path):
    """The same script ended with 0.95 in mode sync, and with 0.35 to 0.52 where late gradients counted as those of one rank do."""
    script = tmp_path / "delayed.py"
    script.write_text(DELAYED)
    run = launch("-np", "4", "--mode", "async", script)
    told = re.search(r"accuracy ([0-9.]+)", run.out)
    assert run.code == 0 and told and float(told[1]) > 0.8, run


def test_what_scripts_do_with_their_own_hands(launch):
    """With bound 0 the same comes out as in step, or it is said that it does not."""
    names = ["norm", "functional", "clamp", "clamp by data", "clip", "init"]
    found = {}
    for mode in ("sync", "async"):
        run = launch("-np", "2", "--mode", mode, *(["--staleness", "0"] if mode == "async" else []), OWN_HANDS, *names)
        assert run.code == 0, run
        found[mode] = {
            name: float(loss) for name, loss in re.findall(r"^\[0@localhost\] (.+) ([0-9.]+)$", run.out, re.MULTILINE)
        }
        assert run.err.count("the script has changed values by itself") == (2 if mode == "async" else 0), run.err
    assert found["async"]["norm"] == pytest.approx(found["sync"]["norm"], rel=1e-5)
    assert found["async"]["functional"] == pytest.approx(
        found["sync"]["functional"], rel=0.01
    )  # one step takes old values
    assert found["async"]["clamp by data"] == pytest.approx(found["async"]["clamp"], rel=1e-5)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_servers_are_reached_by_ipv6_too(make):
    cluster = make(servers=1)
    for host in ("127.0.0.1", "::1"):
        with socket.create_connection((host, cluster.servers[0].addresses[0][1]), timeout=5):
            pass


def test_normalization_over_all_ranks_is_refused(make):
    backend = make().worker(0)
    job = Job(backend)
    with pytest.raises(TrainingError, match="sync_batchnorm makes ranks wait"):
        job.prepare(nn.BatchNorm1d(2), sync_batchnorm=True)


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_is_advised_where_a_server_is_lost(monkeypatch, replicas):
    monkeypatch.setattr("distrib.training.parameter_server.client.LOST_SECONDS", 0.3)
    client = Client(0, [("127.0.0.1", 9), ("127.0.0.1", 9)], b"key", replicas=bool(replicas))
    with pytest.raises(TrainingError, match="cannot be reached") as raised:
        client.result(client.ask(0, Frame(Kind.STATISTICS)))
    assert ("more than half of the workers" in str(raised.value)) == bool(replicas)
    client.close()


def test_the_last_worker_that_is_cut_off_is_main_again(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.shard_service.DROP_SECONDS", 0.4)
    cluster = make(workers=1)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    step(model, optimizer)
    cut_off(backend)
    assert comes_true(lambda: not cluster.servers[0].parts[0].members)
    reached(backend, cluster)
    step(model, optimizer)
    assert weight(model) == -2 and backend.is_main


def test_a_worker_that_comes_back_is_main_when_rank_0_was_lost_meanwhile(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.shard_service.DROP_SECONDS", 0.4)
    cluster = make(workers=2)
    (first, *_), (second, model, optimizer) = cluster.each(lambda backend: (backend, *straight(backend)))
    cut_off(second)
    assert comes_true(lambda: cluster.servers[0].parts[0].members == {0})
    first.client.close()
    assert comes_true(lambda: not cluster.servers[0].parts[0].members)
    reached(second, cluster)
    assert comes_true(lambda: second.is_main)
    step(model, optimizer)
    assert weight(model) == -1


def test_workers_that_lose_a_server_while_they_evaluate_sum_up_all_of_it(make, monkeypatch):
    """They do not train meanwhile, and so they come to the next sum."""
    monkeypatch.setattr("distrib.training.parameter_server.client.SUSPEND_SECONDS", 0.3)
    cluster = make(workers=2)
    together = threading.Barrier(2, timeout=20)

    def evaluate(backend: ParameterServerStrategy) -> list[float]:
        step(*straight(backend))
        assert backend.view(0, training=False)[1] == 2
        together.wait()
        cut_off(backend, servers=[1])
        assert comes_true(lambda: not cluster.servers[0].parts[0].members)
        together.wait()
        sums = []
        for first in (0, 1):  # who comes to it half a second before the other
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


def test_a_worker_that_cannot_reach_another_server_stays_main_until_it_is_lost(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.shard_service.DROP_SECONDS", 0.4)
    monkeypatch.setattr("distrib.training.parameter_server.client.SUSPEND_SECONDS", 0.3)
    cluster = make(workers=2)
    first, second = cluster.each(lambda backend: straight(backend) and backend)
    cut_off(first, servers=[1])
    assert comes_true(lambda: cluster.servers[0].parts[0].members == {1})
    time.sleep(1.0)
    assert first.is_main and not second.is_main
    first.client.close()
    assert comes_true(lambda: second.is_main)


def test_what_others_wait_for_is_done_by_the_next_worker(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.shard_service.DROP_SECONDS", 0.4)
    cluster = make(workers=2)
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


def test_what_main_has_kept_is_on_the_replica(make):
    cluster = make(workers=1, replicas=1)
    backend = cluster.worker(0)
    straight(backend)  # its buffers are kept, too
    backend.from_main(lambda: 5)
    part, copies = cluster.servers[0].parts[0], cluster.servers[1].parts
    assert len(part.kept) == 2 and comes_true(lambda: 0 in copies and copies[0].kept == part.kept)


def test_what_a_server_keeps_is_its_own_and_goes_with_it(monkeypatch, tmp_path):
    """Also what is being written at that moment; and what others have put in its place is not read."""
    monkeypatch.setenv("DISTRIB_RUN_DIR", "/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DISTRIB_JOB", "job")
    part = Part(0, 1, 1, Strategy(mode="async"), Pool())
    part.kept = {0: [b"x" * (1 << 20)] * 100}
    first = Snapshots(0)
    first.keep(part, time.monotonic())
    assert comes_true(lambda: first.keep(part, time.monotonic()) or any(first.folder.glob("kept-0")))
    again, other = Snapshots(0), Part(0, 1, 1, Strategy(mode="async"), Pool())
    assert again.restore(other) is None and other.kept == part.kept
    part.kept[1] = part.kept[0] * 5
    first.keep(part, time.monotonic())
    first.remove()
    assert first._keeper
    first._keeper.join(30)
    assert not any(tmp_path.iterdir())
    planted = tmp_path / first.folder.name
    planted.mkdir(mode=0o755)
    (planted / "kept-3").write_bytes(b"[1]\nx")
    other.kept = {}
    assert Snapshots(0).restore(other) is None and not other.kept


def test_snapshots_take_no_more_than_a_part_of_the_time(monkeypatch, tmp_path):
    """As where they are written to a file system that hosts share."""
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("distrib.training.parameter_server.snapshots.EVERY_SECONDS", 0.0)
    snapshots, part = Snapshots(0), Part(0, 1, 1, Strategy(mode="async"), Pool())
    write = snapshots._write
    monkeypatch.setattr(snapshots, "_write", lambda *words: (time.sleep(0.2), write(*words))[1])
    part.over.add(0)
    snapshots._seen = [1]  # something was updated since
    begun = time.monotonic()
    snapshots.take(part, begun)
    assert snapshots._writer
    snapshots._writer.join(10)
    assert snapshots.path.exists() and snapshots._next >= begun + 0.2 / PART_OF_TIME


def test_a_snapshot_for_which_the_disk_has_no_room_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTRIB_RUN_DIR", str(tmp_path))
    snapshots = Snapshots(0)
    with contextlib.suppress(OSError), Path("/dev/full").open("wb") as full:  # where torch raises a RuntimeError
        assert not snapshots._write("snapshot.pt", lambda _: torch.save(torch.ones(1000), full))
    assert not any(snapshots.folder.iterdir())


def test_the_dead_have_no_voice_in_who_is_in_charge(make):
    """Half of the workers are lost together with a server, as with one host of two; the launcher says who is dead."""

    def begin(backend: ParameterServerStrategy) -> Callable[[], None]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prepared(backend, model, optimizer)
        return lambda: (model(batch(0, 0)).sum().backward(), optimizer.step(), model(batch(0, 0)))[1]

    cluster = make(workers=2, replicas=1)
    train, _ = cluster.each(begin)
    train()
    there, _ = cluster.servers
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.loop.call(lambda: there.hear_news(theirs))
    assert comes_true(lambda: 1 in there.parts)

    next(backend for backend in cluster.backends if backend.world.rank == 1).client.close()
    cluster.lose(1)
    waits = threading.Thread(target=train)
    waits.start()
    waits.join(3)
    assert waits.is_alive() and not there.parts[1].in_charge  # the other may be with the server that is gone
    with ours:
        for dead in (True, False, True):
            ours.send(json.dumps({"rank": 1, "dead": dead}).encode())
        waits.join(60)
    assert not waits.is_alive() and there.parts[1].in_charge


@pytest.mark.parametrize("lost", [(0,), (0, 1)])
@pytest.mark.parametrize("replicas", [0, 1])
def test_servers_that_die_before_they_have_all_first_values(make, monkeypatch, replicas, lost):
    """The workers have been told that the table is known, rank 0 is about to give its values, and others wait for them."""
    monkeypatch.setattr("distrib.training.parameter_server.failover.PARTIAL_SECONDS", 0.5)
    monkeypatch.setattr("distrib.training.parameter_server.failover.ANEW_SECONDS", 1.0)
    monkeypatch.setattr("distrib.training.parameter_server.client.SUSPEND_SECONDS", 0.3)
    cluster = make(workers=2, replicas=replicas)
    give, given, have_values = HeldTable.give, [], threading.Barrier(2)

    def interrupted(table: HeldTable, numbers: Any, *, replace: bool) -> None:
        numbers = list(numbers)
        give(table, numbers[:1], replace=replace)
        for number in lost:
            cluster.lose(number)
        for number in lost:
            cluster.start_again(number, monkeypatch)
        given.append(table)
        time.sleep(0.8)  # in which rank 0 cannot reach a server
        give(table, numbers, replace=replace)

    monkeypatch.setattr(HeldTable, "give", interrupted)

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
    monkeypatch.setattr("distrib.training.parameter_server.failover.ANEW_SECONDS", 1.0)
    cluster = make(workers=2, replicas=1)
    both = cluster.each(lambda backend: straight(backend))
    for model, optimizer in both:
        step(model, optimizer)
    for number in (0, 1):
        cluster.lose(number)
    for number in (0, 1):
        cluster.start_again(number, monkeypatch)
    for model, optimizer in both:
        step(model, optimizer)
    said = capfd.readouterr().err
    assert "takes charge of shard 0, of which no replica is left, from the parameters that workers have" in said
    assert comes_true(lambda: all(len(server.parts) == 2 for server in cluster.servers))  # with new replicas
    assert -4 <= weight(both[0][0]) <= -3  # the first worker's second step may have come to a server of before


def test_nobody_begins_anew_what_a_server_may_have_that_is_only_out_of_reach(make, monkeypatch):
    monkeypatch.setattr("distrib.training.parameter_server.failover.ANEW_SECONDS", 0.5)
    monkeypatch.setattr("distrib.training.parameter_server.server.DROP_SECONDS", 1.0)
    cluster = make(servers=3, workers=1, replicas=1)

    def begin(backend: ParameterServerStrategy) -> Callable[[], None]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        prepared(backend, model, optimizer)
        return lambda: (model(batch(0, 0)).sum().backward(), optimizer.step(), model(batch(0, 0)))[1]

    [train] = cluster.each(begin)
    train()
    left = cluster.servers[2]
    assert comes_true(lambda: 1 in left.parts)  # the replica of shard 1; that of shard 0 is on server 1
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.loop.call(lambda: left.hear_news(theirs))
    for number in (0, 1):
        cluster.lose(number)
    waits = threading.Thread(target=train)
    waits.start()
    assert comes_true(lambda: left.parts[1].in_charge)
    waits.join(3)
    assert waits.is_alive() and 0 not in left.parts
    with ours:
        for rank in (1, 2):  # after the worker, the servers
            ours.send(json.dumps({"rank": rank, "dead": True}).encode())
        waits.join(60)
    assert not waits.is_alive() and left.parts[0].in_charge


def test_a_primary_that_was_given_up_hears_of_it_from_who_is_in_charge_now(make):
    cluster = make(workers=1, replicas=1)
    [(model, optimizer)] = cluster.each(lambda backend: straight(backend))
    first, second = cluster.servers
    assert comes_true(lambda: 0 in second.parts and second.parts[0].members == {0})
    second.loop.call(lambda: second.parts[0].take_charge(5))
    first.loop.call(lambda: first._links[0]._close())
    assert comes_true(lambda: 0 not in first._links or 0 not in first.parts or not first.parts[0].in_charge)
    step(model, optimizer)
    assert second.parts[0].in_charge and weight(model) == -1


def test_a_worker_that_is_started_again_gives_gradients_and_nothing_else(make, again):
    cluster = make(workers=2)
    (first, model, optimizer), (second, _, _) = cluster.each(lambda backend: (backend, *straight(backend)))
    for _ in range(3):
        step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    step(model, optimizer)
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
        step(own, other)
    assert weight(own) == -4.5
    optimizer.param_groups[0]["lr"] = 0.25
    step(model, optimizer)
    assert weight(model) == -4.75
    step(own, other)
    assert weight(own) == -5.0
    # No part in what all workers do: neither waits for the other.
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
    assert weight(model) == 0  # and not its own
    assert first.from_main(lambda: 7) == 5
    assert comes_true(lambda: second.is_main) and not first.is_main
    assert second.from_main(lambda: 6) == 5  # it asks after the others


def test_synchronous_steps_wait_for_a_worker_that_was_started_again_once_it_has_joined(make, again):
    cluster = make(workers=2, staleness=0)

    def train(backend: ParameterServerStrategy) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = straight(backend)
        for _ in range(3):
            step(model, optimizer)
        return model, optimizer

    (model, optimizer), _ = cluster.each(train)
    cluster.backends[1 if cluster.backends[1].world.rank else 0].client.close()
    second = again(cluster, 1)
    own, other = straight(second, lr=5.0)
    assert weight(own) == -3
    step(model, optimizer)  # does not wait
    assert weight(model) == -4
    step(own, other)
    assert not comes_true(lambda: cluster.servers[0].parts[0].tables[0].shard.newest() > 5, 0.3)
    step(model, optimizer)
    assert weight(model) == weight(own) == -5  # one step, the mean of both


# -- whole jobs -------------------------------------------------------------------------------------------------------


def launched(folder: Path, lesson: list[str], *words: str) -> subprocess.Popen[str]:
    """A job of two workers that do a lesson."""
    command = [str(LAUNCH), "--no-preflight", "--run-dir", str(folder / "run"), "-np", "2", "--mode", "async", *words]
    command.append("--no-stale-rate")  # every update counts as one
    return subprocess.Popen(
        [*command, str(SCRIPT), *lesson], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def started(folder: Path, *words: str, until: str = "") -> subprocess.Popen[str]:
    """A job of two workers that count their steps; returns when both have begun."""
    job = launched(folder, ["counting", str(folder), "40", "0.05", until], *words)
    reaches(job, lambda: noted(folder).keys() == {0, 1})
    return job


def reaches(job: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait until something is true of a job, which goes on meanwhile."""
    deadline = time.monotonic() + 150
    while not what():
        if job.poll() is not None or time.monotonic() > deadline:
            job.terminate()
            pytest.fail(job.communicate(timeout=200)[0])
        time.sleep(0.05)


def noted(folder: Path) -> dict[int, int]:
    return {int(path.suffix[1:]): int(path.read_text()) for path in folder.glob("acknowledged.*")}


def processes_of(folder: Path, rank: int) -> list[int]:
    """The processes of a rank's script, found by the mark that the launcher gives them."""
    mark = f"DISTRIB_PROCESS_TAG={json.loads((folder / 'run/plan.json').read_text())['job']}.{rank}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def killed(folder: Path, rank: int) -> None:
    """Kill the script of a rank."""
    for pid in processes_of(folder, rank):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ended(folder: Path, job: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, _ = job.communicate(timeout=200)
    return json.loads((folder / "run/result.json").read_text()), out


def counts(folder: Path) -> list[tuple[float, float]]:
    """Of each worker the least and the largest number of its updates that any element holds."""
    values = torch.cat(list(torch.load(next(folder.glob("held.*.pt")), weights_only=True).values()))
    return [(values[rank::2].min().item(), values[rank::2].max().item()) for rank in (0, 1)]


def test_a_worker_dies_and_the_other_goes_on_to_the_end(tmp_path):
    job = started(tmp_path)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)  # before or soon after it would have been started again
    assert result["status"] == "succeeded" and result["first_failure"] is None, out
    assert "worker rank 0" in result["warnings"][-1]
    low, high = counts(tmp_path)[0]
    before, after = json.loads((tmp_path / "noted.1").read_text())
    assert before["0"] <= low <= high <= after["0"] + len((tmp_path / "lives.0").read_text())
    assert counts(tmp_path)[1] == (40, 40)


def test_a_worker_that_died_is_started_again_and_trains_with_the_others(tmp_path):
    job = started(tmp_path, until="enough")
    for pid in processes_of(tmp_path, 2):  # as Slurm does to all that it runs
        os.kill(pid, signal.SIGUSR1)
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] >= dead + 10)
    before = noted(tmp_path)[0]
    reaches(job, lambda: noted(tmp_path)[0] >= before + 10)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["exit_code"] == 0 and result["first_failure"] is None, out
    name = result["ranks"][1]["host"]
    assert result["warnings"] == [f"worker rank 1 on {name} died (SIGKILL) and was restarted"]
    assert (result["ranks"][1]["signal"], result["ranks"][1]["stopped_by"]) == (signal.SIGTERM, "launcher")
    first, second = json.loads((tmp_path / "noted.0").read_text())
    low, high = counts(tmp_path)[1]
    assert dead + 10 <= first["1"] <= low <= high <= second["1"] + 2  # each of its lives may have noted one less
    assert counts(tmp_path)[0] == (first["0"], first["0"])


def test_the_process_around_a_worker_is_killed_and_the_other_goes_on(tmp_path):
    """Open MPI would end all ranks because of one that left without its leave."""
    job = started(tmp_path, until="enough")
    (around,) = {psutil.Process(pid).parent() for pid in processes_of(tmp_path, 1)}
    assert around and "distrib_launch.rank_agent" in around.cmdline()
    around.kill()
    before = noted(tmp_path)[0]
    reaches(job, lambda: noted(tmp_path)[0] > before + 40)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["exit_code"] == 0, out
    assert [warning.partition(" on ")[0] for warning in result["warnings"]] == ["worker rank 1"], out


def test_the_job_fails_when_every_worker_has_failed_though_one_was_started_again(tmp_path):
    job = started(tmp_path, until="never")
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] > dead + 1)
    killed(tmp_path, 0)
    result, out = ended(tmp_path, job)
    assert (result["status"], result["exit_code"]) == ("failed", 128 + signal.SIGKILL), out
    first = result["first_failure"]
    assert (first["rank"], first["message"]) == (1, "killed by SIGKILL")
    assert len(result["warnings"]) == 1 and "was restarted" in result["warnings"][0]
    assert [rank["signal"] for rank in result["ranks"][:2]] == [signal.SIGKILL, signal.SIGTERM]


def test_another_worker_prints_and_saves_when_rank_0_dies(tmp_path):
    job = launched(tmp_path, ["telling", str(tmp_path), "enough"])
    reaches(job, lambda: all((tmp_path / f"steps.{rank}").exists() for rank in (0, 1)))
    killed(tmp_path, 0)
    reaches(job, lambda: (tmp_path / "steps.0 again").exists())
    (tmp_path / "saved.pt").unlink()
    reaches(job, (tmp_path / "saved.pt").exists)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert result["warnings"][0].endswith("died (SIGKILL) and was restarted; the next worker prints and saves now")
    assert torch.load(tmp_path / "saved.pt", weights_only=True)["values"]["who"] == "1"
    assert "told by 0" in out and "told by 1" in out and "by 0 again" not in out
    assert out.count("the end by 1") == 1 and "the end by 0" not in out
    said = [json.loads(line)["metrics"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    tellers = [told["who"] for told in said if "who" in told]
    assert tellers == sorted(tellers) and set(tellers) == {"0", "1"}


def test_a_job_can_be_stopped_while_a_worker_waits_to_be_started_again(tmp_path):
    job = started(tmp_path, until="never")
    killed(tmp_path, 1)
    time.sleep(0.7)
    job.send_signal(signal.SIGINT)
    result, out = ended(tmp_path, job)
    assert (result["status"], result["exit_code"], result["warnings"]) == ("stopped", 130, []), out
    assert result["ranks"][1]["signal"] == signal.SIGKILL and (tmp_path / "lives.1").read_text() == "."


def test_a_bug_of_all_workers_does_not_run_twice(tmp_path):
    result, out = ended(tmp_path, launched(tmp_path, ["failing"]))
    assert result["status"] == "failed" and result["exit_code"] == 1, out
    assert result["first_failure"]["message"] == "ValueError: a bug" and result["warnings"] == []
    for rank in (0, 1):
        assert (tmp_path / f"run/ranks/{rank}.err").read_text().count("ValueError: a bug") == 1
        assert result["ranks"][rank]["exit_code"] == 1


def test_a_server_dies_and_its_replica_has_every_update(tmp_path):
    job = started(tmp_path, "--servers", "2", "--replicas", "1")
    killed(tmp_path, 2)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "takes charge of shard 0" in out
    assert counts(tmp_path) == [(40, 40), (40, 40)]


def test_all_servers_die_at_once_with_their_replicas(tmp_path):
    job = started(tmp_path, "--servers", "2", "--replicas", "1")
    for rank in (2, 3):
        killed(tmp_path, rank)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "of which no replica is left" in out
    for low, high in counts(tmp_path):  # what was applied and had not come back is lost
        assert 20 < low <= high <= 40


def test_a_server_without_replica_is_started_again(tmp_path):
    job = started(tmp_path, "--servers", "2")
    killed(tmp_path, 3)
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded", out
    assert "was restarted" in result["warnings"][-1] and "its shard comes from" in out
    for low, high in counts(tmp_path):
        assert 30 < low <= high == 40


def test_what_main_has_read_is_there_for_a_worker_that_is_started_again_after_its_server_was(tmp_path):
    job = started(tmp_path, "--servers", "1", until="enough")
    reaches(job, lambda: any((tmp_path / "run").glob("server-*/kept-*[0-9]")))
    killed(tmp_path, 2)
    before = noted(tmp_path)
    reaches(job, lambda: all(noted(tmp_path)[rank] > before[rank] + 10 for rank in (0, 1)))
    killed(tmp_path, 1)
    dead = noted(tmp_path)[1]
    reaches(job, lambda: noted(tmp_path)[1] >= dead + 10)
    (tmp_path / "enough").touch()
    result, out = ended(tmp_path, job)
    assert result["status"] == "succeeded" and result["restarts"] == 2, out
    assert not any((tmp_path / "run").glob("server-*"))


@pytest.mark.parametrize("words", [("-np", "1"), ("-np", "2", "--staleness", "0")])
def test_only_the_gradients_of_the_step_count(tmp_path, words):
    command = [LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", *words, "--mode", "async", SCRIPT, "left_out"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["failed", "well"])
def test_nobody_waits_long_for_a_rank_that_ended_before_it_began(tmp_path, how):
    command = [LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", "-np", "2", "--mode", "async", SCRIPT]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "one_leaves_at_once", how],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("worker rank 0 on localhost" in done.stderr) == (how == "failed")
    assert time.monotonic() - begun < 60  # servers by themselves would wait for half an hour


def test_the_log_is_that_of_the_rank_which_is_main_for_the_others(tmp_path):
    """Servers may choose another before the launcher has given rank 0 up."""
    script = tmp_path / "log.py"
    script.write_text(
        "import distrib\njob = distrib.init()\n"
        "job._status.metrics({'rank': job.rank}, is_main=job.rank == 1)\njob.log(of=job.rank)\n"
    )
    command = [LAUNCH, "--no-preflight", "--run-dir", tmp_path / "run", "-np", "2", script]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line)["metrics"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sorted(map(str, said)) == ["{'of': 0}", "{'rank': 1}"]


SPLIT = """
import torch, distrib
from torch.utils.data import DataLoader, TensorDataset, random_split
job = distrib.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine, alike = (torch.Generator().manual_seed(seed) for seed in (job.rank, 0))
data = TensorDataset(torch.arange(20.0)[:, None])
loaders = [DataLoader(random_split(data, [16, 4], generator)[0], 2) for generator in (mine, alike)]
model, optimizer, *loaders = job.prepare(model, optimizer, *loaders)
for loader in loaders:
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
"""


def test_a_worker_with_other_samples_than_main_says_so(launch, tmp_path):
    (tmp_path / "split.py").write_text(SPLIT)
    run = launch("-np", "2", "--mode", "async", tmp_path / "split.py")
    assert run.code == 0, run
    told = [line for line in run.err.splitlines() if "has other samples" in line]
    assert len(told) == 1 and told[0].startswith("[1@localhost] distrib: warning: rank 1 has other samples"), run
