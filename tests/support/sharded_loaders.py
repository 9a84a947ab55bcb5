"""Sharded loaders of single ranks, without a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from distrib.training import ShardedLoader
from distrib.training.data.epoch import StepClock
from distrib.training.data.sharded_loader import LoaderContext


def sharded(
    loader: DataLoader[Any], rank: int, ranks: int, trains: bool | None = True, **options: Any
) -> ShardedLoader:
    """Return a loader of a job with no components except `options`."""
    seed = options.pop("seed", 5)
    context: dict[str, Any] = {
        "device": torch.device("cpu"), "is_training": lambda: trains, "clock": StepClock(lambda: None),
        "set_batch_samples": lambda own, every: (own, every),
    }  # fmt: skip
    return ShardedLoader(loader, LoaderContext(rank=rank, ranks=ranks, **{**context, **options}), seed=seed)


def read(loader: ShardedLoader) -> list[list[int]]:
    return [[int(x) for x in batch] for batch in loader]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [x for batch in batches for x in batch]
