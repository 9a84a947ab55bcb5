"""Nodes of a topology file: GPUs, intra-node links, NUMA nodes and NICs of one kind of host."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from distrib import units
from distrib.cluster.hardware_catalog import GpuSpec, LinkKind, find_gpu, network_family
from distrib.cluster.host_expression import parse_expression, split_list
from distrib.cluster.hosts import MAX_HOSTS, SourcePlace
from distrib.cluster.link_spec import LinkSpec, parse_bus_link, parse_network_kind, parse_network_link
from distrib.errors import FieldError, HostfileError

MAX_GPUS = 4096


Indices = int | str | tuple[int | str, ...]
"""`0`, `0-3`, `0,2` or a list of them."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of one host, all of one kind; `memory` (`80GB`) for kinds outside the catalogue."""

    count: int
    kind: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MAX_GPUS:
            raise FieldError("count", f"count of GPUs is {self.count}, expected 0 to {MAX_GPUS}")
        if self.kind is not None and not self.kind.strip():
            raise FieldError("kind", "is empty; write such as A100-SXM4-80GB, or leave it out")
        validate_field("memory", units.parse_size, self.memory)

    @property
    def spec(self) -> GpuSpec | None:
        """The catalogue entry of the kind; None if unknown."""
        return find_gpu(self.kind) if self.kind else None

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one GPU; None if unknown."""
        if self.memory is not None:
            return units.parse_size(self.memory)
        return int(self.spec.memory_bytes.value) if self.spec else None


class IntraNodeLinks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The links inside a host.

    `nvlink`: generation and number of each GPU's links (`NVLink3 x12`). They lead to a switch (`nvswitch`), or to other GPUs: `pairs` has
    the number for each pair (`0-1: 2`), without it they are divided evenly. `pcie`: the link of each GPU (`PCIe4 x16`).
    `peer_to_peer`: False if GPUs reach each other through host memory only; None: as the catalogue has it.
    """

    nvlink: str | None = None
    nvswitch: bool = False
    pairs: dict[str, int] = {}
    pcie: str | None = None
    peer_to_peer: bool | None = None

    def __post_init__(self) -> None:
        for field, text in (("nvlink", self.nvlink), ("pcie", self.pcie)):
            validate_field(field, functools.partial(_parse_bus_of_kind, field), text)
        if self.nvlink is None and (self.nvswitch or self.pairs):
            raise FieldError("nvswitch" if self.nvswitch else "pairs", "say `nvlink` too, such as NVLink3 x12")
        if self.nvswitch and self.pairs:
            raise FieldError("pairs", "an NVSwitch connects all GPUs; leave `pairs` out")
        for pair, links in self.pairs.items():
            ends = _pair(pair)
            if ends is None:
                raise FieldError(f"pairs.{pair}", f"{pair!r} is not a pair of GPUs; write such as 0-3: 2")
            if not 1 <= links <= 36:
                raise FieldError(f"pairs.{pair}", f"{links} links, expected 1 to 36; leave out pairs without links")
        if len({_pair(pair) for pair in self.pairs}) < len(self.pairs):
            raise FieldError("pairs", "a pair of GPUs is named twice; name it once, with all its links")

    @functools.cached_property
    def nvlink_spec(self) -> LinkSpec | None:
        """All NVLinks of one GPU."""
        return parse_bus_link(self.nvlink) if self.nvlink else None

    @functools.cached_property
    def pcie_spec(self) -> LinkSpec | None:
        """The PCIe link of one GPU."""
        return parse_bus_link(self.pcie) if self.pcie else None

    def links_of_pair(self, first: int, second: int, count: int) -> int:
        """Count the NVLinks between two GPUs.

        Args:
            first: Index of a GPU.
            second: Index of another GPU.
            count: GPUs of the host.
        """
        link = self.nvlink_spec
        if link is None or first == second:
            return 0
        if self.nvswitch:
            return link.lanes
        if self.pairs:
            ends = (min(first, second), max(first, second))
            return next((links for pair, links in self.pairs.items() if _pair(pair) == ends), 0)
        return link.lanes // (count - 1)


class Numa(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node: GPUs by index, CPUs (`0-31`), memory. Nodes are numbered in the order of the file."""

    gpus: Indices | None = None
    cpus: Indices | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        validate_field("gpus", indices, self.gpus)
        validate_field("cpus", indices, self.cpus)
        validate_field("memory", units.parse_size, self.memory)


class Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A NIC port, or a range of equal ones (`mlx5_[0-3]`).

    `gpudirect`: True for GPUDirect RDMA, None if not described. `gpus`: the nearest GPUs. `pcie`: the slot.
    """

    name: str
    rate: str
    kind: str | None = None
    gpudirect: bool | None = None
    gpus: Indices | None = None
    numa: int | None = None
    pcie: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}(\[[0-9,-]{1,40}\])?[A-Za-z0-9_.:-]{0,64}", self.name):
            raise FieldError(
                "name", f"{self.name[:60]!r} is not a valid name of a NIC; write such as eth0 or mlx5_[0-3]"
            )
        validate_field("name", _nic_names, self.name)
        validate_field("kind", parse_network_kind, self.kind)
        validate_field("rate", lambda text: parse_network_link(text, self.given_kind), self.rate)
        validate_field("gpus", indices, self.gpus)
        validate_field("pcie", functools.partial(_parse_bus_of_kind, "pcie"), self.pcie)
        if self.gpudirect and self.link.kind == "ethernet":
            raise FieldError("gpudirect", "GPUDirect RDMA needs InfiniBand or RoCE; if this NIC does RoCE, say so")

    @functools.cached_property
    def slot(self) -> LinkSpec | None:
        """The PCIe link of the slot; None if not described."""
        return parse_bus_link(self.pcie) if self.pcie else None

    @property
    def given_kind(self) -> LinkKind | None:
        """The described kind of network; None if it follows from the rate."""
        return parse_network_kind(self.kind) if self.kind else None

    @functools.cached_property
    def link(self) -> LinkSpec:
        """The link of one port."""
        return parse_network_link(self.rate, self.given_kind)

    @functools.cached_property
    def latency_seconds(self) -> float:
        """The latency of a small message: that of the network by the device's name, such as EFA, else of the link."""
        family = network_family(self.names, self.link.rate_bytes_per_second)
        return family.latency_seconds.value if family else self.link.latency_seconds

    @property
    def names(self) -> tuple[str, ...]:
        """The names, ranges expanded."""
        return _nic_names(self.name)

    @property
    def near_gpus(self) -> tuple[int, ...]:
        """The indices of the nearest GPUs."""
        return indices(self.gpus) if self.gpus is not None else ()


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Hosts of one kind; `hosts` is a name, a range such as `gpu[01-04]`, or several with commas.

    `memory`, `cores` (physical) and `sockets` are those of one host.
    """

    hosts: str
    gpus: Gpus | None = None
    links: IntraNodeLinks | None = None
    sockets: int | None = None
    cores: int | None = None
    memory: str | None = None
    numa: tuple[Numa, ...] = ()
    nics: tuple[Nic, ...] = ()

    def __post_init__(self) -> None:
        validate_field("hosts", expand_hosts, self.hosts)
        validate_field("memory", units.parse_size, self.memory)
        for field in ("sockets", "cores"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= 100_000:
                raise FieldError(field, f"expected a whole number from 1 to 100000, not {value}")
        self._check_nics()
        self._check_gpu_indices()
        self._check_pairs()

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names, ranges expanded."""
        return expand_hosts(self.hosts)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one host; None if not described."""
        return units.parse_size(self.memory) if self.memory else None

    @property
    def nvlink_spec(self) -> LinkSpec | None:
        """All NVLinks of one GPU: described, else the catalogue's if the file describes no links."""
        if self.links:
            return self.links.nvlink_spec
        spec = self.gpus.spec if self.gpus else None
        return parse_bus_link(spec.nvlink) if spec and spec.nvlink else None

    @property
    def pcie_spec(self) -> LinkSpec | None:
        """The PCIe link of one GPU: described, else the catalogue's."""
        return (self.links.pcie_spec if self.links else None) or self.catalog_pcie

    @property
    def catalog_pcie(self) -> LinkSpec | None:
        """The PCIe link that the catalogue has for the GPUs."""
        spec = self.gpus.spec if self.gpus else None
        return parse_bus_link(spec.pcie) if spec and spec.pcie else None

    @functools.cached_property
    def each_nic(self) -> tuple[Nic, ...]:
        """The NICs, ranges expanded."""
        return tuple(msgspec.structs.replace(nic, name=name) for nic in self.nics for name in nic.names)

    def _check_nics(self) -> None:
        seen: dict[str, int] = {}
        for number, nic in enumerate(self.nics):
            if nic.numa is not None and not 0 <= nic.numa < (len(self.numa) or 1024):
                raise FieldError(f"nics[{number}].numa", f"there is no NUMA node {nic.numa} here")
            for name in nic.names:
                if name in seen:
                    raise FieldError(
                        f"nics[{number}].name", f"the NIC {name} is named twice (nics[{seen[name]}] too); name it once"
                    )
                seen[name] = number

    def _check_gpu_indices(self) -> None:
        count = self.gpus.count if self.gpus else None
        owner: dict[int, int] = {}
        for number, numa in enumerate(self.numa):
            for gpu in indices(numa.gpus) if numa.gpus is not None else ():
                if gpu in owner:
                    raise FieldError(f"numa[{number}].gpus", f"GPU {gpu} is in NUMA node {owner[gpu]} already")
                owner[gpu] = number
        named = [(f"numa[{n}].gpus", indices(numa.gpus)) for n, numa in enumerate(self.numa) if numa.gpus is not None]
        named += [(f"nics[{number}].gpus", nic.near_gpus) for number, nic in enumerate(self.nics)]
        if self.links:
            named += [(f"links.pairs.{pair}", _pair(pair) or ()) for pair in self.links.pairs]
        for field, gpus in named:
            if gpus and (count is None or max(gpus) >= count):
                there = f"there are {count}, counted from 0" if count is not None else "say `gpus: {count: N}`"
                raise FieldError(field, f"there is no GPU {max(gpus)} here; {there}")

    def _check_pairs(self) -> None:
        if not self.links or not self.links.nvlink_spec or not self.gpus or self.links.nvswitch:
            return
        link, count = self.links.nvlink_spec, self.gpus.count
        if not self.links.pairs and count > 2 and link.lanes % (count - 1):
            raise FieldError(
                "links.nvlink",
                f"{link.lanes} links of a GPU cannot be divided evenly by {count - 1} other GPUs; say `nvswitch: yes`, "
                "or the links of each pair in `pairs`",
            )
        for gpu in range(count) if self.links.pairs else ():
            used = sum(self.links.links_of_pair(gpu, other, count) for other in range(count))
            if used > link.lanes:
                raise FieldError(
                    "links.pairs", f"GPU {gpu} has {used} links here, but {self.links.nvlink} says {link.lanes}"
                )


@functools.lru_cache(maxsize=256)
def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand `gpu[01-16],login1` to host names.

    Args:
        text: Host expressions without user and slots.

    Raises:
        ValueError: A name is invalid or repeated.
    """
    found: dict[str, str] = {}
    try:
        for item, place in split_list(text, SourcePlace("")):
            expression = parse_expression(item, place)
            if expression.user is not None or expression.slots is not None:
                raise ValueError(f"{item[:60]!r} has a user or slots; they belong into the hostfile, not here")
            for name in expression.names:
                if name.lower() in found:
                    raise ValueError(f"{name} is named twice; name it once")
                found[name.lower()] = name
                if len(found) > MAX_HOSTS:
                    raise ValueError(f"more than {MAX_HOSTS:,} hosts; look for a range with too many digits")
    except HostfileError as error:
        # The message repeats the text, its column is not needed.
        raise ValueError(re.sub(r"^[:0-9]*: ", "", str(error))) from None
    return tuple(found.values())


def name_hosts(names: Iterable[str]) -> str:
    """Format hosts for a sentence: `n1, n2`, from four on `n[1-100]`; long lists end with the number of further hosts.

    Args:
        names: Host names.
    """
    names = list(dict.fromkeys(names))
    return ", ".join(names) if len(names) <= 3 else shown_hosts(names, most=3)


def fold_hosts(names: Sequence[str]) -> str:
    """Fold host names to ranges: `gpu[01-16]`.

    Args:
        names: Host names.

    Returns:
        The folded text; names with commas if they cannot be folded.
    """
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # slow to import, and many commands fold no hosts

    if len(names) > 1:
        with contextlib.suppress(NodeSetException, ValueError):
            folded = str(NodeSet.fromlist(list(names)))
            if sorted(expand_hosts(folded)) == sorted(names):
                return folded
    return ",".join(names)


def shown_hosts(names: Sequence[str], most: int = 8) -> str:
    """Fold host names; shorten a result of more than 100 characters to the first ones.

    Args:
        names: Host names.
        most: Names in a shortened result.
    """
    folded = fold_hosts(names)
    if len(folded) <= 100 or len(names) <= most:
        return folded
    return ", ".join(names[:most]) + f" and {len(names) - most} more"


def indices(value: Indices) -> tuple[int, ...]:
    """Parse indices: `0-3`, `0,2` or a list.

    Args:
        value: The field of a topology file.

    Raises:
        ValueError: The text is invalid, or a number is repeated.
    """
    parts = [str(part) for part in value] if isinstance(value, tuple) else str(value).split(",")
    found: list[int] = []
    for part in parts:
        ends = [end.strip() for end in part.split("-")]
        is_valid = len(ends) <= 2 and all(end.isascii() and end.isdecimal() and len(end) <= 4 for end in ends)
        if not is_valid or int(ends[0]) > int(ends[-1]):
            raise ValueError(f"{part[:40]!r} is not a number or range of numbers; write such as 0-3 or [0, 2]")
        found += range(int(ends[0]), int(ends[-1]) + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"{', '.join(parts)[:40]!r} names a number twice")
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _nic_names(text: str) -> tuple[str, ...]:
    if "[" not in text:
        return (text,)
    before, _, rest = text.partition("[")
    inside, _, after = rest.partition("]")
    return tuple(f"{before}{name[1:]}{after}" for name in expand_hosts(f"x[{inside}]"))


def _pair(text: str) -> tuple[int, int] | None:
    """Parse `0-3` to the two GPUs, the lower one first; None if it is not a pair."""
    try:
        ends = sorted(indices(text.replace("-", ",")))
    except ValueError:
        return None
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _parse_bus_of_kind(field: str, text: str) -> LinkSpec:
    link = parse_bus_link(text)
    if link.kind != field:
        raise ValueError(
            f"{text!r} is a link of another kind; write such as {'PCIe4 x16' if field == 'pcie' else 'NVLink3 x12'}"
        )
    return link


def validate_field(field: str, parse: Callable[[Any], object], value: Any) -> None:
    """Parse a field when the file is read, so that an error names the path of the field.

    Args:
        field: The name of the field.
        parse: Raises ValueError for an invalid value.
        value: The value, None if the field is missing.

    Raises:
        FieldError: The value is invalid.
    """
    if value is None:
        return
    try:
        parse(value)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, str(error)) from None
