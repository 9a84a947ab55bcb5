"""Runs another script on ranks that share a GPU: `on_one_gpu.py SCRIPT [ARGS]`.

NCCL gives no GPU to two ranks of one host: each says that it is a host of its own, and they talk by sockets. Tensors that the
script makes without saying where come to be on the GPU.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # a launcher was told to leave GPUs alone, as it gives none to two ranks
os.environ["DISTRIB_DEVICE"] = "cuda:0"
os.environ["NCCL_HOSTID"] = f"host of rank {os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('RANK')}"
torch.set_default_device("cuda:0")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
