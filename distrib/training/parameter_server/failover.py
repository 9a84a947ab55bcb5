"""Who takes charge of a shard whose server is gone, and when. No I/O, no clock.

A server is asked by workers that cannot reach who is in charge; each asks all servers in turn, again and again, until one
welcomes it. More than half of them must be asking, so that nobody takes charge of what others still train with. How long
they must have asked depends on what the server has of the shard:

- a whole replica: not at all, nothing is lost;
- a part of one, as its server died while it was copied: `PARTIAL_SECONDS`, in which the server may come back;
- nothing, as whoever had it died at once with its replica: `ANEW_SECONDS`, twice as long on the next server that lives and so on,
  in which one that has more of it is found. It begins with the parameters that workers have; not before every server that
  any of them cannot reach is known to be dead, for that one may be in charge, with workers that reach it.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

CALL_SECONDS = 2.0
"""How long a server may take to welcome a worker, before the next is asked."""

PARTIAL_SECONDS = 4.0
ANEW_SECONDS = 10.0

Replica = Literal["whole", "partial", "none"]


class Ballot:
    """The workers that ask one of `servers` servers for one shard."""

    def __init__(self, servers: int) -> None:
        self.epoch = 0
        """The last that any of them knows of."""
        self._again_seconds = CALL_SECONDS * (1 + servers)  # within which each asks again, if it still looks for one
        self._asked: dict[int, float] = {}
        self._silent: dict[int, Set[int]] = {}
        self._since: float | None = None

    def ask(self, worker: int, epoch: int, silent: Set[int], voices: Set[int], now: float) -> float | None:
        """A worker asks at `now`, in seconds, and has not heard from the servers `silent`.

        For how long more than half of `voices` have been asking; None: they do not.
        """
        if now - max(self._asked.values(), default=now) > self._again_seconds:
            self._since = None
        self.epoch = max(self.epoch, epoch)
        self._asked[worker], self._silent[worker] = now, silent
        self._asked = {one: at for one, at in self._asked.items() if now - at <= self._again_seconds}
        if len(self._asked.keys() & voices) * 2 <= len(voices):
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        return now - self._since

    @property
    def silent(self) -> set[int]:
        """The servers that some of those who ask cannot reach."""
        return set().union(*(self._silent[worker] for worker in self._asked))


def patience_seconds(replica: Replica, place: int) -> float:
    """For how long workers must have asked the server that comes at `place`, from 0, among those that may know the shard."""
    if replica == "none":
        return ANEW_SECONDS * (1 + place)
    return PARTIAL_SECONDS if replica == "partial" else 0.0
