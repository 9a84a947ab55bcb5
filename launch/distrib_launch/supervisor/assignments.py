"""What each rank of a plan is told to run, once all of them have called and each other's addresses are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distrib.environment import DISTRIB_ADDRESS, DISTRIB_SERVERS, MASTER_ADDR, MASTER_PORT
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import interface_selection
from distrib_launch.rank_agent.control_channel import Assignment
from distrib_launch.supervisor.rank_state import RankState


def assignments(
    plan: LaunchPlan,
    ranks: Sequence[RankState],
    *,
    host_timeout_seconds: float,
    grace_seconds: float,
    keep_value: bool,
) -> Iterator[tuple[RankState, Assignment]]:
    """Every rank with its own. Each must have said hello."""
    hosts = {host.name: host for host in plan.hosts}

    def address(state: RankState) -> str:
        return hosts[state.plan.host].address or state.address

    shared = {MASTER_ADDR: address(ranks[0]), MASTER_PORT: str(ranks[0].hello["port"])}
    if servers := [state for state in ranks if state.plan.role == "server"]:
        shared[DISTRIB_SERVERS] = ",".join(f"{address(state)}:{state.hello['port']}" for state in servers)
    for state in ranks:
        host, works = hosts[state.plan.host], state.plan.role == "worker"
        environment = {**state.plan.environment, **shared}
        if len(plan.hosts) > 1:
            if not host.interface:  # nobody asked the hosts; but this one leads here
                environment = {**interface_selection.variables(state.hello.get("interface")), **environment}
            environment[DISTRIB_ADDRESS] = address(state)
        yield (
            state,
            Assignment(
                command=list(plan.script_on(host, state.plan.role)),
                directory=plan.directory,
                environment=environment,
                device=state.plan.device,
                mark=f"{plan.job}.{state.plan.rank}",
                chosen=None if host.chosen is None else list(host.chosen),
                bind=plan.bind if works else "none",
                sharers=host.workers if works else host.ranks,
                grace_seconds=grace_seconds,
                host_timeout_seconds=host_timeout_seconds,
                may_return=plan.mode == "async",
                keep_value=keep_value,
            ),
        )
