"""Who shares a way with whom: hosts on either side of a link that is too narrow for all of them at once. Pure.

Pairs that are slower together than alone share something. Which hosts stand on which side is found by moving one end at
a time: with the shared link kept full, a stream between two hosts of one side is not slowed, one across is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from distrib.cluster.shared_links import SLOWED
from distrib.probe.schedule import Pair, Round

Rates = Mapping[Pair, float]
Run = Callable[[str, Round], Rates]
"""Measures a phase of disjoint pairs, all at once; gives what part of its own rate each pair reached."""


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """A link that streams from `left` to `right` share."""

    left: tuple[int, ...]
    right: tuple[int, ...]


def slowed(rates: Rates) -> list[Pair]:
    """The pairs of a phase that others slow down, slowest first; one alone proves nothing."""
    found = sorted((pair for pair, part in rates.items() if part < SLOWED), key=lambda pair: rates[pair])
    return found if len(found) > 1 else []


def find_sides(load: Round, run: Run, others: tuple[int, ...] = ()) -> Shared | None:
    """Sort the hosts of `load`, pairs that slow each other down, and `others` to the sides of the link that they share.

    Every host is tried as the source of a stream to the first pair's target, while the other pairs keep the link full.
    None where the answers contradict each other: then it is no single link.
    """
    if len(load) < 2:
        return None
    first, target = load[0]
    near, far = [first], [target]
    for number, pair in enumerate(load[1:], 1):
        rest = tuple(other for place, other in enumerate(load) if place not in (0, number))
        answers = {}
        for host, other in (pair, pair[::-1]):
            full = rest or ((first, other),)  # of two pairs none is left to keep the link full
            answers[host] = run("sides", (*full, (host, target)))[host, target] < SLOWED
        if sum(answers.values()) != 1:
            return None
        for host, across in answers.items():
            (near if across else far).append(host)
    for host in others:
        across = run("sides", (*load[1:], (host, target)))[host, target] < SLOWED
        (near if across else far).append(host)
    near, far = sorted(near), sorted(far)
    count = min(len(near), len(far))
    phase = tuple(zip(near[:count], far[:count], strict=True))
    parts = run("crossing", phase)
    # All at once, they must be slowed as each of them was.
    return Shared(left=tuple(near), right=tuple(far)) if sum(parts.values()) < SLOWED * count else None
