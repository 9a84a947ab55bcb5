"""Which measurements look bad enough to be made again before anything is said about them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from distrib.probe.records import PairSeen
from distrib.probe.settings import Way
from distrib.probe.sharing import SLOWED

SLOW = 0.95
"""A host or link that reaches less of what is usual is looked at again, and if it stays so, told of."""

BUSY = 0.98
"""Processors busier than this may themselves have been what slowed a stream."""

HALF_DUPLEX = 0.65
"""Of its own rate; what a link gets each way, when both ends send, below which it may be half duplex."""

NOISY = 0.15
"""Coefficient of variation from which a link is called noisy."""

PEERS = 3
"""With so many others a host is measured alone to see whether it is slow."""


class Baseline:
    """What each pair reaches alone: as measured, else what both its hosts have shown that they can do."""

    def __init__(self, seen: Iterable[PairSeen], way: Way) -> None:
        self._pairs: dict[tuple[str, str], float] = {}
        self._hosts: dict[str, float] = {}
        for load in ("alone", "together", "bisection"):
            for record in one_way(seen, way, load):
                rate = record.bandwidth_bytes_per_second
                pair = record.source, record.target
                if load == "alone":
                    self._pairs[pair] = max(self._pairs.get(pair, 0.0), rate)
                # A host is as fast as it was with the fastest other: the others may have been the slow ones.
                for host in pair:
                    self._hosts[host] = max(self._hosts.get(host, 0.0), rate)

    def of(self, source: str, target: str) -> float:
        """Bytes per second; 0 where nothing is known of one of them."""
        known = self._pairs.get((source, target)) or self._pairs.get((target, source))
        return known or min(self._hosts.get(source, 0.0), self._hosts.get(target, 0.0))


def one_way(seen: Iterable[PairSeen], way: Way, load: str) -> Iterator[PairSeen]:
    """The measurements of one way and load that gave a rate, on the job's own network."""
    for record in seen:
        wanted = record.way == way and record.load == load and record.network is None
        if wanted and not record.both_ways and record.failed is None:
            yield record


def directions(seen: Sequence[PairSeen], hosts: Sequence[str], way: Way, most: int) -> list[tuple[str, str]]:
    """Directions to measure again alone, worst first, at most so many.

    Those that were slow or noisy alone; for a host that was slow with most others when all sent at once, some of its pairs, as it
    may have been alone in nothing yet.
    """
    alone = {(r.source, r.target): r.bandwidth_bytes_per_second for r in one_way(seen, way, "alone")}
    together: dict[str, list[float]] = {}
    for record in one_way(seen, way, "together"):
        for host in (record.source, record.target):
            together.setdefault(host, []).append(record.bandwidth_bytes_per_second)
    if not alone:
        return []
    usual = statistics.median(alone.values())
    wanted: dict[tuple[str, str], float] = {pair: rate / usual for pair, rate in alone.items() if rate < SLOW * usual}
    for record in one_way(seen, way, "alone"):
        if record.variation > NOISY / 2:
            wanted.setdefault((record.source, record.target), 1.0)
    middles = {host: statistics.median(rates) for host, rates in together.items()}
    if middles:
        middle = statistics.median(middles.values())
        good = [host for host in hosts if middles.get(host, 0.0) >= SLOW * middle]
        for host, rate in sorted(middles.items(), key=lambda item: item[1]):
            if rate < SLOW * middle:
                for peer in [other for other in good if other != host][:PEERS]:
                    wanted.setdefault((host, peer), rate / middle)
                    wanted.setdefault((peer, host), rate / middle)
    for pair in [pair for pair in wanted if wanted[pair] < 1]:
        wanted.setdefault(pair[::-1], wanted[pair])
    return sorted(wanted, key=lambda pair: wanted[pair])[:most]


def half_duplex(seen: Sequence[PairSeen], baseline: Baseline, way: Way, most: int) -> list[tuple[str, str]]:
    """Pairs to measure again alone and both ways at once, because beside others they then shared one rate."""
    found: dict[tuple[str, str], float] = {}
    for record in seen:
        own = baseline.of(record.source, record.target)
        if record.way == way and record.both_ways and not record.failed and own:
            part = record.bandwidth_bytes_per_second / own
            if part < HALF_DUPLEX + 0.1:
                pair = min(record.source, record.target), max(record.source, record.target)
                found[pair] = min(part, found.get(pair, 1.0))
    return sorted(found, key=lambda pair: found[pair])[:most]


def slowed_phases(seen: Iterable[PairSeen], baseline: Baseline, way: Way) -> list[tuple[tuple[str, str], ...]]:
    """Pairs that ran at once and slowed each other down, the phase that lost most first."""
    phases: dict[tuple[str, int], list[PairSeen]] = {}
    for load in ("together", "bisection"):
        for record in one_way(seen, way, load):
            if not record.step.startswith("sharing"):
                phases.setdefault((record.step, record.phase), []).append(record)
    found = []
    for records in phases.values():
        slow = []
        for record in records:
            own = baseline.of(record.source, record.target)
            if own and record.bandwidth_bytes_per_second < SLOWED * own:
                slow.append((1 - record.bandwidth_bytes_per_second / own, (record.source, record.target)))
        if len(slow) > 1:
            slow.sort(reverse=True)
            found.append((sum(loss for loss, _ in slow), tuple(pair for _, pair in slow)))
    return [pairs for _, pairs in sorted(found, reverse=True)]
