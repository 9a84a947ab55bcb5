"""Time steps of one workload under several ways of averaging gradients, which take turns; rank 0 prints JSON.

    averaging_steps.py WORKLOAD --contenders ddp,ddp:4,ours,... --turns N --steps N [--backward SECONDS]

WORKLOAD: `tensors` (40 MiB in 10 tensors) and `resnet50` (its 161 gradients) emulate an accelerator: backward only
sleeps. `cnn` is a real CNN on the CPU (10 MB of gradients), `digits` that of the examples (0.4 MB).

A contender is `ddp`, `ddp:MIB` (DDP with that bucket), `ours`, `ours:FORMAT`, `flat` (ours without the hierarchy) or
`horovod`, which must be the only one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distrib
from distrib.strategy import Strategy, parse_gradients
from distrib.training.strategies.ddp import wrap_model

WARM_STEPS = 5
"""Warm-up steps. DDP rebuilds its buckets after the first step; Horovod knows its tensors by then."""
CUTTING_STEPS = 31
"""Steps after which distrib has chosen its bucket boundaries."""


class Layer(torch.autograd.Function):
    """A layer whose gradient is ready `seconds` after backward began, as on an accelerator."""

    begun = 0.0

    @staticmethod
    def forward(context, x, parameter, seconds, gradient):  # type: ignore[no-untyped-def]
        context.seconds, context.gradient = seconds, gradient
        return x.clone()

    @staticmethod
    def backward(context, grad):  # type: ignore[no-untyped-def]
        rest = Layer.begun + context.seconds - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        return grad, context.gradient.detach(), None, None


class Begin(torch.autograd.Function):
    """Marks the start of backward."""

    @staticmethod
    def forward(context, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(context, grad):  # type: ignore[no-untyped-def]
        Layer.begun = time.perf_counter()
        return grad


class Emulated(nn.Module):
    """Parameters of these shapes in forward order, whose layers take these seconds in backward."""

    def __init__(self, shapes: list[tuple[int, ...]], seconds: list[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.gradients = [torch.ones(shape) for shape in shapes]
        self.seconds = [sum(seconds[place:]) for place in range(len(seconds))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, gradient, seconds in zip(self.weights, self.gradients, self.seconds, strict=True):
            x = Layer.apply(x, weight, seconds, gradient)  # type: ignore[no-untyped-call]
        return Begin.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def tensors(backward_seconds: float) -> Emulated:
    return Emulated([(1 << 20,)] * 10, [backward_seconds / 10] * 10)


def resnet50(backward_seconds: float) -> Emulated:
    """Return ResNet-50's gradients (He et al. 2015) for 224 x 224 images; convolution time is proportional to work."""
    shapes: list[tuple[int, ...]] = []
    work: list[float] = []

    def convolution(inputs: int, outputs: int, kernel: int, size: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])
        work.extend([outputs * inputs * kernel**2 * size**2, 0, 0])

    convolution(3, 64, 7, 112)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            size = 56 >> stage
            wide = size * 2 if block == 0 and stage else size  # the stride is in the 3 x 3 convolution
            convolution(inputs, width, 1, wide)
            convolution(width, width, 3, size)
            convolution(width, 4 * width, 1, size)
            if block == 0:
                convolution(inputs, 4 * width, 1, size)
            inputs = 4 * width
    shapes += [(1000, 2048), (1000,)]
    work += [2048 * 1000, 0]
    return Emulated(shapes, [backward_seconds * part / sum(work) for part in work])


def cnn(_: float) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 64),
        *block(64, 128),
        *block(128, 256),
        nn.Flatten(),
        nn.Linear(4096, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def digits(_: float) -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
    import digits

    return digits.Cnn()


WORKLOADS: dict[str, Callable[[float], nn.Module]] = {
    "tensors": tensors,
    "resnet50": resnet50,
    "cnn": cnn,
    "digits": digits,
}
SAMPLES = {"cnn": (8, 3, 32, 32), "digits": (16, 1, 28, 28)}
"""Batch shapes of the workloads that compute."""


def step_of(contender: str, model: nn.Module, job: distrib.Job, samples: tuple[int, ...] | None) -> Callable[[], None]:
    """Return a function for one forward and backward, until every gradient is averaged."""
    torch.manual_seed(job.rank)
    x = torch.randn(samples) if samples else torch.zeros(1, requires_grad=True)
    kind, _, detail = contender.partition(":")
    if kind == "horovod":
        import horovod.torch as hvd

        hvd.init()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters()
        )

        def horovod_step() -> None:
            model(x).sum().backward()
            optimizer.synchronize()
            optimizer.zero_grad()

        return horovod_step
    wrapped: nn.Module
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=float(detail) if detail else None)  # type: ignore[arg-type]
    else:
        strategy = Strategy(
            gradients=parse_gradients(detail or "fp32"), all_reduce="flat" if kind == "flat" else "auto"
        )
        wrapped = wrap_model(model, job.device, job.world_size, find_unused_parameters=False, settings=strategy)

    def step() -> None:
        wrapped(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--contenders", default="ddp,ours")
    parser.add_argument("--backward", type=float, default=0.2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    names = options.contenders.split(",")
    with distrib.init() as job:
        make = WORKLOADS[options.workload]
        steps = {name: step_of(name, make(options.backward), job, SAMPLES.get(options.workload)) for name in names}
        for name, step in steps.items():
            for _ in range(CUTTING_STEPS if name.startswith(("ours", "flat")) else WARM_STEPS):
                step()
        seconds: dict[str, list[float]] = {name: [] for name in names}
        used = dict.fromkeys(names, 0.0)
        for _ in range(options.turns):
            for name, step in steps.items():
                ends, before = [], time.process_time()
                for _ in range(options.steps + 1):  # the first step of a turn synchronizes the ranks
                    step()
                    ends.append(time.perf_counter())
                used[name] += (time.process_time() - before) / (options.steps + 1) / options.turns
                taken = torch.tensor([b - a for a, b in itertools.pairwise(ends)])
                dist.all_reduce(taken)
                seconds[name] += (taken / job.world_size).tolist()
        if "horovod" in names:  # its thread may crash in MPI_Finalize
            import horovod.torch as hvd

            hvd.shutdown()
        model = make(options.backward)
        told = {
            "seconds": seconds,
            "cpu_seconds": used,
            "gradient_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            "backward_seconds": options.backward,
            "first_gradient_seconds": model.seconds[-1] if isinstance(model, Emulated) else 0.0,
        }
        job.print(json.dumps(told))


if __name__ == "__main__":
    main()
