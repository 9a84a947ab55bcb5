"""Run lessons on unusual but valid scripts on all ranks: `habits.py NAME...`."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import os
import queue
import re
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import distrib
from devices import seeded
from distrib.errors import TrainingError
from distrib.strategy import strategy_from_environment
from distrib.training.data import load_balancing

STRATEGY = strategy_from_environment(os.environ)


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    try:
        yield
    except TrainingError as error:
        assert re.search(words, str(error)), error
    else:
        raise AssertionError(f"nobody said {words}")


def made(job: distrib.Job, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """Prepare the model, identical on all ranks, with an optimizer. Afterwards each rank has its own random seed."""
    prepared = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), **options)
    torch.manual_seed(1 + job.rank)
    return prepared[0], prepared[1]


def assert_alike(job: distrib.Job, model: Any) -> None:
    for name, value in job.unwrap(model).named_parameters():
        spread = job.all_reduce(value, "max") - job.all_reduce(value, "min")
        assert isinstance(spread, torch.Tensor) and not spread.any(), (name, spread)


class Heads(nn.Module):
    """A body with two heads, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.never = nn.Linear(4, 4), nn.Linear(2, 2)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, inputs: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.body(inputs))  # type: ignore[no-any-return]

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(self(inputs, head).square().mean() for head in (0, 1))  # type: ignore[return-value]

    def policy(self, inputs: torch.Tensor) -> Independent:
        return Independent(Normal(self.heads[0](self.body(inputs)), 1.0), 1)


def methods(job: distrib.Job) -> None:
    """Train by a method, and evaluate with `model(...)` on all ranks or only on the first."""
    for all_ranks in (True, False):
        model, optimizer = made(job, Heads(), find_unused_parameters=True, methods=["loss"])
        for step in range(6):
            if step in (0, 3) and (all_ranks or job.is_main):
                with torch.no_grad():
                    model(torch.randn(2, 4))
            optimizer.zero_grad()
            model.loss(torch.randn(8, 4)).backward()
            optimizer.step()
        assert_alike(job, model)


class Remembers(nn.Module):
    """Replaces its own buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * inputs.detach().mean(0)
        return self.linear(inputs - self.mean)  # type: ignore[no-any-return]


def inferred_buffers(job: distrib.Job) -> None:
    """Continue training after an evaluation in inference mode, whose buffers are read-only."""
    model, optimizer = made(job, Remembers())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if step == 1:
            with torch.inference_mode():
                model(torch.randn(8, 4))
    job.settle()
    assert_alike(job, model)
    spread = job.all_reduce(job.unwrap(model).mean, "max") - job.all_reduce(job.unwrap(model).mean, "min")
    assert not spread.any(), spread  # type: ignore[union-attr]


def second_backward(job: distrib.Job) -> None:
    """Average a backward after each forward. Refuse a second backward after one forward, as it is not averaged."""
    model, optimizer = made(job, nn.Linear(4, 1))
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 4)).square().mean().backward()
        with model.no_sync():
            for _ in range(2):
                loss = model(torch.randn(8, 4)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert_alike(job, model)
    real, fake = (model(torch.randn(8, 4)).mean() for _ in range(2))
    real.backward()
    fake.backward()
    with refused("Linear has gradients that were not all-reduced"):
        optimizer.step()
    inner = job.unwrap(model)
    if job.is_main:  # a debugging pass
        for _ in range(2):
            inner(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert_alike(job, model)


def unused_zeros(job: distrib.Job) -> None:
    """Report a missing gradient also where the script sets gradients to zero."""
    model, optimizer = made(job, Heads())
    with refused(r"rank \d: never.weight, .* got no gradient in this step of Heads"):
        for head in (0, 1):
            for parameter in job.unwrap(model).parameters():
                parameter.grad = torch.zeros_like(parameter)
            model(torch.randn(8, 4), head).square().mean().backward()
            optimizer.step()


def compiled(job: distrib.Job) -> None:
    """Report a missing gradient of a compiled model by the name in the original model."""
    model, optimizer = made(job, torch.compile(Heads(), backend="eager"))  # type: ignore[arg-type]
    with refused(r"rank \d: never.weight, .* got no gradient in this step of Heads"):
        for _ in range(2):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()


def frozen_later(job: distrib.Job) -> None:
    model, _ = made(job, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    model[0].requires_grad_(False)
    model(torch.randn(8, 4)).square().mean().backward()
    with refused("0.weight, 0.bias of Sequential was frozen after job.prepare"):
        model(torch.randn(8, 4))


def step_in_backward(job: distrib.Job) -> None:
    """Step in backward with one optimizer per parameter, as torch's recipe for less memory does."""
    model = nn.Linear(4, 1)
    model = job.prepare(model)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    with refused("SGD took a step within backward"):
        model(torch.randn(8, 4)).sum().backward()


def gathered_batches(job: distrib.Job) -> None:
    """Accumulate batches that alternate between two heads. Some scripts clear gradients only after real steps."""
    ranks = job.world_size
    inputs = torch.randn(ranks, 4, 8, 4, generator=seeded(3))
    for clear in ("always", "after steps", "to zero"):
        model, reference = Heads(), Heads()
        rate = torch.optim.SGD(reference.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.prepare(model, optimizer, accumulate=2, find_unused_parameters=True)
        optimizer.zero_grad()
        for group in (0, 2):
            for turn in (0, 1):
                if clear != "after steps" or (turn == 0):
                    optimizer.zero_grad(set_to_none=clear != "to zero")
                model(inputs[job.rank, group + turn], turn).square().mean().backward()
                optimizer.step()
            rate.zero_grad()
            losses = [
                reference(inputs[rank, group + turn], turn).square().mean() for rank in range(ranks) for turn in (0, 1)
            ]
            (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
            rate.step()
        for (name, one), other in zip(job.unwrap(model).named_parameters(), reference.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), (clear, name)


def two_models_in_turns(job: distrib.Job) -> None:
    """Train two models by one optimizer, where the last batch of a group uses only one of them."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, optimizer = job.prepare(first, second, optimizer, accumulate=2)
    torch.manual_seed(1 + job.rank)
    before = job.unwrap(second).weight.detach().clone()
    for both in (True, False, False, True):
        optimizer.zero_grad()
        loss = first(torch.randn(8, 4)).square().mean()
        (loss + second(torch.randn(8, 4)).square().mean() if both else loss).backward()
        optimizer.step()
        assert_alike(job, first)
        assert_alike(job, second)
    assert not torch.equal(job.unwrap(second).weight, before)


class Growing(nn.Module):
    """Has a buffer that grows with the longest sequence, and other buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(1, 1))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("own", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        if len(self.mask) < length:
            self.register_buffer("mask", torch.ones(length, length).triu(1))
        self.count += 1 + float(self.own)
        scores = (inputs @ inputs.transpose(1, 2)).masked_fill(self.mask[:length, :length].bool(), -1e9)
        return self.layer(scores.softmax(-1) @ inputs)  # type: ignore[no-any-return]


def growing_buffers(job: distrib.Job) -> None:
    for longest in (0, 1):
        plain = Growing()
        plain.own.fill_(job.rank)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["own"])
        model, optimizer = made(job, plain)
        length = 5 if job.rank == longest else 2
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, length, 4)).square().mean().backward()
            optimizer.step()
        inner = job.unwrap(model)
        assert torch.equal(inner.mask, torch.ones(length, length).triu(1)), inner.mask
        if STRATEGY.mode == "sync":
            assert inner.count.tolist() == [3.0] * 3, inner.count  # the value of rank 0
            assert float(inner.own) == job.rank


def looked_at_alone(job: distrib.Job) -> None:
    """Read a prepared loader to its end on one rank before the first step, with a model in training mode."""
    data = TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 8))
    if job.is_main:
        assert sum(len(inputs) for inputs, _ in loader) == 256 / job.world_size
    for inputs, targets in loader:
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    assert_alike(job, model)


def in_a_thread(loader: Any) -> Iterator[Any]:
    """Yield the batches of `loader`, which a thread reads two ahead."""
    read: queue.Queue[Any] = queue.Queue(2)
    threading.Thread(target=lambda: [*map(read.put, loader), read.put(None)], daemon=True).start()
    yield from iter(read.get, None)


def read_ahead(job: distrib.Job) -> None:
    """Read the next batch between forward and backward, or in a thread. Neither changes the pending backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = made(job, model)
    loader = job.prepare(DataLoader(TensorDataset(torch.randn(24 * job.world_size - 8, 4)), 8))
    without_end = itertools.islice(itertools.chain.from_iterable(loader for _ in range(4)), 3 * len(loader))
    for epoch in range(4):
        batches = iter(loader) if epoch < 3 else without_end
        batch = next(batches)
        while batch:
            loss = model(batch[0]).square().mean()
            batch = next(batches, None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if batches is not without_end:
            assert_alike(job, model)  # would be in the middle of a round of mode local
    for _ in range(8):
        for (inputs,) in in_a_thread(loader):
            time.sleep(0.002 * job.rank)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    job.settle()
    assert_alike(job, model)


class Batch(dict):  # type: ignore[type-arg]
    """A batch whose items are attributes, too."""

    __getattr__ = dict.__getitem__


class Scaled(DataLoader):  # type: ignore[type-arg]
    """A loader whose own iteration transforms the batches."""

    def __iter__(self) -> Iterator[Any]:
        for (pixels,) in super().__iter__():
            yield Batch(pixels=pixels.float() / 255)


class KeepsItsIterator(DataLoader):  # type: ignore[type-arg]
    """Begins a new epoch with the workers of the previous one."""

    class Again:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from iter(self.sampler)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        vars(self)["batch_sampler"] = self.Again(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


def kept_iterator(job: distrib.Job) -> None:
    loader = job.prepare(KeepsItsIterator(range(32), batch_size=4))
    for _ in range(2):
        assert len(loader) == 8 // job.world_size
        own = [int(item) for batch in loader for item in batch]
        all_ = [own]
        if job.world_size > 1:
            all_ = [[]] * job.world_size
            dist.all_gather_object(all_, own)
        assert sorted(itertools.chain(*all_)) == list(range(32)), all_


class Unsized(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, number: int) -> int:
        return number


def episodes(job: distrib.Job) -> None:
    """Read batches of the script's own batch sampler, for a dataset without length."""
    loader = job.prepare(DataLoader(Unsized(), batch_sampler=[[number, 9] for number in range(4)]))
    assert [batch.tolist() for batch in loader] == [[job.rank, 9], [job.rank + 2, 9]]


def own_loader(job: distrib.Job) -> None:
    """Keep the transformed batches of a DataLoader subclass, and batches of a dict subclass."""
    data = TensorDataset(torch.arange(16, dtype=torch.uint8)[:, None] * 17)
    loader = job.prepare(Scaled(data, batch_size=4, shuffle=True))
    orders = []
    for _ in range(2):
        own: list[float] = []
        for batch in loader:
            assert type(batch) is Batch and batch.pixels.dtype == torch.float32
            own += batch.pixels[:, 0].mul(15).round().tolist()
        all_ = [own]
        if job.world_size > 1:
            all_ = [[]] * job.world_size
            dist.all_gather_object(all_, own)
        assert sorted(itertools.chain(*all_)) == list(range(16)), all_
        orders.append(own)


def made_anew(job: distrib.Job) -> None:
    """Create a loader in each epoch with one generator: each epoch has its own, reproducible order."""
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        found.append(
            [
                [
                    int(item)
                    for batch in job.prepare(DataLoader(range(64), 8, shuffle=True, generator=generator))
                    for item in batch
                ]
                for _ in range(3)
            ]
        )
    assert found[0] == found[1]
    assert len({tuple(order) for order in found[0]}) == 3


def own_epochs(job: distrib.Job) -> None:
    """Set epochs in the script, as after resuming at the seventh."""
    sampler = DistributedSampler(range(64), job.world_size, job.rank, seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(5)
    loader = job.prepare(DataLoader(range(64), 8, sampler=sampler))
    for epoch in (5, 7, 8, 2):
        if epoch != 5:
            loader.sampler.set_epoch(epoch)
        read = [int(item) for batch in loader for item in batch]
        plain = DistributedSampler(range(64), job.world_size, job.rank, seed=3)  # type: ignore[arg-type]
        plain.set_epoch(epoch)
        assert read == list(plain), epoch


def closure_numbers(job: distrib.Job) -> None:
    """Return all digits of a number from an optimizer's closure."""
    told = []

    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            told.append(closure())
            return super().step()

    model = nn.Linear(2, 1).double()
    model, optimizer = job.prepare(model, Asks(model.parameters(), lr=0.1))

    def closure() -> float:
        optimizer.zero_grad()
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        return 1.0 + 1e-12

    optimizer.step(closure)
    assert abs(told[0] - (1.0 + 1e-12)) < 1e-15, told


class Counted(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16 * 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def other_workers(job: distrib.Job) -> None:
    """Distribute batches identically with --balance, though loaders prefetch different numbers of batches."""
    load_balancing._ShareController.update = lambda self, timings: (3.0, 1.0)  # type: ignore[method-assign]  # whatever this machine does meanwhile
    loader = DataLoader(Counted(), batch_size=8, num_workers=job.rank)
    model = nn.Linear(4, 1)
    model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    seen: list[float] = []
    sizes = set()
    for inputs in loader:
        seen += inputs[:, 0].tolist()
        sizes.add(len(inputs))
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
    all_: list[list[float]] = [[] for _ in range(job.world_size)]
    dist.all_gather_object(all_, seen)
    assert sorted(itertools.chain(*all_)) == list(range(16 * 60))
    assert sizes == ({8, 4} if job.rank else {8, 12}), "they were shared out anew"


def reduced(job: distrib.Job) -> None:
    """Average small types as exactly as possible."""
    ranks = job.world_size
    for dtype, value in (
        (torch.uint8, 200), (torch.int8, 100), (torch.int16, 30_000), (torch.int32, 2_000_000_000),
        (torch.float16, 4e4), (torch.bfloat16, 1e38),
    ):  # fmt: skip
        mean = job.all_reduce(torch.full((2,), value, dtype=dtype))
        assert isinstance(mean, torch.Tensor)
        assert mean.tolist() == torch.full((2,), value, dtype=dtype).to(mean.dtype).tolist(), (dtype, mean)
        assert mean.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert job.all_reduce(torch.tensor([True, False])).tolist() == [1.0, 0.0]  # type: ignore[union-attr]
    assert job.all_reduce(torch.tensor([1, job.rank])).tolist() == [1.0, (ranks - 1) / 2]  # type: ignore[union-attr]


def not_numbers(job: distrib.Job) -> None:
    """Report the rank of a nan gradient, also if the gradient is sparse or complex."""
    table = nn.Embedding(4, 2, sparse=True)
    model, optimizer = made(job, nn.Sequential(table))
    model(torch.tensor([1])).mul(float("nan") if job.rank else 1.0).sum().backward()
    with refused("the gradient of 0.weight is nan or infinite on rank 1"):
        optimizer.step()
    turn = nn.Module()
    turn.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    turn.forward = lambda factor: (turn.weight.conj() * factor).abs().sum()  # type: ignore[assignment]
    model, optimizer = made(job, turn)
    model(torch.tensor(1j)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(float("nan") if job.rank else 1.0).backward()
    with refused("the gradient of weight is nan or infinite on rank 1"):
        optimizer.step()


def wide_default(job: distrib.Job) -> None:
    """Compress gradients where the default dtype is float64."""
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = made(job, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        assert_alike(job, model)
    finally:
        torch.set_default_dtype(torch.float32)


def learn(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def begins_as_main(job: distrib.Job) -> None:
    """Broadcast state that only rank 0 loaded before `prepare`, and buffers that are not saved."""
    model = nn.Linear(4, 1)
    model.register_buffer("drawn", torch.randn(3, generator=seeded(job.rank)), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=16.0)
    if job.is_main:
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(32.0)
        schedule.step()
    model, optimizer, schedule, scaler = job.prepare(model, optimizer, schedule, scaler)
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch, scaler.get_scale()) == (0.05, 1, 32.0)
    assert torch.equal(job.unwrap(model).drawn, torch.randn(3, generator=seeded(0)))
    job.barrier()
    job.release(model, optimizer)


def warmed_in_no_step(job: distrib.Job) -> None:
    model, optimizer = made(job, nn.Linear(4, 1))
    schedule = job.warmup(optimizer, 0)
    for _ in range(2):
        learn(model, optimizer, 1)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def has_its_turn_again(job: distrib.Job) -> None:
    """Keep the state of an optimizer that was released or replaced by another, and use it again."""
    model = nn.Linear(4, 1)
    model, first = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    torch.manual_seed(1 + job.rank)
    learn(model, first, 3)
    second = job.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    learn(model, second, 3)
    first = job.prepare(first)
    learn(model, first, 3)
    job.release(first, second)
    job.settle()  # no prepared optimizer has updated the model
    job.release(model)
    if job.is_main:  # in mode async only rank 0 fetches it from the servers
        assert first.state_dict()["state"][0]["momentum_buffer"].any()
    model, first = job.prepare(job.unwrap(model), first)
    assert first.state_dict()["state"][0]["momentum_buffer"].any()
    before = job.unwrap(model).weight.detach().clone()
    learn(model, first, 3)
    job.settle()
    assert_alike(job, model)
    assert not torch.equal(job.unwrap(model).weight, before)
    job.release(model, first)


def compiled_step(job: distrib.Job) -> None:
    """Compile the function that takes the steps: every second batch completes one."""
    model, optimizer = made(job, nn.Linear(4, 1), accumulate=2)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    counted = []
    for _ in range(12):
        model(torch.randn(8, 4)).square().mean().backward()
        step()
        optimizer.zero_grad()
        counted.append(job.stepped)
    job.settle()
    assert counted == [False, True] * 6
    assert_alike(job, model)
    job.release(model, optimizer)
    job.accumulate(1)


def scaler_lets_go(job: distrib.Job) -> None:
    """Use one GradScaler for models trained one after the other."""
    scaler, kept = job.prepare(torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0)), []
    for _ in range(2):
        model, optimizer = made(job, nn.Linear(4, 1))
        scaler.scale(model(torch.randn(8, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        job.release(model, optimizer)
        kept.append(weakref.ref(optimizer))
    del model, optimizer
    gc.collect()
    assert [one() for one in kept] == [None, None]


def restored_within_a_round(job: distrib.Job) -> None:
    """Restore another model than the trained one while each rank trains alone."""
    model, optimizer = made(job, nn.Linear(4, 1))
    average = copy.deepcopy(job.unwrap(model))
    with tempfile.TemporaryDirectory() as folder:
        job.save(f"{folder}/average.pt", average=average)
        learn(model, optimizer, 1)
        job.restore(f"{folder}/average.pt", average=average)
    learn(model, optimizer, 3)
    job.settle()
    assert_alike(job, model)


def weights_alone(job: distrib.Job) -> None:
    """Restore only the weights of a model that other optimizers trained."""
    model, optimizer = made(job, nn.Linear(4, 1))
    learn(model, optimizer, 2)
    job.settle()
    other = job.prepare(nn.Linear(4, 1))
    with tempfile.TemporaryDirectory() as folder:
        job.save(f"{folder}/learnt.pt", model=model, optimizer=optimizer)
        job.release(model, optimizer)
        job.restore(f"{folder}/learnt.pt", model=other)
    assert torch.equal(job.unwrap(other).weight, job.unwrap(model).weight)
    job.release(other)


def values_of_each_rank(job: distrib.Job) -> None:
    """Hand the values and objects of each rank back to it."""
    head = nn.Linear(2, 1)
    nn.init.constant_(head.weight, job.rank)
    with tempfile.TemporaryDirectory() as folder:
        job.save(f"{folder}/own.pt", common=3, per_rank={"head": head, "rank": job.rank})
        job.barrier()
        nn.init.zeros_(head.weight)
        back = job.restore(f"{folder}/own.pt", per_rank={"head": head})
    assert back == {"common": 3, "per_rank": {"rank": job.rank}}
    assert head.weight.tolist() == [[job.rank, job.rank]]


def followers(job: distrib.Job) -> None:
    """Update a teacher by its student, and unfreeze a body later. Its running means change from the start."""
    model = nn.ModuleDict({"student": nn.Linear(4, 1), "teacher": nn.Linear(4, 1).requires_grad_(False)})
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    optimizer = torch.optim.SGD(model["student"].parameters(), lr=0.05)
    model, body, optimizer = job.prepare(model, body, optimizer)
    torch.manual_seed(1 + job.rank)
    for later in (False, True):
        if later:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": [*body.parameters()]})
        for _ in range(3):
            optimizer.zero_grad()
            model["student"](body(torch.randn(8, 4) + job.rank)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        job.settle()
        assert_alike(job, model)
        assert_alike(job, body)
        assert job.all_reduce(body[1].running_mean, "max").tolist() == body[1].running_mean.tolist()  # type: ignore[union-attr]
        assert body[1].running_mean.any()


def evaluated_by_a_method(job: distrib.Job) -> None:
    """Evaluate identical values by a method, without a call of the model, on ranks with different step counts."""
    model, optimizer = made(job, Heads(), find_unused_parameters=True)
    loader = job.prepare(DataLoader(TensorDataset(torch.ones(8, 4)), 2))
    learn(model, optimizer, 2 + 3 * job.rank)
    model.eval()
    for (inputs,) in loader:
        model.policy(inputs)
    assert_alike(job, model)


def averages_put_in(job: distrib.Job) -> None:
    """Overwrite the model with averaged values for an evaluation. Mode async warns of its effect."""
    model, optimizer = made(job, nn.Linear(4, 1))
    learn(model, optimizer, 7)
    model.eval()
    with contextlib.redirect_stderr(io.StringIO()) as told, torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model(torch.ones(1, 4))
    assert "the script changed weight" in told.getvalue(), told.getvalue()


def cleared_after_steps(job: distrib.Job) -> None:
    """Clear gradients only after real steps: a skipped step leaves no gradient behind."""
    kind = torch.get_default_device().type
    for batches, scaled in itertools.product((1, 2), (False, True)):
        model, optimizer = made(job, nn.Linear(4, 1), accumulate=batches, on_nan="skip")
        scaler = job.prepare(torch.amp.GradScaler(kind, init_scale=4.0, enabled=scaled))
        taken = 0
        for batch in range(6 * batches):
            inputs = torch.randn(4, 4)
            if batch == batches and job.rank == job.world_size - 1:
                inputs[0] = float("inf")
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if job.stepped:
                taken += 1
                optimizer.zero_grad()
        assert taken == 5, (batches, scaled, taken)
        assert_alike(job, model)
    job.accumulate(1)


def set_by_hand(job: distrib.Job) -> None:
    """Refuse to accumulate gradients that the script sets itself."""
    model, optimizer = made(job, nn.Linear(4, 1), accumulate=2)
    parameters = [*model.parameters()]
    for parameter, own in zip(
        parameters, torch.autograd.grad(model(torch.randn(4, 4)).mean(), parameters), strict=True
    ):
        parameter.grad = job.all_reduce(own)
    with refused("cannot be accumulated"):
        optimizer.step()
    job.accumulate(1)


class Shown(nn.Module):
    """A model that trains by its methods, and has an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.never = nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)  # type: ignore[no-any-return]

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs).square().mean()  # type: ignore[no-any-return]

    def train_on(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = self.loss(inputs)
        loss.backward()
        return loss


def shown_between(job: distrib.Job) -> None:
    """Evaluate the model with gradients enabled between training steps by its methods."""
    model, optimizer = made(job, Shown(), find_unused_parameters=True, methods=["loss"])
    for step in range(6):
        if step == 2:
            model(torch.randn(2, 4))
        optimizer.zero_grad()
        model.loss(torch.randn(8, 4)).backward()
        optimizer.step()
    assert_alike(job, model)


def backward_inside(job: distrib.Job) -> None:
    """Report gradients as not all-reduced if an undeclared method calls backward."""
    model, optimizer = made(job, Shown(), find_unused_parameters=True, methods=["loss"])
    model.train_on(torch.randn(8, 4))
    with refused("Shown has gradients that were not all-reduced"):
        optimizer.step()
    optimizer.zero_grad()
    model.loss(torch.randn(8, 4)).backward()
    optimizer.step()
    assert_alike(job, model)


def copy_evaluated_alone(job: distrib.Job) -> None:
    """Evaluate on rank 0 only: a copy from before the optimizer was prepared, and then the model itself."""
    torch.manual_seed(0)
    model = job.prepare(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    twin = copy.deepcopy(model)
    optimizer = job.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    torch.manual_seed(1 + job.rank)
    for _ in range(2):
        if job.is_main:
            with torch.no_grad():
                twin(torch.randn(8, 4))
                model(torch.randn(8, 4))
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert_alike(job, model)


def inferred_evaluation(job: distrib.Job) -> None:
    """Evaluate an uneven batch in inference mode, while one of two trained models is in training mode."""
    model, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05)
    data = DataLoader(TensorDataset(torch.ones(4 * job.world_size + 1, 4)), 4)
    model, head, optimizer, loader = job.prepare(model, head, optimizer, data)
    model.eval()
    with torch.inference_mode():
        for (inputs,) in loader:
            head(model(inputs))


def passed_without_steps(job: distrib.Job) -> None:
    """Change running means in batches without steps; `job.settle()` makes them identical."""
    torch.manual_seed(0)
    model, optimizer = made(job, nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
    learn(model, optimizer, 4)
    job.settle()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 4))
    job.settle()
    means = job.unwrap(model)[0].running_mean
    assert torch.equal(job.all_reduce(means, "max"), job.all_reduce(means, "min"))


def frozen_when_read(job: distrib.Job) -> None:
    """Weight an uneven batch by its samples, though one of two models is frozen when the batch is read."""
    torch.manual_seed(0)
    judge, maker = nn.Linear(4, 1, bias=False), nn.Linear(4, 4)
    data = TensorDataset(torch.randn(4 * job.world_size + 3, 4))
    optimizers = torch.optim.SGD(judge.parameters(), lr=0.5), torch.optim.SGD(maker.parameters(), lr=0.5)
    judge, maker, *optimizers, loader = job.prepare(judge, maker, *optimizers, DataLoader(data, 4))
    expected = job.unwrap(judge).weight.detach().clone()
    for (inputs,) in loader:
        judge.requires_grad_(True)
        for judged, optimizer in zip((inputs, maker(inputs)), optimizers, strict=True):
            optimizer.zero_grad()
            judge(judged).mean().backward()
            optimizer.step()
            judge.requires_grad_(False)
        samples = job.all_reduce(float(len(inputs)), "sum")
        expected -= 0.5 * job.all_reduce(inputs.sum(0), "sum") / samples
    torch.testing.assert_close(job.unwrap(judge).weight.detach(), expected, rtol=0, atol=1e-6)


def large_gradients(job: distrib.Job) -> None:
    """Train with gradients larger than the compressed format can represent."""
    model = nn.Linear(4, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)) * 1e5).sum().backward()
        optimizer.step()
    job.settle()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def main_ends_first(job: distrib.Job) -> None:
    """Finish rank 0 first, while the other ranks prepare objects that main would report on."""
    if job.rank:
        assert len([*job.prepare(DataLoader(TensorDataset(torch.ones(8, 4)), 2))])
        assert job.is_main


def ends_itself(job: distrib.Job) -> None:
    """Destroy the process group at the end, as scripts for torchrun do."""
    model, optimizer = made(job, nn.Linear(4, 1))
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # loader processes import this file
    torch.set_num_threads(1)
    job = distrib.init(timeout_seconds=60)
    for lesson in sys.argv[1:]:
        globals()[lesson](job)
        print(f"done: {lesson}", flush=True)
