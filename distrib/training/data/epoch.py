"""Which epoch a loader is in: the same on every rank, whatever one of them reads by itself.

A rank may look at a batch, or evaluate, while the others do not; if that counted, its order would be another one from then on,
and samples would be read twice or never. Steps are taken by all ranks alike. So a pass over the loader counts once a step has
learnt from it; until then the next pass is of the same epoch. Passes that are begun together, as by
`zip(loader, loader)`, are an epoch each. Where the job knows of no steps, every pass counts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

MOST_AHEAD = 2
"""So many batches a script may be ahead of its steps. One that takes more before its first step makes one step of them, or skips what an
earlier run has had."""


class Lessons:
    """From which passes, of all the loaders of a job, its steps have learnt.

    `steps` says how many have been taken, None while the job knows of none to come. A step has learnt from the passes that handed
    out a batch since the one before: from those that go on if there are such, else from those that were left, as
    `next(iter(loader))` leaves one; and if nothing else was read, from those that were read to their end.

    `ended` is called when the steps of a pass that was read to its end are taken: a script may read ahead of them, as between a
    forward and its backward pass. It is not for a pass that another thread reads, whose end comes at another step on each rank.
    """

    def __init__(self, steps: Callable[[], int | None], ended: Callable[[], None]) -> None:
        self.steps, self._ended = steps, ended
        self._taken = steps() or 0
        self._since: dict[Pass, None] = {}
        self._thread = threading.main_thread().ident
        self._last: int | None = None
        """With which step those of a pass that was read ahead of them are taken."""
        self._ahead = 0
        """How far it was."""
        self._may_be_ahead = True

    @property
    def ahead(self) -> int:
        """How far a pass was read ahead whose steps have not all come yet."""
        return 0 if self._last is None else self._ahead

    @property
    def are_here(self) -> bool:
        """Whether the present thread is the one that takes steps."""
        return threading.get_ident() == self._thread

    def step(self) -> None:
        """One was taken just now."""
        if torch._C._current_graph_task_id() == -1:  # within the backward pass of a GPU it is a thread of autograd's
            self._thread = threading.get_ident()
        if self._last is not None and (self.steps() or 0) >= self._last:
            self._last = None
            self._ended()

    def end(self, one: Pass) -> None:
        """`one`, on which a model trains, was read to its end."""
        taken = self.steps()
        if not self.are_here or (taken is not None and not one.has_learnt):  # a rank may look at its samples by itself
            return
        # Where steps of an earlier pass have not come, all of its batches were for one; where this one's first batches made no step, though
        # they came before the steps of the one before, some are skipped in each.
        self._may_be_ahead &= self._last is None and not (one.follows and one.ahead)
        self._last, self._ahead = None, one.ahead or one.follows
        is_ahead = self._may_be_ahead and 0 < self._ahead <= MOST_AHEAD
        if is_ahead and taken is not None and taken > one.steps:
            self._last = taken + self._ahead * (taken - one.steps)
        else:
            self._ended()

    def hand_out(self, one: Pass) -> None:
        """`one` is about to hand out a batch."""
        self.look()
        if self.steps() is not None:
            self._since[one] = None

    def look(self) -> None:
        """See whether a step was taken."""
        taken = self.steps() or 0
        if taken == self._taken:
            return
        self._taken = taken
        since, self._since = self._since, {}
        for one in [p for p in since if p.is_open] or [p for p in since if not p.is_whole] or since:
            one.learn()


class Pass:
    """One iteration over a loader, of epoch `number`."""

    def __init__(self, epochs: Epochs, number: int, since: object) -> None:
        self._epochs, self.number, self.since = epochs, number, since
        self.is_open = False
        """Whether it has handed out a batch and may hand out another."""
        self.is_whole = False
        """Whether it was read to its end."""
        self.has_learnt = False
        """Whether a step has learnt from it."""
        self.steps = -1
        """How many had been taken as its latest batch was handed out; -1 before the first."""
        self.ahead = 0
        """So many batches are handed out before the step that learns from the first of them, as it seems."""
        self.follows = 0
        """How far the pass before was read ahead, where not all of its steps had come when this one's first batch was handed out."""
        self._steps_come = False
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
        self._epochs.lessons.hand_out(self)
        steps = self._epochs.lessons.steps() or 0
        if steps > self.steps >= 0:
            self._steps_come = True
        elif self.steps >= 0:
            # Again and again where the script makes one step of several batches: those are not read ahead.
            self.ahead = 0 if self._steps_come else self.ahead + 1
        else:
            self.follows = self._epochs.lessons.ahead
        self.steps = steps
        self.is_open = True

    def look(self) -> None:
        """The next batch is asked for, or nothing more."""
        self._epochs.lessons.look()

    def learn(self) -> None:
        """A step has learnt from it."""
        self.has_learnt = True
        self._epochs.count(self)

    def end(self, *, whole: bool) -> None:
        """No batch will be asked for; `whole`: as there is none."""
        self.look()
        self.is_open, self.is_whole = False, whole
        self._epochs.end(self)


class Epochs:
    """Counts the epochs of one loader."""

    def __init__(self, lessons: Lessons) -> None:
        self.lessons = lessons
        self.repeated = 0
        """How often a pass was left before its end that began where one had been left before, with no step since."""
        self._left: Pass | None = None
        self._waiting: list[Pass] = []
        self._next = 0
        self._set = object()
        """Another one each time that `next` is set: passes that were begun before count no more."""

    @property
    def next(self) -> int:
        """The number of the epoch that begins next."""
        self.lessons.look()
        return self._next

    @next.setter
    def next(self, number: int) -> None:
        self.lessons.look()
        self._next, self._left, self._set = number, None, object()
        self._waiting.clear()

    def begin(self) -> Pass:
        """A pass begins."""
        number = self.next
        self._waiting = [one for one in self._waiting if one.is_waiting]
        made = Pass(self, max([number, *(one.number + 1 for one in self._waiting)]), self._set)
        self._waiting.append(made)
        if self.lessons.steps() is None:
            self._next = made.number + 1
        return made

    def count(self, one: Pass) -> None:
        """A step has learnt from it."""
        if one.since is self._set:
            self._next = max(self._next, one.number + 1)

    def end(self, one: Pass) -> None:
        """A pass is over."""
        if self._left and not one.is_whole:
            self.repeated += (self._left.number, self._left.steps) == (one.number, one.steps)
        self._left = None if one.is_whole or one.has_learnt else one
