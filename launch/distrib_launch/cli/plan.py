"""`distrib-topo plan`, and what `distrib-launch` says of a job's speed: before it starts, while it runs, and at its end."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from distrib.cluster.hosts import MAX_HOSTS
from distrib.utils import files
from distrib_launch import host_selection
from distrib_launch.cli.options import add_hosts, number


def add_options(plan: argparse.ArgumentParser) -> None:
    """The options of `distrib-topo plan`."""
    plan.add_argument("--workload", metavar="NAME|FILE", required=True, help="what is trained: a network of the catalogue such as "
                      "ResNet-50, or the file of distrib-launch --profile")  # fmt: skip
    add_hosts(plan, "all of the topology")
    host_selection.add_options(plan)
    plan.add_argument("--nodes", type=_nodes, metavar="N|A..B", help="for so many hosts, such as 16, 1..64 (powers of two between) "
                      "or 1,2,4 (default: up to those there are, or 16)")  # fmt: skip
    plan.add_argument("--ranks-per-node", type=number("ranks"), metavar="N", help="default: the hostfile's slots, a rank for each GPU, or "
                      "8 with GPUs that nobody described, 1 on CPUs")  # fmt: skip
    what = plan.add_argument_group("what if")
    what.add_argument("--gpu", metavar="NAME", help="with GPUs of this kind")
    what.add_argument("--network", metavar="NET", help="with this network: 25GbE, HDR, '4 x NDR', 'RoCE 100Gb/s'")
    what.add_argument("--gpudirect", choices=["on", "off"], help="with GPUDirect RDMA, or through host memory")
    what.add_argument("--batch", type=number("samples"), metavar="N", help="with batches of N samples for each rank")
    what.add_argument(
        "--compare", metavar="NET[=PRICE],...", help="several networks side by side; PRICE of a node's share"
    )
    what.add_argument("--efficiency", type=_efficiency, default=0.9, metavar="PERCENT", help="say what bandwidth this needs "
                      "(default: 90%%)")  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print JSON: seconds, bytes, bytes per second")
    plan.add_argument("--plot", metavar="FILE", action="append", default=[], help="draw scaling into FILE (.svg, .png, .pdf); the "
                      "timeline of a step where its name has 'timeline' in it (may be repeated)")  # fmt: skip


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options of `distrib-launch` about what to expect of a job."""
    about = parser.add_argument_group("what to expect of it")
    about.add_argument("--workload", metavar="NAME|FILE", help="what is trained, to predict how far it scales: a profile, or a "
                       "network of the catalogue such as ResNet-50 (default: NAME.profile.json beside NAME.py; none: nothing)")  # fmt: skip
    about.add_argument("--profile", metavar="FILE", help="measure a step of the script on one rank, write it to FILE (JSON) and end "
                       "the script after 25 steps")  # fmt: skip
    about.add_argument("--warn-below", type=_part, default=0.8, metavar="PERCENT", help="warn of a job that stays below this "
                       "part of its ideal speed (default: 80%%; 0: never)")  # fmt: skip


def is_wanted(options: argparse.Namespace) -> bool:
    """Whether a launch is to be predicted: most are not, and need not load the model."""
    return options.workload is not None or options.mode == "auto" or beside(options) is not None


def beside(options: argparse.Namespace) -> Path | None:
    """The profile `NAME.profile.json` that lies beside the script `NAME.py`."""
    script = Path(options.script)
    path = script.parent / f"{script.stem}.profile.json"
    return path if not options.module and not options.profile and files.is_file(path) else None


def run(options: argparse.Namespace) -> int:
    """Plan, and tell; returns the exit code. Raises `DistribError` for what cannot be planned."""
    from distrib.bandwidth_model import planner, scaling_plot
    from distrib.utils import plotting
    from distrib_launch.cli import plan_report
    from distrib_launch.console import perhaps_unread

    for path in options.plot:
        plotting.check_plot_path(path)
    question = planner.question(options)
    answer = planner.answer(question)
    for path in options.plot:
        scaling_plot.draw(path, question, answer)
    if options.json:
        import msgspec

        with perhaps_unread():
            print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return 0
    with perhaps_unread():
        print("\n".join([*plan_report.lines(question, answer), *(f"drawn in {path}" for path in options.plot)]))
    return 0


def _nodes(given: str) -> tuple[int, ...]:
    """`16`, `1,2,4`, or `1..64`: powers of two between its ends, and the ends."""
    found: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r" *([1-9][0-9]{0,8})(?: *\.\. *([1-9][0-9]{0,8}))? *", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise argparse.ArgumentTypeError(f"{given!r} is no count of hosts; write such as 16, 1..64 or 1,2,4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_HOSTS:
            raise argparse.ArgumentTypeError(f"{given!r} is more than {MAX_HOSTS:,} hosts")
        found |= {first, last} | {1 << power for power in range(30) if first < 1 << power < last}
    return tuple(sorted(found))


def _efficiency(given: str) -> float:
    value = _part(given)
    if not value:
        raise argparse.ArgumentTypeError(f"{given!r} needs no network; give more than 0%")
    return value


def _part(given: str) -> float:
    """`80%`, `80` or `0.8` as a part of one."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?|\.[0-9]{1,6})(%?)", given.strip())
    value = float(match[1]) / (100 if match and (match[2] or float(match[1]) > 1) else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{given!r} is no part of the whole; write such as 80%")
    return value
