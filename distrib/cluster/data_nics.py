"""NICs for training: the fastest fabric of a host, and of two hosts together."""

from __future__ import annotations

from collections.abc import Iterable

from distrib.cluster.hardware_catalog import LinkKind
from distrib.cluster.node import Nic
from distrib.cluster.topology import Topology

_FABRICS: dict[LinkKind, str] = {"infiniband": "InfiniBand", "roce": "Ethernet", "ethernet": "Ethernet"}


def data_nics(nics: Iterable[Nic]) -> tuple[Nic, ...]:
    """Select the NICs for training: those of the fastest fabric, and there the fastest ones.

    A server with eight InfiniBand ports has a few Ethernet ports for management, too.

    Args:
        nics: The NICs of a host.
    """
    best: tuple[Nic, ...] = ()
    all_nics = tuple(nics)
    for fabric in set(_FABRICS.values()):
        of_fabric = [nic for nic in all_nics if _FABRICS[nic.link.kind] == fabric]
        top = max((nic.link.rate_bytes_per_second for nic in of_fabric), default=0.0)
        chosen = tuple(nic for nic in of_fabric if nic.link.rate_bytes_per_second == top)
        # By usable bandwidth: 100 GbE without RDMA carries less than EDR.
        if usable_bandwidth(chosen) > usable_bandwidth(best):
            best = chosen
    return best


def common_nics(topology: Topology, source: str, target: str) -> tuple[tuple[Nic, ...], tuple[Nic, ...]]:
    """Select the NICs of two hosts in the best fabric that both have.

    Args:
        topology: The cluster.
        source: A host.
        target: Another host.

    Returns:
        The NICs of either host, both empty without a common fabric.
    """
    found: tuple[tuple[Nic, ...], tuple[Nic, ...]] = ((), ())
    for fabric in sorted(set(_FABRICS.values())):
        ends = tuple(
            data_nics(nic for nic in topology.nics_of(host) if _FABRICS[nic.link.kind] == fabric)
            for host in (source, target)
        )
        if all(ends) and min(map(usable_bandwidth, ends)) > min(map(usable_bandwidth, found)):
            found = (ends[0], ends[1])
    return found


def nics_text(nics: Iterable[Nic]) -> str:
    """Describe equal NICs: `8 x HDR`, `RoCE 100Gb/s`, `10 GbE`.

    Args:
        nics: NICs of one kind.

    Returns:
        The description, empty without NICs.
    """
    equal = tuple(nics)
    if not equal:
        return ""
    link = equal[0].link
    is_bare_rate = link.text[:1].isdigit() and link.text.endswith("/s")
    names = {"roce": "RoCE "} | ({"infiniband": "InfiniBand ", "ethernet": "Ethernet "} if is_bare_rate else {})
    return (f"{len(equal)} x " if len(equal) > 1 else "") + names.get(link.kind, "") + link.text


def total_rate_of_nics(nics: Iterable[Nic]) -> float:
    """Add the nominal rates of NICs, in bytes per second.

    Args:
        nics: The NICs.
    """
    return sum(nic.link.rate_bytes_per_second for nic in nics)


def usable_bandwidth(nics: Iterable[Nic]) -> float:
    """Add the usable bytes per second of NICs, each limited by its PCIe slot.

    Args:
        nics: The NICs.
    """
    slots = ((nic.link, nic.slot.usable_bytes_per_second if nic.slot else float("inf")) for nic in nics)
    return sum(min(link.usable_bytes_per_second, slot) for link, slot in slots)
