"""Train 20 steps on ordered, then on shuffled samples, and save parameters: `truth.py FOLDER BATCH_SIZE SAMPLES`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(samples, 10, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def train(job: distrib.Job, out: Path, batch_size: int, samples: int, *, shuffle: bool) -> None:
    model = make_model()
    if job.rank > 0:  # the parameters of rank 0 must win
        torch.nn.init.zeros_(model[0].weight)  # type: ignore[index,arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(make_data(samples), batch_size, shuffle=shuffle, generator=generator)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    steps = 0
    while steps < 20:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps == 20:
                break
    job.save(out, model=model, steps=steps)
    job.print(f"{job.world_size} ranks, {steps} steps")


if __name__ == "__main__":
    folder, batch_size, samples = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with distrib.init() as job:
        train(job, folder / "in order.pt", batch_size, samples, shuffle=False)
        train(job, folder / "shuffled.pt", batch_size, samples, shuffle=True)
