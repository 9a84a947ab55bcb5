"""What the hosts' own descriptions show: cards of several rates, or slower than they could be, GPUDirect RDMA, PCIe. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from distrib.cluster.hardware_catalog import LinkKind
from distrib.cluster.link_spec import Link, parse_network
from distrib.cluster.measurements import Collective
from distrib.cluster.node import Nic, shown_hosts
from distrib.probe.diagnosis.finding import Finding, bit_rate_text
from distrib.probe.diagnosis.remeasure import class_of_pair, classes_of, one_way
from distrib.probe.records import Facts, Gpu, LoadPattern, PairMeasurement
from distrib.probe.secondary_networks import measured_cards
from distrib.probe.settings import ONE_STREAM_BYTES_PER_SECOND, Transport
from distrib.units import format_size

OF_USABLE = 0.75
"""Of what the catalogue expects of such a card; below this something is wrong."""

ALIKE = 1.1
"""Hosts that all reach the same, but for so much, have the same limit."""

ONE_RECEIVER_BYTES_PER_SECOND = 12.5e9
"""Over TCP a host is sent everything to one thread of the probe, which copies it: faster cards tell nothing of themselves so."""

GPUDIRECT_GAIN = 1.05
"""Staged through host memory 4 x 200 Gb/s reach 0.83 of what they do with GPUDirect RDMA (NCCL issue 1579), 100 Gb/s half (465)."""


def card_speeds(facts: Mapping[str, Facts], way: Transport, cards: Mapping[str, str] | None = None) -> dict[str, float]:
    """The nominal rates of the cards that are used, by host; none unless all are known. `cards`: which, where not the job's own."""
    found = {}
    for host, each in facts.items():
        name = cards.get(host) if cards is not None else each.interface
        if cards is None or name:
            card = each.named(name)
            speed = card.speed_bytes_per_second if card else None
            found[host] = each.rdma_bytes_per_second if way == "mpi" else speed
    return {host: speed for host, speed in found.items() if speed} if all(found.values()) else {}


def mixed_cards(speeds: Mapping[str, float]) -> list[Finding]:
    """Hosts whose cards are slower than most: they are judged among themselves, and a job over all waits for them.

    One host alone more likely has a bad cable, with which its card agreed on a lower rate.
    """
    if not speeds:
        return []
    usual = statistics.mode(sorted(speeds.values(), reverse=True))  # of equally common ones the faster
    is_usual = 2 * sum(speed == usual for speed in speeds.values()) > len(speeds)
    found = []
    for speed in sorted({speed for speed in speeds.values() if speed < usual}):
        hosts = tuple(host for host, own in speeds.items() if own == speed)
        found.append(
            Finding(
                kind="mixed_cards", severity="note" if len(hosts) > 1 else "warning",
                what=f"{shown_hosts(hosts)}: {'their cards run' if len(hosts) > 1 else 'its card runs'} at "
                f"{bit_rate_text(speed)}, {f'where {bit_rate_text(usual)} is usual here' if is_usual else f'and {bit_rate_text(usual)} elsewhere'}",
                evidence="the rates that the cards say they have; links are compared with those of their own rate",
                advice="a job over all hosts goes at the pace of the slowest: use the slower ones in jobs of their own, "
                "or see whether cable and switch port allow no more (ethtool)",
                hosts=hosts, ratio=speed / usual, loss=1 - speed / usual,
            )
        )  # fmt: skip
    return found


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
            kind="gpudirect_off", severity="note",
            what="all-reduce is no faster with GPUDirect RDMA than without: it is not used, or host memory keeps up with the cards",
            evidence=f"{format_size(size, binary=True)} take {ratio:.2f} times as long without it (NCCL_NET_GDR_LEVEL=LOC)",
            advice="see NCCL_DEBUG=INFO for GDRDMA, whether nvidia_peermem is loaded, and that GPU and card share a PCIe switch",
            hosts=collectives[-1].hosts, ratio=ratio, loss=0.3,
        )
    ]  # fmt: skip


def of_facts(
    facts: Mapping[str, Facts],
    seen: Sequence[PairMeasurement],
    way: Transport,
    collectives: Sequence[Collective],
    described: Mapping[str, Sequence[Nic]],
    used: Mapping[str, Sequence[Gpu]],
) -> list[Finding]:
    """Rate below the card's, wrong interface, cards that are only on paper, GPUDirect RDMA off, narrow PCIe.

    `used`: GPUs as they were right after they were used, by host.
    """
    found = [
        *_below_nominal(facts, seen, way, described),
        *_not_there(facts, described),
        *_mpi_beside_rdma(facts),
        *_gpudirect(facts, collectives),
    ]
    tried = measured_cards(seen, facts).values()
    for host, each in facts.items():
        if way == "tcp":
            found += _faster_interface(each, {cards[host] for cards in tried if host in cards})
        for gpu in used.get(host, each.gpus):
            width, possible = gpu.pcie_width, gpu.pcie_width_possible
            awake = host in used or gpu.pcie_generation == gpu.pcie_generation_possible  # an idle link saves power
            if awake and width and possible and width < possible:
                found.append(
                    Finding(
                        kind="narrow_pcie", severity="warning",
                        what=f"{host}: GPU {gpu.index} has a PCIe x{width} link where x{possible} is possible",
                        evidence=f"NVML, {gpu.name}", advice="reseat the card, and look at its riser: what is possible here counts the slot already",
                        hosts=(host,), ratio=width / possible, loss=0.3 * (1 - width / possible),
                    )
                )  # fmt: skip
    return found


def _below_nominal(
    facts: Mapping[str, Facts], seen: Sequence[PairMeasurement], way: Transport, described: Mapping[str, Sequence[Nic]]
) -> list[Finding]:
    """Hosts that at best, with cards as fast as their own, reach less than the catalogue expects over this way."""
    cards = {host: card for host, each in facts.items() if (card := _card(each, way, described.get(host, ())))}
    classes = classes_of({host: card.rate_bytes_per_second for host, card in cards.items()})
    best: dict[str, tuple[float, Link]] = {}
    # Beside others a card can do no more than alone; and some pairs may never have been alone.
    for record in (record for load in get_args(LoadPattern) for record in one_way(seen, way, load)):
        rate = class_of_pair(classes, record)
        tells = ONE_STREAM_BYTES_PER_SECOND if record.streams == 1 else ONE_RECEIVER_BYTES_PER_SECOND
        if way == "tcp" and rate > tells:
            continue
        for host, other in ((record.source, record.target), (record.target, record.source)):
            if rate and rate >= classes[host]:
                card = min(cards[host], cards[other], key=lambda link: link.rate_bytes_per_second)
                part = record.bandwidth_bytes_per_second / card.usable_bytes_per_second
                if host not in best or part > best[host][0]:
                    best[host] = part, card
    low = {host: best[host] for host in facts if host in best and best[host][0] < OF_USABLE}
    rates = [part * card.usable_bytes_per_second for part, card in low.values()]
    if len(low) == len(best) > 2 and max(rates) < ALIKE * min(rates):
        part, card = max(low.values(), key=lambda each: each[0])
        limit = (
            "all have the same limit: look at the switch; where machines are rented it is what the provider allows, "
            "whatever the card says, and belongs into the topology file as the card's rate"
        )
        return [_below(f"{shown_hosts(tuple(low))}: each", tuple(low), part, card, limit)]
    slot = (
        "see whether one processor is busy with the card's interrupts, the PCIe slot is narrow, "
        "or the switch is slower than the card"
    )
    return [_below(f"{host}:", (host,), part, card, slot) for host, (part, card) in low.items()]


def _below(who: str, hosts: tuple[str, ...], part: float, card: Link, advice: str) -> Finding:
    return Finding(
        kind="below_nominal", severity="warning", what=f"{who} reaches {part:.0%} of what its card is good for",
        evidence=f"{bit_rate_text(part * card.usable_bytes_per_second)} at best, of about "
        f"{bit_rate_text(card.usable_bytes_per_second)} that a card of {bit_rate_text(card.rate_bytes_per_second)} brings",
        advice=advice, hosts=hosts, ratio=part, loss=0.3 * (1 - part),
    )  # fmt: skip


def _not_there(facts: Mapping[str, Facts], described: Mapping[str, Sequence[Nic]]) -> list[Finding]:
    """Cards that the topology gives to hosts that have none of that name."""
    absent: dict[str, list[str]] = {}
    real = {
        host: (*(interface.name for interface in each.interfaces), *each.rdma_devices) for host, each in facts.items()
    }
    for host, each in facts.items():
        for nic in described.get(host, ()):
            # RoCE cards go by either name, and InfiniBand's by those of RDMA devices, which may not be seen in a container.
            if each.interfaces and nic.name.partition(":")[0] not in real[host] and nic.link.kind != "infiniband":
                absent.setdefault(nic.name, []).append(host)
    return [
        Finding(
            kind="no_such_card", severity="note", what=f"{shown_hosts(hosts)}: the topology gives {name}, which is not there",
            evidence=f"{hosts[0]} has {', '.join(real[hosts[0]])}",
            advice="correct the name in the topology file: rates are looked up by it", hosts=tuple(hosts),
        )
        for name, hosts in absent.items()
    ]  # fmt: skip


def _card(facts: Facts, way: Transport, described: Sequence[Nic]) -> Link | None:
    """The card that a host uses, as people say it is, else as it says itself; of several RDMA ports one, as MPI need not
    use them all."""
    if way == "mpi":
        ports = facts.rdma_bytes_per_second
        if not ports:
            return None
        said = [nic.link.rate_bytes_per_second for nic in described if nic.link.kind == facts.rdma_kind]
        return _link(max(said, default=ports / facts.rdma_ports), facts.rdma_kind)  # the fastest ports are used
    for nic in described:
        if nic.name == facts.interface and nic.link.kind != "infiniband":
            return _link(nic.link.rate_bytes_per_second, "ethernet")
    own = facts.named(facts.interface)
    speed = own.speed_bytes_per_second if own and own.physical else None
    return _link(speed, "ethernet") if speed else None


def _link(bytes_per_second: float, kind: LinkKind) -> Link:
    return parse_network(f"{bytes_per_second * 8 / 1e9:.6f}Gb/s", kind)


def _faster_interface(facts: Facts, tried: Collection[str]) -> list[Finding]:
    """A card that is faster than the one that is used, and was not measured itself."""
    own = facts.named(facts.interface)
    if own is None or not own.speed_bytes_per_second:
        return []
    others = [i for i in facts.interfaces if i.physical and i.up and i is not own and i.name not in tried]
    faster = max(others, key=lambda i: i.speed_bytes_per_second or 0.0, default=own)
    if (faster.speed_bytes_per_second or 0.0) <= 1.5 * own.speed_bytes_per_second:
        return []
    return [
        Finding(
            kind="wrong_interface", severity="warning",
            what=f"{facts.host}: {own.name} is used, but {faster.name} is faster",
            evidence=f"{own.name} is rated {bit_rate_text(own.speed_bytes_per_second)}, {faster.name} "
            f"{bit_rate_text(faster.speed_bytes_per_second or 0)}",
            advice=f"use it with --interface {faster.name} if it leads to the other hosts", hosts=(facts.host,), loss=0.4,
        )
    ]  # fmt: skip


def _mpi_beside_rdma(facts: Mapping[str, Facts]) -> list[Finding]:
    """Hosts on which MPI goes over TCP though the job has InfiniBand or RoCE there."""
    hosts = tuple(host for host, each in facts.items() if each.rdma_bytes_per_second and not each.mpi_over_rdma)
    if not hosts or len(facts) < 2:
        return []
    return [
        Finding(
            kind="wrong_interface", severity="warning",
            what=f"{shown_hosts(hosts)}: MPI goes over TCP, though there is InfiniBand or RoCE; the links are judged by TCP",
            evidence="an RDMA port is up, and the probe's process has opened none",
            advice="install rdma-core there (libibverbs, its providers), let the user lock memory (ulimit -l) and open /dev/infiniband; "
            "what Open MPI takes: -x OMPI_MCA_pml_base_verbose=10; NCCL may fare better or alike (-x NCCL_DEBUG=INFO)",
            hosts=hosts, loss=0.4,
        )
    ]  # fmt: skip


def _gpudirect(facts: Mapping[str, Facts], collectives: Sequence[Collective]) -> list[Finding]:
    """Hosts on which GPUDirect RDMA may be off; all-reduce with and without it, where that was measured, says more."""
    hosts = tuple(
        host for host, each in facts.items() if each.gpus and each.rdma_bytes_per_second and not each.gpudirect
    )
    if not hosts or {True, False} <= {each.gpudirect for each in collectives}:
        return []
    return [
        Finding(
            kind="gpudirect_off", severity="note",
            what=f"{shown_hosts(hosts)}: GPUDirect RDMA may be off; then gradients pass through host memory",
            evidence="GPUs and an RDMA port are there, neither the module nvidia_peermem nor a driver with DMA-BUF is; "
            "all-reduce was not measured with and without",
            advice="modprobe nvidia_peermem, or NVIDIA's open kernel modules with Linux 5.12 or later (NCCL_DEBUG=INFO shows GDRDMA)",
            hosts=hosts, loss=0.3,
        )
    ]  # fmt: skip
