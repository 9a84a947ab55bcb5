"""Trains 50 steps with plain DDP and with ours: `same_as_ddp.py`. Fails where parameters differ by more than 1e-6."""

from __future__ import annotations

import copy
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distrib
from distrib.strategy import from_environment
from distrib.training.gradients.hook import Averaging, attach


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 700), nn.Tanh(), nn.Linear(700, 3))


def trained(wrapped: nn.Module, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for _ in range(50):
        inputs = torch.randn(8, 40, generator=generator)
        targets = torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


with distrib.init() as job:
    first = model()
    ours = DistributedDataParallel(copy.deepcopy(first), bucket_cap_mb=0.1)
    # Hosts that are not there: `0,0,1` puts ranks 0 and 1 on one, rank 2 on another.
    hosts = os.environ.get("SAME_HOSTS")
    strategy = from_environment(os.environ)
    averaging = Averaging(list(first.parameters()), strategy, hosts.split(",") if hosts else None)
    attach(ours, averaging)
    theirs = trained(DistributedDataParallel(copy.deepcopy(first)), job.rank)
    mine = trained(ours, job.rank)
    difference = max(float((a - b).abs().max()) for a, b in zip(theirs, mine, strict=True))
    moved = max(
        float((a - b).abs().max()) for a, b in zip(theirs, [p.detach() for p in first.parameters()], strict=True)
    )
    assert moved > 0.01, moved
    job.print(f"difference {difference:.2e} hierarchical {averaging.hierarchical} pieces {len(averaging.ends)}")
    if strategy.exact:
        assert difference <= 1e-6, difference
