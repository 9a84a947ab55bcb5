"""Notices ranks that do not find each other: that train and have never met, or stand where they should meet.

The first are copies of one script, each with a model of its own.

`alone` finds most of them by their text before they start. A script that could meet others, but has not been told to, is known by
its processes: they compute gradients, and none has a connection over TCP, which whoever meets others by torch, MPI or Horovod has.
"""

from __future__ import annotations

from collections.abc import Sequence

from distrib_launch import alone
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.supervisor import hang_report

FIRST_SECONDS = 20.0
"""When it is looked first; then after twice as long, and so on."""
MOST_RANKS = 8
"""How many are looked at: if any has met another, all is well."""
PATIENCE_SECONDS = 5.0

NOTE = (
    "the ranks compute gradients, and none has a connection to another: {copies} copies of the script train, each by itself. If that is "
    "not what you want: job = distrib.init() and job.prepare(...) make them train one model (README.md, In a script), or the script "
    "has an option for several processes"
)


STAND = (
    "all ranks have stood in distrib.init() for {seconds:.0f} s, where they meet: something on the way lets them connect, and not all that they "
    "send through. distrib-topo check tries the ways between the hosts; --interface names another network"
)


class Unmet:
    """When to look, and what was seen."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._due = FIRST_SECONDS
        self._asked: tuple[int, ...] = ()
        self._deadline = 0.0
        self._seen: dict[int, hang_report.Stack] = {}
        self._stood = False
        """Whether all stood where they meet when it was looked last."""
        self._ranks = 0
        self._is_known = any(alone.WORDS in note for note in plan.notes)  # all there is to know

    def asks(self, seconds: float, ranks: Sequence[int]) -> tuple[int, ...]:
        """Whose stacks are wanted now, `seconds` after the scripts began."""
        if self._is_known or self._asked or seconds < self._due or len(ranks) < 2:
            return ()
        self._due = 2 * seconds
        self._asked, self._deadline, self._seen = tuple(ranks[:MOST_RANKS]), seconds + PATIENCE_SECONDS, {}
        self._ranks = len(ranks)
        return self._asked

    def add(self, stack: hang_report.Stack) -> None:
        """A rank's stack has come."""
        if stack.rank in self._asked and not stack.problem:
            self._seen[stack.rank] = stack

    def found(self, seconds: float) -> str:
        """What is to be said of them as they are seen now; once."""
        if not self._asked or (len(self._seen) < len(self._asked) and seconds < self._deadline):
            return ""
        stacks = [*self._seen.values()] if len(self._seen) == len(self._asked) else []
        self._asked = ()
        meet = len(stacks) == self._ranks and all(map(hang_report.is_meeting, stacks))
        stood, self._stood = self._stood, meet
        if self._stood:
            self._is_known = stood  # a second time: where many start, the first meeting takes its time
            return STAND.format(seconds=seconds) if stood else ""
        self._is_known = any(stack.met for stack in stacks)
        if self._is_known or not any(map(hang_report.is_training, stacks)):
            return ""
        self._is_known = True
        return NOTE.format(copies=self._ranks)
