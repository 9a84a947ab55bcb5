"""Overhead of distrib on one GPU, and accuracy of its probe against torch's own timed copies.

    python benchmarks/gpu.py train [--batch 256] [--size 224]
    python benchmarks/gpu.py copies

`train` measures whole steps of ResNet-50 in bf16 and channels last with SGD. The contenders alternate in one process:
DistributedDataParallel over NCCL with one rank; `job.prepare`, which does not wrap the model of a single rank; and
`job.prepare` with the wrapper of several ranks. `train --device cpu --batch 2 --size 32` runs without a GPU.

`copies` moves 64 MiB from and to pinned memory and inside the GPU, in turns by the probe and by the loop here. Both
print the machine and its software.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import distrib
from distrib.probe.bench import intra_node
from distrib.training.strategies.ddp import DdpStrategy, wrap_model

COPY_BYTES = 64 << 20
COPIES, ROUNDS = 20, 15


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with a residual connection."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.way = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.by: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.by = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.way(x) + self.by(x), inplace=True)


def resnet50() -> nn.Sequential:
    """Return ResNet-50 (arXiv:1512.03385), stride in the 3 x 3 convolutions: 25,557,032 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Images(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A constant random batch on the device, to exclude data loading from the comparison."""

    def __init__(self, batch: int, size: int, device: torch.device) -> None:
        images = torch.randn(batch, 3, size, size, device=device)
        self.batch = images.to(memory_format=torch.channels_last), torch.randint(1000, (batch,), device=device)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.batch


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> Callable[[], None]:
    def step() -> None:
        images, labels = next(batches)
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


class Wrapping(DdpStrategy):
    """Wraps the model of a single rank, too."""

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        options = {"find_unused_parameters": find_unused_parameters, "settings": self.settings}
        wrapped = wrap_model(model, self.device, 2, **options)  # type: ignore[arg-type]
        assert isinstance(wrapped, DistributedDataParallel)
        self.adopt_ddp_model(wrapped)
        return wrapped


def train(options: argparse.Namespace) -> None:
    with distrib.init() as job:
        device = torch.device(options.device) if options.device else job.device
        cuda = device.type == "cuda"
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device if cuda else None
        )

        def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
            torch.manual_seed(0)
            model = resnet50().to(device, memory_format=torch.channels_last)
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-5)
            return model, optimizer, DataLoader(Images(options.batch, options.size, device), batch_size=None)

        model, optimizer, loader = make()
        ddp = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
        contenders = {f"DDP/{backend}": steps_of(ddp, optimizer, iter(loader))}
        for name, on_nan in (("distrib", "raise"), ("distrib, on_nan=ignore", "ignore")):
            model, optimizer, loader = job.prepare(*make(), on_nan=on_nan)
            contenders[name] = steps_of(model, optimizer, iter(loader))
        strategy = Wrapping(job._strategy.settings, job._strategy.world, device)
        job._preparer._strategy = job._state.strategy = strategy
        model, optimizer, loader = job.prepare(*make())
        assert isinstance(model, DistributedDataParallel)
        # Several ranks also identify the rank of a nan.
        stepper = job._state.steppers[-1]
        stepper._nan_guard._averaged = True
        stepper.pair(job._state.models)
        contenders["distrib, wrapped"] = steps_of(model, optimizer, iter(loader))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.turns + 1):
            for name, step in contenders.items():
                for _ in range(5 if turn else 20):
                    step()
                _wait(device)
                begun = time.perf_counter()
                for _ in range(options.steps):
                    step()
                _wait(device)
                if turn:
                    seconds[name].append((time.perf_counter() - begun) / options.steps)
    print(
        f"\nResNet-50, bf16, channels last, {options.batch} images of {options.size} x {options.size}; {_machine(device)}"
    )
    print(f"{'':24}{'ms a step':>10}{'quartiles':>18}{'images/s':>10}{'time of DDP':>22}")
    base = next(iter(seconds.values()))
    for name, taken in seconds.items():
        low, median, high = statistics.quantiles(taken, n=4)
        least, ratio, most = statistics.quantiles([a / b for a, b in zip(taken, base, strict=True)], n=4)
        print(
            f"{name:24}{1e3 * median:10.2f}{1e3 * low:9.2f}{1e3 * high:9.2f}{options.batch / median:10.0f}"
            f"{ratio:8.4f} ({least:.4f}-{most:.4f})"
        )


def copies() -> None:
    device = torch.device("cuda", 0)
    pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    one, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    gpu = next(
        link.source for link in intra_node.measure_host("here", 0.05)[0] if link.source != "memory"
    )  # the first visible GPU
    ways = {("memory", gpu): (one, pinned), (gpu, "memory"): (pinned, one), (gpu, gpu): (other, one)}
    own: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    probed: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        links, problems = intra_node.measure_host("here", 0.2)
        if problems:
            sys.exit(f"the probe could not measure all: {', '.join(problems)}")
        for link in links:
            if (link.source, link.target) in probed:
                probed[link.source, link.target].append(link.bandwidth_bytes_per_second)
        for way, (target, source) in ways.items():
            own[way].append(_timed(target, source))
    print(f"\n{COPY_BYTES >> 20} MiB; {_machine(device)}")
    print(f"{'':20}{'probe GB/s':>12}{'torch GB/s':>12}{'ratio':>8}{'quartiles':>18}")
    for way in ways:
        least, ratio, most = statistics.quantiles([a / b for a, b in zip(probed[way], own[way], strict=True)], n=4)
        rates = (statistics.median(values) / 1e9 for values in (probed[way], own[way]))
        print(
            f"{' to '.join(way):20}"
            + "".join(f"{rate:12.2f}" for rate in rates)
            + f"{ratio:8.3f}{least:9.3f}{most:9.3f}"
        )


def _timed(target: torch.Tensor, source: torch.Tensor) -> float:
    """Return bytes per second of consecutive copies, timed by events."""
    target.copy_(source, non_blocking=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return COPIES * COPY_BYTES / (begin.elapsed_time(end) / 1e3)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "none"
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "copies"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a turn")
    parser.add_argument("--device", help="such as cuda:0 or cpu (default: the first GPU)")
    options = parser.parse_args()
    if options.what == "train":
        train(options)
    elif torch.cuda.is_available():
        copies()
    else:
        sys.exit("no GPU here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
