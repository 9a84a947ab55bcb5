"""`distrib-launch`: options in, exit code out."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distrib_launch.console import Console, complain

from distrib._version import __version__
from distrib.errors import ConfigError, DistribError

if TYPE_CHECKING:
    from distrib_launch.plan import LaunchPlan

    from distrib.cluster.hostfile import HostList
    from distrib.cluster.topology import Topology

FILE_NAME = re.compile(r"/|\.(txt|hosts|hostfile|list|cfg|conf|ini|ya?ml)$|^(hosts|hostfile)$")
EPILOG = """\
examples:
  distrib-launch -np 2 train.py --epochs 3        two ranks on this machine
  distrib-launch -H cluster.txt train.py          one rank per slot of a hostfile
  distrib-launch -H node[1-4]:8 train.py          the same, hosts named here
  distrib-launch -H cluster.txt --dry-run train.py   show the plan, start nothing

exit code: 0 when every rank succeeded, else that of the rank that failed first (128 + signal),
2 usage, hostfile or topology, 3 a host is not fit, 124 time limit, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    p = argparse.ArgumentParser(
        prog="distrib-launch",
        usage="distrib-launch [options] SCRIPT [ARGS...]",
        description="Run a training script on several machines, one rank per GPU or slot.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = p.add_argument_group("where to run")
    where.add_argument("-H", "--hosts", metavar="FILE|LIST", help="a hostfile, or hosts such as a:2,b:2")
    where.add_argument("-n", "-np", "--np", dest="ranks", type=_positive, metavar="N",
                       help="number of ranks (default: every slot)")  # fmt: skip
    where.add_argument("--topology", metavar="FILE", help="what the hosts are made of (default: the YAML file beside "
                       "the hostfile with its stem)")  # fmt: skip
    how = p.add_argument_group("how to run")
    how.add_argument("--mode", choices=["sync", "auto"], default="sync", help="how ranks train together")
    how.add_argument("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="set or forward a "
                     "variable on every rank (may be repeated)")  # fmt: skip
    how.add_argument("--timeout", type=_seconds, metavar="TIME", help="stop the job after this long: 90, 30s, 10m, 2h")
    how.add_argument(
        "--mpirun", metavar="PATH", help="a site's own Open MPI 5 (default: the one installed with distrib)"
    )
    how.add_argument("--ssh-command", metavar="CMD", help="how to reach hosts (default: ssh)")
    out = p.add_argument_group("what to show and keep")
    out.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    out.add_argument("--json", action="store_true", help="print the plan, or the result, as JSON")
    out.add_argument(
        "--run-dir", metavar="DIR", help="where logs and results go (default: distrib-runs/<time>-<script>)"
    )
    out.add_argument("-q", "--quiet", action="store_true", help="do not show what the ranks print (the logs have it)")
    out.add_argument("--only-rank", type=int, metavar="R", help="show the output of this rank alone")
    out.add_argument("-v", "--verbose", action="store_true", help="say more about what is done")
    out.add_argument("--version", action="version", version=f"distrib {__version__}")
    p.add_argument("script", metavar="SCRIPT", help="the Python script that every rank runs")
    p.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments, passed on untouched")
    return p


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; give 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90, 30s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except DistribError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


def _run(options: argparse.Namespace) -> int:
    from distrib_launch import plan as planning
    from distrib_launch import results

    script = Path(options.script)
    if not script.is_file():
        raise ConfigError(
            f"{options.script}: {'is a directory' if script.is_dir() else 'no such script'}",
            hint="options of distrib-launch stand before the script, the script's own after it",
        )
    hosts = read_hosts(options.hosts)
    topology = read_topology_for(options.topology, options.hosts)
    environment = planning.forwarded(os.environ, options.env)
    run_dir = results.choose_run_dir(options.run_dir, options.script)
    plan = planning.make_plan(
        planning.Options(
            script=str(script.absolute()),
            arguments=tuple(options.arguments),
            interpreter=sys.executable,
            directory=str(Path.cwd()),
            run_dir=str(run_dir),
            ranks=options.ranks,
            mode=options.mode,
            mpirun=options.mpirun,
            ssh_command=options.ssh_command,
            environment=environment,
        ),
        hosts,
        topology,
        local_gpus=_local_gpus(environment) if hosts is None else 0,
    )
    if options.dry_run:
        _show_plan(plan, as_json=options.json)
        return 0
    return _launch(plan, options)


def read_hosts(given: str | None) -> HostList | None:
    from distrib.cluster import hostfile

    if given is None:
        return hostfile.slurm_hosts(os.environ)
    if Path(given).exists() or FILE_NAME.search(given):
        return hostfile.read_hostfile(given)
    return hostfile.parse_host_list(given)


def read_topology_for(given: str | None, hosts: str | None) -> Topology | None:
    from distrib.cluster.topology import read_topology

    if given:
        return read_topology(given)
    if hosts and Path(hosts).is_file():
        for suffix in (".yaml", ".yml"):
            beside = Path(hosts).with_suffix(suffix)
            if beside.is_file():
                return read_topology(beside)
    return None


def _local_gpus(environment: dict[str, str]) -> int:
    from distrib_launch.rank import visible_gpus

    return visible_gpus({**os.environ, **environment})


def _show_plan(plan: LaunchPlan, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        sys.stdout.write(msgspec.json.encode(plan).decode() + "\n")
        return
    print(f"{plan.world_size} rank(s) on {len(plan.hosts)} host(s), engine {plan.engine}, mode {plan.mode}")
    first = 0
    for host in plan.hosts:
        last = first + host.ranks - 1
        devices = list(dict.fromkeys(rank.device for rank in plan.ranks[first : last + 1]))
        shown = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else devices[0]
        ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
        print(f"  {host.name}: {ranks}, device {shown}" + (" (its GPUs, if it has any)" if shown == "auto" else ""))
        first = last + 1
    for note in plan.notes:
        print(f"note: {note}")
    import shlex

    print(f"each rank runs: {shlex.join(plan.script)}")
    print(f"in: {plan.directory}")
    print(f"run directory: {plan.run_dir}")
    print(f"command: {shlex.join(plan.command)}")


def _launch(plan: LaunchPlan, options: argparse.Namespace) -> int:
    from distrib_launch import failures, results
    from distrib_launch.supervisor import Supervisor

    run_dir = Path(plan.run_dir)
    results.make_run_dir(run_dir)
    results.write_json(run_dir / "plan.json", plan)
    console = Console(quiet=options.quiet or options.json, only_rank=options.only_rank)
    try:
        for note in plan.notes:
            console.say(note)
        if os.geteuid() == 0 and options.verbose:
            console.say("running as root; on a shared cluster a user of your own is safer")
        supervisor = Supervisor(plan, console, ssh_command=options.ssh_command, timeout_seconds=options.timeout)
        result = supervisor.run()
        results.write_json(run_dir / "result.json", result)
        if result.first_failure:
            others = sum(r.rank != result.first_failure.rank for r in result.ranks)
            console.say("error: " + failures.report(result.first_failure, others=others))
        if result.status != "succeeded" or options.verbose:
            console.say(f"{result.status} after {result.seconds:.1f} s; everything is in {run_dir}")
    finally:
        console.close()
    if options.json:
        sys.stdout.write((run_dir / "result.json").read_text())
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
