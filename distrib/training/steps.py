"""Steps of an optimizer as the job takes them: after several batches, with gradients that are numbers, by the backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.training.backend import Backend
from distrib.training.finite import Finite, OnNan
from distrib.training.samples import Mean, Samples


class Steps:
    """The steps of one optimizer. `told` is called after each with the number of steps taken.

    `optimizer.step` becomes a step of the job; the optimizer stays the object that schedulers know.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        backend: Backend,
        samples: Samples,
        *,
        on_nan: OnNan,
        told: Callable[[int], None],
    ) -> None:
        self.optimizer = optimizer
        self.mean = Mean(optimizer, samples, ranks=backend.averaged)
        self.taken = 0
        """Steps, with those that were left out because of a gradient that was no number."""
        self._backend, self._told = backend, told
        self._models: list[nn.Module] = []
        self._finite = Finite(optimizer, on_nan, together=backend.together and backend.world.size > 1)
        self._scaled = False
        self._own: Callable[..., Any] = optimizer.step
        self._fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

        @functools.wraps(self._own)
        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            return self._step(*arguments, **options)

        # A scheduler may have put its own function in place of `step`, or do so later; it wants to find a bound method.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def accumulate(self, batches: int) -> None:
        """A step after each `batches` batches from now on."""
        if self.mean.begun:
            raise TrainingError("accumulate() between the batches of one step", hint="call it before the first batch")
        self.mean.batches = batches
        self.mean.follow()
        self.pair(self._models)

    def pair(self, models: Iterable[nn.Module]) -> None:
        """Finds those of `models` that the optimizer trains."""
        own = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self._models = [model for model in models if any(id(parameter) in own for parameter in model.parameters())]
        names: dict[torch.Tensor, str] = {
            parameter: name for model in self._models for name, parameter in model.named_parameters()
        }
        self._finite.name(names)
        self._backend.pair(self.optimizer, self._models)
        self._backend.exchange(self._models, self.mean.last)
        counting = self.mean.batches > 1 or (self._backend.world.size > 1 and not self._backend.together)
        self.optimizer._step_supports_amp_scaling = self._fused or (counting and not self._scaled)  # type: ignore[attr-defined]

    def _step(self, *arguments: Any, **options: Any) -> Any:
        if hasattr(self.optimizer, "found_inf") and not self._fused:
            raise TrainingError(
                "a GradScaler leaves out steps that the job must count", hint="scaler = job.prepare(scaler)"
            )
        if self.mean.batches > 1 and (arguments or options.get("closure") is not None):
            raise TrainingError(
                "a closure computes its own gradients: they cannot be accumulated", hint="leave out accumulate"
            )
        return self.take(lambda: self._own(*arguments, **options))

    def take(self, update: Callable[[], Any] | None) -> Any:
        """Takes a step, if the present batch is the last of its group; None if it is not. Without `update` it is left out."""
        result = None
        if self.mean.last:
            if not self.taken:
                self._check_owned()
            self._backend.check_used(self._models)
            if update and not hasattr(self.optimizer, "found_inf") and not self._finite.after(self.taken + 1):
                update = None
            result = self._backend.step(self.optimizer, update or _nothing)
            if update is None:
                self._backend.left_out(self.optimizer)
            self._backend.stepped(self._models)
            self.taken += 1
            self._told(self.taken)
        else:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers, which step after each batch
        before = self.mean.last
        self.mean.next()
        if before != self.mean.last:
            self._backend.exchange(self._models, self.mean.last)
        return result

    def _check_owned(self) -> None:
        """Raises TrainingError where the optimizer has parameters that no model of the job has: nobody would average them."""
        if self._backend.world.size == 1:
            return
        known = {id(parameter) for model in self._models for parameter in model.parameters()}
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in known:
                    raise TrainingError(
                        f"parameter {index} of group {number} of the {type(self.optimizer).__name__}, "
                        f"{list(parameter.shape)}, is of no prepared model: every rank would have its own",
                        hint="prepare its model too, and make the optimizer of the model's present parameters",
                    )

    def scaled_by(self, scaler: torch.amp.GradScaler, own: Callable[..., Any], arguments: Any, options: Any) -> Any:
        """`scaler.step(optimizer)`, counted also where the scaler leaves it out."""
        if not self._scaled:
            self._scaled = True
            self._backend.rescaled(self.optimizer)
            self.pair(self._models)
        if not self.mean.last:
            return self.take(None)
        taken = self.taken
        result = own(self.optimizer, *arguments, **options)
        if self.taken == taken:
            self.take(None)
        return result


def _nothing() -> None:
    """What is left of a step that is left out."""


def follow_scaler(scaler: torch.amp.GradScaler, steps: Sequence[Steps]) -> None:
    """Makes a GradScaler scale the batches of one step alike, and count the steps that it leaves out.

    `steps` are all of the job's, those of optimizers that are prepared later too.
    """
    own_step, own_update = scaler.step, scaler.update
    scaled: list[Steps] = []

    def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        for one in steps:
            if one.optimizer is optimizer:
                if one not in scaled:
                    scaled.append(one)
                return one.scaled_by(scaler, own_step, arguments, options)
        return own_step(optimizer, *arguments, **options)

    def update(new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is None and scaler.is_enabled() and any(one.mean.begun for one in scaled):
            new_scale = scaler.get_scale()
        own_update(new_scale)

    scaler.step, scaler.update = step, update  # type: ignore[method-assign]
