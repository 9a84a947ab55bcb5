"""Load balancing: larger batches for faster ranks, so that no rank waits for the slowest.

The global batch stays the same. Only its division changes, and gradients are weighted by samples
(`distrib.training.gradient_accumulation`). A rank's time runs from the request of its batch to its last gradient. Later waits for
other ranks do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from distrib.training.telemetry.device_timer import DeviceTimer


@dataclass(frozen=True, kw_only=True)
class BalancerSettings:
    """Thresholds of the load balancer."""

    skipped_batches: int = 2
    """First batches of an epoch, or after a change, that are not measured: caches and compilers warm up."""
    measured_batches: int = 9
    """Batches in a measurement, of which the median counts."""
    pause_batches: int = 50
    """Batches between two measurements, once shares are stable."""
    min_difference_fraction: float = 0.05
    """Relative difference in time above which shares change. Step times vary by about as much."""
    pause_measurements: int = 10
    """Measurements without a change after a change that gained less than half of the expected time."""


SETTINGS = BalancerSettings()


class LoadBalancer:
    """Load balancing of one loader: the shares of the ranks in its global batches.

    All ranks decide at the same batch, from the same measurements.
    """

    def __init__(
        self, *, gather: Callable[[list[float]], list[list[float]]], parameters: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Begin with even shares.

        Args:
            gather: Returns the numbers of all ranks, in order. Collective.
            parameters: Returns the parameters of the prepared models.
        """
        self._prefetched = 0
        self._gather, self._parameters = gather, parameters
        self._controller = _ShareController()
        self._speeds: tuple[float, ...] = ()
        self._old_speeds: tuple[float, ...] = ()
        self._since = 0
        self._next = SETTINGS.skipped_batches
        self._taken: list[tuple[int, float]] = []
        self._handles: list[RemovableHandle] = []
        self._timer: DeviceTimer | None = None
        self._begun: Any = None
        self._last: Any = None
        """Marks of two times: this rank requested the batch, and it got its last gradient."""

    def set_prefetch(self, batches: int) -> None:
        """Set the number of batches that worker processes draw in advance. Collective.

        Args:
            batches: Number of this rank's batches.
        """
        self._prefetched = int(max(most for (most,) in self._gather([float(batches)])))

    def speeds(self, step: int) -> tuple[float, ...]:
        """Return the speeds by which a batch is shared.

        Args:
            step: Number of the step in this epoch.

        Returns:
            Samples per second of each rank; empty while they are unknown.
        """
        return self._speeds if step >= self._since else self._old_speeds

    def begin_epoch(self) -> None:
        """Begin an epoch with the present speeds."""
        self._old_speeds, self._since, self._next = self._speeds, 0, SETTINGS.skipped_batches
        self._stop_measuring()

    def begin_batch(self) -> None:
        """Mark that this rank requests a batch."""
        if self._timer:
            self._begun, self._last = self._timer.mark(), None

    def end_batch(self, step: int, samples: int, *, has_step: bool) -> None:
        """Record the time of a batch. Collective once a step was taken.

        Args:
            step: Number of the step in this epoch.
            samples: Samples of this rank.
            has_step: True if a step was taken in this epoch. Otherwise, other ranks may not be in this loader.
        """
        if self._timer and self._begun and self._last:
            self._timer.wait(self._last)
            self._taken.append((samples, self._timer.seconds(self._begun, self._last)))
        if step + 1 == self._next:
            self._start_measuring()
        elif step + 1 == self._next + SETTINGS.measured_batches:
            if has_step:
                self._decide(step)
            else:
                self._stop_measuring()
                self._next = step + 1 + SETTINGS.pause_batches

    def _decide(self, step: int) -> None:
        numbers = [*_quartiles([seconds for _, seconds in self._taken]), *_quartiles([own for own, _ in self._taken])]
        timings = [
            BatchTiming(low, middle, high, samples) for low, middle, high, _, samples, _ in self._gather(numbers)
        ]
        self._stop_measuring()
        self._next = step + 1 + SETTINGS.pause_batches
        decided = self._controller.update(timings)
        if decided != self._speeds:
            self._old_speeds, self._speeds = self._speeds, decided
            self._since = step + 1 + self._prefetched
            self._next = self._since + SETTINGS.skipped_batches

    def _start_measuring(self) -> None:
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        gpu = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        self._timer = timer = DeviceTimer(gpu or torch.device("cpu"))

        def on_gradient(_: torch.Tensor) -> None:
            self._last = timer.mark() or self._last  # None in a CUDA graph

        self._handles = [parameter.register_hook(on_gradient) for parameter in parameters]  # type: ignore[no-untyped-call]

    def _stop_measuring(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._taken = [], []
        self._timer = self._begun = self._last = None


class BatchTiming(NamedTuple):
    """Time of a batch on one rank, quartiles and median in seconds, and its samples; zeros if nothing was measured."""

    low: float
    seconds: float
    high: float
    samples: float


class _ShareController:
    """Decisions of a load balancer: speeds change if ranks differ, and change back if the gain is too small."""

    def __init__(self) -> None:
        self._present: tuple[float, ...] = ()
        self._trial: tuple[tuple[float, ...], float] | None = None
        """The speeds before the latest change, and the seconds that the slowest rank must reach to keep it."""
        self._pause = 0

    def update(self, timings: Sequence[BatchTiming]) -> tuple[float, ...]:
        """Decide after a measurement. Returns the speeds from now on; empty while ranks are equally fast."""
        if min(timings).low <= 0:
            return self._present
        slowest = max(one.low for one in timings)
        trial, self._trial = self._trial, None
        if trial and slowest > trial[1]:
            self._present, self._pause = trial[0], SETTINGS.pause_measurements
        elif self._pause:
            self._pause -= 1
        elif (decided := _updated_speeds(timings, self._present)) != self._present:
            expected = sum(one.samples for one in timings) / sum(one.samples / one.low for one in timings)
            self._trial = self._present, (slowest + expected) / 2
            self._present = decided
        return self._present


def _quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    if not numbers:
        return 0.0, 0.0, 0.0
    ordered = sorted(numbers)
    quarter = len(ordered) // 4
    return float(ordered[quarter]), float(median(ordered)), float(ordered[-1 - quarter])


def _updated_speeds(timings: Sequence[BatchTiming], present: tuple[float, ...]) -> tuple[float, ...]:
    """Compute each rank's samples per second. Returns `present` if they differ too little, or a rank measured nothing."""
    fastest, slowest = (pick(timings, key=lambda one: one.seconds) for pick in (min, max))
    is_small = slowest.seconds - fastest.seconds <= SETTINGS.min_difference_fraction * slowest.seconds
    if fastest.seconds <= 0 or is_small or slowest.low <= fastest.high:
        return present
    return tuple(one.samples / one.seconds for one in timings)
