"""Training against parameter servers over local sockets: updates, reductions and refused inputs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distrib.errors import TrainingError
from distrib.strategy import Gradients, Strategy
from distrib.training.checkpoint import checkpoint_format
from distrib.training.grad_scaler import ScalerSteps
from distrib.training.gradient_accumulation import BatchSamples
from distrib.training.optimizer_step import OptimizerStepper
from distrib.training.parameter_server import transport as wire
from distrib.training.parameter_server.parameter_changes import PushedGradients
from distrib.training.parameter_server.partitioning import ParameterSpec
from distrib.training.parameter_server.server_link import ServerLink
from distrib.training.parameter_server.server_optimizer import OptimizerSpec, group_options, with_own_momentum
from distrib.training.parameter_server.server_table import BufferPool, ServerTable, TableDescription
from distrib.training.parameter_server.transport import Frame, FrameKind
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from tests.support import parameter_server_cluster
from tests.support.parameter_server_cluster import (
    OPTIMIZERS,
    batch,
    comes_true,
    network,
    prepared,
    straight,
    suspend,
    take_step,
    weight,
)

make = parameter_server_cluster.make
again = parameter_server_cluster.again


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_staleness_zero_is_synchronous_sgd(make, name):
    def train(backend: ParameterServerStrategy) -> tuple[nn.Module, dict[str, Any]]:
        model = network(backend.world.rank)  # rank 0's values count
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
            if step != 3:  # skips a step
                opt.step()
    for mine, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("path", ["memory", "network", "broken network"])
def test_gradients_that_are_scaled_and_clipped_are_pushed_once_in_backward(make, monkeypatch, path):
    if path != "memory":
        monkeypatch.setattr(ServerLink, "offer_memory", lambda *_: None)
    backend = make().worker(0)
    model, alone = network(), network()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    prepared(backend, model, optimizer)
    push, finals = backend.client.push, []
    monkeypatch.setattr(
        backend.client, "push", lambda *a, final, **more: (finals.append(final), push(*a, final=final, **more))
    )
    if path == "broken network":
        send_commit = backend.client.send_commit

        def send_and_disconnect(*arguments):
            send_commit(*arguments)
            backend.client.links[1].disconnect()  # before the frame leaves

        monkeypatch.setattr(backend.client, "send_commit", send_and_disconnect)
    for step in range(8):
        for net, opt in ((model, optimizer), (alone, own)):
            opt.zero_grad()
            (1024 * net(batch(step, 0)).square().sum()).backward()
            for parameter in net.parameters():
                parameter.grad.div_(1024)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if path == "broken network" and net is model and step % 2:
                backend.client.loop.call_soon(backend.client.links[0].disconnect)
            opt.step()
    for mine, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert finals and not any(finals)


def test_gradients_that_are_clamped_are_pushed_again_after_backward(make, monkeypatch):
    backend = make().worker(0)
    model, alone = network(), network()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(alone.parameters(), 0.1)
    prepared(backend, model, optimizer)
    for step in range(3):
        for net, opt in ((model, optimizer), (alone, own)):
            opt.zero_grad()
            net(batch(step, 0)).square().sum().backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.5)
            opt.step()
    for mine, theirs in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@given(factor=st.floats(1e-6, 1e6), seed=st.integers(0, 1000))
def test_the_common_factor_of_gradients(factor, seed):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 7, 500)]
    pushed = PushedGradients()
    assert pushed.common_factor() is None
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    pushed.record(parameters)
    for parameter in parameters:
        parameter.grad.mul_(factor)
    assert pushed.common_factor() == pytest.approx(factor, rel=1e-5)
    parameters[seed % 3].grad[0] += 0.1 * factor
    assert pushed.common_factor() is None


@pytest.mark.parametrize("written", range(4))
def test_gradients_of_several_types_that_have_not_changed_since_their_push(written):
    parameters = [nn.Parameter(torch.zeros(5, dtype=getattr(torch, kind)))
                  for kind in ("float32", "bfloat16", "float64", "float32")]  # fmt: skip
    pushed = PushedGradients()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    pushed.record(parameters[:3])
    pushed.record(parameters[1:])
    assert pushed.unchanged() == {*map(id, parameters)}
    parameters[written].grad.data[2] = 4.0
    assert pushed.unchanged() == {id(p) for n, p in enumerate(parameters) if n != written}


@pytest.mark.parametrize("transfer_format", ["fp32", "bf16"])
def test_a_value_does_not_change_while_it_is_sent(monkeypatch, tmp_path, transfer_format):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the first optimizer would set it
    (group,) = torch.optim.SGD([torch.zeros(1)], 1.0).param_groups
    description = TableDescription(
        OptimizerSpec("SGD"), (ParameterSpec("weight", (1000,)),), (group_options(group),), 1, transfer_format
    )
    table = ServerTable(0, description, 0, {0, 1}, Strategy(mode="async"), BufferPool())
    table.set_value(0, bytearray(4000), replace=True)
    for step in range(3):
        (first, first_is_sent), (second, second_is_sent) = table.publish(0, 0), table.publish(0, 1)
        before = bytes(first)
        table.apply(0, torch.ones(1000), group_options(group))
        assert (bytes(first), bytes(second)) == (before, before)
        assert set(table.value(0).tolist()) == {-1.0 - 2 * step}
        first_is_sent()
        second_is_sent()
        newer, _ = table.publish(0, 0)
        assert bytes(newer) != before
        table.apply(0, torch.ones(1000), group_options(group))


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
    take_step(model, optimizer)
    optimizer.state_dict()  # waits until the server has the push
    updater = cluster.servers[0].services[0].tables[0].optimizers[0]
    for worker, number in ((0, 1.0), (1, -2.0)):
        updater.apply(torch.full((4,), number), with_own_momentum(OptimizerSpec("SGD"), dict(updater.options), worker))
    saved = optimizer.state_dict()["state"][0]["momentum_buffer"]
    one, other = updater.full_state()["momenta"].values()
    assert not torch.equal(one, other) and torch.allclose(saved.flatten(), (one + other) / 2)


def test_all_who_ask_for_a_value_get_one_copy_of_it(make):
    """Hundreds of ranks may begin an evaluation at once; their replies queue for the network."""
    cluster = make(servers=1)
    model, optimizer = straight(cluster.worker(0))
    take_step(model, optimizer)
    weight(model)  # waits until the server has the push
    table = cluster.servers[0].services[0].tables[0]
    copies = [table.snapshot(0) for _ in range(3)]
    before = bytes(copies[0])
    assert len({id(copy.obj) for copy in copies}) == 1
    take_step(model, optimizer)
    weight(model)
    assert bytes(copies[0]) == before != bytes(table.snapshot(0))
    del copies
    deadline = time.monotonic() + 10
    while table.snapshot_cache[0][1]() is not None:  # the server's thread releases its sent buffers
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
            take_step(model, optimizer)
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
    assert torch.equal(cluster.servers[0].services[0].tables[0].value(0), other.weight[0])
    take_step(model, optimizer)
    checkpoint_format.write(tmp_path / "mine.pt", {"model": model})
    saved = torch.load(tmp_path / "mine.pt", weights_only=True)["states"]["model"]
    assert torch.equal(saved["weight"], other.weight - 1)


def test_the_next_optimizer_is_made_though_all_have_lost_another_server_meanwhile(make):
    cluster, together = make(servers=1, workers=2), threading.Barrier(2, timeout=20)

    def work(backend: ParameterServerStrategy) -> bool:
        straight(backend)
        suspend(backend, cluster)
        together.wait()
        model, optimizer = straight(backend)
        take_step(model, optimizer)
        backend.synchronize()
        return weight(model) < 0

    assert cluster.each(work) == [True, True]


def test_gradients_on_their_way_do_not_come_after_the_end_of_their_optimizer(make, monkeypatch):
    monkeypatch.setattr(ServerLink, "offer_memory", lambda self, table: None)
    held_until, own = [0.0], wire.Connection.start_next_outgoing

    def slow(self: wire.Connection) -> bool:
        is_push = self._queue and self._queue[0][2].frame.kind is FrameKind.PUSH
        return False if is_push and time.monotonic() < held_until[0] else own(self)

    monkeypatch.setattr(wire.Connection, "start_next_outgoing", slow)

    def work(backend: ParameterServerStrategy) -> float:
        model, optimizer = straight(backend)
        take_step(model, optimizer)
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
    with pytest.raises(TrainingError, match="cannot handle a request"):
        other.client.result(other.client.request(0, Frame(FrameKind.SET_STATE, table=0), b"no tensors"))
    take_step(model, optimizer)
    backend.synchronize()
    assert weight(model) == -1
    time.sleep(1)
    assert capfd.readouterr().err.count("invalid request") == 1  # the client does not repeat the request


def test_what_main_reads_for_all_travels_in_pieces(make, again):
    cluster = make(workers=2, replicas=1)
    large = bytes(range(250)) * 4

    def read(backend: ParameterServerStrategy) -> bytes:
        backend.collectives.piece_bytes = 100
        straight(backend)
        return backend.from_main(lambda: large)

    assert cluster.each(read) == [large] * 2
    first = next(backend for backend in cluster.backends if backend.world.rank == 0)
    assert first.collectives.store(1, b"another's") is False  # a new main rank queries the stored values
    cluster.backends[0].client.close()
    substitute = again(cluster, cluster.backends[0].world.rank)
    straight(substitute)
    assert substitute.from_main(lambda: b"") == large
    own, copies = cluster.servers[0].services[0].results.pieces, cluster.servers[1].services
    assert len(own[1]) > 10 and comes_true(lambda: 0 in copies and copies[0].results.pieces == own)


def test_what_no_frame_can_carry_is_refused(make, monkeypatch):
    cluster = make(workers=2)

    def refused(backend: ParameterServerStrategy) -> float:
        straight(backend)
        for elements in (10_000, 1800):  # below the limit on its own
            with pytest.raises(TrainingError, match="too large"):
                backend.reduce(torch.zeros(elements), "sum")
        with pytest.raises(TrainingError, match="too large"):
            backend.client.request(0, Frame(FrameKind.SET_VALUE), bytes(10_001))
        return backend.reduce(torch.ones(100), "sum").sum().item()

    monkeypatch.setattr("distrib.training.parameter_server.transport.MAX_PAYLOAD_BYTES", 10_000)
    assert cluster.each(refused) == [200.0] * 2
    with pytest.raises(TrainingError, match="too large"):  # raised by the server
        monkeypatch.setattr("distrib.training.parameter_server.transport.MAX_PAYLOAD_BYTES", 1000)
        client = cluster.backends[0].client
        client.result(client.request(0, Frame(FrameKind.GET_STATE)))


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
        for _ in range(3):  # as a script that prepares its model again for each stage
            backend.prepare_model(model, find_unused_parameters=False)
        return model[0].order.tolist(), len(model[0]._forward_pre_hooks) == 1 == len(backend.models.models)

    assert cluster.each(begin) == [([0, 1, 2, 3], True)] * 2
    kept = cluster.servers[0].services[0].results.pieces.values()
    assert sum(len(piece) for pieces in kept for piece in pieces) < 50_000  # 360 kB of data, three times


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
    with pytest.raises(TrainingError, match=r"0\.weight has a gradient"):
        train(unfrozen, optimizer)
    optimizer = torch.optim.SGD(added[1].parameters(), 0.1)
    prepared(backend, added, optimizer)
    optimizer.add_param_group({"params": list(added[0].parameters())})
    with pytest.raises(TrainingError, match=r"0\.weight has a gradient"):
        train(added, optimizer)
    optimizer = torch.optim.AdamW(frozen.parameters(), 0.1)
    prepared(backend, frozen, optimizer)
    frozen[0].requires_grad_(False)
    with pytest.raises(TrainingError, match=r"0\.weight was frozen"):
        train(frozen, optimizer)


class Rate(float):
    pass


@pytest.mark.parametrize("rate", [np.float64(0.5), np.float32(0.5), Rate(0.5), torch.tensor(0.5)])
def test_settings_may_be_any_numbers(make, rate):
    backend = make().worker(0)
    model, optimizer = straight(backend, lr=rate)
    take_step(model, optimizer)
    optimizer.param_groups[0]["lr"] = rate / 2
    take_step(model, optimizer)
    assert weight(model) == -0.75


def stepping(
    backend: ParameterServerStrategy, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any
) -> OptimizerStepper:
    prepared(backend, model, optimizer)
    batch = BatchSamples(own=1, all=backend.world.size)
    steps = OptimizerStepper(optimizer, backend, batch, [], **{"on_nan": "raise", **options})
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
        ScalerSteps(scaler, [steps])
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
        own, copies = cluster.servers[0].services[0].tables[0], cluster.servers[1].services
        assert comes_true(lambda: 0 in copies and 0 in copies[0].tables)
        assert comes_true(lambda: copies[0].tables[0].controller.index == own.controller.index == 3)
        assert comes_true(lambda: 0 in copies[0].tables[0].optimizers)
        assert torch.equal(own.value(0), copies[0].tables[0].value(0))


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda p: Own(p, 0.1), "Own is not supported"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS is not supported"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam is not supported"),
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

    with pytest.raises(TrainingError, match=r"worker rank \d .* weight is float32 \[[45], 3\]"):
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
            while sock.recv(4096):  # reads the greeting, then disconnects
                pass
    assert cluster.servers[0].services[0].tables == {}
