"""Effective links: between two hosts, and between two ends inside one. A measurement takes precedence over the catalogue.

Rates are of one direction, in bytes per second. `rate` is nominal; `bandwidth` is reached by large transfers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from distrib.cluster.data_nics import common_nics, nics_text, total_rate_of_nics, usable_bandwidth
from distrib.cluster.hardware_catalog import LinkKind
from distrib.cluster.link_spec import LinkSpec
from distrib.cluster.measurements import IntraNodeLinkMeasurement, LinkMeasurement
from distrib.cluster.node import NodeGroup
from distrib.cluster.shared_links import rates_alone
from distrib.cluster.topology import Topology
from distrib.cluster.uplinks import UPLINK_USABLE_FRACTION, path_oversubscription, switches_between

Origin = Literal["measured", "catalogued"]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An effective link from `source` to `target`: hosts, or `memory` and `gpuN` inside `host`."""

    source: str
    target: str
    host: str | None = None
    """The host of an intra-node link; None for a link between hosts."""
    kind: LinkKind | None = None
    text: str
    """Such as `8 x HDR`, `NVLink3 x12` or `memory`; empty if the topology describes no NICs of one fabric."""
    rate_bytes_per_second: float | None
    """Nominal; None if unknown."""
    bandwidth_bytes_per_second: float
    latency_seconds: float | None
    origin: Origin
    nics: tuple[str, ...] = ()
    """The NICs of the source that carry the traffic, all at once."""
    gpudirect: bool | None = None
    """True if the NICs of both hosts use GPUDirect RDMA; None if not described."""
    oversubscription: float = 1.0
    """The rate of the hosts below the passed switches against the rate of their uplinks."""
    switches: tuple[str, ...] = ()
    measurements: tuple[LinkMeasurement, ...] = ()
    """One measurement per interface of a link between hosts."""
    path: str | None = None
    """The measured path inside a host, such as `NVLink`."""

    @property
    def shared_bandwidth_bytes_per_second(self) -> float:
        """The bandwidth left for one host when all hosts below its switches send through them."""
        rate = self.rate_bytes_per_second
        share = UPLINK_USABLE_FRACTION * rate if rate else self.bandwidth_bytes_per_second
        return min(self.bandwidth_bytes_per_second, share / self.oversubscription)


def link_between(topology: Topology, source: str, target: str) -> Link | None:
    """Find the link from one host to another.

    Args:
        topology: The cluster.
        source: A host.
        target: Another host.

    Returns:
        The link, None if it is neither described nor measured.
    """
    measurements = _best_measurements(topology, source, target)
    described = _described_link(topology, source, target)
    if not measurements and described is None:
        return None
    link = described or Link(
        source=source, target=target, text="", rate_bytes_per_second=None, bandwidth_bytes_per_second=0.0,
        latency_seconds=None, origin="catalogued",
    )  # fmt: skip
    if measurements:
        latencies = [one.latency_seconds for one in measurements if one.latency_seconds is not None]
        link = msgspec.structs.replace(
            link,
            bandwidth_bytes_per_second=sum(one.bandwidth_bytes_per_second for one in measurements),
            latency_seconds=min(latencies, default=link.latency_seconds),
            origin="measured",
            measurements=measurements,
        )
        if described and all(_used_other_nics(one, described) for one in measurements):
            text = f"TCP on {measurements[0].interface}"
            link = msgspec.structs.replace(link, text=text, rate_bytes_per_second=None)
    return msgspec.structs.replace(
        link,
        source=source,
        target=target,
        oversubscription=path_oversubscription(topology, source, target),
        switches=tuple(switch.name for switch in switches_between(topology, source, target)),
    )


def intra_node_link(topology: Topology, host: str, source: str, target: str) -> Link | None:
    """Find the link between two ends inside a host.

    Args:
        topology: The cluster.
        host: The host.
        source: `memory` or `gpuN`.
        target: `memory` or `gpuN`.

    Returns:
        The link, None if it is neither described nor measured.
    """
    measurement = _intra_node_measurement(topology, host, source, target)
    group = topology.group_of(host)
    spec = _intra_node_spec(group, source, target) if group else None
    if measurement is None and spec is None:
        return None
    text, rate = (spec.text, spec.rate_bytes_per_second) if spec else ("", None)
    if measurement and measurement.path:
        is_nvlink = measurement.path == "NVLink"
        if is_nvlink != text.startswith("NVLink"):  # another link than the described one
            rate = None
        text = text if is_nvlink and rate else measurement.path  # the probe does not know the number of links
    usable = spec.usable_bytes_per_second if spec else 0.0
    return Link(
        host=host,
        source=source,
        target=target,
        kind=spec.kind if spec else None,
        text=text or "memory",
        rate_bytes_per_second=rate,
        bandwidth_bytes_per_second=measurement.bandwidth_bytes_per_second if measurement else usable,
        latency_seconds=spec.latency_seconds if spec else None,
        origin="measured" if measurement else "catalogued",
        path=measurement.path if measurement else None,
    )


def _intra_node_spec(group: NodeGroup, source: str, target: str) -> LinkSpec | None:
    """Return the described link between two ends; NVLink between GPUs that have it, else PCIe."""
    ends = [int(end.removeprefix("gpu")) for end in (source, target) if end.startswith("gpu")]
    count = group.gpus.count if group.gpus else 0
    if not ends or max(ends) >= count:
        return None
    if len(ends) == 2 and ends[0] != ends[1]:
        nvlink = group.nvlink_spec
        lanes = group.links.links_of_pair(ends[0], ends[1], count) if nvlink and group.links else 0
        if nvlink and (lanes or group.links is None):
            return nvlink.with_lanes(lanes) if group.links else nvlink
    return group.pcie_spec


def _described_link(topology: Topology, source: str, target: str) -> Link | None:
    """Build the link from the described NICs; None without a common fabric."""

    def make() -> Link | None:
        nics, other = common_nics(topology, source, target)
        if not nics:
            return None
        # RoCE falls back to plain Ethernet with an Ethernet NIC.
        plain = [end for end in (nics, other) if end[0].link.kind == "ethernet"]
        slower = min(plain or [nics, other], key=total_rate_of_nics)
        gpudirect = [nic.gpudirect for nic in (*nics, *other)]
        return Link(
            source=source,
            target=target,
            kind=slower[0].link.kind,
            text=nics_text(slower),
            nics=tuple(nic.name for nic in nics),
            gpudirect=None if None in gpudirect else all(gpudirect),
            rate_bytes_per_second=min(total_rate_of_nics(nics), total_rate_of_nics(other)),
            bandwidth_bytes_per_second=min(usable_bandwidth(nics), usable_bandwidth(other)),
            latency_seconds=slower[0].latency_seconds,
            origin="catalogued",
        )

    # The same for all hosts of two groups.
    return topology.cached(("described", *(id(topology.group_of(host)) for host in (source, target))), make)


def _intra_node_measurement(topology: Topology, host: str, source: str, target: str) -> IntraNodeLinkMeasurement | None:
    def make() -> dict[tuple[str, str, str], IntraNodeLinkMeasurement]:
        links = topology.measured.inside if topology.measured else ()
        return {(link.host.lower(), link.source, link.target): link for link in reversed(links)}

    links = topology.cached("intra-node", make)
    # The other direction is a better estimate than a data sheet.
    return links.get((host.lower(), source, target)) or links.get((host.lower(), target, source))


def _best_measurements(topology: Topology, source: str, target: str) -> tuple[LinkMeasurement, ...]:
    """Return the best measurement of each interface; interfaces carry traffic side by side."""
    for ends in ((source.lower(), target.lower()), (target.lower(), source.lower())):
        best: dict[str | None, LinkMeasurement] = {}
        for pair in _measured_pairs(topology).get(ends, ()):
            before = best.get(pair.interface)
            if before is None or pair.bandwidth_bytes_per_second > before.bandwidth_bytes_per_second:
                best[pair.interface] = pair
        if None in best:  # measured as the job's own traffic goes
            return (best[None],)
        if best:
            return tuple(best.values())
    return ()


def _measured_pairs(topology: Topology) -> dict[tuple[str, str], list[LinkMeasurement]]:
    """Map two hosts to one-way measurements on the job's network; measured alone, else an estimate from loaded rounds."""

    def make() -> dict[tuple[str, str], list[LinkMeasurement]]:
        pairs = topology.measured.pairs if topology.measured else ()
        one_way = [pair for pair in pairs if not pair.both_ways and pair.network is None]
        found: dict[tuple[str, str], list[LinkMeasurement]] = {}
        for load in ("alone", "together"):
            before = set(found)
            for pair in one_way:
                ends = pair.source.lower(), pair.target.lower()
                if pair.load == load and not {ends, ends[::-1]} & before:
                    found.setdefault(ends, []).append(pair)
        estimates = rates_alone(one_way)
        for ends, of_pair in found.items():
            for number, pair in enumerate(of_pair):
                rate = estimates.get((pair.source, pair.target, pair.transport), 0.0)
                if rate > pair.bandwidth_bytes_per_second:
                    found[ends][number] = msgspec.structs.replace(pair, bandwidth_bytes_per_second=rate, curve=())
        return found

    return topology.cached("pairs", make)


def _used_other_nics(measurement: LinkMeasurement, described: Link) -> bool:
    """Test if MPI could not use the described RDMA NICs and another interface was measured."""
    is_tcp = described.kind == "infiniband" and measurement.transport == "tcp"
    return is_tcp and measurement.interface not in (None, *described.nics)
