"""Connect two ranks by NCCL; after some steps the second follows its argument: `beside_nccl.py kill|raise|sleep`.

`measure`: measure all-reduces as the probe does, each rank as its own host, and print them.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import distrib
from distrib.probe.bench.allreduce import AllReduceBenchmark
from distrib.probe.protocol import AllReduceTask
from distrib.training.world import find_world


def train(order: str) -> None:
    with distrib.init() as job:
        model = nn.Linear(64, 64)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        for step in range(10**6):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                job.print(f"loss {loss.item():.4f}")
            if step == 20 and job.rank == 1:
                if order == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if order == "raise":
                    raise ValueError("a bug")
                time.sleep(1000)


def measure() -> None:
    comm = find_world().comm
    from mpi4py import MPI  # imported late, as the import initializes MPI

    ranks = AllReduceBenchmark(comm, f"n{comm.rank + 1}", 60.0)
    sizes = (1 << 10, 1 << 18, 1 << 24)
    task = AllReduceTask(number=0, host_counts=(2,), gpudirect=None, sizes=sizes, seconds=10.0, timeout_seconds=60.0)
    found = ranks.measure(task)
    if found:
        print(msgspec.json.encode(found).decode(), flush=True)
    dist.destroy_process_group()
    MPI.Finalize()


if __name__ == "__main__":
    measure() if sys.argv[1] == "measure" else train(sys.argv[1])
