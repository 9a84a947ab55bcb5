"""Assignments of the ranks: what each runs, once all are connected and their addresses are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distrib_launch import rank_environment
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent.control_channel import Assignment
from distrib_launch.supervisor.rank_state import RankState


def assignments(
    plan: LaunchPlan,
    ranks: Sequence[RankState],
    *,
    host_timeout_seconds: float,
    grace_seconds: float,
    keep_result: bool,
) -> Iterator[tuple[RankState, Assignment]]:
    """Yield every rank with its assignment.

    Args:
        plan: Plan of the job.
        ranks: All ranks, connected.
        host_timeout_seconds: Silence after which a host is probed.
        grace_seconds: Time between SIGTERM and SIGKILL.
        keep_result: Whether what scripts write to DISTRIB_RESULT_FD is kept.
    """
    hosts = {host.name: host for host in plan.hosts}

    def address(state: RankState) -> str:
        return hosts[state.plan.host].address or state.address

    def listener(state: RankState) -> tuple[str, int]:
        return address(state), int(state.hello["port"])

    servers = [listener(state) for state in ranks if not state.is_worker]
    for state in ranks:
        host, is_worker = hosts[state.plan.host], state.is_worker
        several = len(plan.hosts) > 1
        environment = rank_environment.complete(
            state.plan.environment,
            main=listener(ranks[0]),
            servers=servers,
            address=address(state) if several else None,
            # Without a preflight the interface that reaches the launcher is used.
            interface=state.hello.get("interface") if several and not host.interface else None,
        )
        yield (
            state,
            Assignment(
                command=list(plan.script_on(host, state.plan.role)),
                is_python=True,
                directory=plan.directory,
                environment=environment,
                device=state.plan.device,
                tag=f"{plan.job}.{state.plan.rank}",
                gpus=None if host.chosen is None else list(host.chosen),
                bind=plan.bind if is_worker else "none",
                cpu_sharers=host.workers if is_worker else host.ranks,
                grace_seconds=grace_seconds,
                host_timeout_seconds=host_timeout_seconds,
                may_return=plan.mode == "async",
                keep_result=keep_result,
            ),
        )
