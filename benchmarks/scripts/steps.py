"""Steps of emulated or real training, timed, as benchmarks/prediction.py orders them: `steps.py FOLDER`.

Waits for `order.json` in FOLDER, carries its cases out and answers in `answer.json`, until an order is empty. An emulated case sleeps where a GPU would compute and hands out gradients of the sizes asked for; a real one multiplies
matrices on the CPU. Alone it measures the profile of each case, with other ranks the time of its steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distrib

SETTLING_STEPS = 5
"""In which DDP puts its buckets into order, and distrib cuts the stream of gradients into pieces."""


class _Sleep(torch.autograd.Function):
    """Nothing forward; backward takes its time, then there is a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, kept: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.kept, ctx.seconds = kept, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upper: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        # A new tensor over old memory: autograd takes it as it is, and nothing is computed, as on a CPU beside a GPU.
        return upper, ctx.kept.detach(), None, None


class Emulated(nn.Module):
    def __init__(self, elements: list[int], forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(count)) for count in elements])
        self.kept = [torch.full((count,), 1e-6) for count in elements]
        self.forward_seconds, self.each = forward_seconds, backward_seconds / len(elements)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_seconds)
        for parameter, kept in zip(self.parts, self.kept, strict=True):
            x = _Sleep.apply(x, parameter, kept, self.each)
        return x


class Real(nn.Module):
    """Square layers; each element of a parameter is used once for every sample."""

    def __init__(self, elements: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(int(count**0.5), int(count**0.5), bias=False) for count in elements])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def build(case: dict[str, Any]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if case["real"]:
        width = int(case["elements"][0] ** 0.5)
        return Real(case["elements"]), torch.rand(case["batch"], width)
    model = Emulated(case["elements"], case["forward_seconds"], case["backward_seconds"])
    return model, torch.zeros(1, requires_grad=True)


def profile(model: nn.Module, x: torch.Tensor, repetitions: int) -> dict[str, Any]:
    """Medians of forward and backward, and when each gradient was ready."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    ready: dict[str, list[float]] = {name: [] for name in names.values()}
    begun = 0.0

    def note(parameter: torch.Tensor) -> None:
        ready[names[parameter]].append(time.perf_counter() - begun)

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in names]
    forward, backward, clear = [], [], []
    for step in range(repetitions + 2):
        if step == 2:
            forward, backward, clear = [], [], []
            ready = {name: [] for name in ready}
        first = time.perf_counter()
        loss = model(x).sum()
        begun = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        model.zero_grad()
        clear.append(time.perf_counter() - ended)
        forward.append(begun - first)
        backward.append(ended - begun)
    for handle in handles:
        handle.remove()
    median = torch.median
    gradients = [
        {"name": name, "elements": parameter.numel(), "size_bytes": parameter.numel() * 4,
         "ready_seconds": float(median(torch.tensor(ready[name])))}
        for parameter, name in names.items()
    ]  # fmt: skip
    gradients.sort(key=lambda gradient: gradient["ready_seconds"])
    whole = torch.tensor([f + b + c for f, b, c in zip(forward, backward, clear, strict=True)])
    return {
        "forward_seconds": float(median(torch.tensor(forward))),
        "backward_seconds": float(median(torch.tensor(backward))),
        "optimizer_seconds": float(median(torch.tensor(clear))),
        "variation": float(whole.std() / whole.mean()),
        "gradients": gradients,
    }


def timed(model: nn.Module, x: torch.Tensor, case: dict[str, Any]) -> list[float]:
    """Seconds of each step; the first ones are left out."""
    taken = []
    for _ in range(case["steps"] + SETTLING_STEPS):
        begun = time.perf_counter()
        model(x).sum().backward()
        model.zero_grad()
        taken.append(time.perf_counter() - begun)
    return taken[SETTLING_STEPS:]


def next_order(folder: Path) -> list[dict[str, Any]]:
    """The cases of the next order, once it is there; taken away when it is read."""
    order = folder / "order.json"
    while not order.exists():
        time.sleep(0.2)
    cases: list[dict[str, Any]] = json.loads(order.read_text())
    order.unlink()
    return cases


def main() -> None:
    folder = Path(sys.argv[1])
    with distrib.init() as job:
        while True:
            told: list[Any] = [next_order(folder) if job.is_main else None]
            if job.world_size > 1:
                torch.distributed.broadcast_object_list(told, src=0)
            if not told[0]:
                return
            found: dict[str, Any] = {}
            for case in told[0]:
                model, x = build(case)
                if job.world_size == 1:
                    found[case["name"]] = profile(model, x, case["steps"])
                else:
                    model = job.prepare(model)
                    job.barrier()
                    found[case["name"]] = timed(model, x, case)
                del model
            if job.is_main:
                part = folder / "answer.part"
                part.write_text(json.dumps(found))
                part.rename(folder / "answer.json")


if __name__ == "__main__":
    main()
