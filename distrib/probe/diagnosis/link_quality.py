"""Checks for noise, lost packets, flapping NICs and NICs with different MTUs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, LinkRates
from distrib.probe.diagnosis.finding import Finding, first_of
from distrib.probe.records import PairMeasurement
from distrib.probe.settings import LIMITS


def _find_noisy_links(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report links whose rate varies much more than that of other links, measured one link at a time."""
    calm: dict[tuple[str, str], PairMeasurement] = {}
    for record in inputs.under("alone"):
        pair = record.source, record.target
        if pair not in calm or record.variation < calm[pair].variation:
            calm[pair] = record
    if len(calm) < 4:
        return
    median = statistics.median(record.variation for record in calm.values())
    for (source, target), record in calm.items():
        cpus_free = record.busy < LIMITS.saturated_cpu_fraction
        if cpus_free and record.variation > max(LIMITS.noisy_variation, 5 * median):
            yield Finding(
                kind="noisy_link", severity="note", what=f"{source} to {target}: rate varies by {record.variation:.0%}",
                evidence=f"coefficient of variation of {record.repetitions} repetitions; median of all links {median:.1%}",
                advice="check for other traffic on this path, and for errors and drops of both NICs (ethtool -S)",
                hosts=(source, target), source=source, target=target, loss=record.variation / 10,
            )  # fmt: skip


def _find_lossy_links(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report links on which TCP retransmits segments without other traffic."""
    fractions = _retransmitted_fractions(inputs)
    # The lower quartile: of three hosts a lossy one is at an end of most links.
    usual = sorted(fractions.values())[(len(fractions) - 1) // 4] if len(fractions) >= 4 else 0.0
    limit = max(LIMITS.retransmitted_fraction, 10 * usual)
    lossy = sorted((pair for pair in fractions if fractions[pair] > limit), key=lambda pair: -fractions[pair])
    if not lossy:
        return
    fraction = statistics.median(fractions[pair] for pair in lossy)
    common = {*lossy[0]}.intersection(*lossy) if len(lossy) > 2 else set()
    listed = first_of([f"{source} to {target}" for source, target in lossy])
    hosts = tuple(host for host in inputs.hosts if (host in common if common else any(host in p for p in lossy)))
    source, target = lossy[0] if len(lossy) == 1 else (None, None)
    yield Finding(
        kind="noisy_link", severity="note",
        what=f"{', '.join(sorted(common)) or listed}: {fraction:.1%} of all TCP segments sent again",
        evidence=f"TCP's counter while each link was measured alone; usual: {usual:.2%}; {listed}",
        advice="check errors and drops on these paths (ethtool -S), cables, duplex, and narrow links with small buffers",
        hosts=hosts, source=source, target=target, loss=fraction / 10,
    )  # fmt: skip


def _retransmitted_fractions(inputs: DiagnosisInputs) -> LinkRates:
    """Return the lowest fraction of TCP segments that each link sent again while it was measured alone."""
    fractions: LinkRates = {}
    for record in inputs.over("tcp").under("alone"):
        segment_bytes = (record.path_mtu or 1500) - 52  # headers of IP, and of TCP with time stamps
        segments = record.bandwidth_bytes_per_second * record.seconds / segment_bytes
        fraction = record.retransmits / max(segments, 1.0)
        pair = record.source, record.target
        fractions[pair] = min(fraction, fractions.get(pair, fraction))
    return fractions


def _find_flapping_nics(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report NICs whose link went down and up far more often than that of other NICs."""
    nics = {host: inputs.nic(host) for host in inputs.nic_names}
    changes = {host: nic.carrier_changes for host, nic in nics.items() if nic and nic.carrier_changes is not None}
    usual = statistics.median_low(changes.values()) if changes else 0
    for host, count in changes.items():
        if count >= LIMITS.min_carrier_changes and count > 5 * usual:
            name = inputs.nic_names[host]
            yield Finding(
                kind="noisy_link", severity="note",
                what=f"{host}: the link of {name} went down or up {count} times since its driver was loaded",
                evidence=f"/sys/class/net/{name}/carrier_changes; median of all hosts: {usual:g}",
                advice="check the cable, its plugs and the switch port; dmesg has the times", hosts=(host,), loss=0.05,
            )  # fmt: skip


def _find_mtu_differences(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report hosts whose NIC has another MTU than that of most hosts."""
    nics = {host: inputs.nic(host) for host in inputs.nic_names}
    mtus = {host: nic.mtu for host, nic in nics.items() if nic and nic.mtu}
    if len(set(mtus.values())) < 2:
        return
    # If two are equally common, the larger one was set on purpose.
    usual = statistics.mode(sorted(mtus.values(), reverse=True))
    count = sum(mtu == usual for mtu in mtus.values())
    for host, mtu in mtus.items():
        if mtu == usual:
            continue
        most = 2 * count > len(mtus)
        set_it = f"ip link set {inputs.nic_names[host]} mtu {usual}, and allow it on the switch port"
        yield Finding(
            kind="mtu", severity="warning",
            what=f"{host}: MTU {mtu}, {'most hosts have' if most else 'other hosts have'} {usual}",
            evidence=f"interface {inputs.nic_names[host]}; {count} host(s) have {usual}",
            advice=set_it if most else "set one MTU on all hosts and their switch ports", hosts=(host,), loss=0.05,
        )  # fmt: skip


LINK_QUALITY_CHECKS = (_find_noisy_links, _find_lossy_links, _find_flapping_nics, _find_mtu_differences)
