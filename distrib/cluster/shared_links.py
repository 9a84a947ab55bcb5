"""Which hosts stand together behind a link that they share, by which pairs slow each other down; and what they get without the others. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from distrib.cluster.measurements import PairLink

SLOWED = 0.85
"""A pair that reaches less of its own rate when others send too is slowed by them."""

STRAY = 0.4
"""So large a part of the pairs between two groups may be slowed by something else, and they are one group."""


def groups_of(hosts: Sequence[str], slowed: Collection[frozenset[str]]) -> list[tuple[str, ...]]:
    """Sort hosts into groups inside which hardly any pair was slowed by others, those first that are slowed with the same hosts.

    `slowed`: of all pairs, each measured beside others.
    """
    near = {host: {other for pair in slowed if host in pair for other in pair} - {host} for host in hosts}
    group = {host: number for number, host in enumerate(hosts)}
    members = {number: [host] for number, host in enumerate(hosts)}
    between: dict[int, dict[int, int]] = {
        number: {group[other]: 1 for other in near[host] if other in group} for number, host in enumerate(hosts)
    }
    """How many slowed pairs there are from a group to another."""

    def alike(pair: tuple[str, str]) -> float:
        one, other = (near[host] for host in pair)
        both = len(one & other)
        return both / max(1, len(one) + len(other) - both)

    for a, b in sorted(itertools.combinations(hosts, 2), key=alike, reverse=True):
        one, other = group[a], group[b]
        # Something else may have slowed one of many.
        if one == other or between[one].get(other, 0) > STRAY * len(members[one]) * len(members[other]):
            continue
        for host in members[other]:
            group[host] = one
        members[one] += members.pop(other)
        for third, count in between.pop(other).items():
            between[third].pop(other)
            if third != one:
                between[one][third] = between[third][one] = between[one].get(third, 0) + count
    return [tuple(sorted(each, key=hosts.index)) for each in members.values()]


def rates_alone(pairs: Iterable[PairLink]) -> dict[tuple[str, str, str], float]:
    """What pairs may reach alone that others slowed down and that never were alone, by source, target and way.

    That is what both hosts reach, but no more than any pair reached alone that leaves the group of either. Nothing is said
    where no such pair was measured. `pairs`: all that was measured one way, alone and `together`.
    """
    found: dict[tuple[str, str, str], float] = {}
    every = list(pairs)
    for way in {pair.way for pair in every}:
        mine = [pair for pair in every if pair.way == way]
        own: dict[str, float] = {}
        alone: dict[frozenset[str], float] = {}
        for pair in mine:
            for host in (pair.source, pair.target):
                own[host] = max(own.get(host, 0.0), pair.bandwidth_bytes_per_second)
            if pair.load == "alone":
                ends = frozenset((pair.source, pair.target))
                alone[ends] = max(alone.get(ends, 0.0), pair.bandwidth_bytes_per_second)
        slowed: list[PairLink] = []
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
                found[pair.source, pair.target, way] = min(rates)
    return found
