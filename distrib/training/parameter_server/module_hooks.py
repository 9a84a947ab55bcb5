"""Hooks of modules that leave no trace: what is copied or saved of a module, as by torch.save(model), has none of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo


class Hook:
    """What a module calls, and no copy of it."""

    def __init__(self, owner: nn.Module, work: Callable[..., None]) -> None:
        self._owner, self._work = owner, work

    @_disable_dynamo  # torch.compile would read on into it, and say at length what it cannot compile there
    def __call__(self, module: nn.Module, *told: Any) -> None:
        if module is self._owner:
            self._work(module, *told)


_HOOKS = (
    *("_forward_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Where torch keeps them in a module."""
_REDUCE = "__reduce_ex__"


def _without_hooks(module: nn.Module, protocol: Any) -> Any:
    reduced = type(module).__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {name: value for name, value in reduced[2].items() if name != _REDUCE}
    for name in _HOOKS:
        kept = [pair for pair in state.get(name, {}).items() if not isinstance(getattr(pair[1], "hook", pair[1]), Hook)]
        state[name] = OrderedDict(kept)
    return (*reduced[:2], state, *reduced[3:])


def leave_no_trace(module: nn.Module, before: Callable[[], None]) -> None:
    """From now on `before` is called when `module` is copied or saved, and its hooks stay behind."""

    def reduced(protocol: Any) -> Any:
        before()
        return _without_hooks(module, protocol)

    if _REDUCE not in vars(module):
        setattr(module, _REDUCE, reduced)
