"""Module hooks that are not copied or pickled with their module, as by torch.save(model)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo


class UncopiedHook:
    """A hook that runs for one module and not for copies of it.

    Args:
        work: Called with the module and the hook's arguments.
    """

    def __init__(self, owner: nn.Module, work: Callable[..., None]) -> None:
        self._owner, self._work = owner, work

    @_disable_dynamo  # torch.compile would trace into it, and warn about each call that it cannot compile
    def __call__(self, module: nn.Module, *args: Any) -> None:
        if module is self._owner:
            self._work(module, *args)


_HOOKS = (
    *("_forward_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes of a module in which torch stores hooks."""
_REDUCE = "__reduce_ex__"


def _without_hooks(module: nn.Module, protocol: Any) -> Any:
    reduced = type(module).__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {name: value for name, value in reduced[2].items() if name != _REDUCE}
    for name in _HOOKS:
        others = [
            pair
            for pair in state.get(name, {}).items()
            if not isinstance(getattr(pair[1], "hook", pair[1]), UncopiedHook)
        ]
        state[name] = OrderedDict(others)
    return (*reduced[:2], state, *reduced[3:])


def exclude_hooks_from_copies(module: nn.Module, before_copy: Callable[[], None]) -> None:
    """Leave `UncopiedHook` hooks out of copies and pickles of a module.

    Args:
        module: The module.
        before_copy: Called before the module is copied or pickled.
    """

    def reduced(protocol: Any) -> Any:
        before_copy()
        return _without_hooks(module, protocol)

    if _REDUCE not in vars(module):
        setattr(module, _REDUCE, reduced)
