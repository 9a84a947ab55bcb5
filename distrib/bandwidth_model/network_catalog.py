"""Network catalogue: public networks, and the operations per second at which GPUs train them, from published speeds.

The figures and their sources are in `workload_catalog.yaml`.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from distrib import units
from distrib.bandwidth_model import architectures, transformers
from distrib.bandwidth_model.architectures import Checkpointing, NetworkArithmetic
from distrib.bandwidth_model.step_timeline import slowest_of
from distrib.cluster.hardware_catalog import CatalogSource, GpuSpec, hardware_catalog, read_catalog_file
from distrib.errors import ConfigError

Precision = Literal["amp", "tf32", "fp32"]
PATH = Path(__file__).with_name("workload_catalog.yaml")


GPU_VARIATION = 0.015
"""Coefficient of variation between equal GPUs: the whiskers of ML workloads are 8 % apart on average, which is 5.4 standard
deviations (Sinha et al., SC 2022, arXiv:2208.11035). A profile measures it.
"""


class _Other(msgspec.Struct, forbid_unknown_fields=True):
    amp: float
    memory_bandwidth: str
    source: str


class NetworkEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network: the function that builds its arithmetic, with its arguments, and the usual training settings."""

    kind: Literal["resnet", "efficientnet", "vgg", "vit", "bert", "gpt2", "decoder", "t5"]
    shape: dict[str, Any]
    batch: int
    optimizer: Literal["sgd", "adam"]
    like: str | None = None
    checkpointing: Checkpointing = "none"


class PublishedSpeed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A published training speed of a network on one GPU."""

    network: str
    gpu: str
    precision: Precision
    batch: int
    """0 if the source does not state it."""
    samples_per_second: float
    source: str
    checkpointing: Checkpointing = "none"
    ranks: int = 1
    """GPUs of the run; the speed is that of one of them, which waits for the slowest."""


class CatalogErrors(msgspec.Struct, forbid_unknown_fields=True):
    """Expected relative errors of step times; their meaning and origin are in the catalogue's file."""

    published: float
    scaled: float
    borrowed: float
    similar: float


class NetworkCatalog(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the catalogue's file."""

    errors: CatalogErrors
    sources: dict[str, CatalogSource]
    others: dict[str, _Other]
    networks: dict[str, NetworkEntry]
    aliases: dict[str, str]
    compile_gain: float
    speeds: tuple[PublishedSpeed, ...]


class ComputeRate(msgspec.Struct, frozen=True, kw_only=True):
    """Operations per second of a GPU training a network, with expected error and origin."""

    flop_per_second: float
    expected_error: float
    origin: str


def network_names() -> tuple[str, ...]:
    """List the networks of the catalogue."""
    return tuple(network_catalog().networks)


def network_arithmetic(name: str) -> NetworkArithmetic:
    """Return the arithmetic of a catalogued network.

    Args:
        name: Its name, in any spelling.

    Raises:
        ConfigError: The name is unknown.
    """
    return _network(find_network(name))


def published_speeds() -> tuple[PublishedSpeed, ...]:
    """List the published training speeds."""
    return network_catalog().speeds


@functools.cache
def network_catalog() -> NetworkCatalog:
    """Read the catalogue."""
    return read_catalog_file(PATH, NetworkCatalog)


def find_network(name: str) -> str:
    """Find the catalogue's name of a network.

    Args:
        name: The name, in any spelling.

    Raises:
        ConfigError: The name is unknown.
    """

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    known = {plain(each): each for each in network_names()}
    known |= {plain(alias): name for alias, name in network_catalog().aliases.items()}
    if plain(name) in known:
        return known[plain(name)]
    near = [known[each] for each in difflib.get_close_matches(plain(name), list(known), n=1, cutoff=0.5)]
    family = re.match(r"[a-z]*", plain(name))[0]  # type: ignore[index]  # it matches any text
    alike = near + [each for each in network_names() if family and plain(each).startswith(family)]
    names = ", ".join(dict.fromkeys(alike))
    raise ConfigError(
        f"--workload {name}: no such file, and not in the catalogue",
        hint=f"did you mean {names}?" if alike else f"it has {', '.join(network_names())}",
        code="workload-unknown",
    )


def _network(key: str) -> NetworkArithmetic:
    return build_network(network_catalog().networks[key])


def build_network(entry: NetworkEntry) -> NetworkArithmetic:
    """Build the arithmetic of a network.

    Args:
        entry: Its kind and shape.
    """
    return _build_cached(entry.kind, json.dumps(entry.shape))


@functools.lru_cache(maxsize=256)
def _build_cached(kind: str, shape: str) -> NetworkArithmetic:
    build: Any = getattr(transformers if kind in ("decoder", "t5") else architectures, kind)
    fields = {field: tuple(value) if isinstance(value, list) else value for field, value in json.loads(shape).items()}
    built: NetworkArithmetic = build(**fields)
    return built


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
    file = network_catalog()
    if file.networks[key].kind == "decoder" and all(speed.network != key for speed in file.speeds):
        return decoder_rate(_network(key), gpu, precision)
    looked, known = key, _speeds_of(key, precision, excluded)
    while not known and (onwards := file.networks[looked].like):
        looked, known = onwards, _speeds_of(onwards, precision, excluded)
    borrowed = looked != key or not known
    # Not published in this precision: the fraction of the peak is taken from another.
    known = known or [s for s in file.speeds if s.network == looked and s is not excluded]
    return _rate_from(known, gpu, precision, borrowed=borrowed)


def decoder_rate(network: NetworkArithmetic, gpu: str, precision: Precision) -> ComputeRate:
    """Estimate the rate at which a GPU trains a decoder, from the published ones next in size, linear in logarithms.

    Args:
        network: The decoder.
        gpu: Name of the GPU.
        precision: `fp32` or `amp`.
    """
    file = network_catalog()
    names = {speed.network for speed in file.speeds if file.networks[speed.network].kind == "decoder"}
    size = {name: _network(name).elements for name in names}
    below = max((name for name in size if size[name] <= network.elements), key=size.__getitem__, default=None)
    above = min((name for name in size if size[name] > network.elements), key=size.__getitem__, default=None)
    rates = {name: estimate_compute_rate(name, gpu, precision) for name in (below, above) if name}
    flop = next(iter(rates.values())).flop_per_second
    if below and above:
        part = math.log(network.elements / size[below]) / math.log(size[above] / size[below])
        flop = rates[below].flop_per_second ** (1 - part) * rates[above].flop_per_second ** part
    return ComputeRate(
        flop_per_second=flop,
        expected_error=max(file.errors.similar, *(rate.expected_error for rate in rates.values())),
        origin=f"scaled from {' and '.join(rates)}, {next(iter(rates.values())).origin}",
    )


def _speeds_of(key: str, precision: Precision, excluded: PublishedSpeed | None) -> list[PublishedSpeed]:
    speeds = network_catalog().speeds
    return [s for s in speeds if s.network == key and s.precision == precision and s is not excluded]


def _rate_from(known: list[PublishedSpeed], gpu: str, precision: Precision, *, borrowed: bool) -> ComputeRate:
    """Take the rate of the same GPU, or the one between the nearest in strength; `borrowed` from another network or precision."""
    errors, titles = network_catalog().errors, network_catalog().sources
    for speed in known:
        if speed.gpu == gpu and not borrowed:
            return ComputeRate(
                flop_per_second=_flop_per_second(speed), expected_error=errors.published,
                origin=f"published: {titles[speed.source].title}",
            )  # fmt: skip
    strength = gpu_strength(gpu, precision)
    below = max((s for s in known if _speed_strength(s) <= strength), key=_speed_strength, default=None)
    above = min((s for s in known if _speed_strength(s) > strength), key=_speed_strength, default=None)
    nearest = (
        above if below is None or (above and _speed_strength(above) * _speed_strength(below) < strength**2) else below
    )
    assert nearest is not None
    flop = _flop_per_second(nearest) * strength / _speed_strength(nearest)
    if below and above:  # between two published GPUs: linear in logarithms
        part = math.log(strength / _speed_strength(below)) / math.log(_speed_strength(above) / _speed_strength(below))
        flop = _flop_per_second(below) ** (1 - part) * _flop_per_second(above) ** part
    return ComputeRate(
        flop_per_second=flop,
        expected_error=errors.borrowed if borrowed else errors.scaled,
        origin=f"scaled from {nearest.network} on {nearest.gpu}: {titles[nearest.source].title}",
    )


def _flop_per_second(speed: PublishedSpeed) -> float:
    """Compute the operations per second of a GPU alone, with those that checkpointing repeats."""
    alone = speed.samples_per_second * slowest_of(speed.ranks, GPU_VARIATION)
    return alone * _network(speed.network).step_flop(speed.checkpointing)


def _speed_strength(speed: PublishedSpeed) -> float:
    return gpu_strength(speed.gpu, speed.precision)


def gpu_strength(gpu: str, precision: Precision) -> float:
    """Compute the geometric mean of peak operations and memory bandwidth.

    Args:
        gpu: Name of the GPU.
        precision: `fp32`, `tf32` or `amp`.
    """
    other = network_catalog().others.get(gpu)
    bandwidth = (
        units.parse_rate(other.memory_bandwidth) if other else gpu_spec(gpu).memory_bandwidth_bytes_per_second.value
    )
    return math.sqrt(peak_flop_per_second(gpu, precision) * bandwidth)


def peak_flop_per_second(gpu: str, precision: Precision) -> float:
    """Return the operations per second of the data sheet.

    Args:
        gpu: Name of the GPU.
        precision: `fp32` or `amp`.
    """
    other = network_catalog().others.get(gpu)
    if other:
        return other.amp * 1e12
    tflops = gpu_spec(gpu).tflops
    half = "bf16" if "bf16" in tflops else "fp16"  # Gaudi's fp16 is slower
    kind: Any = half if precision == "amp" else precision
    return (tflops[kind] if kind in tflops else tflops["fp32"]).value * 1e12


@functools.cache
def gpu_spec(name: str) -> GpuSpec:
    """Return a GPU of the hardware catalogue.

    Args:
        name: Its name there.
    """
    return next(gpu for gpu in hardware_catalog().gpus if gpu.name == name)
