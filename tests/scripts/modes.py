"""What every way of training together must keep to, each a lesson: `modes.py NAME...`, in the strategy of the environment."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib
from distrib.errors import TrainingError
from distrib.strategy import from_environment

STRATEGY = from_environment(os.environ)


def gathered(thing: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def make_model() -> nn.Module:
    torch.manual_seed(1)
    middle = nn.Identity() if STRATEGY.balance else nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(6, 16), middle, nn.Tanh(), nn.Linear(16, 3))


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_alike(model: nn.Module) -> None:
    """The model is the same on all ranks, with its buffers."""
    first, *others = gathered({name: value.clone() for name, value in model.state_dict().items()})
    for other in others:
        for name, value in first.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)


def exact(job: distrib.Job) -> None:
    """Two epochs with uneven last batches are those of one process with the whole batch, clipped and normalized alike."""
    model, reference = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(47 * job.world_size + 7), 4, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader, sync_batchnorm=not STRATEGY.balance)
    inner = job.unwrap(model)
    slow = job.rank == 1 and STRATEGY.balance
    group: list[Any] = []
    sizes: list[int] = []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    steps = 0
    for _ in range(2):
        model.train()
        for inputs, targets in loader:
            if slow:
                time.sleep(0.004 * len(inputs))
            sizes.append(len(inputs))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = parameters_of(inner)
            optimizer.step()
            schedule.step()
            steps += bool((parameters_of(inner) != before).any())

            parts = gathered((inputs, targets))
            group.append([torch.cat(part) for part in zip(*parts, strict=True)])
            if len(group) == STRATEGY.accumulate:
                # Normalization takes each batch by itself; the mean is over the samples of all.
                samples = sum(len(ys) for _, ys in group)
                reference_optimizer.zero_grad()
                for xs, ys in group:
                    (nn.functional.cross_entropy(reference(xs), ys, reduction="sum") / samples).backward()
                nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                reference_optimizer.step()
                group.clear()
    assert steps == len(sizes) // STRATEGY.accumulate
    torch.testing.assert_close(parameters_of(inner), parameters_of(reference), rtol=0, atol=1e-5)
    if not group and not STRATEGY.balance:
        torch.testing.assert_close(inner[1].running_var, reference[1].running_var, rtol=1e-4, atol=1e-5)  # type: ignore[index]
    assert_alike(inner)
    if STRATEGY.balance:
        last = gathered(sizes[-3])
        assert last[1] < min(last[:1] + last[2:]), f"the slow rank's batches should have become smaller: {last}"


def wrapped(job: distrib.Job) -> None:
    """no_sync leaves gradients alone; rank 0 evaluates by itself; what is saved has the names of before."""
    plain = make_model()
    plain.middle = torch.compile(nn.Linear(2, 2), backend="eager")  # type: ignore[assignment]
    names = [name.replace("_orig_mod.", "") for name in plain.state_dict()]
    plain.forward = lambda x: plain[3](plain[2](plain[1](plain[0](x)))) + plain.middle(x[:, :2]).sum()  # type: ignore[assignment,index]
    model = job.prepare(plain)
    optimizer = job.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(job.rank))
    with model.no_sync():
        model(inputs).square().mean().backward()
    local = plain[0].weight.grad.clone()  # type: ignore[index,union-attr]
    assert not torch.equal(*gathered(local)[:2])
    model(inputs).square().mean().backward()
    if STRATEGY.mode == "sync":
        mean = sum(gathered(local)) / job.world_size
        torch.testing.assert_close(plain[0].weight.grad, 2 * mean)  # type: ignore[index,union-attr]
    optimizer.step()
    optimizer.zero_grad()
    copied = copy.deepcopy(plain)
    with copied.no_sync() if hasattr(copied, "no_sync") else model.no_sync():
        pass
    if job.is_main:  # the buffers would be waited for
        model.eval()
        with torch.no_grad():
            model(inputs)
        model.train()
    job.settle()
    assert_alike(plain)
    path = Path(sys.argv[1]) / f"{job.rank}.pt"
    job.save(path, model=model, optimizer=optimizer)
    job.barrier()
    if job.is_main:
        assert list(torch.load(path, weights_only=True)["states"]["model"]) == names
    with torch.no_grad():
        plain[0].weight.zero_()  # type: ignore[index,operator]
    job.restore(path, model=model, optimizer=optimizer)
    assert plain[0].weight.abs().sum() > 0  # type: ignore[index,operator]


def several(job: distrib.Job) -> None:
    """Two models with an optimizer each, one of which has a parameter without gradient: both stay in step."""
    first, second = make_model(), make_model()
    frozen = second[3].weight.requires_grad_(False)  # type: ignore[index,union-attr,operator]
    one = torch.optim.AdamW(first.parameters(), 1e-2)
    two = torch.optim.SGD(second.parameters(), 0.1)
    first, second, one, two, loader = job.prepare(first, second, one, two, DataLoader(make_data(60), 5, shuffle=True))
    before = parameters_of(second)
    kept = frozen.detach().clone()
    for inputs, targets in loader:
        for model, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    for model in (first, second):
        assert_alike(job.unwrap(model))
    assert torch.equal(frozen, kept) and not torch.equal(before, parameters_of(second))


def scaled(job: distrib.Job) -> None:
    """With a GradScaler, a batch whose gradient is infinite on one rank costs one step, and no rank gets out of step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, DataLoader(make_data(32 * job.world_size), 4))
    scaler = job.prepare(torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5))
    scales = []
    for batch, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if batch == 2 and job.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert_alike(job.unwrap(model))
    assert torch.isfinite(parameters_of(model)).all()
    if STRATEGY.mode == "sync":
        assert 128.0 in scales and len(set(scales)) <= 3
    elif job.rank != 1:
        assert min(scales) == 256.0


def raises(words: str, work: Callable[[], object]) -> None:
    with pytest.raises(TrainingError, match=words):
        work()


def mistakes(job: distrib.Job) -> None:
    """Each is named, on every rank, and none waits for ever."""
    for other, words in (
        (
            nn.Linear(2, 3),
            r"rank 1 prepares something else than rank 0: in a Linear, parameter or buffer weight \[3, 2\]",
        ),
        (nn.Sequential(nn.Linear(2, 2)), "rank 1 prepares something else than rank 0: a Sequential, not a Linear"),
        (nn.Linear(2, 2, bias=False), "a Linear lacks the parameter or buffer bias"),
    ):
        raises(words, lambda other=other: job.prepare(other if job.rank == 1 else nn.Linear(2, 2)))
    raises("a Linear, not a Linear, a SGD", lambda: job.prepare(*things(job.rank == 1)))
    job.prepare(nn.ReLU())

    left, right = nn.Linear(2, 2), nn.Linear(2, 2)
    job.prepare(left)
    foreign = job.prepare(torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1))
    raises(r"parameter 2 of group 0 of the SGD, \[2, 2\], is of no prepared model", foreign.step)


def things(short: bool) -> Iterator[Any]:
    model = nn.Linear(2, 2)
    yield model
    if not short:
        yield torch.optim.SGD(model.parameters(), lr=0.1)


def unused(job: distrib.Job) -> None:
    """What got no gradient is named before the other ranks wait for it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner = job.unwrap(model)
    inner.forward = lambda x: inner[0](x)  # type: ignore[index,assignment]
    model(torch.ones(2, 6)).sum().backward()
    raises(f"rank {job.rank}: 1.weight, 1.bias got no gradient", optimizer.step)


def nan(job: distrib.Job) -> None:
    """A gradient that is no number is named, or left out everywhere."""
    for on_nan in ("skip", "raise"):
        model = make_model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), on_nan=on_nan)
        for step in range(1, 4):
            optimizer.zero_grad()
            inputs = torch.ones(4, 6)
            if step == 2 and job.rank == 1:
                inputs[0, 0] = float("nan")
            model(inputs + torch.randn(4, 6)).sum().backward()
            if on_nan == "raise" and step == 2 and (STRATEGY.mode == "sync" or job.rank == 1):
                raises(
                    r"step 2: the gradient of 0.weight \(and of \d+ more\) is nan or infinite on rank 1;",
                    optimizer.step,
                )
                break
            optimizer.step()
        assert torch.isfinite(parameters_of(model)).all()
    optimizer.zero_grad()
    job.barrier()


def outer(job: distrib.Job) -> None:
    """The outer step is torch's SGD with Nesterov momentum on the mean way, and goes on from a checkpoint."""
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = job.prepare(model, optimizer)
    common = nn.Linear(5, 3)
    common.load_state_dict(model.state_dict())
    nesterov = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(job.rank)
    path = Path(sys.argv[1]) / "outer.pt"
    for round_ in range(3):
        alone = copy.deepcopy(model)
        alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
        for _ in range(STRATEGY.inner_steps or 0):
            inputs = torch.randn(4, 5, generator=generator)
            for one, other in ((model, optimizer), (alone, alone_optimizer)):
                other.zero_grad()
                one(inputs).square().mean().backward()
                other.step()
        ways = gathered(
            [old.detach() - new.detach() for old, new in zip(common.parameters(), alone.parameters(), strict=True)]
        )
        for parameter, *way in zip(common.parameters(), *ways, strict=True):
            parameter.grad = sum(way) / job.world_size  # type: ignore[assignment]
        nesterov.step()
        torch.testing.assert_close(parameters_of(model), parameters_of(common), rtol=0, atol=1e-6)
        if round_ == 1:
            job.save(path, model=model, optimizer=optimizer)
            job.barrier()
            job.restore(path, model=model, optimizer=optimizer)


def streamed(job: distrib.Job) -> None:
    """In fragments and overlapped, the ranks learn, differ in between, and are the same after an epoch."""
    torch.manual_seed(job.rank)
    data = make_data(400)
    target = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    model, optimizer, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), 0.05), DataLoader(data, 5, shuffle=True)
    )
    losses, differed = [], False
    for _ in range(6):
        total = 0.0
        for batch, (inputs, _) in enumerate(loader):
            optimizer.zero_grad()
            loss = (model(inputs) - inputs @ target).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
            if batch == 4:
                first, second, *_ = gathered(parameters_of(model))
                differed |= not torch.equal(first, second)
        losses.append(job.all_reduce(total))
        assert_alike(model)
    assert differed and losses[-1] < 0.1 * losses[0], losses


if __name__ == "__main__":
    lessons = [globals()[name] for name in sys.argv[2:]]
    with distrib.init() as job:
        for lesson in lessons:
            lesson(job)
            job.print(f"{lesson.__name__}: learnt")
