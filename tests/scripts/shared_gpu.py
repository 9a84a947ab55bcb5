"""Train on the GPU of DISTRIB_DEVICE, which all ranks may share, and print parameter checksums.

`nan`: then train on nan inputs on rank 1 and print the error. `gloo`: send the GPU's tensors by Gloo. NCCL refuses
one GPU for two ranks of a host. Each rank therefore claims its own host.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib
from distrib.errors import TrainingError

if "gloo" in sys.argv:
    dist.is_nccl_available = lambda: False  # type: ignore[assignment]
os.environ["NCCL_HOSTID"] = f"host of rank {os.environ['OMPI_COMM_WORLD_RANK']}"


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 8, 8, generator=generator)
    labels = torch.randint(5, (64,), generator=generator)
    with distrib.init() as job:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
        model.to(job.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        loader = DataLoader(TensorDataset(images, labels), batch_size=8, pin_memory=job.device.type == "cuda")
        scaler = torch.amp.GradScaler(job.device.type, init_scale=1024.0)
        model, optimizer, loader, scaler = job.prepare(model, optimizer, loader, scaler)
        for _ in range(4):
            for x, y in loader:
                scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        job.settle()
        state = {name: value.double().sum().item() for name, value in job.unwrap(model).state_dict().items()}
        sums = job.all_reduce(torch.tensor([*state.values()], dtype=torch.float64), "mean").tolist()
        job.print(json.dumps({"state": state, "means": dict(zip(state, sums, strict=True))}))
        if "nan" not in sys.argv:
            return
        try:
            for x, y in loader:
                nn.functional.cross_entropy(model(x * (float("nan") if job.rank else 1.0)), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        except TrainingError as error:
            job.print(error)


if __name__ == "__main__":
    main()
