"""Assignments of the ranks: command and environment of each, once all are connected and their addresses are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from distrib.errors import LaunchError
from distrib_launch import rank_environment
from distrib_launch.engines.srun import MORE_CPUS_HINT, few_cpus_reason
from distrib_launch.preflight.check_result import fold_by_host
from distrib_launch.rank_agent.control_channel import PAYLOAD_LIMIT_BYTES, Assignment, Kind
from distrib_launch.supervisor.rank_state import JobState, RankState

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def fill_placeholders(word: str, values: Mapping[str, object]) -> str:
    """Replace `{rank}` and other placeholders in an argument of a script. `{{rank}}` becomes `{rank}`.

    Args:
        word: The argument. Braces around anything else stay as they are.
        values: Value of each placeholder by its name.

    Returns:
        The argument for one rank.

    Example:
        >>> fill_placeholders("log-{rank}.txt", {"rank": 3})
        'log-3.txt'
    """

    def fill(match: re.Match[str]) -> str:
        if match[1] in values:
            return f"{{{match[1]}}}"
        return str(values[match[2]]) if match[2] in values else match[0]

    return PLACEHOLDER.sub(fill, word)


def send_assignments(
    job: JobState,
    send: Callable[[RankState, Kind, dict[str, Any] | bytes], None],
    *,
    host_timeout_seconds: float,
    keep_result: bool,
    script_input: bytes,
    input_ranks: Collection[int],
) -> None:
    """Send each rank its standard input and its assignment.

    Args:
        job: State of the job, whose ranks are all connected.
        send: Sends a frame to a rank.
        host_timeout_seconds: Silence after which a host is probed.
        keep_result: True if what scripts write to DISTRIB_RESULT_FD is kept.
        script_input: Standard input of the scripts.
        input_ranks: Ranks that get it.

    Raises:
        LaunchError: The command and environment of a rank are too long.
    """
    for state, assignment in _assignments(job, host_timeout_seconds=host_timeout_seconds, keep_result=keep_result):
        given = script_input if state.plan.rank in input_ranks else b""
        for start in range(0, len(given), PAYLOAD_LIMIT_BYTES):
            send(state, Kind.INPUT, given[start : start + PAYLOAD_LIMIT_BYTES])
        state.assignment = assignment
        try:
            send(state, Kind.ASSIGN, assignment._asdict())
        except ValueError as error:
            raise LaunchError(
                f"the command and the environment of rank {state.plan.rank} are too long: {error}",
                hint="give a long list to the script in a file",
                code="too-long",
            ) from None


def warn_few_cpus(job: JobState) -> None:
    """Warn of hosts with fewer CPUs than ranks, if preflight has not checked them.

    Args:
        job: State of the job, whose ranks are all connected.
    """
    found = []
    for host in job.plan.hosts:
        state = next(state for state in job.ranks if state.plan.host == host.name)
        if few := few_cpus_reason(state.hello["cpus"], host.ranks, on_gpus=state.plan.device != "cpu"):
            found.append((host.name, f"{host.name}: {few}; {MORE_CPUS_HINT}"))
    for line in fold_by_host(found):
        job.warn(line)


def _assignments(
    job: JobState, *, host_timeout_seconds: float, keep_result: bool
) -> Iterator[tuple[RankState, Assignment]]:
    """Yield every rank with its assignment."""
    plan, ranks, grace_seconds = job.plan, job.ranks, job.grace_seconds
    hosts = {host.name: host for host in plan.hosts}

    def address(state: RankState) -> str:
        return hosts[state.plan.host].address or state.address

    def free_port(state: RankState) -> tuple[str, int]:
        return address(state), int(state.hello["port"])

    servers = [free_port(state) for state in ranks if not state.is_worker]
    for state in ranks:
        host, is_worker = hosts[state.plan.host], state.is_worker
        several = len(plan.hosts) > 1
        main = free_port(ranks[0])
        environment = rank_environment.complete(
            state.plan.environment,
            main=main,
            servers=servers,
            address=address(state) if several else None,
            # Without a preflight the interface that reaches the launcher is used.
            interface=state.hello.get("interface") if several and not host.interface else None,
        )
        is_program = plan.program and is_worker
        values = {
            "rank": state.plan.rank, "local_rank": state.plan.local_rank, "world_size": plan.world_size,
            "master_addr": main[0], "master_port": main[1],
        }  # fmt: skip
        command = list(plan.script_on(host, state.plan.role))
        arguments = 3 if command[1] == "-m" else 2
        command[arguments:] = [fill_placeholders(word, values) for word in command[arguments:]]
        yield (
            state,
            Assignment(
                command=command[1:] if is_program else command,
                is_python=not is_program,
                directory=plan.directory,
                environment={name: value for name, value in environment.items() if name not in plan.forwarded},
                device=state.plan.device,
                tag=f"{plan.attempt_id}.{state.plan.rank}",
                gpus=None if host.chosen is None else list(host.chosen),
                bind=plan.bind if is_worker else "none",
                cpu_sharers=host.workers if is_worker else host.ranks,
                grace_seconds=grace_seconds,
                host_timeout_seconds=host_timeout_seconds,
                may_return=plan.mode == "async",
                keep_result=keep_result,
                container=plan.container.image,
                container_runtime=plan.container.runtime,
                container_mounts=plan.container.mounts,
            ),
        )
