"""Topology files: hosts, switches and measurements of a cluster.

nodes:
  - hosts: dgx[01-04]
    gpus: {kind: A100-SXM4-80GB, count: 8}
    links: {nvlink: NVLink3 x12, nvswitch: yes, pcie: PCIe4 x16}
    nics:
      - {name: "mlx5_[0-7]", rate: HDR, gpudirect: yes}
switches:
  - {name: rack1, hosts: "dgx[01-04]", oversubscription: 2:1}

hostfiles/ has commented examples. Host names are case-insensitive.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import datetime, timezone
from typing import NamedTuple, TypeVar, cast

import msgspec

from distrib import units
from distrib.cluster.hosts import HostList
from distrib.cluster.link_spec import parse_uplink_rate
from distrib.cluster.measurements import Measurements, Point
from distrib.cluster.measurements_io import decode_measured, split_measured
from distrib.cluster.node import Gpus, Nic, NodeGroup, expand_hosts, name_hosts, validate_field
from distrib.cluster.yaml_loader import Document, convert_document, parse_yaml, read_topology_text
from distrib.errors import FieldError, TopologyError

T = TypeVar("T")


class MeasurementLimits(NamedTuple):
    """Limits of measured values. Values beyond them are errors of units or typing."""

    max_bytes_per_second: float = 1e15
    max_cpus: int = 1 << 16
    min_seconds: float = 1e-12
    max_seconds: float = 1e5


LIMITS = MeasurementLimits()


class Switch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A switch or rack with its hosts, or the switches below.

    `oversubscription` (`2:1`): the rate of its hosts or switches against its uplink. `uplink`: the rate itself (`800Gb/s`, `4 x HDR`).
    """

    name: str
    hosts: str | None = None
    switches: tuple[str, ...] = ()
    oversubscription: str | int | float | None = None
    uplink: str | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise FieldError("name", "is empty, expected a name")
        validate_field("hosts", expand_hosts, self.hosts)
        validate_field("oversubscription", units.parse_ratio, self.oversubscription)
        validate_field("uplink", parse_uplink_rate, self.uplink)
        if self.hosts is None and not self.switches:
            raise FieldError("name", f"{self.name} has no hosts and no switches; name its `hosts` or `switches`")
        if self.uplink is not None and self.oversubscription is not None:
            raise FieldError("uplink", "is redundant with `oversubscription`; keep one of them")

    @property
    def host_names(self) -> tuple[str, ...]:
        """The hosts on the switch itself."""
        return expand_hosts(self.hosts) if self.hosts else ()


class TopologyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The content of a topology file."""

    nodes: tuple[NodeGroup, ...]
    name: str | None = None
    switches: tuple[Switch, ...] = ()
    measured: Measurements | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise FieldError("nodes", "is empty; describe at least one group of hosts")
        self._check_groups()
        self._check_switches()
        if self.measured:
            for field, what in _invalid_measurements(self.measured, self._groups):
                raise FieldError(f"measured{field}", what)

    @functools.cached_property
    def _groups(self) -> dict[str, NodeGroup]:
        return {host.lower(): group for group in self.nodes for host in group.host_names}

    @functools.cached_property
    def _parents(self) -> dict[str, Switch]:
        """The switch above each host (`host NAME`, lower case) and each switch (`switch NAME`)."""
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
                    raise FieldError(f"{place}.hosts", f"{host} is not in `nodes`")
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
        """Yield the switches above, nearest first; stop after one round of a cycle."""
        for _ in self.switches:
            above = self._parents.get(key)
            if above is None:
                return
            yield above
            key = f"switch {above.name}"


class Topology(TopologyFile, frozen=True, kw_only=True, dict=True):
    """A cluster; `source` is its file."""

    source: str = ""

    @functools.cached_property
    def hosts(self) -> tuple[str, ...]:
        """All hosts in the order of the file."""
        return tuple(host for group in self.nodes for host in group.host_names)

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """Group number and switches above each host, by its lower-case name."""
        found: dict[str, tuple[int, tuple[str, ...]]] = {}
        above: dict[tuple[str, ...], tuple[str, ...]] = {}  # hosts below the same switches share a tuple
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
        """
        values: dict[Hashable, object] = self.__dict__.setdefault("_cache", {})
        if key not in values:
            values[key] = make()
        return cast(T, values[key])

    def group_of(self, host: str) -> NodeGroup | None:
        """Find the group of a host.

        Args:
            host: The host.

        Returns:
            The group; None if unknown.
        """
        return self._groups.get(host.lower())

    def gpus_of(self, host: str) -> Gpus | None:
        """Find the GPUs of a host.

        Args:
            host: The host.

        Returns:
            The GPUs; None if not described.
        """
        group = self.group_of(host)
        return group.gpus if group else None

    def nics_of(self, host: str) -> tuple[Nic, ...]:
        """Find the NICs of a host, ranges expanded.

        Args:
            host: The host.

        Returns:
            The NICs; none if not described.
        """
        group = self.group_of(host)
        return group.each_nic if group else ()

    def switches_above(self, host: str) -> tuple[Switch, ...]:
        """Find the switches above a host, its rack first.

        Args:
            host: The host.
        """
        return tuple(self._above(f"host {host.lower()}"))


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """Read a topology file.

    Args:
        path: The file.

    Raises:
        TopologyError: The file is invalid; with line and path.
    """
    return parse_topology(read_topology_text(os.fspath(path)), os.fspath(path))


def parse_topology(text: str, source: str) -> Topology:
    """Parse a topology file.

    Args:
        text: The file.
        source: Its name in errors.

    Raises:
        TopologyError: The text is invalid; with line and path.
    """
    # The measured section is long; an unedited one is decoded without YAML.
    before, part, after = split_measured(text)
    measured = decode_measured(part)
    if measured is not None:
        # An empty section in its place keeps the rest valid YAML.
        topology = _described(f"{before}measured:\n{after}", source, measured)
        if topology is not None:
            return topology
    document = parse_yaml(text, source)
    _require_mapping(document)
    return _finish(convert_document(document, TopologyFile), source)


def _described(text: str, source: str, measured: Measurements) -> Topology | None:
    """Combine the described part with the measurements; None on any error, to read the whole file."""
    try:
        document = parse_yaml(text, source)
        if not isinstance(document.data, dict) or document.data.get("measured", 0) is not None:
            return None
        description = convert_document(document, TopologyFile)
    except TopologyError:
        return None
    if any(_invalid_measurements(measured, description._groups)):
        return None
    return _finish(msgspec.structs.replace(description, measured=measured), source)


def _finish(description: TopologyFile, source: str) -> Topology:
    return Topology(
        nodes=description.nodes, name=description.name, switches=description.switches, measured=description.measured,
        source=source,
    )  # fmt: skip


def _require_mapping(document: Document) -> None:
    if document.data is None:
        raise TopologyError(
            "is empty", source=document.source, hint="see hostfiles/ for commented examples", code="topology-empty"
        )
    if not isinstance(document.data, dict):
        what = "a list" if isinstance(document.data, list) else "text"
        raise TopologyError(
            f"is {what}, not a topology", source=document.source, line=1,
            hint="begin with `nodes:`; see hostfiles/ for commented examples (a hostfile goes to -H)", code="topology-is-hostfile",
        )  # fmt: skip


def check_hosts(topology: Topology, hosts: HostList) -> tuple[str, ...]:
    """Compare a hostfile with a topology.

    Args:
        topology: The topology.
        hosts: The hosts of the hostfile.

    Returns:
        A note for each group with hosts outside the hostfile, which may select some hosts of a cluster.

    Raises:
        TopologyError: A host of the hostfile is not in the topology.
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
            code="topology-missing-host",
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


def age_notes(topology: Topology | None, now: datetime, max_days: int = 180) -> tuple[str, ...]:
    """Warn of old measurements: cables and shared links change.

    Args:
        topology: A topology, with or without measurements.
        now: The current time, with a time zone.
        max_days: The age from which on there is a note.

    Returns:
        A note if the links were measured more than `max_days` ago, else nothing.
    """
    if topology is None or topology.measured is None:
        return ()
    text = topology.measured.when
    try:
        when = datetime.fromisoformat(re.sub(r"Z$", "+00:00", text))
    except ValueError:
        return (f"{topology.source}: `measured.when` is {text!r}, expected an ISO 8601 date",)
    days = (now - (when if when.tzinfo else when.replace(tzinfo=timezone.utc))).days
    if days <= max_days:
        return ()
    repeat = f"distrib-topo probe -o {topology.source}"
    return (f"the links were measured {days} days ago, {when:%Y-%m-%d}; {repeat} measures them again",)


def _line(source: str, path: str) -> int:
    """Find the line of a path, 0 if the file changed; reads the file again, as only errors need it."""
    try:
        before, part, after = split_measured(read_topology_text(source))
        return parse_yaml(before + "\n" * part.count("\n") + after, source).line(path)
    except TopologyError:
        return 0


def _invalid_measurements(measured: Measurements, groups: dict[str, NodeGroup]) -> Iterator[tuple[str, str]]:
    """Yield the impossible values of a measured section, with their paths."""
    if unknown := [host for host in measured.hosts if host.lower() not in groups]:
        yield (
            ".hosts",
            (f"measured on hosts that are not in `nodes`: {name_hosts(unknown)}; remove `measured`, then probe again"),
        )
    known = {host.lower() for host in measured.hosts}
    owners: dict[str, int] = {}
    for number, machine in enumerate(measured.machines):
        for host in machine.hosts:
            if host.lower() not in known:
                yield f".machines[{number}].hosts", f"{host} is not among the hosts that were measured"
            if owners.setdefault(host.lower(), number) != number:
                yield f".machines[{number}].hosts", f"{host} is machines[{owners[host.lower()]}] already"
        if not 1 <= machine.processors <= LIMITS.max_cpus:
            yield f".machines[{number}].processors", f"{machine.processors} CPUs, expected 1 to {LIMITS.max_cpus:,}"
    for number, pair in enumerate(measured.pairs):
        for field, host in (("source", pair.source), ("target", pair.target)):
            if host.lower() not in known:
                yield f".pairs[{number}].{field}", f"{host} is not among the hosts that were measured"
        yield from _invalid_numbers(
            f".pairs[{number}]", pair.bandwidth_bytes_per_second, pair.latency_seconds, pair.curve
        )
        if pair.source.lower() == pair.target.lower():
            yield f".pairs[{number}].target", f"{pair.target} is both source and target"
    for number, inside in enumerate(measured.inside):
        if inside.host.lower() not in known:
            yield f".inside[{number}].host", f"{inside.host} is not among the hosts that were measured"
        yield from _invalid_numbers(f".inside[{number}]", inside.bandwidth_bytes_per_second, None, inside.curve)
    for number, collective in enumerate(measured.collectives):
        for host in collective.hosts:
            if host.lower() not in known:
                yield f".collectives[{number}].hosts", f"{host} is not among the hosts that were measured"
        if len({host.lower() for host in collective.hosts}) < max(1, len(collective.hosts)):
            yield f".collectives[{number}].hosts", "expected one or more hosts, each once"
        if collective.ranks < len(collective.hosts):
            what = f"{collective.ranks} ranks on {len(collective.hosts)} hosts, expected one or more per host"
            yield f".collectives[{number}].ranks", what
        yield from _invalid_numbers(f".collectives[{number}]", 1e9, None, collective.curve)


def _invalid_numbers(
    place: str, bandwidth: float, latency: float | None, curve: Sequence[Point]
) -> Iterator[tuple[str, str]]:
    if not 0 < bandwidth < math.inf:
        yield f"{place}.bandwidth_bytes_per_second", f"{bandwidth}, expected a rate above 0"
    elif not 1 <= bandwidth <= LIMITS.max_bytes_per_second:
        yield (
            f"{place}.bandwidth_bytes_per_second",
            f"{bandwidth:g} bytes per second, expected 1 to {LIMITS.max_bytes_per_second:g}",
        )
    if latency is not None and not 0 <= latency < math.inf:
        yield f"{place}.latency_seconds", f"{latency}, expected 0 or more"
    elif latency is not None and latency > LIMITS.max_seconds:
        yield f"{place}.latency_seconds", f"{latency:g} seconds, expected {LIMITS.max_seconds:g} at most"
    for number, point in enumerate(curve):
        if point.size_bytes < 0 or not LIMITS.min_seconds <= point.seconds <= LIMITS.max_seconds:
            yield f"{place}.curve[{number}]", f"{point.size_bytes} bytes in {point.seconds} s is impossible"
