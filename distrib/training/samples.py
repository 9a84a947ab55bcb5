"""Gradients of several batches, and of unequal ones, as the one mean over all their samples.

A loss is taken to be the mean over the samples of its batch. With b samples on this rank of B on all R ranks, the gradient that
the ranks are to average is R b / B of its own; over several batches, the sum of b times each gradient, times R / sum of B.
Both are done where a gradient arrives, before it is accumulated and before it is exchanged: so what a script clips,
unscales or looks at is the mean already, whoever carries it between the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@dataclass(kw_only=True)
class Samples:
    """How many samples the present batch has on this rank and on all of them, or any numbers in that proportion."""

    own: int = 1
    all: int = 1


class Mean:
    """The gradients of one optimizer's parameters: their mean over `batches` batches of unequal sizes.

    On all batches but the last of each group `.grad` holds the gradient of that batch alone and is of no account: what
    counts is kept apart, which takes as much memory as the gradients. A parameter that the last batch does not
    use has what it gathered added to the next group.
    """

    def __init__(self, optimizer: Optimizer, samples: Samples, *, ranks: int) -> None:
        """`ranks` divide the gradients when they are exchanged: 1 where they are not."""
        self._optimizer, self._samples, self._ranks = optimizer, samples, ranks
        self.batches = 1
        self._done = 0
        self._gathered = 0.0  # samples of the group so far, in units of `_unit`
        self._unit = 1.0
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._hooked = 0

    @property
    def last(self) -> bool:
        """Whether the present batch is the last of its group: the one that is exchanged, and after which a step is taken."""
        return self._done + 1 >= self.batches

    @property
    def begun(self) -> bool:
        """Whether the group has batches behind it."""
        return self._done > 0

    def next(self) -> None:
        """The script is done with the present batch."""
        if self.last:
            self._done, self._gathered = 0, 0.0
        else:
            self._unit = self._unit if self._done else self._all
            self._gathered += self._all / self._unit
            self._done += 1
        self.follow()

    def follow(self) -> None:
        """Sees to it that gradients are weighted where they must be, and cost nothing where they need not."""
        wanted = self.batches > 1 or self._own * self._ranks != self._all
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]] if wanted else []
        if len(parameters) != self._hooked:
            for handle in self._handles:
                handle.remove()
            self._handles = [p.register_hook(self._hook(p)) for p in parameters if p.requires_grad]
            self._hooked = len(parameters)

    @property
    def _own(self) -> float:
        return self._samples.own

    @property
    def _all(self) -> float:
        return self._samples.all if self._ranks > 1 else self._samples.own

    def _hook(self, parameter: torch.Tensor) -> Any:
        def arrived(gradient: torch.Tensor) -> torch.Tensor | None:
            unit = self._unit if self._done else self._all
            weight = self._own * self._ranks / unit
            if not self.last:
                kept = self._kept.get(parameter)
                if kept is None:
                    self._kept[parameter] = gradient.detach() * weight
                else:
                    kept.add_(gradient.detach(), alpha=weight)
                return None
            share = 1 / (self._gathered + self._all / unit)
            kept = self._kept.pop(parameter, None)
            return gradient * (weight * share) if kept is None else kept.add_(gradient, alpha=weight).mul_(share)

        return arrived
