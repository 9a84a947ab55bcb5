"""What is wrong with the wire, worst first. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

import msgspec

from distrib.cluster.node import Nic, name_hosts
from distrib.probe.diagnosis.finding import Finding, Kind, bit_rate_text, ranked
from distrib.probe.diagnosis.gpu_copies import slow_copies
from distrib.probe.diagnosis.nics import card_speeds, gpudirect_idle, mixed_cards, of_facts
from distrib.probe.diagnosis.outliers import narrow_ways, slow_hosts, slow_links
from distrib.probe.diagnosis.oversubscription import oversubscribed
from distrib.probe.diagnosis.remeasure import (
    BUSY,
    HALF_DUPLEX,
    HALF_DUPLEX_BYTES_PER_SECOND,
    NOISY,
    Baseline,
    between_machines,
    full_duplex_only,
    one_way,
)
from distrib.probe.records import (
    CollectiveMeasurement,
    Facts,
    GpuLinkStates,
    IntraNodeMeasurement,
    PairMeasurement,
    ProbeStarted,
    Record,
    SharedLinkSides,
    fastest_measurements,
)
from distrib.probe.secondary_networks import measured_cards
from distrib.probe.settings import Transport

LOSSY = 0.02
"""Segments sent again, as a part of all, from which a way is said to lose packets."""

MANY_CHANGES = 20
"""Boots, updates and people at work make some."""

HEADERS_BYTES = 52
"""Of IP and TCP, with its time stamps, in each packet."""

PAIRS_SHOWN = 6

FASTER = 1.25
"""A network that carries so many times what the used one does is worth changing to."""


def find(records: Sequence[Record], described: Mapping[str, Sequence[Nic]] | None = None) -> tuple[Finding, ...]:
    """All findings of a probe, errors first and what costs most first among equals.

    `described`: the network cards that people say a host has.
    """
    start = next((record for record in records if isinstance(record, ProbeStarted)), None)
    if start is None:
        return ()
    every = [record for record in records if isinstance(record, PairMeasurement)]
    facts = {each.host: each for record in records if isinstance(record, ProbeStarted) for each in record.facts}
    groups = [record for record in records if isinstance(record, SharedLinkSides)]
    seen = between_machines(every, facts)
    speeds = card_speeds(facts, start.primary)
    slow = slow_hosts(seen, start.primary, speeds)
    found = [*slow, *mixed_cards(speeds), *_failed_by_way(every, start)]
    links = slow_links(seen, start.primary, {host for finding in slow for host in finding.hosts}, speeds)
    found += [hashed(finding, facts) for finding in links]
    found += other_cards(seen, start.primary, facts)
    uplinks = oversubscribed(seen, groups, start.primary, start.hosts)
    found += uplinks or [hashed(finding, facts) for finding in narrow_ways(seen, start.primary, [*slow, *links])]
    found += half_duplex(seen, start.primary, full_duplex_only(facts))
    found += [*noisy(seen, start.primary), *_mtu(facts), *_flapping(facts), *_lossy(seen, start.hosts)]
    collectives = [record.collective for record in records if isinstance(record, CollectiveMeasurement)]
    used = {record.host: record.gpus for record in records if isinstance(record, GpuLinkStates)}
    found += of_facts(facts, seen, start.primary, collectives, described or {}, used)
    found += gpudirect_idle(collectives)
    found += slow_copies([record.link for record in records if isinstance(record, IntraNodeMeasurement)], facts)
    return ranked(found)


def lost_host(host: str, why: str) -> Finding:
    """A host that went away during the probe, or whose rank ended again and again; its pairs are missing."""
    return Finding(
        kind="host_lost", severity="error", what=f"{host} was lost during the probe",
        evidence=f"{why}; the probe went on without it",
        advice=f"see whether {host} is up (distrib-topo check), then probe again", hosts=(host,), ratio=0.0, loss=1.0,
    )  # fmt: skip


def other_cards(seen: Sequence[PairMeasurement], way: Transport, facts: Mapping[str, Facts]) -> list[Finding]:
    """What is slow on the networks that the job does not use; and that one of them is faster than the one that it uses."""
    found: list[Finding] = []
    own = [record.bandwidth_bytes_per_second for record in one_way(seen, way, "alone")]
    for network, cards in sorted(measured_cards(seen, facts).items()):
        here = [msgspec.structs.replace(record, network=None) for record in seen if record.network == network]
        speeds = card_speeds(facts, "tcp", cards)
        slow = slow_hosts(here, "tcp", speeds)
        slow += slow_links(here, "tcp", {host for finding in slow for host in finding.hosts}, speeds)
        # That a network nobody uses passes nothing is said when it is given up; that it passes little spoils no job.
        if not all(record.failed for record in here):
            failed = _failed(here, tuple({host for record in here for host in (record.source, record.target)}))
            slow += [msgspec.structs.replace(finding, severity="warning") for finding in failed]
        for finding in slow:
            named = sorted(f"{host}'s {cards[host]}" for host in finding.hosts if host in cards)
            what = f"{finding.what} (on {', '.join([network, *named])})"
            found.append(msgspec.structs.replace(finding, what=what))
        rates = [record.bandwidth_bytes_per_second for record in one_way(here, "tcp", "alone")]
        hosts = tuple(sorted({host for record in here for host in (record.source, record.target)}))
        without = [host for host in facts if host not in hosts]
        use = f"use it with --interface {network}"
        if without:
            use = f"bring up the cards of {name_hosts(without)} on it, or leave these hosts out, and {use}"
        # Every step waits for the slowest pair: each must be there, and better than the worst now.
        better = rates and own and not any(record.failed for record in here) and min(rates) > min(own)
        if better and statistics.median(rates) > FASTER * statistics.median(own):
            found.append(
                Finding(
                    kind="wrong_interface", severity="warning",
                    what=f"{network} is faster than the network that is used",
                    evidence=f"{bit_rate_text(statistics.median(rates))} between its cards alone, "
                    f"{bit_rate_text(statistics.median(own))} on the one that is used (medians)",
                    advice=use, hosts=hosts,
                    ratio=statistics.median(own) / statistics.median(rates), loss=0.4,
                )
            )  # fmt: skip
    return found


# -- sharing, duplex, noise -------------------------------------------------------------------------------------------------


def hashed(finding: Finding, facts: Mapping[str, Facts]) -> Finding:
    """`finding` of a link, or what becomes of it where a card is a bond: streams that meet in one of its members share that."""
    cards = [facts[host].named(facts[host].interface) for host in finding.hosts if host in facts]
    if not any(card and card.kind in ("bond", "team") for card in cards):
        return finding
    return msgspec.structs.replace(
        finding, severity="note",
        evidence=f"{finding.evidence}; a bond sends each stream through one of its cards, and streams may have met there",
        advice="probe again: where the same pair is slow each time it is the link, else chance (xmit_hash_policy layer3+4 spreads best)",
        loss=finding.loss / 10,
    )  # fmt: skip


def half_duplex(seen: Sequence[PairMeasurement], way: Transport, never: Collection[str]) -> list[Finding]:
    """Pairs that, alone and sending both ways at once, share one rate: a half-duplex port, or one that was set by hand."""
    if way == "mpi":
        return []
    baseline = Baseline(seen, way)
    both = {
        (r.source, r.target): r
        for r in fastest_measurements(s for s in seen if s.way == way and s.both_ways).values()
        if r.load == "alone"
    }
    found = []
    for (source, target), record in both.items():
        back = both.get((target, source))
        own = 0.0 if {source, target} & {*never} else baseline.alone(source, target)
        may_be = 0 < own <= HALF_DUPLEX_BYTES_PER_SECOND
        if back is None or source > target or not may_be or max(record.busy, back.busy) >= BUSY:
            continue
        ratio = (record.bandwidth_bytes_per_second + back.bandwidth_bytes_per_second) / 2 / own
        if ratio < HALF_DUPLEX:
            found.append(
                Finding(
                    kind="half_duplex",
                    severity="error",
                    what=f"{source} and {target}: both ways at once each way gets {ratio:.0%}: half duplex?",
                    evidence=f"{bit_rate_text(own)} one way; {bit_rate_text(record.bandwidth_bytes_per_second)} and "
                    f"{bit_rate_text(back.bandwidth_bytes_per_second)} both ways",
                    advice="compare duplex and autonegotiation of both cards with their switch ports (ethtool)",
                    hosts=(source, target),
                    source=source,
                    target=target,
                    ratio=ratio,
                    loss=1 - ratio,
                )
            )
    return found


def noisy(seen: Sequence[PairMeasurement], way: Transport) -> list[Finding]:
    """Links whose rate varies much more than that of the others, though nothing else was measured."""
    calm: dict[tuple[str, str], PairMeasurement] = {}
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


def _lossy(seen: Sequence[PairMeasurement], hosts: Sequence[str]) -> list[Finding]:
    """Ways on which TCP must send again though they were used alone; by host where that has most of them."""
    parts: dict[tuple[str, str], float] = {}
    for record in seen:
        if record.way == "tcp" and record.load == "alone" and not record.failed:
            segment_bytes = (record.path_mtu or 1500) - HEADERS_BYTES
            segments = record.bandwidth_bytes_per_second * record.seconds / segment_bytes
            part = record.retransmits / max(segments, 1.0)
            parts[record.source, record.target] = min(part, parts.get((record.source, record.target), part))
    if not parts:
        return []
    # The better ones: of three hosts one that loses is at an end of most ways.
    usual = sorted(parts.values())[(len(parts) - 1) // 4] if len(parts) >= 4 else 0.0
    lossy = {pair: part for pair, part in parts.items() if part > max(LOSSY, 10 * usual)}
    found = []
    for host in hosts:
        own = {pair: part for pair, part in lossy.items() if host in pair}
        peers = {peer for pair in own for peer in pair} - {host}
        every = {peer for pair in parts if host in pair for peer in pair} - {host}
        if len(peers) > 1 and len(peers) > 0.75 * len(every):
            found.append(_loses(f"{host}, with {len(peers)} of {len(every)} hosts", own, usual, (host,)))
            lossy = {pair: part for pair, part in lossy.items() if pair not in own}
    worst = sorted(lossy, key=lambda pair: -lossy[pair])
    if len(worst) > PAIRS_SHOWN:  # they have more in common than a cable
        named = ", ".join(f"{source} to {target}" for source, target in worst[:PAIRS_SHOWN])
        where = f"{len(worst)} directions ({named} and {len(worst) - PAIRS_SHOWN} more)"
        ends = tuple(host for host in hosts if any(host in pair for pair in worst))
        return [*found, _loses(where, lossy, usual, ends)]
    return [*found, *(_loses(f"{a} to {b}", {(a, b): lossy[a, b]}, usual, (a, b)) for a, b in worst)]


def _loses(where: str, parts: Mapping[tuple[str, str], float], usual: float, hosts: tuple[str, ...]) -> Finding:
    part = statistics.median(parts.values())
    one = next(iter(parts)) if len(parts) == 1 else (None, None)
    return Finding(
        kind="noisy_link",
        severity="note",
        what=f"{where}: {part:.1%} of all segments were sent again",
        evidence=f"TCP's own count while each way was used alone{', median' if len(parts) > 1 else ''}; {usual:.2%} is usual here",
        advice="look for errors and drops on this way (ethtool -S), a bad cable, a duplex mismatch, or a narrow link that "
        "drops what it has no room for",
        hosts=hosts,
        source=one[0],
        target=one[1],
        loss=part / 10,
    )


def _flapping(facts: Mapping[str, Facts]) -> list[Finding]:
    """Cards whose link has come and gone far more often than the others': a cable or port that will do so again."""
    cards = {host: each.named(each.interface) for host, each in facts.items()}
    changes = {host: card.carrier_changes for host, card in cards.items() if card and card.carrier_changes is not None}
    usual = statistics.median_low(changes.values()) if changes else 0
    return [
        Finding(
            kind="noisy_link", severity="note",
            what=f"{host}: the link of {facts[host].interface} came or went {count} times since its driver was loaded",
            evidence=f"/sys/class/net/{facts[host].interface}/carrier_changes; {usual:g} is usual here",
            advice="look at the cable, its plugs and the switch port, and when it was (dmesg)", hosts=(host,), loss=0.05,
        )
        for host, count in changes.items()
        if count >= MANY_CHANGES and count > 5 * usual
    ]  # fmt: skip


# -- what failed, and what the hosts say of themselves -----------------------------------------------------------------------


def _failed(seen: Sequence[PairMeasurement], hosts: Sequence[str]) -> list[Finding]:
    """Pairs that could not be measured; where small messages pass and large ones do not, it is the MTU."""
    last = {(r.source, r.target): r.failed or "" for r in seen}
    # That a pair was measured does not say that its hosts are there: one may have fallen silent since.
    good = {pair for r in seen if not r.failed and "did not answer" not in last[pair := (r.source, r.target)]}
    bad: dict[tuple[str, str], str] = {}
    for record in seen:
        if record.failed and (record.source, record.target) not in good:
            bad.setdefault((record.source, record.target), record.failed)
    found = _failed_hosts(bad, hosts)
    lost = {host for finding in found for host in finding.hosts}
    return found + [_failed_pair(*pair, why) for pair, why in bad.items() if lost.isdisjoint(pair)]


def _failed_hosts(bad: Mapping[tuple[str, str], str], hosts: Sequence[str]) -> list[Finding]:
    """Hosts with which most others failed, or that did not answer several; `bad` says why, by source and target."""
    found = []
    for host in hosts:
        mine = {pair: why for pair, why in bad.items() if host in pair}
        peers = {peer for pair in mine for peer in pair if peer != host}
        most = len(peers) >= max(2, (len(hosts) - 1) * 0.8)
        # A host that freezes meanwhile has been measured with some: two that wait in vain for it are enough.
        silent = len(peers) > 1 and all(f"{host} did not answer" in why for why in mine.values())
        if not most and not silent:
            continue
        directions = f"{len(mine)} of {2 * (len(hosts) - 1)} directions"
        if not silent and all(map(_stalls, mine.values())):
            found.append(
                Finding(
                    kind="mtu", severity="error",
                    what=f"{host}: small messages pass, and next to nothing of large ones, with most other hosts: MTU mismatch, or a link "
                    "that is nearly dead?",
                    evidence=f"{directions}: {next(iter(mine.values()))}",
                    advice=f"distrib-topo check tells whether it is the MTU: then set that of the others on {host} and on its switch port; else look "
                    "at its rate and duplex (ethtool), and at errors and drops (ethtool -S)",
                    hosts=(host,), ratio=0.0, loss=1.0,
                )
            )  # fmt: skip
        else:
            nobody = len(peers) == len(hosts) - 1 and len(mine) == 2 * len(peers)
            whom = "any other host" if nobody else "most other hosts" if most else f"{len(peers)} other hosts"
            found.append(
                Finding(
                    kind="host_lost", severity="error",
                    what=f"{host} could not be measured with {whom}",
                    evidence=f"{directions}: {next(iter(mine.values()))}",
                    advice=f"see whether {host} is up and reaches the others"
                    + (", and what keeps its processes from running (ps, dmesg)" if silent else ""), hosts=(host,), ratio=0.0, loss=1.0,
                )
            )  # fmt: skip
    return found


def _failed_pair(source: str, target: str, why: str) -> Finding:
    """What is said of a pair that failed by itself."""
    kind: Kind = "not_measured"
    what, advice = "could not be measured", "see whether a firewall is between them"
    if _stalls(why):
        kind = "mtu"
        what = "small messages pass, and next to nothing of large ones: MTU mismatch, or a link that is nearly dead?"
        advice = (
            "distrib-topo check tells whether it is the MTU: then set the same on both hosts and every switch between; "
            "else look at rate, duplex and errors on the way (ethtool, ethtool -S)"
        )
    elif "did not answer" in why:
        advice = "see whether both are up, and what keeps their processes from running"
    return Finding(
        kind=kind, severity="error", what=f"{source} to {target}: {what}", evidence=why, advice=advice,
        hosts=(source, target), source=source, target=target, ratio=0.0, loss=0.5,
    )  # fmt: skip


def _failed_by_way(every: Sequence[PairMeasurement], start: ProbeStarted) -> list[Finding]:
    """What failed on the job's network: over the way that judges the links, and what else failed over the other one."""
    seen = [record for record in every if record.network is None]
    found = _failed([record for record in seen if record.way == start.primary], start.hosts)
    other = [record for record in seen if record.way != start.primary]
    if all(record.failed for record in other):  # that it passes nothing is said when it is given up
        return found
    told = [{*finding.hosts} for finding in found]
    return found + [
        msgspec.structs.replace(finding, severity="warning", what=f"{finding.what} (over {other[0].way})")
        for finding in _failed(other, start.hosts)
        if not any(hosts <= {*finding.hosts} for hosts in told)
    ]


def _stalls(why: str) -> bool:
    """Whether a connection was made and pings were answered, and then nothing came."""
    return "nearly nothing arrived" in why or "stands still" in why


def _mtu(facts: dict[str, Facts]) -> list[Finding]:
    """Hosts whose interface has another MTU than most."""
    mtus: dict[str, int] = {}
    for host, each in facts.items():
        mtu = next((i.mtu for i in each.interfaces if i.name == each.interface), None)
        if mtu:
            mtus[host] = mtu
    if len(set(mtus.values())) < 2:
        return []
    # Of equally common ones none is usual; the largest is what somebody has set.
    usual = statistics.mode(sorted(mtus.values(), reverse=True))
    have = sum(value == usual for value in mtus.values())
    is_usual = 2 * have > len(mtus)
    return [
        Finding(
            kind="mtu",
            severity="warning",
            what=f"{host}: MTU {mtu}, {f'where {usual} is usual here' if is_usual else f'and {usual} elsewhere'}",
            evidence=f"interface {facts[host].interface}; {have} host{'s have' if have > 1 else ' has'} {usual}",
            advice=f"ip link set {facts[host].interface} mtu {usual}, and see that the switch port allows it"
            if is_usual
            else "set the same on all hosts and their switch ports",
            hosts=(host,),
            loss=0.05,
        )
        for host, mtu in mtus.items()
        if mtu != usual
    ]
