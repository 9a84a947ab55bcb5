"""From a plan to one whose hosts are fit for it, or a refusal that says which are not, why, and what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from distrib_launch import preflight
from distrib_launch.checks import folded
from distrib_launch.connections import Connections
from distrib_launch.console import Console
from distrib_launch.engines import mpirun
from distrib_launch.plan import HostPlan, LaunchPlan
from distrib_launch.results import write_json

from distrib.cluster.node import name_hosts
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
    """Prepare and check the plan's hosts; returns the plan to run, network cards chosen, and warnings for the result.

    `prepare` makes hosts of a plan ready to be asked. With `--drop-bad-hosts` or `--min-hosts`, `replan` makes a plan without
    the hosts it is given, and the rest is judged again by what it has said already. Raises PreflightError when the job may not start.
    """
    dropped: dict[str, str] = {}

    def leave_out(plan: LaunchPlan, bad: Mapping[str, str], refusal: PreflightError) -> LaunchPlan:
        """A plan without these too, or the refusal where there is none."""
        if not bad or not (options.drop_bad_hosts or options.min_hosts):
            raise refusal
        dropped.update(bad)
        told = "\n".join(folded(dropped.items()))
        try:
            rest = replan(dropped)
        except ConfigError as problem:
            if {host.name for host in plan.hosts} <= bad.keys():
                raise refusal from None
            raise PreflightError(f"{told}\nwithout {name_hosts(dropped)}: {problem.what}", hint=problem.hint) from None
        check_count(rest, f"{told}\nwithout {name_hosts(dropped)}")
        return rest

    def check_count(plan: LaunchPlan, when: str) -> None:
        if len(plan.hosts) < (options.min_hosts or 1):
            raise PreflightError(
                f"{when} there are {len(plan.hosts)} host(s)", hint=f"--min-hosts {options.min_hosts} asks for more"
            )

    ready: set[str] = set()

    def prepared(plan: LaunchPlan) -> LaunchPlan:
        while fresh := [host for host in plan.hosts if host.name not in ready]:
            ready.update(host.name for host in fresh)
            try:
                prepare(plan, fresh)
            except PreflightError as refusal:
                plan = leave_out(plan, refusal.hosts, refusal)
        return plan

    check_count(plan, "in the hostfile, which is another now,")
    plan = prepared(plan)
    if options.no_check or plan.engine != "mpirun":
        if options.interface:
            why = "--no-check asks no host what it has" if options.no_check else f"{plan.engine} hosts are not asked"
            raise ConfigError(
                f"--interface {options.interface}: {why}",
                hint="set the libraries' own variables, such as -x GLOO_SOCKET_IFNAME=NAME -x NCCL_SOCKET_IFNAME==NAME",
            )
        return plan, _told(dropped, [], plan, options, console)
    question = preflight.question_of(plan)
    answers = preflight.ask(plan.hosts, question, plan.ssh, plan.script[0], plan.command[0], connections, console.say)
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
        bad = {host: next(str(c) for c in report.errors if c.host == host) for host in report.bad_hosts}
        plan = prepared(leave_out(plan, bad, report.refusal()))
        if unknown := {host.name for host in plan.hosts} - set(answers.by_host):  # -np had left them idle
            more = [host for host in plan.hosts if host.name in unknown]
            late = preflight.ask(more, question, plan.ssh, plan.script[0], plan.command[0], connections, console.say)
            answers = msgspec.structs.replace(
                answers,
                by_host={**answers.by_host, **late.by_host},
                own_names=answers.own_names | late.own_names,
                interpreters={**answers.interpreters, **late.interpreters},
            )
    connections.stop_listening()
    warnings = _told(dropped, report.told("warning"), plan, options, console)
    return mpirun.with_shells(preflight.with_network(plan, report, answers, os.environ)), warnings


def _told(
    dropped: Mapping[str, str], more: Sequence[str], plan: LaunchPlan, options: argparse.Namespace, console: Console
) -> list[str]:
    """The warnings, which are said: of hosts that were left out, and `more`."""
    if dropped:
        allowed = "--drop-bad-hosts" if options.drop_bad_hosts else f"--min-hosts {options.min_hosts}"
        console.say(f"warning: {len(dropped)} host(s) left out ({allowed}); {plan.world_size} rank(s) remain")
    warnings = [f"left out: {why}" for why in folded(dropped.items())] + list(more)
    for warning in warnings:
        console.say(f"warning: {warning}")
    return warnings
