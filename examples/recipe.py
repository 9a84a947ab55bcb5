"""Shared code of train_resnet50 and train_gpt2: options, precision, learning rate, throughput and MFU."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler

from distrib.cluster.hardware_catalog import find_gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parser(description: str | None, *, batch_size: int, lr: float, checkpoint: str) -> argparse.ArgumentParser:
    """Create a parser with the options of both scripts, and the defaults of one."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--batch-size", type=int, default=batch_size, help="samples of one rank in a batch")
    made.add_argument("--accumulate", type=int, default=1, help="batches in a step")
    made.add_argument("--lr", type=float, default=lr, help="the highest learning rate")
    made.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="precision of matrix products")
    made.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    made.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="loading processes")
    made.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    made.add_argument("--checkpoint", type=Path, default=Path(checkpoint), help="restored if it exists")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--smoke", action="store_true", help="a tiny model and little data, for a test on CPUs")
    return made


def parse(options: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse the command line. With `--smoke`, `smoke` has the defaults of options that are not given."""
    if options.parse_args().smoke:
        options.set_defaults(compile=False, workers=0, log_every=5, **smoke)
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    torch.backends.cudnn.benchmark = True
    return options.parse_args()


def autocast(args: argparse.Namespace, device: torch.device) -> torch.autocast:
    """Return the context in which the forward pass runs."""
    return torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "fp32")


def grad_scaler(args: argparse.Namespace, device: torch.device) -> torch.amp.GradScaler:
    """Return a GradScaler, which does nothing unless the precision is fp16."""
    return torch.amp.GradScaler(device.type, init_scale=2.0**14, enabled=args.dtype == "fp16")


def rate_factor(step: int, warmup_steps: int, steps: int, end: float) -> float:
    """Return the learning rate of a step as a fraction of the highest: a linear warm-up, then a cosine down to `end`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_cosine(optimizer: torch.optim.Optimizer, warmup_steps: int, steps: int, end: float = 0.0) -> LambdaLR:
    """Create the schedule of `rate_factor`, whose `step()` follows each step of the optimizer."""
    return LambdaLR(optimizer, lambda step: rate_factor(step, warmup_steps, steps, end))


class Shuffle(Sampler[int]):
    """Random order of `samples` samples, which follows from the seed and the epoch. Each pass is an epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        return iter(torch.randperm(self.samples, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as DistributedSampler does."""
        self.epoch = epoch


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the peak of a device in FLOP/s; None for CPUs and unknown GPUs."""
    return catalog_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def catalog_flops(gpu: str, dtype: str) -> float | None:
    """Return the peak of a GPU in distrib's hardware catalogue, in FLOP/s; None if it has no such GPU or type."""
    found = find_gpu(gpu)
    peaks = found.tflops if found else {}
    peak = peaks.get("tf32" if dtype == "fp32" and "tf32" in peaks else dtype)
    return peak.value * 1e12 if peak else None


class Meter:
    """Throughput of all ranks, and model FLOPs utilization (MFU): model FLOPs / peak of all GPUs (arXiv:2204.02311)."""

    def __init__(self, unit: str, flops_per_item: float, peak: float | None, ranks: int = 1) -> None:
        self.unit, self.flops_per_item, self.peak, self.ranks = unit, flops_per_item, peak, ranks
        self.batches = 0
        """Batches of this rank since the start of the script."""
        self.restart()

    def restart(self) -> None:
        """Begin a measurement, for example after an evaluation."""
        self.items, self.begin = 0, time.perf_counter()

    def add(self, items: int) -> None:
        """Count the items of one rank's batch."""
        self.items += items
        self.batches += 1

    def lap(self) -> dict[str, float]:
        """Return items per second of all ranks, and the MFU if the peak is known, since the last call."""
        rate = self.items * self.ranks / (time.perf_counter() - self.begin)
        self.restart()
        if not self.peak:
            return {f"{self.unit}_per_second": rate}
        return {f"{self.unit}_per_second": rate, "mfu": rate * self.flops_per_item / (self.peak * self.ranks)}


def line(metrics: dict[str, float]) -> str:
    """Write the metrics of a step: `step 20: loss 3.1416, lr 6.0e-04, 465,000 tokens/s, MFU 40.2%`."""
    formats = {"step": "step {:.0f}:", "loss": "loss {:.4f},", "lr": "lr {:.1e},", "mfu": "MFU {:.1%}"}
    rates = {name: "{:,.0f} " + name.replace("_per_second", "/s,") for name in metrics if name not in formats}
    return " ".join({**formats, **rates}[name].format(value) for name, value in metrics.items()).rstrip(",")


def save(path: Path, **objects: Any) -> None:
    """Write a checkpoint of a single process, as `job.save` does for a job."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save({name: _state(thing) for name, thing in objects.items()}, partial)
    partial.replace(path)


def restore(path: Path, **objects: Any) -> dict[str, Any]:
    """Load a checkpoint of a single process if it exists. Return the plain values, by default those of `objects`."""
    plain = {name: thing for name, thing in objects.items() if _state(thing) is thing}
    if not path.exists():
        return plain
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, thing in objects.items():
        if isinstance(thing, DataLoader):
            thing.sampler.set_epoch(saved[name]["epoch"])
        elif name not in plain:
            thing.load_state_dict(saved[name])
    print(f"restored {path}", flush=True)
    return {name: saved[name] for name in plain}


def _state(thing: Any) -> Any:
    if isinstance(thing, DataLoader):
        return {"epoch": thing.sampler.epoch}
    return thing.state_dict() if hasattr(thing, "state_dict") else thing
