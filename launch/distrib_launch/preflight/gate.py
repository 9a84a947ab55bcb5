"""Preflight gate: prepare and check the hosts of a plan before the start, drop unhealthy ones, or refuse the launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from distrib import units
from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError, PreflightError
from distrib_launch import engines
from distrib_launch.console import Console
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import preflight
from distrib_launch.preflight.check_result import fold_by_host
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.rank_placement import HostPlan
from distrib_launch.run_directory import PREFLIGHT, write_json


class PreflightGate:
    """Preflight of a plan's hosts, with the decision to start.

    Args:
        options: Options of the launch.
        console: Receives warnings.
        replan: Return a plan without the given hosts, for `--drop-bad-hosts` and `--min-hosts`.
        prepare: Make hosts of a plan ready for queries (ssh configuration, `--sync`).
        sessions: Sessions that the engine reuses.
    """

    def __init__(
        self,
        options: LaunchOptions,
        console: Console,
        replan: Callable[[Collection[str]], LaunchPlan],
        prepare: Callable[[LaunchPlan, Sequence[HostPlan]], None],
        sessions: HostSessions,
    ) -> None:
        self.options, self.console, self.sessions = options, console, sessions
        self.replan, self.prepare = replan, prepare
        self.prepared: set[str] = set()
        self.dropped: dict[str, str] = {}
        """Dropped hosts with the reason for each."""

    def run(self, plan: LaunchPlan) -> tuple[LaunchPlan, list[str]]:
        """Check the hosts; return the plan to run, with the chosen network, and warnings for the result.

        Args:
            plan: Plan of the launch.

        Raises:
            PreflightError: The job may not start.
        """
        self._check_count(plan, "the hostfile names too few hosts:")
        plan = self._ready(plan)
        remote = engines.shell_to_hosts(plan, preflight=self.options.preflight)
        if remote is None:
            self._refuse_interface()
            return plan, self._report_warnings(plan, [])
        question = preflight.question_of(plan)

        def query(hosts: Sequence[HostPlan]) -> preflight.HostReplies:
            return preflight.query_plan_hosts(plan, hosts, question, remote, self.sessions, self.console.say)

        self.console.status(f"checking {units.count_text(len(plan.hosts), 'host')}")
        replies = query(plan.hosts)
        while True:
            report, replies = preflight.check_hosts(
                plan,
                replies,
                self.sessions,
                question=question,
                interface=self.options.interface,
                environ={**os.environ, **plan.ranks[0].environment},
            )
            write_json(Path(plan.run_dir) / PREFLIGHT, report)
            if report.fit:
                break
            bad = {host: next(str(c) for c in report.errors if c.host == host) for host in report.bad_hosts}
            plan = self._ready(self._leave_out(plan, bad, report.refusal()))
            if late := [
                host for host in plan.hosts if host.name not in replies.by_host
            ]:  # hosts that were idle in the plan before
                replies = replies.joined(query(late))
        self.sessions.stop_listening()
        if remote.transport == "srun":
            self.sessions.release()
        warnings = self._report_warnings(plan, report.lines("warning"))
        return preflight.apply_network(plan, report, replies, os.environ), warnings

    def _refuse_interface(self) -> None:
        if self.options.interface:
            why = (
                engines.NOT_ASKED
                if self.options.preflight
                else "--no-preflight does not query the hosts for their interfaces"
            )
            raise ConfigError(
                f"--interface {self.options.interface}: {why}",
                hint="set the libraries' own variables, such as -x GLOO_SOCKET_IFNAME=NAME -x NCCL_SOCKET_IFNAME==NAME",
            )

    def _ready(self, plan: LaunchPlan) -> LaunchPlan:
        """Prepare all hosts of the plan; return a plan without those that could not be prepared."""
        while fresh := [host for host in plan.hosts if host.name not in self.prepared]:
            self.prepared.update(host.name for host in fresh)
            try:
                self.prepare(plan, fresh)
            except PreflightError as refusal:
                plan = self._leave_out(plan, refusal.hosts, refusal)
        return plan

    def _leave_out(self, plan: LaunchPlan, bad: Mapping[str, str], refusal: PreflightError) -> LaunchPlan:
        """Return a plan without these hosts too; raise the refusal if that is not possible."""
        if not bad or not (self.options.drop_bad_hosts or self.options.min_hosts):
            raise refusal
        self.dropped.update(bad)
        reasons = "\n".join(fold_by_host(self.dropped.items()))
        try:
            rest = self.replan(self.dropped)
        except ConfigError as problem:
            if {host.name for host in plan.hosts} <= bad.keys():
                raise refusal from None
            raise PreflightError(
                f"{reasons}\nwithout {name_hosts(self.dropped)}: {problem.what}",
                hint=problem.hint,
                code="too-few-hosts",
            ) from None
        self._check_count(rest, f"{reasons}\nwithout {name_hosts(self.dropped)}")
        return rest

    def _check_count(self, plan: LaunchPlan, when: str) -> None:
        if len(plan.hosts) < (self.options.min_hosts or 1):
            raise PreflightError(
                f"{when} there are {len(plan.hosts)} host(s), expected {self.options.min_hosts or 1} or more",
                hint="lower --min-hosts, or repair the hosts",
                code="too-few-hosts",
            )

    def _report_warnings(self, plan: LaunchPlan, more: Sequence[str]) -> list[str]:
        """Show and return the warnings: dropped hosts, and `more`."""
        if self.dropped:
            allowed = "--drop-bad-hosts" if self.options.drop_bad_hosts else f"--min-hosts {self.options.min_hosts}"
            left = f"{len(self.dropped)} host(s) left out ({allowed}); {plan.world_size} rank(s) remain, with a smaller global batch"
            self.console.say(f"warning: {left}")
        warnings = [f"left out: {why}" for why in fold_by_host(self.dropped.items())] + list(more)
        for warning in warnings:
            self.console.say(f"warning: {warning}")
        return warnings
