"""Gradient accumulation, and weights for batches of unequal sizes: a step has the mean gradient over all its samples.

A loss must be the mean over the samples of its batch, or over the units of `Job.weigh`, such as tokens. A rank with b of the B samples of all R ranks weights its gradient by
R b / B. Over several batches the gradient is the sum of b times each gradient, times R / sum of B. The weight is applied when a
gradient arrives, before it is averaged over ranks, so scripts clip and read the mean.
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
class BatchSamples:
    """Weights of the present batch on this rank and on all ranks: its samples, or the numbers given to `Job.weigh`."""

    own: float = 1
    all: float = 1
    weighted_by: dict[torch.Tensor, GradientAccumulator] = field(default_factory=dict)
    """The accumulator that weights a parameter's gradient: only one, even if several optimizers have the parameter."""


class GradientAccumulator:
    """Accumulator of one optimizer's gradients over `batches` batches, weighted by their samples.

    Until the last batch of a group, `.grad` holds the gradient of one batch, which the script may clip or read. Its value after
    backward counts, unless the script clears it. It is added to a copy, which takes as much memory as the gradients. When the
    first gradient of the last batch arrives, the accumulated gradients are added to `.grad`, before it is averaged over ranks.
    """

    def __init__(self, optimizer: Optimizer, samples: BatchSamples, *, ranks: int) -> None:
        """Create the accumulator of one optimizer.

        Args:
            optimizer: The prepared optimizer.
            samples: Sizes of the present batch.
            ranks: Number of ranks over which gradients are averaged; 1 if they are not.
        """
        self._optimizer, self._samples, self._ranks = optimizer, samples, ranks
        self.batches = 1
        self.passes = 0
        """Backward passes so far, counted only while batches accumulate."""
        self._pass = -1
        self._batches_done = 0
        self._samples_done = 0.0  # samples of the group so far, in units of `_unit`
        self._unit = 1.0
        self._batch_gradients: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}  # .grad after backward, its version
        self._accumulated: dict[torch.Tensor, torch.Tensor] = {}
        self._counted: set[torch.Tensor] = set()  # parameters whose .grad is already accumulated
        self._contributions: dict[torch.Tensor, tuple[int, int | None]] = {}
        """The pass in which accumulated gradients were added to `.grad`, and its version then; None once more was added."""
        self._merged_models: set[int] = set()
        """Numbers of the models whose accumulated gradients were added to `.grad` in this group."""
        self.models: Mapping[torch.Tensor, int] = {}
        """Number of the model of each parameter: the gradients of a model are averaged together."""
        self.hooks: dict[torch.Tensor, list[RemovableHandle | _InFlight]] = {}
        self._accumulates = False
        self._ended = False

    def close(self) -> None:
        """Remove all hooks."""
        self._ended = True
        self.update_hooks()

    @property
    def is_last(self) -> bool:
        """True if the present batch is the last of its group: its gradients are averaged over ranks, and a step follows."""
        return self._batches_done + 1 >= self.batches

    @property
    def is_begun(self) -> bool:
        """True if the group has accumulated at least one batch."""
        return self._batches_done > 0

    @property
    def share(self) -> float:
        """This rank's fraction of the samples of all ranks in the present batch."""
        return self._samples.own / self._all

    def next_batch(self) -> None:
        """Finish the present batch."""
        if self.is_last:
            for parameter in self._contributions:
                del self._accumulated[parameter]
            self._contributions.clear()
            self._merged_models.clear()
            self._counted.clear()
            self._batches_done, self._samples_done = 0, 0.0
        else:
            self._unit = self._current_unit
            self._accumulate_batch()
            self._samples_done += self._all / self._unit
            self._batches_done += 1
        self.update_hooks()

    def update_hooks(self) -> None:
        """Hook parameters whose gradients must be weighted, and no others.

        Raises:
            TrainingError: A parameter is in two optimizers, and one of them accumulates.
        """
        wanted = not self._ended and (self.batches > 1 or self._samples.own * self._ranks != self._all)
        parameters = set(optimizer_parameters(self._optimizer)) if wanted else set()
        accumulates = self.batches > 1
        taken = self._samples.weighted_by
        for parameter in [p for p in self.hooks if accumulates != self._accumulates or p not in parameters]:
            del taken[parameter]
            for handle in self.hooks.pop(parameter):
                handle.remove()
        self._accumulates = accumulates
        for parameter in parameters - self.hooks.keys():
            # A frozen parameter may be unfrozen within the batch, as in a GAN: it is hooked, too.
            if not parameter.requires_grad and (accumulates or not _can_have_gradient(parameter)):
                continue
            other = taken.setdefault(parameter, self)
            if other is not self:
                if accumulates or other.batches > 1:
                    raise TrainingError(
                        f"a parameter {list(parameter.shape)} is in two optimizers, {type(other._optimizer).__name__} and "
                        f"{type(self._optimizer).__name__}: with accumulate a gradient must belong to one optimizer",
                        hint="leave out accumulate, or give the parameter to one of them",
                        code="parameter-in-two-optimizers",
                    )
                continue
            self.hooks[parameter] = [_InFlight(parameter, self._make_hook(parameter))]
            if accumulates:
                self.hooks[parameter].append(parameter.register_post_accumulate_grad_hook(self._on_gradient))  # type: ignore[no-untyped-call]

    @property
    def _all(self) -> float:
        return self._samples.all if self._ranks > 1 else self._samples.own

    def _make_hook(self, parameter: torch.Tensor) -> Any:
        def weighted(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if self.batches > 1:
                self._count_pass()
            if parameter in self._counted:
                self._clear(parameter)
            if not self.is_last or gradient is None:  # None: an output that the loss does not use
                return None
            self._merge(self.models.get(parameter, -1))
            weight = self._samples.own * self._ranks / self._current_unit
            kept = self._accumulated.get(parameter)
            if kept is None or not self._was_cleared(parameter):
                return gradient * (weight * self._share)
            return torch.add(kept, gradient, alpha=weight).mul_(self._share)

        return weighted

    @property
    def _share(self) -> float:
        """The factor that makes the group's sum of gradients a mean."""
        return 1 / (self._samples_done + self._all / self._current_unit)

    @property
    def _current_unit(self) -> float:
        return self._unit if self._batches_done else self._all

    def before_step(self) -> None:
        """Merge the accumulated gradients of parameters that the last batch does not use.

        With several ranks they wait for the next group, because they would be this rank's only.
        """
        if self.is_last and self._ranks == 1:
            for model in {self.models.get(parameter, -1) for parameter in self._accumulated}:
                self._merge(model)

    def _merge(self, model: int) -> None:
        """Add a model's accumulated gradients to `.grad`, once in a group."""
        if model in self._merged_models:
            return
        self._merged_models.add(model)
        for parameter, kept in self._accumulated.items():
            if self.models.get(parameter, -1) != model:
                continue
            if parameter in self._counted:
                self._clear(parameter)
            if parameter.grad is None:
                parameter.grad = kept * self._share
            else:
                parameter.grad.add_(kept, alpha=self._share)
            self._contributions[parameter] = self._pass, parameter.grad._version

    def _clear(self, parameter: torch.Tensor) -> None:
        """Clear a gradient that was counted and that the script has not cleared."""
        self._counted.discard(parameter)
        clear_gradient(parameter)

    def _was_cleared(self, parameter: torch.Tensor) -> bool:
        """Detect that the script has cleared `.grad` since an earlier pass of this batch. Reads values only if it has changed."""
        number, version = self._contributions[parameter]
        if number == self._pass:
            return False
        self._contributions[parameter] = self._pass, None
        return (parameter.grad is None or parameter.grad._version != version) and _is_cleared(parameter)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self.is_last and parameter.grad is not None:
            # A copy: the script may clip or unscale this batch's gradients, but only the sum shall be clipped and unscaled.
            self._batch_gradients[parameter] = parameter.grad.detach().clone(), parameter.grad._version

    def _accumulate_batch(self) -> None:
        """Add the present batch's gradients to the accumulated ones, unless the script has cleared them."""
        weight = self._samples.own * self._ranks / self._unit
        first: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        more: list[torch.Tensor] = []
        for parameter, (gradient, version) in self._batch_gradients.items():
            if parameter.grad is None:
                continue
            self._counted.add(parameter)
            if parameter.grad._version != version:
                # The script has clipped or zeroed it. Only the GPU may know yet which of both.
                _values(gradient).masked_fill_(~_values(parameter.grad).any(), 0)
            kept = self._accumulated.get(parameter)
            if kept is None:
                self._accumulated[parameter] = gradient
                first.append(gradient)
            else:
                sums.append(kept)
                more.append(gradient)
        if first:  # in few kernels: the launch of a kernel per gradient takes a GPU longer than its work
            torch._foreach_mul_(first, weight)
        if sums:
            torch._foreach_add_(sums, more, alpha=weight)
        self._batch_gradients.clear()

    def _count_pass(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self._pass = task
            self.passes += 1


class _InFlight:
    """A hook on the gradient accumulator of a parameter.

    A hook on the tensor itself would also weight the results of `torch.autograd.grad`.
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


def clear_gradient(parameter: torch.Tensor) -> None:
    """Set a gradient to zero in place, or a sparse one to None.

    Args:
        parameter: A parameter, with or without a gradient.
    """
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.detach().zero_()


def _can_have_gradient(parameter: torch.Tensor) -> bool:
    """Detect a frozen parameter that may be unfrozen: not an integer, and not made in inference mode."""
    return (
        (parameter.is_floating_point() or parameter.is_complex()) and parameter.is_leaf and not parameter.is_inference()
    )


def _is_cleared(parameter: torch.Tensor) -> bool:
    """Detect `zero_grad`, with and without `set_to_none`."""
    return parameter.grad is None or not bool(_values(parameter.grad).any())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient
