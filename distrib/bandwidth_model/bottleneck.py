"""Bottleneck links of a job: the narrowest between neighbouring hosts, and the link between the ranks of one host.

Ranks are ordered host by host, as in the hostfile. A ring over all ranks crosses each host's NICs once in each direction, and the
uplink of a rack as often as neighbours stand on either side of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from distrib.bandwidth_model import link_curve
from distrib.bandwidth_model.link_curve import Curve
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.hardware_catalog import GpuSpec, LinkKind, find_gpu, network_family
from distrib.cluster.link_spec import LinkSpec, parse_bus_link
from distrib.cluster.links import Link, intra_node_link, link_between
from distrib.cluster.node import NodeGroup
from distrib.cluster.topology import Topology
from distrib.cluster.uplinks import UPLINK_USABLE_FRACTION, uplink_rate, uplinks_between
from distrib.errors import ConfigError

EQUAL_RATE_TOLERANCE = 0.03
"""Relative difference of rates that count as equal; the first such link is named."""

NCCL_NVLINK_BYTES_PER_SECOND = {"NVLink1": 18e9, "NVLink2": 20e9, "NVLink3": 20e9, "NVLink4": 20.6e9, "NVLink5": 40.1e9}
"""One NVLink in a ring of NCCL; others as the catalogue says (NVIDIA/nccl@5067397 src/graph/topo.h)."""


class TransportDefaults(msgspec.Struct, frozen=True):
    """Costs and limits of transports where they were not measured; calibrated by benchmarks/prediction.py unless a source is named."""

    loopback_latency_seconds: float = 30e-6
    """TCP inside a host, between ranks on CPUs."""
    loopback_bytes_per_second: float = 3e9
    memory_bytes_per_second: float = 5e9
    """Copies in the memory of a CPU host."""
    gloo_hop_seconds: float = 60e-6
    """Cost of a message of Gloo beyond the latency of the link."""
    host_copy_bytes_per_second: float = 2 * 3.9e9
    """NCCL's copies between GPUs through host memory: 3.9 GB/s a channel (NVIDIA/nccl#384; 28 GB/s for eight in #1639), two channels
    (ncclTopoDupChannels in src/graph/search.cc)."""
    socket_bytes_per_second: tuple[tuple[str, float], ...] = (("PCIe3", 10e9), ("PCIe4", 16e9), ("PCIe5", 22e9))
    """Link between the sockets of hosts with such slots: Intel Skylake, AMD, Intel Sapphire Rapids (NVIDIA/nccl@5067397
    src/graph/topo.h)."""
    ucx_rails: int = 2
    """RDMA ports that MPI uses between two ranks (default of UCX_MAX_RNDV_RAILS). NCCL uses all ports of a host."""


TRANSPORTS = TransportDefaults()


class RingLink(msgspec.Struct, frozen=True, kw_only=True):
    """The slowest link of a ring with its time curve, one direction between two hosts or two ranks of one host."""

    source: str
    target: str
    text: str
    """Such as `10 GbE`, or the narrowest part: `uplink of rack1, 800Gb/s`; empty if not described."""
    kind: LinkKind | None
    curve: Curve
    measured: bool
    gpudirect: bool | None = None
    """True if NICs read GPU memory; None if not described."""
    ports: int = 1
    """NICs that share the traffic of a host."""
    family: str = ""
    """The network by the names of its devices, such as `EFA`."""

    @property
    def name(self) -> str:
        """Such as `n1-n2, 10 GbE`."""
        return f"{self.source}-{self.target}" + (f", {self.text}" if self.text else "")

    @property
    def host(self) -> str:
        """The host of the source."""
        return self.source.partition(" ")[0]

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of large messages."""
        return self.curve.large_bytes_per_second

    @property
    def network_text(self) -> str:
        """The type of network, such as `Ethernet` or `8 ports of InfiniBand`; empty if unknown."""
        kinds: dict[LinkKind | None, str] = {"ethernet": "Ethernet", "infiniband": "InfiniBand", "roce": "RoCE"}
        text = self.family or kinds.get(self.kind, "")
        return f"{self.ports} ports of {text}" if self.ports > 1 and text else text


def slowest_between_hosts(topology: Topology | None, names: tuple[str, ...], *, gpus: bool) -> RingLink:
    """Find the slowest link of the ring through hosts.

    Args:
        topology: The cluster.
        names: The hosts in the order of the ring; one host stands for several of its kind.
        gpus: True for NCCL, False for Gloo.

    Raises:
        ConfigError: A link is neither described nor measured.
    """
    if topology is None:
        raise ConfigError(
            "the links between the hosts are unknown",
            hint="describe them in a topology file (--topology), or measure them: distrib-topo probe",
            code="network-unknown",
        )
    if len(names) == 1:
        names = names * 2
    slowest: RingLink | None = None
    for link, streams in _ring(topology, names, gpus):
        found = _ring_link(topology, link, streams)
        if slowest is None or found.bytes_per_second < slowest.bytes_per_second * (1 - EQUAL_RATE_TOLERANCE):
            slowest = found
    if slowest is None:
        raise ConfigError(
            f"no links join {len(names)} hosts", hint="describe their NICs in the topology file", code="network-unknown"
        )
    return slowest


def _ring(topology: Topology, names: tuple[str, ...], gpus: bool) -> Iterator[tuple[Link, float]]:
    """Yield each distinct link between neighbours, and the streams of the ring that share its narrowest uplink."""
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
        is_measured = source.lower() in measured and target.lower() in measured
        is_described = one is not None and other is not None
        edges.setdefault((one, other) if is_described and not is_measured else (source, target), (source, target))
    for source, target in edges.values():
        link = _used_direction(topology, source, target, gpus)
        if link is None:
            raise ConfigError(
                f"the link between {source} and {target} is unknown",
                hint="describe the NICs of both in the topology file, or measure it: distrib-topo probe",
                code="network-unknown",
            )
        passed = {switch.name for host in (source, target) for switch in topology.switches_above(host)}
        yield link, max((crossings[name] for name in passed if name in crossings), default=0)


def _used_direction(topology: Topology, host: str, following: str, gpus: bool) -> Link | None:
    """Return the direction that limits the ring, where both differ.

    Gloo sends from each rank to the one before it (pytorch/gloo allreduce.cc; measured with one slow direction). NCCL's trees use
    both directions, so the slower one counts.
    """
    link, back = link_between(topology, host, following), link_between(topology, following, host)
    if link is None or back is None:
        return link
    one, other = link.bandwidth_bytes_per_second, back.bandwidth_bytes_per_second
    if abs(one - other) <= EQUAL_RATE_TOLERANCE * max(one, other):
        return link
    return back if not gpus or other < one else link


def _ring_link(topology: Topology, link: Link, streams: float) -> RingLink:
    """Limit a link by the NICs that are used, by staging through host memory and by its uplinks."""
    bandwidth = link.bandwidth_bytes_per_second
    nics = len(link.nics)
    if link.kind == "ethernet" and nics > 1:  # the launcher binds Gloo and NCCL to one NIC
        bandwidth = max((one.bandwidth_bytes_per_second for one in link.measurements), default=bandwidth / nics)
    is_scaled = False
    transports = {one.transport for one in link.measurements}
    if link.kind in ("infiniband", "roce") and nics > TRANSPORTS.ucx_rails and transports == {"mpi"}:
        nominal = link.rate_bytes_per_second or float("inf")
        bandwidth = min(bandwidth * nics / TRANSPORTS.ucx_rails, UPLINK_USABLE_FRACTION * nominal)
        is_scaled = True
    uses_all = is_scaled or bandwidth == link.bandwidth_bytes_per_second
    narrowest, text = min(
        (bandwidth, link.text if uses_all else f"one of {link.text}"),
        (_staged_bandwidth(topology, link), f"{link.text} through host memory"),
        *_uplink_shares(topology, link, streams),
        key=lambda limit: limit[0],
    )
    latency = link.latency_seconds or 0.0
    curve = None
    if narrowest == bandwidth and len(link.measurements) == 1 and not is_scaled:
        curve = link_curve.measured_curve(link.measurements[0].curve, latency_seconds=latency, bandwidth=narrowest)
    return RingLink(
        source=link.source,
        target=link.target,
        text=text,
        kind=link.kind,
        curve=curve or link_curve.linear_curve(latency, narrowest),
        measured=link.origin == "measured",
        gpudirect=link.gpudirect,
        ports=nics if uses_all and nics else 1,
        family=family.name if (family := network_family(link.nics)) else "",
    )


def _staged_bandwidth(topology: Topology, link: Link) -> float:
    """Compute the bandwidth of GPU memory without GPUDirect RDMA, infinite with it.

    GPU to host memory and host memory to NIC share one PCIe link, so each gets half: 6 of 12 GB/s over 100 Gb/s InfiniBand
    (NVIDIA/nccl#465). The probe measured from host memory.
    """
    group = topology.group_of(link.source)
    if link.gpudirect is not False or not group or not group.gpus or not group.gpus.count:
        return float("inf")
    pcie = group.pcie_spec
    return max(1, len(link.nics)) * pcie.usable_bytes_per_second / 2 if pcie else float("inf")


def limited_by_slots(topology: Topology | None, network: RingLink, workload: Workload, ranks: int) -> RingLink:
    """Limit the link of a host to the PCIe slots of its GPUs and the NICs nearest to them.

    Args:
        topology: The cluster.
        network: The link between hosts.
        workload: One rank's step, with its device.
        ranks: The fewest ranks of a host, with one GPU each.
    """
    group = topology.group_of(network.source) if topology else None
    pcie = _slot(group, workload)
    if pcie is None:
        return network
    # Through host memory, a gradient crosses a slot twice.
    rate = ranks * pcie.usable_bytes_per_second / (2 if network.gpudirect is False else 1)
    slots = f"through {ranks} x {pcie.text}" if ranks > 1 else f"through {pcie.text}"
    nics = _nics_near(group, network.ports, ranks)
    if nics < network.ports and network.bytes_per_second * nics / network.ports < rate:
        rate, slots = network.bytes_per_second * nics / network.ports, f"by {nics} near {ranks} GPUs"
    if rate >= network.bytes_per_second:
        return network
    return msgspec.structs.replace(
        network,
        text=f"{network.text} {slots}" if network.text else slots,
        curve=network.curve.slower(network.bytes_per_second / rate),
    )


def slots_bandwidth(topology: Topology | None, network: RingLink, workload: Workload, ranks: int) -> float:
    """Compute the bandwidth between hosts that the PCIe slots of the GPUs carry with any network; infinite if unknown.

    Args:
        topology: The cluster.
        network: The link between hosts.
        workload: One rank's step, with its device.
        ranks: The fewest ranks of a host, with one GPU each.
    """
    pcie = _slot(topology.group_of(network.source) if topology else None, workload)
    return ranks * pcie.usable_bytes_per_second if pcie else math.inf


def _slot(group: NodeGroup | None, workload: Workload) -> LinkSpec | None:
    spec = find_gpu(workload.device)
    return (group.pcie_spec if group else None) or (parse_bus_link(spec.pcie) if spec and spec.pcie else None)


def _nics_near(group: NodeGroup | None, ports: int, ranks: int) -> int:
    """Count the NICs nearest to the GPUs of a job: NCCL uses no others (`ncclTopoSelectNets` in src/graph/search.cc)."""
    gpus = group.gpus.count if group and group.gpus else 0
    return min(ports, ranks * -(-ports // gpus)) if gpus else ports


def _uplink_shares(topology: Topology, link: Link, streams: float) -> list[tuple[float, str]]:
    """List the bandwidth that each passed uplink leaves to each of the ring's streams, with its description."""
    if not streams:
        return []
    shared = f" for {streams:g} streams" if streams > 1 else ""
    return [
        (
            uplink_rate(topology, switch) / streams,
            f"uplink of {switch.name}, {switch.uplink or switch.oversubscription}{shared}",
        )
        for switch in uplinks_between(topology, link.source, link.target)
    ]


def slowest_inside_host(topology: Topology | None, host: str, workload: Workload, ranks: int) -> RingLink:
    """Find the link between the ranks of a host.

    Args:
        topology: The cluster. None: not described.
        host: The host.
        workload: One rank's step, with its device.
        ranks: Ranks of the host.
    """
    group = topology.group_of(host) if topology else None
    if workload.device == "cpu":
        curve = link_curve.linear_curve(TRANSPORTS.loopback_latency_seconds, TRANSPORTS.loopback_bytes_per_second)
        return RingLink(source=host, target=host, text="loopback", kind=None, curve=curve, measured=False)
    if not group or not group.gpus:  # not described: as the catalogue has it
        spec = find_gpu(workload.device)
        nvlink = parse_bus_link(spec.nvlink) if spec and spec.nvlink and not (group and group.links) else None
        pcie = (group.pcie_spec if group else None) or (parse_bus_link(spec.pcie) if spec and spec.pcie else None)
    else:
        nvlink, pcie = group.nvlink_spec, group.pcie_spec
    if group and group.links:
        nvlink = _nvlink_of_job(group, ranks)
    is_mesh = bool(group and group.links and group.links.nvlink and not group.links.nvswitch)
    # In a mesh, copies between two GPUs say nothing of the rings through all.
    measured = _measured_ring(topology, host, max(2, ranks)) if topology and not is_mesh else None
    if measured and measured.path not in (None, "NVLink"):
        nvlink = None  # bridges between some GPUs only
    spec_used = nvlink or pcie or parse_bus_link("PCIe3 x16")
    bandwidth = spec_used.usable_bytes_per_second
    if nvlink:
        lane = NCCL_NVLINK_BYTES_PER_SECOND.get(nvlink.model.name)
        bandwidth = nvlink.lanes * lane if lane else nvlink.usable_bytes_per_second
    text, kind = spec_used.text, spec_used.kind
    gpu = group.gpus.spec if group and group.gpus else find_gpu(workload.device)
    if gpu and gpu.peer_bandwidth_bytes_per_second and not nvlink and not measured:
        text, kind, bandwidth = "Infinity Fabric", "nvlink", gpu.peer_bandwidth_bytes_per_second.value
    elif not nvlink:
        bandwidth, text = min(_bus_limits(group, gpu, spec_used, ranks))
    if measured:
        own = measured.bandwidth_bytes_per_second
        bandwidth = min(bandwidth, own) if nvlink else own
    return RingLink(
        source=f"{host} {measured.source if measured else 'gpu0'}",
        target=measured.target if measured else "gpu1",
        text=text,
        kind=kind,
        curve=link_curve.linear_curve(spec_used.latency_seconds, bandwidth),
        measured=measured is not None,
    )


def _bus_limits(
    group: NodeGroup | None, gpu: GpuSpec | None, pcie: LinkSpec, ranks: int
) -> Iterator[tuple[float, str]]:
    """Yield the limits of a ring over PCIe: the slot, copies through host memory, and the link between sockets."""
    yield pcie.usable_bytes_per_second, pcie.text
    described = group.links.peer_to_peer if group and group.links else None
    if not (described if described is not None else gpu is None or gpu.peer_to_peer):
        copied = min(TRANSPORTS.host_copy_bytes_per_second, pcie.usable_bytes_per_second)
        yield copied, f"{pcie.text} through host memory"
    if group and group.gpus and group.sockets and ranks * group.sockets > group.gpus.count and group.sockets > 1:
        between = dict(TRANSPORTS.socket_bytes_per_second).get(pcie.model.name)
        if between:
            yield between, f"{pcie.text} across sockets"


def _measured_ring(topology: Topology, host: str, ranks: int) -> Link | None:
    """Find the slowest link of the best measured ring through a host's first GPUs; None if measurements do not join them."""
    if not topology.measured or all(link.host.lower() != host.lower() for link in topology.measured.inside):
        return None
    group = topology.group_of(host)
    count = min(ranks, group.gpus.count) if group and group.gpus else ranks
    joined = [{gpu} for gpu in range(count)]
    pairs = itertools.combinations(range(count), 2)
    found = [intra_node_link(topology, host, f"gpu{one}", f"gpu{other}") for one, other in pairs]
    links = [link for link in found if link and link.origin == "measured"]
    for link in sorted(links, key=lambda link: link.bandwidth_bytes_per_second, reverse=True):
        one, other = (next(each for each in joined if int(end[3:]) in each) for end in (link.source, link.target))
        if one is not other:
            joined = [each for each in joined if each is not one and each is not other] + [one | other]
            if len(joined) == 1:
                return link
    return None


def _nvlink_of_job(group: NodeGroup, ranks: int) -> LinkSpec | None:
    """Return the NVLinks from one GPU to the job's others on its host; None if they do not reach all of them.

    NCCL lays several rings through a mesh, so that all links of a GPU carry a part.
    """
    links, nvlink = group.links, group.nvlink_spec
    if not links or not nvlink:
        return None
    if links.nvswitch:
        return nvlink
    count = group.gpus.count if group.gpus else ranks
    used = range(min(ranks, count))
    joined = {a: {b for b in used if links.links_of_pair(a, b, count)} for a in used}
    reached, new = {0}, {0}
    while new:
        new = {b for a in new for b in joined[a]} - reached
        reached |= new
    if len(reached) < len(used):
        return None
    fewest = min(sum(links.links_of_pair(a, b, count) for b in used) for a in used)
    return nvlink.with_lanes(max(1, fewest))
