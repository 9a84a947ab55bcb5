"""Comparison with an earlier probe: links, copies and collectives that became slower."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, LinkMeasurement, Measurements
from distrib.cluster.shared_links import SLOWED
from distrib.probe.diagnosis.finding import Finding, rank_findings
from distrib.probe.diagnosis.outliers import severity_of
from distrib.probe.settings import LIMITS
from distrib.units import bit_rate_text, format_duration, format_rate, format_size

LinkPair = tuple[LinkMeasurement, LinkMeasurement]
"""A link in the earlier probe and in this one."""


def find_regressions(before: Measurements, now: Measurements) -> tuple[Finding, ...]:
    """Report, ranked, links, copies and collectives that are slower by a tenth or more than in an earlier probe of the same kind.

    Args:
        before: The earlier probe.
        now: This probe.
    """
    links = _compared_links(before, now)
    found = [*_copy_regressions(before, now), *_collective_regressions(before, now)]
    for network in sorted({new.network or "" for _, new in links}):
        found += _link_regressions([pair for pair in links if (pair[1].network or "") == network], network, before.when)
    return rank_findings(found)


def describe_comparison(before: Measurements, now: Measurements) -> str:
    """Describe the extent of the comparison: numbers of directions, copies and all-reduces.

    Args:
        before: The earlier probe.
        now: This probe.
    """
    compared = {(new.source, new.target) for _, new in _compared_links(before, now)}
    every = {(link.source, link.target) for link in now.pairs}
    copies, collectives = len(list(_common_copies(before, now))), len(list(_common_collectives(before, now)))
    return (
        f"compared with the probe of {before.when}: {len(compared)} of {len(every)} directions, {copies} copies inside hosts, "
        f"{collectives} all-reduce(s)"
    )


def _compared_links(before: Measurements, now: Measurements) -> list[LinkPair]:
    """Pair the links of both probes: alone if both measured that, else beside the same other hosts."""
    fastest: dict[tuple[str, str, str | None], float] = {}
    for link in before.pairs:
        for host in (link.source, link.target):
            key = host, link.transport, link.network
            fastest[key] = max(fastest.get(key, 0.0), link.bandwidth_bytes_per_second)

    def comparable(old: LinkMeasurement) -> bool:
        # Rates of links that were slowed by concurrent traffic vary from run to run.
        own = min(fastest[host, old.transport, old.network] for host in (old.source, old.target))
        return old.load == "alone" or old.bandwidth_bytes_per_second >= SLOWED * own

    earlier = {_link_key(link): link for link in before.pairs}
    found: dict[tuple[str, str, str, str | None], LinkPair] = {}
    for load in ("alone", "together") if before.hosts == now.hosts else ("alone",):
        for new in now.pairs:
            old = earlier.get(_link_key(new))
            if new.load == load and not new.both_ways and old is not None and comparable(old):
                found.setdefault((new.source, new.target, new.transport, new.network), (old, new))
    return list(found.values())


def _link_key(link: LinkMeasurement) -> tuple[str, str, str, str, bool, str | None]:
    return link.source, link.target, link.transport, link.load, link.both_ways, link.network


def _link_regressions(links: Sequence[LinkPair], network: str, when: str) -> Iterator[Finding]:
    """Report slower links of one network: all as one finding, by host, or each."""
    on = f" on {network}" if network else ""
    yield from _latency_regressions(links, on)
    slower = _slower_links(links)
    hosts = tuple(dict.fromkeys(host for _, new in links for host in (new.source, new.target)))
    every = {(new.source, new.target) for _, new in links}
    if len(hosts) > 3 and len(slower) >= LIMITS.regressed_network_fraction * len(every):
        yield _group_regression(
            f"nearly all links{on} have", hosts, slower, when, "all hosts share, such as the switch"
        )
        return
    while slower and (host := _most_affected(slower, every)):
        own = {pair: slower.pop(pair) for pair in list(slower) if host in pair}
        yield _group_regression(f"{host}: its links{on} have", (host,), own, when, f"changed at {host}")
    for (source, target), (ratio, old, new) in slower.items():
        beside = ", beside other traffic" if new.load == "together" else ""
        yield Finding(
            kind="worse_than_baseline", severity=severity_of(ratio),
            what=f"{source} to {target}: {ratio:.0%} of the earlier bandwidth ({new.transport}{on}{beside})",
            evidence=f"{bit_rate_text(new.bandwidth_bytes_per_second)} now, "
            f"{bit_rate_text(old.bandwidth_bytes_per_second)} on {when}",
            advice="check what was changed on this path since then", hosts=(source, target),
            source=source, target=target, ratio=ratio, loss=(1 - ratio) / 2,
        )  # fmt: skip


SlowerLinks = dict[tuple[str, str], tuple[float, LinkMeasurement, LinkMeasurement]]
"""New over old bandwidth and both links, by source and target host."""


def _slower_links(links: Sequence[LinkPair]) -> SlowerLinks:
    """Select links that became slower; of several transports the one that lost most."""
    slower: SlowerLinks = {}
    for old, new in links:
        ratio = new.bandwidth_bytes_per_second / old.bandwidth_bytes_per_second
        known = slower.get((new.source, new.target))
        if ratio < LIMITS.regression_fraction and (known is None or ratio < known[0]):
            slower[new.source, new.target] = ratio, old, new
    return slower


def _most_affected(slower: SlowerLinks, every: set[tuple[str, str]]) -> str | None:
    """Return the host with most slower links, if these are three or more, and nearly all of its links."""
    peers: dict[str, set[str]] = {}
    for pair in slower:
        for host in pair:
            peers.setdefault(host, set()).update({*pair} - {host})
    host = max(peers, key=lambda name: (len(peers[name]), name))
    count = len({peer for pair in every if host in pair for peer in pair} - {host})
    return host if len(peers[host]) >= max(3, LIMITS.regressed_host_fraction * count) else None


def _group_regression(subject: str, hosts: tuple[str, ...], slower: SlowerLinks, when: str, suspect: str) -> Finding:
    ratio = statistics.median(each[0] for each in slower.values())
    return Finding(
        kind="worse_than_baseline", severity=severity_of(ratio), what=f"{subject} {ratio:.0%} of the earlier bandwidth",
        evidence=f"{len(slower)} directions, compared with the probe of {when}", advice=f"check what {suspect}",
        hosts=hosts, ratio=ratio, loss=1 - ratio,
    )  # fmt: skip


def _latency_regressions(links: Sequence[LinkPair], on: str) -> Iterator[Finding]:
    for old, new in links:
        before, now = old.latency_seconds, new.latency_seconds
        if new.load != "alone" or not before or not now or now - before <= LIMITS.latency_increase_seconds:
            continue
        if now > LIMITS.latency_factor * before:
            yield Finding(
                kind="worse_than_baseline", severity="note",
                what=f"{new.source} to {new.target}: latency {now * 1e6:.0f} us, was {before * 1e6:.0f} us",
                evidence=f"half a round trip of 8 bytes over {new.transport}{on}, alone", advice="check for new hops and power saving",
                hosts=(new.source, new.target), source=new.source, target=new.target, ratio=before / now, loss=0.05,
            )  # fmt: skip


def _common_copies(
    before: Measurements, now: Measurements
) -> Iterator[tuple[IntraNodeLinkMeasurement, IntraNodeLinkMeasurement]]:
    """Pair the copies of both probes, but for those in host memory, which other processes slow down."""
    earlier = {(link.host, link.source, link.target): link for link in before.inside}
    for link in now.inside:
        old = earlier.get((link.host, link.source, link.target))
        if old and not link.source == link.target == "memory":
            yield old, link


def _copy_regressions(before: Measurements, now: Measurements) -> Iterator[Finding]:
    """Report the slowest copy of each host, with the number of slower ones."""
    slower: dict[str, list[tuple[float, IntraNodeLinkMeasurement, IntraNodeLinkMeasurement]]] = {}
    for old, new in _common_copies(before, now):
        ratio = new.bandwidth_bytes_per_second / old.bandwidth_bytes_per_second
        if ratio < LIMITS.regression_fraction:
            slower.setdefault(new.host, []).append((ratio, old, new))
    for host, copies in slower.items():
        ratio, old, new = min(copies, key=lambda each: each[0])
        more = f", and {len(copies) - 1} more copies are slower" if len(copies) > 1 else ""
        yield Finding(
            kind="worse_than_baseline", severity=severity_of(ratio),
            what=f"{host}: {new.source} to {new.target} ({new.path or 'copy'}) has {ratio:.0%} of the earlier bandwidth{more}",
            evidence=f"{format_rate(new.bandwidth_bytes_per_second, digits=3)} now ({new.path or 'copy'}), "
            f"{format_rate(old.bandwidth_bytes_per_second, digits=3)} ({old.path or 'copy'}) on {before.when}",
            advice="nvidia-smi -q: check link width and generation, and that NVLinks are up", hosts=(host,), ratio=ratio,
            loss=(1 - ratio) / 2,
        )  # fmt: skip


def _common_collectives(before: Measurements, now: Measurements) -> Iterator[tuple[Collective, float, float, int]]:
    """Yield all-reduces over the same ranks, with the seconds then and now of the largest common size in bytes."""

    def key(one: Collective) -> tuple[object, ...]:
        return one.backend, one.hosts, one.ranks, one.gpudirect

    earlier = {key(one): {point.size_bytes: point.seconds for point in one.curve} for one in before.collectives}
    for one in now.collectives:
        times = {point.size_bytes: point.seconds for point in one.curve}
        if shared := times.keys() & earlier.get(key(one), {}).keys():
            size = max(shared)
            yield one, earlier[key(one)][size], times[size], size


def _collective_regressions(before: Measurements, now: Measurements) -> Iterator[Finding]:
    for one, old, new, size in _common_collectives(before, now):
        ratio = old / new
        if ratio < LIMITS.regression_fraction:
            yield Finding(
                kind="worse_than_baseline", severity=severity_of(ratio),
                what=f"all-reduce over {len(one.hosts)} hosts, {one.ranks} ranks: {ratio:.0%} of the earlier speed",
                evidence=f"{format_size(size, binary=True)} took {format_duration(old, digits=3)} on {before.when}, "
                f"{format_duration(new, digits=3)} now",
                advice="check which links became slower, the versions of torch and NCCL, and other jobs on these hosts",
                hosts=one.hosts, ratio=ratio, loss=(1 - ratio) / 2,
            )  # fmt: skip
