"""From a plan to one whose hosts are fit for it, or a refusal that says which are not, why, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError, PreflightError
from distrib_launch import engines
from distrib_launch.console import Console
from distrib_launch.engines import mpirun
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import preflight
from distrib_launch.preflight.check_result import folded
from distrib_launch.preflight.host_sessions import Connections
from distrib_launch.rank_placement import HostPlan
from distrib_launch.results import PREFLIGHT, write_json


class Admission:
    """Prepares and checks a plan's hosts. `run` returns the plan to run, network cards chosen, and warnings for the result.

    `prepare` makes hosts of a plan ready to be asked. With `--drop-bad-hosts` or `--min-hosts`, `replan` makes a plan without
    the hosts it is given, and the rest is judged again by what it has said already.
    """

    def __init__(
        self,
        options: LaunchOptions,
        console: Console,
        replan: Callable[[Collection[str]], LaunchPlan],
        prepare: Callable[[LaunchPlan, Sequence[HostPlan]], None],
        connections: Connections,
    ) -> None:
        self.options, self.console, self.connections = options, console, connections
        self.replan, self.prepare = replan, prepare
        self.prepared: set[str] = set()
        self.dropped: dict[str, str] = {}
        """Why, by host."""

    def run(self, plan: LaunchPlan) -> tuple[LaunchPlan, list[str]]:
        """Raises PreflightError when the job may not start."""
        self._check_count(plan, "in the hostfile, which is another now,")
        plan = self._ready(plan)
        remote = engines.remote_shell(plan, preflight=self.options.preflight)
        if remote is None:
            self._refuse_interface()
            return plan, self._told(plan, [])
        question = preflight.question_of(plan)

        def ask(hosts: Sequence[HostPlan]) -> preflight.Answers:
            return preflight.ask(plan, hosts, question, remote, self.connections, self.console.say)

        answers = ask(plan.hosts)
        while True:
            report, answers = preflight.settle(
                plan,
                answers,
                self.connections,
                question=question,
                interface=self.options.interface,
                environ={**os.environ, **plan.ranks[0].environment},
            )
            write_json(Path(plan.run_dir) / PREFLIGHT, report)
            if report.fit:
                break
            bad = {host: next(str(c) for c in report.errors if c.host == host) for host in report.bad_hosts}
            plan = self._ready(self._leave_out(plan, bad, report.refusal()))
            if late := [host for host in plan.hosts if host.name not in answers.by_host]:  # -np had left them idle
                answers = answers.joined(ask(late))
        self.connections.stop_listening()
        if remote.by == "srun":
            self.connections.let_go()
        warnings = self._told(plan, report.told("warning"))
        return mpirun.with_shells(preflight.with_network(plan, report, answers, os.environ)), warnings

    def _refuse_interface(self) -> None:
        if self.options.interface:
            why = (
                engines.NOT_ASKED
                if self.options.preflight
                else "--no-preflight does not ask the hosts for their interfaces"
            )
            raise ConfigError(
                f"--interface {self.options.interface}: {why}",
                hint="set the libraries' own variables, such as -x GLOO_SOCKET_IFNAME=NAME -x NCCL_SOCKET_IFNAME==NAME",
            )

    def _ready(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan, of whose hosts each is prepared, without those that could not be."""
        while fresh := [host for host in plan.hosts if host.name not in self.prepared]:
            self.prepared.update(host.name for host in fresh)
            try:
                self.prepare(plan, fresh)
            except PreflightError as refusal:
                plan = self._leave_out(plan, refusal.hosts, refusal)
        return plan

    def _leave_out(self, plan: LaunchPlan, bad: Mapping[str, str], refusal: PreflightError) -> LaunchPlan:
        """A plan without these too, or the refusal where there is none."""
        if not bad or not (self.options.drop_bad_hosts or self.options.min_hosts):
            raise refusal
        self.dropped.update(bad)
        told = "\n".join(folded(self.dropped.items()))
        try:
            rest = self.replan(self.dropped)
        except ConfigError as problem:
            if {host.name for host in plan.hosts} <= bad.keys():
                raise refusal from None
            raise PreflightError(
                f"{told}\nwithout {name_hosts(self.dropped)}: {problem.what}", hint=problem.hint
            ) from None
        self._check_count(rest, f"{told}\nwithout {name_hosts(self.dropped)}")
        return rest

    def _check_count(self, plan: LaunchPlan, when: str) -> None:
        if len(plan.hosts) < (self.options.min_hosts or 1):
            raise PreflightError(
                f"{when} there are {len(plan.hosts)} host(s)",
                hint=f"--min-hosts {self.options.min_hosts} asks for more",
            )

    def _told(self, plan: LaunchPlan, more: Sequence[str]) -> list[str]:
        """The warnings, which are said: of hosts that were left out, and `more`."""
        if self.dropped:
            allowed = "--drop-bad-hosts" if self.options.drop_bad_hosts else f"--min-hosts {self.options.min_hosts}"
            left = f"{len(self.dropped)} host(s) left out ({allowed}); {plan.world_size} rank(s) remain"
            self.console.say(f"warning: {left}")
        warnings = [f"left out: {why}" for why in folded(self.dropped.items())] + list(more)
        for warning in warnings:
            self.console.say(f"warning: {warning}")
        return warnings
