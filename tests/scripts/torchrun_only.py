"""Run as a script for torchrun: `env://`, LOCAL_RANK, and no arguments."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {local_rank} of {local_world_size}: {value.item():g}"
)
dist.destroy_process_group()
