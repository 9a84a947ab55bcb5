"""Models that a script trains without any step of a prepared optimizer: updates of its own, or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distrib.training.checks.usage import Forgotten
from distrib.training.checksums import element_sum
from distrib.training.model_parameters import unwrap_model
from distrib.training.optimizer_step import Steps

GOES_ON = 10
"""Backward passes of a model after which it is taken to be trained by other means than a step of a prepared optimizer."""


class HandMade:
    """Looks at each model at its tenth backward pass: `learns` is told, and `forgotten` says what updates by hand go without.

    `steps` are those of the optimizers that were prepared so far.
    """

    def __init__(self, steps: Sequence[Steps], learns: Callable[[], None], forgotten: Forgotten) -> None:
        self._steps, self._learns, self._forgotten = steps, learns, forgotten
        self._handles: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    def watch(self, model: nn.Module) -> None:
        """`model` was prepared."""
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        begun: list[torch.Tensor] = []
        passes = 0

        def computed(_: torch.Tensor) -> None:
            nonlocal passes
            passes += 1
            if passes == 1:
                begun.extend(map(element_sum, learning))
            elif passes == GOES_ON:
                self.release(model)
                self._learns()
                if not any(steps.trains(learning) for steps in self._steps) and any(
                    bool(element_sum(parameter) != before) for parameter, before in zip(learning, begun, strict=True)
                ):
                    self._forgotten.hand_made(type(unwrap_model(model)).__name__)

        self._handles[model] = learning[0].register_post_accumulate_grad_hook(computed)  # type: ignore[no-untyped-call]

    def release(self, model: nn.Module) -> None:
        """Looks at `model` no more."""
        if handle := self._handles.pop(model, None):
            handle.remove()
