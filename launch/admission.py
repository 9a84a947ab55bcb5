"""From a plan to one whose hosts are fit for it, or a refusal that says which are not, why, and what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
from distrib_launch import preflight
from distrib_launch.connections import Connections
from distrib_launch.console import Console
from distrib_launch.plan import HostPlan, LaunchPlan
from distrib_launch.results import write_json

from distrib.errors import ConfigError, PreflightError

REPORT = "preflight.json"


def admit(
    plan: LaunchPlan,
    options: argparse.Namespace,
    console: Console,
    replan: Callable[[Collection[str]], LaunchPlan],
    prepare: Callable[[LaunchPlan, Sequence[HostPlan]], None],
    connections: Connections,
) -> tuple[LaunchPlan, list[str]]:
    """Check the plan's hosts; returns the plan to run, network cards chosen, and warnings for the result.

    With `--drop-bad-hosts`, `replan` makes a plan without the hosts it is given, and the rest is judged again by what
    it has said already; `prepare` makes ready for asking hosts that were idle before. Raises PreflightError when the job may not start.
    """
    if options.no_check or plan.engine != "mpirun":
        if options.interface:
            why = "--no-check asks no host what it has" if options.no_check else f"{plan.engine} hosts are not asked"
            raise ConfigError(
                f"--interface {options.interface}: {why}",
                hint="set the libraries' own variables, such as -x GLOO_SOCKET_IFNAME=NAME -x NCCL_SOCKET_IFNAME==NAME",
            )
        return plan, []
    question = preflight.question_of(plan)
    answers = preflight.ask(plan.hosts, question, plan.ssh, plan.script[0], plan.command[0], connections)
    dropped: dict[str, str] = {}
    while True:
        report, answers = preflight.settle(
            plan,
            answers,
            connections,
            question=question,
            interface=options.interface,
            environ={**os.environ, **plan.ranks[0].environment},
        )
        write_json(Path(plan.run_dir) / REPORT, report)
        if report.fit:
            break
        if not options.drop_bad_hosts:
            raise report.refusal()
        dropped |= {host: next(str(c) for c in report.errors if c.host == host) for host in report.bad_hosts}
        if len(report.bad_hosts) == len(report.hosts):
            raise report.refusal()
        try:
            plan = replan(dropped)
        except ConfigError as problem:
            told = "\n".join(dropped.values())
            raise PreflightError(f"{told}\nwithout {', '.join(dropped)}: {problem.what}", hint=problem.hint) from None
        if unknown := {host.name for host in plan.hosts} - set(answers.by_host):  # -np had left them idle
            more = [host for host in plan.hosts if host.name in unknown]
            prepare(plan, more)
            late = preflight.ask(more, question, plan.ssh, plan.script[0], plan.command[0], connections)
            answers = msgspec.structs.replace(
                answers,
                by_host={**answers.by_host, **late.by_host},
                own_names=answers.own_names | late.own_names,
                interpreters={**answers.interpreters, **late.interpreters},
            )
    connections.stop_listening()
    warnings = [f"left out: {why}" for why in dropped.values()] + [str(check) for check in report.warnings]
    if dropped:
        console.say(f"warning: {len(dropped)} host(s) left out (--drop-bad-hosts); {plan.world_size} rank(s) remain")
    for warning in warnings:
        console.say(f"warning: {warning}")
    return preflight.with_network(plan, report, answers, os.environ), warnings
