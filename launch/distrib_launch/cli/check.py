"""`distrib-topo check`: the preflight by itself."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError
from distrib.utils import files
from distrib_launch.cli.options import add_connection_options, add_host_filter, add_hosts, host_filter

if TYPE_CHECKING:
    from distrib.cluster.hosts import HostList
    from distrib.cluster.inventory import InventoryQuery
    from distrib.cluster.topology import Topology
    from distrib_launch.host_selection import HostFilter
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.preflight.host_sessions import Connections
    from distrib_launch.preflight.preflight import Answers, Report


def add_options(check: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_hosts(check, "a Slurm allocation's, else this machine")
    add_host_filter(check)
    add_connection_options(check)
    check.add_argument("--json", action="store_true", help="everything that was found, as JSON")
    check.add_argument("script", nargs="?", metavar="SCRIPT", help="also: is this script the same on every host?")


def engine_for(options: argparse.Namespace) -> str:
    """The engine that would start a job on the hosts, which says how they are asked."""
    from distrib_launch import engines

    given = options.hosts is not None or options.ssh_command is not None
    return engines.default(given, os.environ)


class Asked(NamedTuple):
    """What hosts have answered, while they can be asked more."""

    plan: LaunchPlan
    question: InventoryQuery
    answers: Answers
    connections: Connections


@contextlib.contextmanager
def asked(
    hosts: HostList | None,
    topology: Topology | None,
    *,
    host_filter: HostFilter,
    script: Path | None = None,
    mpirun: str | None = None,
    ssh_command: str | None = None,
    engine: str = "mpirun",
) -> Iterator[Asked]:
    """Ask the hosts that a job would run on, this machine where there are none."""
    import msgspec

    from distrib.strategy import Strategy
    from distrib.utils import rlimits
    from distrib_launch import engines, launch_plan, rank_environment
    from distrib_launch.engines.mpirun import write_ssh_config
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.preflight import preflight
    from distrib_launch.preflight.host_sessions import Connections
    from distrib_launch.runner import local_machine

    # Hosts that the hostfile sets apart for parameter servers are judged as such: they need no GPU.
    apart = hosts is not None and {host.role for host in hosts.hosts} > {"server"}
    environment = rank_environment.forwarded_variables(os.environ, [])
    with tempfile.TemporaryDirectory(prefix="distrib-check-") as folder:
        plan = launch_plan.build_plan(
            LaunchOptions(
                script=str(script or "-"),
                run_dir=folder,
                engine=engine,
                mpirun=mpirun,
                ssh_command=ssh_command,
                environment=environment,
                host_filter=host_filter,
                strategy=Strategy(mode="async") if apart else Strategy(),
            ),
            hosts,
            topology,
            local_machine(environment),
        )
        write_ssh_config(Path(folder), plan)
        question = preflight.question_of(plan)
        if script is None:
            question = msgspec.structs.replace(question, script=None, directory=None)
        rlimits.allow(len(plan.hosts), 0)
        with Connections() as connections:
            remote = engines.remote_shell(plan)
            assert remote
            answers = preflight.ask(plan, plan.hosts, question, remote, connections, _say)
            yield Asked(plan, question, answers, connections)


def run(options: argparse.Namespace) -> int:
    """Ask the hosts, show what they said; 0 when a job may start on them, else 3."""
    import msgspec

    from distrib_launch.console import tolerate_closed_pipe
    from distrib_launch.preflight import interface_selection as network
    from distrib_launch.preflight import preflight
    from distrib_launch.runner import read_hosts, read_topology_for, refuse_hostfile

    script = files.absolute_path(options.script) if options.script else None
    if script and not files.is_file(script):
        raise ConfigError(f"{options.script}: no such script", hint="a path from here; hosts are named with -H")
    if options.script:
        refuse_hostfile(options.script, options.hosts)
    if options.interface:
        network.parse_interface(options.interface)
    topology = read_topology_for(options.topology, options.hosts)
    with asked(
        read_hosts(options.hosts), topology, host_filter=host_filter(options), script=script, mpirun=options.mpirun,
        ssh_command=options.ssh_command, engine=engine_for(options),
    ) as all_:  # fmt: skip
        report, _ = preflight.settle(
            all_.plan,
            all_.answers,
            all_.connections,
            question=all_.question,
            interface=options.interface,
            environ=os.environ,
        )
    with tolerate_closed_pipe():
        if options.json:
            print(msgspec.json.encode(report).decode())
        else:
            _show(report)
    return 0 if report.fit else 3


def _say(text: str) -> None:
    print(f"distrib-topo: {text}", file=sys.stderr, flush=True)


def _show(report: Report) -> None:
    from distrib_launch.preflight.check_table import table_text

    print(table_text(report, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    for status in ("error", "warning"):
        for line in report.told(status):
            print(f"{status}: {line}")
    if network := report.network:
        ways: dict[str, list[str]] = {}
        for choice in network.hosts:
            ways.setdefault(choice.interface, []).append(choice.host)
        shown = "; ".join(f"{name} on {name_hosts(hosts)}" for name, hosts in ways.items())
        print(f"network: {shown} ({network.reason})")
        for line in (*(f"passed over: {what}" for what in network.passed_over), *network.notes):
            print(f"note: {line}")
    bad = len(report.bad_hosts)
    verdict = f"{bad} of {len(report.hosts)} host(s) not fit" if bad else f"{len(report.hosts)} host(s) fit"
    print(f"{verdict}, asked in {report.seconds:.1f} s")
