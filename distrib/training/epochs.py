"""Which epoch a loader is in: the same on every rank, whatever one of them reads by itself.

A rank may look at a batch, or evaluate, while the others do not; if that counted, its order would be another one from then on,
and samples would be read twice or never. Steps are taken by all ranks alike. So a pass over the loader counts once a step was
taken between its batches; until then the next pass is of the same epoch. Passes that are begun together, as by
`zip(loader, loader)`, are an epoch each. Where the job knows of no steps, every pass counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class Pass:
    """One iteration over the loader, of epoch `number`."""

    def __init__(self, epochs: Epochs, number: int) -> None:
        self._epochs, self.number = epochs, number
        self.has_learnt = False
        """Whether a step was taken between its batches."""
        self.is_whole = False
        """Whether it was read to its end."""
        self.steps = -1
        """How many had been taken as its latest batch was handed out; -1 before the first."""
        self._batches: weakref.ref[Iterator[Any]] | None = None

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches` are what it hands out."""
        self._batches = weakref.ref(batches)
        return batches

    @property
    def is_waiting(self) -> bool:
        """Whether somebody has it, and has taken no batch yet."""
        return self.steps < 0 and self._batches is not None and self._batches() is not None

    def hand_out(self) -> None:
        """A batch is about to be handed out."""
        self.steps = self._epochs.steps() or 0
        self._epochs.open[self] = None

    def look(self) -> None:
        """The next batch is asked for, or nothing more."""
        self._epochs.look()

    def end(self, *, whole: bool) -> None:
        """No batch will be asked for; `whole`: as there is none."""
        self.is_whole = whole
        self._epochs.end(self)


class Epochs:
    """Counts the epochs of one loader. `steps` says how many steps the job has taken, None while it knows of none to come."""

    def __init__(self, steps: Callable[[], int | None]) -> None:
        self.steps = steps
        self.open: dict[Pass, None] = {}
        """Those that have handed out a batch and may hand out another."""
        self.closed: Pass | None = None
        """The last of the others, if nothing was learnt since: as of `next(iter(loader))`, whose batch is still to be learnt."""
        self.repeated = 0
        """How often a pass was left before its end that began where one had been left before, with no step since."""
        self._waiting: list[Pass] = []
        self._next = 0

    @property
    def next(self) -> int:
        """The number of the epoch that begins next."""
        self.look()
        return self._next

    @next.setter
    def next(self, number: int) -> None:
        self._next, self.closed = number, None
        self.open.clear()
        self._waiting.clear()

    def begin(self) -> Pass:
        """A pass begins."""
        number = self.next
        self._waiting = [one for one in self._waiting if one.is_waiting]
        made = Pass(self, max([number, *(one.number + 1 for one in self._waiting)]))
        self._waiting.append(made)
        if self.steps() is None:
            self._next = made.number + 1
        return made

    def end(self, one: Pass) -> None:
        """A pass is over."""
        self.look()
        self.open.pop(one, None)
        if self.closed and not one.is_whole and not self.closed.is_whole:
            self.repeated += self.closed.number == one.number and self.closed.steps == one.steps
        self.closed = None if one.has_learnt else one

    def look(self) -> None:
        """Counts the passes in which steps were taken since."""
        taken = self.steps() or 0
        learnt = [one for one in self.open if taken > one.steps]
        if not self.open and self.closed and taken > self.closed.steps:
            learnt = [self.closed]
        for one in learnt:
            one.has_learnt = True
            self._next = max(self._next, one.number + 1)
            self.closed = None
