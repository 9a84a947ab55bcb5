"""How ranks train together: chosen at launch, costed by the bandwidth model, carried out by the library.

The launcher hands it to every rank in `DISTRIB_STRATEGY`, as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from distrib.environment import DISTRIB_STRATEGY
from distrib.errors import ConfigError

Mode = Literal["sync", "async", "local"]
AllReduce = Literal["auto", "flat", "hierarchical"]
Format = Literal["fp32", "fp16", "bf16", "int8", "powersgd", "topk"]


class Gradients(msgspec.Struct, frozen=True):
    """What a gradient is turned into before it crosses the wire.

    `rank` is that of PowerSGD's matrices; `fraction` what top-k keeps, between 0 and 1.
    """

    format: Format = "fp32"
    rank: int | None = None
    fraction: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the sum is that of the gradients themselves."""
        return self.format == "fp32"

    def __str__(self) -> str:
        detail = self.rank if self.rank is not None else self.fraction
        return self.format if detail is None else f"{self.format}:{detail}"


def parse_gradients(text: str) -> Gradients:
    """`fp32`, `fp16`, `bf16`, `int8`, `powersgd:4` or `topk:0.01`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(fp32|fp16|bf16|int8)|(powersgd):([1-9][0-9]{0,3})|(topk):([0-9.eE-]+)", text)
    try:
        if match and match[1]:
            return Gradients(match[1])  # type: ignore[arg-type]  # the expression admits no others
        if match and match[2]:
            return Gradients("powersgd", rank=int(match[3]))
        if match and 0 < float(match[5]) <= 1:
            return Gradients("topk", fraction=float(match[5]))
    except ValueError:
        pass
    raise ConfigError(
        f"gradients as {text!r}: no such format",
        hint="give fp32, fp16, bf16, int8, powersgd:RANK such as powersgd:4, or topk:FRACTION such as topk:0.01",
    )


INNER_STEPS = 500
"""H of DiLoCo (arXiv:2311.08105), where nobody says; its loss is hardly worse at 1000, and better at 50 to 250 (figure 4)."""


class Outer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The outer optimizer of mode local: SGD with Nesterov momentum on the mean way that the ranks have gone.

    The defaults are DiLoCo's (arXiv:2311.08105); `lr` 1 and `momentum` 0 are local SGD, the mean of the ranks' parameters.
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    """Parts of the parameters that are exchanged at different steps (Streaming DiLoCo, arXiv:2501.18512)."""
    overlap_steps: int = 0
    """Steps that ranks go on for while an exchange is on its way."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A way of training together. What is None is the library's to choose."""

    mode: Mode = "sync"
    backend: Literal["torch", "horovod"] = "torch"
    gradients: Gradients = Gradients()
    all_reduce: AllReduce = "auto"
    """`hierarchical`: inside each host first, then between hosts."""
    bucket_bytes: int | None = None
    """How much of the gradients travels in one all-reduce."""
    accumulate: int = 1
    """Batches of which the gradients are summed before they are averaged over the ranks."""
    balance: bool = False
    """Whether faster ranks get larger batches."""
    inner_steps: int | None = None
    """Steps that a rank takes alone before parameters are averaged (mode local)."""
    outer: Outer = Outer()
    """What becomes of the average (mode local)."""
    servers: int | None = None
    """Dedicated parameter servers (mode async); None: a share of them on every host."""
    staleness: int | None = None
    """Steps that a worker may be ahead of the slowest one (mode async); None: any number."""
    replicas: int = 0
    """Copies of each server's parameters on other servers (mode async)."""
    stale_rate: bool = True
    """Whether an update that others came before has a smaller learning rate, so that one means what it does in mode sync (mode async)."""
    delay_compensation: float | None = None
    """DC-ASGD's strength of compensation, lambda (mode async)."""
    momentum_correction: bool = True
    """Whether each worker's updates have a momentum of their own that looks ahead, not one that all share (mode async, SGD)."""
    host_reduction: bool = True
    """Whether the workers of a host average their gradients and push them as one, where they would cross a wire (mode async)."""

    @property
    def in_step(self) -> bool:
        """Whether a step of the optimizer is one of all ranks together."""
        return self.mode != "async" or self.staleness == 0

    @property
    def exact(self) -> bool:
        """Whether the arithmetic is that of synchronous SGD over the global batch."""
        return self.mode == "sync" and self.gradients.exact and self.accumulate == 1


_ONLY_IN: dict[str, Mode] = {
    "all_reduce": "sync",
    "bucket_bytes": "sync",
    "inner_steps": "local",
    "outer": "local",
    **dict.fromkeys(
        (
            "servers",
            "staleness",
            "replicas",
            "stale_rate",
            "delay_compensation",
            "momentum_correction",
            "host_reduction",
        ),
        "async",
    ),
}


def checked(strategy: Strategy, mode: str | None = None) -> Strategy:
    """`strategy` itself. Raises ConfigError where its parts do not go together. `mode` is what was asked for, where that is
    another word than the strategy's."""
    default = Strategy()
    for field, only_in in _ONLY_IN.items():
        value = getattr(strategy, field)
        if value != getattr(default, field) and strategy.mode != only_in:
            raise ConfigError(
                f"{_option(field, value)} means nothing in mode {mode or strategy.mode}",
                hint=f"give --mode {only_in}, or leave it out",
            )
    if strategy.mode == "async":
        _check_async(strategy)
    if strategy.mode == "local" and strategy.gradients.format not in ("fp32", "fp16", "bf16"):
        raise ConfigError(
            f"mode local sends no {strategy.gradients}: parameters travel, not gradients", hint="use fp32, bf16 or fp16"
        )
    if strategy.balance and strategy.mode != "sync":
        raise ConfigError(
            f"--balance means nothing in mode {strategy.mode}: no rank waits in each step", hint="leave it out"
        )
    outer, inner_steps = strategy.outer, strategy.inner_steps or INNER_STEPS
    if outer.overlap_steps >= inner_steps:
        raise ConfigError(
            f"an exchange that {outer.overlap_steps} steps overlap is not over after the {inner_steps} of a round",
            hint="overlap fewer steps, or give more --inner-steps",
        )
    if strategy.backend == "horovod":
        if strategy.mode != "sync":
            raise ConfigError(f"--backend horovod cannot train in mode {strategy.mode}", hint="use --mode sync")
        for field in ("all_reduce", "bucket_bytes"):
            if (value := getattr(strategy, field)) != getattr(default, field):
                raise ConfigError(
                    f"{_option(field, value)} means nothing with --backend horovod: Horovod has its own way",
                    hint="leave it out",
                )
        if strategy.gradients.format not in ("fp32", "fp16"):
            raise ConfigError(f"--backend horovod sends no {strategy.gradients}", hint="use --gradients fp32 or fp16")
    return strategy


def asked(strategy: Strategy) -> tuple[str, ...]:
    """The options that make `strategy` another than the default, as they were typed, such as `--mode local`."""
    values = ((field, getattr(strategy, field)) for field in strategy.__struct_fields__)
    default = Strategy()
    return tuple(
        _option(field, value) + (f" {value}" if field in ("mode", "backend", "gradients", "accumulate") else "")
        for field, value in values
        if value != getattr(default, field)
    )


def _option(field: str, value: object) -> str:
    """What was typed to give `field` a value that is not the default."""
    if isinstance(value, Outer):
        parts = [part for part in ("fragments", "overlap_steps") if getattr(value, part) != getattr(Outer(), part)]
        field = "outer" if (value.lr, value.momentum) != (Outer().lr, Outer().momentum) else parts[0]
    field = field.removesuffix("_bytes")
    return ("--no-" if value is False else "--") + field.replace("_", "-")


def _check_async(strategy: Strategy) -> None:
    if strategy.gradients.format not in ("fp32", "fp16", "bf16"):
        raise ConfigError(f"--mode async sends no {strategy.gradients}", hint="use --gradients fp32, bf16 or fp16")
    if strategy.replicas and strategy.servers == 1:
        raise ConfigError("--replicas 1 with --servers 1: there is no other server", hint="use --servers 2 or more")
    if strategy.staleness == 0 and strategy.delay_compensation:
        raise ConfigError(
            "--staleness 0 has nothing to correct: its updates are synchronous", hint="leave --delay-compensation out"
        )


def from_environment(environ: Mapping[str, str]) -> Strategy:
    """What the launcher chose; the default where there is no launcher. Raises ConfigError for what is no strategy."""
    text = environ.get(DISTRIB_STRATEGY, "")
    if not text:
        return Strategy()
    try:
        return checked(msgspec.json.decode(text, type=Strategy))
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{DISTRIB_STRATEGY}: {error}", hint="it is set by distrib-launch; do not set it by hand"
        ) from None


def to_environment(strategy: Strategy) -> str:
    """What `from_environment` reads."""
    return msgspec.json.encode(strategy).decode()
