"""Aggregation of one host's pushes into one push per chunk and step. No I/O, no clock, no tensors.

The host leader owns a `HostAggregator`. The host's workers push to it as to a server with staleness 0, and an
`UpdateController` decides which gradients form a round. The mean of a round is not applied: it is pushed to the chunk's server
under a number that all workers of the host share. The workers are answered when the server has answered that push. The mean is
sent as soon as every worker has pushed a chunk, even if some pushes are not committed. It is committed once all are, and
sent again if a gradient was replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from distrib.training.parameter_server.update_rules import (
    ApplyUpdate,
    Effect,
    PushReply,
    UpdateController,
    WeightedGradient,
)


class PushMean(NamedTuple):
    """Push the mean of these gradients to the chunk's server, in place of an earlier push of the same step."""

    chunk: int
    step: int
    updates: tuple[WeightedGradient, ...]
    final: bool


class CommitMean(NamedTuple):
    """Commit the mean that was pushed of this step."""

    chunk: int
    step: int


LeaderAction = PushMean | CommitMean | PushReply


class _ChunkRound:
    """One chunk: its controller, and the push that is in flight to the server."""

    def __init__(self, chunk: int, members: Iterable[int]) -> None:
        self.controller = UpdateController([chunk], members, 0)
        self.controller.set_replicated(0)  # no reply before the server's
        self.uncommitted: list[tuple[int, int]] = []  # workers and steps of the mean that was pushed and not committed
        self.in_flight: ApplyUpdate | None = None  # committed and not answered
        self.due: deque[ApplyUpdate] = deque()
        self.last_step = 0  # the server accepts only steps after it


class HostAggregator:
    """Aggregation of the pushes of one host's workers, for the chunks of one table. Methods return actions to carry out in order."""

    def __init__(self, chunks: Iterable[int], members: Iterable[int]) -> None:
        first = set(members)
        self._rounds = {chunk: _ChunkRound(chunk, first) for chunk in chunks}

    def push(
        self, worker: int, chunk: int, step: int, gradient: object, *, final: bool, weight: int = 1
    ) -> list[LeaderAction]:
        """Handle a worker's gradient.

        Args:
            worker: Rank of the worker.
            chunk: Number of the chunk.
            step: The worker's step, from 1.
            gradient: Handle of the gradient.
            final: False if the gradient may still be replaced before it is committed.
            weight: 0 if the worker has no gradient in this step, else 1.
        """
        state = self._rounds[chunk]
        if (worker, step) in state.uncommitted:
            state.uncommitted = []  # the mean that was pushed has an outdated gradient
        effects = state.controller.push(worker, chunk, step, 0, gradient, final=final, weight=weight)
        return self._actions(chunk, state, effects)

    def commit(self, worker: int, step: int, chunks: Iterable[int]) -> list[LeaderAction]:
        """Make the worker's pushes of a step final.

        Args:
            worker: Rank of the worker.
            step: The step.
            chunks: Numbers of the chunks.
        """
        actions: list[LeaderAction] = []
        for chunk in chunks:
            state = self._rounds[chunk]
            actions += self._actions(chunk, state, state.controller.commit(worker, step, [chunk]))
        return actions

    def is_blocked_by(self, worker: int) -> bool:
        """Return True if a round waits for this worker while another worker's push of it is final.

        Args:
            worker: Rank of the worker.
        """
        return any(state.controller.is_blocked_by(chunk, worker) for chunk, state in self._rounds.items())

    def remove_member(self, worker: int, *, keep_pending: bool = False) -> list[LeaderAction]:
        """Stop waiting for a worker.

        Args:
            worker: Rank of the worker.
            keep_pending: True if its uncommitted pushes may be committed later; False if it has died.
        """
        return [
            action
            for chunk, state in self._rounds.items()
            for action in self._actions(chunk, state, state.controller.remove_member(worker, keep_pending=keep_pending))
        ]

    def join(self, worker: int) -> tuple[int, list[LeaderAction]]:
        """Wait for a worker again.

        Args:
            worker: Rank of the worker.

        Returns:
            The last step of the host, after which the worker continues, and the actions to carry out.
        """
        last = max((state.controller.last_step() for state in self._rounds.values()), default=0)
        actions: list[LeaderAction] = []
        for chunk, state in self._rounds.items():
            actions += self._actions(chunk, state, state.controller.join(worker, last + 1))
        return last, actions

    def restart(self, worker: int, step: int) -> list[LeaderAction]:
        """Continue with the leader alone after the host was disconnected; pushes in flight are rejected.

        Args:
            worker: Rank of the leader.
            step: The last step, as the servers count.
        """
        actions: list[LeaderAction] = []
        for chunk, state in self._rounds.items():
            unanswered = state.controller.unanswered(chunk)
            actions += [PushReply(chunk, other, of_step, applied=False) for other, of_step in unanswered]
            self._rounds[chunk] = fresh = _ChunkRound(chunk, {worker})
            fresh.controller.join(worker, step + 1)
            fresh.last_step = step
        return actions

    def on_reply(self, chunk: int, *, applied: bool) -> list[LeaderAction]:
        """Handle the server's reply to a committed mean.

        Args:
            chunk: Number of the chunk.
            applied: False if the server rejected the mean.
        """
        state = self._rounds[chunk]
        if state.in_flight is None:
            return []
        entry, state.in_flight = state.in_flight.entry, None
        actions = self._actions(chunk, state, state.controller.set_replicated(entry))
        if applied:
            return actions
        return [action._replace(applied=False) if isinstance(action, PushReply) else action for action in actions]

    def _actions(self, chunk: int, state: _ChunkRound, effects: list[Effect]) -> list[LeaderAction]:
        state.due.extend(effect for effect in effects if isinstance(effect, ApplyUpdate))
        actions: list[LeaderAction] = [effect for effect in effects if isinstance(effect, PushReply)]
        if state.in_flight:
            return actions
        while state.due and state.due[0].updates[0].step <= state.last_step:  # the host has pushed this step before
            replies = state.controller.set_replicated(state.due.popleft().entry)
            actions += [reply._replace(applied=False) for reply in replies if isinstance(reply, PushReply)]
        if state.due:
            state.in_flight = sent = state.due.popleft()
            state.last_step = sent.updates[0].step
            uncommitted, state.uncommitted = state.uncommitted, []
            if _contributors(sent.updates) == uncommitted:
                actions.append(CommitMean(chunk, sent.updates[0].step))
            else:
                actions.append(PushMean(chunk, sent.updates[0].step, sent.updates, final=True))
        elif (ready := state.controller.complete_round(chunk)) and _contributors(ready) != state.uncommitted:
            state.uncommitted = _contributors(ready)
            state.last_step = max(state.last_step, ready[0].step - 1)  # the server drops gradients of earlier steps
            actions.append(PushMean(chunk, ready[0].step, ready, final=False))
        return actions


def _contributors(updates: Iterable[WeightedGradient]) -> list[tuple[int, int]]:
    return [(update.worker, update.step) for update in updates]
