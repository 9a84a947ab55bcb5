"""Check for uplinks that are too narrow for all hosts behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from distrib.cluster.node import shown_hosts
from distrib.cluster.shared_links import SLOWED, groups_of
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs
from distrib.probe.diagnosis.finding import Finding, first_of
from distrib.probe.records import PairMeasurement
from distrib.probe.settings import LIMITS
from distrib.units import bit_rate_text


def cpus_saturated(inputs: DiagnosisInputs) -> bool:
    """Return True if CPUs were busy in most concurrent measurements, which then do not show shared links.

    Args:
        inputs: The measurements.
    """
    concurrent = inputs.under("together", "bisection")
    return 2 * sum(r.busy > LIMITS.saturated_cpu_fraction for r in concurrent) > len(concurrent)


def find_oversubscribed_uplinks(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report uplinks on which concurrent pairs slow each other: between the two sides of a link, or of several racks.

    Args:
        inputs: Measurements and host facts of the probe.

    Yields:
        A finding for each shared uplink; none if CPUs were saturated.
    """
    if cpus_saturated(inputs):
        return
    if inputs.sides is None:
        yield from _several_uplinks(inputs)
        return
    left, right = inputs.sides.sides
    crossing = [
        r
        for r in inputs.attempts
        if r.stage == "sharing/crossing" and not r.failed and r.source in left and r.target in right
    ]
    if crossing:
        subject = f"the uplink between {shown_hosts(left)} and {shown_hosts(right)} is"
        yield _uplink_finding(inputs, subject, crossing, (*left, *right))


def _several_uplinks(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report links of an unknown place on which pairs slow each other, twice."""
    parts, phases = _concurrent_parts(inputs)
    slowed = {pair for pair, part in parts.items() if part < SLOWED}
    if not slowed or not _slowed_again(inputs):
        return
    groups = groups_of([host for host in inputs.hosts if any(host in pair for pair in parts)], slowed)
    side = {host: number for number, group in enumerate(groups) for host in group}
    across = sum(len({side[host] for host in pair}) > 1 for pair in parts)
    if len(groups) > 1 and len(slowed) >= 0.8 * across:  # nearly all pairs between groups
        subject = f"the uplinks of {', '.join(map(shown_hosts, groups[:-1]))} and {shown_hosts(groups[-1])} are"
        crossing = _worst_phase(inputs, [[r for r in phase if side[r.source] != side[r.target]] for phase in phases])
        yield _uplink_finding(inputs, subject, crossing, tuple(host for group in groups for host in group))
        return
    narrow = _worst_phase(inputs, [[r for r in phase if {r.source, r.target} in slowed] for phase in phases])
    hosts = tuple(host for host in inputs.hosts if any(host in (r.source, r.target) for r in narrow))
    yield _uplink_finding(
        inputs, f"several links that {shown_hosts(hosts)} share seem to be", narrow, hosts, list_pairs=True
    )


def _concurrent_parts(inputs: DiagnosisInputs) -> tuple[dict[frozenset[str], float], list[list[PairMeasurement]]]:
    """Return each pair's concurrent rate as a fraction of its rate alone, and the measurements by phase."""
    phases: dict[tuple[str, int], list[PairMeasurement]] = {}
    parts: dict[frozenset[str], float] = {}
    for record in inputs.under("together", "bisection"):
        if (part := _kept_fraction(inputs, record)) is not None:
            pair = frozenset((record.source, record.target))
            parts[pair] = min(part, parts.get(pair, 1.0))
            phases.setdefault((record.stage, record.phase), []).append(record)
    return parts, list(phases.values())


def _kept_fraction(inputs: DiagnosisInputs, record: PairMeasurement) -> float | None:
    """Return the measured rate over that alone; None if unknown, or if CPUs may have been the limit."""
    alone = inputs.alone.expected(record.source, record.target)
    usable = alone and record.busy <= LIMITS.saturated_cpu_fraction
    return record.bandwidth_bytes_per_second / alone if usable else None


def _slowed_again(inputs: DiagnosisInputs) -> bool:
    """Return True if most pairs of the worst phase, at least two, were slowed when it was repeated."""
    again: dict[tuple[str, str], float] = {}
    for record in inputs.under("sharing"):
        part = _kept_fraction(inputs, record)
        if record.stage == "sharing/repeat" and part is not None:
            pair = record.source, record.target
            again[pair] = max(part, again.get(pair, 0.0))
    return sum(part < SLOWED for part in again.values()) >= max(2, len(again) / 2)


def _worst_phase(inputs: DiagnosisInputs, phases: Iterable[list[PairMeasurement]]) -> list[PairMeasurement]:
    """Return the phase that lost most bytes per second, slowest pairs first."""

    def lost(phase: Iterable[PairMeasurement]) -> float:
        return sum(inputs.alone.expected(r.source, r.target) - r.bandwidth_bytes_per_second for r in phase)

    return sorted(max(phases, key=lost), key=lambda r: _kept_fraction(inputs, r) or 0.0)


def _uplink_finding(
    inputs: DiagnosisInputs, subject: str, crossing: Sequence[PairMeasurement], hosts: tuple[str, ...], *, list_pairs: bool = False
) -> Finding:  # fmt: skip
    # The rate that the hosts can send, not that of a pair alone: an uplink may be narrower than a single host.
    wanted = sum(inputs.alone.of_hosts(record.source, record.target) for record in crossing)
    had = sum(record.bandwidth_bytes_per_second for record in crossing)
    ratio = wanted / had
    pairs = ""
    if list_pairs:
        kept = [f"{r.source} to {r.target} {_kept_fraction(inputs, r) or 0:.0%}" for r in crossing]
        pairs = f": {first_of(kept)}"
    return Finding(
        kind="oversubscribed_uplink", severity="warning", what=f"{subject} oversubscribed {ratio:.1f}:1",
        evidence=f"{len(crossing)} concurrent pairs reach {bit_rate_text(had)} in total, their hosts can send "
        f"{bit_rate_text(wanted)}{pairs}",
        advice="keep a job on one side if it fits there; across, use the hierarchical all-reduce and place neighbouring "
        "ranks on the same side; or widen the uplink",
        hosts=hosts, ratio=ratio, loss=1 - 1 / ratio,
    )  # fmt: skip
