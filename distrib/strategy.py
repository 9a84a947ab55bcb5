"""Training strategy: chosen at launch, costed by the bandwidth model, executed by the library.

The launcher passes it to every rank in `DISTRIB_STRATEGY`, as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from distrib import units
from distrib.environment import DISTRIB_STRATEGY
from distrib.errors import ConfigError
from distrib.utils.json_text import decode_json

Mode = str
"""A name in `STRATEGIES`."""
AllReduce = Literal["auto", "flat", "hierarchical"]
Shard = Literal["none", "grads", "host", "all"]
"""`all`: FSDP, ZeRO-3. `host`: HSDP, inside each host, replicated between hosts. `grads`: as `all`, but parameters are gathered once a
batch, ZeRO-2."""


STRATEGIES = {
    "sync": "distrib.training.strategies.ddp:DdpStrategy",
    "horovod": "distrib.training.strategies.horovod:HorovodStrategy",
    "local": "distrib.training.strategies.local_sgd:LocalSgdStrategy",
    "async": "distrib.training.strategies.parameter_server:ParameterServerStrategy",
}
"""Module and class of each `--mode`, and of each backend other than torch. The ranks import them when chosen."""

MODES = tuple(name for name in STRATEGIES if name != "horovod")


class Gradients(msgspec.Struct, frozen=True):
    """The format of gradients on the network, with the rank of PowerSGD's matrices or the fraction that top-k keeps."""

    format: str = "fp32"
    rank: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"gradient format {self.format!r}, expected one of {', '.join(FORMATS)}")

    @property
    def exact(self) -> bool:
        """True if gradients are not compressed."""
        return self.format == "fp32"

    def __str__(self) -> str:
        detail = self.rank if self.rank is not None else self.fraction
        return self.format if detail is None else f"{self.format}:{detail}"


@dataclass(frozen=True, kw_only=True)
class GradientFormat:
    """The properties of a gradient format that the launcher and the bandwidth model need."""

    compressor: str
    """Module and class of its `Compressor`, imported by the ranks only."""
    argument: Literal["", "rank", "fraction"] = ""
    """The field of `Gradients` that the user gives after a colon."""
    cost: Callable[[Gradients, float, float], tuple[float, float]] | None = None
    """From the settings, elements and tensors of a bucket: bytes of the compressed bucket, and how often packing reads or writes
    the gradients. None: the gradients as they are."""
    effect: str = "compressed gradients"
    """The effect on convergence, in a few words."""
    recommended: str = ""
    """The value of `--gradients` that `distrib-topo plan` tries; empty for none."""
    all_gather: bool = False
    """True if ranks gather the compressed gradients, False if they all-reduce them."""
    whole_buckets: bool = False
    """True if DDP's buckets must not be split."""
    carries_parameters: bool = False
    """True if modes local and async can send parameters in it."""
    horovod: bool = False
    """True if Horovod has it too."""


def _power_sgd_cost(gradients: Gradients, elements: float, tensors: float) -> tuple[float, float]:
    """Estimate PowerSGD: a x b becomes rank x (a + b), at least 2 rank sqrt(ab) (arXiv:1905.13727), for square tensors."""
    rank, each = gradients.rank or 1, elements / tensors
    return tensors * min(each, 2 * rank * math.sqrt(each)) * 4, 4.0 + 2 * rank


_COMPRESSION = "distrib.training.gradients.compression"
FORMATS = {
    "fp32": GradientFormat(compressor=f"{_COMPRESSION}:NoCompression", carries_parameters=True, horovod=True),
    "fp16": GradientFormat(
        compressor=f"{_COMPRESSION}:Half",
        cost=lambda _gradients, elements, _tensors: (2 * elements, 3.0),
        effect="gradients in 16 bits",
        carries_parameters=True,
        horovod=True,
    ),
    "bf16": GradientFormat(
        compressor=f"{_COMPRESSION}:Half",
        cost=lambda _gradients, elements, _tensors: (2 * elements, 3.0),
        effect="gradients in 16 bits",
        carries_parameters=True,
    ),
    "int8": GradientFormat(
        compressor="distrib.training.gradients.int8_blocks:Int8Blocks",
        cost=lambda _gradients, elements, _tensors: (elements, 4.0),
        effect="gradients in 8 bits, error fed back",
        recommended="int8",
    ),
    "powersgd": GradientFormat(
        compressor="distrib.training.gradients.power_sgd:PowerSgd",
        argument="rank",
        cost=_power_sgd_cost,
        effect="gradients of low rank, error fed back",
        recommended="powersgd:4",
        whole_buckets=True,
    ),
    "topk": GradientFormat(
        compressor="distrib.training.gradients.top_k:TopK",
        argument="fraction",
        cost=lambda gradients, elements, _: (8 * (gradients.fraction or 0.01) * elements, 8.0),  # a value and its index
        effect="only the largest gradients, error fed back",
        recommended="topk:0.01",
        all_gather=True,
    ),
}
"""The gradient formats of `--gradients`, the most exact first. A new one needs a module with its `Compressor`, and an entry here."""


def format_names(among: Callable[[GradientFormat], bool] = lambda _: True) -> str:
    """List gradient formats as the user types them.

    Args:
        among: Selects formats (default: all).
    """
    names = [name + f":{one.argument.upper()}" * bool(one.argument) for name, one in FORMATS.items() if among(one)]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def parse_gradients(text: str) -> Gradients:
    """Parse the value of `--gradients`.

    Args:
        text: A format, with its argument after a colon: `bf16`, `powersgd:4`, `topk:0.01`.

    Raises:
        ConfigError: There is no such format, its argument is missing or out of range.
    """
    name, _, argument = text.partition(":")
    try:
        kind = FORMATS[name].argument
        if not kind and name == text:
            return Gradients(name)
        if kind == "rank" and argument.isdecimal() and 0 < int(argument) < 10_000:
            return Gradients(name, rank=int(argument))
        if kind == "fraction" and 0 < float(argument) <= 1:
            return Gradients(name, fraction=float(argument))
    except (KeyError, ValueError):
        pass
    raise ConfigError(
        f"--gradients {text!r}: unknown format",
        hint=f"give {format_names()}, such as powersgd:4 or topk:0.01",
    )


class OuterOptimizer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The outer optimizer of mode local: SGD with Nesterov momentum on the ranks' mean change of parameters.

    The defaults are DiLoCo's (arXiv:2311.08105). `lr` 1 and `momentum` 0 give local SGD, the mean of the ranks' parameters.
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    """Fragments of the parameters, exchanged at different steps (Streaming DiLoCo, arXiv:2501.18512)."""
    overlap_steps: int = 0
    """Steps that overlap with an exchange."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A training strategy. The library chooses what is None."""

    mode: Mode = "sync"
    """A key of `STRATEGIES`."""
    backend: Literal["torch", "horovod"] = "torch"
    gradients: Gradients = Gradients()
    all_reduce: AllReduce = "auto"
    """`hierarchical`: inside each host first, then between hosts."""
    bucket_bytes: int | None = None
    """Bytes of gradients in one all-reduce."""
    shard: Shard = "none"
    """Ranks among which parameters, gradients and optimizer state are divided. The bandwidth model predicts it; ranks do not train so yet."""
    accumulate: int = 1
    """Batches whose mean gradient is all-reduced and used by one optimizer step."""
    balance: bool = False
    """True to give faster ranks larger batches."""
    inner_steps: int | None = None
    """Local steps between two averages of the parameters (mode local)."""
    outer: OuterOptimizer = OuterOptimizer()
    """The use of the average (mode local)."""
    servers: int | None = None
    """Number of parameter servers (mode async), on idle hosts first; None: every host serves a share."""
    staleness: int | None = None
    """The most steps that a worker is ahead of the slowest one (mode async); None: unbounded."""
    replicas: int = 0
    """Copies of each server's parameters on other servers (mode async)."""
    stale_rate: bool = True
    """True to lower the learning rate of stale updates (mode async)."""
    delay_compensation: float | None = None
    """Lambda of DC-ASGD (mode async)."""
    momentum_correction: bool = True
    """True for one Nesterov momentum per worker, False for a shared one (mode async, SGD)."""
    host_reduction: bool = True
    """True if the workers of a host push their mean gradients over the network (mode async)."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r}, expected one of {', '.join(MODES)}")

    @property
    def steps_per_round(self) -> int:
        """Local steps between two averages. The default is DiLoCo's H (arXiv:2311.08105), little worse at 1000 (figure 4)."""
        return self.inner_steps or 500

    @property
    def in_step(self) -> bool:
        """True if all ranks take equally many optimizer steps."""
        return self.mode != "async" or self.staleness == 0

    @property
    def exact(self) -> bool:
        """True if numerically equivalent to synchronous SGD over the global batch."""
        return self.mode == "sync" and self.gradients.exact and self.accumulate == 1


_MODE_OF_FIELD: dict[str, Mode] = {
    "all_reduce": "sync",
    "bucket_bytes": "sync",
    "shard": "sync",
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


def validate_strategy(strategy: Strategy, mode: str | None = None) -> Strategy:
    """Check that the settings of a strategy are compatible.

    Args:
        strategy: The strategy.
        mode: The mode as typed, for errors, where it differs.

    Raises:
        ConfigError: A setting does not apply in the mode, or contradicts another.
    """
    default = Strategy()
    for field, required_mode in _MODE_OF_FIELD.items():
        value = getattr(strategy, field)
        if value != getattr(default, field) and strategy.mode != required_mode:
            raise ConfigError(
                f"{_option(field, value)} does not apply in mode {mode or strategy.mode}",
                hint=f"give --mode {required_mode}, or leave it out",
                code="option-conflict",
            )
    if strategy.mode == "async":
        _check_async(strategy)
    if strategy.mode == "local" and not FORMATS[strategy.gradients.format].carries_parameters:
        raise ConfigError(
            f"mode local does not support {strategy.gradients}: it averages parameters",
            hint=f"use {format_names(lambda one: one.carries_parameters)}",
            code="option-conflict",
        )
    if strategy.balance and strategy.mode != "sync":
        raise ConfigError(
            f"--balance does not apply in mode {strategy.mode}", hint="leave it out", code="option-conflict"
        )
    overlap_steps = strategy.outer.overlap_steps
    if overlap_steps >= strategy.steps_per_round:
        raise ConfigError(
            f"--overlap-steps {overlap_steps}, expected less than the {strategy.steps_per_round} steps of a round",
            hint="overlap fewer steps, or give more --inner-steps",
        )
    if strategy.shard != "none":
        _check_sharding(strategy)
    if strategy.backend == "horovod":
        if strategy.mode != "sync":
            raise ConfigError(
                f"--backend horovod cannot train in mode {strategy.mode}",
                hint="use --mode sync",
                code="option-conflict",
            )
        for field in ("all_reduce", "bucket_bytes"):
            if (value := getattr(strategy, field)) != getattr(default, field):
                raise ConfigError(
                    f"{_option(field, value)} does not apply with --backend horovod",
                    hint="leave it out",
                    code="option-conflict",
                )
        if not FORMATS[strategy.gradients.format].horovod:
            raise ConfigError(
                f"--backend horovod does not support {strategy.gradients}",
                hint=f"use --gradients {format_names(lambda one: one.horovod)}",
                code="option-conflict",
            )
    return strategy


def strategy_options(strategy: Strategy) -> tuple[str, ...]:
    """Return the options of `distrib-launch` that select a strategy.

    Args:
        strategy: The strategy.

    Returns:
        Words of a command line, empty for the default strategy.
    """
    plain = _all_options(Strategy())
    return tuple(word for option, words in _all_options(strategy).items() if words != plain[option] for word in words)


def _all_options(strategy: Strategy) -> dict[str, tuple[str, ...]]:
    """Map every option to its words, defaults included."""
    bucket, outer = strategy.bucket_bytes, strategy.outer
    valued = {
        "mode": strategy.mode,
        "backend": strategy.backend,
        "gradients": strategy.gradients,
        "all-reduce": strategy.all_reduce,
        "bucket": None if bucket is None else units.format_size(bucket).replace(" ", ""),
        "shard": strategy.shard,
        "accumulate": strategy.accumulate,
        "inner-steps": strategy.inner_steps,
        "outer": f"{outer.lr}:{outer.momentum}",
        "fragments": outer.fragments,
        "overlap-steps": outer.overlap_steps,
        "servers": strategy.servers,
        "staleness": strategy.staleness,
        "replicas": strategy.replicas,
        "delay-compensation": strategy.delay_compensation,
    }
    flags = {
        "balance": strategy.balance,
        "stale-rate": strategy.stale_rate,
        "momentum-correction": strategy.momentum_correction,
        "host-reduction": strategy.host_reduction,
    }
    found = {option: () if value is None else (f"--{option}", str(value)) for option, value in valued.items()}
    return found | {option: (f"--{option}" if on else f"--no-{option}",) for option, on in flags.items()}


def _option(field: str, value: object) -> str:
    """Return the option that sets a field."""
    return strategy_options(msgspec.structs.replace(Strategy(), **{field: value}))[0]


def _check_sharding(strategy: Strategy) -> None:
    if strategy.gradients.format not in ("fp32", "fp16", "bf16"):
        raise ConfigError(
            f"--shard {strategy.shard} does not support --gradients {strategy.gradients}",
            hint="use fp32, fp16 or bf16",
            code="option-conflict",
        )
    for field in ("all_reduce", "bucket_bytes", "backend", "balance"):
        if (value := getattr(strategy, field)) != getattr(Strategy(), field):
            raise ConfigError(
                f"{_option(field, value)} does not apply with --shard {strategy.shard}",
                hint="leave it out",
                code="option-conflict",
            )


def _check_async(strategy: Strategy) -> None:
    if not FORMATS[strategy.gradients.format].carries_parameters:
        raise ConfigError(
            f"--mode async does not support {strategy.gradients}",
            hint=f"use --gradients {format_names(lambda one: one.carries_parameters)}",
            code="option-conflict",
        )
    if strategy.replicas and strategy.servers == 1:
        raise ConfigError(
            "--replicas 1 with --servers 1: a replica needs another server",
            hint="use --servers 2 or more",
            code="option-conflict",
        )
    if strategy.staleness == 0 and strategy.delay_compensation:
        raise ConfigError(
            "--delay-compensation does not apply with --staleness 0: updates are synchronous",
            hint="leave --delay-compensation out",
            code="option-conflict",
        )


def strategy_from_environment(environ: Mapping[str, str]) -> Strategy:
    """Read the strategy that the launcher chose.

    Args:
        environ: The environment variables.

    Returns:
        The strategy; the default without a launcher.

    Raises:
        ConfigError: The variable is invalid.
    """
    text = environ.get(DISTRIB_STRATEGY, "")
    if not text:
        return Strategy()
    try:
        return validate_strategy(decode_json(text, Strategy))
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{DISTRIB_STRATEGY}: {error}",
            hint="it is set by distrib-launch; do not set it by hand",
            code="environment-invalid",
        ) from None


def encode_strategy(strategy: Strategy) -> str:
    """Encode a strategy for `DISTRIB_STRATEGY`.

    Args:
        strategy: The strategy.

    Returns:
        JSON.
    """
    return msgspec.json.encode(strategy).decode()
