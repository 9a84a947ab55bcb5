"""Gradients of batches with different weights on two ranks, compared with one process that has the whole batch."""

from __future__ import annotations

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

import distrib


def model_and_optimizer(job: distrib.Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(1, 5)
    prepared: tuple[nn.Module, torch.optim.Optimizer] = job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return prepared


class Mean(nn.Module):
    """Mean of the inputs times one weight, whose gradient is the mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).mean()


def batches_of_arrays(job: distrib.Job) -> None:
    """Batches of a sampler that yields arrays, tensors or ranges count by their length."""
    for kind in (numpy.array, torch.tensor, list, lambda part: range(part[0], part[-1] + 1)):
        module = Mean()
        sampler = [kind(part) for part in ([0, 1], [2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15])]
        data = torch.arange(16.0)
        model, optimizer, loader = job.prepare(
            module,
            torch.optim.SGD(module.parameters(), 0.1),
            DataLoader(data, batch_sampler=sampler),  # type: ignore[arg-type]
        )
        found = []
        for batch in loader:
            optimizer.zero_grad()
            model(batch).backward()
            found.append(float(module.weight.grad))  # type: ignore[arg-type]
            optimizer.step()
        assert found == [3.5, 11.5], (kind, found)
        job.release(model, optimizer)


def tokens(job: distrib.Job) -> None:
    """With `job.weigh`, a mean over tokens has the gradient of one process with all tokens, also while accumulating."""
    targets = [torch.tensor([0, 1, -100, -100]), torch.tensor([2, 3, 4, -100])]
    inputs = [torch.arange(4.0).view(4, 1), torch.arange(4.0, 8.0).view(4, 1)]
    torch.manual_seed(1)
    alone = nn.Linear(1, 5)
    loss = nn.functional.cross_entropy(alone(torch.cat(inputs)), torch.cat(targets), ignore_index=-100)
    loss.backward()
    for batches in (1, 2):
        model, optimizer = model_and_optimizer(job)
        job.accumulate(batches)
        for batch in range(batches):
            place = job.rank if batches == 1 else batch  # with accumulation, both ranks read the same two batches
            job.weigh((targets[place] != -100).sum())
            nn.functional.cross_entropy(model(inputs[place]), targets[place], ignore_index=-100).backward()
            if batch == batches - 1:
                for own, other in zip(job.unwrap(model).parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(own.grad, other.grad)
            optimizer.step()
        job.accumulate(1)
        job.release(model, optimizer)
    for amount in (-1, float("nan"), 0):
        try:
            job.weigh(amount)
        except distrib.TrainingError:
            continue
        raise AssertionError(amount)


def noise_between_rounds(job: distrib.Job) -> None:
    """Mode local: parameters that ranks changed themselves are identical after the next round and after `settle`."""

    def spread() -> float:
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        return float((job.all_reduce(values, "max") - job.all_reduce(values, "min")).max())

    def add_noise() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))

    model, optimizer = model_and_optimizer(job)
    torch.manual_seed(job.rank)
    for step in range(1, 9):
        optimizer.zero_grad()
        model(torch.randn(4, 1)).sum().backward()
        optimizer.step()
        if step == 4:
            assert spread() == 0
            add_noise()
            assert spread() > 0
    assert spread() == 0
    add_noise()
    job.settle()
    assert spread() == 0


def unusual_types(job: distrib.Job) -> None:
    """Buffers and frozen parameters of types that Gloo does not carry get rank 0's values."""
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.uint32):
        model = nn.Linear(2, 1)
        model.register_buffer("scale", torch.full((3,), 1 + job.rank).to(dtype))
        model.frozen = nn.Parameter(torch.full((3,), 1 + job.rank).to(dtype), requires_grad=False)
        prepared, optimizer = job.prepare(model, torch.optim.SGD([model.weight, model.bias], 0.1))
        prepared(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        assert model.scale.float().tolist() == model.frozen.float().tolist() == [1, 1, 1], dtype
        job.release(prepared, optimizer)


if __name__ == "__main__":
    import sys

    with distrib.init() as job:
        for name in sys.argv[1].split(","):
            globals()[name](job)
            job.print(name)
