"""Train with a checkpoint in the working directory: `restarts.py EPOCHS [START:RANK:EPOCH:WHAT ...]`.

WHAT is the text of an error, or `wait`. The script prints a line per epoch, and checksums of its parameters.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import distrib

epochs, *orders = sys.argv[1:]

with distrib.init() as job:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    model, optimizer, loader = job.prepare(
        model := nn.Linear(8, 1),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        DataLoader(data, 4, shuffle=True),
    )
    torch.manual_seed(1 + job.rank)  # noise of each rank, which continues after a restart
    first = job.restore("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=0)["epoch"]
    job.print(f"start {job.restarts} of {job.world_size} ranks from epoch {first}")
    for epoch in range(first, int(epochs)):
        for x, y in loader:
            nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.save("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch + 1)
        job.barrier()
        job.print(f"epoch {epoch} is done")
        for order in orders:
            start, rank, when, what = order.split(":")
            if (job.restarts, job.rank, epoch) == (int(start), int(rank), int(when)):
                if what == "wait":
                    time.sleep(60)
                raise RuntimeError(what)
    job.print("parameters", [round(float(p.detach().double().sum()), 6) for p in job.unwrap(model).parameters()])
