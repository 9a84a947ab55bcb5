"""Which hosts stand together behind a link that they share, by which pairs slow each other down; and what they get without the others. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from distrib.cluster.measured import PairLink

SLOWED = 0.85
"""A pair that reaches less of its own rate when others send too is slowed by them."""

STRAY = 0.4
"""So large a part of the pairs between two groups may be slowed by something else, and they are one group."""


def groups_of(hosts: Sequence[str], slowed: Collection[frozenset[str]]) -> list[tuple[str, ...]]:
    """Sort hosts into groups inside which hardly any pair was slowed by others, those first that are slowed with the same hosts."""
    near = {host: {other for pair in slowed if host in pair for other in pair} - {host} for host in hosts}
    group = {host: [host] for host in hosts}

    def alike(pair: tuple[str, str]) -> float:
        one, other = (near[host] for host in pair)
        return len(one & other) / max(1, len(one | other))

    for a, b in sorted(itertools.combinations(hosts, 2), key=alike, reverse=True):
        one, other = group[a], group[b]
        if one is other:
            continue
        # Something else may have slowed one of many.
        if sum(y in near[x] for x in one for y in other) > STRAY * len(one) * len(other):
            continue
        one += other
        for host in other:
            group[host] = one
    return [tuple(sorted(each, key=hosts.index)) for each in {id(each): each for each in group.values()}.values()]


def rates_alone(pairs: Iterable[PairLink]) -> dict[tuple[str, str, str], float]:
    """What pairs may reach alone that others slowed down and that never were alone, by source, target and way.

    That is what both hosts reach, but no more than any pair reached alone that leaves the group of either. Nothing is said
    where no such pair was measured. `pairs`: one way, alone and `together`.
    """
    found: dict[tuple[str, str, str], float] = {}
    every = list(pairs)
    for way in {pair.way for pair in every}:
        mine = [pair for pair in every if pair.way == way]
        own: dict[str, float] = {}
        for pair in mine:
            for host in (pair.source, pair.target):
                own[host] = max(own.get(host, 0.0), pair.bandwidth_bytes_per_second)
        slowed = [
            pair
            for pair in mine
            if pair.load != "alone"
            and pair.bandwidth_bytes_per_second < SLOWED * min(own[pair.source], own[pair.target])
        ]
        if not slowed:
            continue
        groups = groups_of(list(own), {frozenset((pair.source, pair.target)) for pair in slowed})
        of = {host: number for number, group in enumerate(groups) for host in group}
        leaving: dict[int, float] = {}
        for pair in mine:
            if pair.load == "alone" and of[pair.source] != of[pair.target]:
                for host in (pair.source, pair.target):
                    leaving[of[host]] = max(leaving.get(of[host], 0.0), pair.bandwidth_bytes_per_second)
        for pair in slowed:
            ends = pair.source, pair.target
            if of[ends[0]] != of[ends[1]]:
                found[pair.source, pair.target, way] = min(min(own[host], leaving.get(of[host], 0.0)) for host in ends)
    return found
