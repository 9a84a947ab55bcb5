"""The options that say how ranks train together, and the strategy that they make."""

from __future__ import annotations

import argparse
from collections.abc import Collection

import msgspec

from distrib import strategy, units
from distrib.errors import ConfigError
from distrib.strategy import Outer, Strategy
from distrib_launch.cli.options import number


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `distrib-launch` that scripts with `distrib.init()` obey."""
    how = parser.add_argument_group("how ranks train together (scripts with distrib.init())")
    how.add_argument("--mode", choices=["sync", "async", "local", "auto"], default="sync", help="in step, against "
                     "parameter servers, alone for some steps, or the best way that leaves the arithmetic of sync")  # fmt: skip
    how.add_argument("--backend", choices=["torch", "horovod"], default="torch", help="what averages gradients")
    how.add_argument("--gradients", default="fp32", metavar="FORMAT", help="what they travel as: fp32, fp16, bf16, int8, "
                     "powersgd:RANK or topk:FRACTION (default: fp32)")  # fmt: skip
    how.add_argument("--all-reduce", choices=["auto", "flat", "hierarchical"], default="auto", help="among all ranks at "
                     "once, or inside each host first (default: what suits the hosts)")  # fmt: skip
    how.add_argument("--bucket", metavar="SIZE", help="how much travels at once, such as 25MiB (default: chosen)")
    how.add_argument("--accumulate", type=number("batches"), default=1, metavar="N", help="one step of N batches: their mean gradient "
                     "is averaged over the ranks once")  # fmt: skip
    how.add_argument("--balance", action="store_true", help="give faster ranks larger batches")
    how.add_argument("--inner-steps", type=number("steps"), metavar="H", help="mode local: steps between two averages "
                     "(default: 500)")  # fmt: skip
    how.add_argument("--outer", default="diloco", metavar="HOW", help="mode local: what the average becomes: diloco (outer "
                     "Nesterov momentum, the default), average (local SGD), or LR[:MOMENTUM]")  # fmt: skip
    how.add_argument("--fragments", type=number("parts"), default=1, metavar="F", help="mode local: parts of the parameters that are "
                     "averaged at different steps")  # fmt: skip
    how.add_argument("--overlap-steps", type=int, default=0, metavar="N", help="mode local: steps that ranks go on for "
                     "while an average is on its way")  # fmt: skip
    how.add_argument("--servers", type=number("servers"), metavar="K", help="mode async: so many servers, on idle hosts where there are any "
                     "(default: one on every worker's host, or on those with role=server)")  # fmt: skip
    how.add_argument("--staleness", type=_staleness, metavar="S", help="mode async: steps that a rank may be ahead of the slowest, or "
                     "unbounded (default)")  # fmt: skip
    how.add_argument("--replicas", type=int, choices=[0, 1], default=0, help="mode async: copies of each server's part")
    how.add_argument("--stale-rate", action=argparse.BooleanOptionalAction, default=True, help="mode async: smaller learning "
                     "rates for later updates, so that one means what it does in mode sync (arXiv:1511.05950; default: yes)")  # fmt: skip
    how.add_argument("--delay-compensation", type=_strength, metavar="LAMBDA", help="mode async: compensate gradients for "
                     "their delay, DC-ASGD (arXiv:1609.08326), such as 0.04")  # fmt: skip
    how.add_argument("--momentum-correction", action=argparse.BooleanOptionalAction, default=True, help="mode async: SGD "
                     "with a momentum of each worker's own that looks ahead (arXiv:1907.11612; default: yes)")  # fmt: skip
    how.add_argument("--host-reduction", action=argparse.BooleanOptionalAction, default=True, help="mode async: the ranks of "
                     "a host step together and send the mean of their gradients, where a wire carries them (default: yes)")  # fmt: skip


def strategy_of(options: argparse.Namespace) -> Strategy:
    """The strategy that was asked for; of mode auto, what is known before anything is. Raises ConfigError."""
    return strategy.checked(
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


def notes_on(chosen: Strategy, devices: Collection[str], hosts: int) -> tuple[str, ...]:
    """What was asked for and means nothing to ranks on these devices of so many hosts."""
    gpus = any(device.startswith("cuda") for device in devices)
    if chosen.all_reduce != "auto" and gpus:
        return (f"--all-reduce {chosen.all_reduce} is for CPU hosts: between GPUs NCCL chooses the way",)
    sends_inside = chosen.backend != "torch" or chosen.all_reduce == "flat"
    if chosen.mode == "sync" and not sends_inside and not chosen.gradients.exact and hosts == 1 and not gpus:
        return (
            f"--gradients {chosen.gradients} changes nothing on one CPU host: fewer bytes are sent between hosts only",
        )
    return ()


def _outer(options: argparse.Namespace) -> Outer:
    """`diloco`, `average`, or a learning rate and a momentum such as `0.9:0.5`. Raises ConfigError for anything else."""
    known = {"diloco": Outer(), "average": Outer(lr=1.0, momentum=0.0)}
    found = known.get(options.outer)
    if found is None:
        lr, _, momentum = options.outer.partition(":")
        try:
            found = Outer(lr=float(lr), momentum=float(momentum or "0"))
        except ValueError:
            found = None
        if found is None or not (0 < found.lr < 100 and 0 <= found.momentum < 1):
            raise ConfigError(f"--outer {options.outer}: no such way", hint="give diloco, average, or LR[:MOMENTUM]")
    if not 0 <= options.overlap_steps < 1 << 20:
        raise ConfigError(f"--overlap-steps {options.overlap_steps}: no number of steps", hint="give 0 or more")
    return msgspec.structs.replace(found, fragments=options.fragments, overlap_steps=options.overlap_steps)


def _bucket(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = units.parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--bucket {text}: {error}") from None
    if size < 1:
        raise ConfigError(f"--bucket {text}: no bytes", hint="give a size such as 25MiB")
    return size


def _staleness(text: str) -> int | None:
    return None if text == "unbounded" else number("steps (or unbounded)", least=0)(text)


def _strength(text: str) -> float:
    try:
        strength = float(text)
    except ValueError:
        strength = 0.0
    if not 0 < strength < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no strength; give a number above 0, such as 0.04")
    return strength
