"""Preflight queries of hosts that did not start their ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import msgspec

from distrib.errors import PreflightError
from distrib_launch import engines
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight.connectivity import connect_all
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.preflight.preflight import (
    evaluate,
    launcher_addresses,
    local_target,
    query_plan_hosts,
    question_of,
    requirements_of,
)


def diagnose(plan: LaunchPlan, hosts: Sequence[str], say: Callable[[str], None]) -> PreflightError | None:
    """Query hosts that did not start their ranks, and return the reasons; None if all of them seem healthy.

    Args:
        plan: Plan of the launch.
        hosts: Hosts without ranks.
        say: Called with notices about hosts that take long.
    """
    silent = [host for host in plan.hosts if host.name in hosts]
    question = question_of(plan)
    if (remote := engines.shell_to_hosts(plan)) is None:
        return None
    with HostSessions() as sessions:
        replies = query_plan_hosts(plan, silent, question, remote, sessions, say)
        of_plan = requirements_of(plan, replies, os.environ)
        requirements = {host: needs for host, needs in of_plan.items() if host in hosts}
        target = local_target(plan.listen or launcher_addresses(plan), sessions)
        tested = connect_all(target, list(requirements), None, sessions)
        replies = msgspec.structs.replace(replies, rounds=(tested,))
    report = evaluate(replies, requirements, question=question, interface=None, environ=os.environ)
    return report.refusal() if report.errors else None
