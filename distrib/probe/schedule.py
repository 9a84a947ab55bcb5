"""Who is measured with whom, and when. Pure.

A round is a set of disjoint pairs of hosts, by number. The circle method (round-robin tournaments; also SuperBench's
`pair-wise` pattern) puts every pair into exactly one round: N - 1 rounds for an even number of hosts, N for an odd one.
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
Round = tuple[Pair, ...]


def rounds(hosts: int) -> tuple[Round, ...]:
    """Rounds of disjoint pairs in which every pair of `hosts` hosts meets once; with an odd number one idles each time.

    The lower number comes first: hosts are mostly named rack by rack, and so the pairs of a round that cross from one
    rack to another load the way between them in the same direction.
    """
    if hosts < 2:
        return ()
    seats = hosts + hosts % 2
    # One seat stays, the others turn around it; a pair with the empty seat of an odd number is left out.
    made = []
    for turn in range(seats - 1):
        circle = [seats - 1, *((turn + step) % (seats - 1) for step in range(seats - 1))]
        pairs = [(circle[0], circle[1])]
        pairs += [(circle[1 + step], circle[seats - step]) for step in range(1, seats // 2)]
        made.append(tuple((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
    return tuple(made)


def bisection(hosts: int) -> Round:
    """One half of the hosts paired with the other, host i with host i + N/2; an odd one out idles.

    Hosts that are named in order of their racks so cross from one half of the racks to the other.
    """
    half = hosts // 2
    return tuple((number, number + hosts - half) for number in range(half))


def without(round_: Round, missing: Sequence[int]) -> Round:
    """The round without the pairs of hosts that are gone."""
    return tuple(pair for pair in round_ if pair[0] not in missing and pair[1] not in missing)


def backward(round_: Round) -> Round:
    """The round with sources and targets exchanged."""
    return tuple((b, a) for a, b in round_)


def counts(hosts: int) -> tuple[int, ...]:
    """Numbers of hosts over which collectives are measured: 2, 4, 8, ... and all of them."""
    found = []
    count = 2
    while count < hosts:
        found.append(count)
        count *= 2
    return (*found, hosts) if hosts > 1 else ()
