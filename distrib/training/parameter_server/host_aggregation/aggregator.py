"""How the pushes of one host's workers become one, which goes to the servers for all of them. No I/O, no clock, no tensors.

A `Merger` belongs to the worker that speaks for its host. Its workers push to it as they would to a server with staleness 0,
and a `Shard` decides which gradients make up a round. But instead of being applied, the mean of a round is sent to the server
of the chunk, under a number that all workers of the host share and with the step that they are all in; the workers are
answered when the server has answered that. As soon as every worker's gradient of a chunk is there it is sent, while
some may not have committed it yet; it is committed when they all have, and sent again if it has changed.

Another worker may take the place of one that is gone, with a merger that knows nothing: what was under way is pushed to
it again, and the servers know whether they have applied that step of this host.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from distrib.training.parameter_server.update_rules import Answer, Apply, Effect, Shard, Update


class Send(NamedTuple):
    """Push the mean of these gradients to the chunk's server as this step, in place of what was sent of it before.

    `mark` is the same if it is made of the same gradients: so the server knows what it has applied already.
    """

    chunk: int
    step: int
    updates: tuple[Update, ...]
    mark: int
    final: bool


class Commit(NamedTuple):
    """What was sent of this step is final."""

    chunk: int
    step: int


Order = Send | Commit | Answer


class _Round:
    """One chunk: its shard, and what is on its way to the server."""

    def __init__(self, chunk: int, members: Iterable[int]) -> None:
        self.shard = Shard([chunk], members, 0)
        self.shard.replicate(0)  # no answer before the server's
        self.early: list[tuple[int, int]] = []  # workers and steps of what was sent and is not committed
        self.answer: bool | None = None  # to that, before it was committed: whether it had been applied already
        self.under_way: Apply | None = None  # what was sent for good and is not answered
        self.due: deque[Apply] = deque()


class Merger:
    """The chunks of one table, of whichever servers, and the workers of one host that train them."""

    def __init__(self, chunks: Iterable[int], members: Iterable[int]) -> None:
        first = set(members)
        self._rounds = {chunk: _Round(chunk, first) for chunk in chunks}

    def push(
        self, worker: int, chunk: int, step: int, base: int, gradient: object, *, final: bool, weight: int = 1
    ) -> list[Order]:
        """A worker's gradient; of `weight` 0 if it has none in this step."""
        at = self._rounds[chunk]
        if (worker, step) in at.early:
            at.early, at.answer = [], None  # what was sent is not what it has now
        return self._on(chunk, at, at.shard.push(worker, chunk, step, base, gradient, final=final, weight=weight))

    def commit(self, worker: int, step: int, chunks: Iterable[int]) -> list[Order]:
        """Makes final what the worker has pushed of `step`."""
        orders: list[Order] = []
        for chunk in chunks:
            at = self._rounds[chunk]
            orders += self._on(chunk, at, at.shard.commit(worker, step, [chunk]))
        return orders

    def awaits(self, worker: int) -> bool:
        """Whether others have come to a step in which only this worker, or it too, is missing."""
        return any(at.shard.awaits(chunk, worker) for chunk, at in self._rounds.items())

    def excuse(self, worker: int) -> list[Order]:
        """The others go on without this worker, which is busy elsewhere; what it has pushed may yet be committed."""
        return [order for chunk, at in self._rounds.items() for order in self._on(chunk, at, at.shard.excuse(worker))]

    def drop(self, worker: int) -> list[Order]:
        """The worker is gone."""
        return [order for chunk, at in self._rounds.items() for order in self._on(chunk, at, at.shard.drop(worker))]

    def join(self, worker: int) -> tuple[int, list[Order]]:
        """The worker takes part again, and is waited for in the step after the one that is returned."""
        newest = max((at.shard.newest() for at in self._rounds.values()), default=0)
        orders: list[Order] = []
        for chunk, at in self._rounds.items():
            orders += self._on(chunk, at, at.shard.join(worker, newest + 1))
        return newest, orders

    def restart(self, worker: int, step: int) -> list[Order]:
        """The host was cut off, and goes on after `step` with this worker alone: of what was under way nobody knows
        what became, and the others have to join."""
        orders: list[Order] = []
        for chunk, at in self._rounds.items():
            orders += [Answer(chunk, who, of, applied=False) for who, of in at.shard.unanswered(chunk)]
            self._rounds[chunk] = fresh = _Round(chunk, {worker})
            fresh.shard.join(worker, step + 1)
        return orders

    def answered(self, chunk: int, *, applied: bool) -> list[Order]:
        """The server has answered what was sent for good of this chunk."""
        at = self._rounds[chunk]
        if at.under_way is None:
            if at.early:  # for the server this step of the host is over: another worker spoke for it then
                at.answer = applied
            return []
        entry, at.under_way = at.under_way.entry, None
        answers = self._on(chunk, at, at.shard.replicate(entry))
        if applied:
            return answers
        return [order._replace(applied=False) if isinstance(order, Answer) else order for order in answers]

    def _on(self, chunk: int, at: _Round, effects: list[Effect]) -> list[Order]:
        at.due.extend(effect for effect in effects if isinstance(effect, Apply))
        orders: list[Order] = [effect for effect in effects if isinstance(effect, Answer)]
        if at.under_way:
            return orders
        if at.due:
            at.under_way = sent = at.due.popleft()
            early, answer, at.early, at.answer = at.early, at.answer, [], None
            if _whose(sent.updates) != early:
                orders.append(_send(chunk, sent.updates, final=True))
            elif answer is None:
                orders.append(Commit(chunk, sent.updates[0].step))
            else:
                orders += self.answered(chunk, applied=answer)
        elif (ready := at.shard.together(chunk)) and _whose(ready) != at.early:
            at.early, at.answer = _whose(ready), None
            orders.append(_send(chunk, ready, final=False))
        return orders


def _send(chunk: int, updates: tuple[Update, ...], *, final: bool) -> Send:
    return Send(chunk, updates[0].step, updates, zlib.crc32(repr(_whose(updates)).encode()), final)


def _whose(updates: Iterable[Update]) -> list[tuple[int, int]]:
    return [(update.worker, update.step) for update in updates]
