"""Workloads from a description: a transformer by its size, or a step whose duration and gradients are known."""

from __future__ import annotations

import math

import msgspec

from distrib.bandwidth_model.network_catalog import NetworkEntry
from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.bandwidth_model.workload_catalog import WorkloadOptions, network_workload
from distrib.errors import ConfigError
from distrib.units import number_text

MIN_LAYER, MAX_LAYER = 4, 40
"""Parameters of a layer, in squares of the hidden size: 4 are attention alone. Llama 3 70B has 12.7, Qwen 2.5 0.5B 18.6."""
MAX_FIELDS = {"--layers": 10_000, "--hidden": 1_000_000, "--seq": 100_000_000, "--vocabulary": 100_000_000}
"""Limits of the fields, far above any public model."""
HEAD_WIDTH = 128
"""Features of an attention head where the hidden size allows it, as in Llama, Mistral and Qwen."""
STEP_BLOCKS = 32
"""Blocks of equal size of which a measured step consists, as many as a transformer of 7B parameters has."""
BACKWARD_FRACTION = 2 / 3
"""Backward computes two gradients for each product of forward."""


class TransformerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder by its size; None: not given."""

    parameters: float | None = None
    layers: int | None = None
    hidden: int | None = None
    tokens: int | None = None
    vocabulary: int = 32_000
    """Llama 2's by default."""


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one rank: its duration and the bytes of its gradients in 32 bits."""

    seconds: float
    gradient_bytes: int
    backward_fraction: float = BACKWARD_FRACTION


def described_transformer(description: TransformerDescription, gpu: str, options: WorkloadOptions) -> Workload:
    """Estimate a step of a described decoder on a GPU. The width of the MLP follows from the number of parameters.

    Args:
        description: The size; all fields are needed.
        gpu: The GPU.
        options: Batch (1 by default), precision, checkpointing and torch.compile.

    Raises:
        ConfigError: A field is missing, fields contradict each other, or the GPU is unknown.
    """
    given = {
        "--params": description.parameters,
        "--layers": description.layers,
        "--hidden": description.hidden,
        "--seq": description.tokens,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing:
        named = ", ".join(name for name, value in given.items() if value is not None)
        raise ConfigError(
            f"{named} without {', '.join(missing)}: a transformer needs all of {', '.join(given)}",
            hint="add what is missing, such as --params 7B --layers 32 --hidden 4096 --seq 4096, or name a --workload",
            code="option-missing",
        )
    parameters, layers, width, tokens = (
        float(description.parameters or 0), int(description.layers or 0), int(description.hidden or 0), int(description.tokens or 0)
    )  # fmt: skip
    for name, most in MAX_FIELDS.items():
        if (value := given.get(name, description.vocabulary)) and value > most:
            raise ConfigError(f"{name} {value:,.0f}, expected {most:,} at most", hint="is it in another unit?")
    each = (parameters - 2 * description.vocabulary * width) / layers
    if not MIN_LAYER * width**2 < each <= MAX_LAYER * width**2:
        low, high = (
            layers * factor * width**2 + 2 * description.vocabulary * width for factor in (MIN_LAYER, MAX_LAYER)
        )
        raise ConfigError(
            f"--params {_billions(parameters)} contradicts --layers {layers} with --hidden {width}: "
            f"these have {_billions(low)} to {_billions(high)} parameters with a vocabulary of {description.vocabulary:,}",
            hint="correct one of them",
            code="option-conflict",
        )
    heads = max(1, width // HEAD_WIDTH)
    if width % heads:
        raise ConfigError(
            f"--hidden {width}: not a multiple of the {HEAD_WIDTH} features of a head", hint="give such as 4096"
        )
    mlp = max(1, round((each - 4 * width**2) / (3 * width)))
    shape = {
        "layers": layers, "width": width, "heads": heads, "kv_heads": heads, "mlp": mlp, "words": description.vocabulary, "tokens": tokens,
    }  # fmt: skip
    entry = NetworkEntry(kind="decoder", shape=shape, batch=1, optimizer="adam")
    name = f"transformer of {_billions(parameters)} parameters"
    return network_workload(name, entry, gpu, msgspec.structs.replace(options, tokens=None))


def measured_step(step: MeasuredStep, device: str, batch: int) -> Workload:
    """Build the workload of a known step. Gradients of `STEP_BLOCKS` equal blocks get ready evenly during backward.

    Args:
        step: Duration, gradients and the part of backward.
        device: The device on which it takes so long: a GPU, or `cpu`.
        batch: Samples.
    """
    backward_seconds = step.seconds * step.backward_fraction
    total = max(1, step.gradient_bytes // 4)
    ends = [total * (number + 1) // STEP_BLOCKS for number in range(STEP_BLOCKS)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return Workload(
        name="a measured step",
        origin="measured",
        device=device,
        batch=batch,
        forward_seconds=step.seconds - backward_seconds,
        backward_seconds=backward_seconds,
        optimizer_seconds=0.0,
        gradients=tuple(
            Gradient(
                name=f"blocks.{STEP_BLOCKS - 1 - number}.weight",
                elements=size,
                size_bytes=4 * size,
                ready_seconds=backward_seconds * (number + 1) / STEP_BLOCKS,
            )
            for number, size in enumerate(sizes)
            if size
        ),
        parameter_bytes=4 * total,
        software={"speed": "--step"},
    )


def _billions(parameters: float) -> str:
    power = 0 if parameters < 1e6 else min(3, int(math.log10(parameters)) // 3)
    return number_text(parameters / 1000**power) + ["", "", "M", "B"][power]
