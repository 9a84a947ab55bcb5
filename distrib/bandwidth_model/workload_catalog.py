"""Workload catalogue: published training speeds, scaled to any catalogued GPU.

The figures and their sources are in `workload_catalog.yaml`. A measured profile is more accurate.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from distrib import units
from distrib.bandwidth_model import architectures
from distrib.bandwidth_model.architectures import NetworkArithmetic
from distrib.bandwidth_model.memory_estimate import MemoryChange, MemoryEstimate, changes_that_fit, network_memory
from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.cluster.hardware_catalog import (
    CatalogSource,
    GpuSpec,
    find_gpu,
    gpu_hint,
    hardware_catalog,
    read_catalog_file,
)
from distrib.errors import ConfigError

Precision = Literal["amp", "tf32", "fp32"]
PATH = Path(__file__).with_name("workload_catalog.yaml")


class OptimizerMemory(NamedTuple):
    """Memory and traffic of an optimizer in fp32."""

    moments: int
    """Values of its state per parameter."""
    step_copies: int
    """Temporary values per parameter in a step of torch's default implementation on GPUs."""
    step_bytes: int
    """Bytes that it reads and writes per parameter and step."""


GPU_VARIATION = 0.015
"""Coefficient of variation between equal GPUs: the whiskers of ML workloads are 8 % apart on average, which is 5.4 standard
deviations (Sinha et al., SC 2022, arXiv:2208.11035). A profile measures it.
"""

OPTIMIZERS = {"sgd": OptimizerMemory(1, 0, 20), "adam": OptimizerMemory(2, 1, 28)}


class _Other(msgspec.Struct, forbid_unknown_fields=True):
    amp: float
    memory_bandwidth: str
    source: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["resnet", "vgg", "vit", "bert", "gpt2"]
    shape: dict[str, Any]
    batch: int
    optimizer: Literal["sgd", "adam"]
    like: str | None = None


class PublishedSpeed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A published training speed of a network on one GPU."""

    network: str
    gpu: str
    precision: Precision
    batch: int
    samples_per_second: float
    source: str


class _Errors(msgspec.Struct, forbid_unknown_fields=True):
    published: float
    scaled: float
    borrowed: float


class _File(msgspec.Struct, forbid_unknown_fields=True):
    errors: _Errors
    sources: dict[str, CatalogSource]
    others: dict[str, _Other]
    networks: dict[str, _Entry]
    speeds: tuple[PublishedSpeed, ...]


class ComputeRate(msgspec.Struct, frozen=True, kw_only=True):
    """Operations per second of a GPU training a network, with expected error and origin."""

    flop_per_second: float
    expected_error: float
    origin: str


def network_names() -> tuple[str, ...]:
    """List the networks of the catalogue."""
    return tuple(_file().networks)


def network_arithmetic(name: str) -> NetworkArithmetic:
    """Return the arithmetic of a catalogued network.

    Args:
        name: Its name, in any spelling.

    Raises:
        ConfigError: The name is unknown.
    """
    return _network(_named(name))


def catalog_workload(name: str, gpu: str, batch: int | None = None, *, precision: Precision | None = None) -> Workload:
    """Estimate a step of a catalogued network on a GPU.

    Args:
        name: The network, in any spelling.
        gpu: The GPU.
        batch: Samples. None: the usual batch. Time grows in proportion.
        precision: None: amp on GPUs with tensor cores, else fp32.

    Raises:
        ConfigError: The network or the GPU is not in the catalogue.
    """
    key = _named(name)
    spec = find_gpu(gpu)
    if spec is None:
        raise ConfigError(f"GPU {gpu!r} is not in the catalogue", hint=gpu_hint(gpu), code="gpu-unknown")
    entry = _file().networks[key]
    samples = entry.batch if batch is None else batch
    if samples < 1:
        raise ConfigError(f"batch of {samples} samples, expected 1 or more", hint="raise --batch")
    chosen: Precision = precision or ("amp" if "fp16" in spec.tflops and not spec.name.startswith("P100") else "fp32")
    arithmetic = _network(key)
    rate_of_gpu = estimate_compute_rate(key, spec.name, chosen)
    optimizer = OPTIMIZERS[entry.optimizer]
    # Such passes reach three quarters of the memory bandwidth (BabelStream: 0.7 to 0.9).
    stream_bytes_per_second = spec.memory_bandwidth_bytes_per_second.value * 0.75
    optimizer_seconds = arithmetic.elements * optimizer.step_bytes / stream_bytes_per_second
    # Published speeds contain little optimizer time: their batches are large.
    passes_seconds = samples * arithmetic.training_flop / rate_of_gpu.flop_per_second
    backward_seconds = passes_seconds * 2 / 3
    return Workload(
        name=key,
        origin="catalogued",
        device=spec.name,
        batch=samples,
        forward_seconds=passes_seconds / 3,
        backward_seconds=backward_seconds,
        optimizer_seconds=optimizer_seconds,
        gradients=_gradients(arithmetic, backward_seconds),
        parameter_bytes=4 * arithmetic.elements,
        memory_bytes=_memory(key, batch=samples, half=chosen == "amp").peak_bytes,
        variation=GPU_VARIATION,
        expected_error=rate_of_gpu.expected_error,
        software={"precision": chosen, "speed": rate_of_gpu.origin},
    )


def catalog_memory(workload: Workload, *, ranks: int, device_bytes: int | None) -> MemoryEstimate:
    """Estimate the memory of a rank that trains a catalogued network, and changes with which it fits.

    Args:
        workload: The step, from `catalog_workload`.
        ranks: Ranks of the job.
        device_bytes: Memory of the GPU; None if it is unknown.
    """
    half = workload.software["precision"] == "amp"

    def peak(change: MemoryChange) -> int:
        return _memory(
            workload.name, batch=change.batch, half=half or change.half, ranks=ranks, checkpointing=change.checkpointing
        ).peak_bytes

    estimate = msgspec.structs.replace(
        _memory(workload.name, batch=workload.batch, half=half, ranks=ranks),
        # In a mixed cluster the memory is that of the smallest GPU.
        device=workload.device if device_bytes == int(_spec(workload.device).memory_bytes.value) else "",
        device_bytes=device_bytes,
    )
    if device_bytes is None or estimate.fits:
        return estimate
    has_blocks = bool(_network(workload.name).blocks)
    changes = changes_that_fit(peak, device_bytes, batch=workload.batch, can_halve=not half, can_checkpoint=has_blocks)
    return msgspec.structs.replace(estimate, changes=changes)


def published_speeds() -> tuple[PublishedSpeed, ...]:
    """List the published training speeds."""
    return _file().speeds


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
    return 1.0 if before is after else _strength(before.name, precision) / _strength(after.name, precision)


def gpu_scaling_error() -> float:
    """Return the expected relative error of a step scaled from one GPU to another."""
    return _file().errors.scaled


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


@functools.cache
def _file() -> _File:
    return read_catalog_file(PATH, _File)


def _named(name: str) -> str:
    """Find the catalogue's name of a network, in any spelling."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    known = {plain(each): each for each in network_names()}
    known |= {"gpt2small": "GPT-2", "vitb16": "ViT-B", "vitbase": "ViT-B"}
    if plain(name) in known:
        return known[plain(name)]
    near = difflib.get_close_matches(plain(name), list(known), n=1, cutoff=0.5)
    raise ConfigError(
        f"--workload {name}: no such file, and not in the catalogue",
        hint=(f"did you mean {known[near[0]]}? It" if near else "it") + f" has {', '.join(network_names())}",
        code="workload-unknown",
    )


@functools.cache
def _network(key: str) -> NetworkArithmetic:
    entry = _file().networks[key]
    build: Any = getattr(architectures, entry.kind)
    built: NetworkArithmetic = build(
        **{field: tuple(v) if isinstance(v, list) else v for field, v in entry.shape.items()}
    )
    return built


def _memory(key: str, *, batch: int, half: bool, ranks: int = 1, checkpointing: bool = False) -> MemoryEstimate:
    optimizer = OPTIMIZERS[_file().networks[key].optimizer]
    return network_memory(
        _network(key), batch=batch, half=half, ranks=ranks, checkpointing=checkpointing,
        moments=optimizer.moments, step_copies=optimizer.step_copies,
    )  # fmt: skip


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


def estimate_compute_rate(
    key: str, gpu: str, precision: Precision, excluded: PublishedSpeed | None = None
) -> ComputeRate:
    """Estimate the rate at which a GPU trains a network.

    Args:
        key: Name of the network in the catalogue.
        gpu: Name of the GPU.
        precision: `fp32` or `amp`.
        excluded: Published speed to leave out, for validation.
    """
    file = _file()
    titles = file.sources
    looked = key
    borrowed = False
    while True:
        known = [s for s in file.speeds if s.network == looked and s.precision == precision and s is not excluded]
        if known:
            break
        onwards = file.networks[looked].like
        if onwards is None:
            # Not published in this precision: the fraction of the peak is taken from another.
            known = [s for s in file.speeds if s.network == looked and s is not excluded]
            borrowed = True
            break
        looked, borrowed = onwards, True
    for speed in known:
        if speed.gpu == gpu and not borrowed:
            flop = speed.samples_per_second * _network(looked).training_flop
            return ComputeRate(
                flop_per_second=flop, expected_error=file.errors.published,
                origin=f"published: {titles[speed.source].title}",
            )  # fmt: skip
    strength = _strength(gpu, precision)
    below = max((s for s in known if _speed_strength(s) <= strength), key=_speed_strength, default=None)
    above = min((s for s in known if _speed_strength(s) > strength), key=_speed_strength, default=None)
    nearest = (
        above if below is None or (above and _speed_strength(above) * _speed_strength(below) < strength**2) else below
    )
    assert nearest is not None
    rate = nearest.samples_per_second * strength / _speed_strength(nearest)
    if below and above:  # between two published GPUs: linear in logarithms
        part = math.log(strength / _speed_strength(below)) / math.log(_speed_strength(above) / _speed_strength(below))
        rate = below.samples_per_second ** (1 - part) * above.samples_per_second**part
    flop = rate * _network(looked).training_flop
    return ComputeRate(
        flop_per_second=flop,
        expected_error=file.errors.borrowed if borrowed else file.errors.scaled,
        origin=f"scaled from {nearest.network} on {nearest.gpu}: {titles[nearest.source].title}",
    )


def _speed_strength(speed: PublishedSpeed) -> float:
    return _strength(speed.gpu, speed.precision)


def _strength(gpu: str, precision: Precision) -> float:
    """Compute the geometric mean of peak operations and memory bandwidth."""
    other = _file().others.get(gpu)
    bandwidth = (
        units.parse_rate(other.memory_bandwidth) if other else _spec(gpu).memory_bandwidth_bytes_per_second.value
    )
    return math.sqrt(peak_flop_per_second(gpu, precision) * bandwidth)


def peak_flop_per_second(gpu: str, precision: Precision) -> float:
    """Return the operations per second of the data sheet.

    Args:
        gpu: Name of the GPU.
        precision: `fp32` or `amp`.
    """
    other = _file().others.get(gpu)
    if other:
        return other.amp * 1e12
    tflops = _spec(gpu).tflops
    kind: Any = "fp16" if precision == "amp" else precision
    return (tflops[kind] if kind in tflops else tflops["fp32"]).value * 1e12


@functools.cache
def _spec(name: str) -> GpuSpec:
    return next(gpu for gpu in hardware_catalog().gpus if gpu.name == name)
