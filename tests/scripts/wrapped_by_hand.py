"""Wrap models by hand on two ranks: DistributedDataParallel, its join(), and FSDP."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distrib
from distrib.errors import TrainingError

job = distrib.init()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def refused(words: str, *things: object, steps: int = 0, **options: object) -> None:
    try:
        model, optimizer = job.prepare(*things, **options)
        with model.join():
            train(model, optimizer, steps)
        raise AssertionError(words)
    except TrainingError as error:
        assert words in str(error), error


# No warning is expected, though each rank trains its own model.
own = DistributedDataParallel(nn.Linear(4, 1))
train(own, torch.optim.SGD(own.parameters(), lr=0.1), 1)
sharded = fully_shard(nn.Linear(4, 1))
optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
train(sharded, optimizer, 1)
refused("the parameters of FSDPLinear are sharded", sharded, optimizer)

# The result equals DDP's, and no divergence warning is expected.
torch.manual_seed(2)
ours, theirs = nn.Linear(4, 1), DistributedDataParallel(nn.Linear(4, 1))
theirs.module.load_state_dict(ours.state_dict())
model, optimizer = job.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
with model.join():
    train(model, optimizer, 3 + 4 * job.rank)
with theirs.join():
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 3 + 4 * job.rank)
assert torch.allclose(ours.weight, theirs.module.weight, atol=1e-6)

for words, model, options in (
    ("rank 0 sends the model's buffers", nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), {}),
    ("the ranks compare their batches", nn.Linear(4, 1), {"accumulate": 2}),
):
    refused(words, model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4, **options)
job.accumulate(1)  # applies to all prepared optimizers
print("all is well")
