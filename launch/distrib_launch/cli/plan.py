"""`distrib-topo plan`: predict how a job scales on a cluster, its bottleneck, and the effect of changes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

from distrib import units
from distrib.bandwidth_model import planner, scaling_plot
from distrib.bandwidth_model.training_cost import AMORTIZATION_YEARS, Price, parse_amount, parse_price
from distrib.cluster.hosts import MAX_HOSTS
from distrib.utils import plotting
from distrib.utils.json_text import encode_json
from distrib_launch.arguments import training_options
from distrib_launch.arguments.help_text import CommonHelp
from distrib_launch.arguments.shared_options import Parser, add_host_filter, add_hosts, fraction, host_filter, integer
from distrib_launch.cli import plan_report, plan_request
from distrib_launch.cli.plan_workload import PRECISIONS
from distrib_launch.console import tolerate_closed_pipe

T = TypeVar("T")
USAGE = "distrib-topo plan [options] --workload NAME|FILE"
EXAMPLES = """\
  distrib-topo plan --workload train.profile.json -H cluster.txt
  distrib-topo plan --workload ResNet-50 --gpu A100 --network HDR --nodes 1..64
  distrib-topo plan --workload ResNet-50 -H cluster.txt --compare 100GbE,HDR
  distrib-topo plan --workload llama-3-70b --gpu H100 --nodes 128 --shard auto
"""


def add_options(plan: Parser) -> None:
    """Add the options of the command.

    Args:
        plan: Its parser.
    """
    plan.shorten_help(USAGE, EXAMPLES)
    job = plan.add_argument_group("which job on which hosts")
    job.add_argument("--workload", metavar="NAME|FILE", help=CommonHelp("predict a network of the catalogue, such as "
                     "ResNet-50 or llama-3-8b, or the file of distrib-launch --profile"))  # fmt: skip
    add_hosts(job, "all of the topology")
    add_host_filter(job)
    job.add_argument("--nodes", type=_nodes, metavar="N|A..B", help=CommonHelp("predict for N or A to B hosts, such as 16, 1,2,4 or 1..64 "
                     "(default: all, or up to 16)"))  # fmt: skip
    job.add_argument("--ranks-per-node", type=integer("ranks"), metavar="N", help="give each host N ranks (default: the hostfile's "
                     "slots, one per GPU, 8 for GPUs that no file describes, 1 on CPUs)")  # fmt: skip
    what = plan.add_argument_group("what if")
    what.add_argument("--gpu", metavar="NAME", help=CommonHelp("assume GPUs of this kind, such as A100"))
    what.add_argument("--network", metavar="NET", help=CommonHelp("assume this network, such as 25GbE or '4 x NDR'"))
    what.add_argument("--gpudirect", choices=["on", "off"], help="assume GPUDirect RDMA, or copies through host memory "
                      "(default: as described)")  # fmt: skip
    what.add_argument("--batch", type=integer("samples"), metavar="N", help=CommonHelp("assume N samples per rank (default: the "
                      "workload's)"))  # fmt: skip
    what.add_argument("--precision", choices=list(PRECISIONS), help="compute in this precision, with parameters in 32 bits (default: "
                      "16 bits on GPUs with tensor cores)")  # fmt: skip
    what.add_argument("--checkpointing", choices=["none", "selective", "full"], help="compute activations again in backward: half of "
                      "the matrix products (selective) or each block (full) (default: as usual for the network)")  # fmt: skip
    what.add_argument("--compile", action="store_true", help="assume torch.compile, for decoders such as Llama")
    what.add_argument("--shard", choices=["none", "grads", "host", "all", "auto"], default="none", help=CommonHelp("divide the model over all ranks (FSDP) or those of a "
                      "host (HSDP); auto: the fastest that fits"))  # fmt: skip
    what.add_argument("--compare", metavar="NET[=PRICE],...", help=CommonHelp("compare networks, with prices per host of a purchase or "
                      "an hour, such as 100GbE=400,HDR=0.2/h"))  # fmt: skip
    what.add_argument("--efficiency", type=_efficiency, default=0.9, metavar="PERCENT", help=CommonHelp("report the network for this (default: 90%%)"))  # fmt: skip
    described = plan.add_argument_group("a transformer by its size, in place of --workload")
    described.add_argument(
        "--params", type=_type(parse_amount), metavar="N", help="assume a decoder of N parameters, such as 7B"
    )
    described.add_argument("--layers", type=integer("layers"), metavar="N", help="assume N layers, such as 32")
    described.add_argument(
        "--hidden", type=integer("features"), metavar="N", help="assume N features of a token, such as 4096"
    )
    described.add_argument("--seq", type=integer("tokens"), metavar="N", help="assume N tokens of a sequence, such as 4096; also with a "
                           "--workload of sequences")  # fmt: skip
    described.add_argument(
        "--vocabulary", type=integer("tokens"), metavar="N", help="assume N tokens of the vocabulary (default: 32000)"
    )
    measured = plan.add_argument_group("a measured step, in place of --workload")
    measured.add_argument("--step", type=_duration, metavar="TIME", help="assume that a step of one rank alone takes TIME, such as 97ms; "
                          "--gradients gives their size in 32 bits, such as 498MB, or 498MB,bf16")  # fmt: skip
    measured.add_argument("--backward", type=fraction, metavar="FRACTION", help="assume that backward takes this part of the step, such "
                          "as 0.6 (default: 2/3)")  # fmt: skip
    training_options.add_options(plan, shown=str)
    cost = plan.add_argument_group("time and cost")
    length = cost.add_mutually_exclusive_group()
    length.add_argument(
        "--tokens",
        type=_type(parse_amount),
        metavar="N",
        help=CommonHelp("report the time to train on N tokens, such as 300B"),
    )
    length.add_argument(
        "--samples",
        type=_type(parse_amount),
        metavar="N",
        help=CommonHelp("report the time to train on N samples, such as 90M"),
    )
    cost.add_argument(
        "--gpu-hour",
        type=_positive,
        metavar="PRICE",
        help=CommonHelp("report the cost at this price of a GPU-hour"),
    )
    cost.add_argument("--host-price", type=_type(parse_price), metavar="PRICE", help="add this price of each host, of a purchase such as 250000 (over "
                      f"{AMORTIZATION_YEARS} years), or of an hour such as 32/h")  # fmt: skip
    output = plan.add_argument_group("output")
    output.add_argument("--json", action="store_true", help=CommonHelp("print JSON: seconds, bytes, bytes per second"))
    output.add_argument("--plot", metavar="FILE", action="append", default=[], help=CommonHelp("draw the scaling into FILE, or the timeline of "
                        "a step into a file such as timeline.svg (.png, .pdf)"))  # fmt: skip


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
            print(encode_json(plan, indent=2).decode())
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


def _type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for argparse, which prints the text of an ArgumentTypeError only."""

    def parsed(given: str) -> T:
        try:
            return parse(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _positive(given: str) -> float:
    try:
        price = parse_price(given)
    except ValueError:
        price = Price(amount=0)
    if price.is_hourly or not price.amount:
        raise argparse.ArgumentTypeError(f"{given!r} is not a price above 0; write such as 2.5")
    return price.amount


def _duration(given: str) -> float:
    seconds = _type(units.parse_duration)(given)
    if not 0 < seconds <= 1e5:
        raise argparse.ArgumentTypeError(f"{given!r} is not the time of a step; write such as 97ms")
    return seconds


def _efficiency(given: str) -> float:
    value = fraction(given)
    if not value:
        raise argparse.ArgumentTypeError(f"{given!r} needs no network; give more than 0%")
    return value
