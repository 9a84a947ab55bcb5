"""What is wrong with the wire, worst first. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from distrib.cluster.measured import Collective
from distrib.probe.finding import Finding, ranked, rate_text
from distrib.probe.records import CollectiveSeen, Facts, GroupsSeen, PairSeen, Record, Started, best
from distrib.probe.settings import Way
from distrib.probe.slow import slow_hosts, slow_links
from distrib.probe.suspects import BUSY, HALF_DUPLEX, NOISY, Baseline, one_way
from distrib.units import format_size

OF_NOMINAL = 0.7
"""TCP reaches 90 to 95 % of a card's rate; below this something is wrong."""

LOSS_FACTOR = 0.002
"""Segments sent again, as a part of all, from which a way loses packets."""

FASTER = 1.25
"""A network that carries so many times what the used one does is worth changing to."""

SEGMENT_BYTES = 1448

GPUDIRECT_GAIN = 1.05
"""Staged through host memory 4 x 200 Gb/s reach 0.83 of what they do with GPUDirect RDMA (NCCL issue 1579), 100 Gb/s half (465)."""


def find(records: Sequence[Record]) -> tuple[Finding, ...]:
    """All findings of a probe, errors first and what costs most first among equals."""
    start = next((record for record in records if isinstance(record, Started)), None)
    if start is None:
        return ()
    seen = [record for record in records if isinstance(record, PairSeen)]
    facts = {each.host: each for record in records if isinstance(record, Started) for each in record.facts}
    groups = [record for record in records if isinstance(record, GroupsSeen)]
    slow = slow_hosts(seen, start.primary)
    found = [*slow, *_failed([record for record in seen if record.network is None], start.hosts)]
    found += slow_links(seen, start.primary, {host for finding in slow for host in finding.hosts})
    found += other_cards(seen, start.primary)
    found += oversubscribed(seen, groups, start.primary)
    found += [*half_duplex(seen, start.primary), *noisy(seen, start.primary), *_mtu(seen, facts), *_lossy(seen)]
    found += of_facts(facts, seen, start.primary)
    found += gpudirect_idle([record.collective for record in records if isinstance(record, CollectiveSeen)])
    return ranked(found)


def lost_host(host: str, why: str) -> Finding:
    """A host that went away during the probe, or whose rank ended again and again; its pairs are missing."""
    return Finding(
        kind="host_lost", severity="error", what=f"{host} was lost during the probe",
        evidence=f"{why}; the probe went on without it",
        advice=f"see whether {host} is up (distrib-topo check), then probe again", hosts=(host,), ratio=0.0, loss=1.0,
    )  # fmt: skip


def other_cards(seen: Sequence[PairSeen], way: Way) -> list[Finding]:
    """What is slow on the networks that the job does not use; and that one of them is faster than the one that it uses."""
    found: list[Finding] = []
    own = [record.bandwidth_bytes_per_second for record in one_way(seen, way, "alone")]
    for network in sorted({record.network for record in seen if record.network}):
        here = [msgspec.structs.replace(record, network=None) for record in seen if record.network == network]
        slow = slow_hosts(here, "tcp")
        slow += slow_links(here, "tcp", {host for finding in slow for host in finding.hosts})
        slow += _failed(here, tuple({host for record in here for host in (record.source, record.target)}))
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


def oversubscribed(seen: Sequence[PairSeen], groups: Sequence[GroupsSeen], way: Way) -> list[Finding]:
    """A link that two sides share and that is too narrow for them."""
    baseline = Baseline(seen, way)
    found = []
    for group in groups[-1:]:
        left, right = (set(side) for side in group.sides)
        crossing = {
            (r.source, r.target): r
            for r in seen
            if r.step == "sharing/crossing" and not r.failed and r.source in left and r.target in right
        }
        if not crossing:
            continue
        wanted = sum(baseline.of(*pair) for pair in crossing)
        had = sum(record.bandwidth_bytes_per_second for record in crossing.values())
        ratio = wanted / had
        sides = [", ".join(side) for side in group.sides]
        found.append(
            Finding(
                kind="oversubscribed_uplink",
                severity="warning",
                what=f"the uplink between {sides[0]} and {sides[1]} is oversubscribed {ratio:.1f}:1",
                evidence=f"{len(crossing)} pairs across it at once reach {rate_text(had)} together, of {rate_text(wanted)} alone",
                advice="keep a job on one side where it fits; across, use the hierarchical all-reduce, and place "
                "neighbouring ranks on the same side; or widen the uplink",
                hosts=(*group.sides[0], *group.sides[1]),
                ratio=ratio,
                loss=1 - 1 / ratio,
            )
        )
    return found


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


def gpudirect_idle(collectives: Sequence[Collective]) -> list[Finding]:
    """An all-reduce of the whole cluster that is no faster with GPUDirect RDMA than without."""
    times: dict[bool, dict[int, float]] = {}
    most = max((each.ranks for each in collectives), default=0)
    for each in collectives:
        if each.ranks == most and each.gpudirect is not None:
            times[each.gpudirect] = {point.size_bytes: point.seconds for point in each.curve}
    shared = set(times.get(True, ())) & set(times.get(False, ()))
    if not shared:
        return []
    size = max(shared)
    ratio = times[False][size] / times[True][size]
    if ratio > GPUDIRECT_GAIN:
        return []
    return [
        Finding(
            kind="gpudirect_off", severity="warning",
            what="GPUDirect RDMA makes all-reduce no faster: gradients pass through host memory",
            evidence=f"{format_size(size, binary=True)} take {ratio:.2f} times as long without it (NCCL_NET_GDR_LEVEL=LOC)",
            advice="see NCCL_DEBUG=INFO for GDRDMA, whether nvidia_peermem is loaded, and that GPU and card share a PCIe switch",
            hosts=collectives[-1].hosts, ratio=ratio, loss=0.3,
        )
    ]  # fmt: skip


def of_facts(facts: dict[str, Facts], seen: Sequence[PairSeen], way: Way) -> list[Finding]:
    """What the hosts' own descriptions show: wrong interface, rate below the card's, GPUDirect off, narrow PCIe."""
    found: list[Finding] = []
    reached: dict[str, float] = {}
    tried = {(record.source, record.interface) for record in seen if record.interface}
    for record in one_way(seen, way, "alone"):
        for host in (record.source, record.target):
            reached[host] = max(reached.get(host, 0.0), record.bandwidth_bytes_per_second)
    for host, each in facts.items():
        own = next((i for i in each.interfaces if i.name == each.interface), None)
        nominal = own.speed_bytes_per_second if own and own.physical and way == "tcp" else None
        nominal = each.rdma_bytes_per_second if way == "mpi" else nominal
        rate = reached.get(host)
        if nominal and rate and rate < OF_NOMINAL * nominal:
            found.append(
                Finding(
                    kind="below_nominal", severity="warning",
                    what=f"{host}: reaches {rate / nominal:.0%} of what its card is rated for",
                    evidence=f"{rate_text(rate)} at best, of {rate_text(nominal)}",
                    advice="see whether one processor is busy with the card's interrupts, the PCIe slot is narrow, "
                    "or the switch is slower than the card", hosts=(host,), ratio=rate / nominal, loss=0.3 * (1 - rate / nominal),
                )
            )  # fmt: skip
        faster = max(
            (
                i
                for i in each.interfaces
                if i.physical and i.up and own and i is not own and (host, i.name) not in tried
            ),
            key=lambda i: i.speed_bytes_per_second or 0.0,
            default=None,
        )
        if (
            own
            and faster
            and (faster.speed_bytes_per_second or 0.0) > 1.5 * (own.speed_bytes_per_second or float("inf"))
        ):
            found.append(
                Finding(
                    kind="wrong_interface", severity="warning",
                    what=f"{host}: {own.name} is used, but {faster.name} is faster",
                    evidence=f"{own.name} is rated {rate_text(own.speed_bytes_per_second or 0)}, {faster.name} "
                    f"{rate_text(faster.speed_bytes_per_second or 0)}",
                    advice=f"use it with --interface {faster.name} if it leads to the other hosts", hosts=(host,), loss=0.4,
                )
            )  # fmt: skip
        if each.gpus and each.rdma_bytes_per_second and not each.peermem:
            found.append(
                Finding(
                    kind="gpudirect_off", severity="warning",
                    what=f"{host}: GPUDirect RDMA is off: gradients pass through host memory on their way to the card",
                    evidence="GPUs and an RDMA port are there, the kernel module nvidia_peermem is not",
                    advice="modprobe nvidia_peermem (or use a driver with dma-buf), and see NCCL_DEBUG=INFO for GDRDMA",
                    hosts=(host,), loss=0.3,
                )
            )  # fmt: skip
        for gpu in each.gpus:
            width, possible = gpu.pcie_width, gpu.pcie_width_possible
            if width and possible and width < possible:
                found.append(
                    Finding(
                        kind="narrow_pcie", severity="warning",
                        what=f"{host}: GPU {gpu.index} has a PCIe x{width} link where x{possible} is possible",
                        evidence=f"NVML, {gpu.name}", advice="reseat the card, or put it into a wider slot",
                        hosts=(host,), ratio=width / possible, loss=0.3 * (1 - width / possible),
                    )
                )  # fmt: skip
    return found
