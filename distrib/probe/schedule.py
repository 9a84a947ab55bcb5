"""Schedule of pairwise measurements: rounds of disjoint pairs.

The circle method of round-robin tournaments (also SuperBench's `pair-wise` pattern) puts every pair into exactly one round:
N - 1 rounds for an even number N of hosts, N for an odd one.
"""

from __future__ import annotations

from distrib.cluster.shared_links import Round


def round_robin(hosts: int) -> tuple[Round, ...]:
    """Arrange all pairs of host numbers in rounds of disjoint pairs. With an odd number of hosts, one host idles in each round.

    The lower number comes first: hosts are usually named rack by rack, so pairs that cross racks load uplinks in one direction.

    Args:
        hosts: Number of hosts.
    """
    if hosts < 2:
        return ()
    seats = hosts + hosts % 2
    # One seat stays, and all other seats rotate around it. With an odd number, the pair with the empty seat is left out.
    made = []
    for turn in range(seats - 1):
        circle = [seats - 1, *((turn + step) % (seats - 1) for step in range(seats - 1))]
        pairs = [(circle[0], circle[1])]
        pairs += [(circle[1 + step], circle[seats - step]) for step in range(1, seats // 2)]
        made.append(tuple((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
    return tuple(made)


def bisection_round(hosts: int) -> Round:
    """Pair one half of the hosts with the other half, host i with host i + N/2. With an odd number, one host idles.

    Args:
        hosts: Number of hosts.
    """
    half = hosts // 2
    return tuple((number, number + hosts - half) for number in range(half))


def collective_host_counts(hosts: int) -> tuple[int, ...]:
    """List the numbers of hosts over which collectives are measured: 2, 4, 8, ... and all.

    Args:
        hosts: Number of hosts.
    """
    found = []
    count = 2
    while count < hosts:
        found.append(count)
        count *= 2
    return (*found, hosts) if hosts > 1 else ()
