"""Secondary networks: NICs of the hosts besides those of the job, found by their subnets."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from distrib.probe.records import HostFacts

NIC_KINDS = frozenset({"physical", "bond", "team", "vlan", "ipoib", "veth", "macvlan", "ipvlan", "unknown"})
"""Kinds of interfaces that may reach another host. Tunnels, and bridges without a NIC, do not."""


class SecondaryNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet, and by host the NIC and its address in it."""

    name: str
    nics: dict[str, tuple[str, str]]


def other_networks(facts: Sequence[HostFacts]) -> tuple[SecondaryNetwork, ...]:
    """Find the subnets of two hosts or more, without that of the job.

    Args:
        facts: The hosts' reports.
    """
    used = {subnet for each in facts for name, _, subnet in _addresses(each) if name == each.interface}
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for each in facts:
        for name, address, subnet in _addresses(each):
            if subnet not in used and name != each.interface:
                found.setdefault(subnet, {}).setdefault(each.host, (name, address))
    return tuple(
        SecondaryNetwork(name=subnet, nics=nics)
        for subnet, nics in sorted(found.items())
        # docker0 and similar bridges have one address on all hosts
        if len(nics) > 1 and len({address for _, address in nics.values()}) == len(nics)
    )


def secondary_addresses(facts: HostFacts) -> tuple[str, ...]:
    """List the addresses of a host's NICs, without that of the job.

    Args:
        facts: The host's report.
    """
    return tuple(address for _, address, _ in _addresses(facts) if address != facts.address)


def _addresses(facts: HostFacts) -> Iterator[tuple[str, str, str]]:
    """Yield interface, address and subnet of each IPv4 address of an active NIC."""
    for interface in facts.interfaces:
        if not interface.up or not (interface.kind in NIC_KINDS or interface.cards):
            continue
        for text in interface.addresses:
            address = ipaddress.ip_interface(text)
            if address.version == 4 and not (address.ip.is_loopback or address.ip.is_link_local):
                yield interface.name, str(address.ip), str(address.network)
