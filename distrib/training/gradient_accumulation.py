"""Gradients of several batches, and of unequal ones, as the one mean over all their samples.

A loss is taken to be the mean over the samples of its batch. With b samples on this rank of B on all R ranks, the gradient that
the ranks are to average is R b / B of its own; over several batches, the sum of b times each gradient, times R / sum of B.
Both are done where a gradient arrives, before it is exchanged: so what a script clips, unscales or looks at is the mean
already, whoever carries it between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distrib.errors import TrainingError
from distrib.training.model_parameters import optimizer_parameters


@dataclass(kw_only=True)
class Samples:
    """How many samples the present batch has on this rank and on all of them, or any numbers in that proportion."""

    own: int = 1
    all: int = 1
    weighted_by: dict[torch.Tensor, Mean] = field(default_factory=dict)
    """Whose weight the gradient of a parameter takes on its way: once, however many optimizers have it."""


class Mean:
    """The gradients of one optimizer's parameters: their mean over `batches` batches of unequal sizes.

    On all batches but the last of each group `.grad` holds the gradient of that batch alone, and the script may do with it as
    it likes. What the backward passes made it counts, once the batch is done, unless the script has cleared it meanwhile. That is
    kept apart, which takes as much memory as the gradients, and in a backward pass as much again. As the first gradient of the
    last batch comes, all that was gathered is put into `.grad`, also of parameters which that batch does not use; and again
    of one whose `.grad` the script clears before a further backward pass.
    """

    def __init__(self, optimizer: Optimizer, samples: Samples, *, ranks: int) -> None:
        """`ranks` divide the gradients when they are exchanged: 1 where they are not."""
        self._optimizer, self._samples, self._ranks = optimizer, samples, ranks
        self.batches = 1
        self.passes = 0
        """Backward passes so far, counted while a group has several batches."""
        self._pass = -1
        self._done = 0
        self._gathered = 0.0  # samples of the group so far, in units of `_unit`
        self._unit = 1.0
        self._present: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}  # what backward made of .grad, and its version
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._counted: set[torch.Tensor] = set()  # parameters in whose .grad lies what is kept already
        self._given: dict[torch.Tensor, _Given] = {}
        self._handed: set[int] = set()
        """The models to whose gradients what was kept of theirs is added."""
        self.models: Mapping[torch.Tensor, int] = {}
        """The numbers of the models that the parameters are of: what is exchanged of one is exchanged together."""
        self._hooks: dict[torch.Tensor, list[RemovableHandle | _OnItsWay]] = {}
        self._several = False
        self._ended = False

    def end(self) -> None:
        """The optimizer takes no more steps."""
        self._ended = True
        self.follow()

    @property
    def last(self) -> bool:
        """Whether the present batch is the last of its group: the one that is exchanged, and after which a step is taken."""
        return self._done + 1 >= self.batches

    @property
    def begun(self) -> bool:
        """Whether the group has batches behind it."""
        return self._done > 0

    @property
    def share(self) -> float:
        """Of all ranks' samples in the present batch, this rank's."""
        return self._own / self._all

    def next(self) -> None:
        """The script is done with the present batch."""
        if self.last:
            for parameter in self._given:
                del self._kept[parameter]
            self._given.clear()
            self._handed.clear()
            self._counted.clear()
            self._done, self._gathered = 0, 0.0
        else:
            self._unit = self._present_unit
            self._take_up()
            self._gathered += self._all / self._unit
            self._done += 1
        self.follow()

    def follow(self) -> None:
        """Sees to it that gradients are weighted where they must be, and cost nothing where they need not."""
        wanted = not self._ended and (self.batches > 1 or self._own * self._ranks != self._all)
        parameters = set(optimizer_parameters(self._optimizer)) if wanted else set()
        several = self.batches > 1
        taken = self._samples.weighted_by
        for parameter in [p for p in self._hooks if several != self._several or p not in parameters]:
            del taken[parameter]
            for handle in self._hooks.pop(parameter):
                handle.remove()
        self._several = several
        for parameter in parameters - self._hooks.keys():
            # One that is frozen may be so for the turn of another model only: it keeps the hooks that it has, and is given one.
            if not parameter.requires_grad and (several or not _can_learn(parameter)):
                continue
            other = taken.setdefault(parameter, self)
            if other is not self:
                if several or other.batches > 1:
                    raise TrainingError(
                        f"a parameter {list(parameter.shape)} is in two optimizers, {type(other._optimizer).__name__} and "
                        f"{type(self._optimizer).__name__}: whose batches of one step its gradient belongs to cannot be told",
                        hint="leave out accumulate, or give the parameter to one of them",
                    )
                continue
            self._hooks[parameter] = [_OnItsWay(parameter, self._on_its_way(parameter))]
            if several:
                self._hooks[parameter].append(parameter.register_post_accumulate_grad_hook(self._arrived))  # type: ignore[no-untyped-call]

    @property
    def _own(self) -> float:
        return self._samples.own

    @property
    def _all(self) -> float:
        return self._samples.all if self._ranks > 1 else self._samples.own

    def _on_its_way(self, parameter: torch.Tensor) -> Any:
        def weighted(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if self.batches > 1:
                self._count()
            if parameter in self._counted:
                self._clear(parameter)
            if not self.last or gradient is None:  # None: of an output that the loss does not use
                return None
            self._hand_over(self.models.get(parameter, -1))
            weight = self._own * self._ranks / self._present_unit
            kept = self._kept.get(parameter)
            if kept is None or not self._given[parameter].is_lost(parameter, self._pass):
                return gradient * (weight * self._share)
            return torch.add(kept, gradient, alpha=weight).mul_(self._share)

        return weighted

    @property
    def _share(self) -> float:
        """What a sum of the group's gradients is multiplied with, so that it is their mean."""
        return 1 / (self._gathered + self._all / self._present_unit)

    @property
    def _present_unit(self) -> float:
        return self._unit if self._done else self._all

    def before_step(self) -> None:
        """No more gradients will come before the step. Where they are exchanged, what was gathered and not given waits for the next
        group: by itself it would be this rank's own."""
        if self.last and self._ranks == 1:
            for model in {self.models.get(parameter, -1) for parameter in self._kept}:
                self._hand_over(model)

    def _hand_over(self, model: int) -> None:
        """Puts what was gathered of a model's gradients into `.grad`, where that is not done yet."""
        if model in self._handed:
            return
        self._handed.add(model)
        for parameter, kept in self._kept.items():
            if self.models.get(parameter, -1) != model:
                continue
            if parameter in self._counted:
                self._clear(parameter)
            if parameter.grad is None:
                parameter.grad = kept * self._share
            else:
                parameter.grad.add_(kept, alpha=self._share)
            self._given[parameter] = _Given(self._pass, parameter.grad._version)

    def _clear(self, parameter: torch.Tensor) -> None:
        """What lies in `.grad` has been counted, and the script has not cleared it: nor has it where it adds up batches itself."""
        self._counted.discard(parameter)
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.last and parameter.grad is not None:
            # A copy: what the script clips or unscales on its way to `step` is clipped and unscaled as a whole later.
            self._present[parameter] = parameter.grad.detach().clone(), parameter.grad._version

    def _take_up(self) -> None:
        """What lies in `.grad` counts."""
        weight = self._own * self._ranks / self._unit
        first: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        more: list[torch.Tensor] = []
        for parameter, (gradient, version) in self._present.items():
            if parameter.grad is None:
                continue
            self._counted.add(parameter)
            if parameter.grad._version != version:
                # It was clipped, or zeroed: which of them, only the GPU may know yet.
                _values(gradient).masked_fill_(~_values(parameter.grad).any(), 0)
            kept = self._kept.get(parameter)
            if kept is None:
                self._kept[parameter] = gradient
                first.append(gradient)
            else:
                sums.append(kept)
                more.append(gradient)
        if first:  # all in a few kernels: to start one for each takes a GPU longer than its work
            torch._foreach_mul_(first, weight)
        if sums:
            torch._foreach_add_(sums, more, alpha=weight)
        self._present.clear()

    def _count(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self._pass = task
            self.passes += 1


@dataclass
class _Given:
    """Before which backward pass what was kept was added to a parameter's `.grad`, and that one's version then; None once more has come."""

    number: int
    version: int | None

    def is_lost(self, parameter: torch.Tensor, number: int) -> bool:
        """Whether the script has cleared it before pass `number`, which adds to it. Values are read where nothing else tells."""
        if self.number == number:
            return False
        untouched = self.version is not None and parameter.grad is not None and parameter.grad._version == self.version
        self.number, self.version = number, None
        return not untouched and _is_cleared(parameter)


class _OnItsWay:
    """A hook of where the gradient of `parameter` arrives, which exists as long as this does.

    A hook of the tensor itself would also weight what `torch.autograd.grad` gives to a script.
    """

    def __init__(self, parameter: torch.Tensor, weighted: Callable[[torch.Tensor | None], torch.Tensor | None]) -> None:
        self._place: Any
        is_learning = parameter.requires_grad
        with torch.inference_mode(False), torch.enable_grad():
            parameter.requires_grad_(True)
            self._place = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            parameter.requires_grad_(is_learning)

        def hook(gradients: tuple[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
            gradient = weighted(gradients[0])
            return None if gradient is None else (gradient,)

        self._handle = self._place.register_prehook(hook)

    def remove(self) -> None:
        self._handle.remove()


def _can_learn(parameter: torch.Tensor) -> bool:
    """Whether a gradient may come for one that is frozen: some are numbers of a kind that has none, or made in inference mode."""
    return (
        (parameter.is_floating_point() or parameter.is_complex()) and parameter.is_leaf and not parameter.is_inference()
    )


def _is_cleared(parameter: torch.Tensor) -> bool:
    """Whether the script has cleared `.grad`, in either way that `zero_grad` has."""
    return parameter.grad is None or not bool(_values(parameter.grad).any())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient
