"""Which way of cutting the gradients is the fastest: the ways take turns in real steps, and the clock decides.

A model of the wire does not know how busy the processors are while ranks compute, and so what one more piece costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Cut = tuple[int, ...]
"""Where pieces end, in bytes."""

TURNS = 2
TURN_STEPS = 3
"""The first of which is not counted: it begins with what the way before has left."""


class Contest:
    """`cuts` take turns. Every rank asks for the same ones, and tells of the same steps."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self.cuts = tuple(cuts)
        self._seconds: list[list[float]] = [[] for _ in self.cuts]
        self._steps = 0
        self._begun: float | None = None

    @property
    def cut(self) -> Cut:
        """The one whose turn it is."""
        return self.cuts[self._steps // TURN_STEPS % len(self.cuts)]

    @property
    def over(self) -> bool:
        return self._steps >= TURNS * TURN_STEPS * len(self.cuts)

    def step_ended(self, now: float) -> None:
        """A step with `cut` has ended, and the next begins."""
        if self._begun is not None and self._steps % TURN_STEPS:
            self._seconds[self._steps // TURN_STEPS % len(self.cuts)].append(now - self._begun)
        self._begun = now
        self._steps += 1

    def seconds(self) -> list[float]:
        """The median step of each, of this rank."""
        return [statistics.median(taken) for taken in self._seconds]
