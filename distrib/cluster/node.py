"""What one kind of host is made of: GPUs, the links inside, NUMA nodes and NICs, as a topology file describes them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from distrib import units
from distrib.cluster.hardware_catalog import GpuSpec, LinkKind, find_gpu
from distrib.cluster.host_expression import parse_expression, split_list
from distrib.cluster.hosts import MAX_HOSTS, Notes, Place
from distrib.cluster.link_spec import Link, parse_bus, parse_kind, parse_network
from distrib.cluster.yaml_loader import FieldError
from distrib.errors import HostfileError

MAX_GPUS = 4096

_INDEX = re.compile(r"([0-9]{1,4})(?: *- *([0-9]{1,4}))?")
_NIC = re.compile(r"[A-Za-z0-9_.:-]{1,64}(\[[0-9,-]{1,40}\])?[A-Za-z0-9_.:-]{0,64}")

Indices = int | str | tuple[int | str, ...]
"""`0`, `0-3`, `0,2` or a list of these."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The GPUs of one host, all of one kind; `memory` (`80GB`) only where the catalogue does not know the kind."""

    count: int
    kind: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MAX_GPUS:
            raise FieldError("count", f"a count of GPUs is zero or more, at most {MAX_GPUS}, not {self.count}")
        if self.kind is not None and not self.kind.strip():
            raise FieldError("kind", "this is empty; write such as A100-SXM4-80GB, or leave it out")
        check_field("memory", units.parse_size, self.memory)

    @property
    def spec(self) -> GpuSpec | None:
        """What the catalogue knows of the kind."""
        return find_gpu(self.kind) if self.kind else None

    @property
    def memory_bytes(self) -> int | None:
        """Of one GPU."""
        if self.memory is not None:
            return units.parse_size(self.memory)
        return int(self.spec.memory_bytes.value) if self.spec else None


class InsideLinks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The links inside a host.

    `nvlink`: generation and links of each GPU (`NVLink3 x12`). They lead to a switch (`nvswitch`), or to the other
    GPUs: `pairs` says how many to each (`0-1: 2`), else they are shared out evenly. `pcie`: of each GPU (`PCIe4 x16`).
    """

    nvlink: str | None = None
    nvswitch: bool = False
    pairs: dict[str, int] = {}
    pcie: str | None = None

    def __post_init__(self) -> None:
        for field, text in (("nvlink", self.nvlink), ("pcie", self.pcie)):
            check_field(field, functools.partial(_bus, field), text)
        if self.nvlink is None and (self.nvswitch or self.pairs):
            raise FieldError("nvswitch" if self.nvswitch else "pairs", "say `nvlink` too, such as NVLink3 x12")
        if self.nvswitch and self.pairs:
            raise FieldError("pairs", "with an NVSwitch every GPU reaches every other; leave `pairs` out")
        for pair, links in self.pairs.items():
            ends = _pair(pair)
            if ends is None:
                raise FieldError(f"pairs.{pair}", f"{pair!r} is no pair of GPUs; write such as 0-3: 2")
            if not 1 <= links <= 36:
                raise FieldError(
                    f"pairs.{pair}", f"a pair has from 1 to 36 links, not {links}; leave out pairs without"
                )
        if len({_pair(pair) for pair in self.pairs}) < len(self.pairs):
            raise FieldError("pairs", "a pair of GPUs is named twice; name it once, with all its links")

    def links_of_pair(self, first: int, second: int, count: int) -> int:
        """How many NVLinks join two of `count` GPUs."""
        link = parse_bus(self.nvlink) if self.nvlink else None
        if link is None or first == second:
            return 0
        if self.nvswitch:
            return link.lanes
        if self.pairs:
            ends = (min(first, second), max(first, second))
            return next((links for pair, links in self.pairs.items() if _pair(pair) == ends), 0)
        return link.lanes // (count - 1)


class Numa(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NUMA node: its GPUs by index, its CPUs (`0-31`), its memory. They are numbered in the order of the file."""

    gpus: Indices | None = None
    cpus: Indices | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        check_field("gpus", indices, self.gpus)
        check_field("cpus", indices, self.cpus)
        check_field("memory", units.parse_size, self.memory)


class Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A port of a network card, or a range of equal ones (`mlx5_[0-3]`).

    `gpudirect`: whether it reads GPU memory itself (GPUDirect RDMA); None where nobody said. `gpus`: the nearest ones.
    """

    name: str
    rate: str
    kind: str | None = None
    gpudirect: bool | None = None
    gpus: Indices | None = None
    numa: int | None = None
    pcie: str | None = None

    def __post_init__(self) -> None:
        if not _NIC.fullmatch(self.name):
            raise FieldError("name", f"{self.name[:60]!r} is no name of a NIC; write such as eth0 or mlx5_[0-3]")
        check_field("name", _nic_names, self.name)
        check_field("kind", parse_kind, self.kind)
        check_field("rate", lambda text: parse_network(text, self.given_kind), self.rate)
        check_field("gpus", indices, self.gpus)
        check_field("pcie", functools.partial(_bus, "pcie"), self.pcie)
        if self.gpudirect and self.link.kind == "ethernet":
            raise FieldError("gpudirect", "GPUDirect RDMA needs InfiniBand or RoCE; if this NIC does RoCE, say so")

    @property
    def given_kind(self) -> LinkKind | None:
        return parse_kind(self.kind) if self.kind else None

    @property
    def link(self) -> Link:
        return parse_network(self.rate, self.given_kind)

    @property
    def names(self) -> tuple[str, ...]:
        return _nic_names(self.name)

    @property
    def near_gpus(self) -> tuple[int, ...]:
        return indices(self.gpus) if self.gpus is not None else ()


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that are built alike; `hosts` is a name or a range such as `gpu[01-04]`, several with commas between.

    `memory`, `cores` (physical) and `sockets` are those of one host.
    """

    hosts: str
    gpus: Gpus | None = None
    links: InsideLinks | None = None
    sockets: int | None = None
    cores: int | None = None
    memory: str | None = None
    numa: tuple[Numa, ...] = ()
    nics: tuple[Nic, ...] = ()

    def __post_init__(self) -> None:
        check_field("hosts", expand_hosts, self.hosts)
        check_field("memory", units.parse_size, self.memory)
        for field in ("sockets", "cores"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= 100_000:
                raise FieldError(field, f"expected a whole number from 1 to 100000, not {value}")
        self._check_nics()
        self._check_gpu_indices()
        self._check_pairs()

    @property
    def host_names(self) -> tuple[str, ...]:
        return expand_hosts(self.hosts)

    @property
    def memory_bytes(self) -> int | None:
        return units.parse_size(self.memory) if self.memory else None

    @property
    def each_nic(self) -> tuple[Nic, ...]:
        """The NICs, ranges written out."""
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
        if not self.links or not self.links.nvlink or not self.gpus or self.links.nvswitch:
            return
        link, count = parse_bus(self.links.nvlink), self.gpus.count
        if not self.links.pairs and count > 2 and link.lanes % (count - 1):
            raise FieldError(
                "links.nvlink",
                f"{link.lanes} links of a GPU cannot be shared out evenly to {count - 1} others; say `nvswitch: yes`, "
                "or in `pairs` how many lead where",
            )
        for gpu in range(count) if self.links.pairs else ():
            used = sum(self.links.links_of_pair(gpu, other, count) for other in range(count))
            if used > link.lanes:
                raise FieldError(
                    "links.pairs", f"GPU {gpu} has {used} links here, but {self.links.nvlink} says {link.lanes}"
                )


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of `gpu[01-16],login1`, in order. Raises ValueError for what is no host, or twice there."""
    return _expand_hosts(text)


@functools.lru_cache(maxsize=256)
def _expand_hosts(text: str) -> tuple[str, ...]:
    found: dict[str, str] = {}
    try:
        for item, place in split_list(text, Place("")):
            expression = parse_expression(item, place, Notes())
            if expression.user is not None or expression.slots is not None:
                raise ValueError(f"{item[:60]!r} has a user or slots; they belong into the hostfile, not here")
            for name in expression.names:
                if name.lower() in found:
                    raise ValueError(f"{name} is named twice; name it once")
                found[name.lower()] = name
                if len(found) > MAX_HOSTS:
                    raise ValueError(f"more than {MAX_HOSTS:,} hosts; look for a range with too many digits")
    except HostfileError as error:
        # Its place is a column of this text, which a person sees anyway.
        raise ValueError(re.sub(r"^[:0-9]*: ", "", str(error))) from None
    return tuple(found.values())


NAMED_MOST = 3
NAMED_CHARACTERS = 100
SHOWN_MOST = 8


def name_hosts(names: Iterable[str]) -> str:
    """Hosts in a sentence: `n1, n2`, or from four on `n[1-100]`; of what would be long the first, and how many more."""
    names = list(dict.fromkeys(names))
    if len(names) <= NAMED_MOST:
        return ", ".join(names)
    folded = fold_hosts(names)
    if len(folded) <= NAMED_CHARACTERS:
        return folded
    return ", ".join(names[:NAMED_MOST]) + f" and {len(names) - NAMED_MOST} more"


def fold_hosts(names: Sequence[str]) -> str:
    """`gpu[01-16]`, or the names with commas where they have no numbers."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    if len(names) > 1:
        with contextlib.suppress(NodeSetException, ValueError):
            folded = str(NodeSet.fromlist(list(names)))
            if sorted(expand_hosts(folded)) == sorted(names):
                return folded
    return ",".join(names)


def shown_hosts(names: Sequence[str]) -> str:
    """The same where that is short, else the first of them and how many more."""
    folded = fold_hosts(names)
    if len(folded) <= NAMED_CHARACTERS or len(names) <= SHOWN_MOST:
        return folded
    return ",".join(names[:SHOWN_MOST]) + f" and {len(names) - SHOWN_MOST} more"


def indices(value: Indices) -> tuple[int, ...]:
    """`0-3` or `[0, 2]` as numbers. Raises ValueError for anything else, and for a number twice."""
    parts = [str(part) for part in value] if isinstance(value, tuple) else str(value).split(",")
    found: list[int] = []
    for part in parts:
        match = _INDEX.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(f"{part[:40]!r} is no number or range of numbers; write such as 0-3 or [0, 2]")
        found += range(first, last + 1)
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
    match = re.fullmatch(r"([0-9]{1,4}) *[-,] *([0-9]{1,4})", text)
    if not match or int(match[1]) == int(match[2]):
        return None
    first, second = sorted((int(match[1]), int(match[2])))
    return first, second


def _bus(field: str, text: str) -> Link:
    link = parse_bus(text)
    if link.kind != field:
        raise ValueError(
            f"{text!r} is a link of another kind; write such as {'PCIe4 x16' if field == 'pcie' else 'NVLink3 x12'}"
        )
    return link


def check_field(field: str, parse: Any, value: Any) -> None:
    """Parse a field that is there, so that a mistake is found when the file is read and named by its path."""
    if value is None:
        return
    try:
        parse(value)
    except FieldError:
        raise
    except ValueError as error:
        raise FieldError(field, str(error)) from None
