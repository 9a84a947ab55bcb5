"""View model of `distrib-topo show`: groups of equal hosts, classes of links, switches, and results of the hardware checks."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from distrib.cluster.hardware_checks import HardwareCheck, check_hardware
from distrib.cluster.hostfile import HostList
from distrib.cluster.link_spec import KIND_NAMES, parse_uplink_rate
from distrib.cluster.links import Link, intra_node_link, link_between
from distrib.cluster.node import Nic, NodeGroup, indices, shown_hosts
from distrib.cluster.topology import Topology, check_hosts
from distrib.cluster.uplinks import switch_oversubscription, uplink_rate, uplinks_between
from distrib.units import format_size
from distrib.utils.ranges import ranges

Origin = Literal["measured", "catalogued"]


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """Class of links: links of the same kind between ends of the same kind. Bandwidths are those of one link in one direction.

    `bandwidth_bytes_per_second` is the median. `slowest` names the slowest measured link.
    """

    name: str
    text: str
    origin: Origin
    rate_bytes_per_second: float | None
    bandwidth_bytes_per_second: float
    slowest_bytes_per_second: float | None = None
    slowest: str | None = None
    fastest_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    links: int = 1
    """Number of links, or of measured links."""
    oversubscription: float = 1.0
    shared_bytes_per_second: float | None = None
    """Share of one host while all hosts send through their oversubscribed switches."""
    slow: bool = False
    """True for measured links that are slower than others between hosts of the same kinds."""


class NicView(msgspec.Struct, frozen=True, kw_only=True):
    """Group of equal NICs of a host."""

    names: str
    count: int
    kind: str
    text: str
    rate_bytes_per_second: float
    gpudirect: bool | None
    gpus: tuple[int, ...]
    numa: int | None
    pcie: str | None


class NumaView(msgspec.Struct, frozen=True, kw_only=True):
    """NUMA node of a host."""

    index: int
    cpus: str | None
    gpus: tuple[int, ...]
    memory: str | None


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Group of equal hosts; numbers are those of one host."""

    hosts: str
    names: tuple[str, ...]
    slots: int | None
    role: str | None
    described: bool
    gpus: int | None = None
    gpu_kind: str | None = None
    gpu_known: bool = False
    gpu_memory_bytes: int | None = None
    gpu_memory_bandwidth_bytes_per_second: float | None = None
    gpu_tflops: dict[str, float] = {}
    sockets: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    nvswitch: bool = False
    nvlink_pairs: dict[str, int] = {}
    numa: tuple[NumaView, ...] = ()
    nics: tuple[NicView, ...] = ()
    inside: tuple[LinkView, ...] = ()
    rules: tuple[HardwareCheck, ...] = ()

    @property
    def host_words(self) -> list[str]:
        """Return a host's sockets, cores and memory in words."""
        facts = [
            f"{self.sockets} socket{'' if self.sockets == 1 else 's'}" if self.sockets else "",
            f"{self.cores} core{'s' if self.cores > 1 else ''}" if self.cores else "",
            f"{format_size(self.memory_bytes, digits=4, binary=True)} memory" if self.memory_bytes else "",
        ]
        return [fact for fact in facts if fact]

    @property
    def gpu_words(self) -> str:
        """Return the number and kind of a host's GPUs."""
        return f"{self.gpus} x {self.gpu_kind or 'GPU'}"


class SwitchView(msgspec.Struct, frozen=True, kw_only=True):
    """Switch with the hosts on it and the switches below it."""

    name: str
    hosts: str
    names: tuple[str, ...]
    switches: tuple[str, ...]
    oversubscription: float
    uplink_bytes_per_second: float | None
    top: bool


class View(msgspec.Struct, frozen=True, kw_only=True):
    """View of a cluster: everything that `distrib-topo show` prints or draws."""

    name: str | None
    hostfile: str | None
    dialect: str | None
    topology: str | None
    groups: tuple[GroupView, ...]
    switches: tuple[SwitchView, ...]
    between: tuple[LinkView, ...]
    measured_when: str | None
    measured_hosts: int
    notes: tuple[str, ...]

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return sum(len(group.names) for group in self.groups)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all hosts."""
        return sum(len(group.names) * (group.gpus or 0) for group in self.groups)


def view_of(hosts: HostList | None, topology: Topology | None) -> View:
    """Return the view of a hostfile, a topology, or both.

    Args:
        hosts: Hosts of the user; None: those of the topology.
        topology: Description of the hosts; None: unknown.

    Raises:
        TopologyError: The topology does not describe some of the hosts.
    """
    notes = list(hosts.notes) if hosts else []
    if hosts and topology:
        notes += check_hosts(topology, hosts)
    if topology is None:
        notes.append(
            "no topology: only the names of these hosts are known; --ask queries them (-o FILE writes a topology file; hostfiles/ has "
            "examples), `distrib-topo probe -o FILE` measures their links"
        )
    names = [host.name for host in hosts.hosts] if hosts else list(topology.hosts) if topology else []
    return View(
        name=topology.name if topology else None,
        hostfile=hosts.source if hosts else None,
        dialect=hosts.dialect if hosts else None,
        topology=topology.source if topology else None,
        groups=_groups(hosts, topology, names),
        switches=_switches(topology, names) if topology else (),
        between=_between(topology, names) if topology else (),
        measured_when=topology.measured.when if topology and topology.measured else None,
        measured_hosts=len(topology.measured.hosts) if topology and topology.measured else 0,
        notes=tuple(notes),
    )


def _groups(hosts: HostList | None, topology: Topology | None, names: Sequence[str]) -> tuple[GroupView, ...]:
    listed = {host.name: host for host in hosts.hosts} if hosts else {}
    numbers = {id(group): number for number, group in enumerate(topology.nodes)} if topology else {}
    equal: dict[tuple[int, int | None, str | None], list[str]] = {}
    for name in names:
        group = topology.group_of(name) if topology else None
        host = listed.get(name)
        key = (numbers[id(group)] if group else -1, host.slots if host else None, host.role if host else None)
        equal.setdefault(key, []).append(name)
    return tuple(
        _group(topology.nodes[number], topology, members, slots, role)
        if topology and number >= 0
        else GroupView(hosts=shown_hosts(members), names=tuple(members), slots=slots, role=role, described=False)
        for (number, slots, role), members in equal.items()
    )


def _group(
    group: NodeGroup, topology: Topology, names: Sequence[str], slots: int | None, role: str | None
) -> GroupView:
    spec = group.gpus.spec if group.gpus else None
    links = group.links
    return GroupView(
        hosts=shown_hosts(names),
        names=tuple(names),
        slots=slots,
        role=role,
        described=True,
        gpus=group.gpus.count if group.gpus else None,
        gpu_kind=group.gpus.kind if group.gpus else None,
        gpu_known=spec is not None,
        gpu_memory_bytes=group.gpus.memory_bytes if group.gpus else None,
        gpu_memory_bandwidth_bytes_per_second=spec.memory_bandwidth_bytes_per_second.value if spec else None,
        gpu_tflops={kind: figure.value for kind, figure in spec.tflops.items()} if spec else {},
        sockets=group.sockets,
        cores=group.cores,
        memory_bytes=group.memory_bytes,
        nvswitch=bool(links and links.nvswitch),
        nvlink_pairs=_nvlink_pairs(group),
        numa=tuple(
            NumaView(
                index=number,
                cpus=ranges(indices(numa.cpus)) if numa.cpus is not None else None,
                gpus=indices(numa.gpus) if numa.gpus is not None else (),
                memory=numa.memory,
            )
            for number, numa in enumerate(group.numa)
        ),
        nics=tuple(_nic(nic) for nic in group.nics),
        inside=_inside(group, topology, names),
        rules=check_hardware(group),
    )


def _nic(nic: Nic) -> NicView:
    return NicView(
        names=nic.name,
        count=len(nic.names),
        kind=KIND_NAMES[nic.link.kind],
        text=nic.rate,
        rate_bytes_per_second=nic.link.rate_bytes_per_second,
        gpudirect=nic.gpudirect,
        gpus=nic.near_gpus,
        numa=nic.numa,
        pcie=nic.pcie,
    )


def _nvlink_pairs(group: NodeGroup) -> dict[str, int]:
    """Return the number of NVLinks by pair of GPUs; empty with an NVSwitch."""
    if not group.links or not group.links.nvlink or group.links.nvswitch or not group.gpus or group.gpus.count > 32:
        return {}
    count = group.gpus.count
    return {
        f"{first}-{second}": links
        for first in range(count)
        for second in range(first + 1, count)
        if (links := group.links.links_of_pair(first, second, count))
    }


def _inside(group: NodeGroup, topology: Topology, names: Sequence[str]) -> tuple[LinkView, ...]:
    """Return the classes of links inside these hosts, by the kinds of their ends and the kind of link."""
    count = min(group.gpus.count if group.gpus else 0, 32)
    ends = [(f"gpu{first}", f"gpu{second}") for first in range(count) for second in range(first + 1, count)]
    ends += [end for gpu in range(count) for end in (("memory", f"gpu{gpu}"), (f"gpu{gpu}", "memory"))]
    ends.append(("memory", "memory"))
    measured = {link.host.lower() for link in topology.measured.inside} if topology.measured else set()
    # Without measurements the hosts are equal: one of them stands for all.
    chosen = [name for name in names if name.lower() in measured] or list(names[:1])
    found: dict[tuple[str, str], list[Link]] = {}
    for name in chosen:
        for source, target in ends:
            if way := intra_node_link(topology, name, source, target):
                gpus = sum(end.startswith("gpu") for end in (source, target))
                label = ("inside memory", "memory to GPU", "GPU to GPU")[gpus]
                if label == "memory to GPU" and source != "memory" and way.origin == "measured":
                    label = "GPU to memory"
                elif label == "memory to GPU" and source != "memory":
                    continue  # data sheets give one value for both directions
                found.setdefault((label, way.text), []).append(way)
    return tuple(
        _link(label, [(way, f"{way.host} {way.source} to {way.target}") for way in ways])
        for (label, _), ways in found.items()
    )


def _between(topology: Topology, names: Sequence[str]) -> tuple[LinkView, ...]:
    """Return the classes of links between hosts, by the kinds of the hosts, the switches above them and the measured speed."""
    classes: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    numbers = {id(group): number for number, group in enumerate(topology.nodes)}
    for name in names:
        above = tuple(switch.name for switch in topology.switches_above(name))
        classes.setdefault((numbers[id(topology.group_of(name))], above), []).append(name)
    of = {name.lower(): key for key, members in classes.items() for name in members}
    seen: dict[tuple[object, object], list[tuple[str, str]]] = {}
    for pair in topology.measured.pairs if topology.measured else ():
        ends = (pair.source.lower(), pair.target.lower())
        if ends[0] in of and ends[1] in of:
            seen.setdefault((of[ends[0]], of[ends[1]]), []).append((pair.source, pair.target))
    found: list[LinkView] = []
    keys = list(classes)
    for number, first in enumerate(keys):
        for second in keys[number:]:
            pairs = list(dict.fromkeys(seen.get((first, second), []) + seen.get((second, first), [])))
            if not pairs:
                others = [name for name in classes[second] if name != classes[first][0]]
                pairs = [(classes[first][0], others[0])] if others else []
            ways = [(way, (a, b)) for a, b in pairs if (way := link_between(topology, a, b))]
            if not ways:
                continue
            sides = (classes[first], classes[second])
            label = (
                f"among {shown_hosts(sides[0])}"
                if first == second
                else f"{shown_hosts(sides[0])} and {shown_hosts(sides[1])}"
            )
            speeds = _by_speed(ways)
            for number, members in enumerate(speeds):
                name = label if len(speeds) == 1 else _link_ends([ends for _, ends in members])
                named = [(way, " to ".join(ends)) for way, ends in members]
                found.append(_link(name, named, most=_uplink(topology, *pairs[0]), slow=number > 0))
    return tuple(found)


def _by_speed(ways: Sequence[tuple[Link, tuple[str, str]]]) -> list[list[tuple[Link, tuple[str, str]]]]:
    """Group measured links of similar bandwidth, the fastest first; one group if none was measured."""
    measured = [(way, ends) for way, ends in ways if way.origin == "measured"]
    groups: list[list[tuple[Link, tuple[str, str]]]] = [] if measured else [list(ways)]
    # Measurements of equal links vary by less than a fifth.
    for way, ends in sorted(measured, key=lambda item: -item[0].bandwidth_bytes_per_second):
        if not groups or way.bandwidth_bytes_per_second < 0.8 * groups[-1][0][0].bandwidth_bytes_per_second:
            groups.append([])
        groups[-1].append((way, ends))
    return groups


def _link_ends(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the hosts of some links: `among n[1-4]`, or `n3 and n[1-2]` if all links have an end at n3."""
    hosts = sorted({host for pair in pairs for host in pair})
    common: list[str] = []  # the fewest hosts with an end of every link, by a greedy choice
    left = list(pairs)
    while left:
        counts = Counter(host for pair in left for host in pair)
        common.append(max(hosts, key=lambda host: counts[host]))
        left = [pair for pair in left if common[-1] not in pair]
    rest = [host for host in hosts if host not in common]
    if 2 * len(common) > len(hosts) or len(set(pairs)) == len(hosts) * (len(hosts) - 1):
        return f"among {shown_hosts(hosts)}"
    for first, second in ((common, rest), (rest, common)):
        if {source for source, _ in pairs} <= set(first):
            return f"{shown_hosts(first)} to {shown_hosts(second)}"
    return f"{shown_hosts(common)} and {shown_hosts(rest)}"


def _uplink(topology: Topology, one: str, other: str) -> float:
    """Return the rate of the slowest uplink between two hosts, of those with a known rate."""
    passed = uplinks_between(topology, one, other)
    return min((uplink_rate(topology, switch) for switch in passed), default=math.inf)


def _link(label: str, ways: Sequence[tuple[Link, str]], *, most: float = math.inf, slow: bool = False) -> LinkView:
    """Return a class of links; `most` limits the bandwidth of links that were not measured."""
    measured = [(way, name) for way, name in ways if way.origin == "measured"]
    chosen = measured or list(ways)
    slowest, name = min(chosen, key=lambda item: item[0].bandwidth_bytes_per_second)
    # Inside hosts the probe measures only bandwidth; a latency of the catalogue would look measured.
    latencies = [
        way.latency_seconds
        for way, _ in chosen
        if way.latency_seconds is not None and not (measured and way.host is not None)
    ]
    first = chosen[0][0]
    between = [way for way, _ in chosen if way.host is None]
    return LinkView(
        name=label,
        text=first.text,
        origin="measured" if measured else "catalogued",
        rate_bytes_per_second=first.rate_bytes_per_second,
        bandwidth_bytes_per_second=min(
            statistics.median(way.bandwidth_bytes_per_second for way, _ in chosen), math.inf if measured else most
        ),
        slowest_bytes_per_second=slowest.bandwidth_bytes_per_second if len(measured) > 1 else None,
        slowest=name if len(measured) > 1 else None,
        fastest_bytes_per_second=max(way.bandwidth_bytes_per_second for way, _ in measured)
        if len(measured) > 1
        else None,
        latency_seconds=statistics.median(latencies) if latencies else None,
        links=len(chosen),
        oversubscription=max((way.oversubscription for way in between), default=1.0),
        shared_bytes_per_second=min((way.shared_bandwidth_bytes_per_second for way in between), default=None),
        slow=slow,
    )


def _switches(topology: Topology, names: Sequence[str]) -> tuple[SwitchView, ...]:
    wanted = {name.lower() for name in names}
    below = {name for switch in topology.switches for name in switch.switches}
    views = []
    for switch in topology.switches:
        members = tuple(name for name in switch.host_names if name.lower() in wanted)
        views.append(
            SwitchView(
                name=switch.name,
                hosts=shown_hosts(members),
                names=members,
                switches=switch.switches,
                oversubscription=switch_oversubscription(topology, switch),
                uplink_bytes_per_second=parse_uplink_rate(switch.uplink) if switch.uplink else None,
                top=switch.name not in below,
            )
        )
    return tuple(views)
