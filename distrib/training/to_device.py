"""Recursive copy of batches and other nested objects to a device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence


def move_to_device(
    batch: Any, device: torch.device, which: Callable[[torch.Tensor], bool] = lambda tensor: True
) -> Any:
    """Copy the tensors of a batch to a device. Pinned tensors are copied asynchronously.

    Args:
        batch: Tensors in tuples, lists, mappings and dataclasses. An object with a `to` of its own, such as a graph, is moved by it.
        device: The target.
        which: Selects tensors (default: all).

    Returns:
        The batch with these tensors on the device. Anything else is the same object.
    """

    def one(value: Any) -> Any:
        return move_to_device(value, device, which)

    if isinstance(batch, torch.Tensor):
        if not which(batch):
            return batch
        leaves = device.type == "cuda" and batch.device.type == "cpu"
        return batch.to(device, non_blocking=leaves and _is_pinned(batch))
    if isinstance(batch, PackedSequence):
        return batch.to(device, non_blocking=_is_pinned(batch))  # type: ignore[arg-type]
    if type(batch) is dict:
        return {key: one(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(one, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(one, batch))
    # The class of a mapping: its attributes may be keys.
    where = type(batch) if isinstance(batch, MutableMapping) else batch
    if callable(getattr(where, "to", None)) and not isinstance(batch, (type, nn.Module)):
        # Some have no non_blocking, and some `to` methods take no device.
        for words in ({"non_blocking": True}, {}):
            with contextlib.suppress(TypeError):
                there = batch.to(device, **words)
                return batch if there is None else there
        return batch
    if isinstance(batch, MutableMapping):
        mapping = copy.copy(batch)
        for key, value in batch.items():
            mapping[key] = one(value)
        return mapping
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, one(getattr(batch, field.name)))  # also where it is frozen
        return changed
    return batch


def _is_pinned(batch: torch.Tensor | PackedSequence) -> bool:
    with contextlib.suppress(RuntimeError, TypeError):  # some tensor types do not support it, such as masked tensors
        return batch.is_pinned()
    return False
