"""Larger batches for faster ranks, so that none waits for the slowest.

What is shared stays the global batch: only where it is cut changes, and gradients are weighted by samples
(`distrib.training.gradient_accumulation`). A rank's speed is that of its own part of a step, from the end of the last one until
its last gradient is there; what it waits for the others afterwards does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from distrib.training.telemetry.device_timer import Clock

SKIPPED = 2
"""First batches of an epoch, or after a change, that are not measured: caches and compilers warm up in them."""
MEASURED = 9
"""Batches of which the median counts."""
REPEATED = 50
"""Batches between two measurements, once shares have settled."""
NEGLIGIBLE = 0.05
"""Differences in time below this share change nothing: a step's length varies as much."""
PATIENCE = 10
"""Measurements that change nothing, after a change that did not help by half of what was hoped for: time is not that of samples there."""


class Balance:
    """The proportion in which the ranks share one loader's batches.

    Decided by all ranks together, at the same batch on each, from what all have measured.
    """

    def __init__(
        self, *, gather: Callable[[list[float]], list[list[float]]], parameters: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """`gather` gives every rank the numbers of all; `parameters` are those that train."""
        self._ahead = 0
        self._gather, self._parameters = gather, parameters
        self._proportion = Proportion()
        self._new: tuple[float, ...] = ()
        self._old: tuple[float, ...] = ()
        self._since = 0
        self._next = SKIPPED
        self._taken: list[tuple[int, float]] = []
        self._handles: list[RemovableHandle] = []
        self._clock: Clock | None = None
        self._begun: Any = None
        self._last: Any = None
        """Marks of the clock: when this rank went for the batch, and when its last gradient was there."""

    def draws_ahead(self, batches: int) -> None:
        """So many are drawn before they are needed, by a loader's worker processes: on each rank as many as it has. Every rank."""
        self._ahead = int(max(most for (most,) in self._gather([float(batches)])))

    def speeds(self, step: int) -> tuple[float, ...]:
        """The ranks' speeds, for the batch of step number `step` of this epoch; none: not known yet."""
        return self._new if step >= self._since else self._old

    def epoch(self) -> None:
        """The loader begins again."""
        self._old, self._since, self._next = self._new, 0, SKIPPED
        self._rest()

    def begin(self) -> None:
        """This rank goes for a batch."""
        if self._clock:
            self._begun, self._last = self._clock.mark(), None

    def end(self, step: int, samples: int, *, learnt: bool) -> None:
        """The script is done with the batch of step number `step`, of `samples` samples. Every rank, once a step has `learnt`."""
        if self._clock and self._begun and self._last:
            self._clock.wait(self._last)
            self._taken.append((samples, self._clock.seconds(self._begun, self._last)))
        if step + 1 == self._next:
            self._watch()
        elif step + 1 == self._next + MEASURED:
            if learnt:
                self._decide(step)
            else:  # the others may not be here
                self._rest()
                self._next = step + 1 + REPEATED

    def _decide(self, step: int) -> None:
        numbers = [*_quartiles([seconds for _, seconds in self._taken]), *_quartiles([own for own, _ in self._taken])]
        measured = [Measured(low, middle, high, samples) for low, middle, high, _, samples, _ in self._gather(numbers)]
        self._rest()
        self._next = step + 1 + REPEATED
        decided = self._proportion.after(measured)
        if decided != self._new:
            self._old, self._new = self._new, decided
            self._since = step + 1 + self._ahead
            self._next = self._since + SKIPPED

    def _watch(self) -> None:
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        gpu = next((parameter.device for parameter in parameters if parameter.is_cuda), None)
        self._clock = clock = Clock(gpu or torch.device("cpu"))

        def arrived(_: torch.Tensor) -> None:
            self._last = clock.mark() or self._last  # none in a CUDA graph

        self._handles = [parameter.register_hook(arrived) for parameter in parameters]  # type: ignore[no-untyped-call]

    def _rest(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._taken = [], []
        self._clock = self._begun = self._last = None


class Proportion:
    """The speeds by which a batch is shared out; none as long as all ranks seem alike."""

    def __init__(self) -> None:
        self._present: tuple[float, ...] = ()
        self._tried: tuple[tuple[float, ...], float] | None = None
        """Of a change that has not been judged: the speeds before it, and the seconds that the slowest rank must come down to."""
        self._patience = 0

    def after(self, measured: Sequence[Measured]) -> tuple[float, ...]:
        """Those from now on. Where the latest change was of no use, the ones before it."""
        if min(measured).low <= 0:
            return self._present
        slowest = max(one.low for one in measured)
        tried, self._tried = self._tried, None
        if tried and slowest > tried[1]:
            self._present, self._patience = tried[0], PATIENCE
        elif self._patience:
            self._patience -= 1
        elif (decided := new_speeds(measured, self._present)) != self._present:
            hoped = sum(one.samples for one in measured) / sum(one.samples / one.low for one in measured)
            self._tried = self._present, (slowest + hoped) / 2
            self._present = decided
        return self._present


class Measured(NamedTuple):
    """What a rank took for a batch: quartiles and median, zeros where nothing was measured."""

    low: float
    seconds: float
    high: float
    samples: float


def _quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    if not numbers:
        return 0.0, 0.0, 0.0
    ordered = sorted(numbers)
    quarter = len(ordered) // 4
    return float(ordered[quarter]), float(median(ordered)), float(ordered[-1 - quarter])


def new_speeds(measured: Sequence[Measured], present: tuple[float, ...]) -> tuple[float, ...]:
    """The speeds of the ranks, in samples per second.

    `present` where somebody measured nothing, or all took about as long: within a share, or within what each varies by itself.
    """
    fastest, slowest = (pick(measured, key=lambda one: one.seconds) for pick in (min, max))
    negligible = slowest.seconds - fastest.seconds <= NEGLIGIBLE * slowest.seconds
    if fastest.seconds <= 0 or negligible or slowest.low <= fastest.high:
        return present
    return tuple(one.samples / one.seconds for one in measured)
