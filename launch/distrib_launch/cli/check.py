"""`distrib-topo check`: run the preflight checks without a launch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from distrib.cluster.hosts import HostList
from distrib.cluster.inventory import InventoryQuery
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.strategy import Strategy
from distrib.utils import files
from distrib.utils.json_text import encode_json
from distrib.utils.log import PLAIN, get_logger
from distrib_launch import engines, plan_builder, rank_environment
from distrib_launch.arguments.shared_options import add_connection_options, add_host_filter, add_hosts, host_filter
from distrib_launch.console import tolerate_closed_pipe
from distrib_launch.engines.ssh import write_ssh_config
from distrib_launch.host_selection import HostFilter
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.open_files import require_open_files
from distrib_launch.preflight import interface_selection, preflight
from distrib_launch.preflight.check_result import table_text
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.preflight.preflight import HostReplies, PreflightReport
from distrib_launch.runner import local_machine, read_hosts, read_topology_for, refuse_hostfile


def add_options(check: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Args:
        check: Its parser.
    """
    check.usage = "distrib-topo check [options] [SCRIPT]"
    add_hosts(check, "a Slurm allocation's, else this machine")
    add_host_filter(check)
    add_connection_options(check)
    check.add_argument("-v", "--verbose", action="store_true", help="show all checks, not only those with a problem")
    check.add_argument("--json", action="store_true", help="print all results as JSON")
    check.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="also compare this script on all hosts, such as train.py"
    )


def engine_for(options: argparse.Namespace) -> str:
    """Return the engine that would start a job on the hosts; it decides how hosts are reached.

    Args:
        options: Parsed options.
    """
    given = options.hosts is not None or options.ssh_command is not None
    return engines.default(given, os.environ)


class QueriedHosts(NamedTuple):
    """Replies of hosts whose sessions are still open."""

    plan: LaunchPlan
    question: InventoryQuery
    replies: HostReplies
    sessions: HostSessions


@contextlib.contextmanager
def queried_hosts(
    hosts: HostList | None,
    topology: Topology | None,
    *,
    host_filter: HostFilter = HostFilter(),  # noqa: B008 (it is frozen)
    script: Path | None = None,
    mpirun: str | None = None,
    ssh_command: str | None = None,
    engine: str = "mpirun",
) -> Iterator[QueriedHosts]:
    """Query the hosts that a job would run on.

    Args:
        hosts: Hosts of the user; None: this machine.
        topology: Description of the hosts.
        host_filter: Selection of hosts.
        script: Script to compare.
        mpirun: Value of `--mpirun`.
        ssh_command: Value of `--ssh-command`.
        engine: Engine of the job.
    """
    # Hosts with role=server need no GPU; only a plan in mode async takes the role into account.
    has_servers = hosts is not None and {host.role for host in hosts.hosts} > {"server"}
    environment = rank_environment.forwarded_variables(os.environ, [])
    with tempfile.TemporaryDirectory(prefix="distrib-check-") as folder:
        options = LaunchOptions(
            script=str(script or "-"),
            run_dir=folder,
            engine=engine,
            mpirun=mpirun,
            ssh_command=ssh_command,
            environment=environment,
            host_filter=host_filter,
            strategy=Strategy(mode="async") if has_servers else Strategy(),
        )
        plan = plan_builder.build_plan(options, hosts, topology, local_machine(environment))
        write_ssh_config(Path(folder), plan)
        question = preflight.question_of(plan)
        if script is None:
            question = msgspec.structs.replace(question, script=None, directory=None)
        require_open_files(len(plan.hosts), 0)
        with HostSessions() as sessions:
            remote = engines.shell_to_hosts(plan)
            assert remote
            replies = preflight.query_plan_hosts(plan, plan.hosts, question, remote, sessions, _say)
            yield QueriedHosts(plan, question, replies, sessions)


def run(options: argparse.Namespace) -> int:
    """Check the hosts and print the results; return 0 if a job may start on them, else 3.

    Args:
        options: Parsed options.
    """
    script = files.absolute_path(options.script) if options.script else None
    if script and not files.is_file(script):
        raise ConfigError(
            f"{options.script}: no such script",
            hint="give a path from here; hosts are named with -H",
            code="script-missing",
        )
    if options.script:
        refuse_hostfile(options.script, options.hosts)
    if options.interface:
        interface_selection.parse_interface(options.interface)
    with queried_hosts(
        read_hosts(options.hosts),
        read_topology_for(options.topology, options.hosts),
        host_filter=host_filter(options),
        script=script,
        mpirun=options.mpirun,
        ssh_command=options.ssh_command,
        engine=engine_for(options),
    ) as queried:
        report, _ = preflight.check_hosts(
            queried.plan,
            queried.replies,
            queried.sessions,
            question=queried.question,
            interface=options.interface,
            environ=os.environ,
        )
    with tolerate_closed_pipe():
        if options.json:
            print(encode_json(report).decode())
        else:
            _print_report(report, every_column=options.verbose)
    return 0 if report.fit else 3


def _say(text: str) -> None:
    get_logger("topo").info("%s", text, extra=PLAIN)


def _print_report(report: PreflightReport, *, every_column: bool) -> None:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if table := table_text(report.hosts, report.checks, report.transport, every_column=every_column, colour=colour):
        print(table)
    for line in report.lines("error"):
        print(f"error: {line}")
    for line in report.lines("warning"):
        print(f"warning: {line}")
    if network := report.network:
        by_interface: dict[str, list[str]] = {}
        for choice in network.hosts:
            by_interface.setdefault(choice.interface, []).append(choice.host)
        shown = "; ".join(f"{name} on {name_hosts(hosts)}" for name, hosts in by_interface.items())
        print(f"network: {shown} ({network.reason})")
        for line in (*(f"not used: {what}" for what in network.passed_over), *network.notes):
            print(f"note: {line}")
    bad = len(report.bad_hosts)
    every = f"{len(report.hosts)} host{'' if len(report.hosts) == 1 else 's'}"
    verdict = f"{bad} of {every} unhealthy" if bad else f"{every} healthy"
    print(f"{verdict}, checked in {report.seconds:.1f} s")
