"""Observer interface for optimizer steps, epochs and the end of a job."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer


class StepObserver:
    """Observer of a job's optimizer steps. Subclasses override the methods that they need."""

    def on_gradients_ready(self, optimizer: Optimizer) -> None:
        """Handle the gradients of a step, right before the update: averaged over the ranks in mode sync, this rank's otherwise.

        Called too if the NaN check or the GradScaler then skips the update. With a GradScaler gradients may still be scaled.

        Args:
            optimizer: The prepared optimizer that is about to update its parameters.
        """

    def before_step(self) -> None:
        """Handle the moment before an update. Collectives are allowed at the first step only."""

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        """Handle the end of a call of `optimizer.step()`.

        Args:
            step: Steps that this optimizer has taken.
            updated: False if the batch was only accumulated or the step skipped. A function if only the GPU knows yet.
        """

    def on_epoch_end(self) -> None:
        """Handle the end of an epoch of training, after replicas were made identical. Collectives are allowed."""

    def on_close(self) -> None:
        """Handle the end of the job, after replicas were made identical. Collectives are allowed."""


class LastStep(StepObserver):
    """Record of the last step, for `Job.stepped`."""

    def __init__(self) -> None:
        self._updated: bool | Callable[[], bool] = False

    @property
    def updated(self) -> bool:
        """True if the last step updated the parameters. Waits for the GPU if a GradScaler decides it."""
        if callable(self._updated):
            self._updated = self._updated()
        return self._updated

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        """Record the result of a step.

        Args:
            step: Not used.
            updated: False if the step changed no parameters. A function if only the GPU knows yet.
        """
        self._updated = updated
