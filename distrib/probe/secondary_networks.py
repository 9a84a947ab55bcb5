"""The networks between the hosts besides the one that the job uses: cards of their own, measured each in turn. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

import msgspec

from distrib.probe.records import Facts, PairMeasurement

CARDS = frozenset({"physical", "bond", "team", "vlan", "ipoib", "veth", "macvlan", "ipvlan", "unknown"})
"""Kinds of interfaces that may lead to another host; tunnels, and bridges without a card in them, do not."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A network, by its subnet. `cards`: by host, the interface that is in it and its address."""

    name: str
    cards: dict[str, tuple[str, str]]


def other_networks(facts: Sequence[Facts]) -> tuple[Network, ...]:
    """The networks that two hosts or more are in, each with an address of its own, without the one of the job."""
    used = {subnet for each in facts for name, _, subnet in _addresses(each) if name == each.interface}
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for each in facts:
        for name, address, subnet in _addresses(each):
            if subnet not in used and name != each.interface:
                found.setdefault(subnet, {}).setdefault(each.host, (name, address))
    return tuple(
        Network(name=subnet, cards=cards)
        for subnet, cards in sorted(found.items())
        # docker0 and its like have one address on all hosts
        if len(cards) > 1 and len({address for _, address in cards.values()}) == len(cards)
    )


def measured_nics(seen: Sequence[PairMeasurement], facts: Mapping[str, Facts]) -> dict[str, dict[str, str]]:
    """By network and host, the cards that were measured there, the job's own network left out.

    Records name the source's card, and `--quick` has some hosts as targets only.
    """
    known = {network.name: network.cards for network in other_networks(tuple(facts.values()))}
    found: dict[str, dict[str, str]] = {}
    for record in seen:
        if record.network is None:
            continue
        cards = found.setdefault(record.network, {})
        for host in (record.source, record.target):
            if card := known.get(record.network, {}).get(host):
                cards[host] = card[0]
        if record.interface:
            cards[record.source] = record.interface
    return found


def own_addresses(facts: Facts) -> tuple[str, ...]:
    """The addresses of a host's cards, that of the job left out."""
    return tuple(address for _, address, _ in _addresses(facts) if address != facts.address)


def _addresses(facts: Facts) -> list[tuple[str, str, str]]:
    """Interface, address and subnet of each IPv4 address of a card that is up."""
    found = []
    for interface in facts.interfaces:
        leads_out = interface.up and (interface.kind in CARDS or interface.cards)
        for text in interface.addresses if leads_out else ():
            address = ipaddress.ip_interface(text)
            if address.version == 4 and not (address.ip.is_loopback or address.ip.is_link_local):
                found.append((interface.name, str(address.ip), str(address.network)))
    return found
