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
        The batch with these tensors on the device. An object in which nothing is moved is returned itself.
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
    if isinstance(batch, (list, tuple)):
        items = [one(item) for item in batch]
        if all(there is item for there, item in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
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
        values = dict(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if hasattr(batch, f.name)}
    else:
        return batch
    moved = {name: there for name, value in values.items() if (there := one(value)) is not value}
    if not moved:
        return batch
    changed = copy.copy(batch)
    for name, value in moved.items():
        if isinstance(batch, MutableMapping):
            changed[name] = value
        else:
            object.__setattr__(changed, name, value)  # also where it is frozen
    return changed


def _is_pinned(batch: torch.Tensor | PackedSequence) -> bool:
    with contextlib.suppress(RuntimeError, TypeError):  # some tensor types do not support it, such as masked tensors
        return batch.is_pinned()
    return False
