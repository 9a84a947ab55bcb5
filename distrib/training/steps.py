"""A step of an optimizer, as the backend takes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from distrib.training.backend import Backend


def take_steps(optimizer: Optimizer, backend: Backend) -> None:
    """Makes `optimizer.step` a step of the job: the same object, so that schedulers and GradScalers know it.

    A scheduler may have put its own function in place of `step`, or do so later; it wants to find a bound method.
    """
    own: Callable[..., Any] = optimizer.step

    @functools.wraps(own)
    def step(self: Optimizer, *arguments: Any, **options: Any) -> Any:
        return backend.step(self, lambda: own(*arguments, **options))

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
