"""Checkpoints, copies and optimizer state of models whose parameters are on servers."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.strategies.parameter_server import ParameterServerStrategy
from tests.support import parameter_server_cluster
from tests.support.parameter_server_cluster import ADAFACTOR, batch, prepared, straight, take_step, weight

make = parameter_server_cluster.make


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
        take_step(first, optimizer)
    take_step(second, other)
    second.load_state_dict({"weight": torch.full((1, 4), 5.0)})
    optimizer.load_state_dict(optimizer.state_dict())
    second(torch.ones(1, 4))  # an earlier reply must not overwrite the loaded values
    assert (second.weight == 5).all() and (weight(first), weight(second)) == (-3, 5)
    second.load_state_dict({}, strict=False)
    assert weight(second) == 5


def test_nobody_trains_on_before_main_has_restored(make):
    gate = threading.Event()

    def restore(backend: ParameterServerStrategy) -> list[float]:
        model, optimizer = straight(backend)
        take_step(model, optimizer)
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
    take_step(model, optimizer)
    assert weight(model) == -1 and weight(copy.deepcopy(model).eval()) == -1
    assert average.eval()(torch.ones(1, 4)) == 12
    take_step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)  # includes all steps, though the model waits for its next forward
    assert b"distrib" not in file.getvalue()
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    take_step(model, optimizer)
    assert weight(model) == -3 and weight(saved) == -2 and saved(torch.ones(1, 4)) == -8


def test_what_the_script_changes_by_itself_is_refused(make):
    backend = make().worker(0)
    model = nn.Linear(4, 1)
    backend.prepare_model(model, find_unused_parameters=False)
    model(torch.ones(1, 4)).sum().backward()
    backend.synchronize()  # no update yet: the script may only have wanted gradients
    with torch.no_grad():
        model.bias -= 0.1 * model.bias.grad
    with pytest.raises(TrainingError, match="bias was trained"):
        backend.synchronize()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, ADAFACTOR])
def test_the_state_of_an_optimizer_is_as_it_was_when_it_is_given_back(make, kind):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = (
                nn.Parameter(torch.tensor(1.0)),
                nn.Linear(6, 300),
            )  # one chunk; the first parameter has no dimension

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
    state["state"] = {number: state["state"][number] for number in (0, 1)}  # as if the other parameters were frozen
    prepared(backend, model, optimizer)
    optimizer.load_state_dict(state)
    held = cluster.servers[0].services[0].tables[0].optimizers[0]
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
    take_step(model, optimizer)
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.ones(2, 4)
    with pytest.raises(TrainingError, match=r"momentum_buffer of weight .*\[2, 4\].*\[1, 4\]"):
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
    with pytest.raises(TrainingError, match=r"of weight .*\[50, \d\].*\[60, 6\]"):
        optimizer.load_state_dict(other.state_dict())
