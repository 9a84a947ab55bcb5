"""The protocol of what follows the steps of a job."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer


class StepObserver:
    """Base class of what follows the steps of a job. Override the methods that matter."""

    def on_gradients_ready(self, optimizer: Optimizer) -> None:
        """Handle the final gradients of a step: averaged, weighted and checked.

        Args:
            optimizer: The prepared optimizer that is about to update its parameters.
        """

    def before_step(self) -> None:
        """Handle an update that is about to be made. Every rank is here, so collectives are allowed at the first one."""

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        """Handle the end of a call of `optimizer.step()`.

        Args:
            step: Steps that this optimizer has taken.
            updated: False if the batch was only accumulated or the step skipped. A function if only the GPU knows yet.
        """

    def on_epoch_end(self) -> None:
        """Handle the end of an epoch of training, after replicas were made identical. Every rank is here."""

    def on_close(self) -> None:
        """Handle the end of the job, after replicas were made identical. Every rank is here."""


class LastStep(StepObserver):
    """Records if the last step updated the parameters, for `Job.stepped`."""

    def __init__(self) -> None:
        self._updated: bool | Callable[[], bool] = False

    @property
    def updated(self) -> bool:
        """True if it did. Waits for the GPU if a GradScaler decides."""
        if callable(self._updated):
            self._updated = self._updated()
        return self._updated

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        self._updated = updated
