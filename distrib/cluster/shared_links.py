"""Shared links: find the hosts behind a link that is too narrow for all of them at once.

Pairs that are slower together than alone share a link. The side of each host is found by moving one end of a stream: while other
pairs keep the link full, only streams across it are slowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from distrib.cluster.measurements import LinkMeasurement

Pair = tuple[int, int]
"""Source and target, by index."""
Round = tuple[Pair, ...]
"""Disjoint pairs that are measured at once."""
Rates = Mapping[Pair, float]
Run = Callable[[str, Round], Rates]
"""Measures a round and returns the fraction of its own rate that each pair reached."""

SLOWED = 0.85
"""A pair below this fraction of its own rate while others send is slowed by them. Repeated measurements differ by less than 10 %."""


class SharedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that all streams from `left` to `right` share; hosts by index."""

    left: tuple[int, ...]
    right: tuple[int, ...]


def slowed_pairs(rates: Rates) -> list[Pair]:
    """Select the pairs of a round that slow each other down.

    Args:
        rates: The fraction of its own rate that each pair reached.

    Returns:
        The pairs, slowest first; none if only one is slow, which proves nothing.
    """
    found = sorted((pair for pair, part in rates.items() if part < SLOWED), key=lambda pair: rates[pair])
    return found if len(found) > 1 else []


def find_sides(load: Round, run: Run, others: tuple[int, ...] = ()) -> SharedLink | None:
    """Sort hosts to the two sides of a shared link.

    Each host is tried as the source of a stream to the first pair's target while the other pairs keep the link full.

    Args:
        load: Pairs that slow each other down.
        run: Measures a round. Its first argument names the purpose.
        others: More hosts to sort.

    Returns:
        The link, None if the measurements contradict a single shared link.
    """
    if len(load) < 2:
        return None
    first, target = load[0]
    near, far = [first], [target]
    for number, pair in enumerate(load[1:], 1):
        rest = tuple(other for place, other in enumerate(load) if place not in (0, number))
        is_across = {}
        for host, other in (pair, pair[::-1]):
            full = rest or ((first, other),)  # of two pairs, none remains to keep the link full
            is_across[host] = run("sides", (*full, (host, target)))[host, target] < SLOWED
        if sum(is_across.values()) != 1:
            return None
        for host, across in is_across.items():
            (near if across else far).append(host)
    for host in others:
        across = run("sides", (*load[1:], (host, target)))[host, target] < SLOWED
        (near if across else far).append(host)
    near, far = sorted(near), sorted(far)
    count = min(len(near), len(far))
    phase = tuple(zip(near[:count], far[:count], strict=True))
    parts = run("crossing", phase)
    # Together they must be slowed as each of them was.
    return SharedLink(left=tuple(near), right=tuple(far)) if sum(parts.values()) < SLOWED * count else None


def groups_of(hosts: Sequence[str], slowed: Collection[frozenset[str]]) -> list[tuple[str, ...]]:
    """Group hosts so that hardly any pair inside a group was slowed by others.

    Args:
        hosts: Host names.
        slowed: The slowed pairs among all pairs, each measured beside others.

    Returns:
        The groups, hosts in the given order.
    """
    near = {host: {other for pair in slowed if host in pair for other in pair} - {host} for host in hosts}
    group = {host: number for number, host in enumerate(hosts)}
    members = {number: [host] for number, host in enumerate(hosts)}
    between: dict[int, dict[int, int]] = {
        number: {group[other]: 1 for other in near[host] if other in group} for number, host in enumerate(hosts)
    }
    """Slowed pairs from one group to another."""

    def similarity(pair: tuple[str, str]) -> float:
        one, other = (near[host] for host in pair)
        both = len(one & other)
        return both / max(1, len(one) + len(other) - both)

    for a, b in sorted(itertools.combinations(hosts, 2), key=similarity, reverse=True):
        one, other = group[a], group[b]
        # Groups are joined although up to 40 % of the pairs between them are slowed: something else may have slowed those.
        if one == other or between[one].get(other, 0) > 0.4 * len(members[one]) * len(members[other]):
            continue
        for host in members[other]:
            group[host] = one
        members[one] += members.pop(other)
        for third, count in between.pop(other).items():
            between[third].pop(other)
            if third != one:
                between[one][third] = between[third][one] = between[one].get(third, 0) + count
    return [tuple(sorted(each, key=hosts.index)) for each in members.values()]


def rates_alone(pairs: Iterable[LinkMeasurement]) -> dict[tuple[str, str, str], float]:
    """Estimate the rates of pairs that were only measured together and slowed by each other.

    The estimate is the minimum of what both hosts reached, and of the best single pair that leaves either group.

    Args:
        pairs: Measurements in one direction, `alone` and `together`.

    Returns:
        Bytes per second by source, target and transport; pairs without an estimate are missing.
    """
    found: dict[tuple[str, str, str], float] = {}
    every = list(pairs)
    for transport in {pair.transport for pair in every}:
        mine = [pair for pair in every if pair.transport == transport]
        own: dict[str, float] = {}
        alone: dict[frozenset[str], float] = {}
        for pair in mine:
            for host in (pair.source, pair.target):
                own[host] = max(own.get(host, 0.0), pair.bandwidth_bytes_per_second)
            if pair.load == "alone":
                ends = frozenset((pair.source, pair.target))
                alone[ends] = max(alone.get(ends, 0.0), pair.bandwidth_bytes_per_second)
        slowed: list[LinkMeasurement] = []
        for pair in mine:
            by_itself = alone.get(frozenset((pair.source, pair.target))) or min(own[pair.source], own[pair.target])
            if pair.load == "together" and pair.bandwidth_bytes_per_second < SLOWED * by_itself:
                slowed.append(pair)
        if not slowed:
            continue
        groups = groups_of(list(own), {frozenset((pair.source, pair.target)) for pair in slowed})
        of = {host: number for number, group in enumerate(groups) for host in group}
        leaving: dict[int, float] = {}
        for ends, rate in alone.items():
            sides = {of[host] for host in ends}
            for side in sides if len(sides) > 1 else ():
                leaving[side] = max(leaving.get(side, 0.0), rate)
        for pair in slowed:
            if frozenset((pair.source, pair.target)) not in alone and of[pair.source] != of[pair.target]:
                rates = (min(own[host], leaving.get(of[host], 0.0)) for host in (pair.source, pair.target))
                found[pair.source, pair.target, transport] = min(rates)
    return found
