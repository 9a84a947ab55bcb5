"""What all workers do together, between steps: each brings something, and gets what all have brought. Pure.

Workers count these rounds from 0, each the same ones. A round is complete when every member has brought its part; its result
is kept until every member has asked for a later one, for those whose connection broke before they heard.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any


class Gathering:
    """Rounds of contributions, by worker. `members` are those who are waited for, as they are at any moment."""

    def __init__(self, members: Callable[[], Set[int]]) -> None:
        self._members = members
        self._parts: dict[int, dict[int, Any]] = {}
        self._results: dict[int, dict[int, Any]] = {}
        self._at: dict[int, int] = {}

    def bring(self, worker: int, number: int, part: Any) -> None:
        """A worker's contribution to round `number`; it has heard the results of the rounds before."""
        self._at[worker] = max(number, self._at.get(worker, 0))
        if number not in self._results:
            self._parts.setdefault(number, {})[worker] = part
        slowest = min((self._at.get(member, 0) for member in self._members()), default=number)
        for old in [n for n in self._results if n < slowest]:
            del self._results[old]

    def complete(self) -> dict[int, dict[int, Any]]:
        """Rounds that are complete now or were, and their contributions by worker."""
        for number in sorted(self._parts):
            waited_for = {m for m in self._members() if self._at.get(m, 0) <= number}
            if waited_for <= self._parts[number].keys():
                self._results[number] = self._parts.pop(number)
        return self._results

    def newest(self) -> int:
        """The number of the round that one who joins now takes part in first."""
        return max([*self._parts, *(n + 1 for n in self._results), *self._at.values()], default=0)
