"""Run a DDP job over Gloo with plain torch, in which some ranks deviate: `gloo.py RANK:WHAT [RANK:WHAT ...]`."""

import os
import sys
import time

import torch
import torch.distributed as dist

orders = dict(item.split(":", 1) for item in sys.argv[1:])


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(120)
        return torch.ones(1)


dist.init_process_group("gloo")
order = orders.get(str(dist.get_rank()), "")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(10**9 if orders else 5):
    if step == 3 and order == "raise":
        raise ValueError("a bad batch")
    if step == 3 and order == "kill":
        os.kill(os.getpid(), 9)
    if step == 3 and order == "loader":
        next(iter(torch.utils.data.DataLoader(Slow())))
    model(torch.ones(2, 4)).sum().backward()
    if step == 2:
        print("three steps done", flush=True)
    time.sleep(0.01)
dist.destroy_process_group()
