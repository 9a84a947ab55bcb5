"""Train a model with DDP and with distrib on real or simulated hosts: `averages.py LESSON[,LESSON] [HOSTS ...]`.

HOSTS is such as `0,0,1`: ranks 0 and 1 on one host, rank 2 on another. By default, the ranks detect their hosts.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distrib
from devices import on_gpu, seeded
from distrib.strategy import Strategy, parse_gradients
from distrib.training.gradients import compression, int8_blocks, top_k
from distrib.training.gradients.comm_hook import REBUILD_STEPS, HierarchicalHook, attach_hook, find_hook
from distrib.training.gradients.power_sgd import POWER_SGD_WARMUP_STEPS
from distrib.training.strategies.ddp import wrap_model

STEPS = 40
LEARNING_STEPS = 80


class SentBytes:
    """Counter of the bytes that this rank sends in collectives of its inter-host groups."""

    def __init__(self) -> None:
        self.count = 0.0
        dist.all_reduce = self._counted(dist.all_reduce, lambda ranks: 2 * (ranks - 1) / ranks)
        dist.all_to_all_single = self._counted(dist.all_to_all_single, lambda ranks: (ranks - 1) / ranks)
        gather = self._counted(compression.all_gather_single, lambda ranks: ranks - 1)
        compression.all_gather_single = int8_blocks.all_gather_single = top_k.all_gather_single = gather  # type: ignore[attr-defined]

    def _counted(self, collective: Callable[..., Any], passes: Callable[[int], float]) -> Callable[..., Any]:
        def counted(*tensors: Any, group: Any = None, **options: Any) -> Any:
            if group is not None:  # collectives of all ranks are not about gradients
                self.count += tensors[-1].nbytes * passes(group.size())
            return collective(*tensors, group=group, **options)

        return counted


class Sharper(nn.Module):
    """Module with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Nothing(nn.Module):
    """Module with an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum()


def fresh() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 400), nn.Tanh(), nn.Linear(400, 3), Sharper())


def ours(model: nn.Module, strategy: Strategy, hosts: list[str] | None) -> tuple[nn.Module, Any]:
    if on_gpu():
        device = torch.get_default_device()
        wrapped = wrap_model(model, device, 2, find_unused_parameters=False, settings=strategy)
        return wrapped, find_hook(wrapped)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)  # type: ignore[arg-type]
    averaging = HierarchicalHook(list(model.parameters()), strategy, hosts)
    attach_hook(wrapped, averaging)
    return wrapped, averaging


def train(wrapped: nn.Module, rank: int, steps: int = STEPS, lr: float = 0.05) -> float:
    """Train a classifier of three directions, with different samples on each rank, and return the last loss."""
    generator = seeded(100 + rank)
    directions = torch.randn(40, 3, generator=seeded(5))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        inputs = torch.randn(16, 40, generator=generator)
        loss = nn.functional.cross_entropy(wrapped(inputs), (inputs @ directions).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@functools.cache
def trained_by_ddp(rank: int) -> nn.Module:
    model = fresh()
    train(DistributedDataParallel(model), rank)
    return model


def exact(job: distrib.Job, hosts: list[str] | None) -> None:
    """Match DDP's parameters to 1e-6 after 40 steps, for any bucket boundaries."""
    first, theirs = fresh(), trained_by_ddp(job.rank)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs(first, theirs)) > 0.01
    for strategy in (Strategy(), Strategy(bucket_bytes=100_000), Strategy(all_reduce="flat")):
        model = copy.deepcopy(first)
        wrapped, averaging = ours(model, strategy, hosts)
        train(wrapped, job.rank)
        difference = max(float((a - b).detach().abs().max()) for a, b in pairs(model, theirs))
        assert difference <= 1e-6, (hosts, strategy, difference)
        if not on_gpu():  # on GPUs DDP does the averaging
            job.print(
                f"{difference:.1e} {averaging.reduction.local_size > 1} {averaging.reduction.hosts} hosts, {len(averaging.bounds)} pieces"
            )


def pairs(a: nn.Module, b: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(a.parameters(), b.parameters(), strict=True))


def formats(job: distrib.Job, hosts: list[str] | None) -> None:
    """Reach a similar loss with each format, send fewer bytes, and keep identical parameters on all ranks."""
    first, sent_bytes = fresh(), SentBytes()
    wrapped, _ = ours(copy.deepcopy(first), Strategy(), hosts)
    loss = job.all_reduce(train(wrapped, job.rank, LEARNING_STEPS))
    exact_bytes = sent_bytes.count
    most = {
        "fp16": (0.51, 0), "bf16": (0.51, 0), "int8": (0.26, REBUILD_STEPS), "topk:0.05": (0.18, REBUILD_STEPS),
        "powersgd:4": (0.28, POWER_SGD_WARMUP_STEPS),
    }  # fmt: skip
    for name, (fraction, exact_steps) in most.items():
        model = copy.deepcopy(first)
        wrapped, _ = ours(model, Strategy(gradients=parse_gradients(name)), hosts)
        sent_bytes.count = 0
        # Momentum and topk's delayed values add up: at 0.05 some bucket boundaries diverge, also in a single process.
        reached = job.all_reduce(train(wrapped, job.rank, LEARNING_STEPS, lr=0.02 if name.startswith("topk") else 0.05))
        assert reached < 0.35 < 1.0, (hosts, name, reached, loss)
        told = ""
        if not on_gpu():  # the byte counter does not see NCCL's traffic
            sent = job.all_reduce(sent_bytes.count, "sum") / job.all_reduce(exact_bytes, "sum")
            assert 0 < sent < fraction + exact_steps / LEARNING_STEPS, (name, sent)
            told = f", {sent:.3f} of the bytes"
        for parameter in model.parameters():
            assert torch.equal(job.all_reduce(parameter, "max"), job.all_reduce(parameter, "min")), name
        job.print(f"{name}: loss {reached:.3f} beside {loss:.3f}{told}")


def halves(job: distrib.Job, hosts: list[str] | None) -> None:
    """Match DDP to two 16-bit roundings for each gradient in each step, also after new bucket boundaries."""
    for name, rounding in (("bf16", 2**-8), ("fp16", 2**-11)):
        theirs, mine = fresh(), fresh()
        plain = DistributedDataParallel(theirs)
        wrapped, averaging = ours(mine, Strategy(gradients=parse_gradients(name)), hosts)
        generator = seeded(job.rank)
        for step in range(30):
            inputs = torch.randn(1 + step % 3, 40, generator=generator)
            for model in (plain, wrapped):
                model.zero_grad()
                model(inputs).square().sum().backward()
            largest = job.all_reduce(torch.stack([a.grad.abs().max() for a in theirs.parameters()]), "max")
            roundings = 4 if on_gpu() else 2  # NCCL adds in 16 bits
            for (a, b), most in zip(pairs(theirs, mine), largest, strict=True):
                assert a.grad is not None and b.grad is not None
                atol = roundings * rounding * float(most) * job.world_size + 2**-24
                torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=atol)
        assert on_gpu() or averaging.bounds or averaging.reduction.hosts == 1


def numbers(job: distrib.Job, hosts: list[str] | None) -> None:
    """Propagate a nan gradient to every rank, and remove it in the next step."""
    for name in ("fp32", "bf16", "int8", "topk:0.5", "powersgd:1"):
        wrapped, _ = ours(fresh(), Strategy(gradients=parse_gradients(name)), hosts)
        first: list[torch.Tensor] = []
        for step in range(POWER_SGD_WARMUP_STEPS + 6):
            bad = step in (1, POWER_SGD_WARMUP_STEPS, POWER_SGD_WARMUP_STEPS + 2)
            wrapped(torch.full((1, 40), float("nan") if bad and job.rank == 1 else 1.0)).sum().backward()
            gradients = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
            assert all(bool(gradient.isfinite().all()) for gradient in gradients) is not bad, (name, step)
            first = first or gradients
            wrapped.zero_grad()
        if name == "powersgd:1":  # accurate enough for gradients of one sample
            for gradient, other in zip(gradients, first, strict=True):
                torch.testing.assert_close(gradient, other, rtol=0, atol=0.03 * float(other.abs().max()))


def begins(job: distrib.Job, hosts: list[str] | None) -> None:
    """Match DDP in the first steps of PowerSGD for any number of buckets, then compress."""
    theirs, mine = fresh(), fresh()
    wrapped, _ = ours(mine, Strategy(gradients=parse_gradients("powersgd:4")), hosts)
    for model in (DistributedDataParallel(theirs), wrapped):
        train(model, job.rank, POWER_SGD_WARMUP_STEPS)
    for a, b in pairs(theirs, mine):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    train(wrapped, job.rank, 1)
    train(DistributedDataParallel(theirs), job.rank, 1)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs(theirs, mine)) > 1e-5


def seldom(job: distrib.Job, hosts: list[str] | None) -> None:
    """Train with PowerSGD a layer that had zero gradients for long; another parameter is empty."""
    wrapped, _ = ours(nn.Sequential(fresh(), Nothing()), Strategy(gradients=parse_gradients("powersgd:2")), hosts)
    for step in range(POWER_SGD_WARMUP_STEPS + 5):
        wrapped.zero_grad()
        (wrapped(torch.ones(1, 40)).sum() * (0.0 if step < POWER_SGD_WARMUP_STEPS + 2 else 1.0)).backward()
    for parameter in wrapped.parameters():
        assert parameter.grad is not None and (not parameter.numel() or float(parameter.grad.norm()) > 0.01)


def restored(job: distrib.Job, hosts: list[str] | None) -> None:
    """Clear the residuals of a bad batch when a checkpoint is restored."""
    for name in ("topk:0.02", "powersgd:2"):
        model = fresh()
        strategy = Strategy(gradients=parse_gradients(name), bucket_bytes=100_000)
        wrapped, _ = ours(model, strategy, hosts)
        wrapped, optimizer = job.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3))

        def learn(steps: int, times: float = 1.0, model: Any = wrapped, optimizer: Any = optimizer) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                (model(torch.randn(8, 40)).square().mean() * times).backward()
                optimizer.step()

        learn(POWER_SGD_WARMUP_STEPS + 2)
        with tempfile.TemporaryDirectory() as folder:
            job.save(f"{folder}/good.pt", model=model, optimizer=optimizer)
            good = [parameter.detach().clone() for parameter in model.parameters()]
            learn(1, 1e8)
            job.restore(f"{folder}/good.pt", model=model, optimizer=optimizer)
        learn(5)
        for one, other in zip(model.parameters(), good, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0.1, msg=lambda text, name=name: f"{name}: {text}")
        job.release(wrapped, optimizer)


def arrives(job: distrib.Job, hosts: list[str] | None) -> None:
    """Keep no residuals until the bucket boundaries are final; afterwards all residuals arrive."""
    steps = 48
    for name in ("int8", "topk:0.1"):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
        wrapped, _ = ours(model, Strategy(gradients=parse_gradients(name)), hosts)
        numbers = [1.0 + place % 2 for place in range(12)]
        arrived = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for step in range(1, steps + 1):
            wrapped.zero_grad()
            alike = sum(number * p.sum() for number, p in zip(numbers, model.parameters(), strict=True))
            (wrapped(torch.zeros(1, 128)).sum() + alike).backward()
            for total, parameter, number in zip(arrived, model.parameters(), numbers, strict=True):
                total += parameter.grad  # type: ignore[arg-type]
                if step <= REBUILD_STEPS:
                    torch.testing.assert_close(total, torch.full_like(total, step * number))
        for total, number in zip(arrived, numbers, strict=True):
            late = (number * steps - total) / number
            assert float(late.min()) > -1 and float(late.max()) < 25, (name, number, late.min(), late.max())


def scales(job: distrib.Job, hosts: list[str] | None) -> None:
    """Keep residuals in units of the unscaled gradients, for any scale of a GradScaler."""
    directions = torch.randn(40, 3, generator=seeded(5))
    for name in ("int8", "topk:0.02", "powersgd:2"):
        reached = []
        for enabled in (False, True):
            model = fresh()
            strategy = Strategy(gradients=parse_gradients(name), bucket_bytes=100_000)  # fixed size, no autotuning
            wrapped, _ = ours(model, strategy, hosts)
            scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0, enabled=enabled)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
            wrapped, optimizer, scaler = job.prepare(wrapped, optimizer, scaler, on_nan="skip")
            generator = seeded(100 + job.rank)
            for step in range(24):
                inputs = torch.randn(16, 40, generator=generator)
                loss = nn.functional.cross_entropy(wrapped(inputs), (inputs @ directions).argmax(dim=1))
                optimizer.zero_grad()
                scaler.scale(loss * (float("inf") if (step, job.rank) == (20, 1) else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update(2.0 ** (5 * step % 12))
            reached.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
        torch.testing.assert_close(*reached, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def mixed(job: distrib.Job, hosts: list[str] | None) -> None:
    """Train parameters of several types, one of which is not always used."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 7, dtype=torch.float64)
            self.second = nn.Linear(7, 5, dtype=torch.float32)
            self.third = nn.Linear(5, 3, dtype=torch.bfloat16)
            self.seldom = nn.Linear(5, 3, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
            x = self.second(self.first(x).float()).bfloat16()
            return self.third(x) + (self.seldom(x) if seldom else 0)

    torch.manual_seed(3)
    first = Model()
    theirs, mine = copy.deepcopy(first), copy.deepcopy(first)
    plain = DistributedDataParallel(theirs, find_unused_parameters=True)
    wrapped = DistributedDataParallel(mine, find_unused_parameters=True)
    attach_hook(wrapped, HierarchicalHook(list(mine.parameters()), Strategy(), hosts))
    for step in range(6):
        for model in (plain, wrapped):
            model.zero_grad()
            model(torch.full((2, 7), 1.0 + job.rank, dtype=torch.float64), step % 2 == 1).float().sum().backward()
        for a, b in pairs(theirs, mine):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)


def ends(job: distrib.Job, hosts: list[str] | None) -> None:
    """Close the thread and sockets of a model that the script drops."""
    held = []
    for _ in range(4):
        wrapped, averaging = ours(fresh(), Strategy(all_reduce="auto"), hosts)
        train(wrapped, job.rank, 5)
        del wrapped, averaging
        gc.collect()
        held.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    # A leak adds at least one in every turn. A thread that ends may be counted a moment longer.
    assert all(last - first < 3 for first, last in zip(held[0], held[-1], strict=True)), held


def dies(job: distrib.Job, hosts: list[str] | None) -> None:
    """Kill the last rank during its steps."""
    wrapped, _ = ours(fresh(), Strategy(), hosts)
    train(wrapped, job.rank, 5)
    if job.rank == job.world_size - 1:
        os.kill(os.getpid(), 9)
    train(wrapped, job.rank, 1000)


if __name__ == "__main__":
    with distrib.init() as job:
        for name in sys.argv[1].split(","):
            for pretended in sys.argv[2:] or [""]:
                globals()[name](job, pretended.split(",") if pretended else None)
                job.print(f"done {name} {pretended}")
