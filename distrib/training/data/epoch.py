"""Epoch numbers of the loaders of a job, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable


class LoaderPass:
    """One iteration over a loader."""

    def __init__(self, number: int, begin_steps: int, outstanding_steps: int) -> None:
        """Begin a pass.

        Args:
            number: Its epoch.
            begin_steps: Steps of the job before it.
            outstanding_steps: Steps of the previous pass that are not yet taken.
        """
        self.number, self.outstanding_steps = number, outstanding_steps
        self.begin_steps = self.end_steps = begin_steps
        self.batches = 0
        self.trains = False
        """True if a model is in training mode, or if steps are taken, as with frozen batch normalization."""
        self.is_open = False
        """True between its first batch and its end."""


class StepClock:
    """The steps of a job, and the pass that read the latest batch; shared by all loaders."""

    def __init__(self, count_steps: Callable[[], int | None]) -> None:
        """Create the clock of a job.

        Args:
            count_steps: Returns the number of steps so far, None while no optimizer is prepared.
        """
        self.count_steps = count_steps
        self.latest: LoaderPass | None = None
        self.outstanding_steps = 0
        """Steps not yet taken of a loader that was exhausted early, because its batches were read ahead."""
        self.latest_steps = 0
        """Steps before the latest batch."""


class EpochCounter:
    """Counter of one loader's epochs: a pass with a step is an epoch. Without optimizers, every pass is one.

    A step belongs to a pass if it was taken before the pass ended. It also does if the pass read the latest batch before it, as
    `next(iter(loader))` does. So one rank may read a batch or evaluate alone.
    """

    def __init__(self, clock: StepClock) -> None:
        """Create the counter of a loader.

        Args:
            clock: The steps of the job.
        """
        self._clock = clock
        self._number = 0
        self._pass: LoaderPass | None = None

    @property
    def next(self) -> int:
        """The number of the next epoch."""
        return self._number + (self._pass is not None and self.has_step(self._pass))

    def has_step(self, one: LoaderPass) -> bool:
        """Test if a step belongs to a pass.

        Args:
            one: A pass of this loader.

        Returns:
            True if it is an epoch.
        """
        steps = self._clock.count_steps()
        if steps is None or one.end_steps > one.begin_steps:
            return True
        return steps > one.begin_steps and (one.is_open or self._clock.latest is one)

    def set(self, number: int) -> None:
        """Set the number of the next epoch.

        Args:
            number: Number of the epoch, from 0.
        """
        self._number, self._pass = number, None

    def begin(self) -> LoaderPass:
        """Begin a pass: the next epoch, or the present one while its pass is still read."""
        steps = self._clock.count_steps() or 0
        if self._pass and self._pass.is_open and self.has_step(self._pass):
            return LoaderPass(self._number, steps, self._clock.outstanding_steps)
        self._number = self.next
        self._pass = LoaderPass(self._number, steps, self._clock.outstanding_steps)
        return self._pass

    def on_batch(self, one: LoaderPass) -> None:
        """Record that a pass yields a batch.

        Args:
            one: The pass.
        """
        one.is_open = True
        one.batches += 1
        steps, clock = self._clock.count_steps() or 0, self._clock
        if clock.latest is not None and steps > clock.latest_steps:
            clock.latest.end_steps = steps
        clock.latest, clock.latest_steps = one, steps

    def end(self, one: LoaderPass) -> None:
        """Record that a pass has ended, or that the script left its loop.

        Args:
            one: The pass.
        """
        one.is_open = False
        one.end_steps = self._clock.count_steps() or 0
