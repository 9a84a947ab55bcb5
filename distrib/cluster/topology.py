"""The topology file: what the hosts are made of, what joins them, and what probe measured.

nodes:
  - hosts: dgx[01-04]
    gpus: {kind: A100-SXM4-80GB, count: 8}
    links: {nvlink: NVLink3 x12, nvswitch: yes, pcie: PCIe4 x16}
    nics:
      - {name: "mlx5_[0-7]", rate: HDR, gpudirect: yes}
switches:
  - {name: rack1, hosts: "dgx[01-04]", oversubscription: 2:1}

hostfiles/ has commented examples. Host names are the same in upper and lower case.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import datetime, timezone
from typing import TypeVar, cast

import msgspec

from distrib import units
from distrib.cluster.hosts import HostList
from distrib.cluster.link_spec import parse_uplink_rate
from distrib.cluster.measurements import Measurements, Point
from distrib.cluster.measurements_io import decode_measured, split_measured
from distrib.cluster.node import Gpus, IntraNodeLinks, Nic, NodeGroup, Numa, expand_hosts, name_hosts, validate_field
from distrib.cluster.yaml_loader import Document, FieldError, convert_document, parse_yaml, read_topology_text
from distrib.errors import TopologyError

__all__ = [
    "Gpus",
    "IntraNodeLinks",
    "Nic",
    "NodeGroup",
    "Numa",
    "Switch",
    "Topology",
    "check_hosts",
    "parse_topology",
    "read_topology",
]

MAX_BYTES_PER_SECOND = 1e15
MAX_CPUS = 1 << 16
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e5
"""Values beyond these limits are errors of units or typing."""

T = TypeVar("T")


MAX_MEASUREMENT_AGE_DAYS = 180
"""Older measurements get a note."""


class Switch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A switch, or a rack: the hosts on it, or the switches below it.

    `oversubscription` (`2:1`) is what its hosts or switches could send against what leads up from it; `uplink` (`800Gb/s`, `4 x HDR`)
    says the latter as a rate.
    """

    name: str
    hosts: str | None = None
    switches: tuple[str, ...] = ()
    oversubscription: str | int | float | None = None
    uplink: str | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise FieldError("name", "a switch needs a name")
        validate_field("hosts", expand_hosts, self.hosts)
        validate_field("oversubscription", units.parse_ratio, self.oversubscription)
        validate_field("uplink", parse_uplink_rate, self.uplink)
        if self.hosts is None and not self.switches:
            raise FieldError("name", f"nothing is on {self.name}; name its `hosts` or the `switches` below it")
        if self.uplink is not None and self.oversubscription is not None:
            raise FieldError("uplink", "this says the same as `oversubscription`; keep one of them")

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts that are on it directly."""
        return expand_hosts(self.hosts) if self.hosts else ()


class TopologyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What stands in a topology file."""

    nodes: tuple[NodeGroup, ...]
    name: str | None = None
    switches: tuple[Switch, ...] = ()
    measured: Measurements | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise FieldError("nodes", "there are no hosts here; describe at least one group of them")
        self._check_groups()
        self._check_switches()
        if self.measured:
            for field, what in _wrong_in(self.measured, self._groups):
                raise FieldError(f"measured{field}", what)

    @functools.cached_property
    def _groups(self) -> dict[str, NodeGroup]:
        return {host.lower(): group for group in self.nodes for host in group.host_names}

    @functools.cached_property
    def _parents(self) -> dict[str, Switch]:
        """The switch above each host (`host NAME`, in lower case) and each switch (`switch NAME`)."""
        above = {f"host {host.lower()}": switch for switch in self.switches for host in switch.host_names}
        return above | {f"switch {name}": switch for switch in self.switches for name in switch.switches}

    def _check_groups(self) -> None:
        first: dict[str, int] = {}
        for number, group in enumerate(self.nodes):
            for host in group.host_names:
                if host.lower() in first:
                    raise FieldError(
                        f"nodes[{number}].hosts",
                        f"{host} is in nodes[{first[host.lower()]}] already; a host is in one group",
                    )
                first[host.lower()] = number

    def _check_switches(self) -> None:
        names: set[str] = set()
        on: dict[str, str] = {}
        all_names = {switch.name for switch in self.switches}
        for number, switch in enumerate(self.switches):
            place = f"switches[{number}]"
            if switch.name in names:
                raise FieldError(f"{place}.name", f"there are two switches {switch.name}; give each a name of its own")
            names.add(switch.name)
            for host in switch.host_names:
                if host.lower() not in self._groups:
                    raise FieldError(f"{place}.hosts", f"{host} is in no group of `nodes`")
            for below in switch.switches:
                if below not in all_names:
                    raise FieldError(
                        f"{place}.switches", f"there is no switch {below}; there are {', '.join(all_names)}"
                    )
            members = [(f"host {host.lower()}", host, "hosts") for host in switch.host_names]
            for key, shown, field in members + [(f"switch {below}", below, "switches") for below in switch.switches]:
                if key in on:
                    raise FieldError(f"{place}.{field}", f"{shown} is on {on[key]} already; it can be on one switch")
                on[key] = switch.name
        for number, switch in enumerate(self.switches):
            if any(above.name == switch.name for above in self._above(f"switch {switch.name}")):
                raise FieldError(f"switches[{number}].switches", f"{switch.name} is below itself")

    def _above(self, key: str) -> Iterator[Switch]:
        """The switches above a host or switch, nearest first; ends after a round where they go in circles."""
        for _ in self.switches:
            above = self._parents.get(key)
            if above is None:
                return
            yield above
            key = f"switch {above.name}"


class Topology(TopologyFile, frozen=True, kw_only=True, dict=True):
    """What the cluster is made of; `source` is the file it was read from."""

    source: str = ""

    @functools.cached_property
    def hosts(self) -> tuple[str, ...]:
        """Every host, in the order of the file."""
        return tuple(host for group in self.nodes for host in group.host_names)

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The number of each host's group, and the switches it is below, by its name in lower case."""
        found: dict[str, tuple[int, tuple[str, ...]]] = {}
        above: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for all that are below the same
        for number, group in enumerate(self.nodes):
            for host in group.host_names:
                switches = tuple(switch.name for switch in self.switches_above(host))
                found[host.lower()] = number, above.setdefault(switches, switches)
        return found

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Compute a value once for this topology.

        Args:
            key: Identifies the value.
            make: Computes it.

        Returns:
            The value.
        """
        values: dict[Hashable, object] = self.__dict__.setdefault("_cache", {})
        if key not in values:
            values[key] = make()
        return cast(T, values[key])

    def group_of(self, host: str) -> NodeGroup | None:
        """What a host is made of, or None where the file does not know it."""
        return self._groups.get(host.lower())

    def gpus_of(self, host: str) -> Gpus | None:
        """The GPUs of a host, or None where the file does not say."""
        group = self.group_of(host)
        return group.gpus if group else None

    def nics_of(self, host: str) -> tuple[Nic, ...]:
        """The NICs of a host, ranges written out; empty where the file does not say."""
        group = self.group_of(host)
        return group.each_nic if group else ()

    def switches_above(self, host: str) -> tuple[Switch, ...]:
        """The switches from a host up, its rack first."""
        return tuple(self._above(f"host {host.lower()}"))


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """Read a topology file; `TopologyError` names the file, the line and the path inside it."""
    return parse_topology(read_topology_text(os.fspath(path)), os.fspath(path))


def parse_topology(text: str, source: str) -> Topology:
    """The topology in a file's `text`; `source` is its name in errors."""
    # What probe wrote is much longer than what people write; where it stands as it was written, it need not be read as YAML.
    before, part, after = split_measured(text)
    measured = decode_measured(part)
    if measured is not None:
        # An empty part in its place shows whether the file is YAML around it.
        topology = _described(f"{before}measured:\n{after}", source, measured)
        if topology is not None:
            return topology
    document = parse_yaml(text, source)
    _require_mapping(document)
    return _finish(convert_document(document, TopologyFile), source)


def _described(text: str, source: str, measured: Measurements) -> Topology | None:
    """The topology that `text` describes, with its measured part; None where something is wrong and the whole must be read."""
    try:
        document = parse_yaml(text, source)
        if not isinstance(document.data, dict) or document.data.get("measured", 0) is not None:
            return None
        description = convert_document(document, TopologyFile)
    except TopologyError:
        return None
    if any(_wrong_in(measured, description._groups)):
        return None
    return _finish(msgspec.structs.replace(description, measured=measured), source)


def _finish(description: TopologyFile, source: str) -> Topology:
    return Topology(
        nodes=description.nodes, name=description.name, switches=description.switches, measured=description.measured,
        source=source,
    )  # fmt: skip


def _require_mapping(document: Document) -> None:
    if document.data is None:
        raise TopologyError("is empty", source=document.source, hint="see hostfiles/ for commented examples")
    if not isinstance(document.data, dict):
        what = "a list" if isinstance(document.data, list) else "text"
        raise TopologyError(
            f"is {what}, not a topology", source=document.source, line=1,
            hint="begin with `nodes:`; see hostfiles/ for commented examples (a hostfile goes to -H)",
        )  # fmt: skip


def check_hosts(topology: Topology, hosts: HostList) -> tuple[str, ...]:
    """Compare a hostfile with a topology.

    Raises TopologyError for hosts of the hostfile that the topology does not know; returns a note on those that only the
    topology knows, which may well be meant: a hostfile can choose some of a cluster's hosts.
    """
    unknown = [host for host in hosts.hosts if topology.group_of(host.name) is None]
    if unknown:
        first = unknown[0]
        place = f"{hosts.source}:{first.line}" if first.line else hosts.source
        raise TopologyError(
            f"$.nodes: {name_hosts([host.name for host in unknown])} {'is' if len(unknown) == 1 else 'are'} in the hostfile "
            f"({place}) but not in the topology",
            source=topology.source,
            line=_line(topology.source, "$.nodes"),
            hint=f"describe {'it' if len(unknown) == 1 else 'them'} in a group of `nodes`, or correct the name",
        )
    named = {host.name.lower() for host in hosts.hosts}
    notes = []
    for number, group in enumerate(topology.nodes):
        if only := [host for host in group.host_names if host.lower() not in named]:
            path = f"$.nodes[{number}].hosts"
            line = _line(topology.source, path)
            where = f"{topology.source}:{line}" if line else topology.source
            notes.append(
                f"{where}: {path}: {name_hosts(only)} {'is' if len(only) == 1 else 'are'} not in {hosts.source}"
            )
    return tuple(notes)


def age_notes(topology: Topology | None, now: datetime) -> tuple[str, ...]:
    """Warn of old measurements: cables and shared links change.

    Args:
        topology: A topology, with or without measurements.
        now: The current time, with a time zone.

    Returns:
        A note if the links were measured more than `MAX_MEASUREMENT_AGE_DAYS` ago, else nothing.
    """
    if topology is None or topology.measured is None:
        return ()
    text = topology.measured.when
    try:
        when = datetime.fromisoformat(re.sub(r"Z$", "+00:00", text))
    except ValueError:
        return (f"{topology.source}: `measured.when` is {text!r}, expected an ISO 8601 date",)
    days = (now - (when if when.tzinfo else when.replace(tzinfo=timezone.utc))).days
    if days <= MAX_MEASUREMENT_AGE_DAYS:
        return ()
    repeat = f"distrib-topo probe -o {topology.source}"
    return (f"the links were measured {days} days ago, {when:%Y-%m-%d}; {repeat} measures them again",)


def _line(source: str, path: str) -> int:
    """Where a path stands in a file; 0 where that can no longer be told. Read again, as only errors need it."""
    try:
        before, part, after = split_measured(read_topology_text(source))
        return parse_yaml(before + "\n" * part.count("\n") + after, source).line(path)
    except TopologyError:
        return 0


def _wrong_in(measured: Measurements, groups: dict[str, NodeGroup]) -> Iterator[tuple[str, str]]:
    """What in a measured part cannot be, by path."""
    if strange := [host for host in measured.hosts if host.lower() not in groups]:
        yield (
            ".hosts",
            (
                f"this was measured on other hosts: {name_hosts(strange)} "
                f"{'is' if len(strange) == 1 else 'are'} in no group of `nodes`; take `measured` away, then probe again"
            ),
        )
    known = {host.lower() for host in measured.hosts}
    owners: dict[str, int] = {}
    for number, machine in enumerate(measured.machines):
        for host in machine.hosts:
            if host.lower() not in known:
                yield f".machines[{number}].hosts", f"{host} is not among the hosts that were measured"
            if owners.setdefault(host.lower(), number) != number:
                yield f".machines[{number}].hosts", f"{host} is machines[{owners[host.lower()]}] already"
        if not 1 <= machine.processors <= MAX_CPUS:
            yield f".machines[{number}].processors", f"{machine.processors} processors; no machine has that many"
    for number, pair in enumerate(measured.pairs):
        for field, host in (("source", pair.source), ("target", pair.target)):
            if host.lower() not in known:
                yield f".pairs[{number}].{field}", f"{host} is not among the hosts that were measured"
        yield from _wrong_numbers(
            f".pairs[{number}]", pair.bandwidth_bytes_per_second, pair.latency_seconds, pair.curve
        )
        if pair.source.lower() == pair.target.lower():
            yield f".pairs[{number}].target", f"{pair.target} is the source, too; a pair is two hosts"
    for number, inside in enumerate(measured.inside):
        if inside.host.lower() not in known:
            yield f".inside[{number}].host", f"{inside.host} is not among the hosts that were measured"
        yield from _wrong_numbers(f".inside[{number}]", inside.bandwidth_bytes_per_second, None, inside.curve)
    for number, collective in enumerate(measured.collectives):
        for host in collective.hosts:
            if host.lower() not in known:
                yield f".collectives[{number}].hosts", f"{host} is not among the hosts that were measured"
        if len({host.lower() for host in collective.hosts}) < max(1, len(collective.hosts)):
            yield f".collectives[{number}].hosts", "each of its hosts is named once, and one at least"
        if collective.ranks < len(collective.hosts):
            what = f"{collective.ranks} ranks on {len(collective.hosts)} hosts; each has one at least"
            yield f".collectives[{number}].ranks", what
        yield from _wrong_numbers(f".collectives[{number}]", 1e9, None, collective.curve)


def _wrong_numbers(
    place: str, bandwidth: float, latency: float | None, curve: Sequence[Point]
) -> Iterator[tuple[str, str]]:
    if not 0 < bandwidth < math.inf:
        yield f"{place}.bandwidth_bytes_per_second", f"{bandwidth} is no rate; it must be more than zero"
    elif not 1 <= bandwidth <= MAX_BYTES_PER_SECOND:
        yield f"{place}.bandwidth_bytes_per_second", f"{bandwidth:g} bytes per second; no link carries that"
    if latency is not None and not 0 <= latency < math.inf:
        yield f"{place}.latency_seconds", f"{latency} is no time; it must be zero or more"
    elif latency is not None and latency > MAX_SECONDS:
        yield f"{place}.latency_seconds", f"{latency:g} seconds; no link takes that long"
    for number, point in enumerate(curve):
        if point.size_bytes < 0 or not MIN_SECONDS <= point.seconds <= MAX_SECONDS:
            yield f"{place}.curve[{number}]", f"{point.size_bytes} bytes in {point.seconds} s cannot be"
