"""Run another script on ranks that share a GPU: `on_one_gpu.py SCRIPT [ARGS]`.

NCCL refuses one GPU for two ranks of a host. Each rank therefore claims its own host, and NCCL uses sockets. Tensors
without an explicit device are on the GPU.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # the launcher hid the GPUs, as it assigns none to two ranks
os.environ["DISTRIB_DEVICE"] = "cuda:0"
os.environ["NCCL_HOSTID"] = f"host of rank {os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('RANK')}"
torch.set_default_device("cuda:0")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
