"""What joins the ranks of one job: the slowest wire between neighbouring hosts, the ways inside one, and who computes slower.

Ranks stand host by host, in the order of the hostfile, so a ring over all of them crosses each host's wire once in each direction,
and an uplink of a rack as often as neighbours in that order stand on either side of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from distrib.bandwidth import curves
from distrib.bandwidth.curves import Curve
from distrib.bandwidth.workload import Workload
from distrib.cluster.catalog import DataType, GpuSpec, LinkKind, find_gpu
from distrib.cluster.links import Link, parse_bus, parse_uplink
from distrib.cluster.measured import Collective
from distrib.cluster.node import NodeGroup
from distrib.cluster.topology import Switch, Topology
from distrib.cluster.ways import Way, inside_link, link_between, switch_oversubscription
from distrib.errors import ConfigError

MEASURED_ERROR, CATALOGUED_ERROR = 0.05, 0.15
"""Relative errors of a step to expect where links were measured and where they are read from data sheets."""

EQUAL = 0.03
"""Links whose rates differ by less than this part are equal; the first of them is named."""

SAME = 0.1
"""By how much links of one kind may differ for what was measured over some of them to be as good as over the others."""

NCCL_NVLINK = {"NVLink1": 18e9, "NVLink2": 20e9, "NVLink3": 20e9, "NVLink4": 20.6e9, "NVLink5": 40.1e9}
"""Bytes per second of one NVLink in a ring of NCCL (NVIDIA/nccl@5067397 src/graph/topo.h)."""

LOOPBACK_LATENCY_SECONDS, LOOPBACK_BYTES_PER_SECOND = 30e-6, 3e9
"""TCP inside a host, between ranks on CPUs, where nothing was measured."""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two hosts, or between two ranks of one."""

    source: str
    target: str
    text: str
    """Such as `10 GbE`; empty where nobody said."""
    kind: LinkKind | None
    curve: Curve
    measured: bool

    @property
    def name(self) -> str:
        """Such as `n1-n2, 10 GbE`."""
        return f"{self.source}-{self.target}" + (f", {self.text}" if self.text else "")

    @property
    def bytes_per_second(self) -> float:
        return self.curve.large_bytes_per_second


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The ways between the ranks of a job; `wire` is None for one host, `inside` where each host has one rank."""

    hosts: int
    ranks: int
    ranks_per_host: int
    """The most that a host has."""
    gpus: bool
    wire: Wire | None
    inside: Wire | None
    collectives: tuple[Collective, ...] = ()
    """All-reduces measured over hosts of this cluster."""
    memory_bytes_per_second: float | None = None
    """Copies in a host's memory, or in a GPU's."""
    memory_bytes: int | None = None
    """Of the smallest GPU."""
    slowness: tuple[tuple[float, int], ...] = ()
    """Kinds of ranks where they differ: what they take for what takes the workload's own device 1, and how many there are."""
    expected_error: float = MEASURED_ERROR
    notes: tuple[str, ...] = ()

    def with_wire(self, bytes_per_second: float) -> Fabric:
        """The same job where all links between hosts carry so much."""
        if self.wire is None:
            return self
        factor = self.wire.bytes_per_second / bytes_per_second
        collectives = tuple(_faster(each, self.wire, factor) for each in self.collectives)
        wire = msgspec.structs.replace(self.wire, curve=self.wire.curve.slower(factor))
        return msgspec.structs.replace(self, wire=wire, collectives=collectives)


def find_fabric(
    topology: Topology | None,
    workload: Workload,
    hosts: Sequence[str] | int,
    ranks_per_host: int | Sequence[int],
    nodes: int | None = None,
) -> Fabric:
    """What joins these ranks. `nodes`: so many hosts, `hosts` being the first of them; None: no more than those.

    Raises ConfigError where nothing is known of a link that is needed.
    """
    count = nodes or (hosts if isinstance(hosts, int) else len(hosts))
    each = (ranks_per_host,) if isinstance(ranks_per_host, int) else tuple(ranks_per_host)
    _check(count, each)
    ranks = each[0] * count if len(each) == 1 else sum(each)
    gpus = workload.device != "cpu"
    names, notes = _names(topology, hosts, count, gpus)
    most = max(each)
    wire = _between(topology, names, count) if count > 1 else None
    inside = _inside(topology, names, workload, most) if most > 1 else None
    slowness, said = _slowness(topology, names, workload, each, ranks) if gpus and topology else ((), ())
    notes += said
    for link in (wire, inside):
        if link and not link.measured:
            notes += (f"{link.name} was not measured: its rate is the catalogue's; distrib-topo probe measures it",)
    known = [link.measured for link in (wire, inside) if link]
    spec = find_gpu(workload.device) if gpus else None
    return Fabric(
        hosts=count,
        ranks=ranks,
        ranks_per_host=most,
        gpus=gpus,
        wire=wire,
        inside=inside,
        collectives=_collectives(topology, wire, gpus, most),
        memory_bytes_per_second=_memory_rate(topology, names, spec, gpus),
        memory_bytes=_smallest(topology, names, spec) if gpus else None,
        slowness=slowness,
        expected_error=MEASURED_ERROR if all(known) else CATALOGUED_ERROR,
        notes=notes,
    )


def _check(count: int, each: tuple[int, ...]) -> None:
    if count < 1:
        raise ConfigError(f"{count} hosts: a job has at least one", hint="say how many hosts it has")
    if min(each, default=0) < 1:
        raise ConfigError("a host without ranks is none of the job's", hint="leave it out")
    if len(each) > 1 and len(each) != count:
        raise ConfigError(
            f"{len(each)} counts of ranks for {count} hosts", hint="give one for each host, or one for all"
        )


def _names(
    topology: Topology | None, hosts: Sequence[str] | int, count: int, gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts that are known, at most as many as there shall be, and what to say where they are fewer."""
    if not isinstance(hosts, int):
        known = tuple(hosts)
    elif topology is None:
        return ("localhost",) if count == 1 else (), ()
    else:
        known = _known(topology)
        if gpus:
            known = tuple(host for host in known if (found := topology.gpus_of(host)) and found.count) or known
    if count > len(known):
        have = "1 host is known" if len(known) == 1 else f"{len(known)} hosts are known"
        return known, (f"{have}; {count} are extrapolated: more of the same, joined as these are",)
    return known[:count], ()


def _known(topology: Topology) -> tuple[str, ...]:
    kept: tuple[str, ...] | None = topology.__dict__.get("_hosts")
    if kept is None:
        kept = topology.__dict__["_hosts"] = topology.hosts
    return kept


# Between hosts


def _between(topology: Topology | None, names: tuple[str, ...], count: int) -> Wire:
    """The slowest link of the ring through these hosts."""
    if topology is None:
        raise ConfigError(
            "nothing is known of the links between the hosts",
            hint="describe them in a topology file (--topology), or measure them: distrib-topo probe",
        )
    if len(names) == 1:  # a topology of one host, and more of its kind
        names = names * 2
    slowest: Wire | None = None
    for way, share in _ring(topology, names):
        wire = _wire(topology, way, share)
        if slowest is None or wire.bytes_per_second < slowest.bytes_per_second * (1 - EQUAL):
            slowest = wire
    if slowest is None:
        raise ConfigError(f"no links join {count} hosts", hint="describe their NICs in the topology file")
    return slowest


def _ring(topology: Topology, names: tuple[str, ...]) -> Iterator[tuple[Way, float]]:
    """Each different link from a host to the next, and by how many streams of the ring its narrowest uplink is shared."""
    crossings: dict[str, int] = {}
    edges: dict[object, tuple[str, str]] = {}
    measured = {host.lower() for host in topology.measured.hosts} if topology.measured else set()
    places = _places(topology)
    for source, target in zip(names, names[1:] + names[:1], strict=True):
        one, other = places.get(source.lower()), places.get(target.lower())
        if one is not None and other is not None and one[1] is not other[1]:
            for name in one[1]:
                if name not in other[1]:
                    crossings[name] = crossings.get(name, 0) + 1
        known = (
            one is not None and other is not None and not (source.lower() in measured and target.lower() in measured)
        )
        edges.setdefault((one, other) if known else (source, target), (source, target))
    for source, target in edges.values():
        way = link_between(topology, source, target)
        if way is None:
            raise ConfigError(
                f"nothing is known of the link between {source} and {target}",
                hint="describe the NICs of both in the topology file, or measure it: distrib-topo probe",
            )
        passed = {switch.name for host in (source, target) for switch in topology.switches_above(host)}
        yield way, max((crossings[name] for name in passed if name in crossings), default=0)


def _places(topology: Topology) -> dict[str, tuple[int, tuple[str, ...]]]:
    """What each host is built like and which switches it is below, in lower case. Kept with the topology."""
    kept: dict[str, tuple[int, tuple[str, ...]]] | None = topology.__dict__.get("_places")
    if kept is None:
        kept = {}
        above: dict[tuple[str, ...], tuple[str, ...]] = {}
        for number, group in enumerate(topology.nodes):
            for host in group.host_names:
                switches = tuple(switch.name for switch in topology.switches_above(host))
                kept[host.lower()] = number, above.setdefault(switches, switches)
        topology.__dict__["_places"] = kept
    return kept


def _wire(topology: Topology, way: Way, streams: float) -> Wire:
    bandwidth = min(way.bandwidth_bytes_per_second, _staged(topology, way), _uplink(topology, way, streams))
    latency = way.latency_seconds or 0.0
    curve = None
    if bandwidth == way.bandwidth_bytes_per_second and len(way.measured) == 1:
        curve = curves.measured(way.measured[0].curve, latency_seconds=latency, bandwidth=bandwidth)
    return Wire(
        source=way.source,
        target=way.target,
        text=way.text,
        kind=way.kind,
        curve=curve or curves.line(latency, bandwidth),
        measured=way.origin == "measured",
    )


def _staged(topology: Topology, way: Way) -> float:
    """What a GPU's memory gets through host memory where cards do not read it themselves.

    The way from the GPU to host memory and that from there to the card share the PCIe link above both, so each gets
    half of it: 6 of 12 GB/s, as NVIDIA/nccl#465 saw over 100 Gb/s InfiniBand.
    """
    group = topology.group_of(way.source)
    if way.gpudirect is not False or way.origin == "measured" or not group or not group.gpus or not group.gpus.count:
        return float("inf")
    pcie = (group.links.pcie if group.links else None) or (group.gpus.spec.pcie if group.gpus.spec else None)
    return max(1, len(way.nics)) * parse_bus(pcie).usable_bytes_per_second / 2 if pcie else float("inf")


def _uplink(topology: Topology, way: Way, streams: float) -> float:
    """What the narrowest uplink that is passed leaves to each of the ring's streams through it."""
    if not streams:
        return float("inf")
    rates = [
        _uplink_rate(topology, switch) / streams
        for host, other in ((way.source, way.target), (way.target, way.source))
        for switch in topology.switches_above(host)
        if switch.name not in {above.name for above in topology.switches_above(other)}
    ]
    return min(rates, default=float("inf"))


def _uplink_rate(topology: Topology, switch: Switch) -> float:
    if switch.uplink is not None:
        return parse_uplink(switch.uplink)
    ratio = switch_oversubscription(topology, switch)
    if ratio <= 1:
        return float("inf")
    below = sum(nic.link.usable_bytes_per_second for host in switch.host_names for nic in topology.nics_of(host))
    return below / ratio if below else float("inf")


# Inside a host


def _inside(topology: Topology | None, names: tuple[str, ...], workload: Workload, ranks: int) -> Wire:
    host = names[0] if names else "localhost"
    group = topology.group_of(host) if topology else None
    if workload.device == "cpu":
        curve = curves.line(LOOPBACK_LATENCY_SECONDS, LOOPBACK_BYTES_PER_SECOND)
        return Wire(source=host, target=host, text="loopback", kind=None, curve=curve, measured=False)
    spec = group.gpus.spec if group and group.gpus else find_gpu(workload.device)
    nvlink = _nvlink(group, spec, ranks)
    pcie = (group.links.pcie if group and group.links else None) or (spec.pcie if spec else None) or "PCIe3 x16"
    link = nvlink or parse_bus(pcie)
    bandwidth = link.lanes * NCCL_NVLINK[link.spec.name] if nvlink else link.usable_bytes_per_second
    seen = inside_link(topology, host, "gpu0", "gpu1") if topology else None
    was_measured = seen is not None and seen.origin == "measured"
    if seen is not None and was_measured and (not nvlink or (group and group.links and group.links.nvswitch)):
        bandwidth = min(bandwidth, seen.bandwidth_bytes_per_second) if nvlink else seen.bandwidth_bytes_per_second
    return Wire(
        source=f"{host} gpu0",
        target="gpu1",
        text=link.text,
        kind=link.kind,
        curve=curves.line(link.latency_seconds, bandwidth),
        measured=was_measured,
    )


def _nvlink(group: NodeGroup | None, spec: GpuSpec | None, ranks: int) -> Link | None:
    """The NVLinks that a GPU has to the others of the job on its host; None where they do not reach them all.

    NCCL lays several rings through a mesh, so that all links of a GPU carry their part.
    """
    links = group.links if group else None
    if links is None or not links.nvlink:
        whole = None if group else (spec.nvlink if spec else None)
        return parse_bus(whole) if whole else None
    count = group.gpus.count if group and group.gpus else ranks
    used = range(min(ranks, count))
    joined = {a: {b for b in used if links.links_of_pair(a, b, count)} for a in used}
    reached, new = {0}, {0}
    while new:
        new = {b for a in new for b in joined[a]} - reached
        reached |= new
    if len(reached) < len(used):
        return None
    if links.nvswitch:
        return parse_bus(links.nvlink)
    least = min(sum(links.links_of_pair(a, b, count) for b in used) for a in used)
    return parse_bus(links.nvlink).with_lanes(max(1, least))


# What else is known


def _slowness(
    topology: Topology, names: tuple[str, ...], workload: Workload, each: tuple[int, ...], ranks: int
) -> tuple[tuple[tuple[float, int], ...], tuple[str, ...]]:
    """How long each kind of GPU takes against the one that the workload was measured on, by the catalogue."""
    own = find_gpu(workload.device)
    places = _places(topology)
    ranks_of: dict[int, int] = {}
    for place, host in enumerate(names):
        if host.lower() in places:
            number = places[host.lower()][0]
            ranks_of[number] = ranks_of.get(number, 0) + each[place % len(each)]
    named = sum(each[place % len(each)] for place in range(len(names)))
    found: dict[str, tuple[float, int]] = {}
    for number, count in ranks_of.items():
        gpus = topology.nodes[number].gpus
        spec = gpus.spec if gpus else None
        if own and spec:
            factor = _times_as_long(own, spec)
            found[spec.name] = factor, found.get(spec.name, (1.0, 0))[1] + count * ranks // named
    if all(factor == 1.0 for factor, _ in found.values()):
        return (), ()
    kinds = ", ".join(f"{name} takes {factor:.2g} times as long" for name, (factor, _) in found.items() if factor != 1)
    return tuple(found.values()), (f"computed for {workload.device}; by the catalogue's operations a second, {kinds}",)


def _times_as_long(own: GpuSpec, other: GpuSpec) -> float:
    if own.name == other.name:
        return 1.0
    kinds: tuple[DataType, ...] = ("fp16", "fp32")
    shared = [kind for kind in kinds if kind in own.tflops and kind in other.tflops]
    return own.tflops[shared[0]].value / other.tflops[shared[0]].value if shared else 1.0


def _collectives(topology: Topology | None, wire: Wire | None, gpus: bool, each: int) -> tuple[Collective, ...]:
    """The all-reduces that probe measured with the backend that training uses, fewest ranks first.

    Those with as many ranks on each host, where there are any; else those with one; else all. One over hosts whose slowest
    link is another than the job's is read as if it had been the job's.
    """
    if topology is None or topology.measured is None or wire is None:
        return ()
    backend = "nccl" if gpus else "gloo"
    found = [one for one in topology.measured.collectives if one.backend == backend and len(one.hosts) > 1]
    for wanted in (each, 1):
        alike = [one for one in found if one.ranks == wanted * len(one.hosts)]
        if alike:
            found = alike
            break
    over = [_over(topology, one, wire) for one in sorted(found, key=lambda one: one.ranks)]
    return tuple(one for one in over if one)


def _over(topology: Topology, collective: Collective, wire: Wire) -> Collective | None:
    """What an all-reduce would take if `wire` were the slowest link of its hosts; None where nothing is known of theirs."""
    try:
        own = _between(topology, collective.hosts, len(collective.hosts))
    except ConfigError:
        return None
    factor = own.bytes_per_second / wire.bytes_per_second
    return collective if abs(factor - 1) <= SAME else _faster(collective, own, factor)


def _faster(collective: Collective, wire: Wire, factor: float) -> Collective:
    """What an all-reduce would take if the wire took `factor` times as long for each byte."""
    n = collective.ranks
    points = []
    for point in collective.curve:
        carried = 2 * (n - 1) / n * point.size_bytes / wire.bytes_per_second
        busy = min(carried, point.seconds)
        points.append(msgspec.structs.replace(point, seconds=point.seconds + busy * (factor - 1)))
    return msgspec.structs.replace(collective, curve=tuple(points))


def _memory_rate(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None, gpus: bool) -> float | None:
    if gpus:
        return spec.memory_bandwidth_bytes_per_second.value if spec else None
    ways = [inside_link(topology, host, "memory", "memory") for host in names[:1]] if topology else []
    return min((way.bandwidth_bytes_per_second for way in ways if way), default=None)


def _smallest(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None) -> int | None:
    places = _places(topology) if topology else {}
    groups = {places[host.lower()][0] for host in names if host.lower() in places}
    known = [gpus.memory_bytes for number in groups if topology and (gpus := topology.nodes[number].gpus)]
    sizes = [size for size in known if size is not None]
    return min(sizes) if sizes else int(spec.memory_bytes.value) if spec else None
