"""Let two ranks read datasets and samplers that differ between them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, Subset, TensorDataset, random_split

import distrib
from distrib.errors import TrainingError

NUMBERS = torch.arange(24.0)[:, None]


class Sharing(Sampler[int]):
    """A rank's shard by its own arithmetic, as in timm and torchvision."""

    def __init__(self, rank: int, replicas: int) -> None:
        self.rank, self.num_replicas, self.epoch = rank, replicas, -1

    def __len__(self) -> int:
        return len(NUMBERS) // self.num_replicas

    def __iter__(self):
        yield from range(self.rank, len(NUMBERS), self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Drawn(Sampler[int]):
    """A sampler with its own random numbers."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __iter__(self):
        yield from np.random.default_rng().permutation(len(NUMBERS)).tolist()


class Files(Dataset[torch.Tensor]):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.names[index][-2:])])


job = distrib.init()


def seen(loader) -> list[int]:
    """Return the samples that all ranks have read in an epoch, in order."""
    model, optimizer = nn.Linear(1, 1), None
    model = job.prepare(model)
    optimizer = job.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    read = torch.zeros(len(NUMBERS))
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        for number in batch[:, 0].long():
            read[number] += 1
    return [int(count) for count in job.all_reduce(read, "sum")]


once = [1] * len(NUMBERS)
loaded = TensorDataset(NUMBERS)

# The same files in another folder, numbers with other rounding, and a seeded split are accepted.
rounded = NUMBERS.repeat(1, 3) * (1 + 1e-7 * job.rank)
files = [f"/data{job.rank}/{number:02}" for number in range(24)]
job.prepare(DataLoader(TensorDataset(rounded)), DataLoader(Files(files)), DataLoader(range(9)))
torch.manual_seed(3)
for part in random_split(loaded, [20, 4]):
    job.prepare(DataLoader(part))

# A sampler with random numbers per rank causes a warning at the job's first step.
assert seen(job.prepare(DataLoader(loaded, batch_size=3, sampler=Drawn()))) != once

# A sampler that shards samples itself is accepted.
loader = job.prepare(DataLoader(loaded, batch_size=3, sampler=Sharing(job.rank, 2)))
loader.sampler.set_epoch(7)
assert seen(loader) == once
batches = BatchSampler(Sharing(job.rank, 2), 3, drop_last=False)
loader = job.prepare(DataLoader(loaded, batch_sampler=batches))
assert seen(loader) == once
assert loader.batch_sampler is batches and batches.sampler.epoch == 0
try:
    job.prepare(DataLoader(loaded, batch_size=3, sampler=Sharing(0, 3)))
    raise AssertionError
except TrainingError as error:
    assert "Sharing shards for 3 rank(s), expected 2" in str(error)

# Different subsets are refused.
split = random_split(loaded, [20, 4], torch.Generator().manual_seed(job.rank))
slices = [loaded, Subset(Files([f"{number:02}" for number in range(24)]), range(job.rank, len(NUMBERS), 2))]
for parts in (split, slices):
    try:
        job.prepare(*map(DataLoader, parts))
        raise AssertionError
    except TrainingError as error:
        job.print(f"refused: {error}")
