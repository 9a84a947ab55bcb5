"""Rules of a parameter server: when a gradient is applied and when its worker may continue. No I/O, no clock, no tensors.

`UpdateController` receives events (pushes, commits, membership changes) and returns effects to carry out in order. Gradients
are opaque handles.

- **Steps.** Each worker counts its steps from 1. The controller stores the last settled step of each worker for each chunk, so
  a push that is repeated after a reconnection is answered and not applied again.
- **Commits.** A push may arrive before its worker knows that the step will be taken (clipping, skipped steps). It is pending,
  and another push of the same step replaces it, until it is final or committed. A commit may scale it, as clipping of the norm does.
- **Staleness bound.** The reply to a push of step t lets the worker begin step t + 1. With `max_steps_ahead` S it is held
  back, per chunk, while t is more than S ahead of the slowest member: stale synchronous parallel (Ho et al. 2013). With S = 0
  the pushes of a step are applied together, as their mean, once every member has pushed: synchronous SGD.
- **Members** are the workers that others wait for. A removed worker that returns is answered, and is waited for again from the
  step that it joins with. In a synchronous round that is over, its gradient is late and rejected.
- **Replication.** With a replica, a reply waits until the replica has acknowledged every update that the reply may show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple


class WeightedGradient(NamedTuple):
    """One worker's gradient of a step, or the mean of `weight` workers' gradients.

    `staleness` is the number of updates since the parameters that it was computed with.
    """

    worker: int
    step: int
    gradient: Any
    staleness: int
    weight: int = 1
    scale: float = 1.0
    """Factor of the gradient, known since the commit."""


class ApplyUpdate(NamedTuple):
    """Update a chunk with the weighted mean of gradients; the chunk then has `version`, the log has `entry` entries."""

    chunk: int
    updates: tuple[WeightedGradient, ...]
    version: int
    entry: int


class PushReply(NamedTuple):
    """Send a worker the chunk's present value in reply to its push. `applied` is False for a rejected gradient."""

    chunk: int
    worker: int
    step: int
    applied: bool


class DiscardGradient(NamedTuple):
    """Release a gradient that will not be applied."""

    gradient: Any


Effect = ApplyUpdate | PushReply | DiscardGradient


class _PendingPush(NamedTuple):
    step: int
    base: int
    gradient: Any
    final: bool
    weight: int
    scale: float = 1.0


class _ChunkState:
    def __init__(self) -> None:
        self.version = 0
        self.clock: dict[int, int] = {}  # last settled step of each worker
        self.rejected: dict[int, int] = {}  # last step of a worker that came too late
        self.pending: dict[int, _PendingPush] = {}
        self.waiting: dict[int, int] = {}  # steps whose replies are held back


class UpdateController:
    """Decision which gradients of one server's chunks are applied, and when workers may continue.

    Args:
        chunks: Numbers of the chunks.
        members: Workers for which other workers wait.
        max_steps_ahead: Staleness bound S in steps; 0 for synchronous SGD, None for no bound.
    """

    def __init__(self, chunks: Iterable[int], members: Iterable[int], max_steps_ahead: int | None) -> None:
        self.members = set(members)
        self.max_steps_ahead = max_steps_ahead
        self.index = 0
        """Number of log entries: updates of any chunk so far."""
        self.replicated_to: int | None = None
        """Last entry that the replica has acknowledged; None without a replica."""
        self._unacknowledged: deque[tuple[int, PushReply]] = deque()
        self.chunks = {number: _ChunkState() for number in sorted(chunks)}

    # -- messages of workers ----------------------------------------------------------------------------------------

    def push(
        self, worker: int, chunk: int, step: int, base: int, gradient: Any, *, final: bool, weight: int = 1
    ) -> list[Effect]:
        """Handle a pushed gradient. The worker's earlier steps are behind it.

        Args:
            worker: Rank of the worker, or the number of a group of workers that push together.
            chunk: Number of the chunk.
            step: The worker's step, from 1.
            base: Version of the chunk that the gradient was computed with.
            gradient: Handle of the gradient.
            final: False if the gradient may still be replaced before it is committed.
            weight: Number of workers whose mean it is; 0 for an empty gradient.
        """
        state = self.chunks[chunk]
        if step <= state.clock.get(worker, 0):
            if step != state.clock[worker]:  # a later step was applied meanwhile
                state.rejected[worker] = step
            state.waiting[worker] = max(step, state.waiting.get(worker, 0))
            return [DiscardGradient(gradient), *self._release(chunk, state)]
        effects: list[Effect] = []
        if worker in state.pending:
            effects.append(DiscardGradient(state.pending.pop(worker).gradient))
        state.clock[worker] = step - 1
        state.pending[worker] = _PendingPush(step, base, gradient, final, weight)
        return effects + self._advance(chunk, state)

    def commit(self, worker: int, step: int, chunks: Iterable[int], scale: float = 1.0) -> list[Effect]:
        """Make the worker's pending pushes of a step final.

        Args:
            worker: Rank of the worker or number of its group.
            step: The step; pushes of another step stay as they are.
            chunks: Numbers of the chunks.
            scale: Factor of the gradients.
        """
        effects: list[Effect] = []
        for number in chunks:
            state = self.chunks[number]
            push = state.pending.get(worker)
            if push and push.step == step and not push.final:
                state.pending[worker] = push._replace(final=True, scale=scale)
                effects += self._advance(number, state)
        return effects

    def remove_member(self, worker: int, *, keep_pending: bool = False) -> list[Effect]:
        """Stop waiting for a worker. Its committed pushes count.

        Args:
            worker: Rank of the worker or number of its group.
            keep_pending: True if pushes that are not committed may be committed later; False discards them.
        """
        effects: list[Effect] = []
        for state in self.chunks.values():
            push = state.pending.get(worker)
            if push and not push.final and not keep_pending:
                effects.append(DiscardGradient(state.pending.pop(worker).gradient))
        self.members.discard(worker)
        for number, state in self.chunks.items():
            effects += self._advance(number, state)
        return effects

    def join(self, worker: int, step: int) -> list[Effect]:
        """Wait for a worker from a step on.

        Args:
            worker: Rank of the worker or number of its group.
            step: Its next step, later than any step that it has pushed.
        """
        self.members.add(worker)
        effects: list[Effect] = []
        for number, state in self.chunks.items():
            state.clock[worker] = max(state.clock.get(worker, 0), step - 1)
            effects += self._advance(number, state)
        return effects

    # -- queries ----------------------------------------------------------------------------------------------------

    def complete_round(self, chunk: int) -> tuple[WeightedGradient, ...]:
        """Return the gradients of the next synchronous update, committed or not; empty until every member has pushed.

        Args:
            chunk: Number of the chunk.
        """
        state = self.chunks[chunk]
        floor = self._floor(state)
        if floor is None or any(state.clock.get(m, 0) == floor and m not in state.pending for m in self.members):
            return ()
        return tuple(
            self._weighted(state, worker, push)
            for worker, push in sorted(state.pending.items())
            if push.step == floor + 1 and (push.final or worker in self.members)
        )

    def is_blocked_by(self, chunk: int, worker: int) -> bool:
        """Return True if the next synchronous update waits for this member and another worker's push is final.

        Args:
            chunk: Number of the chunk.
            worker: Rank of the worker.
        """
        state = self.chunks[chunk]
        final = {other for other, push in state.pending.items() if push.final}
        return worker in self.members - final and state.clock.get(worker, 0) == self._floor(state) and bool(final)

    def unanswered(self, chunk: int) -> list[tuple[int, int]]:
        """Return pairs of worker and step of this chunk that have not been answered.

        Args:
            chunk: Number of the chunk.
        """
        state = self.chunks[chunk]
        waiting = {reply.worker: reply.step for _, reply in self._unacknowledged if reply.chunk == chunk}
        pending = {worker: push.step for worker, push in state.pending.items()}
        return sorted({**waiting, **state.waiting, **pending}.items())

    def last_step(self, worker: int | None = None) -> int:
        """Return the last step of which a worker has pushed anything; a joining worker begins after it.

        Args:
            worker: Rank of the worker or number of its group; None for any worker.
        """
        steps = [
            step
            for state in self.chunks.values()
            for other, step in [*state.clock.items(), *((other, push.step) for other, push in state.pending.items())]
            if worker in (None, other)
        ]
        return max(steps, default=0)

    def version(self, chunk: int) -> int:
        """Return the number of updates of a chunk so far.

        Args:
            chunk: Number of the chunk.
        """
        return self.chunks[chunk].version

    # -- replication --------------------------------------------------------------------------------------------------

    def set_replicated(self, entry: int | None) -> list[Effect]:
        """Record the progress of the replica, and return the replies that may be sent now.

        Args:
            entry: Last entry that it has acknowledged; None without a replica.
        """
        self.replicated_to = entry
        effects: list[Effect] = []
        while self._unacknowledged and (entry is None or self._unacknowledged[0][0] <= entry):
            effects.append(self._unacknowledged.popleft()[1])
        return effects

    def follow(self, chunk: int, updates: Iterable[tuple[int, int]], version: int, entry: int) -> bool:
        """Record an entry of the primary's log, on a replica. Returns True if it is new and must be applied.

        Args:
            chunk: Number of the chunk.
            updates: Workers and steps that it consists of.
            version: The chunk's version after it.
            entry: Its number in the log.
        """
        if entry <= self.index:
            return False
        state = self.chunks[chunk]
        state.version, self.index = version, entry
        state.clock.update(updates)
        return True

    def state(self) -> dict[str, Any]:
        """Return plain values from which `restore` continues."""
        return {
            "index": self.index,
            "members": sorted(self.members),
            "chunks": {number: [state.version, dict(state.clock)] for number, state in self.chunks.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`.

        Args:
            state: The values, perhaps with keys that JSON has made strings.
        """
        self.index, self.members = state["index"], set(state["members"])
        for number, (version, clock) in state["chunks"].items():
            chunk = self.chunks[int(number)]
            chunk.version, chunk.clock = version, {int(worker): step for worker, step in clock.items()}

    # -- internals ----------------------------------------------------------------------------------------------------

    def _floor(self, state: _ChunkState) -> int | None:
        """Return the slowest member's last settled step; None without members."""
        return min((state.clock.get(member, 0) for member in self.members), default=None)

    def _advance(self, number: int, state: _ChunkState) -> list[Effect]:
        """Apply all pushes that can be applied, and send all replies that may be sent."""
        effects: list[Effect] = []
        if self.max_steps_ahead == 0:
            while ready := self._next_round(state, effects):
                effects.append(self._apply(number, state, ready))
        else:
            for worker in sorted(worker for worker, push in state.pending.items() if push.final):
                effects.append(self._apply(number, state, [worker]))
        return effects + self._release(number, state)

    def _next_round(self, state: _ChunkState, effects: list[Effect]) -> list[int]:
        """Return the workers of the next synchronous update once it is complete, and reject late pushes."""
        floor = self._floor(state)
        final = {worker: push for worker, push in state.pending.items() if push.final}
        if floor is None:
            return sorted(worker for worker, push in final.items() if push.step == min(p.step for p in final.values()))
        for worker, push in final.items():
            if push.step <= floor:
                effects.append(DiscardGradient(state.pending.pop(worker).gradient))
                state.clock[worker] = state.rejected[worker] = state.waiting[worker] = push.step
        if any(state.clock.get(member, 0) == floor and member not in final for member in self.members):
            return []
        return sorted(worker for worker, push in final.items() if push.step == floor + 1)

    def _apply(self, number: int, state: _ChunkState, workers: list[int]) -> ApplyUpdate:
        updates = []
        for worker in workers:
            push = state.pending.pop(worker)
            state.clock[worker] = state.waiting[worker] = push.step
            updates.append(self._weighted(state, worker, push))
        state.version += 1
        self.index += 1
        return ApplyUpdate(number, tuple(updates), state.version, self.index)

    def _weighted(self, state: _ChunkState, worker: int, push: _PendingPush) -> WeightedGradient:
        # A server restored from a snapshot may have an older version than a worker.
        staleness = max(0, state.version - push.base)
        return WeightedGradient(worker, push.step, push.gradient, staleness, push.weight, push.scale)

    def _release(self, number: int, state: _ChunkState) -> list[Effect]:
        floor = self._floor(state)
        released: list[Effect] = []
        for worker, step in sorted(state.waiting.items()):
            if self.max_steps_ahead is None or floor is None or step - floor <= self.max_steps_ahead:
                del state.waiting[worker]
                reply = PushReply(number, worker, step, state.rejected.get(worker) != step)
                if self.replicated_to is not None and self.replicated_to < self.index:
                    self._unacknowledged.append((self.index, reply))
                else:
                    released.append(reply)
        return released
