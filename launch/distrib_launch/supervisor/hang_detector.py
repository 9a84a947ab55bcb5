"""Notices when no rank of a job gets on any more, and gathers where each of them stands."""

from __future__ import annotations

import time
from collections.abc import Iterable

from distrib_launch.supervisor import hang_report

NOTICE_SECONDS = 600.0
"""Where no limit was given, when to say once who waits for whom."""

AT_END_SECONDS = 10.0
"""As soon as that it is looked whether ranks wait for one whose script is at its end: they would for ever."""

HOPELESS_SECONDS = 60.0
"""When the job is ended that still does so."""

STARTUP_SECONDS = 120.0
"""How long scripts may import, and compute as long as they have said nothing; waiting for each other counts from the start."""

SECOND_LOOK_SECONDS = 1.0
STACKS_SECONDS = 3.0
"""How long to wait for every rank's stack."""


class Standstill:
    """No printed line and no reported step of any rank for `limit_seconds`, 0 for `NOTICE_SECONDS`."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds or NOTICE_SECONDS
        self.some_at_end = False
        """Whether some scripts are at their end, and others are not: the launcher says so."""
        self.early = False
        """Whether the stacks that were given out last show just that, before the limit has passed."""
        self.in_vain = False
        """Whether these ranks have asked for what nobody answers."""
        self.hopeless = False
        """The same, for the second time: the job is to end."""
        self._asked_before = False
        self._looks_early = False
        self._early_before: list[tuple[hang_report.Frame, ...]] | None = None
        self._early_again = 0.0
        self._early_pause_seconds = NOTICE_SECONDS / 10
        self._quiet_so_far = True
        self._stacks: dict[int, hang_report.Stack] | None = None  # while and after they are taken
        self._deadline = 0.0
        self._before: list[hang_report.Stack] | None = None  # a first look, where a second one has to be the same
        self._look_again = 0.0
        self.start()

    def start(self) -> None:
        """The scripts start now."""
        self.started = self._last = time.monotonic()

    def progress(self) -> None:
        """A rank has printed something, or reported a step."""
        self._last = time.monotonic()
        self._quiet_so_far = False

    def add(self, stack: hang_report.Stack) -> None:
        """A rank's stack has come."""
        if self._stacks is not None:
            self._stacks[stack.rank] = stack

    @property
    def silent_seconds(self) -> float:
        """How long no rank had got on when its stacks were given out."""
        early = HOPELESS_SECONDS if self.hopeless else AT_END_SECONDS
        return min(early, self.limit_seconds) if self.early else self.limit_seconds

    def begins(self, now: float) -> bool:
        """Whether the limit, or the time for an early look, has just been passed: the ranks' stacks are wanted."""
        quiet = now - self._last
        if quiet <= min(AT_END_SECONDS, self.limit_seconds):
            self._early_before = None
            if self._asked_before:
                self._asked_before, self._early_again = False, 0.0
        if quiet <= self.limit_seconds:
            if self._looks_early:
                return False
            self._stacks = self._before = None  # they got on meanwhile
            self._looks_early = self.some_at_end and quiet > AT_END_SECONDS and now >= self._early_again
            if not self._looks_early:
                return False
        elif self._stacks is not None or now < self._look_again:
            return False
        self._stacks, self._deadline = {}, now + STACKS_SECONDS
        return True

    def stacks(self, now: float, ranks: Iterable[tuple[int, str, int]]) -> list[hang_report.Stack]:
        """All stacks, once for each standstill, when they are there or the time for them is over; else nothing.

        Where ranks wait for one at its end also before the limit has passed: `early`, and when it is `hopeless`.

        `ranks` are those still there: rank, host and last step.
        """
        ranks = list(ranks)
        if self._stacks is None or not self._deadline:
            return []
        if now <= self._deadline and not all(rank in self._stacks for rank, _, _ in ranks):
            return []
        self._deadline = 0.0
        stacks = [
            self._stacks.get(rank, hang_report.Stack(rank=rank, host=host, step=step, problem="no stack came"))
            for rank, host, step in ranks
        ]
        self.early = self._looks_early
        if self.early:
            return stacks if self._is_certain(stacks, now) else []
        return stacks if now - self.started > STARTUP_SECONDS or self._stands(stacks, now) else []

    def _is_certain(self, stacks: list[hang_report.Stack], now: float) -> bool:
        """Whether ranks wait for one at its end, by two looks; else the next pair of looks comes later and later."""
        self._stacks, self._looks_early = None, False
        frames = [stack.frames for stack in stacks]
        if hang_report.wait_for_ended(stacks) and self._early_before is None:
            self._early_before, self._early_again = frames, now + SECOND_LOOK_SECONDS
            return False
        certain = hang_report.wait_for_ended(stacks) and frames == self._early_before
        self._early_before = None
        self.in_vain = certain and hang_report.ask_in_vain(stacks)
        self.hopeless = self.in_vain and self._asked_before
        self._asked_before = self.in_vain
        if certain:
            self._early_again = now + HOPELESS_SECONDS - AT_END_SECONDS if self.in_vain else float("inf")
        else:
            self._early_again = now + self._early_pause_seconds
        self._early_pause_seconds *= 2
        return certain

    def _stands(self, stacks: list[hang_report.Stack], now: float) -> bool:
        """Whether ranks that may still be starting stand still: nobody imports, and a second look finds all as before."""
        self._stacks = None
        if any(hang_report.is_importing(s) or (self._quiet_so_far and hang_report.is_computing(s)) for s in stacks):
            self._last, self._before = now, None
        elif self._before is None:
            self._before, self._look_again = stacks, now + SECOND_LOOK_SECONDS
        elif [stack.frames for stack in stacks] != [stack.frames for stack in self._before]:
            self._last, self._before = now, None
        else:
            self._stacks = {}
            return True
        return False
