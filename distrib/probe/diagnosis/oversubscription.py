"""Uplinks that are too narrow for all the hosts behind them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.cluster.node import shown_hosts
from distrib.cluster.shared_links import SLOWED, groups_of
from distrib.probe.diagnosis.finding import Finding, bit_rate_text
from distrib.probe.diagnosis.remeasure import SHARED_BUSY, Baseline, one_way, processors_shared
from distrib.probe.records import PairMeasurement, SharedLinkSides
from distrib.probe.settings import Transport

ACROSS = 0.8
"""Hosts are said to stand in groups where so many of the pairs across are slowed, and none inside."""

PAIRS_SHOWN = 6


def oversubscribed(
    seen: Sequence[PairMeasurement], groups: Sequence[SharedLinkSides], way: Transport, hosts: Sequence[str]
) -> list[Finding]:
    """Links that several hosts share and that are too narrow for them: one with two sides, or those of several racks."""
    baseline = Baseline(seen, way)
    if processors_shared(seen, way):
        return []
    if not groups:
        return _several(seen, baseline, way, hosts)
    left, right = (set(side) for side in groups[-1].sides)
    crossing = [
        r for r in seen if r.stage == "sharing/crossing" and not r.failed and r.source in left and r.target in right
    ]
    if not crossing:
        return []
    one, other = (shown_hosts(side) for side in groups[-1].sides)
    sides = (*groups[-1].sides[0], *groups[-1].sides[1])
    return [_finding(f"the uplink between {one} and {other} is", crossing, baseline, sides)]


def _several(
    seen: Sequence[PairMeasurement], baseline: Baseline, way: Transport, hosts: Sequence[str]
) -> list[Finding]:
    """Where pairs slow each other down, twice, and are not on two sides of one link."""
    phases: dict[tuple[str, int], list[PairMeasurement]] = {}
    again: dict[tuple[str, str], float] = {}
    parts: dict[frozenset[str], float] = {}
    for load in ("together", "bisection", "sharing"):
        for record in one_way(seen, way, load):
            own = baseline.of(record.source, record.target)
            if not own or record.busy > SHARED_BUSY:
                continue
            part = record.bandwidth_bytes_per_second / own
            if record.stage == "sharing/once more":
                pair = record.source, record.target
                again[pair] = max(part, again.get(pair, 0.0))
            elif load != "sharing":
                phases.setdefault((record.stage, record.phase), []).append(record)
                both = frozenset((record.source, record.target))
                parts[both] = min(part, parts.get(both, 1.0))
    slowed = {pair for pair, part in parts.items() if part < SLOWED}
    if not slowed or sum(part < SLOWED for part in again.values()) < max(2, len(again) / 2):
        return []
    groups = groups_of([host for host in hosts if any(host in pair for pair in parts)], slowed)
    group_of = {host: number for number, group in enumerate(groups) for host in group}
    across = [pair for pair in parts if len({group_of[host] for host in pair}) > 1]
    known = len(groups) > 1 and len(slowed) >= ACROSS * len(across)

    def lost(records: Sequence[PairMeasurement]) -> float:
        return sum(baseline.of(r.source, r.target) - r.bandwidth_bytes_per_second for r in records)

    if known:
        crossing = [[r for r in records if group_of[r.source] != group_of[r.target]] for records in phases.values()]
        what = f"the uplinks of {', '.join(map(shown_hosts, groups[:-1]))} and {shown_hosts(groups[-1])} are"
        return [_finding(what, max(crossing, key=lost), baseline, tuple(host for group in groups for host in group))]
    narrow = [[r for r in records if {r.source, r.target} in slowed] for records in phases.values()]
    worst = max(narrow, key=lost)
    worst.sort(key=lambda r: r.bandwidth_bytes_per_second / baseline.of(r.source, r.target))
    pairs = ", ".join(
        f"{r.source} to {r.target} {r.bandwidth_bytes_per_second / baseline.of(r.source, r.target):.0%}"
        for r in worst[:PAIRS_SHOWN]
    )
    more = f" and {len(worst) - PAIRS_SHOWN} more" if len(worst) > PAIRS_SHOWN else ""
    slow = tuple(host for host in hosts if any(host in (r.source, r.target) for r in worst))
    found = _finding(f"several links that {shown_hosts(slow)} share seem to be", worst, baseline, slow)
    return [msgspec.structs.replace(found, evidence=f"{found.evidence}: {pairs}{more}")]


def _finding(what: str, crossing: Sequence[PairMeasurement], baseline: Baseline, hosts: tuple[str, ...]) -> Finding:
    # What the hosts could send, not what one pair gets alone: an uplink may be narrower than a single host.
    wanted = sum(baseline.of_hosts(record.source, record.target) for record in crossing)
    had = sum(record.bandwidth_bytes_per_second for record in crossing)
    ratio = wanted / had
    return Finding(
        kind="oversubscribed_uplink",
        severity="warning",
        what=f"{what} oversubscribed {ratio:.1f}:1",
        evidence=f"{len(crossing)} pairs across at once reach {bit_rate_text(had)} together, of {bit_rate_text(wanted)} that their hosts "
        "could send",
        advice="keep a job on one side where it fits; across, use the hierarchical all-reduce, and place "
        "neighbouring ranks on the same side; or widen the uplink",
        hosts=hosts,
        ratio=ratio,
        loss=1 - 1 / ratio,
    )
