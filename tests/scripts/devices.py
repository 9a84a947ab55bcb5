"""Random generators on torch's default device: the CPU, or the GPU of `on_one_gpu.py`."""

import torch


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"
