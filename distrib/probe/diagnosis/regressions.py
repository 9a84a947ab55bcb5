"""What became worse since an earlier probe. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from distrib.cluster.measurements import Collective, InsideLink, Measured, PairLink
from distrib.cluster.shared_links import SLOWED
from distrib.probe.diagnosis.finding import Finding, bit_rate_text, ranked
from distrib.probe.settings import ONE_STREAM_BYTES_PER_SECOND
from distrib.units import format_duration, format_rate, format_size

WORSE = 0.9
"""Of what a link had; below it the link has become worse."""

LATENCY_WORSE, LATENCY_SECONDS = 2.0, 50e-6
"""A latency is worse when it is so many times what it was, and so many seconds more."""

LITTLE = 0.5
"""Where a smaller part of the directions can be compared, that is said."""

SPARE, MOST = 3, 0.8
"""A host with at least so many worse links, and so large a part of them, is told of once."""

NEARLY_ALL = 0.95
"""Where so large a part of all links is worse, no host is to blame more than the others."""


def worse(before: Measured, now: Measured) -> tuple[Finding, ...]:
    """Findings for what both probes measured in the same manner and that lost a tenth or more."""
    links = _compared(before, now)
    found = _little(links, before, now)
    for network in sorted({pair.network or "" for _, pair in links}):
        found += _links([(old, pair) for old, pair in links if (pair.network or "") == network], network, before.when)
    return ranked([*found, *_copies(before, now), *_collectives(before, now)])


def _links(links: Sequence[tuple[PairLink, PairLink]], network: str, when: str) -> list[Finding]:
    """Findings of one network's links; the job's own has no name."""
    lost: dict[tuple[str, str], tuple[float, PairLink, PairLink]] = {}
    both: dict[str, set[str]] = {}
    found = []
    on = f" on {network}" if network else ""
    for old, pair in links:
        both.setdefault(pair.source, set()).add(pair.target)
        both.setdefault(pair.target, set()).add(pair.source)
        ratio = pair.bandwidth_bytes_per_second / old.bandwidth_bytes_per_second
        known = lost.get((pair.source, pair.target))
        if ratio < WORSE and (known is None or ratio < known[0]):
            lost[pair.source, pair.target] = ratio, old, pair
        if pair.load == "alone" and old.latency_seconds and pair.latency_seconds:
            more = pair.latency_seconds - old.latency_seconds
            if more > LATENCY_SECONDS and pair.latency_seconds > LATENCY_WORSE * old.latency_seconds:
                found.append(_latency(old, pair, on))
    if len(both) > SPARE and len(lost) >= NEARLY_ALL * len({(pair.source, pair.target) for _, pair in links}):
        # Nobody is to blame more than the others.
        return [*found, _all(tuple(both), [ratio for ratio, _, _ in lost.values()], on, when)]
    while lost:
        peers: dict[str, set[str]] = {}
        for source, target in lost:
            peers.setdefault(source, set()).add(target)
            peers.setdefault(target, set()).add(source)
        host = max(peers, key=lambda name: (len(peers[name]), name))
        if len(peers[host]) < SPARE or len(peers[host]) < MOST * len(both[host]):
            break
        mine = [lost.pop(pair) for pair in list(lost) if host in pair]
        found.append(_host(host, [ratio for ratio, _, _ in mine], on, when))
    return [*found, *(_link(ratio, old, pair, on, when) for ratio, old, pair in lost.values())]


def unchanged(before: Measured, now: Measured) -> str:
    """What is said where nothing became worse."""
    directions = {(new.source, new.target) for _, new in _compared(before, now)}
    copies, collectives = len(list(_same_copies(before, now))), len(list(_same_collectives(before, now)))
    more = f", {copies} way{'s' * (copies != 1)} inside hosts" if copies else ""
    more += f", {collectives} all-reduce{'s' * (collectives != 1)}" if collectives else ""
    return f"compared with the probe of {before.when}: none of {len(directions)} directions{more} became worse"


def _compared(before: Measured, now: Measured) -> list[tuple[PairLink, PairLink]]:
    """Each link as it was and as it is: alone where both probes have that, else beside the same others."""
    fastest: dict[tuple[str, str, str | None], float] = {}
    for pair in before.pairs:
        for host in (pair.source, pair.target):
            key = host, pair.way, pair.network
            fastest[key] = max(fastest.get(key, 0.0), pair.bandwidth_bytes_per_second)

    def unslowed(pair: PairLink) -> bool:
        """Whether the others left it what it could do: who gets how much of a shared link is chance."""
        own = min(fastest[host, pair.way, pair.network] for host in (pair.source, pair.target))
        return pair.bandwidth_bytes_per_second >= SLOWED * own

    earlier = {_key(pair): pair for pair in before.pairs}
    found: dict[tuple[str, str, str, str | None], tuple[PairLink, PairLink]] = {}
    for load in ("alone", "together") if before.hosts == now.hosts else ("alone",):
        for pair in now.pairs:
            old = earlier.get(_key(pair))
            if pair.load != load or pair.both_ways or old is None or not _same_streams(old, pair):
                continue
            if load == "alone" or unslowed(old):
                found.setdefault((pair.source, pair.target, pair.way, pair.network), (old, pair))
    return list(found.values())


def _key(pair: PairLink) -> tuple[str, str, str, str, bool, str | None]:
    return pair.source, pair.target, pair.way, pair.load, pair.both_ways, pair.network


def _same_streams(old: PairLink, new: PairLink) -> bool:
    """Whether as many connections were used, or the link is one that a single one fills."""
    faster = max(old.bandwidth_bytes_per_second, new.bandwidth_bytes_per_second)
    return new.way == "mpi" or old.streams == new.streams or faster <= ONE_STREAM_BYTES_PER_SECOND


def _little(links: Sequence[tuple[PairLink, PairLink]], before: Measured, now: Measured) -> list[Finding]:
    """A note where most of what was measured has nothing to be compared with: silence would pass for good news."""
    compared = {(pair.source, pair.target) for _, pair in links}
    every = {(pair.source, pair.target) for pair in now.pairs}
    if len(compared) >= LITTLE * len(every):
        return []
    return [
        Finding(
            kind="not_compared", severity="note",
            what=f"only {len(compared)} of {len(every)} directions could be compared with the probe of {before.when}",
            evidence="the others were not measured then, or with other hosts beside them, or by another number of TCP streams",
            advice="probe the same hosts in the same mode (--quick, --full) as then", hosts=now.hosts,
            ratio=len(compared) / len(every),
        )
    ]  # fmt: skip


def _host(host: str, ratios: list[float], on: str, when: str) -> Finding:
    ratio = statistics.median(ratios)
    return Finding(
        kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning",
        what=f"{host}: its links{on} have {ratio:.0%} of the bandwidth that they had",
        evidence=f"{len(ratios)} directions, compared with the probe of {when}",
        advice=f"look at what was changed at {host} since then", hosts=(host,), ratio=ratio, loss=1 - ratio,
    )  # fmt: skip


def _link(ratio: float, old: PairLink, new: PairLink, on: str, when: str) -> Finding:
    return Finding(
        kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning",
        what=f"{new.source} to {new.target}: {ratio:.0%} of the bandwidth that it had "
        f"({new.way}{on}{', beside others' if new.load == 'together' else ''})",
        evidence=f"{bit_rate_text(new.bandwidth_bytes_per_second)} now, {bit_rate_text(old.bandwidth_bytes_per_second)} on {when}",
        advice="look at what was changed on this way since then", hosts=(new.source, new.target),
        source=new.source, target=new.target, ratio=ratio, loss=(1 - ratio) / 2,
    )  # fmt: skip


def _all(hosts: tuple[str, ...], ratios: list[float], on: str, when: str) -> Finding:
    ratio = statistics.median(ratios)
    return Finding(
        kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning",
        what=f"nearly all links{on} have {ratio:.0%} of the bandwidth that they had",
        evidence=f"{len(ratios)} directions, compared with the probe of {when}",
        advice="look at what all hosts share: the switch, the network that is used, a new kernel or other work on it",
        hosts=hosts, ratio=ratio, loss=1 - ratio,
    )  # fmt: skip


def _same_copies(before: Measured, now: Measured) -> Iterator[tuple[InsideLink, InsideLink]]:
    """Ways inside hosts that both have; but for copies in memory, which whatever else runs there slows."""
    earlier = {(link.host, link.source, link.target): link for link in before.inside}
    for link in now.inside:
        old = earlier.get((link.host, link.source, link.target))
        if old and not link.source == link.target == "memory":
            yield old, link


def _copies(before: Measured, now: Measured) -> Iterator[Finding]:
    """A finding for each way that is worse; one for a host that has many."""
    lost: dict[str, list[tuple[float, InsideLink, InsideLink]]] = {}
    for old, new in _same_copies(before, now):
        ratio = new.bandwidth_bytes_per_second / old.bandwidth_bytes_per_second
        if ratio < WORSE:
            lost.setdefault(new.host, []).append((ratio, old, new))
    for host, ways in lost.items():
        ways.sort(key=lambda each: each[0])
        if len(ways) > SPARE:
            told, ratio = f"{len(ways)} ways inside it have", statistics.median(ratio for ratio, _, _ in ways)
            yield _copy(f"{host}: {told} {ratio:.0%} of the bandwidth that they had", ratio, *ways[0][1:], before.when)
            continue
        for ratio, old, new in ways:
            what = (
                f"{host}: {new.source} to {new.target}: {ratio:.0%} of the bandwidth that it had ({new.path or 'copy'})"
            )
            yield _copy(what, ratio, old, new, before.when)


def _copy(what: str, ratio: float, old: InsideLink, new: InsideLink, when: str) -> Finding:
    return Finding(
        kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning", what=what,
        evidence=f"{new.source} to {new.target}: {format_rate(new.bandwidth_bytes_per_second, digits=3)} now ({new.path or 'copy'}), "
        f"{format_rate(old.bandwidth_bytes_per_second, digits=3)} ({old.path or 'copy'}) on {when}",
        advice="nvidia-smi -q: link width and generation, NVLinks that are up", hosts=(new.host,), ratio=ratio,
        loss=(1 - ratio) / 2,
    )  # fmt: skip


def _same_collectives(before: Measured, now: Measured) -> Iterator[tuple[Collective, float, float, int]]:
    """All-reduces over the same ranks, with the seconds then and now of the largest size that both have."""

    def key(one: Collective) -> tuple[object, ...]:
        return one.backend, one.hosts, one.ranks, one.gpudirect

    earlier = {key(one): {point.size_bytes: point.seconds for point in one.curve} for one in before.collectives}
    for one in now.collectives:
        times = {point.size_bytes: point.seconds for point in one.curve}
        if shared := times.keys() & earlier.get(key(one), {}).keys():
            size = max(shared)
            yield one, earlier[key(one)][size], times[size], size


def _collectives(before: Measured, now: Measured) -> Iterator[Finding]:
    for one, old, new, size in _same_collectives(before, now):
        ratio = old / new
        if ratio < WORSE:
            yield Finding(
                kind="worse_than_baseline", severity="error" if ratio < 0.75 else "warning",
                what=f"all-reduce over {len(one.hosts)} hosts, {one.ranks} ranks: {ratio:.0%} of the speed that it had",
                evidence=f"{format_size(size, binary=True)} took {format_duration(old, digits=3)} on {before.when}, "
                f"{format_duration(new, digits=3)} now",
                advice="see which of the links became worse; else versions of torch and NCCL, and what else runs there",
                hosts=one.hosts, ratio=ratio, loss=(1 - ratio) / 2,
            )  # fmt: skip


def _latency(old: PairLink, new: PairLink, on: str) -> Finding:
    assert old.latency_seconds and new.latency_seconds
    return Finding(
        kind="worse_than_baseline", severity="note",
        what=f"{new.source} to {new.target}: latency {new.latency_seconds * 1e6:.0f} us, was {old.latency_seconds * 1e6:.0f} us",
        evidence=f"half a round trip of 8 bytes over {new.way}{on}, alone", advice="look for new hops or power saving",
        hosts=(new.source, new.target), source=new.source, target=new.target,
        ratio=old.latency_seconds / new.latency_seconds, loss=0.05,
    )  # fmt: skip
