"""What an asynchronous job bears: it goes on without a worker, and without a server that has a replica. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distrib_launch.failures import Ending
from distrib_launch.plan import LaunchPlan

MOST_RESTARTS = 3
HOST_SILENCE_SECONDS = 30.0
"""A host that is cut off for less than that may come back: its workers join the others again."""


def goes_on_without(plan: LaunchPlan, ending: Ending, endings: Sequence[Ending]) -> bool:
    """Whether the job is not over with this failed rank; `endings` are those of all ranks that have ended."""
    if plan.strategy.mode != "async":
        return False
    failed = {other.rank for other in endings if other.failed}
    role = plan.ranks[ending.rank].role
    left = [rank for rank in plan.ranks if rank.role == role and rank.rank not in failed]
    return bool(left) and (role == "worker" or plan.strategy.replicas > 0)


def may_start_again(plan: LaunchPlan, ending: Ending, before: int) -> bool:
    """Whether a rank is started anew where it was: a server whose host is there, `before` times already."""
    is_server = plan.strategy.mode == "async" and plan.ranks[ending.rank].role == "server"
    return is_server and not ending.lost and before < MOST_RESTARTS


def succeeded(plan: LaunchPlan, endings: Sequence[Ending]) -> bool:
    """Whether the job reached its end in spite of failed ranks: a worker did."""
    workers = {rank.rank for rank in plan.ranks if rank.role == "worker"}
    return plan.strategy.mode == "async" and any(not e.failed for e in endings if e.rank in workers)


def servers_only(plan: LaunchPlan, endings: Sequence[Ending]) -> bool:
    """Whether nobody needs the servers any more that are still there."""
    ended = {ending.rank for ending in endings}
    left = [rank.role for rank in plan.ranks if rank.rank not in ended]
    return bool(left) and all(role == "server" for role in left)


def lines(plan: LaunchPlan, ending: Ending, how: str) -> str:
    """The warning that a rank is gone."""
    role = "worker" if plan.ranks[ending.rank].role == "worker" else "parameter server"
    main = "; it was the one that saves checkpoints" if ending.rank == 0 else ""
    return f"{role} rank {ending.rank} on {ending.host} is gone ({how}); the job goes on without it{main}"
