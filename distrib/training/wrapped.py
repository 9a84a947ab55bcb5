"""DistributedDataParallel that the rest of a script does not notice: the model's own attributes, names and files."""

from __future__ import annotations

import copy
import typing
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distrib.bandwidth.buckets import plain_bytes

_INSIDE = "module."
"""What DistributedDataParallel puts before the names of what is in it."""


class Wrapped(DistributedDataParallel):
    """A model whose gradients torch averages, and which else is for a script what it was before.

    - `model.config`, `model.generate(...)`, `model[0]`, `model.dropout = 0.1` are the model's own. What
      DistributedDataParallel has itself (`device`, `dim`, `module`, `train`) is its own.
    - `state_dict` has the names of before, so that what is trained on many GPUs is read on one; `load_state_dict` takes them,
      and those of DistributedDataParallel.
    - A file of `torch.save(model)` holds the model alone: to read it needs no ranks.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        size = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        # torch.compile reads this, and parts a model where a bucket ends: it refuses small ones, and many parts are slow ones.
        self.bucket_bytes_cap = max(self.bucket_bytes_cap, plain_bytes(size))
        self._made = True

    @property
    def hidden(self) -> list[str]:
        """What the model has, too, under names that are DistributedDataParallel's here."""
        own = {*vars(self), *self._modules} - {*vars(nn.Module()), "device"}  # which is the same
        return sorted(name for name in own if not name.startswith("_") and hasattr(self.module, name))

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return self.module.state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        return self.module.load_state_dict(self._with_names_of_before(state_dict, ""), *arguments, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """What torch calls where this is a part of the module that is loaded."""
        plain = self._with_names_of_before({name: state_dict.pop(name) for name in [*state_dict]}, prefix)
        state_dict.update({prefix + _INSIDE + name.removeprefix(prefix): value for name, value in plain.items()})
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _with_names_of_before(self, state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        """`state`, whose names begin with `prefix`, as it is without DistributedDataParallel."""
        inside = prefix + _INSIDE
        if hasattr(self.module, "module") or not all(name.startswith(inside) for name in state):
            return state
        return {prefix + name.removeprefix(inside): value for name, value in state.items()}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not self._is_made:
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or not self._is_made or self._is_own(name) or not hasattr(self.module, name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapped:
        """One more whose gradients are averaged: a copy may be trained, too."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        del state["_made"]
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        twin._made = True
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return typing.cast, (None, self.module)  # gives back the second; found also where nobody has distrib

    @property
    def _is_made(self) -> bool:
        """Whether torch has set it up: before, what is set is DistributedDataParallel's, whatever the model has of that name."""
        return "_made" in self.__dict__

    def _is_own(self, name: str) -> bool:
        return any(name in own for own in (self.__dict__, self._parameters, self._buffers, self._modules)) or hasattr(
            type(self), name
        )
