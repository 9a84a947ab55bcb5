"""Hosts and links that are slower than the others of their class. Pure.

Links are judged against the others in this cluster, not against a catalogue: the median is what is usual here, and a link
or host that stays clearly below it, measured twice, is told of.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from distrib.cluster.node import shown_hosts
from distrib.cluster.shared_links import groups_of
from distrib.probe.diagnosis.finding import Finding, bit_rate_text
from distrib.probe.diagnosis.oversubscription import ACROSS, PAIRS_SHOWN
from distrib.probe.diagnosis.remeasure import SLOW, Baseline, class_of_pair, classes_of, one_way
from distrib.probe.records import PairMeasurement, fastest_measurements
from distrib.probe.settings import Transport

BAD = 0.75
"""Below this part of what is usual a link is an error, above it a warning."""

APART = 0.9
"""So far, at least, are the best of narrow ways below the worst of the others."""

SIDES = 4
"""So many groups of hosts with slow ways between them are named, else pairs."""

DEVIATIONS = 6.0
"""How many robust standard deviations of its class a link must be below the median, besides `SLOW`."""


def slow_hosts(
    seen: Sequence[PairMeasurement], way: Transport, speeds: Mapping[str, float] | None = None
) -> list[Finding]:
    """Hosts that are slower than the others of their class with every other host, outwards or inwards."""
    classes = classes_of(speeds or {})
    pairs = {(record.source, record.target) for load in ("alone", "together") for record in one_way(seen, way, load)}
    shown = {"sends": _shown(seen, way, ("source",), classes), "receives": _shown(seen, way, ("target",), classes)}
    if not any(pair[::-1] in pairs for pair in pairs):  # --quick: some hosts have sent to the last ones only
        shown = {"runs": _shown(seen, way, ("source", "target"), classes)}
    by_class: dict[float, dict[str, dict[str, float]]] = {}
    for how, rates in shown.items():
        for host, rate in rates.items():
            by_class.setdefault(classes.get(host, 0.0), {}).setdefault(host, {})[how] = rate
    # Of two hosts nobody can say which is slow.
    return [
        finding
        for of_class in by_class.values()
        if len(of_class) > 2
        for finding in _slow_hosts_of_class(of_class, list(one_way(seen, way, "alone")))
    ]


def _slow_hosts_of_class(rates: dict[str, dict[str, float]], alone: Sequence[PairMeasurement]) -> list[Finding]:
    found = []
    limit, usual = _limit([max(shown.values()) for shown in rates.values()])
    for host, shown in rates.items():
        low = [(rate, where) for where, rate in shown.items() if rate < limit]
        if not low:
            continue
        ratio = min(rate for rate, _ in low) / usual
        how = " and ".join(where for _, where in low)
        pairs = sum(host in (record.source, record.target) for record in alone)
        found.append(
            Finding(
                kind="slow_host",
                severity="error" if ratio < BAD else "warning",
                what=f"{host}: its link is slow: it {how} at {ratio:.0%} of what is usual here",
                evidence=f"{bit_rate_text(min(rate for rate, _ in low))} with most other hosts, of {bit_rate_text(usual)} usual "
                f"({pairs} measurements alone)",
                advice=f"look at the cable, switch port and negotiated rate of {host}'s card (ethtool), at its PCIe slot, "
                "and at what else uses it; leave the host out with --exclude until then",
                hosts=(host,),
                ratio=ratio,
                loss=1 - ratio,
            )
        )
    return found


def _shown(
    seen: Sequence[PairMeasurement],
    way: Transport,
    ends: Sequence[Literal["source", "target"]],
    classes: Mapping[str, float],
) -> dict[str, float]:
    """By host, the rate that it has shown alone at these ends of its links: the upper quartile over its peers.

    Not the median: the peers may be the slow ones. Nothing is said of hosts that were not measured alone, nor of those that
    were faster beside others: then the few links that were measured alone are slow, not the host. Peers of a slower class
    do not count.
    """
    rates: dict[str, dict[str, list[float]]] = {"alone": {}, "together": {}}
    for load, of_host in rates.items():
        for record in fastest_measurements(one_way(seen, way, load)).values():
            for host in (getattr(record, end) for end in ends):
                if class_of_pair(classes, record) >= classes.get(host, 0.0):
                    of_host.setdefault(host, []).append(record.bandwidth_bytes_per_second)
    found = {}
    for host, alone in rates["alone"].items():
        if len(alone) < len(ends):
            continue  # of a single peer nobody can say whether it is the slow one
        least = SLOW * upper_quartile(rates["together"].get(host, alone))
        # What was measured alone may mostly have been the slow peers.
        if shown := [rate for rate in (upper_quartile(alone), max(alone)) if rate >= least]:
            found[host] = shown[0]
    return found


def upper_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of the others exceed; the largest of three or fewer."""
    return sorted(values)[-1 - len(values) // 4]


def slow_links(
    seen: Sequence[PairMeasurement], way: Transport, slow: set[str], speeds: Mapping[str, float] | None = None
) -> list[Finding]:
    """Pairs of good hosts that are slower than the other pairs of their class, both ways or one way only."""
    classes = classes_of(speeds or {})
    # What was looked at again was picked because it looked bad: it does not say what is usual.
    planned = {(r.source, r.target) for r in one_way(seen, way, "alone") if r.stage != "again"}
    by_class: dict[float, dict[tuple[str, str], float]] = {}
    for record in fastest_measurements(one_way(seen, way, "alone")).values():
        if not slow & {record.source, record.target}:
            good = by_class.setdefault(class_of_pair(classes, record), {})
            good[record.source, record.target] = record.bandwidth_bytes_per_second
    return [finding for good in by_class.values() for finding in _slow_links_of_class(good, planned)]


def narrow_ways(seen: Sequence[PairMeasurement], way: Transport, told: Sequence[Finding]) -> list[Finding]:
    """Pairs that get far less, alone, than both hosts do with others, and of which nothing was `told`: one finding.

    Where most ways are narrow they are what is usual among links, but not for hosts that do more with a neighbour; and they
    have more in common than a cable.
    """
    slow = {host for finding in told if finding.kind == "slow_host" for host in finding.hosts}
    known = {frozenset(finding.hosts) for finding in told}
    baseline = Baseline(seen, way)
    rates = {
        (r.source, r.target): r.bandwidth_bytes_per_second
        for r in fastest_measurements(one_way(seen, way, "alone")).values()
        if not slow & {r.source, r.target} and frozenset((r.source, r.target)) not in known
    }
    parts = {pair: rate / baseline.of_hosts(*pair) for pair, rate in rates.items()}
    better = {pair: max(part, parts.get(pair[::-1], part)) for pair, part in parts.items()}
    narrow = [pair for pair, part in better.items() if part < BAD]
    others = [part for part in better.values() if part >= BAD]
    # Where rates scatter, some are always so far below the luckiest: narrow ways lie apart from all others.
    if not narrow or (others and max(better[pair] for pair in narrow) >= APART * min(others)):
        return []
    hosts = tuple(dict.fromkeys(host for pair in narrow for host in pair))
    ratio = statistics.median(parts[pair] for pair in narrow)
    rate = statistics.median(rates[pair] for pair in narrow)
    return [
        Finding(
            kind="slow_link", severity="error",
            what=f"between {_sides(rates, narrow)} the way is slow: {ratio:.0%} of what their hosts reach with others",
            evidence=f"{len(narrow)} directions, each alone, have {bit_rate_text(rate)} (median) of {bit_rate_text(rate / ratio)}",
            advice="look at what these ways have in common: an uplink or a port between switches that runs at a lower rate",
            hosts=hosts, ratio=ratio, loss=1 - ratio,
        )
    ]  # fmt: skip


def _sides(every: Collection[tuple[str, str]], narrow: Collection[tuple[str, str]]) -> str:
    """The groups of hosts between which hardly any way is not narrow; where there are none such, the first pairs."""
    groups = groups_of(list(dict.fromkeys(host for pair in every for host in pair)), set(map(frozenset, narrow)))
    side = {host: number for number, group in enumerate(groups) for host in group}
    across = [pair for pair in every if side[pair[0]] != side[pair[1]]]
    if 1 < len(groups) <= SIDES and len(narrow) >= ACROSS * len(across):
        return " and ".join(map(shown_hosts, groups))
    pairs = sorted({(min(pair), max(pair)) for pair in narrow})
    more = f" (and {len(pairs) - PAIRS_SHOWN} more pairs)" if len(pairs) > PAIRS_SHOWN else ""
    return ", ".join(f"{one} and {other}" for one, other in pairs[:PAIRS_SHOWN]) + more


def _slow_links_of_class(good: dict[tuple[str, str], float], planned: set[tuple[str, str]]) -> list[Finding]:
    if len(good) < 3:
        return _asymmetric(good, 0.0)
    fair = [rate for pair, rate in good.items() if pair in planned]
    limit, usual = _limit(fair if len(fair) > 2 else list(good.values()))
    found = _asymmetric(good, limit)
    told = {frozenset(finding.hosts) for finding in found}
    for pair in sorted({tuple(sorted(pair)) for pair in good}):
        rates = [good[way_] for way_ in (pair, pair[::-1]) if way_ in good]
        if max(rates) >= limit or frozenset(pair) in told:
            continue
        ratio = max(rates) / usual
        found.append(
            Finding(
                kind="slow_link",
                severity="error" if ratio < BAD else "warning",
                what=f"{pair[0]} and {pair[1]}: the way between them is slow: {ratio:.0%} of what is usual here",
                evidence=f"{bit_rate_text(max(rates))} alone, of {bit_rate_text(usual)} usual; both are faster with other hosts",
                advice="look at the switches and uplinks on this way",
                hosts=(pair[0], pair[1]),
                source=pair[0],
                target=pair[1],
                ratio=ratio,
                loss=(1 - ratio) / 2,
            )
        )
    return found


def _asymmetric(rates: dict[tuple[str, str], float], limit: float) -> list[Finding]:
    """Pairs of which one direction is slow and the other is not. A `limit` of 0 compares the two only."""
    found = []
    for (source, target), rate in rates.items():
        back = rates.get((target, source), 0.0)
        if rate < 0.9 * back and (not limit or rate < limit <= back):
            ratio = rate / back
            found.append(
                Finding(
                    kind="asymmetric_link",
                    severity="error" if ratio < BAD else "warning",
                    what=f"{source} to {target}: {ratio:.0%} of the rate of the other direction",
                    evidence=f"{bit_rate_text(rate)} from {source} to {target}, {bit_rate_text(back)} back",
                    advice=f"look for errors on {source}'s sending and {target}'s receiving side (ethtool -S), flow control, "
                    "and routes that differ by direction",
                    hosts=(source, target),
                    source=source,
                    target=target,
                    ratio=ratio,
                    loss=(1 - ratio) / 2,
                )
            )
    return found


def _limit(rates: Sequence[float]) -> tuple[float, float]:
    """Below what a rate is slow, and what is usual: the median of the class.

    The spread is taken from the upper half: slow members must not hide themselves.
    """
    usual = statistics.median(rates)
    upper = [rate - usual for rate in rates if rate >= usual]
    spread = 1.4826 * statistics.median(upper) if upper else 0.0
    return min(SLOW * usual, usual - DEVIATIONS * spread), usual
