"""What became worse since an earlier probe. Pure."""

from __future__ import annotations

import statistics

from distrib.cluster.measured import Measured, PairLink
from distrib.probe.finding import Finding, ranked, rate_text

WORSE = 0.9
"""Of what a link had; below it the link has become worse."""

LATENCY_WORSE, LATENCY_SECONDS = 2.0, 50e-6
"""A latency is worse when it is so many times what it was, and so many seconds more."""

SPARE = 3
"""A host with at least so many worse links, and most of them, is told of once."""


def worse(before: Measured, now: Measured) -> tuple[Finding, ...]:
    """Findings for links, ways and loads that both probes measured and that lost a tenth or more."""
    earlier = {_key(pair): pair for pair in before.pairs}
    lost: dict[tuple[str, str], tuple[float, PairLink, PairLink]] = {}
    both: dict[str, set[str]] = {}
    found: list[Finding] = []
    for pair in now.pairs:
        old = earlier.get(_key(pair))
        if old is None or pair.load != "alone":
            continue
        both.setdefault(pair.source, set()).add(pair.target)
        both.setdefault(pair.target, set()).add(pair.source)
        ratio = pair.bandwidth_bytes_per_second / old.bandwidth_bytes_per_second
        known = lost.get((pair.source, pair.target))
        if ratio < WORSE and (known is None or ratio < known[0]):
            lost[pair.source, pair.target] = ratio, old, pair
        if old.latency_seconds and pair.latency_seconds:
            more = pair.latency_seconds - old.latency_seconds
            if more > LATENCY_SECONDS and pair.latency_seconds > LATENCY_WORSE * old.latency_seconds:
                found.append(_latency(old, pair))
    while lost:
        peers: dict[str, set[str]] = {}
        for source, target in lost:
            peers.setdefault(source, set()).add(target)
            peers.setdefault(target, set()).add(source)
        host = max(peers, key=lambda name: (len(peers[name]), name))
        if len(peers[host]) < SPARE or len(peers[host]) < 0.8 * len(both[host]):
            break
        mine = [lost.pop(pair) for pair in list(lost) if host in pair]
        found.append(_host(host, [ratio for ratio, _, _ in mine], before.when))
    found += [_link(ratio, old, pair, before.when) for ratio, old, pair in lost.values()]
    return ranked(found)


def _key(pair: PairLink) -> tuple[str, str, str, str, bool, str | None]:
    return pair.source, pair.target, pair.way, pair.load, pair.both_ways, pair.network


def _host(host: str, ratios: list[float], when: str) -> Finding:
    ratio = statistics.median(ratios)
    return Finding(
        kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning",
        what=f"{host}: its links have {ratio:.0%} of the bandwidth that they had",
        evidence=f"{len(ratios)} directions, compared with the probe of {when}",
        advice=f"look at what was changed at {host} since then", hosts=(host,), ratio=ratio, loss=1 - ratio,
    )  # fmt: skip


def _link(ratio: float, old: PairLink, new: PairLink, when: str) -> Finding:
    return Finding(
        kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning",
        what=f"{new.source} to {new.target}: {ratio:.0%} of the bandwidth that it had ({new.way})",
        evidence=f"{rate_text(new.bandwidth_bytes_per_second)} now, {rate_text(old.bandwidth_bytes_per_second)} on {when}",
        advice="look at what was changed on this way since then", hosts=(new.source, new.target),
        source=new.source, target=new.target, ratio=ratio, loss=(1 - ratio) / 2,
    )  # fmt: skip


def _latency(old: PairLink, new: PairLink) -> Finding:
    assert old.latency_seconds and new.latency_seconds
    return Finding(
        kind="worse_than_baseline", severity="note",
        what=f"{new.source} to {new.target}: latency {new.latency_seconds * 1e6:.0f} us, was {old.latency_seconds * 1e6:.0f} us",
        evidence=f"half a round trip of 8 bytes over {new.way}, alone", advice="look for new hops or power saving",
        hosts=(new.source, new.target), source=new.source, target=new.target,
        ratio=old.latency_seconds / new.latency_seconds, loss=0.05,
    )  # fmt: skip
