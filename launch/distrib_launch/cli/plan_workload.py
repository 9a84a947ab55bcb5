"""Workload and strategy of `distrib-topo plan`, from its options."""

from __future__ import annotations

import argparse

import msgspec

from distrib import units
from distrib.bandwidth_model.described_workload import (
    BACKWARD_FRACTION,
    MeasuredStep,
    TransformerDescription,
    described_transformer,
    measured_step,
)
from distrib.bandwidth_model.network_catalog import Precision
from distrib.bandwidth_model.planner import select_workload
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import WorkloadOptions
from distrib.errors import ConfigError
from distrib.strategy import Strategy, validate_strategy
from distrib_launch.arguments import training_options

PRECISIONS: dict[str, Precision] = {"bf16": "amp", "fp16": "amp", "tf32": "tf32", "fp32": "fp32"}
"""Values of `--precision` with the precision of the catalogue: speeds with 16 bits do not depend on the format."""


def read_strategy(options: argparse.Namespace) -> tuple[int | None, Strategy]:
    """Read the strategy, and the size of the gradients where `--gradients` has one.

    Args:
        options: The parsed options.

    Returns:
        Bytes of the gradients, or None; and the strategy.

    Raises:
        ConfigError: An option is not valid, or contradicts another.
    """
    words = [word.strip() for word in options.gradients.split(",")]
    sizes = [word for word in words if word[:1].isdigit()]
    formats = [word for word in words if word not in sizes] or ["fp32"]
    if len(sizes) > 1 or len(formats) > 1:
        raise ConfigError(f"--gradients {options.gradients}: expected one size and one format", hint="write 498MB,bf16")
    options.gradients = formats[0]
    size = None
    if sizes:
        try:
            size = units.parse_size(sizes[0])
        except ValueError as error:
            raise ConfigError(f"--gradients {sizes[0]}: {error}") from None
        if size < 4:
            raise ConfigError(f"--gradients {sizes[0]}: no gradients", hint="give a size such as 498MB")
        if options.step is None:
            raise ConfigError(
                f"--gradients {sizes[0]} without --step: other workloads have gradients of their own",
                hint="add --step, such as 97ms, or leave the size out",
                code="option-conflict",
            )
    strategy = training_options.strategy_of(options)
    if options.shard not in ("none", "auto"):
        strategy = validate_strategy(msgspec.structs.replace(strategy, shard=options.shard))
    if options.shard == "auto":
        validate_strategy(msgspec.structs.replace(strategy, shard="all"))
    return size, strategy


def build_workload(
    options: argparse.Namespace, gpu: str | None, cluster_gpu: str | None, gradient_bytes: int | None
) -> Workload:
    """Build the workload: of the catalogue, from a profile, of a described transformer or of a measured step.

    Args:
        options: The parsed options.
        gpu: The GPU of `--gpu`.
        cluster_gpu: The GPU of the hosts.
        gradient_bytes: The size in `--gradients`.

    Raises:
        ConfigError: No workload is given, or more than one; options are missing or do not apply.
    """
    described = {
        f"--{name}": getattr(options, name)
        for name in ("params", "layers", "hidden", "vocabulary")
        if getattr(options, name) is not None
    }
    kinds = [name for name, value in (("--workload", options.workload), ("--step", options.step)) if value is not None]
    kinds += list(described)[:1]
    if len(kinds) > 1:
        raise ConfigError(
            f"{' and '.join(kinds)} contradict each other: each describes a workload",
            hint="give one of --workload, --params or --step",
            code="option-conflict",
        )
    if not kinds and options.seq is None:
        raise ConfigError(
            "no workload is given",
            hint="add --workload NAME|FILE, or --params with --layers, --hidden and --seq, or --step with --gradients",
            code="option-missing",
        )
    settings = WorkloadOptions(
        batch=options.batch,
        tokens=options.seq,
        precision=PRECISIONS[options.precision] if options.precision else None,
        checkpointing=options.checkpointing,
        compiled=options.compile,
    )
    if options.backward is not None and options.step is None:
        raise ConfigError("--backward without --step", hint="add --step, or leave it out", code="option-conflict")
    if options.workload is not None:
        rest = msgspec.structs.replace(settings, batch=None)
        return select_workload(
            options.workload, gpu, cluster_gpu, options.batch, hint="add --gpu, such as A100", options=rest
        )
    if options.step is not None:
        return _measured(options, gpu or cluster_gpu or "cpu", gradient_bytes, settings)
    if gpu is None and cluster_gpu is None:
        raise ConfigError("the GPU is unknown", hint="add --gpu, such as A100", code="gpu-unknown")
    description = TransformerDescription(
        parameters=options.params, layers=options.layers, hidden=options.hidden, tokens=options.seq,
        **({"vocabulary": options.vocabulary} if options.vocabulary else {}),
    )  # fmt: skip
    return described_transformer(description, str(gpu or cluster_gpu), settings)


def _measured(
    options: argparse.Namespace, device: str, gradient_bytes: int | None, settings: WorkloadOptions
) -> Workload:
    if settings != WorkloadOptions(batch=options.batch):
        raise ConfigError(
            f"--step {units.duration_text(options.step)}: --seq, --precision, --checkpointing and --compile do not apply",
            hint="give the duration of a step with these settings",
            code="option-conflict",
        )
    if gradient_bytes is None:
        raise ConfigError(
            f"--step {units.duration_text(options.step)} without --gradients: the size of the gradients is unknown",
            hint="add their size, such as --gradients 498MB",
            code="option-missing",
        )
    step = MeasuredStep(
        seconds=options.step,
        gradient_bytes=gradient_bytes,
        backward_fraction=BACKWARD_FRACTION if options.backward is None else options.backward,
    )
    return measured_step(step, device, options.batch or 1)
