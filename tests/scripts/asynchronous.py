"""What asynchronous ranks do, each a lesson: `asynchronous.py NAME [ARGS]`. An assertion that fails, fails the rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 32), nn.ReLU(),
        nn.Linear(32, 4),
    )  # fmt: skip


def samples(count: int = 400) -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    images = torch.randn(count, 1, 8, 8, generator=made)
    return TensorDataset(images, images.mean((1, 2, 3)).mul(20).long().clamp(0, 3))


def fifty(job: distrib.Job, name: str, path: str) -> None:
    """50 steps with a schedule, two groups of parameters and weight decay; the parameters are saved."""
    torch.manual_seed(1 + job.rank)  # rank 0's parameters must count
    model = network()
    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(groups, 0.003, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    loader = DataLoader(samples(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    steps = 0
    while steps < 50:
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
            steps += 1
            if steps == 50:
                break
    job.save(path, model=model, optimizer=optimizer)


def main() -> None:
    with distrib.init() as job:
        globals()[sys.argv[1]](job, *sys.argv[2:])


if __name__ == "__main__":
    main()
