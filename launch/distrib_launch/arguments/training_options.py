"""Options for the training strategy."""

from __future__ import annotations

import argparse
import re

import msgspec

from distrib import strategy, units
from distrib.errors import ConfigError
from distrib.strategy import MODES, OuterOptimizer, Strategy, format_names
from distrib_launch.arguments.help_text import CommonHelp
from distrib_launch.arguments.shared_options import integer


def add_options(parser: argparse.ArgumentParser, *, shown: type[str] = CommonHelp) -> None:
    """Add the options for scripts that call `distrib.init()`.

    Args:
        parser: Parser of a command.
        shown: Kind of the help of the most used ones: `CommonHelp`, or `str` to leave them to `--help-all`.
    """
    group = parser.add_argument_group("how to train (scripts with distrib.init())")
    group.add_argument("--mode", choices=[*MODES, "auto"], default="sync", metavar="MODE", help=shown(
                       "train with sync (all-reduce in every step), local (local SGD, DiLoCo), async (parameter servers), or auto (the "
                       "fastest setting equivalent to sync) (default: sync)"))  # fmt: skip
    group.add_argument("--backend", choices=["torch", "horovod"], default="torch", help="average gradients with torch.distributed or "
                       "Horovod (default: torch)")  # fmt: skip
    group.add_argument("--gradients", default="fp32", metavar="FORMAT", help=shown(f"send gradients as {format_names()} "
                       "(default: fp32)"))  # fmt: skip
    group.add_argument("--all-reduce", choices=["auto", "flat", "hierarchical"], default="auto", help="reduce over all ranks at once "
                       "(flat) or inside each host first (hierarchical) (default: auto)")  # fmt: skip
    group.add_argument(
        "--bucket",
        metavar="SIZE",
        help="send gradients in buckets of SIZE, such as 25MiB (default: torch's on GPUs; on CPU hosts by model size and link rate)",
    )
    group.add_argument("--accumulate", type=integer("batches"), default=1, metavar="N", help="accumulate gradients of N "
                       "batches before each all-reduce (default: 1)")  # fmt: skip
    group.add_argument("--balance", action="store_true", help="give faster ranks larger batches")
    group = parser.add_argument_group("with --mode local")
    group.add_argument("--inner-steps", type=integer("steps"), metavar="H", help="average parameters every H steps "
                       "(default: 500)")  # fmt: skip
    group.add_argument("--outer", default="diloco", metavar="RULE", help="apply averages with diloco (outer Nesterov "
                       "momentum), average (local SGD), or LR[:MOMENTUM], such as 0.7:0.9 (default: diloco)")  # fmt: skip
    group.add_argument("--fragments", type=integer("fragments"), default=1, metavar="F", help="average F fragments of the "
                       "parameters at different steps (default: 1)")  # fmt: skip
    group.add_argument("--overlap-steps", type=int, default=0, metavar="N", help="continue for N steps while an average is "
                       "being computed (default: 0)")  # fmt: skip
    group = parser.add_argument_group("with --mode async")
    group.add_argument("--servers", type=integer("servers"), metavar="K", help="start K parameter servers, on idle hosts if "
                       "there are any (default: one on each worker's host, or on hosts with role=server)")  # fmt: skip
    group.add_argument("--staleness", type=_staleness, metavar="S", help="let a rank be at most S steps ahead of the "
                       "slowest, such as 4 (default: unbounded)")  # fmt: skip
    group.add_argument("--replicas", type=int, choices=[0, 1], default=0, help="keep so many replicas of each server's "
                       "shard (default: 0)")  # fmt: skip
    group.add_argument("--stale-rate", action=argparse.BooleanOptionalAction, default=True, help="divide the learning rate "
                       "by the staleness of an update (arXiv:1511.05950; default: yes)")  # fmt: skip
    group.add_argument("--delay-compensation", type=_strength, metavar="LAMBDA", help="compensate gradients for their "
                       "delay (DC-ASGD, arXiv:1609.08326), such as 0.04 (default: off)")  # fmt: skip
    group.add_argument("--momentum-correction", action=argparse.BooleanOptionalAction, default=True, help="give each worker "
                       "its own look-ahead momentum of SGD (DANA, arXiv:1907.11612; default: yes)")  # fmt: skip
    group.add_argument("--host-reduction", action=argparse.BooleanOptionalAction, default=True, help="average the gradients "
                       "of a host's ranks before they are sent to other hosts (default: yes)")  # fmt: skip


def strategy_of(options: argparse.Namespace) -> Strategy:
    """Return the strategy; for mode auto, the one from which the search starts.

    Args:
        options: Parsed options.

    Raises:
        ConfigError: Options contradict each other, or a value is not valid.
    """
    return strategy.validate_strategy(
        Strategy(
            mode="sync" if options.mode == "auto" else options.mode,
            backend=options.backend,
            gradients=strategy.parse_gradients(options.gradients),
            all_reduce=options.all_reduce,
            bucket_bytes=_bucket(options.bucket),
            accumulate=options.accumulate,
            balance=options.balance,
            inner_steps=options.inner_steps,
            outer=_outer(options),
            servers=options.servers,
            staleness=options.staleness,
            replicas=options.replicas,
            stale_rate=options.stale_rate,
            delay_compensation=options.delay_compensation,
            momentum_correction=options.momentum_correction,
            host_reduction=options.host_reduction,
        ),
        options.mode,
    )


def _outer(options: argparse.Namespace) -> OuterOptimizer:
    """Parse `diloco`, `average`, or a learning rate and a momentum such as `0.9:0.5`."""
    known = {"diloco": OuterOptimizer(), "average": OuterOptimizer(lr=1.0, momentum=0.0)}
    found = known.get(options.outer)
    if found is None:
        lr, _, momentum = options.outer.partition(":")
        try:
            found = OuterOptimizer(lr=float(lr), momentum=float(momentum or "0"))
        except ValueError:
            found = None
        if found is None or not (0 < found.lr < 100 and 0 <= found.momentum < 1):
            raise ConfigError(
                f"--outer {options.outer}: not a valid outer optimizer", hint="give diloco, average, or LR[:MOMENTUM]"
            )
    if not 0 <= options.overlap_steps < 1 << 20:
        raise ConfigError(
            f"--overlap-steps {options.overlap_steps}: not a valid number of steps", hint="give 0 or more"
        )
    return msgspec.structs.replace(found, fragments=options.fragments, overlap_steps=options.overlap_steps)


def _bucket(text: str | None) -> int | None:
    if text is None:
        return None
    if re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ConfigError(f"--bucket {text}: no unit", hint=f"write {text}MiB")
    try:
        size = units.parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--bucket {text}: {error}") from None
    if size < 1:
        raise ConfigError(f"--bucket {text}: not a valid size", hint="give a size such as 25MiB")
    return size


def _staleness(text: str) -> int | None:
    return None if text == "unbounded" else integer("steps (or unbounded)", minimum=0)(text)


def _strength(text: str) -> float:
    try:
        strength = float(text)
    except ValueError:
        strength = 0.0
    if not 0 < strength < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid strength; give a number above 0, such as 0.04")
    return strength
