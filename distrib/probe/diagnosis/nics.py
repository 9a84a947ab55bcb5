"""Checks of the NICs: different rates, rates below the nominal one, NICs that the job does not use or that do not exist."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from distrib.cluster.hardware_catalog import LinkKind
from distrib.cluster.link_spec import LinkSpec, parse_network_link
from distrib.cluster.node import Nic, name_hosts, shown_hosts
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, rate_classes
from distrib.probe.diagnosis.finding import Finding
from distrib.probe.records import HostFacts
from distrib.probe.settings import LIMITS, Transport
from distrib.units import bit_rate_text


def _find_mixed_nics(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report hosts with slower NICs than most hosts: a job over all hosts waits for them.

    Links of such hosts are compared with each other. A single such host more likely has a bad cable, so that its NIC
    negotiated a lower rate.
    """
    rates = inputs.nic_rates
    if not rates:
        return
    usual = statistics.mode(sorted(rates.values(), reverse=True))
    most = 2 * sum(rate == usual for rate in rates.values()) > len(rates)
    for rate in sorted({rate for rate in rates.values() if rate < usual}):
        hosts = tuple(host for host, own in rates.items() if own == rate)
        yield Finding(
            kind="mixed_nics", severity="note" if len(hosts) > 1 else "warning",
            what=f"{shown_hosts(hosts)}: NIC rate {bit_rate_text(rate)}, {'most' if most else 'other'} hosts have "
            f"{bit_rate_text(usual)}",
            evidence="rates reported by the NICs; links are compared with those of the same rate",
            advice="a job over all hosts runs at the speed of the slowest: use slower hosts in jobs of their own, or check "
            "cable and switch port (ethtool)",
            hosts=hosts, ratio=rate / usual, loss=1 - rate / usual,
        )  # fmt: skip


def _find_nics_below_nominal(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report hosts that do not reach the rate expected of their NIC with peers that are at least as fast."""
    best = _best_nominal_fractions(inputs)
    low = {host: best[host] for host in inputs.facts if host in best and best[host][0] < LIMITS.severe_fraction}
    rates = [fraction * nic.usable_bytes_per_second for fraction, nic in low.values()]
    if len(low) == len(best) > 2 and max(rates) < 1.1 * min(rates):  # one common limit
        fraction, nic = max(low.values(), key=lambda each: each[0])
        advice = (
            "all hosts have the same limit: check the switch; if machines are rented, the provider limits the rate: give it as "
            "the NIC's rate in the topology file"
        )
        yield _below_nominal(f"{shown_hosts(tuple(low))}: each", tuple(low), fraction, nic, advice)
        return
    advice = (
        "check for one CPU core busy with the NIC's interrupts, a narrow PCIe slot, or a switch slower than the NIC"
    )
    for host, (fraction, nic) in low.items():
        yield _below_nominal(f"{host}:", (host,), fraction, nic, advice)


def _best_nominal_fractions(inputs: DiagnosisInputs) -> dict[str, tuple[float, LinkSpec]]:
    """Return each host's best rate as a fraction of the nominal rate of the pair's slower NIC, with that NIC."""
    nics = {
        host: nic
        for host, facts in inputs.facts.items()
        if (nic := _used_nic(facts, inputs.transport, inputs.configured_nics.get(host, ())))
    }
    classes = rate_classes({host: nic.rate_bytes_per_second for host, nic in nics.items()})
    best: dict[str, tuple[float, LinkSpec]] = {}
    for record in inputs.rated:  # with or without other traffic, which never increases a rate
        ends = record.source, record.target
        rate = min(classes.get(host, 0.0) for host in ends)
        if not rate or (inputs.transport == "tcp" and rate > LIMITS.one_thread_bytes_per_second):
            continue
        slower = min((nics[host] for host in ends), key=lambda nic: nic.rate_bytes_per_second)
        fraction = record.bandwidth_bytes_per_second / slower.usable_bytes_per_second
        for host in ends:
            if rate >= classes[host] and (host not in best or fraction > best[host][0]):
                best[host] = fraction, slower
    return best


def _below_nominal(subject: str, hosts: tuple[str, ...], fraction: float, nic: LinkSpec, advice: str) -> Finding:
    usable = nic.usable_bytes_per_second
    return Finding(
        kind="below_nominal", severity="warning", what=f"{subject} reaches {fraction:.0%} of the usable rate of its NIC",
        evidence=f"at best {bit_rate_text(fraction * usable)}, expected about {bit_rate_text(usable)} of a NIC of "
        f"{bit_rate_text(nic.rate_bytes_per_second)}",
        advice=advice, hosts=hosts, ratio=fraction, loss=0.3 * (1 - fraction),
    )  # fmt: skip


def _used_nic(facts: HostFacts, transport: Transport, configured: Sequence[Nic]) -> LinkSpec | None:
    """Return the NIC that the job uses: as configured, or else as reported. Of several RDMA ports MPI may use one only."""
    if transport == "mpi":
        ports = facts.rdma_bytes_per_second
        if not ports:
            return None
        rates = [nic.link.rate_bytes_per_second for nic in configured if nic.link.kind == facts.rdma_kind]
        return _nic_link(max(rates, default=ports / facts.rdma_ports), facts.rdma_kind)  # the fastest ports are used
    for nic in configured:
        if nic.name == facts.interface and nic.link.kind != "infiniband":
            return _nic_link(nic.link.rate_bytes_per_second, "ethernet")
    own = facts.named(facts.interface)
    rate = own.speed_bytes_per_second if own and own.kind == "physical" else None
    return _nic_link(rate, "ethernet") if rate else None


def _nic_link(bytes_per_second: float, kind: LinkKind) -> LinkSpec:
    return parse_network_link(f"{bytes_per_second * 8 / 1e9:.6f}Gb/s", kind)


def _find_unknown_nics(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report NICs of the topology file that the hosts do not have."""
    absent: dict[str, list[str]] = {}
    real = {host: _device_names(facts) for host, facts in inputs.facts.items()}
    for host, facts in inputs.facts.items():
        for nic in inputs.configured_nics.get(host, ()):
            # InfiniBand NICs have the names of RDMA devices, which a container may not see.
            if facts.interfaces and nic.name.partition(":")[0] not in real[host] and nic.link.kind != "infiniband":
                absent.setdefault(nic.name, []).append(host)
    for name, hosts in absent.items():
        yield Finding(
            kind="unknown_nic", severity="note", what=f"{shown_hosts(hosts)}: no NIC {name}, which the topology file names",
            evidence=f"{hosts[0]} has {', '.join(real[hosts[0]])}",
            advice="correct the name in the topology file: rates are looked up by it", hosts=tuple(hosts),
        )  # fmt: skip


def _device_names(facts: HostFacts) -> tuple[str, ...]:
    return (*(interface.name for interface in facts.interfaces), *facts.rdma_devices)


def _find_faster_networks(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report networks whose slowest pair and median are better than on the network in use."""
    own = [record.bandwidth_bytes_per_second for record in inputs.under("alone")]
    for network in inputs.networks:
        rates = [record.bandwidth_bytes_per_second for record in network.under("alone")]
        # A training step waits for the slowest pair.
        if not rates or not own or any(record.failed for record in network.attempts) or min(rates) <= min(own):
            continue
        rate, used = statistics.median(rates), statistics.median(own)
        if rate > LIMITS.faster_network_factor * used:
            yield Finding(
                kind="wrong_interface", severity="warning", what=f"{network.network} is faster than the network that is used",
                evidence=f"median {bit_rate_text(rate)} alone, {bit_rate_text(used)} on the one that is used",
                advice=_use_network(network, inputs.facts), hosts=network.hosts, ratio=used / rate, loss=0.4,
            )  # fmt: skip


def _use_network(network: DiagnosisInputs, facts: Mapping[str, HostFacts]) -> str:
    use = f"use it with --interface {network.network}"
    without = [host for host in facts if host not in network.hosts]
    return f"bring up the NICs of {name_hosts(without)} on it, or leave these hosts out, and {use}" if without else use


def _find_mpi_without_rdma(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report hosts with InfiniBand or RoCE on which MPI uses TCP."""
    hosts = tuple(host for host, each in inputs.facts.items() if each.rdma_bytes_per_second and not each.mpi_over_rdma)
    if hosts and len(inputs.facts) > 1:
        yield Finding(
            kind="wrong_interface", severity="warning",
            what=f"{shown_hosts(hosts)}: MPI uses TCP although InfiniBand or RoCE is available; links are judged by TCP",
            evidence="an RDMA port is active, and the probe's process has opened none",
            advice="install rdma-core (libibverbs and providers), allow locked memory (ulimit -l) and access to /dev/infiniband; "
            "-x OMPI_MCA_pml_base_verbose=10 shows Open MPI's choice, -x NCCL_DEBUG=INFO NCCL's",
            hosts=hosts, loss=0.4,
        )  # fmt: skip


NIC_CHECKS = (
    _find_mixed_nics,
    _find_nics_below_nominal,
    _find_unknown_nics,
    _find_faster_networks,
    _find_mpi_without_rdma,
)
