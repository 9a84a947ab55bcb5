"""The models and optimizers that a job trains, shared by its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral

from torch import nn

from distrib.errors import TrainingError
from distrib.training.gradient_accumulation import BatchSamples
from distrib.training.optimizer_step import OptimizerStepper
from distrib.training.step_observer import StepObserver
from distrib.training.strategies.base import TrainingStrategy


@dataclass(kw_only=True)
class TrainingState:
    """The models, optimizers and observers of a job, shared by its parts."""

    strategy: TrainingStrategy
    batch: BatchSamples
    """Sizes of the present batch."""
    accumulate: int
    """Batches in a step."""
    samples: tuple[int, int] = (1, 1)
    """Samples of the present batch on this rank and on all ranks."""
    models: list[nn.Module] = field(default_factory=list)
    """Prepared models with parameters that require a gradient."""
    steppers: list[OptimizerStepper] = field(default_factory=list)
    """One for each prepared optimizer."""
    observers: list[StepObserver] = field(default_factory=list)
    has_released: bool = False
    """True once something was released."""
    released_calls: int = 0
    """Calls of `step()` of released optimizers."""
    released_steps: int = 0
    """Steps of released optimizers."""

    @property
    def samples_per_step(self) -> int:
        """Samples of this rank in a step; 0 if the script reads no prepared loader whose batches have a known size."""
        own, every = self.samples
        return own * self.accumulate if every > own > 1 else 0

    @property
    def replicated_models(self) -> list[nn.Module]:
        """The models whose parameters are identical on all ranks after every step."""
        return self.models if self.strategy.averages_gradients else []

    @property
    def steps(self) -> int:
        """Steps of all optimizers together."""
        return self.released_steps + sum(stepper.taken for stepper in self.steppers)

    @property
    def fewest_steps(self) -> int:
        """The steps of the optimizer that took the fewest; 0 before the first step."""
        return min((stepper.taken for stepper in self.steppers if stepper.taken), default=0)

    @property
    def step_calls(self) -> int | None:
        """Calls of `step()` of all optimizers together; None if no optimizer was prepared, so that steps are not known."""
        if not self.steppers and not self.has_released:
            return None
        return self.released_calls + sum(stepper.calls for stepper in self.steppers)

    def set_batch(self, own: int, every: int) -> tuple[int, int]:
        """Record the sizes of the batch that is read next.

        Args:
            own: Samples on this rank.
            every: Samples on all ranks.

        Returns:
            The sizes before.
        """
        before, self.samples = self.samples, (own, every)
        self.weigh_batch(own, every)
        return before

    def weigh_batch(self, own: float, every: float) -> None:
        """Set the weight of the present batch, in place of its samples.

        Args:
            own: Weight of this rank's batch.
            every: Sum of the weights of all ranks.
        """
        self.batch.own, self.batch.all = own, every
        for stepper in self.steppers:
            stepper.accumulator.update_hooks()

    def set_accumulation(self, batches: int) -> None:
        """Set the number of batches in a step, unless it was chosen at launch. Collective.

        Args:
            batches: At least 1.

        Raises:
            TrainingError: `batches` is not a positive integer, or only some batches of a step were accumulated.
        """
        if not isinstance(batches, Integral) or batches < 1:
            raise TrainingError(f"accumulate({batches!r})", hint="give the number of batches, 1 or more")
        if self.strategy.settings.accumulate > 1:
            return
        self.accumulate = batches
        for stepper in self.steppers:
            stepper.accumulate(batches)

    def synchronize(self) -> None:
        """Make the models identical on all ranks. Collective."""
        for stepper in self.steppers:
            stepper.finalize()
        self.strategy.synchronize()

    def end_epoch(self) -> None:
        """Synchronize the models and notify the observers. Collective."""
        self.synchronize()
        for observer in self.observers:
            observer.on_epoch_end()
