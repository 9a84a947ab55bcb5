"""Catalogued workloads: a step of a public network on a GPU, and workloads scaled to another batch, GPU or number of CPUs.

Speeds come from `network_catalog`. A measured profile is more accurate.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from distrib.bandwidth_model.architectures import Checkpointing, NetworkArithmetic
from distrib.bandwidth_model.memory_estimate import MemoryChange, MemoryEstimate, changes_that_fit, network_memory
from distrib.bandwidth_model.network_catalog import (
    GPU_VARIATION,
    NetworkEntry,
    Precision,
    build_network,
    decoder_rate,
    estimate_compute_rate,
    find_network,
    gpu_spec,
    gpu_strength,
    network_catalog,
)
from distrib.bandwidth_model.parameter_blocks import gathered_elements
from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.cluster.hardware_catalog import GpuSpec, find_gpu, gpu_hint
from distrib.errors import ConfigError


class OptimizerMemory(NamedTuple):
    """Memory and traffic of an optimizer in fp32."""

    moments: int
    """Values of its state per parameter."""
    step_copies: int
    """Temporary values per parameter in a step of torch's default implementation on GPUs."""
    step_bytes: int
    """Bytes that it reads and writes per parameter and step."""


OPTIMIZERS = {"sgd": OptimizerMemory(1, 0, 20), "adam": OptimizerMemory(2, 1, 28)}


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a step of a catalogued network. None: the usual one."""

    batch: int | None = None
    tokens: int | None = None
    """Tokens of a sequence."""
    precision: Precision | None = None
    checkpointing: Checkpointing | None = None
    compiled: bool = False
    """True for torch.compile."""


def catalog_workload(
    name: str,
    gpu: str,
    batch: int | None = None,
    *,
    precision: Precision | None = None,
    options: WorkloadOptions = WorkloadOptions(),  # noqa: B008  # frozen
) -> Workload:
    """Estimate a step of a catalogued network on a GPU.

    Args:
        name: The network, in any spelling.
        gpu: The GPU.
        batch: Samples. None: the usual batch. Time grows in proportion.
        precision: None: amp on GPUs with tensor cores, else fp32.
        options: Further settings; `batch` and `precision` go before its own.

    Raises:
        ConfigError: The network or the GPU is not in the catalogue, or a setting does not apply to the network.
    """
    key = find_network(name)
    settings = msgspec.structs.replace(
        options, batch=options.batch if batch is None else batch, precision=precision or options.precision
    )
    return network_workload(key, network_catalog().networks[key], gpu, settings)


def network_workload(name: str, entry: NetworkEntry, gpu: str, options: WorkloadOptions) -> Workload:
    """Estimate a step of a network on a GPU: its operations, at the rate that the GPU reaches with a published network.

    Args:
        name: A name for the network.
        entry: The network; a decoder unless `name` is catalogued.
        gpu: The GPU.
        options: Settings of the step.

    Raises:
        ConfigError: The GPU is not in the catalogue, or a setting does not apply to the network.
    """
    spec = find_gpu(gpu)
    if spec is None:
        raise ConfigError(f"GPU {gpu!r} is not in the catalogue", hint=gpu_hint(gpu), code="gpu-unknown")
    if options.tokens is not None:
        if "tokens" not in entry.shape and entry.kind != "gpt2":
            raise ConfigError(
                f"--seq {options.tokens}: {name} has no sequences", hint="leave it out", code="option-conflict"
            )
        entry = msgspec.structs.replace(entry, shape=entry.shape | {"tokens": options.tokens})
    if options.compiled and entry.kind != "decoder":
        hint = "leave it out, or profile the compiled script: distrib-launch --profile FILE SCRIPT"
        raise ConfigError(f"--compile: no gain is published for {name}", hint=hint, code="option-conflict")
    arithmetic = build_network(entry)
    checkpointing = options.checkpointing or entry.checkpointing
    if checkpointing != "none" and not arithmetic.blocks:
        raise ConfigError(
            f"--checkpointing {checkpointing}: {name} has no repeated blocks",
            hint="leave it out",
            code="option-conflict",
        )
    samples = entry.batch if options.batch is None else options.batch
    if samples < 1:
        raise ConfigError(f"batch of {samples} samples, expected 1 or more", hint="raise --batch")
    half = "fp16" in spec.tflops and not spec.name.startswith("P100")
    chosen: Precision = options.precision or ("amp" if half else "fp32")
    is_catalogued = name in network_catalog().networks
    rate = (
        estimate_compute_rate(name, spec.name, chosen) if is_catalogued else decoder_rate(arithmetic, spec.name, chosen)
    )
    flop_per_second = rate.flop_per_second * (network_catalog().compile_gain if options.compiled else 1.0)
    optimizer = OPTIMIZERS[entry.optimizer]
    # Such passes reach three quarters of the memory bandwidth (BabelStream: 0.7 to 0.9).
    stream_bytes_per_second = spec.memory_bandwidth_bytes_per_second.value * 0.75
    # Published speeds contain little optimizer time: their batches are large.
    forward_seconds = samples * arithmetic.training_flop / 3 / flop_per_second
    backward_seconds = samples * arithmetic.step_flop(checkpointing) / flop_per_second - forward_seconds
    settings = {"precision": chosen, "checkpointing": checkpointing, "speed": rate.origin}
    settings["network"] = msgspec.json.encode(entry).decode()
    estimate = Workload(
        name=name,
        origin="catalogued",
        device=spec.name,
        batch=samples,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        optimizer_seconds=arithmetic.elements * optimizer.step_bytes / stream_bytes_per_second,
        gradients=_gradients(arithmetic, backward_seconds),
        parameter_bytes=4 * arithmetic.elements,
        variation=GPU_VARIATION,
        expected_error=rate.expected_error,
        software=settings,
        sample_tokens=entry.shape.get("tokens", 1024 if entry.kind == "gpt2" else 0),
        sample_flop=arithmetic.training_flop,
    )
    return msgspec.structs.replace(
        estimate, memory_bytes=catalog_memory(estimate, ranks=1, device_bytes=None).peak_bytes
    )


def catalog_memory(
    workload: Workload, *, ranks: int, device_bytes: int | None, shards: int = 1, gathers_all: bool = False
) -> MemoryEstimate:
    """Estimate the memory of a rank that trains a catalogued network, and changes with which it fits.

    Args:
        workload: The step, from `catalog_workload` or `network_workload`.
        ranks: Ranks of the job.
        device_bytes: Memory of the GPU; None if it is unknown.
        shards: Ranks that share parameters, gradients and optimizer state.
        gathers_all: True if all parameters are gathered at once, not block by block (ZeRO-2).
    """
    entry = msgspec.json.decode(workload.software["network"], type=NetworkEntry)
    network, optimizer = build_network(entry), OPTIMIZERS[entry.optimizer]
    half = workload.software["precision"] == "amp"
    chosen: Checkpointing = msgspec.convert(workload.software["checkpointing"], Checkpointing)

    def estimate_with(change: MemoryChange) -> MemoryEstimate:
        return network_memory(
            network, batch=change.batch, half=half or change.half, ranks=ranks, moments=optimizer.moments,
            step_copies=optimizer.step_copies, checkpointing="full" if change.checkpointing else chosen,
            shards=shards, gathered=gathered_elements(workload.gradients, all_at_once=gathers_all) if shards > 1 else 0,
        )  # fmt: skip

    estimate = msgspec.structs.replace(
        estimate_with(MemoryChange(batch=workload.batch)),
        # In a mixed cluster the memory is that of the smallest GPU.
        device=workload.device if device_bytes == int(gpu_spec(workload.device).memory_bytes.value) else "",
        device_bytes=device_bytes,
    )
    if device_bytes is None or estimate.fits:
        return estimate
    changes = changes_that_fit(
        lambda change: estimate_with(change).peak_bytes, device_bytes, batch=workload.batch, can_halve=not half,
        can_checkpoint=bool(network.blocks) and chosen != "full",
    )  # fmt: skip
    return msgspec.structs.replace(estimate, changes=changes)


def scaled_workload(workload: Workload, *, batch: int | None = None, gpu: str | None = None) -> Workload:
    """Scale a workload to another batch or GPU.

    Time grows in proportion to the batch. Between GPUs it follows the geometric mean of peak throughput and memory bandwidth.

    Args:
        workload: The workload.
        batch: The new batch; None to keep it.
        gpu: The new GPU; None to keep it.

    Raises:
        ConfigError: A GPU is not in the catalogue.
    """
    factor, device, error = 1.0, workload.device, workload.expected_error
    if gpu is not None:
        before, after = find_gpu(workload.device), find_gpu(gpu)
        if after is None:
            raise ConfigError(f"GPU {gpu!r} is not in the catalogue", hint=gpu_hint(gpu), code="gpu-unknown")
        if before is None:
            raise ConfigError(
                f"{workload.name} was measured on {workload.device}, expected a catalogued GPU",
                hint="profile the script on a GPU of the catalogue, or leave out --gpu",
                code="gpu-unknown",
            )
        if before is not after:
            factor = step_time_ratio(before, after)
            device, error = after.name, max(error, gpu_scaling_error())
    optimizer = workload.optimizer_seconds * factor
    samples = workload.batch if batch is None else batch
    if samples < 1:
        raise ConfigError(f"--batch {samples}, expected 1 or more", hint="give a larger batch")
    factor *= samples / workload.batch
    memory = workload.memory_bytes
    if memory is not None and samples != workload.batch:
        # Activations grow with the batch, the state of the parameters does not.
        state = min(memory, 4 * workload.parameter_bytes)
        memory = state + round((memory - state) * samples / workload.batch)
    return msgspec.structs.replace(
        _slower(workload, factor),
        batch=samples,
        device=device,
        optimizer_seconds=optimizer,
        loader_seconds=workload.loader_seconds * samples / workload.batch,
        loading_processor_seconds=workload.loading_processor_seconds * samples / workload.batch,
        memory_bytes=memory,
        expected_error=error,
    )


def step_time_ratio(before: GpuSpec, after: GpuSpec) -> float:
    """Estimate the step time on another GPU, by the geometric mean of peak throughput and memory bandwidth.

    Args:
        before: The GPU of the measurement.
        after: The other GPU.

    Returns:
        The time on `after` for 1 on `before`.
    """
    precision: Precision = "amp" if "fp16" in before.tflops and "fp16" in after.tflops else "fp32"
    return 1.0 if before is after else gpu_strength(before.name, precision) / gpu_strength(after.name, precision)


def gpu_scaling_error() -> float:
    """Return the expected relative error of a step scaled from one GPU to another."""
    return network_catalog().errors.scaled


def on_cpus(workload: Workload, cpus: int) -> Workload:
    """Scale a workload to fewer CPUs per rank, by Amdahl's law; the parallel part follows from their utilization.

    Args:
        workload: The workload.
        cpus: CPUs of the rank.

    Returns:
        The scaled workload; itself with as many CPUs or more, and on GPUs.
    """
    before = workload.processors
    if workload.device != "cpu" or cpus >= before:
        return workload
    busy = workload.processor_share * before
    parallel = max(0.0, busy - 1) / (before - 1)
    factor = 1 + parallel * (before / cpus - 1)
    return msgspec.structs.replace(
        _slower(workload, factor),
        optimizer_seconds=workload.optimizer_seconds * factor,
        processor_share=min(1.0, busy / factor / cpus),
        processors=cpus,
    )


def _slower(workload: Workload, factor: float) -> Workload:
    """Multiply the time of the passes and the ready times of the gradients."""
    return msgspec.structs.replace(
        workload,
        forward_seconds=workload.forward_seconds * factor,
        backward_seconds=workload.backward_seconds * factor,
        gradients=tuple(
            msgspec.structs.replace(gradient, ready_seconds=gradient.ready_seconds * factor)
            for gradient in workload.gradients
        ),
    )


def _gradients(arithmetic: NetworkArithmetic, backward_seconds: float) -> tuple[Gradient, ...]:
    """List the gradients, ready when backward has finished their layer."""
    total = arithmetic.forward_products
    done = arithmetic.tail_products
    found = []
    for parameter in reversed(arithmetic.parameters):
        done += parameter.products
        found.append(
            Gradient(
                name=parameter.name,
                elements=parameter.elements,
                size_bytes=4 * parameter.elements,
                ready_seconds=backward_seconds * done / total,
            )
        )
    return tuple(found)
