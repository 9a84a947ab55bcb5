"""What an asynchronous job bears: it goes on without a worker, and without a server that has a replica. Pure.

A server that died is started again at once. So is a worker, a little later and if others have not failed: it helps those that
were there from the start, and the job is over when these are at their end. `again` are the workers that were started again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.supervisor.rank_exit import RankExit

MOST_RESTARTS = 3
AGAIN_SECONDS = 2.0
"""How long after a worker's death one of the others must be running: what ends all of them at once is not tried twice."""

ASYNC_HOST_SILENCE_SECONDS = 30.0
"""A host that is cut off for less than that may come back: its workers join the others again."""


def goes_on_without(
    plan: LaunchPlan, ending: RankExit, endings: Sequence[RankExit], again: Set[int] = frozenset()
) -> bool:
    """Whether the job is not over with this failed rank; `endings` are those of all ranks that have ended."""
    if plan.mode != "async":
        return False
    role = plan.ranks[ending.rank].role
    failed = {other.rank for other in endings if other.failed} | (again - _finished(endings))
    left = [rank for rank in plan.ranks if rank.role == role and rank.rank not in failed]
    return bool(left) and (role == "worker" or plan.strategy.replicas > 0)


def may_start_again(plan: LaunchPlan, ending: RankExit, before: int) -> bool:
    """Whether a rank can be started anew where it was: its host is there, and it was not too often, `before` times already."""
    return plan.mode == "async" and not ending.lost and not ending.stopped_by and before < MOST_RESTARTS


def may_return(plan: LaunchPlan, ending: RankExit, endings: Sequence[RankExit], again: Set[int], before: int) -> bool:
    """Whether a rank whose host was cut off, and can be reached again, is started anew; `before`: how often it died there."""
    there = plan.mode == "async" and ending.failed and not ending.stopped_by
    return there and (bool(ending.lost) or before < MOST_RESTARTS) and is_training(plan, endings, again)


def is_training(plan: LaunchPlan, endings: Sequence[RankExit], again: Set[int]) -> bool:
    """Whether a worker is running that has never failed: the job is not over, and a worker that died has somebody to help."""
    gone = {ending.rank for ending in endings} | again
    return any(rank.role == "worker" and rank.rank not in gone for rank in plan.ranks)


def is_over(plan: LaunchPlan, endings: Sequence[RankExit], again: Set[int]) -> bool:
    """Whether nobody needs those any more that are still there: servers, and workers that were started again."""
    return plan.mode == "async" and not is_training(plan, endings, again)


def succeeded(plan: LaunchPlan, endings: Sequence[RankExit]) -> bool:
    """Whether the job reached its end in spite of failed ranks: a worker did, of its own accord."""
    workers = {rank.rank for rank in plan.ranks if rank.role == "worker"}
    return plan.mode == "async" and not workers.isdisjoint(_finished(endings))


def main(plan: LaunchPlan, endings: Sequence[RankExit], again: Set[int]) -> int | None:
    """The worker that prints and saves: the first that has never failed. The parameter servers see to it, in their own time."""
    failed = {ending.rank for ending in endings if ending.failed} | again
    return next((rank.rank for rank in plan.ranks if rank.role == "worker" and rank.rank not in failed), None)


def lines(plan: LaunchPlan, ending: RankExit, how: str, *, again: bool, was_main: bool) -> str:
    """The warning that a rank died, and what became of it."""
    role = "worker" if plan.ranks[ending.rank].role == "worker" else "parameter server"
    what = f"is gone ({how}); the job goes on without it"
    if again:
        what = f"{'can be reached again' if ending.lost else f'died ({how})'} and was started again"
    next_one = "; the next worker prints and saves now" if was_main else ""
    return f"{role} rank {ending.rank} on {ending.host} {what}{next_one}"


def why_over(plan: LaunchPlan, ending: RankExit) -> str:
    """What would have let the job go on without this failed rank; empty where nothing would."""
    if plan.ranks[ending.rank].role != "server" or plan.strategy.replicas:
        return ""
    return (
        f"parameter server rank {ending.rank} on {ending.host} is gone, and its part of the model with it: the job ends; "
        "--replicas 1 survives the loss of a server"
    )


def _finished(endings: Sequence[RankExit]) -> set[int]:
    """The ranks that reached their end and were not told to."""
    return {ending.rank for ending in endings if not ending.failed and not ending.stopped_by}
