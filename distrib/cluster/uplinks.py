"""Uplinks of switches: the switches between two hosts, their rates and their oversubscription."""

from __future__ import annotations

from distrib import units
from distrib.cluster.data_nics import data_nics, total_rate_of_nics
from distrib.cluster.link_spec import parse_uplink_rate
from distrib.cluster.topology import Switch, Topology

UPLINK_USABLE_FRACTION = 0.95
"""Usable fraction of an uplink's rate: the catalogue's figure for InfiniBand, and for Ethernet that one host can fill."""


def switches_between(topology: Topology, source: str, target: str) -> tuple[Switch, ...]:
    """List the switches on the path between two hosts.

    Args:
        topology: The cluster.
        source: A host.
        target: Another host.

    Returns:
        Switches up from the source and down to the target, empty if not described.
    """
    up, down = topology.switches_above(source), topology.switches_above(target)
    names_up, names_down = {switch.name for switch in up}, {switch.name for switch in down}
    rising = [switch for switch in up if switch.name not in names_down]
    top = [switch for switch in up if switch.name in names_down][:1]
    falling = [switch for switch in down if switch.name not in names_up]
    return (*rising, *top, *reversed(falling))


def uplinks_between(topology: Topology, source: str, target: str) -> tuple[Switch, ...]:
    """List the switches whose uplinks are on the path: all but the one above both hosts.

    Args:
        topology: The cluster.
        source: A host.
        target: Another host.
    """
    above = [{switch.name for switch in topology.switches_above(host)} for host in (source, target)]
    return tuple(
        switch
        for switch in switches_between(topology, source, target)
        if not all(switch.name in names for names in above)
    )


def path_oversubscription(topology: Topology, source: str, target: str) -> float:
    """Multiply the oversubscription of the uplinks on a path, the worse of both directions.

    Args:
        topology: The cluster.
        source: A host.
        target: Another host.

    Returns:
        The ratio, 1 or more.
    """
    worst = 1.0
    for first, second in ((source, target), (target, source)):
        shared = {switch.name for switch in topology.switches_above(second)}
        product = 1.0
        for switch in topology.switches_above(first):
            if switch.name in shared:
                break
            product *= switch_oversubscription(topology, switch)
        worst = max(worst, product)
    return worst


def switch_oversubscription(topology: Topology, switch: Switch) -> float:
    """Compute the rate below a switch against the rate of its uplink.

    Args:
        topology: The cluster.
        switch: One of its switches.

    Returns:
        The ratio, 1 if not described.
    """

    def make() -> float:
        if switch.oversubscription is not None:
            return units.parse_ratio(switch.oversubscription)
        if switch.uplink is None:
            return 1.0
        return max(1.0, rate_below(topology, switch) / parse_uplink_rate(switch.uplink))

    return topology.cached(("oversubscription", switch.name), make)


def uplink_rate(topology: Topology, switch: Switch) -> float:
    """Compute the usable rate of a switch's uplink.

    Args:
        topology: The cluster.
        switch: One of its switches.

    Returns:
        Bytes per second; infinite if not described or not oversubscribed.
    """
    ratio = switch_oversubscription(topology, switch)
    usable = UPLINK_USABLE_FRACTION if ratio > 1 else 1.0  # an uplink as wide as the links below is no bottleneck
    if switch.uplink is not None:
        return usable * parse_uplink_rate(switch.uplink)
    below = rate_below(topology, switch)
    return usable * below / ratio if ratio > 1 and below else float("inf")


def rate_below(topology: Topology, switch: Switch) -> float:
    """Add the nominal bytes per second at which the hosts and switches below a switch can send up.

    Args:
        topology: The cluster.
        switch: One of its switches.
    """
    by_name = {each.name: each for each in topology.switches}
    total = sum(total_rate_of_nics(data_nics(topology.nics_of(host))) for host in switch.host_names)
    for name in switch.switches:
        below = by_name[name]
        rate = rate_below(topology, below)
        if below.uplink is not None:  # it may be wider than what its hosts send
            total += min(parse_uplink_rate(below.uplink), rate or float("inf"))
        else:
            total += rate / switch_oversubscription(topology, below)
    return total
