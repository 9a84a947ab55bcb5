"""What is wrong with the wire, worst first. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from distrib.cluster.node import Nic
from distrib.probe.cards import card_speeds, gpudirect_idle, mixed_cards, of_facts
from distrib.probe.finding import Finding, ranked, rate_text
from distrib.probe.records import CollectiveSeen, Facts, GroupsSeen, PairSeen, Record, Started, best
from distrib.probe.settings import Way
from distrib.probe.slow import slow_hosts, slow_links
from distrib.probe.suspects import BUSY, HALF_DUPLEX, NOISY, Baseline, one_way
from distrib.probe.uplinks import oversubscribed

LOSS_FACTOR = 0.002
"""Segments sent again, as a part of all, from which a way loses packets."""

FASTER = 1.25
"""A network that carries so many times what the used one does is worth changing to."""

SEGMENT_BYTES = 1448


def find(records: Sequence[Record], described: Mapping[str, Sequence[Nic]] | None = None) -> tuple[Finding, ...]:
    """All findings of a probe, errors first and what costs most first among equals.

    `described`: the network cards that people say a host has.
    """
    start = next((record for record in records if isinstance(record, Started)), None)
    if start is None:
        return ()
    seen = [record for record in records if isinstance(record, PairSeen)]
    facts = {each.host: each for record in records if isinstance(record, Started) for each in record.facts}
    groups = [record for record in records if isinstance(record, GroupsSeen)]
    speeds = card_speeds(facts, start.primary)
    slow = slow_hosts(seen, start.primary, speeds)
    found = [*slow, *mixed_cards(speeds), *_failed([record for record in seen if record.network is None], start.hosts)]
    found += slow_links(seen, start.primary, {host for finding in slow for host in finding.hosts}, speeds)
    found += other_cards(seen, start.primary, facts)
    found += oversubscribed(seen, groups, start.primary, start.hosts)
    found += [*half_duplex(seen, start.primary), *noisy(seen, start.primary), *_mtu(seen, facts), *_lossy(seen)]
    collectives = [record.collective for record in records if isinstance(record, CollectiveSeen)]
    found += [*of_facts(facts, seen, start.primary, collectives, described or {}), *gpudirect_idle(collectives)]
    return ranked(found)


def lost_host(host: str, why: str) -> Finding:
    """A host that went away during the probe, or whose rank ended again and again; its pairs are missing."""
    return Finding(
        kind="host_lost", severity="error", what=f"{host} was lost during the probe",
        evidence=f"{why}; the probe went on without it",
        advice=f"see whether {host} is up (distrib-topo check), then probe again", hosts=(host,), ratio=0.0, loss=1.0,
    )  # fmt: skip


def other_cards(seen: Sequence[PairSeen], way: Way, facts: Mapping[str, Facts]) -> list[Finding]:
    """What is slow on the networks that the job does not use; and that one of them is faster than the one that it uses."""
    found: list[Finding] = []
    own = [record.bandwidth_bytes_per_second for record in one_way(seen, way, "alone")]
    for network in sorted({record.network for record in seen if record.network}):
        here = [msgspec.structs.replace(record, network=None) for record in seen if record.network == network]
        speeds = card_speeds(facts, "tcp", {record.source: record.interface for record in here})
        slow = slow_hosts(here, "tcp", speeds)
        slow += slow_links(here, "tcp", {host for finding in slow for host in finding.hosts}, speeds)
        # That a network nobody uses passes nothing is said when it is given up; that it passes little spoils no job.
        if not all(record.failed for record in here):
            failed = _failed(here, tuple({host for record in here for host in (record.source, record.target)}))
            slow += [msgspec.structs.replace(finding, severity="warning") for finding in failed]
        for finding in slow:
            cards = {f"{r.source}'s {r.interface}" for r in here if r.source in finding.hosts and r.interface}
            what = f"{finding.what} (on {network}, {', '.join(sorted(cards))})"
            found.append(msgspec.structs.replace(finding, what=what))
        rates = [record.bandwidth_bytes_per_second for record in one_way(here, "tcp", "alone")]
        if own and rates and statistics.median(rates) > FASTER * statistics.median(own):
            found.append(
                Finding(
                    kind="wrong_interface", severity="warning",
                    what=f"{network} is faster than the network that is used",
                    evidence=f"{rate_text(statistics.median(rates))} between its cards alone, "
                    f"{rate_text(statistics.median(own))} on the one that is used (medians)",
                    advice=f"use it with --interface {network}",
                    hosts=tuple(sorted({host for record in here for host in (record.source, record.target)})),
                    ratio=statistics.median(own) / statistics.median(rates), loss=0.4,
                )
            )  # fmt: skip
    return found


# -- sharing, duplex, noise -------------------------------------------------------------------------------------------------


def half_duplex(seen: Sequence[PairSeen], way: Way) -> list[Finding]:
    """Pairs that, alone and sending both ways at once, share one rate: a half-duplex port, or one that was set by hand."""
    baseline = Baseline(seen, way)
    both = {
        (r.source, r.target): r
        for r in best(s for s in seen if s.way == way and s.both_ways).values()
        if r.load == "alone"
    }
    found = []
    for (source, target), record in both.items():
        back = both.get((target, source))
        own = baseline.of(source, target)
        if back is None or source > target or not own or max(record.busy, back.busy) >= BUSY:
            continue
        ratio = (record.bandwidth_bytes_per_second + back.bandwidth_bytes_per_second) / 2 / own
        if ratio < HALF_DUPLEX:
            found.append(
                Finding(
                    kind="half_duplex",
                    severity="error",
                    what=f"{source} and {target}: both ways at once each way gets {ratio:.0%}: half duplex?",
                    evidence=f"{rate_text(own)} one way; {rate_text(record.bandwidth_bytes_per_second)} and "
                    f"{rate_text(back.bandwidth_bytes_per_second)} both ways",
                    advice="compare duplex and autonegotiation of both cards with their switch ports (ethtool)",
                    hosts=(source, target),
                    source=source,
                    target=target,
                    ratio=ratio,
                    loss=1 - ratio,
                )
            )
    return found


def noisy(seen: Sequence[PairSeen], way: Way) -> list[Finding]:
    """Links whose rate varies much more than that of the others, though nothing else was measured."""
    calm: dict[tuple[str, str], PairSeen] = {}
    for record in one_way(seen, way, "alone"):
        pair = record.source, record.target
        if pair not in calm or record.variation < calm[pair].variation:
            calm[pair] = record
    if len(calm) < 4:
        return []
    usual = statistics.median(record.variation for record in calm.values())
    return [
        Finding(
            kind="noisy_link",
            severity="note",
            what=f"{source} to {target}: its rate varies by {record.variation:.0%}",
            evidence=f"coefficient of variation of {record.repetitions} repetitions; {usual:.1%} is usual here",
            advice="look for other traffic on this way, and for errors and drops of both cards (ethtool -S)",
            hosts=(source, target),
            source=source,
            target=target,
            loss=record.variation / 10,
        )
        for (source, target), record in calm.items()
        if record.variation > max(NOISY, 5 * usual) and record.busy < 0.9
    ]


def _lossy(seen: Sequence[PairSeen]) -> list[Finding]:
    """Ways on which TCP must send again though they were used alone."""
    parts: dict[tuple[str, str], list[float]] = {}
    for record in seen:
        if record.way == "tcp" and record.load == "alone" and not record.failed:
            segments = record.bandwidth_bytes_per_second * record.seconds / SEGMENT_BYTES
            parts.setdefault((record.source, record.target), []).append(record.retransmits / max(segments, 1.0))
    if len(parts) < 4:
        return []
    usual = statistics.median(min(values) for values in parts.values())
    return [
        Finding(
            kind="noisy_link",
            severity="note",
            what=f"{source} to {target}: {min(values):.1%} of all segments were sent again",
            evidence=f"TCP's own count while the way was used alone; {usual:.2%} is usual here",
            advice="look for errors and drops on this way (ethtool -S), a bad cable, or a duplex mismatch",
            hosts=(source, target),
            source=source,
            target=target,
            loss=min(values) / 10,
        )
        for (source, target), values in parts.items()
        if min(values) > max(10 * LOSS_FACTOR, 10 * usual)
    ]


# -- what failed, and what the hosts say of themselves -----------------------------------------------------------------------


def _failed(seen: Sequence[PairSeen], hosts: Sequence[str]) -> list[Finding]:
    """Pairs that could not be measured; where small messages pass and large ones do not, it is the MTU."""
    good = {(r.source, r.target) for r in seen if not r.failed}
    bad: dict[tuple[str, str], str] = {}
    for record in seen:
        if record.failed and (record.source, record.target) not in good:
            bad.setdefault((record.source, record.target), record.failed)
    found = []
    for host in hosts:
        mine = {pair: why for pair, why in bad.items() if host in pair}
        peers = {peer for pair in mine for peer in pair if peer != host}
        if len(peers) < max(2, (len(hosts) - 1) * 0.8):
            continue
        directions = f"{len(mine)} of {2 * (len(hosts) - 1)} directions"
        if all(map(_stalls, mine.values())):
            found.append(
                Finding(
                    kind="mtu", severity="error",
                    what=f"{host}: small messages pass, large ones do not, with most other hosts: MTU mismatch?",
                    evidence=f"{directions}: {next(iter(mine.values()))}",
                    advice=f"set the MTU of the others on {host} and on its switch port", hosts=(host,), ratio=0.0, loss=1.0,
                )
            )  # fmt: skip
        else:
            nobody = len(peers) == len(hosts) - 1 and len(mine) == 2 * len(peers)
            found.append(
                Finding(
                    kind="host_lost", severity="error",
                    what=f"{host} could not be measured with {'any other host' if nobody else 'most other hosts'}",
                    evidence=f"{directions}: {next(iter(mine.values()))}",
                    advice=f"see whether {host} is up and reaches the others", hosts=(host,), ratio=0.0, loss=1.0,
                )
            )  # fmt: skip
    lost = {host for finding in found for host in finding.hosts}
    for (source, target), why in bad.items():
        if not lost & {source, target}:
            stalls = _stalls(why)
            found.append(
                Finding(
                    kind="mtu" if stalls else "not_measured", severity="error",
                    what=f"{source} to {target}: " + ("small messages pass, large ones do not: MTU mismatch?" if stalls else "could not be measured"),
                    evidence=why,
                    advice="set the same MTU on both hosts and on every switch between them" if stalls
                    else "see whether a firewall is between them", hosts=(source, target), source=source, target=target,
                    ratio=0.0, loss=0.5,
                )
            )  # fmt: skip
    return found


def _stalls(why: str) -> bool:
    """Whether a connection was made and pings were answered, and then nothing came."""
    return "nearly nothing arrived" in why or "stands still" in why


def _mtu(seen: Sequence[PairSeen], facts: dict[str, Facts]) -> list[Finding]:
    """Hosts whose interface has another MTU than most."""
    mtus: dict[str, int] = {}
    for host, each in facts.items():
        mtu = next((i.mtu for i in each.interfaces if i.name == each.interface), None)
        if mtu:
            mtus[host] = mtu
    if len(set(mtus.values())) < 2:
        return []
    usual = statistics.mode(mtus.values())
    return [
        Finding(
            kind="mtu",
            severity="warning",
            what=f"{host}: MTU {mtu}, where {usual} is usual here",
            evidence=f"interface {facts[host].interface}; {sum(value == usual for value in mtus.values())} hosts have {usual}",
            advice=f"ip link set {facts[host].interface} mtu {usual}, and see that the switch port allows it",
            hosts=(host,),
            loss=0.05,
        )
        for host, mtu in mtus.items()
        if mtu != usual
    ]
