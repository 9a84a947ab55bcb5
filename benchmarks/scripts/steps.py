"""Time steps of emulated or real training, as ordered by benchmarks/prediction.py: `steps.py FOLDER`.

The script waits for `order-0.json`, `order-1.json`, ... in FOLDER, runs the cases of each and writes `answer-N.json`.
An empty order ends it. An emulated case sleeps for the time of a GPU and returns gradients of the given sizes. A real
case multiplies matrices on the CPU. A single rank measures the profile of each case, several ranks its step times.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from torch import nn

import distrib
from distrib.training.profiler import Profiler, ProfileRequest

WARM_STEPS = 2
"""Warm-up steps of a case that is timed again."""

PROFILE_WARMUP_STEPS, PROFILE_STEPS = 2, 10


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward; backward returns a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, layer: _Layer) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upper: torch.Tensor) -> Any:
        time.sleep(ctx.layer.backward_seconds)
        # A new tensor over old memory: autograd accepts it without a copy, as for a CPU beside a GPU.
        return upper, ctx.layer.kept.detach(), None


class _Layer(nn.Module):
    def __init__(self, elements: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.kept = torch.full((elements,), 1e-6)
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Sleep.apply(x, self.weight, self)
        return result


class _Idle(torch.optim.Optimizer):
    """An optimizer without computation, as on a CPU beside a GPU."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def build(case: dict[str, Any], *, alone: bool) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Build a case. `alone`: without parameter servers, which need an optimizer that they support."""
    torch.manual_seed(0)
    elements, count = case["elements"], len(case["elements"])
    model: nn.Module
    if case["real"]:
        width = int(elements[0] ** 0.5)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(count)))
        x = torch.rand(case["batch"], width)
    else:
        times = case["forward_seconds"] / count, case["backward_seconds"] / count
        model = nn.Sequential(*(_Layer(size, *times) for size in elements))
        x = torch.zeros(1, requires_grad=True)
    if case["real"] or (case["kind"] == "async" and not alone):
        return model, torch.optim.SGD(model.parameters(), lr=1e-9), x
    return model, _Idle(model.parameters()), x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def profile(case: dict[str, Any]) -> dict[str, Any]:
    """Measure the workload of a case with the profiler of `distrib-launch --profile`."""
    model, optimizer, x = build(case, alone=True)
    found: list[dict[str, Any]] = []
    profiler = Profiler(
        torch.device("cpu"),
        ProfileRequest(name=case["name"], warmup_steps=PROFILE_WARMUP_STEPS, steps=PROFILE_STEPS),
        lambda workload, _: found.append(msgspec.to_builtins(workload)),
    )
    profiler.watch(model)
    profiler.watch(optimizer)
    while not profiler.finished:
        step(model, optimizer, x)
    return found[0]


class Timed:
    """Cache of this job's cases, prepared at the first request."""

    def __init__(self, job: distrib.Job) -> None:
        self._job = job
        self._kept: dict[str, tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]] = {}

    def steps(self, case: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds of each step after warm-up, and the part of the time in which this machine's CPUs were busy."""
        settling = case["settling"] if case["kind"] == "async" else WARM_STEPS
        if case["name"] not in self._kept:
            model, optimizer, x = build(case, alone=False)
            self._kept[case["name"]] = (*self._job.prepare(model, optimizer), x)
            settling = case["settling"]
        self._job.barrier()
        for _ in range(settling):
            step(*self._kept[case["name"]])
        taken = []
        psutil.cpu_percent()  # the next call returns the mean since this one
        for _ in range(case["steps"]):
            begun = time.perf_counter()
            step(*self._kept[case["name"]])
            taken.append(time.perf_counter() - begun)
        busy = psutil.cpu_percent() / 100
        for _ in range(case["ending"]):
            step(*self._kept[case["name"]])
        self._job.barrier()
        return {"seconds": taken, "busy": busy}


def of_all(job: distrib.Job, own: dict[str, dict[str, Any]], answer: Path) -> dict[str, dict[str, Any]]:
    """Return the mean times over all ranks: with servers, each rank has its own pace."""
    answer.with_suffix(f".{job.rank}").write_text(json.dumps(own))
    job.barrier()
    ranks = [json.loads(answer.with_suffix(f".{rank}").read_text()) for rank in range(job.world_size)]
    return {
        name: {
            "seconds": [
                statistics.harmonic_mean(taken)
                for taken in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)
            ],
            "busy": statistics.fmean(rank[name]["busy"] for rank in ranks),
        }
        for name in own
    }


def orders(folder: Path) -> Any:
    """Yield the cases of each order and the path for their results, on every rank."""
    number = 0
    while True:
        order = folder / f"order-{number}.json"
        while not order.exists():
            time.sleep(0.1)
        cases: list[dict[str, Any]] = json.loads(order.read_text())
        if not cases:
            return
        yield cases, folder / f"answer-{number}.json"
        number += 1


def main() -> None:
    with distrib.init() as job:
        timed = Timed(job)
        for cases, answer in orders(Path(sys.argv[1])):
            if job.world_size == 1:
                found = {case["name"]: profile(case) for case in cases}
            else:
                found = of_all(job, {case["name"]: timed.steps(case) for case in cases}, answer)
            if job.is_main:
                part = answer.with_suffix(".part")
                part.write_text(json.dumps(found))
                part.rename(answer)


if __name__ == "__main__":
    main()
