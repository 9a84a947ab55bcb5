"""`distrib-topo plan`: predict how a job scales on a cluster, its bottleneck, and the effect of changes."""

from __future__ import annotations

import argparse
import re

import msgspec

from distrib.bandwidth_model import planner, scaling_plot
from distrib.cluster.hosts import MAX_HOSTS
from distrib.utils import plotting
from distrib_launch.arguments.options import add_host_filter, add_hosts, fraction, host_filter, integer
from distrib_launch.cli import plan_report, plan_request
from distrib_launch.console import tolerate_closed_pipe


def add_options(plan: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Args:
        plan: Its parser.
    """
    plan.add_argument("--workload", metavar="NAME|FILE", required=True, help="what is trained: a network of the catalogue such as "
                      "ResNet-50, or the file of distrib-launch --profile")  # fmt: skip
    add_hosts(plan, "all of the topology")
    add_host_filter(plan)
    plan.add_argument("--nodes", type=_nodes, metavar="N|A..B", help="for so many hosts, such as 16, 1..64 (powers of two between) "
                      "or 1,2,4 (default: up to those there are, or 16)")  # fmt: skip
    plan.add_argument("--ranks-per-node", type=integer("ranks"), metavar="N", help="default: the hostfile's slots, a rank for each GPU, or "
                      "8 with GPUs that no file describes, 1 on CPUs")  # fmt: skip
    what = plan.add_argument_group("what if")
    what.add_argument("--gpu", metavar="NAME", help="with GPUs of this kind")
    what.add_argument("--network", metavar="NET", help="with this network: 25GbE, HDR, '4 x NDR', 'RoCE 100Gb/s'")
    what.add_argument("--gpudirect", choices=["on", "off"], help="with GPUDirect RDMA, or through host memory")
    what.add_argument("--batch", type=integer("samples"), metavar="N", help="with batches of N samples for each rank")
    what.add_argument(
        "--compare", metavar="NET[=PRICE],...", help="several networks side by side; PRICE of a node's share"
    )
    what.add_argument("--efficiency", type=_efficiency, default=0.9, metavar="PERCENT", help="report the bandwidth that this needs "
                      "(default: 90%%)")  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print JSON: seconds, bytes, bytes per second")
    plan.add_argument("--plot", metavar="FILE", action="append", default=[], help="draw scaling into FILE (.svg, .png, .pdf); the "
                      "timeline of a step where its name has 'timeline' in it (may be repeated)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Predict the scaling, print and draw it, and return 0.

    Args:
        options: Parsed options.
    """
    for path in options.plot:
        plotting.check_plot_path(path)
    request = plan_request.build_plan_request(options, host_filter(options))
    plan = planner.make_plan(request)
    for path in options.plot:
        scaling_plot.draw_plan(path, request, plan)
    if options.json:
        with tolerate_closed_pipe():
            print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
        return 0
    with tolerate_closed_pipe():
        print("\n".join([*plan_report.lines(request, plan), *(f"drawn in {path}" for path in options.plot)]))
    return 0


def _nodes(given: str) -> tuple[int, ...]:
    """Parse `16`, `1,2,4` or `1..64`, which stands for its ends and the powers of two between them."""
    found: set[int] = set()
    for part in given.split(","):
        match = re.fullmatch(r" *([1-9][0-9]{0,8})(?: *\.\. *([1-9][0-9]{0,8}))? *", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise argparse.ArgumentTypeError(
                f"{given!r} is not a valid number of hosts; write such as 16, 1..64 or 1,2,4"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last > MAX_HOSTS:
            raise argparse.ArgumentTypeError(f"{given!r} is more than {MAX_HOSTS:,} hosts")
        found |= {first, last} | {1 << power for power in range(30) if first < 1 << power < last}
    return tuple(sorted(found))


def _efficiency(given: str) -> float:
    value = fraction(given)
    if not value:
        raise argparse.ArgumentTypeError(f"{given!r} needs no network; give more than 0%")
    return value
