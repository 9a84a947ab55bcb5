"""The wires of a job: the narrowest between neighbouring hosts, and what joins the ranks of one.

Ranks stand host by host, in the order of the hostfile, so a ring over all of them crosses each host's wire once in each direction,
and an uplink of a rack as often as neighbours in that order stand on either side of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from distrib.bandwidth_model import link_curve
from distrib.bandwidth_model.link_curve import Curve
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.hardware_catalog import GpuSpec, LinkKind, find_gpu
from distrib.cluster.link_spec import Link, parse_bus
from distrib.cluster.links import (
    UPLINK_USABLE,
    InsideWay,
    Way,
    inside_link,
    link_between,
    uplink_rate,
    uplinks_between,
)
from distrib.cluster.node import NodeGroup
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError

EQUAL = 0.03
"""Links whose rates differ by less than this part are equal; the first of them is named."""

NCCL_NVLINK = {"NVLink1": 18e9, "NVLink2": 20e9, "NVLink3": 20e9, "NVLink4": 20.6e9, "NVLink5": 40.1e9}
"""Bytes per second of one NVLink in a ring of NCCL (NVIDIA/nccl@5067397 src/graph/topo.h)."""

UCX_RAILS = 2
"""How many RDMA ports MPI uses between two ranks (UCX_MAX_RNDV_RAILS, its default), where NCCL uses all of a host."""

LOOPBACK_LATENCY_SECONDS, LOOPBACK_BYTES_PER_SECOND = 30e-6, 3e9
"""TCP inside a host, between ranks on CPUs, where nothing was measured."""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two hosts, or between two ranks of one."""

    source: str
    target: str
    text: str
    """Such as `10 GbE`, or what of the way is narrowest: `uplink of rack1, 800Gb/s`; empty where nobody said."""
    kind: LinkKind | None
    curve: Curve
    measured: bool
    gpudirect: bool | None = None
    """Whether cards read GPUs' memory themselves; None where nobody said."""

    @property
    def name(self) -> str:
        """Such as `n1-n2, 10 GbE`."""
        return f"{self.source}-{self.target}" + (f", {self.text}" if self.text else "")

    @property
    def host(self) -> str:
        """Where it begins."""
        return self.source.partition(" ")[0]

    @property
    def bytes_per_second(self) -> float:
        return self.curve.large_bytes_per_second


# Between hosts


def between(topology: Topology | None, names: tuple[str, ...], *, gpus: bool) -> Wire:
    """The slowest link of the ring through these hosts, of NCCL with `gpus`, else of Gloo."""
    if topology is None:
        raise ConfigError(
            "nothing is known of the links between the hosts",
            hint="describe them in a topology file (--topology), or measure them: distrib-topo probe",
        )
    if len(names) == 1:  # a topology of one host, and more of its kind
        names = names * 2
    slowest: Wire | None = None
    for way, share in _ring(topology, names, gpus):
        wire = _wire(topology, way, share)
        if slowest is None or wire.bytes_per_second < slowest.bytes_per_second * (1 - EQUAL):
            slowest = wire
    if slowest is None:
        raise ConfigError(f"no links join {len(names)} hosts", hint="describe their NICs in the topology file")
    return slowest


def _ring(topology: Topology, names: tuple[str, ...], gpus: bool) -> Iterator[tuple[Way, float]]:
    """Each different link between a host and the next, and by how many streams of the ring its narrowest uplink is shared."""
    crossings: dict[str, int] = {}
    edges: dict[object, tuple[str, str]] = {}
    measured = {host.lower() for host in topology.measured.hosts} if topology.measured else set()
    places = topology.places
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
        way = _used(topology, source, target, gpus)
        if way is None:
            raise ConfigError(
                f"nothing is known of the link between {source} and {target}",
                hint="describe the NICs of both in the topology file, or measure it: distrib-topo probe",
            )
        passed = {switch.name for host in (source, target) for switch in topology.switches_above(host)}
        yield way, max((crossings[name] for name in passed if name in crossings), default=0)


def _used(topology: Topology, host: str, following: str, gpus: bool) -> Way | None:
    """The direction between neighbours that counts where they differ.

    Gloo's ring sends from each rank to the one before it (pytorch/gloo allreduce.cc, and seen: with one direction slow, a step took as
    long as that says). Of NCCL it is the slower one, as trees use both.
    """
    way, back = link_between(topology, host, following), link_between(topology, following, host)
    if way is None or back is None:
        return way
    one, other = way.bandwidth_bytes_per_second, back.bandwidth_bytes_per_second
    if abs(one - other) <= EQUAL * max(one, other):
        return way
    return back if not gpus or other < one else way


def _wire(topology: Topology, way: Way, streams: float) -> Wire:
    whole = way.bandwidth_bytes_per_second
    cards = len(way.nics)
    if way.kind == "ethernet" and cards > 1:  # to one of which the launcher keeps Gloo and NCCL
        whole = max((pair.bandwidth_bytes_per_second for pair in way.measured), default=whole / cards)
    scaled = False
    if way.kind in ("infiniband", "roce") and cards > UCX_RAILS and {pair.way for pair in way.measured} == {"mpi"}:
        whole = min(whole * cards / UCX_RAILS, UPLINK_USABLE * (way.rate_bytes_per_second or float("inf")))
        scaled = True
    bandwidth, text = min(
        (whole, way.text if scaled or whole == way.bandwidth_bytes_per_second else f"one of {way.text}"),
        (_staged(topology, way), f"{way.text} through host memory"),
        *_uplinks(topology, way, streams),
        key=lambda narrow: narrow[0],
    )
    latency = way.latency_seconds or 0.0
    curve = None
    if bandwidth == whole and len(way.measured) == 1 and not scaled:
        curve = link_curve.measured(way.measured[0].curve, latency_seconds=latency, bandwidth=bandwidth)
    return Wire(
        source=way.source,
        target=way.target,
        text=text,
        kind=way.kind,
        curve=curve or link_curve.line(latency, bandwidth),
        measured=way.origin == "measured",
        gpudirect=way.gpudirect,
    )


def _staged(topology: Topology, way: Way) -> float:
    """What a GPU's memory gets through host memory where cards do not read it themselves.

    The way from the GPU to host memory and that from there to the card share the PCIe link above both, so each gets
    half of it: 6 of 12 GB/s, as NVIDIA/nccl#465 saw over 100 Gb/s InfiniBand. What probe measured went from host memory.
    """
    group = topology.group_of(way.source)
    if way.gpudirect is not False or not group or not group.gpus or not group.gpus.count:
        return float("inf")
    pcie = (group.links.pcie if group.links else None) or (group.gpus.spec.pcie if group.gpus.spec else None)
    return max(1, len(way.nics)) * parse_bus(pcie).usable_bytes_per_second / 2 if pcie else float("inf")


def _uplinks(topology: Topology, way: Way, streams: float) -> list[tuple[float, str]]:
    """What each uplink that is passed leaves to each of the ring's streams through it, and what it is."""
    if not streams:
        return []
    shared = f" for {streams:g} streams" if streams > 1 else ""
    return [
        (
            uplink_rate(topology, switch) / streams,
            f"uplink of {switch.name}, {switch.uplink or switch.oversubscription}{shared}",
        )
        for switch in uplinks_between(topology, way.source, way.target)
    ]


# Inside a host


def inside_of(topology: Topology | None, host: str, workload: Workload, ranks: int) -> Wire:
    """What joins the ranks of a host."""
    group = topology.group_of(host) if topology else None
    if workload.device == "cpu":
        curve = link_curve.line(LOOPBACK_LATENCY_SECONDS, LOOPBACK_BYTES_PER_SECOND)
        return Wire(source=host, target=host, text="loopback", kind=None, curve=curve, measured=False)
    spec = group.gpus.spec if group and group.gpus else find_gpu(workload.device)
    nvlink = _nvlink(group, spec, ranks)
    mesh = bool(group and group.links and group.links.nvlink and not group.links.nvswitch)
    # In a mesh the copies between two GPUs tell nothing of the rings through all.
    seen = _measured_ring(topology, host, max(2, ranks)) if topology and not mesh else None
    if seen and seen.measured and seen.measured.path not in (None, "NVLink"):
        nvlink = None  # bridges, that join some of them only
    pcie = (group.links.pcie if group and group.links else None) or (spec.pcie if spec else None) or "PCIe3 x16"
    link = nvlink or parse_bus(pcie)
    bandwidth = link.lanes * NCCL_NVLINK[link.spec.name] if nvlink else link.usable_bytes_per_second
    if seen:
        bandwidth = min(bandwidth, seen.bandwidth_bytes_per_second) if nvlink else seen.bandwidth_bytes_per_second
    return Wire(
        source=f"{host} {seen.source if seen else 'gpu0'}",
        target=seen.target if seen else "gpu1",
        text=link.text,
        kind=link.kind,
        curve=link_curve.line(link.latency_seconds, bandwidth),
        measured=seen is not None,
    )


def _measured_ring(topology: Topology, host: str, ranks: int) -> InsideWay | None:
    """The slowest link of the best ring through a host's first GPUs; None where measured ones do not join them all."""
    group = topology.group_of(host)
    count = min(ranks, group.gpus.count) if group and group.gpus else ranks
    joined = [{gpu} for gpu in range(count)]
    pairs = itertools.combinations(range(count), 2)
    found = [inside_link(topology, host, f"gpu{one}", f"gpu{other}") for one, other in pairs]
    ways = [way for way in found if way and way.origin == "measured"]
    for way in sorted(ways, key=lambda way: way.bandwidth_bytes_per_second, reverse=True):
        one, other = (next(each for each in joined if int(end[3:]) in each) for end in (way.source, way.target))
        if one is not other:
            joined = [each for each in joined if each is not one and each is not other] + [one | other]
            if len(joined) == 1:
                return way
    return None


def _nvlink(group: NodeGroup | None, spec: GpuSpec | None, ranks: int) -> Link | None:
    """The NVLinks that a GPU has to the others of the job on its host; None where they do not reach them all.

    NCCL lays several rings through a mesh, so that all links of a GPU carry their part.
    """
    links = group.links if group else None
    if links is None:  # nobody says: as the catalogue has it
        return parse_bus(spec.nvlink) if spec and spec.nvlink else None
    if not links.nvlink:
        return None
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
