"""Selection of links that are measured again, alone, before they are reported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TypeVar

from distrib.cluster.shared_links import SLOWED
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, LinkRates
from distrib.probe.settings import LIMITS

HostEnd = tuple[str, bool]
"""A host, and True for its sending side."""

Member = TypeVar("Member")


def links_to_remeasure(inputs: DiagnosisInputs, limit: int) -> list[tuple[str, str]]:
    """Select directions to measure again alone.

    Args:
        inputs: The measurements so far.
        limit: Maximum number of suspicious directions; as many neighbours of a ring may be added.

    Returns:
        Source and target hosts: suspicious links, slowest first, then neighbours of a ring over all hosts.
    """
    return list(dict.fromkeys([*_suspicious_links(inputs)[:limit], *_slowed_neighbours(inputs)[:limit]]))


def _suspicious_links(inputs: DiagnosisInputs) -> list[tuple[str, str]]:
    """Return slow or noisy links, worst first, and links between slow and healthy hosts, one of each slow host first."""
    alone = {(record.source, record.target): record for record in inputs.under("alone")}
    if not alone:
        return []
    slow_hosts, beside = _slow_beside_others(inputs)
    rates = {pair: record.bandwidth_bytes_per_second for pair, record in alone.items()}
    slow_alone = _below_class_median(rates, {pair: inputs.pair_class(record) for pair, record in alone.items()})
    links = {**slow_alone, **{pair: part for pair, part in beside.items() if pair not in alone}}
    for pair in list(links):
        links.setdefault(pair[::-1], links[pair])
    wanted = {pair: (0, part) for pair, part in links.items()}
    for pair, record in alone.items():
        if record.variation > LIMITS.noisy_variation / 2:
            wanted.setdefault(pair, (0, 1.0))
    slow_names = {host for host, _ in slow_hosts}
    for (host, sends), part in slow_hosts.items():
        own = inputs.host_class(host)
        healthy = [other for other in inputs.hosts if other not in slow_names and inputs.host_class(other) >= own]
        for turn, peer in enumerate(healthy[:3]):
            wanted.setdefault((host, peer) if sends else (peer, host), (turn, part))
    return sorted(wanted, key=lambda pair: wanted[pair])


def concurrent_pairs_slowed(inputs: DiagnosisInputs) -> list[tuple[tuple[str, str], ...]]:
    """List pairs that slowed each other down in one phase, the phase with the largest loss first.

    Args:
        inputs: The measurements so far.
    """
    phases: dict[tuple[str, int], list[tuple[float, tuple[str, str]]]] = {}
    for record in inputs.under("together", "bisection"):
        alone = inputs.alone.expected(record.source, record.target)
        if alone and record.bandwidth_bytes_per_second < SLOWED * alone:
            loss = 1 - record.bandwidth_bytes_per_second / alone
            phases.setdefault((record.stage, record.phase), []).append((loss, (record.source, record.target)))
    found = [
        (sum(loss for loss, _ in slow), tuple(pair for _, pair in sorted(slow, reverse=True)))
        for slow in phases.values()
        if len(slow) > 1
    ]
    return [pairs for _, pairs in sorted(found, reverse=True)]


def _slowed_neighbours(inputs: DiagnosisInputs) -> list[tuple[str, str]]:
    """Return neighbours of a ring over all hosts that concurrent traffic slowed and that were never measured alone.

    Predictions of ring all-reduce need their rate alone. Measurements that busy CPUs may have slowed do not count.
    """
    slowed = {
        frozenset((record.source, record.target))
        for record in inputs.under("together")
        if record.busy < LIMITS.saturated_cpu_fraction
        and record.bandwidth_bytes_per_second < SLOWED * inputs.alone.expected(record.source, record.target)
    }
    ring = zip(inputs.hosts, [*inputs.hosts[1:], *inputs.hosts[:1]], strict=True)
    return [(a, b) for a, b in ring if frozenset((a, b)) in slowed and not inputs.alone.measured(a, b)]


def _slow_beside_others(inputs: DiagnosisInputs) -> tuple[dict[HostEnd, float], LinkRates]:
    """Return slow host ends and links of rounds in which all pairs sent, each with its fraction of the usual rate.

    Host ends are slow with most peers. Links are slower than the rest of their round and than both hosts usually are.
    """
    records = inputs.under("together")
    by_end: dict[HostEnd, list[float]] = {}
    by_round: dict[tuple[str, int], list[float]] = {}
    for record in records:
        for host, sends in ((record.source, True), (record.target, False)):
            if inputs.limits_host(record, host):
                by_end.setdefault((host, sends), []).append(record.bandwidth_bytes_per_second)
        by_round.setdefault((record.stage, record.phase), []).append(record.bandwidth_bytes_per_second)
    # With two values the higher one, as the lower one may be of a slow link.
    usual = {end: statistics.median_high(rates) for end, rates in by_end.items()}
    links: LinkRates = {}
    for record in records:
        ends = (record.source, True), (record.target, False)
        round_rate = statistics.median_high(by_round[record.stage, record.phase])
        expected = min(round_rate, *(usual[end] for end in ends if end in usual))
        if record.bandwidth_bytes_per_second < LIMITS.slow_fraction * expected:
            links[record.source, record.target] = record.bandwidth_bytes_per_second / expected
    return _below_class_median(usual, {end: inputs.host_class(end[0]) for end in usual}), links


def _below_class_median(rates: Mapping[Member, float], classes: Mapping[Member, float]) -> dict[Member, float]:
    """Return links or host ends that are slow for their class, each with its fraction of the median of the class."""
    found: dict[Member, float] = {}
    for own in set(classes.values()):
        comparable = {member: rate for member, rate in rates.items() if classes[member] == own}
        median = statistics.median(comparable.values())
        found |= {m: rate / median for m, rate in comparable.items() if rate < LIMITS.slow_fraction * median}
    return found
