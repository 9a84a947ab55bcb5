"""Hardware catalogue: GPUs and links by their data sheets, each figure with its source.

The figures and their conventions are in `hardware_catalog.yaml`. Measurements take precedence.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from distrib import units
from distrib.errors import ConfigError

LinkKind = Literal["infiniband", "roce", "ethernet", "nvlink", "pcie"]
CatalogKind = TypeVar("CatalogKind")
DataType = Literal["fp32", "tf32", "fp16", "bf16"]

PATH = Path(__file__).with_name("hardware_catalog.yaml")
_NOT_A_MODEL = re.compile(
    r"\d+gi?b|sxm\d?|hbm\d|geforce|pcie|nvl|dgxs|tesla|rtx|quadro|instinct|ada|generation|server|edition"
)
"""Words of GPU names that do not identify a model."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure in bytes, bytes per second, seconds, TFLOPS or a fraction, and its source."""

    value: float
    source: str


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of GPU. `tflops`: dense, with tensor cores if present, by data type."""

    name: str
    names: tuple[str, ...]
    """Names of NVML and other common names."""
    tflops: dict[DataType, Figure]
    memory_bytes: Figure
    memory_bandwidth_bytes_per_second: Figure
    nvlink: str | None
    """Such as `NVLink3 x12`."""
    pcie: str | None
    """Such as `PCIe4 x16`."""
    peer_bandwidth_bytes_per_second: Figure | None = None
    """Bandwidth that collectives reach over links other than NVLink to all GPUs of the host."""
    compute_capability: Figure | None = None
    """Generation of an NVIDIA GPU, such as 9.0."""
    gpus_per_host: int = 8
    """GPUs of a host that is not described; of a rack whose GPUs NVLink joins, all of them."""
    peer_to_peer: bool = True
    """False if its driver copies between GPUs through host memory only."""


class CatalogLink(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of link, one direction: one lane (PCIe), one link (NVLink) or one port (networks)."""

    name: str
    kind: LinkKind
    lanes: int
    """The default number of lanes."""
    rate_bytes_per_second: Figure
    usable: Figure
    """Fraction of the rate that large transfers reach."""
    latency_seconds: Figure


class NetworkFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A network with a latency of its own, known by the names of its devices."""

    name: str
    devices: str
    """Pattern of the beginning of the names."""
    min_rate_bytes_per_second: float
    """The lowest rate of a port of this generation."""
    latency_seconds: Figure


class NamedNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A network known by name, such as `EFA v2`: the NICs of a host and the rate of each."""

    name: str
    nics: int
    device: str
    """The beginning of the names of the NICs."""
    rate: str
    kind: str
    hosts: str
    """The hosts with such a network."""
    source: str


class HardwareCatalog(msgspec.Struct, frozen=True, kw_only=True):
    """The catalogue."""

    gpus: tuple[GpuSpec, ...]
    links: tuple[CatalogLink, ...]
    networks: tuple[NetworkFamily, ...]
    named_networks: tuple[NamedNetwork, ...]


class CatalogSource(msgspec.Struct, forbid_unknown_fields=True):
    """A source of figures; `verified` is False for figures from memory."""

    title: str
    verified: bool = True


class _GpuEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    tflops: dict[DataType, tuple[float, str]]
    memory: tuple[str, str]
    memory_bandwidth: tuple[str, str]
    names: tuple[str, ...] = ()
    achievable: tuple[float, str] | None = None
    nvlink: tuple[str, str] | None = None
    pcie: tuple[str, str] | None = None
    peer_bandwidth: tuple[str, str] | None = None
    compute_capability: tuple[float, str] | None = None
    gpus_per_host: tuple[int, str] | None = None
    peer_to_peer: tuple[bool, str] | None = None
    note: str = ""


class _LinkEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    kind: LinkKind
    rate: tuple[str, str]
    usable: tuple[float, str]
    latency: tuple[str, str]
    lanes: int = 1


class _NetworkEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    devices: str
    latency: tuple[str, str]
    min_rate: str = "0Gb/s"


class _CatalogFile(msgspec.Struct, forbid_unknown_fields=True):
    sources: dict[str, CatalogSource]
    gpus: tuple[_GpuEntry, ...]
    links: tuple[_LinkEntry, ...]
    networks: tuple[_NetworkEntry, ...]
    named_networks: tuple[NamedNetwork, ...] = ()


def read_catalog_file(path: Path, kind: type[CatalogKind]) -> CatalogKind:
    """Read a catalogue of this package.

    Args:
        path: A YAML file.
        kind: The struct of its content.
    """
    import yaml  # start-up time: most commands need no catalogue

    # libyaml is ten times as fast, where PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return msgspec.convert(yaml.load(path.read_text(encoding="utf-8"), loader), kind)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


@contextlib.contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Raise ConfigError for a catalogue that is not as installed."""
    try:
        yield
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", hint="install distrib again", code="file-unreadable") from None


@functools.cache
@_report_damage(PATH)
def hardware_catalog() -> HardwareCatalog:
    """Load the catalogue."""
    file = read_catalog_file(PATH, _CatalogFile)

    def figure(value: float, source: str) -> Figure:
        return Figure(value=value, source=file.sources[source].title)

    return HardwareCatalog(
        gpus=tuple(
            GpuSpec(
                name=gpu.name,
                names=gpu.names,
                tflops={kind: figure(*value) for kind, value in gpu.tflops.items()},
                memory_bytes=figure(units.parse_size(gpu.memory[0]), gpu.memory[1]),
                memory_bandwidth_bytes_per_second=figure(
                    units.parse_rate(gpu.memory_bandwidth[0]), gpu.memory_bandwidth[1]
                ),
                nvlink=gpu.nvlink[0] if gpu.nvlink else None,
                pcie=gpu.pcie[0] if gpu.pcie else None,
                peer_bandwidth_bytes_per_second=(
                    figure(units.parse_rate(gpu.peer_bandwidth[0]), gpu.peer_bandwidth[1])
                    if gpu.peer_bandwidth
                    else None
                ),
                compute_capability=figure(*gpu.compute_capability) if gpu.compute_capability else None,
                gpus_per_host=gpu.gpus_per_host[0] if gpu.gpus_per_host else 8,
                peer_to_peer=gpu.peer_to_peer is None or gpu.peer_to_peer[0],
            )
            for gpu in file.gpus
        ),
        links=tuple(
            CatalogLink(
                name=link.name,
                kind=link.kind,
                lanes=link.lanes,
                rate_bytes_per_second=figure(units.parse_rate(link.rate[0]), link.rate[1]),
                usable=figure(*link.usable),
                latency_seconds=figure(units.parse_duration(link.latency[0]), link.latency[1]),
            )
            for link in file.links
        ),
        networks=tuple(
            NetworkFamily(
                name=network.name,
                devices=network.devices,
                min_rate_bytes_per_second=units.parse_rate(network.min_rate),
                latency_seconds=figure(units.parse_duration(network.latency[0]), network.latency[1]),
            )
            for network in file.networks
        ),
        named_networks=tuple(
            msgspec.structs.replace(network, source=file.sources[network.source].title)
            for network in file.named_networks
        ),
    )


def network_family(devices: Sequence[str], rate_bytes_per_second: float = 0.0) -> NetworkFamily | None:
    """Find the network of NICs by their names, such as EFA of `efa_0`.

    Args:
        devices: Names of NICs of one network.
        rate_bytes_per_second: The rate of a port, which tells generations of a network apart.

    Returns:
        The newest generation with such a rate; None if the names say nothing.
    """
    named = [
        network
        for network in hardware_catalog().networks
        if devices and all(re.match(network.devices, name) for name in devices)
    ]
    new = [network for network in named if network.min_rate_bytes_per_second <= rate_bytes_per_second]
    found = new or named[:1]
    return found[-1] if found else None


def find_named_network(text: str) -> NamedNetwork | None:
    """Find a network by name, in any spelling: `EFA v2`, `efav2`, `spectrum-x`.

    Args:
        text: The name.

    Returns:
        The network; None if unknown.
    """

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    return next((network for network in hardware_catalog().named_networks if plain(network.name) == plain(text)), None)


@functools.lru_cache(maxsize=256)
def find_gpu(kind: str) -> GpuSpec | None:
    """Find a GPU by a name of NVML or of a user: `A100`, `NVIDIA A100-SXM4-80GB`, `a100 40gb`.

    A part of a name suffices, unless it is memory or shape alone (`80GB`, `PCIe`); the first match counts. A longer name is another GPU:
    `A100X` and MIG slices are not an A100.

    Args:
        kind: The name.

    Returns:
        The entry; None if unknown.
    """
    wanted = _words(kind)
    if all(_NOT_A_MODEL.fullmatch(word) for word in wanted):
        return None
    known = [(gpu, [_words(name) for name in (gpu.name, *gpu.names)]) for gpu in hardware_catalog().gpus]
    for gpu, names in known:
        if any("".join(words) == "".join(wanted) for words in names):
            return gpu
    for gpu, names in known:
        if any(set(wanted) <= set(words) for words in names):
            return gpu
    return None


def gpu_hint(kind: str) -> str:
    """Write the advice for an unknown GPU.

    Args:
        kind: The unknown name.
    """
    names = {"".join(_words(name)): gpu.name for gpu in hardware_catalog().gpus for name in (gpu.name, *gpu.names)}
    found = difflib.get_close_matches("".join(_words(kind)), list(names), n=3, cutoff=0.6)
    near = dict.fromkeys(names[name] for name in found)
    return (
        f"did you mean {' or '.join(near)}?" if near else "distrib/cluster/hardware_catalog.yaml lists the known ones"
    )


@functools.cache
def catalog_links() -> dict[str, CatalogLink]:
    """Map lower-case names to links."""
    return {link.name.lower(): link for link in hardware_catalog().links}


def _words(kind: str) -> list[str]:
    """Split a name into lower-case words without those of vendors; `80 GB` is one word."""
    words = re.findall(r"[a-z0-9.]+", re.sub(r"(\d)\s+(gi?b)\b", r"\1\2", kind.lower()))
    return [word for word in words if word not in ("nvidia", "amd", "radeon")]
