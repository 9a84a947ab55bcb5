"""Numeric options of modes sync and local against plain torch: `option_references.py sync|local`, on any number of ranks.

Every rank computes the expected parameters alone: it knows the data of all ranks and imitates each of them in float64.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import distrib
from devices import seeded
from distrib.strategy import OuterOptimizer, Strategy, parse_gradients
from distrib.training.gradients.comm_hook import REBUILD_STEPS
from distrib.training.gradients.power_sgd import POWER_SGD_WARMUP_STEPS
from distrib.training.job import Job
from distrib.training.strategies.base import create_strategy

LR, OUTER_FRAGMENTS = 0.05, 2
Parameters = list[torch.Tensor]


def job_with(first: Job, divergence_check_steps: int = 100, **settings: Any) -> Job:
    """Return another job of the same ranks with other settings, which `first` closes."""
    world = first._parts.strategy.world
    made = Job(create_strategy(Strategy(**settings), world, first.device), divergence_check_steps)
    made._parts.shutdown._usage.close()
    made._parts.shutdown._exit_watch.close()  # type: ignore[union-attr]
    return made


def make_model(
    inputs: int = 4, outputs: int = 2, *, bias: bool = True, dtype: torch.dtype = torch.float64
) -> nn.Linear:
    model = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=seeded(number))
    return model


def loss_of(parameters: Sequence[torch.Tensor], step: int, rank: int) -> torch.Tensor:
    weight = parameters[0]
    inputs = torch.randn(5, weight.shape[1], generator=seeded(1000 * step + rank), dtype=torch.float64).to(weight.dtype)
    return (nn.functional.linear(inputs, *parameters).sin() - rank).square().mean()


def gradient_of(parameters: Parameters, step: int, rank: int) -> Parameters:
    """Return the gradient of one batch of one rank, in plain torch."""
    own = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    return list(torch.autograd.grad(loss_of(own, step, rank), own))


class Forward(nn.Module):
    """A model that returns the loss of a batch, so that DDP sees its forward pass."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, step: int, rank: int) -> torch.Tensor:
        return loss_of([*self.inner.parameters()], step, rank)


def values(model: nn.Module) -> Parameters:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_close(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: object, tolerance: float = 1e-12
) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


# -- mode sync ------------------------------------------------------------------------------------------------------------


def check_weighted_steps(
    job: Job, batches: int, *, ways: dict[str, Any], weights: Callable[[int, int], float] | None, clip: float
) -> None:
    """Match SGD with momentum on the weighted mean gradient of all ranks and of all batches of a step, clipped."""
    model: Any = Forward(make_model())
    expected = make_model()
    optimizer, reference = (torch.optim.SGD(one.parameters(), LR, momentum=0.9) for one in (model, expected))
    model, optimizer = job.prepare(model, optimizer, **ways)
    for step in range(3 * batches):
        if weights:
            job.weigh(weights(step, job.rank))
        if step % batches == 0:
            optimizer.zero_grad()
        model(step, job.rank).backward()
        if step % batches == batches - 1 and clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        assert job.stepped == (step % batches == batches - 1)
    for first in range(0, 3 * batches, batches):
        places = list(itertools.product(range(first, first + batches), range(job.world_size)))
        shares = [weights(*place) if weights else 1.0 for place in places]
        gradients = [gradient_of(values(expected), *place) for place in places]
        for number, parameter in enumerate(expected.parameters()):
            parameter.grad = sum(share * one[number] for share, one in zip(shares, gradients, strict=True)) / sum(
                shares
            )  # type: ignore[assignment]
        if clip:
            nn.utils.clip_grad_norm_(expected.parameters(), clip)
        reference.step()
    assert_close(values(model), values(expected), (batches, ways, clip))


def sync_steps(first: Job) -> None:
    """`--accumulate`, `prepare(accumulate=)`, `accumulate()`, `weigh()` and clipping."""

    def uneven(step: int, rank: int) -> float:
        return float(1 + step % 2 + 3 * rank)

    check_weighted_steps(job_with(first), 1, ways={}, weights=None, clip=0.3)
    check_weighted_steps(job_with(first), 1, ways={}, weights=uneven, clip=0.0)
    check_weighted_steps(job_with(first, accumulate=3), 3, ways={"accumulate": 2}, weights=uneven, clip=0.3)
    check_weighted_steps(job_with(first), 2, ways={"accumulate": 2}, weights=None, clip=0.3)
    job = job_with(first)
    job.accumulate(4)
    check_weighted_steps(job, 4, ways={}, weights=uneven, clip=0.0)
    check_weighted_steps(
        job_with(first, all_reduce="hierarchical"), 2, ways={"accumulate": 2}, weights=uneven, clip=0.3
    )


def check_rates(job: Job, ranks: int) -> None:
    """Match the linear scaling rule and its warm-up, whose first rate is that of one rank."""
    model = Forward(make_model())
    scaled = job.scale_lr(0.02)
    assert scaled == 0.02 * ranks
    for steps in (0, 1, 4):
        optimizer = torch.optim.SGD(model.parameters(), scaled)
        schedule = job.warmup(optimizer, steps)
        seen = []
        for _ in range(steps + 3):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        expected = [0.02 * (1 + (ranks - 1) * (min(step / steps, 1) if steps else 1)) for step in range(steps + 3)]
        assert all(abs(one - other) < 1e-12 for one, other in zip(seen, expected, strict=True)), (steps, seen, expected)


def sync_rates(first: Job) -> None:
    """`scale_lr` and `warmup`, and a warm-up that changes the parameters as it does in plain torch."""
    check_rates(job_with(first), first.world_size)
    job = job_with(first)
    model: Any = Forward(make_model())
    expected, ranks = values(model), job.world_size
    optimizer = torch.optim.SGD(model.parameters(), job.scale_lr(LR))
    model, optimizer = job.prepare(model, optimizer)
    schedule = job.prepare(job.warmup(optimizer, 3))
    for step in range(6):
        optimizer.zero_grad()
        model(step, job.rank).backward()
        optimizer.step()
        schedule.step()
        rate = LR * (1 + (ranks - 1) * min(step / 3, 1))
        means = [
            sum(parts) / ranks
            for parts in zip(*(gradient_of(expected, step, rank) for rank in range(ranks)), strict=True)
        ]
        expected = [one - rate * mean for one, mean in zip(expected, means, strict=True)]
    assert_close(values(model), expected, "warmup")


def compressed(first: Job, gradients: str, warmup_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first compressed mean gradient of 24 x 32 parameters, and the exact one."""
    job = job_with(first, gradients=parse_gradients(gradients), all_reduce="flat")  # as if each rank had a host
    plain = make_model(32, 24, bias=False, dtype=torch.float32)
    model: Any = Forward(plain)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    for _ in range(warmup_steps + 1):
        optimizer.zero_grad()
        model(0, 1).backward()  # the same batch on every rank
        optimizer.step()
    assert plain.weight.grad is not None
    return plain.weight.grad, gradient_of(values(plain), 0, 1)[0]


def sync_compression(first: Job) -> None:
    """`--gradients`: the rank of PowerSGD, the fraction of top-k, and the roundings of 8 and 16 bits."""
    for rank in (1, 3):
        found, exact = compressed(first, f"powersgd:{rank}", POWER_SGD_WARMUP_STEPS)
        own, full = (int(torch.linalg.matrix_rank(one.double(), rtol=1e-4)) for one in (found, exact))
        assert own == rank < full, (own, rank, full)
    for fraction, count in ((0.05, 39), (0.25, 192)):  # of 768
        found, exact = compressed(first, f"topk:{fraction}", REBUILD_STEPS)
        largest = exact.abs().flatten().topk(count).indices
        assert int(found.count_nonzero()) == count, (fraction, int(found.count_nonzero()))
        torch.testing.assert_close(found.flatten()[largest], exact.flatten()[largest], rtol=1e-5, atol=0)
    for gradients, least, most in (
        ("fp32", 0.0, 1e-6),
        ("fp16", 1e-4, 2**-10),
        ("bf16", 1e-3, 2**-7),
        ("int8", 1e-3, 2 / 127),
    ):
        found, exact = compressed(first, gradients, REBUILD_STEPS)
        scale = exact.abs().max() if gradients == "int8" else exact.abs().clamp_min(1e-4)
        error = float(((found - exact).abs() / scale).max())
        assert least <= error <= most, (gradients, error)


def sync_limits(first: Job) -> None:
    """`--bucket`, `init(timeout_seconds=)` and `init(divergence_check_steps=)`."""
    job = job_with(first, bucket_bytes=3 << 20)
    assert job.prepare(Forward(make_model())).bucket_bytes_cap == 3 << 20
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 77
    job = job_with(first, divergence_check_steps=4)
    model, optimizer = job.prepare(model := make_model(), torch.optim.SGD(model.parameters(), LR))
    for step in range(9):
        with torch.no_grad():
            job.unwrap(model).weight.add_(float(step == 1) * job.rank)
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()


# -- mode local -------------------------------------------------------------------------------------------------------------


class LocalReference:
    """All ranks of local SGD and DiLoCo in one process, with a fragment per parameter if there are two."""

    def __init__(self, ranks: int, inner_steps: int, outer: OuterOptimizer) -> None:
        self.inner_steps, self.outer = inner_steps, outer
        self.common = values(make_model())
        self.ranks = [[one.clone() for one in self.common] for _ in range(ranks)]
        self.velocity: list[Any] = [None] * len(self.common)
        self.in_flight: dict[int, tuple[int, torch.Tensor]] = {}
        self.taken = 0

    def step(self, batches: Sequence[int]) -> None:
        self.taken += 1
        for rank, own in enumerate(self.ranks):
            parts = [gradient_of(own, batch, rank) for batch in batches]
            for parameter, *gradients in zip(own, *parts, strict=True):
                parameter -= LR * sum(gradients) / len(gradients)
        for number in range(len(self.common)):
            offset = number * self.inner_steps // 2 if self.outer.fragments == OUTER_FRAGMENTS else 0
            if number in self.in_flight and self.taken >= self.in_flight[number][0]:
                self.finish(number, own_share=0.5)
            if (self.taken - offset) % self.inner_steps == 0:
                ways = [self.common[number] - own[number] for own in self.ranks]
                self.in_flight[number] = self.taken + self.outer.overlap_steps, sum(ways) / len(ways)  # type: ignore[assignment]
                if not self.outer.overlap_steps:
                    self.finish(number, own_share=0.0)

    def finish(self, number: int, own_share: float) -> None:
        way = self.in_flight.pop(number)[1]
        before = self.velocity[number]
        self.velocity[number] = way if before is None else self.outer.momentum * before + way
        self.common[number] = self.common[number] - self.outer.lr * (way + self.outer.momentum * self.velocity[number])
        for own in self.ranks:
            own[number] = own_share * own[number] + (1 - own_share) * self.common[number]


def check_rounds(first: Job, steps: int, accumulate: int = 1, **settings: Any) -> None:
    job = job_with(first, mode="local", accumulate=accumulate, **settings)
    reference = LocalReference(job.world_size, settings["inner_steps"], settings.get("outer", OuterOptimizer()))
    model: Any = Forward(make_model())
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), LR))
    tolerance = 1e-12 if "gradients" not in settings else 2e-3
    for step in range(steps):
        batches = range(step * accumulate, (step + 1) * accumulate)
        for batch in batches:
            optimizer.zero_grad()
            model(batch, job.rank).backward()
            optimizer.step()
        reference.step(batches)
        assert_close(values(model), reference.ranks[job.rank], (step, settings), tolerance)
    if tolerance > 1e-6:  # the pseudo-gradients were rounded
        assert any(
            (one - other).abs().max() > 1e-7
            for one, other in zip(values(model), reference.ranks[job.rank], strict=True)
        )
    job.settle()


def local_rounds(first: Job) -> None:
    """`--inner-steps`, `--outer`, `--fragments`, `--overlap-steps`, `--accumulate` and `--gradients` of mode local, step by step."""
    average = OuterOptimizer(lr=1.0, momentum=0.0)
    check_rounds(first, 7, inner_steps=3, outer=average)
    check_rounds(first, 9, inner_steps=4)  # DiLoCo's 0.7 and 0.9
    check_rounds(first, 7, inner_steps=2, outer=OuterOptimizer(lr=0.5, momentum=0.0))
    check_rounds(first, 9, inner_steps=2, outer=OuterOptimizer(lr=0.9, momentum=0.4))
    check_rounds(first, 11, inner_steps=4, outer=OuterOptimizer(fragments=OUTER_FRAGMENTS))
    check_rounds(first, 11, inner_steps=4, outer=OuterOptimizer(overlap_steps=1))
    check_rounds(
        first, 14, inner_steps=5, outer=OuterOptimizer(lr=0.6, momentum=0.5, fragments=OUTER_FRAGMENTS, overlap_steps=3)
    )
    check_rounds(first, 5, accumulate=2, inner_steps=2, outer=average)
    check_rounds(first, 4, inner_steps=2, outer=average, gradients=parse_gradients("bf16"))


def local_rates(first: Job) -> None:
    """`scale_lr` and `warmup`: outer momentum scales with the ranks, an average does not."""
    check_rates(job_with(first, mode="local"), 1)
    check_rates(job_with(first, mode="local", outer=OuterOptimizer(lr=1.0, momentum=0.0)), first.world_size)


CHECKS = {"sync": (sync_steps, sync_rates, sync_compression, sync_limits), "local": (local_rounds, local_rates)}

if __name__ == "__main__":
    with distrib.init(timeout_seconds=77.0) as job:
        for check in CHECKS[sys.argv[1]]:
            check(job)
            job.print(f"{check.__name__}: as in plain torch")
