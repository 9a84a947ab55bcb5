"""Notices when no rank of a job gets on any more, and gathers where each of them stands."""

from __future__ import annotations

import time
from collections.abc import Iterable

from distrib_launch import hangs

NOTICE_SECONDS = 600.0
"""Where no limit was given, when to say once who waits for whom."""

STARTUP_SECONDS = 120.0
"""How long scripts may import, and compute as long as they have said nothing; waiting for each other counts from the start."""

STACKS_SECONDS = 4.0
"""How long to wait for every rank's stack."""


class Standstill:
    """No printed line and no reported step of any rank for `limit_seconds`, 0 for `NOTICE_SECONDS`."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds or NOTICE_SECONDS
        self._quiet_so_far = True
        self._stacks: dict[int, hangs.Stack] | None = None  # while and after they are taken
        self._deadline = 0.0
        self.start()

    def start(self) -> None:
        """The scripts start now."""
        self._started = self._last = time.monotonic()

    def progress(self) -> None:
        """A rank has printed something, or reported a step."""
        self._last = time.monotonic()
        self._quiet_so_far = False

    def add(self, stack: hangs.Stack) -> None:
        """A rank's stack has come."""
        if self._stacks is not None:
            self._stacks[stack.rank] = stack

    def begins(self, now: float) -> bool:
        """Whether the limit has just been passed: the ranks' stacks are wanted."""
        if now - self._last <= self.limit_seconds:
            self._stacks = None  # they got on meanwhile
            return False
        if self._stacks is not None:
            return False
        self._stacks, self._deadline = {}, now + STACKS_SECONDS
        return True

    def stacks(self, now: float, ranks: Iterable[tuple[int, str, int]]) -> list[hangs.Stack]:
        """All stacks, once for each standstill, when they are there or the time for them is over; else nothing.

        `ranks` are those still there: rank, host and last step.
        """
        ranks = list(ranks)
        if self._stacks is None or not self._deadline:
            return []
        if now <= self._deadline and not all(rank in self._stacks for rank, _, _ in ranks):
            return []
        self._deadline = 0.0
        stacks = [
            self._stacks.get(rank, hangs.Stack(rank=rank, host=host, step=step, problem="no stack came"))
            for rank, host, step in ranks
        ]
        starting = any(hangs.is_importing(s) or (self._quiet_so_far and hangs.is_computing(s)) for s in stacks)
        if starting and now - self._started < STARTUP_SECONDS:
            self._last, self._stacks = now, None
            return []
        return stacks
