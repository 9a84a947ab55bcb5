"""Synchronous training: every rank holds the whole model, and gradients are averaged in each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def synchronous(model: nn.Module, device: torch.device, ranks: int, *, find_unused_parameters: bool) -> nn.Module:
    """`model` on `device`, in torch's DistributedDataParallel where there are other ranks to agree with.

    Every rank begins with the parameters of rank 0. A model that learns nothing is moved only.
    """
    model = model.to(device)
    if ranks == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    gpus = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=gpus, find_unused_parameters=find_unused_parameters)


def unwrapped(thing: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile's wrapper; anything else as it is."""
    while isinstance(thing, nn.Module):
        compiled = thing._modules.get("_orig_mod")  # to import torch.compile's own class takes most of a second
        inner = thing.module if isinstance(thing, DistributedDataParallel) else compiled
        if inner is None:
            break
        thing = inner
    return thing


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Moves the optimizer's state, where it has some already, to the devices of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
