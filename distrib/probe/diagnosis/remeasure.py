"""Which measurements look bad enough to be made again before anything is said about them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from distrib.cluster.shared_links import SLOWED
from distrib.probe.records import Facts, LoadPattern, PairMeasurement
from distrib.probe.settings import Transport

SLOW = 0.95
"""A host or link that reaches less of what is usual is looked at again, and if it stays so, told of."""

BUSY = 0.98
"""Processors busier than this may themselves have been what slowed a stream."""

SHARED_BUSY = 0.9
"""Where processors were busier than this, they may be what pairs that slow each other down share."""

HALF_DUPLEX = 0.65
"""Of its own rate; what a link gets each way, when both ends send, below which it may be half duplex."""

HALF_DUPLEX_BYTES_PER_SECOND = 125e6
"""Cards of more than 1 Gb/s have no half duplex; a virtual one shows by what it carries that it is faster."""

NOISY = 0.15
"""Coefficient of variation from which a link is called noisy."""

PEERS = 3
"""With so many others a host is measured alone to see whether it is slow."""


class Baseline:
    """What each pair reaches alone: as measured, else what both its hosts have shown that they can do."""

    def __init__(self, seen: Iterable[PairMeasurement], way: Transport) -> None:
        self._pairs: dict[tuple[str, str], float] = {}
        self._hosts: dict[str, float] = {}
        for load in get_args(LoadPattern):
            for record in one_way(seen, way, load):
                rate = record.bandwidth_bytes_per_second
                pair = record.source, record.target
                if load == "alone":
                    self._pairs[pair] = max(self._pairs.get(pair, 0.0), rate)
                # A host is as fast as it was with the fastest other: the others may have been the slow ones.
                for host in pair:
                    self._hosts[host] = max(self._hosts.get(host, 0.0), rate)

    def alone(self, source: str, target: str) -> float:
        """Bytes per second as measured, this way or the other; 0 where the pair was never measured alone."""
        return self._pairs.get((source, target)) or self._pairs.get((target, source), 0.0)

    def of(self, source: str, target: str) -> float:
        """Bytes per second; 0 where nothing is known of one of them."""
        return self.alone(source, target) or self.of_hosts(source, target)

    def of_hosts(self, source: str, target: str) -> float:
        """What both have shown that they can do with whomever: more than `of` where the way between them is narrow."""
        return min(self._hosts.get(source, 0.0), self._hosts.get(target, 0.0))


def one_way(seen: Iterable[PairMeasurement], way: Transport, load: str) -> Iterator[PairMeasurement]:
    """The measurements of one way and load that gave a rate, on the job's own network."""
    for record in seen:
        wanted = record.way == way and record.load == load and record.network is None
        if wanted and not record.both_ways and record.failed is None:
            yield record


def between_machines(seen: Sequence[PairMeasurement], facts: Mapping[str, Facts]) -> list[PairMeasurement]:
    """What went from machine to machine: containers of one machine reach each other without a wire.

    All, where all hosts are on one machine, as far as they tell.
    """
    machines = {host: each.machine or host for host, each in facts.items()}
    if len(set(machines.values())) < 2:
        return list(seen)
    return [r for r in seen if machines.get(r.source, r.source) != machines.get(r.target, r.target)]


def neighbours(
    seen: Sequence[PairMeasurement], hosts: Sequence[str], way: Transport, most: int
) -> list[tuple[str, str]]:
    """Hosts that follow each other in a ring over all, as training has them, and that others slowed down: they were never alone.

    What they reach alone is what such a ring gets. Left out is what processors may have slowed.
    """
    baseline = Baseline(seen, way)
    slowed = {
        frozenset((record.source, record.target))
        for record in one_way(seen, way, "together")
        if record.busy < SHARED_BUSY
        and record.bandwidth_bytes_per_second < SLOWED * baseline.of(record.source, record.target)
    }
    ring = zip(hosts, [*hosts[1:], *hosts[:1]], strict=True)
    found = [(a, b) for a, b in ring if frozenset((a, b)) in slowed and not baseline.alone(a, b)]
    return found[:most]


def full_duplex_only(facts: Mapping[str, Facts]) -> set[str]:
    """Hosts whose card says that it is too fast for half duplex."""
    cards = {host: each.named(each.interface) for host, each in facts.items()}
    return {
        host
        for host, card in cards.items()
        if card and (card.speed_bytes_per_second or 0.0) > HALF_DUPLEX_BYTES_PER_SECOND
    }


def second_look(
    seen: Sequence[PairMeasurement],
    hosts: Sequence[str],
    way: Transport,
    most: int,
    facts: Mapping[str, Facts],
    speeds: Mapping[str, float],
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What to measure again alone: directions, and pairs both ways at once; about `most` of each kind."""
    baseline = Baseline(seen, way)
    both = half_duplex(seen, baseline, way, most // 2, full_duplex_only(facts))
    again = [
        *directions(seen, hosts, way, most, speeds),
        *neighbours(seen, hosts, way, most),
        *(pair for pair in both if not baseline.alone(*pair)),
    ]
    return list(dict.fromkeys(again)), both


def classes_of(speeds: Mapping[str, float]) -> dict[str, float]:
    """By host, the rate of its card as far as another host's card can use it; hosts of one rate are a class."""
    second = sorted(speeds.values())[-2:][:1]
    return {host: min(speed, *second) for host, speed in speeds.items()}


def class_of_pair(classes: Mapping[str, float], record: PairMeasurement) -> float:
    """That of the slower card; 0 where no card's rate is known."""
    return min(classes.get(host, 0.0) for host in (record.source, record.target))


def directions(
    seen: Sequence[PairMeasurement],
    hosts: Sequence[str],
    way: Transport,
    most: int,
    speeds: Mapping[str, float] | None = None,
) -> list[tuple[str, str]]:
    """Directions to measure again alone, worst first, at most so many.

    Those that were slow or noisy alone, those that were the slow ones of their round and never measured alone, and, for a
    host that was slow with most others, a first direction with a good one; then a second and a third for each such host,
    so that many of them do not leave one unlooked at. `speeds`: the nominal rates of the hosts' cards; each is compared with
    its like.
    """
    classes = classes_of(speeds or {})
    alone: dict[tuple[str, str], float] = {}
    by_class: dict[float, dict[tuple[str, str], float]] = {}
    for record in one_way(seen, way, "alone"):
        pair = record.source, record.target
        alone[pair] = by_class.setdefault(class_of_pair(classes, record), {})[pair] = record.bandwidth_bytes_per_second
    if not alone:
        return []
    links: dict[tuple[str, str], float] = {}
    for rates in by_class.values():
        usual = statistics.median(rates.values())
        links |= {pair: rate / usual for pair, rate in rates.items() if rate < SLOW * usual}
    slow, odd = _slow_together(seen, way, classes)
    links |= {pair: part for pair, part in odd.items() if pair not in alone}
    for pair in list(links):
        links.setdefault(pair[::-1], links[pair])
    wanted = {pair: (0, part) for pair, part in links.items()}
    for record in one_way(seen, way, "alone"):
        if record.variation > NOISY / 2:
            wanted.setdefault((record.source, record.target), (0, 1.0))
    ends = {host for host, _ in slow}
    for (host, sends), part in slow.items():
        own = classes.get(host, 0.0)
        peers = [other for other in hosts if other not in ends and other != host and classes.get(other, 0.0) >= own]
        for turn, peer in enumerate(peers[:PEERS]):
            wanted.setdefault((host, peer) if sends else (peer, host), (turn, part))
    return sorted(wanted, key=lambda pair: wanted[pair])[:most]


def _slow_together(
    seen: Sequence[PairMeasurement], way: Transport, classes: Mapping[str, float]
) -> tuple[dict[tuple[str, bool], float], dict[tuple[str, str], float]]:
    """What was slow while all pairs of a round sent, each with its part of what is usual.

    Hosts that were slow with most others, by whether they sent; and pairs of other hosts that were slower than the rest of
    their round and than both hosts are with most others.
    """
    rates: dict[tuple[str, bool], list[float]] = {}
    rounds: dict[tuple[str, int], list[float]] = {}
    records = list(one_way(seen, way, "together"))
    for record in records:
        for host, sends in ((record.source, True), (record.target, False)):
            # With a slower card, that would be the one that is seen.
            if class_of_pair(classes, record) >= classes.get(host, 0.0):
                rates.setdefault((host, sends), []).append(record.bandwidth_bytes_per_second)
        rounds.setdefault((record.stage, record.phase), []).append(record.bandwidth_bytes_per_second)
    # Of two, the better one: the other may be the one that is looked for.
    usual = {end: statistics.median_high(values) for end, values in rates.items()}
    hosts: dict[tuple[str, bool], float] = {}
    for own in {classes.get(host, 0.0) for host, _ in usual}:
        alike = {end: rate for end, rate in usual.items() if classes.get(end[0], 0.0) == own}
        middle = statistics.median(alike.values())
        hosts |= {end: rate / middle for end, rate in alike.items() if rate < SLOW * middle}
    of_round = {place: statistics.median_high(values) for place, values in rounds.items()}
    pairs: dict[tuple[str, str], float] = {}
    for record in records:
        ends = (record.source, True), (record.target, False)
        expected = min(of_round[record.stage, record.phase], *(usual[end] for end in ends if end in usual))
        if record.bandwidth_bytes_per_second < SLOW * expected:
            pairs[record.source, record.target] = record.bandwidth_bytes_per_second / expected
    return hosts, pairs


def half_duplex(
    seen: Sequence[PairMeasurement], baseline: Baseline, way: Transport, most: int, never: Collection[str]
) -> list[tuple[str, str]]:
    """Pairs to measure again alone and both ways at once, because beside others they then shared one rate.

    `never`: hosts that cannot be half duplex.
    """
    if way == "mpi":  # over InfiniBand and RoCE
        return []
    found: dict[tuple[str, str], float] = {}
    for record in seen:
        own = baseline.of(record.source, record.target)
        both = record.way == way and record.both_ways and not record.failed
        may_be = 0 < own <= HALF_DUPLEX_BYTES_PER_SECOND and not {record.source, record.target} & {*never}
        if both and may_be:
            part = record.bandwidth_bytes_per_second / own
            if part < HALF_DUPLEX + 0.1:
                pair = min(record.source, record.target), max(record.source, record.target)
                found[pair] = min(part, found.get(pair, 1.0))
    return sorted(found, key=lambda pair: found[pair])[:most]


def processors_shared(seen: Iterable[PairMeasurement], way: Transport) -> bool:
    """Whether processors were busy in most of what was measured beside others: then nothing can be told of shared links."""
    beside = [record for load in ("together", "bisection") for record in one_way(seen, way, load)]
    return 2 * sum(record.busy > SHARED_BUSY for record in beside) > len(beside)


def slowed_phases(
    seen: Iterable[PairMeasurement], baseline: Baseline, way: Transport
) -> list[tuple[tuple[str, str], ...]]:
    """Pairs that ran at once and slowed each other down, the phase that lost most first."""
    phases: dict[tuple[str, int], list[PairMeasurement]] = {}
    for load in ("together", "bisection"):
        for record in one_way(seen, way, load):
            phases.setdefault((record.stage, record.phase), []).append(record)
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
