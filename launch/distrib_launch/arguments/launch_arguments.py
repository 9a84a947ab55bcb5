"""Command line of `distrib-launch`: the parser, and the conversion to `LaunchOptions`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

import msgspec

from distrib._version import __version__
from distrib.errors import ConfigError
from distrib.utils import files
from distrib.utils.containers import RUNTIMES
from distrib_launch import engines
from distrib_launch.arguments import training_options
from distrib_launch.arguments.config_file import add_config_option, parse_with_config
from distrib_launch.arguments.help_text import CommonHelp
from distrib_launch.arguments.shared_options import (
    Parser,
    accept_old_spelling,
    add_connection_options,
    add_host_filter,
    add_hosts,
    add_no_preflight,
    fraction,
    host_filter,
    integer,
)
from distrib_launch.launch_options import GRACE_SECONDS, ContainerOptions, LaunchOptions, PodOptions
from distrib_launch.rank_agent.affinity import BINDINGS

USAGE = "distrib-launch [options] SCRIPT [ARGS...]"
EXAMPLES = """\
  distrib-launch -np 2 train.py --epochs 3    two ranks on this machine
  distrib-launch -H cluster.txt train.py      one rank per slot of a hostfile
  distrib-launch --dry-run -np 2 train.py     show the plan, start nothing
"""
EPILOG = """\
exit code: 0 if every rank succeeded, else that of the rank that failed first (128 + signal),
2 usage, hostfile or topology, 3 preflight refused, 124 time limit, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP,
1 not started, hung, or a rank or the engine lost
"""


def parser() -> Parser:
    """Return the parser of the command; `distrib_launch.run` takes the same options."""
    p = Parser(
        prog="distrib-launch",
        description="Run a training script on several machines, one rank per GPU or slot.",
        epilog=EPILOG,
    )
    p.shorten_help(USAGE, EXAMPLES)
    _add_host_options(p.add_argument_group("where to run"))
    _add_run_options(p.add_argument_group("how to run"))
    training_options.add_options(p)
    _add_forecast_options(p.add_argument_group("what performance to expect"))
    _add_container_options(p.add_argument_group("in which container"))
    _add_pod_options(p.add_argument_group("with --engine kubernetes"))
    _add_output_options(p.add_argument_group("what to show and keep"))
    p.add_argument("script", nargs=argparse.PARSER, action=_ScriptAndArguments, metavar="SCRIPT",
                   help="run this Python script on every rank; {rank}, {local_rank}, {world_size}, {master_addr} and "
                   "{master_port} are replaced in its arguments ({{rank}} is not)")  # fmt: skip
    return p


def _add_host_options(group: argparse._ArgumentGroup) -> None:
    add_hosts(group, "a Slurm allocation's, else this machine")
    group.add_argument("-n", "-np", "--np", dest="ranks", type=integer("ranks"), metavar="N",
                       help=CommonHelp("start N ranks (default: one for each slot)"))  # fmt: skip
    group.add_argument("--oversubscribe", action="store_true", help="allow more than 8 ranks per core of this machine")
    group.add_argument("--share-gpus", action="store_true", help="let several ranks share a GPU, over Gloo instead of NCCL, to try "
                       "a script for more GPUs than there are")  # fmt: skip
    add_host_filter(group)
    group.add_argument("--spread", action="store_true", help="with -np: spread ranks evenly over the hosts (default: fill "
                       "one host after the other)")  # fmt: skip
    add_connection_options(group)
    add_no_preflight(group)
    group.add_argument(
        "--drop-bad-hosts", action="store_true", help="start without hosts that fail the preflight checks"
    )


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engine", choices=engines.NAMES, help="start ranks with mpirun over ssh, with srun, or write an MPIJob for "
                       "Kubernetes (default: mpirun; srun in a Slurm job whose hosts are used)")  # fmt: skip
    group.add_argument("--bind", choices=BINDINGS, default="auto", help="bind ranks to cores near their GPU or to their share of the "
                       "host's (auto, core), to whole NUMA nodes (numa), or not (default: auto)")  # fmt: skip
    group.add_argument("-m", "--module", action="store_true", help="run SCRIPT as a module, as python -m does")
    group.add_argument("--no-python", action="store_true", help="run SCRIPT as a program, such as a shell script")
    group.add_argument("--stdin", choices=("none", "rank0", "all"), default="none", help="read standard input to its end, such as that "
                       "of < FILE, and give it to rank 0 or to all ranks (default: none)")  # fmt: skip
    group.add_argument("--sync", metavar="DIR", help=CommonHelp("copy this folder to all hosts first, such as ."))
    group.add_argument("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]",
                       help=CommonHelp("set or forward a variable, such as NCCL_DEBUG=INFO"))  # fmt: skip
    group.add_argument(
        "--timeout", type=_seconds, metavar="TIME", help="stop the job after this time, such as 90, 30s or 2h"
    )
    group.add_argument("--hang-timeout", type=_seconds, metavar="TIME", help=CommonHelp("stop after this time without progress, such as 5m "
                       "(default: report a hang after 10m and continue)"))  # fmt: skip
    group.add_argument("--host-timeout", type=_seconds, metavar="TIME", help="probe a host that was silent for this time, and "
                       "declare it lost if it does not reply (default: 1.8s; 30s in mode async)")  # fmt: skip
    group.add_argument("--max-restarts", type=integer("restarts", minimum=0), default=0, metavar="N", help=CommonHelp("restart a "
                       "failed job up to N times (default: 0)"))  # fmt: skip
    group.add_argument("--min-hosts", type=integer("hosts"), metavar="M", help=CommonHelp("start and restart on M hosts or more "
                       "(default: all)"))  # fmt: skip
    group.add_argument("--grace", type=_seconds, default=GRACE_SECONDS, metavar="TIME", help="wait this long between SIGTERM and "
                       "SIGKILL (default: 30s)")  # fmt: skip


def _add_forecast_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", metavar="NAME|FILE", help="predict the scaling of this workload: a network of the catalogue, "
                       "such as ResNet-50, or a profile; none: no prediction (default: NAME.profile.json beside NAME.py)")  # fmt: skip
    group.add_argument("--profile", metavar="FILE", help=CommonHelp("profile 25 steps on one rank, write them to FILE, such as "
                       "train.profile.json, and stop"))  # fmt: skip
    group.add_argument("--warn-below", type=fraction, default=0.8, metavar="PERCENT", help="warn if the scaling efficiency is below "
                       "PERCENT; 0: never (default: 80%%)")  # fmt: skip


def _add_container_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--container", metavar="IMAGE", help="run the ranks in containers of this image, which every host must have and "
                       "which has distrib, such as distrib:cpu")  # fmt: skip
    group.add_argument("--container-runtime", choices=("auto", *RUNTIMES), default="auto", help="start containers with this program "
                       "(default: auto, the first installed on the host that has the image)")  # fmt: skip
    group.add_argument("--container-mount", dest="container_mounts", action="append", default=[], type=os.path.abspath, metavar="PATH",
                       help="mount this path of each host at the same path, besides the folders of the job; may be repeated")  # fmt: skip


def _add_pod_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--image", metavar="NAME", help="use this image, built from the Dockerfile, such as registry/distrib:1"
    )
    group.add_argument("--manifest", metavar="FILE", help="write the MPIJob to FILE (default: standard output)")
    group.add_argument("--pod-resource", dest="pod_resources", action="append", default=[], type=_resource, metavar="NAME=N",
                       help="request this for each worker besides GPUs, such as rdma/hca_shared_devices_a=1; may be repeated")  # fmt: skip
    group.add_argument("--runtime-class", default="", metavar="NAME", help="set the RuntimeClass of pods with GPUs, such as nvidia "
                       "(default: the cluster's)")  # fmt: skip


def _add_output_options(group: argparse._ArgumentGroup) -> None:
    add_config_option(group)
    group.add_argument("--dry-run", action="store_true", help=CommonHelp("print the plan and start nothing"))
    group.add_argument("--json", action="store_true", help="print the plan, or the result, as JSON")
    group.add_argument("--run-dir", type=os.path.expanduser, metavar="DIR", help=CommonHelp("write logs and results to DIR "
                       "(default: distrib-runs/<time>-<script>)"))  # fmt: skip
    group.add_argument("-q", "--quiet", action="store_true",
                       help=CommonHelp("show no status lines and no output of ranks"))  # fmt: skip
    group.add_argument("--show-rank", type=int, metavar="R", help="show the output of rank R only (default: all ranks)")
    accept_old_spelling(group, "--only-rank", "--show-rank")
    group.add_argument(
        "--no-dedup", dest="dedup", action="store_false", help="show identical lines of several ranks one by one"
    )
    accept_old_spelling(group, "--no-fold", "--no-dedup")
    group.add_argument("-v", "--verbose", action="store_true",
                       help=CommonHelp("also show network, engine command and durations"))  # fmt: skip
    group.add_argument("--version", action="version", version=f"distrib {__version__}")


def parse(words: Sequence[str] | None = None) -> LaunchOptions:
    """Parse a command line.

    Args:
        words: Command line without the program's name; None: that of this process.

    Raises:
        ConfigError: The command line is not valid.
    """
    return launch_options(parse_with_config(parser(), words))


def launch_options(options: argparse.Namespace) -> LaunchOptions:
    """Convert parsed options.

    Args:
        options: Result of `parser().parse_args`.

    Raises:
        ConfigError: Options contradict each other.
    """
    return LaunchOptions(
        script=options.script,
        arguments=tuple(options.arguments),
        module=options.module,
        program=options.no_python,
        run_dir=options.run_dir or "",
        hosts=options.hosts,
        topology=options.topology,
        ranks=options.ranks,
        oversubscribe=options.oversubscribe,
        share_gpus=options.share_gpus,
        host_filter=msgspec.structs.replace(host_filter(options), spread=options.spread),
        interface=options.interface,
        mpirun=options.mpirun,
        ssh_command=options.ssh_command,
        preflight=options.preflight,
        drop_bad_hosts=options.drop_bad_hosts,
        min_hosts=options.min_hosts,
        engine=options.engine or "",
        bind=options.bind,
        sync=options.sync,
        variables=tuple(options.env),
        timeout_seconds=options.timeout,
        hang_timeout_seconds=options.hang_timeout,
        host_timeout_seconds=options.host_timeout,
        grace_seconds=options.grace,
        max_restarts=options.max_restarts,
        pods=PodOptions(
            image=options.image,
            manifest=options.manifest,
            resources=dict(options.pod_resources),
            runtime_class=options.runtime_class,
        ),
        container=_container(options),
        strategy=training_options.strategy_of(options),
        auto_mode=options.mode == "auto",
        workload=options.workload,
        profile=options.profile,
        warn_below=options.warn_below,
        quiet=options.quiet or options.json,
        status_lines=not options.quiet and not options.json,
        show_rank=options.show_rank,
        dedup=options.dedup,
        verbose=options.verbose,
    )


def _container(options: argparse.Namespace) -> ContainerOptions:
    """Return the options of containers. Raises ConfigError if they contradict others."""
    if not options.container:
        if options.container_mounts or options.container_runtime != "auto":
            raise ConfigError(
                "--container-runtime and --container-mount need an image",
                hint="add --container IMAGE",
                code="option-conflict",
            )
        return ContainerOptions()
    if options.engine == "kubernetes":
        raise ConfigError(
            "--container: --engine kubernetes starts pods, whose image is --image",
            hint="leave out --container",
            code="option-conflict",
        )
    file = files.absolute_path(options.container)  # of Apptainer
    image = str(file) if files.is_file(file) else options.container
    return ContainerOptions(image=image, runtime=options.container_runtime, mounts=tuple(options.container_mounts))


class _ScriptAndArguments(argparse.Action):
    """Split the script from its arguments. With two positionals argparse would swallow a `--` between them."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        namespace.script, *namespace.arguments = values[1:] if values[0] == "--" else values


def _resource(text: str) -> tuple[str, str]:
    match = re.fullmatch(
        r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)=([1-9][0-9]{0,8})", text.strip()
    )
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid resource; write such as rdma/hca_shared_devices_a=1")
    return match[1], match[4]


_MAX_DAYS = 366
"""Limit of all durations: no run takes longer, and sums of times stay exact."""


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid time; write such as 90, 30s, 10m or 2h")
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    if seconds > _MAX_DAYS * 86400:
        raise argparse.ArgumentTypeError(
            f"{text[:20]!r} is longer than {_MAX_DAYS}d; leave the option out for no limit"
        )
    return seconds
