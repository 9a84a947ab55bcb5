"""GradScalers with prepared optimizers: skipped steps are counted, and all batches of a step have one scale."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from distrib.training.optimizer_step import OptimizerStepper
from distrib.utils.log import get_logger

log = get_logger("training")


MAX_OVERFLOWS_IN_A_ROW = 40
"""Consecutive overflows after which training fails. Halved so often, the scale is 1e12 times smaller, so it is not the cause."""


class ScalerSteps:
    """Replacement of `step` and `update` of one GradScaler."""

    def __init__(self, scaler: torch.amp.GradScaler, steppers: Sequence[OptimizerStepper]) -> None:
        """Replace the methods.

        Args:
            scaler: The script's GradScaler.
            steppers: The steppers of the job; the list may grow.
        """
        self._scaler, self._steppers = scaler, steppers
        self._own_step, self._own_update = scaler.step, scaler.update
        self._overflows: weakref.WeakKeyDictionary[OptimizerStepper, int] = weakref.WeakKeyDictionary()
        """Number of consecutive skipped steps, by stepper."""
        scaler.step, scaler.update = self._step, self._update  # type: ignore[method-assign]

    def _step(self, optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        for stepper in self._steppers:
            if stepper.optimizer is optimizer and not stepper.is_retired:
                return self._take(stepper, *arguments, **options)
        return self._own_step(optimizer, *arguments, **options)

    def _take(self, stepper: OptimizerStepper, *arguments: Any, **options: Any) -> Any:
        overflows = self._overflows.setdefault(stepper, 0)
        stepper.use_scaler(self._scaler)
        if not stepper.accumulator.is_last:
            return stepper.take(None)
        taken = stepper.taken
        result = self._own_step(stepper.optimizer, *arguments, **options)
        if stepper.taken != taken:
            self._overflows[stepper] = 0
            return result
        stepper.take(None)
        self._overflows[stepper] = overflows + 1
        if self._overflows[stepper] == MAX_OVERFLOWS_IN_A_ROW and stepper.is_reporter:
            name = type(stepper.optimizer).__name__
            log.warning(
                f"the GradScaler skipped {MAX_OVERFLOWS_IN_A_ROW} steps of {name} in a row: gradients are nan or infinite "
                "at every scale\n  check the loss and the batches"
            )
        return result

    def _update(self, new_scale: float | torch.Tensor | None = None) -> None:
        within_step = any(stepper.accumulator.is_begun for stepper in self._overflows)
        if new_scale is None and self._scaler.is_enabled() and within_step:
            present = self._scaler._get_scale_async()  # stays on the GPU, without waiting for it
            is_here = present is not None and present.device.type == self._scaler._device
            new_scale = present if is_here else self._scaler.get_scale()
        self._own_update(new_scale)
