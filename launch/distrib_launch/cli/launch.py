"""`distrib-launch`: options in, exit code out."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distrib._version import __version__
from distrib.errors import ConfigError, DistribError, LaunchError
from distrib.utils import files, signals
from distrib_launch import engines, host_selection, runner
from distrib_launch.cli import plan as outlook
from distrib_launch.cli import training_options
from distrib_launch.cli.options import GRACE_SECONDS, Parser, add_hosts, add_ways, number
from distrib_launch.console import bear_closed, complain, perhaps_unread
from distrib_launch.rank_agent.affinity import HOW

if TYPE_CHECKING:
    from distrib_launch.launch_plan import LaunchPlan, RankPlan

ALIKE_MOST = 3
"""So many hosts with the same ranks have a line each in the plan that is shown."""

EPILOG = """\
examples:
  distrib-launch -np 2 train.py --epochs 3        two ranks on this machine
  distrib-launch -H cluster.txt train.py          one rank per slot of a hostfile
  distrib-launch -H node[1-4]:8 train.py          the same, hosts named here
  distrib-launch -H cluster.txt --dry-run train.py   show the plan, start nothing

exit code: 0 when every rank succeeded, else that of the rank that failed first (128 + signal),
2 usage, hostfile or topology, 3 a host is not fit, 124 time limit, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP,
1 not started, hung, or a rank or the engine lost
"""


def parser() -> Parser:
    """The command's options; `distrib_launch.run` takes them too."""
    p = Parser(
        prog="distrib-launch",
        usage="distrib-launch [options] SCRIPT [ARGS...]",
        description="Run a training script on several machines, one rank per GPU or slot.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = p.add_argument_group("where to run")
    add_hosts(where, "a Slurm allocation's, else this machine")
    where.add_argument("-n", "-np", "--np", dest="ranks", type=number("ranks"), metavar="N",
                       help="number of ranks (default: every slot)")  # fmt: skip
    host_selection.add_options(where)
    where.add_argument("--spread", action="store_true", help="with -np: spread ranks evenly over the hosts (default: "
                       "fill them in order)")  # fmt: skip
    add_ways(where)
    where.add_argument("--no-check", action="store_true", help="ask the hosts nothing beforehand")
    where.add_argument("--drop-bad-hosts", action="store_true", help="leave out hosts that are not fit, saying which")
    how = p.add_argument_group("how to run")
    how.add_argument("--engine", choices=engines.NAMES, help="what starts the ranks: Open MPI's mpirun over ssh, Slurm's "
                     "srun, or an MPIJob for Kubernetes, whose manifest is written (default: mpirun; srun inside a "
                     "Slurm job whose hosts are used)")  # fmt: skip
    how.add_argument("--bind", choices=HOW, default="auto", help="which processors a rank may use: cores near its GPU, "
                     "or its share of the host's (auto, core), whole NUMA nodes, or all")  # fmt: skip
    how.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as with python -m")
    how.add_argument("--sync", metavar="DIR", help="first bring this folder to the same path on every host (rsync)")
    how.add_argument("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="set or forward a "
                     "variable on every rank (may be repeated)")  # fmt: skip
    how.add_argument("--timeout", type=_seconds, metavar="TIME", help="stop the job after this long: 90, 30s, 10m, 2h")
    how.add_argument("--hang-timeout", type=_seconds, metavar="TIME", help="end the job when no rank has printed or "
                     "reported a step for this long, saying who waits for whom (default: say it after 10m, go on)")  # fmt: skip
    how.add_argument("--host-timeout", type=_seconds, metavar="TIME", help="take a host for lost that was silent for "
                     "this long and then does not answer (default: 1.8s; 30s in mode async, where it may come back)")  # fmt: skip
    how.add_argument("--max-restarts", type=number("restarts", least=0), default=0, metavar="N", help="start the job again when it fails, up "
                     "to N times, on the hosts that are fit then; job.restore gives it its last checkpoint (default: 0)")  # fmt: skip
    how.add_argument("--min-hosts", type=number("hosts"), metavar="M", help="start, and start again, without hosts that are "
                     "not fit, as long as there are M (default: all; a lost one is waited for for 10m)")  # fmt: skip
    how.add_argument("--grace", type=_seconds, default=GRACE_SECONDS, metavar="TIME", help="between SIGTERM and SIGKILL when the "
                     "job is stopped (default: 5s)")  # fmt: skip
    training_options.add_options(p)
    outlook.add_launch_options(p)
    pods = p.add_argument_group("with --engine kubernetes")
    pods.add_argument("--image", metavar="NAME", help="the image of the Dockerfile, as the cluster finds it")
    pods.add_argument("--manifest", metavar="FILE", help="write the MPIJob there (default: to standard output)")
    pods.add_argument("--pod-resource", dest="pod_resources", action="append", default=[], type=_resource, metavar="NAME=N",
                      help="what each worker needs besides GPUs, such as rdma/hca_shared_devices_a=1 (may be repeated)")  # fmt: skip
    pods.add_argument("--runtime-class", default="", metavar="NAME", help="RuntimeClass of pods with GPUs, such as nvidia "
                      "(default: the cluster's own)")  # fmt: skip
    out = p.add_argument_group("what to show and keep")
    out.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    out.add_argument("--json", action="store_true", help="print the plan, or the result, as JSON")
    out.add_argument(
        "--run-dir",
        type=os.path.expanduser,
        metavar="DIR",
        help="where logs and results go (default: distrib-runs/<time>-<script>)",
    )
    out.add_argument("-q", "--quiet", action="store_true", help="do not show what the ranks print (the logs have it)")
    out.add_argument("--only-rank", type=int, metavar="R", help="show the output of this rank alone")
    out.add_argument("--no-fold", action="store_true", help="show identical lines of several ranks one by one")
    out.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also say which network was chosen, what starts the ranks, and how long all took",
    )
    out.add_argument("--version", action="version", version=f"distrib {__version__}")
    p.add_argument("script", nargs=argparse.PARSER, action=_Command, metavar="SCRIPT", help="the Python script that every "
                   "rank runs, and its arguments, passed on untouched")  # fmt: skip
    return p


class _Command(argparse.Action):
    """The script and its arguments. As two positionals, argparse would keep a `--` between them to itself."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        namespace.script, *namespace.arguments = values[1:] if values[0] == "--" else values


def _resource(given: str) -> tuple[str, str]:
    from distrib_launch.engines import kubernetes

    try:
        return kubernetes.parse_resource(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90, 30s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    signals.interrupt()  # as long as no job runs, which hears them itself
    options = None
    bear_closed()
    try:
        options = parser().parse_args(argv)
        return _run(options)
    except DistribError as error:
        status, code, told = "failed", error.exit_code, str(error)
    except KeyboardInterrupt as interrupt:
        status, code, told = "stopped", signals.exit_code(interrupt), "interrupted"
    complain(told)
    # Mistyped options are words still; one of the script's own does no harm then.
    if options.json if options else "--json" in (sys.argv[1:] if argv is None else argv):
        with contextlib.suppress(DistribError):  # it may be what could not be printed
            _print_json({"status": status, "exit_code": code, "error": told})
    return code


def _run(options: argparse.Namespace) -> int:
    files.working_directory()  # which all that is named begins at
    if options.dry_run:
        plan = runner.make_plan(options)
        with perhaps_unread():
            _show_plan(plan, as_json=options.json)
        return 0
    if options.engine == "kubernetes":
        return _write_manifest(runner.make_plan(options), options)
    from distrib_launch import results

    with results.claimed_run_dir(options.run_dir, options.script) as run_dir:
        options.run_dir = str(run_dir)
        plan = runner.make_plan(options)
    result = runner.launch(plan, options)
    if options.json:
        try:
            _print_json(result)
        except LaunchError as error:
            complain(error)
            return result.exit_code or error.exit_code
    return result.exit_code


def _print_json(value: object) -> None:
    import msgspec

    with perhaps_unread():
        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _write_manifest(plan: LaunchPlan, options: argparse.Namespace) -> int:
    import json

    import yaml

    from distrib_launch import rank_environment
    from distrib_launch.engines import kubernetes

    if not options.image:
        raise ConfigError(
            "--engine kubernetes: no --image", hint="build the Dockerfile, push the image, and give its name"
        )
    words = kubernetes.launcher_words(parser(), options, rank_environment.FORWARDED_PREFIXES)
    environment = rank_environment.forwarded_variables(os.environ, options.env)
    manifest = kubernetes.manifest(
        plan, image=options.image, words=words, environment=environment, grace_seconds=options.grace,
        runtime_class=options.runtime_class, resources=dict(options.pod_resources),
    )  # fmt: skip
    text = json.dumps(manifest, indent=2)
    if not options.json:
        text = yaml.safe_dump(json.loads(text), sort_keys=False)  # a tree, where nothing refers to anything
    for note in (*plan.notes, *kubernetes.notes_on_pods(plan, environment, dict(options.pod_resources))):
        print(f"distrib-launch: note: {note}", file=sys.stderr)
    if options.manifest:
        try:
            Path(options.manifest).write_text(text)
        except OSError as error:
            raise ConfigError(f"--manifest {options.manifest}: {error.strerror}", hint="name another file") from None
        print(f"distrib-launch: start it with: kubectl create -f {options.manifest}", file=sys.stderr)
    else:
        with perhaps_unread():
            print(text, end="")
    return 0


def _show_plan(plan: LaunchPlan, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        from distrib_launch.launch_plan import without_secrets

        print(msgspec.json.encode(without_secrets(plan)).decode())
        return
    servers = len(plan.ranks) - plan.world_size
    apart = f" and {servers} parameter server(s)" if servers else ""
    print(f"{plan.world_size} rank(s){apart} on {len(plan.hosts)} host(s), engine {plan.engine}, mode {plan.mode}")
    for line in _host_lines(plan):
        print(f"  {line}")
    for note in plan.notes:
        print(f"note: {note}")
    if plan.outlook and plan.outlook.warning:
        print(f"warning: {plan.outlook.warning}")
    import shlex

    print(f"each rank runs: {shlex.join(plan.script)}")
    print(f"in: {plan.directory}")
    print(f"run directory: {plan.run_dir}")
    if len(plan.hosts) > 1:
        print(f"network: {plan.network or 'interfaces are chosen at launch, from what the hosts have'}")
    if plan.sync:
        print(f"brought to every host first: {plan.sync}")
    print(f"command: {shlex.join(plan.command)}")


def _host_lines(plan: LaunchPlan) -> Iterator[str]:
    """What runs where, a line for each host; of many in a row that have the same, one for all."""
    from itertools import groupby

    from distrib.cluster.node import name_hosts

    first = 0
    told: list[tuple[str, int, int, str]] = []  # host, its workers, their first rank, what else is to be said
    for host in plan.hosts:
        beside = [rank.rank for rank in plan.ranks if rank.role == "server" and rank.host == host.name]
        servers = f"parameter server {_numbers(beside)}, a free port chosen at launch" if beside else ""
        ranks = plan.ranks[first : first + host.workers]
        devices = list(dict.fromkeys(rank.device for rank in ranks))
        shown = f"{devices[0]} to {devices[-1]}" if len(devices) > 1 else "".join(devices)
        shown += " (its GPUs, if it has any)" if shown == "auto" else ""
        if host.chosen is not None:
            shown += f", chosen: {','.join(map(str, host.chosen))}"
        workers = f", device {shown}, {_processors(ranks)}" if ranks else ""
        told.append((host.name, host.workers, first, "; ".join(filter(None, (workers, servers)))))
        first += host.workers
    for (workers, rest), alike in groupby(told, key=lambda one: (one[1], one[3])):
        names, _, starts, _ = zip(*alike, strict=True)
        if len(names) <= ALIKE_MOST or not workers:
            for name, start in zip(names, starts, strict=True):
                yield f"{name}: {_numbers(range(start, start + workers)) if workers else ''}{rest}"
            continue
        numbers = _numbers(range(starts[0], starts[-1] + workers))
        yield f"{name_hosts(names)}: {numbers}, {workers} on each{rest}"


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _processors(ranks: Sequence[RankPlan]) -> str:
    if ranks[0].cpus is None:
        return "processors decided on the host"
    blocks = list(dict.fromkeys(rank.cpus or "not bound" for rank in ranks))
    shown = " | ".join(blocks if len(blocks) < 9 else [*blocks[:8], "..."])
    return f"processors {shown}, {ranks[0].threads} thread(s) each"


if __name__ == "__main__":
    sys.exit(main())
