"""What one server decides: which update is applied when, and who may go on. No I/O, no clock, no tensors.

A `Shard` takes what workers send (pushes of gradients, commits) and what becomes of them (they are dropped, they join) and
returns effects, in the order in which they must be carried out. Gradients are handles that it passes through.

- **Steps.** Each worker counts its steps from 1. For each chunk the shard knows the last step of each worker that is
  settled, so that a push that comes twice, after a reconnection or a change of server, is answered and not applied again.
- **Commits.** A push may come before its worker knows that the step will be taken (the gradient may yet be clipped, or
  the step left out): it is held, and another push of the same step replaces it, until it is final or committed.
- **Staleness.** The answer to a push of step t lets the worker begin step t + 1. With a bound S it is held back, chunk by
  chunk, while t is more than S ahead of the slowest member's: stale synchronous parallel (Ho et al. 2013). With S = 0 the
  pushes of a step are applied together, as their mean, when every member's is there: synchronous SGD.
- **Members** are the workers that others wait for. One that was dropped and comes back is answered, and waited for again
  from the step that it joins with; in synchronous rounds that are over its gradient comes too late and is refused.
- **Replica.** Where there is one, an answer waits until the replica has acknowledged every update that it may show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple


class Update(NamedTuple):
    """One worker's gradient, or the mean of `weight` workers', of which `mark` says which they are.

    `staleness`: how many updates were applied since the parameters that it was computed with.
    """

    worker: int
    step: int
    gradient: Any
    staleness: int
    weight: int = 1
    mark: int = 0


class Apply(NamedTuple):
    """Update a chunk with the weighted mean of these gradients; its version is then `version`. The shard's entry number `entry`."""

    chunk: int
    updates: tuple[Update, ...]
    version: int
    entry: int


class Answer(NamedTuple):
    """Send a worker the chunk as it is now, in answer to its push. `applied`: whether the gradient counted."""

    chunk: int
    worker: int
    step: int
    applied: bool


class Discard(NamedTuple):
    """The gradient is of no use any more."""

    gradient: Any


Effect = Apply | Answer | Discard


class _Held(NamedTuple):
    step: int
    base: int
    gradient: Any
    final: bool
    weight: int
    mark: int


class _Chunk:
    def __init__(self) -> None:
        self.version = 0
        self.clock: dict[int, int] = {}  # the last settled step of each worker
        self.mark: dict[int, int] = {}  # and of what it was made
        self.refused: dict[int, int] = {}  # the last step of a worker that came too late
        self.held: dict[int, _Held] = {}
        self.waiting: dict[int, int] = {}  # steps of which the answers are held back


class Shard:
    """The chunks of one server, and the workers that train them."""

    def __init__(self, chunks: Iterable[int], members: Iterable[int], staleness: int | None) -> None:
        self.members = set(members)
        self.staleness = staleness
        self.index = 0
        self.replicated_to: int | None = None
        self._unacknowledged: deque[tuple[int, Answer]] = deque()
        self._chunks = {number: _Chunk() for number in sorted(chunks)}

    # -- what workers send ----------------------------------------------------------------------------------------

    def push(
        self,
        worker: int,
        chunk: int,
        step: int,
        base: int,
        gradient: Any,
        *,
        final: bool,
        weight: int = 1,
        mark: int = 0,
    ) -> list[Effect]:
        """A gradient of `chunk`, computed with its version `base`. The worker's earlier steps are behind it."""
        at = self._chunks[chunk]
        if step <= at.clock.get(worker, 0):
            if (step, mark) != (at.clock[worker], at.mark.get(worker, 0)):  # another one of it was applied in this step
                at.refused[worker] = step
            at.waiting[worker] = max(step, at.waiting.get(worker, 0))
            return [Discard(gradient), *self._release(chunk, at)]
        effects: list[Effect] = []
        if worker in at.held:
            effects.append(Discard(at.held.pop(worker).gradient))
        at.clock[worker] = step - 1
        at.held[worker] = _Held(step, base, gradient, final, weight, mark)
        return effects + self._settle(chunk, at)

    def commit(self, worker: int, step: int, chunks: Iterable[int]) -> list[Effect]:
        """Makes what the worker has pushed of `step` for these chunks final."""
        effects: list[Effect] = []
        for number in chunks:
            at = self._chunks[number]
            held = at.held.get(worker)
            if held and held.step == step and not held.final:
                at.held[worker] = held._replace(final=True)
                effects += self._settle(number, at)
        return effects

    def drop(self, worker: int) -> list[Effect]:
        """Nobody waits for this worker any more; what it has committed counts."""
        effects: list[Effect] = []
        for at in self._chunks.values():
            held = at.held.get(worker)
            if held and not held.final:
                effects.append(Discard(at.held.pop(worker).gradient))
        return effects + self.excuse(worker)

    def excuse(self, worker: int) -> list[Effect]:
        """Nobody waits for this worker any more; what it has pushed may yet be committed."""
        self.members.discard(worker)
        return [effect for number, at in self._chunks.items() for effect in self._settle(number, at)]

    def join(self, worker: int, step: int) -> list[Effect]:
        """The worker is waited for from `step` on, which must be later than all that it has pushed."""
        self.members.add(worker)
        effects: list[Effect] = []
        for number, at in self._chunks.items():
            at.clock[worker] = max(at.clock.get(worker, 0), step - 1)
            effects += self._settle(number, at)
        return effects

    def together(self, chunk: int) -> tuple[Update, ...]:
        """What the next synchronous update will be made of if all of it is committed as it is; empty until every member's is there."""
        at = self._chunks[chunk]
        floor = self._floor(at)
        if floor is None or any(at.clock.get(m, 0) == floor and m not in at.held for m in self.members):
            return ()
        return tuple(
            self._update(at, worker, held)
            for worker, held in sorted(at.held.items())
            if held.step == floor + 1 and (held.final or worker in self.members)
        )

    def awaits(self, chunk: int, worker: int) -> bool:
        """Whether the next synchronous update waits for this member, while others are done with theirs."""
        at = self._chunks[chunk]
        done = {who for who, held in at.held.items() if held.final}
        return worker in self.members - done and at.clock.get(worker, 0) == self._floor(at) and bool(done)

    def unanswered(self, chunk: int) -> list[tuple[int, int]]:
        """Workers and the steps of which they have pushed this chunk and not heard."""
        at = self._chunks[chunk]
        waiting = {answer.worker: answer.step for _, answer in self._unacknowledged if answer.chunk == chunk}
        return sorted({**waiting, **at.waiting, **{worker: held.step for worker, held in at.held.items()}}.items())

    def newest(self, worker: int | None = None) -> int:
        """The last step of which `worker`, or any, has pushed anything: one who joins begins after it."""
        steps = [
            step
            for at in self._chunks.values()
            for who, step in [*at.clock.items(), *((who, held.step) for who, held in at.held.items())]
            if worker in (None, who)
        ]
        return max(steps, default=0)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def replicate(self, acknowledged: int | None) -> list[Effect]:
        """The replica has every entry up to `acknowledged`; None: there is no replica."""
        self.replicated_to = acknowledged
        effects: list[Effect] = []
        while self._unacknowledged and (acknowledged is None or self._unacknowledged[0][0] <= acknowledged):
            effects.append(self._unacknowledged.popleft()[1])
        return effects

    def follow(self, chunk: int, updates: Iterable[tuple[int, int, int]], version: int, index: int) -> bool:
        """On a replica: an entry of the primary's, as workers, steps and marks. Whether it is new and to be applied."""
        if index <= self.index:
            return False
        at = self._chunks[chunk]
        at.version, self.index = version, index
        for worker, step, mark in updates:
            at.clock[worker], at.mark[worker] = step, mark
        return True

    def state(self) -> dict[str, Any]:
        """All that `restore` needs to go on from here; plain values."""
        return {
            "index": self.index,
            "members": sorted(self.members),
            "chunks": {number: [at.version, dict(at.clock), dict(at.mark)] for number, at in self._chunks.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.index, self.members = state["index"], set(state["members"])
        for number, (version, clock, mark) in state["chunks"].items():
            at = self._chunks[int(number)]
            at.version, at.clock = version, {int(worker): step for worker, step in clock.items()}
            at.mark = {int(worker): value for worker, value in mark.items()}

    def version(self, chunk: int) -> int:
        """How many times the chunk was updated."""
        return self._chunks[chunk].version

    # -- inside -----------------------------------------------------------------------------------------------------

    def _floor(self, at: _Chunk) -> int | None:
        """The slowest member's last settled step; None: nobody is waited for."""
        return min((at.clock.get(member, 0) for member in self.members), default=None)

    def _settle(self, number: int, at: _Chunk) -> list[Effect]:
        """Apply what can be applied, and answer who can be answered."""
        effects: list[Effect] = []
        if self.staleness == 0:
            while ready := self._round(at, effects):
                effects.append(self._applied(number, at, ready))
        else:
            for worker in sorted(worker for worker, held in at.held.items() if held.final):
                effects.append(self._applied(number, at, [worker]))
        return effects + self._release(number, at)

    def _round(self, at: _Chunk, effects: list[Effect]) -> list[int]:
        """The workers whose gradients make up the next synchronous update, once all of it is there."""
        floor = self._floor(at)
        final = {worker: held for worker, held in at.held.items() if held.final}
        if floor is None:
            return sorted(worker for worker, held in final.items() if held.step == min(h.step for h in final.values()))
        for worker, held in final.items():
            if held.step <= floor:
                effects.append(Discard(at.held.pop(worker).gradient))
                at.clock[worker] = at.refused[worker] = at.waiting[worker] = held.step
        missing = [m for m in self.members if at.clock.get(m, 0) == floor and m not in final]
        if missing:
            return []
        return sorted(worker for worker, held in final.items() if held.step == floor + 1)

    def _applied(self, number: int, at: _Chunk, workers: list[int]) -> Apply:
        updates = []
        for worker in workers:
            held = at.held.pop(worker)
            at.clock[worker] = at.waiting[worker] = held.step
            at.mark[worker] = held.mark
            updates.append(self._update(at, worker, held))
        at.version += 1
        self.index += 1
        return Apply(number, tuple(updates), at.version, self.index)

    def _update(self, at: _Chunk, worker: int, held: _Held) -> Update:
        # A server that went on from a snapshot may have an older version than a worker.
        return Update(worker, held.step, held.gradient, max(0, at.version - held.base), held.weight, held.mark)

    def _release(self, number: int, at: _Chunk) -> list[Effect]:
        floor = self._floor(at)
        released: list[Effect] = []
        for worker, step in sorted(at.waiting.items()):
            if self.staleness is None or floor is None or step - floor <= self.staleness:
                del at.waiting[worker]
                answer = Answer(number, worker, step, at.refused.get(worker) != step)
                if self.replicated_to is not None and self.replicated_to < self.index:
                    self._unacknowledged.append((self.index, answer))
                else:
                    released.append(answer)
        return released
