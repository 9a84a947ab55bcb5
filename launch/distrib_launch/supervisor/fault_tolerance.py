"""Fault tolerance of mode async: the job continues without a worker, and without a server that has a replica.

A server that died is restarted at once. A worker is restarted after a delay, if another worker runs that never failed. The job is over
when the workers that never failed have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from distrib_launch import rank_environment
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.rank_exit import RankExit
from distrib_launch.supervisor.rank_state import JobState, RankState

MAX_RANK_RESTARTS = 3
"""Limit of one rank's restarts on its host; a rank that dies repeatedly has a defect."""

RESTART_DELAY_SECONDS = 2.0
"""Delay of a worker's restart: a cause that ends all workers ends the job within this time."""


class ToleranceRules(NamedTuple):
    """Rules of the fault tolerance: decisions from the state of a job. Pure."""

    plan: LaunchPlan
    exits: Sequence[RankExit]
    """Exits of all ranks that have ended."""
    restarted: Set[int] = frozenset()
    """Workers that were restarted."""

    @property
    def is_training(self) -> bool:
        """Return True if a worker runs that never failed."""
        gone = {one.rank for one in self.exits} | self.restarted
        return any(rank.role == "worker" and rank.rank not in gone for rank in self.plan.ranks)

    @property
    def is_over(self) -> bool:
        """Return True if only servers and restarted workers run."""
        return self.plan.mode == "async" and not self.is_training

    @property
    def succeeded(self) -> bool:
        """Return True if a worker completed its script, even if other ranks failed."""
        workers = {rank.rank for rank in self.plan.ranks if rank.role == "worker"}
        return self.plan.mode == "async" and not workers.isdisjoint(self._finished)

    @property
    def main(self) -> int | None:
        """Return the worker that prints and saves: the first that never failed. The parameter servers apply the same rule."""
        failed = {one.rank for one in self.exits if one.failed} | self.restarted
        return next((rank.rank for rank in self.plan.ranks if rank.role == "worker" and rank.rank not in failed), None)

    @property
    def _finished(self) -> set[int]:
        return {one.rank for one in self.exits if not one.failed and not one.stopped_by}

    def continues_without(self, failed: RankExit) -> bool:
        """Return True if the job continues without a rank that failed.

        Args:
            failed: Exit of the rank.
        """
        if self.plan.mode != "async":
            return False
        role = self.plan.ranks[failed.rank].role
        lost = {one.rank for one in self.exits if one.failed} | (self.restarted - self._finished)
        left = [rank for rank in self.plan.ranks if rank.role == role and rank.rank not in lost]
        return bool(left) and (role == "worker" or self.plan.strategy.replicas > 0)

    def may_restart(self, failed: RankExit, own_restarts: int) -> bool:
        """Return True if a rank that failed may be restarted on its host.

        Args:
            failed: Exit of the rank.
            own_restarts: Number of its restarts after failures on a reachable host.
        """
        by_itself = not failed.lost and not failed.stopped_by
        return self.plan.mode == "async" and by_itself and own_restarts < MAX_RANK_RESTARTS

    def may_rejoin(self, failed: RankExit, own_restarts: int) -> bool:
        """Return True if a rank whose host was cut off and is reachable again may be restarted.

        Args:
            failed: Exit of the rank.
            own_restarts: Number of its restarts after failures on a reachable host.
        """
        by_itself = self.plan.mode == "async" and failed.failed and not failed.stopped_by
        return by_itself and (bool(failed.lost) or own_restarts < MAX_RANK_RESTARTS) and self.is_training

    def warning(self, failed: RankExit, how: str, *, restarted: bool, was_main: bool) -> str:
        """Return the warning that a rank died.

        Args:
            failed: Exit of the rank.
            how: Its message, signal or exit code.
            restarted: True if it was restarted; else the job continues without it.
            was_main: True if it was the worker that prints and saves.
        """
        role = "worker" if self.plan.ranks[failed.rank].role == "worker" else "parameter server"
        what = f"was lost ({how}); the job continues without it"
        if restarted:
            what = f"{'is reachable again' if failed.lost else f'died ({how})'} and was restarted"
        next_main = "; the next worker prints and saves now" if was_main else ""
        return f"{role} rank {failed.rank} on {failed.host} {what}{next_main}"

    def missing_replica(self, failed: RankExit) -> str:
        """Return a warning if the job ends because a server had no replica, else an empty string.

        Args:
            failed: Exit of the rank.
        """
        if self.plan.ranks[failed.rank].role != "server" or self.plan.strategy.replicas:
            return ""
        return (
            f"parameter server rank {failed.rank} on {failed.host} was lost, with its shard of the model: the job ends\n"
            "  use --replicas 1 to survive the loss of a server"
        )


class FaultTolerance:
    """Fault tolerance of a running job: restarts ranks that died, or continues without them."""

    def __init__(self, job: JobState, send: Callable[[RankState, Kind, dict[str, Any]], None]) -> None:
        self._job, self._send = job, send

    @property
    def rules(self) -> ToleranceRules:
        """Return the rules for the current state of the job."""
        return ToleranceRules(
            self._job.plan, self.exits, {state.plan.rank for state in self._job.ranks if state.first_exit}
        )

    @property
    def exits(self) -> list[RankExit]:
        """Return the exits of the ranks that have ended."""
        return [state.exit for state in self._job.ranks if state.exit]

    @property
    def first_exits(self) -> list[RankExit]:
        """Return the same, with the first exit of each restarted worker: only that one counts as its failure."""
        found = [state.first_exit or state.exit for state in self._job.ranks]
        return [one for one in found if one]

    @property
    def main(self) -> int | None:
        """Return the worker that prints and saves."""
        return self.rules.main

    def may_rejoin(self, state: RankState) -> bool:
        """Return True if a rank that was cut off and connects again is restarted.

        Args:
            state: The rank.
        """
        return state.exit is not None and self.rules.may_rejoin(state.exit, state.own_restarts)

    def on_success(self, state: RankState) -> None:
        """Note that a rank ended with exit code 0; servers must not wait for a worker that never trained.

        Args:
            state: The rank.
        """
        if state.is_worker and not state.prepared:
            self._notify_servers(state)

    def on_death(self, state: RankState) -> bool:
        """Handle the failure of a rank.

        Args:
            state: The rank.

        Returns:
            True if the job continues.
        """
        failed, rules = state.exit, self.rules
        assert failed
        self._notify_servers(state)
        may_restart = rules.may_restart(failed, state.own_restarts)
        if may_restart and not state.is_worker:
            self.restart(state)
        elif may_restart and rules.is_training:
            state.restart_at = time.monotonic() + RESTART_DELAY_SECONDS
        elif rules.continues_without(failed):
            self._warn(state, restarted=False)
        else:
            if rules.is_training and (why := rules.missing_replica(failed)):
                self._job.warn(why)
            return False
        return True

    def restart_due(self, now: float) -> None:
        """Restart a worker whose delay is over, or give it up if it is unreachable or the training has ended.

        Args:
            now: Monotonic time.
        """
        for state in self._job.ranks:
            if not state.restart_at:
                continue
            is_connected = state.channel is not None and not state.channel.closed
            if not is_connected or not self.rules.is_training:
                state.restart_at = 0.0
                self._warn(state, restarted=False)
            elif now >= state.restart_at:
                self.restart(state)
                return  # the restart may have ended the job

    def restart(self, state: RankState) -> None:
        """Start the script of a rank again in its agent.

        Args:
            state: A rank that has ended.
        """
        self._warn(state, restarted=True)
        assert state.exit and state.assignment
        if state.is_worker:
            state.first_exit = state.first_exit or state.exit
        state.restarts += 1
        state.own_restarts += not state.exit.lost
        state.exit, state.restart_at, state.step, state.closing = None, 0.0, -1, False
        environment = rank_environment.restarted(state.assignment.environment)
        self._send(state, Kind.ASSIGN, state.assignment._replace(environment=environment)._asdict())
        self._notify_servers(state)
        if not state.is_worker:
            for other in self._job.ranks:
                if other.exit and other.exit.failed:
                    self._send(state, Kind.EVENT, {"rank": other.plan.rank, "dead": True})

    def _notify_servers(self, state: RankState) -> None:
        """Report the state of a rank to the parameter servers, so that none waits for a dead one."""
        for server in self._job.servers:
            if not server.exit:
                self._send(server, Kind.EVENT, {"rank": state.plan.rank, "dead": state.exit is not None})

    def _warn(self, state: RankState, *, restarted: bool) -> None:
        failed, rules = state.exit, self.rules
        assert failed
        before = rules._replace(exits=[one for one in rules.exits if one is not failed])
        was_reported = restarted and failed.lost
        was_main = failed.rank == before.main and not was_reported and rules.is_training
        self._job.warn(rules.warning(failed, failed.message or failed.how, restarted=restarted, was_main=was_main))
