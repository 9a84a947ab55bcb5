"""Checks for hosts and links that are slower than comparable ones.

The reference is the median of this cluster, not a catalogue. Links clearly below it were measured twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from distrib.probe.bench.statistics import MAD_TO_DEVIATION
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, LinkRates
from distrib.probe.diagnosis.finding import Finding, Severity
from distrib.probe.records import LoadPattern, PairMeasurement, fastest_measurements
from distrib.probe.settings import LIMITS
from distrib.units import bit_rate_text


def severity_of(ratio: float) -> Severity:
    """Return "error" for a severely slow link, else "warning".

    Args:
        ratio: Measured over expected rate.
    """
    return "error" if ratio < LIMITS.severe_fraction else "warning"


def _slow_limit(rates: Sequence[float], slow_fraction: float) -> tuple[float, float]:
    """Return the rate below which a member of a class is slow, and the median. Slow members do not widen the spread."""
    median = statistics.median(rates)
    spread = MAD_TO_DEVIATION * statistics.median([rate - median for rate in rates if rate >= median])
    return min(slow_fraction * median, median - LIMITS.min_deviations * spread), median


def _upper_quartile(values: Sequence[float]) -> float:
    """Return the value that a quarter of the values exceed; the maximum of three or fewer."""
    return sorted(values)[-1 - len(values) // 4]


def _find_slow_hosts(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report hosts that send or receive slower than comparable hosts with every peer."""
    by_class: dict[float, dict[str, dict[str, float]]] = {}
    for direction, rates in _host_rates(inputs).items():
        for host, rate in rates.items():
            by_class.setdefault(inputs.host_class(host), {}).setdefault(host, {})[direction] = rate
    for hosts in by_class.values():
        if len(hosts) < 3:
            continue  # with two hosts it is unknown which one is slow
        limit, median = _slow_limit([max(rates.values()) for rates in hosts.values()], inputs.slow_fraction)
        for host, rates in hosts.items():
            low = {direction: rate for direction, rate in rates.items() if rate < limit}
            if low:
                yield _slow_host(inputs, host, low, median)


def _slow_host(inputs: DiagnosisInputs, host: str, low: dict[str, float], median: float) -> Finding:
    rate = min(low.values())
    ratio = rate / median
    count = sum(host in (record.source, record.target) for record in inputs.under("alone"))
    return Finding(
        kind="slow_host", severity=severity_of(ratio),
        what=f"{host}: slow link: {' and '.join(low)} at {ratio:.0%} of the median of comparable hosts",
        evidence=f"{bit_rate_text(rate)} with most hosts, median {bit_rate_text(median)} ({count} measurements alone)",
        advice=f"check cable, switch port and negotiated rate of {host}'s NIC (ethtool), its PCIe slot and other traffic; "
        "leave the host out with --exclude until then",
        hosts=(host,), ratio=ratio, loss=1 - ratio,
    )  # fmt: skip


def _host_rates(inputs: DiagnosisInputs) -> dict[str, dict[str, float]]:
    """Return the rate that each host reached alone, by direction: "sends" and "receives", or "runs" for both together.

    --quick measures some hosts in one direction only; directions are then not distinguished.
    """
    pairs = {(record.source, record.target) for record in inputs.under("alone", "together")}
    if not any(pair[::-1] in pairs for pair in pairs):
        return {"runs": _rates_at(inputs, ("source", "target"))}
    return {"sends": _rates_at(inputs, ("source",)), "receives": _rates_at(inputs, ("target",))}


def _rates_at(inputs: DiagnosisInputs, ends: Sequence[str]) -> dict[str, float]:
    """Return the upper quartile of each host's rates alone, at these ends of its links. The median may be that of slow peers.

    Hosts without enough measurements alone, or that were faster beside other traffic, are left out.
    """
    alone, together = (_rates_by_host(inputs, load, ends) for load in ("alone", "together"))
    found = {}
    for host, rates in alone.items():
        if len(rates) < len(ends):
            continue  # with a single peer it is unknown which of the two is slow
        least = LIMITS.slow_fraction * _upper_quartile(together.get(host, rates))
        # Most peers that were measured alone may be slow. Then the fastest one counts.
        if shown := [rate for rate in (_upper_quartile(rates), max(rates)) if rate >= least]:
            found[host] = shown[0]
    return found


def _rates_by_host(inputs: DiagnosisInputs, load: LoadPattern, ends: Sequence[str]) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {}
    for record in fastest_measurements(inputs.under(load)).values():
        for host in (getattr(record, end) for end in ends):
            if inputs.limits_host(record, host):
                rates.setdefault(host, []).append(record.bandwidth_bytes_per_second)
    return rates


def _slow_host_names(inputs: DiagnosisInputs) -> set[str]:
    return {host for finding in _find_slow_hosts(inputs) for host in finding.hosts}


def _healthy_links(inputs: DiagnosisInputs) -> list[PairMeasurement]:
    """Return the best measurement alone of each link between hosts that are not slow."""
    slow = _slow_host_names(inputs)
    links = fastest_measurements(inputs.under("alone")).values()
    return [record for record in links if slow.isdisjoint((record.source, record.target))]


def _link_classes(inputs: DiagnosisInputs) -> Iterator[tuple[LinkRates, float, float]]:
    """Yield the rates alone of comparable links, the limit below which one is slow and their median; 0 for few links."""
    # Links that were measured again looked slow, so the median is that of all other links.
    planned = {(r.source, r.target) for r in inputs.under("alone") if r.stage != "again"}
    classes: dict[float, LinkRates] = {}
    for record in _healthy_links(inputs):
        rates = classes.setdefault(inputs.pair_class(record), {})
        rates[record.source, record.target] = record.bandwidth_bytes_per_second
    for rates in classes.values():
        sample = [rate for pair, rate in rates.items() if pair in planned]
        sample = sample if len(sample) > 2 else list(rates.values())
        yield (rates, *(_slow_limit(sample, inputs.slow_fraction) if len(rates) > 2 else (0.0, 0.0)))


def _find_asymmetric_links(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report links with one slow direction."""
    for rates, limit, _ in _link_classes(inputs):
        for (source, target), rate in rates.items():
            back = rates.get((target, source), 0.0)
            if rate >= 0.9 * back or (limit and not rate < limit <= back):
                continue
            ratio = rate / back
            finding = Finding(
                kind="asymmetric_link", severity=severity_of(ratio),
                what=f"{source} to {target}: {ratio:.0%} of the rate of the other direction",
                evidence=f"{bit_rate_text(rate)} from {source} to {target}, {bit_rate_text(back)} back",
                advice=f"check errors where {source} sends and {target} receives (ethtool -S), flow control, and routes "
                "that differ by direction",
                hosts=(source, target), source=source, target=target, ratio=ratio, loss=(1 - ratio) / 2,
            )  # fmt: skip
            yield _consider_bond(inputs, finding)


def _find_slow_links(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report pairs of healthy hosts with a slow link in both directions."""
    asymmetric = {frozenset(finding.hosts) for finding in _find_asymmetric_links(inputs)}
    for rates, limit, median in _link_classes(inputs):
        for one, other in sorted({(min(pair), max(pair)) for pair in rates}):
            rate = max(rates[pair] for pair in ((one, other), (other, one)) if pair in rates)
            if rate >= limit or frozenset((one, other)) in asymmetric:
                continue
            ratio = rate / median
            finding = Finding(
                kind="slow_link", severity=severity_of(ratio),
                what=f"{one} and {other}: slow link: {ratio:.0%} of the median of comparable links",
                evidence=f"{bit_rate_text(rate)} alone, median {bit_rate_text(median)}; both hosts are faster with others",
                advice="check the switches and uplinks between them",
                hosts=(one, other), source=one, target=other, ratio=ratio, loss=(1 - ratio) / 2,
            )  # fmt: skip
            yield _consider_bond(inputs, finding)


def _consider_bond(inputs: DiagnosisInputs, finding: Finding) -> Finding:
    """Turn a finding about a bond into a note: streams of one measurement may have shared one of its NICs."""
    nics = [inputs.nic(host) for host in finding.hosts]
    if not any(nic and nic.kind in ("bond", "team") for nic in nics):
        return finding
    return msgspec.structs.replace(
        finding, severity="note",
        evidence=f"{finding.evidence}; streams may have shared one NIC of a bond",
        advice="probe again: the link is bad if the same pair is slow each time (xmit_hash_policy layer3+4 spreads best)",
        loss=finding.loss / 10,
    )  # fmt: skip


OUTLIER_CHECKS = (_find_slow_hosts, _find_asymmetric_links, _find_slow_links)
