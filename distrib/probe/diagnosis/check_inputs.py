"""Inputs of the checks: the measurements over one network and transport, and the hosts' own reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import get_args

from distrib.cluster.inventory import Interface
from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement
from distrib.cluster.node import Nic
from distrib.probe.records import (
    CollectiveMeasurement,
    GpuLinkStates,
    GpuPcieLink,
    HostFacts,
    IntraNodeMeasurement,
    LoadPattern,
    PairMeasurement,
    ProbeStarted,
    Record,
    SharedLinkSides,
)
from distrib.probe.secondary_networks import other_networks
from distrib.probe.settings import LIMITS, Transport

LinkRates = dict[tuple[str, str], float]
"""Bytes per second, by source and target host."""


class RatesAlone:
    """The rate of each pair without other traffic: measured, or else inferred from the rates of both hosts."""

    def __init__(self, records: Iterable[PairMeasurement]) -> None:
        self._pairs: LinkRates = {}
        self._hosts: dict[str, float] = {}
        for record in records:
            rate = record.bandwidth_bytes_per_second
            pair = record.source, record.target
            if record.load == "alone":
                self._pairs[pair] = max(self._pairs.get(pair, 0.0), rate)
            # A host is as fast as with its fastest peer: other peers may be slow themselves.
            for host in pair:
                self._hosts[host] = max(self._hosts.get(host, 0.0), rate)

    def measured(self, source: str, target: str) -> float:
        """Return the rate measured in this direction, or else in the other; 0 if neither was measured alone.

        Args:
            source: The sending host.
            target: The receiving host.
        """
        return self._pairs.get((source, target)) or self._pairs.get((target, source), 0.0)

    def expected(self, source: str, target: str) -> float:
        """Return the measured rate, or else that of the slower host; 0 if neither is known.

        Args:
            source: The sending host.
            target: The receiving host.
        """
        return self.measured(source, target) or self.of_hosts(source, target)

    def of_hosts(self, source: str, target: str) -> float:
        """Return the rate that both hosts reached with any peer: more than `expected` if the path between them is narrow.

        Args:
            source: The sending host.
            target: The receiving host.
        """
        return min(self._hosts.get(source, 0.0), self._hosts.get(target, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DiagnosisInputs:
    """Inputs of one check. Rates are those of one network and one transport; `over` and `networks` select others."""

    hosts: tuple[str, ...]
    primary: Transport
    """The transport whose rates decide about findings."""
    slow_fraction: float = LIMITS.slow_fraction
    """Fraction of the median rate below which a host or link is reported."""
    transport: Transport
    facts: Mapping[str, HostFacts]
    pairs: tuple[PairMeasurement, ...]
    """The measurements over all networks and transports, failed ones included."""
    network: str | None = None
    """The subnet under test; None for the network of the job."""
    nic_names: Mapping[str, str | None]
    """The NIC of each host on the network under test."""
    sides: SharedLinkSides | None = None
    collectives: tuple[Collective, ...] = ()
    configured_nics: Mapping[str, Sequence[Nic]] = dataclasses.field(default_factory=dict)
    """The NICs that the topology file gives each host."""
    gpus_after_use: Mapping[str, tuple[GpuPcieLink, ...]] = dataclasses.field(default_factory=dict)
    copies: tuple[IntraNodeLinkMeasurement, ...] = ()
    """Copies inside hosts, between GPUs and memory."""

    @property
    def judges_links(self) -> bool:
        """True for the network of the job and the primary transport."""
        return self.network is None and self.transport == self.primary

    @cached_property
    def attempts(self) -> tuple[PairMeasurement, ...]:
        """The measurements of this network and transport, failed ones included."""
        return tuple(r for r in self.pairs if (r.network, r.transport) == (self.network, self.transport))

    @cached_property
    def rated(self) -> tuple[PairMeasurement, ...]:
        """Successful measurements in one direction between machines.

        Containers of one machine reach each other without a network. If all hosts are on one machine, all count.
        """
        machines = {host: facts.machine or host for host, facts in self.facts.items()}
        single = len(set(machines.values())) < 2
        return tuple(
            r
            for r in self.attempts
            if not r.both_ways
            and not r.failed
            and (single or machines.get(r.source, r.source) != machines.get(r.target, r.target))
        )

    def under(self, *loads: LoadPattern) -> list[PairMeasurement]:
        """Select successful measurements in one direction.

        Args:
            *loads: The concurrent traffic of the measurements, in the order in which they are returned.

        Returns:
            The measurements of the present network and transport.
        """
        return [record for load in loads for record in self.rated if record.load == load]

    @cached_property
    def alone(self) -> RatesAlone:
        """The rate of each pair without other traffic."""
        return RatesAlone(self.under(*get_args(LoadPattern)))

    def nic(self, host: str) -> Interface | None:
        """Return the NIC of a host on the network under test, or None if unknown.

        Args:
            host: Name of the host.
        """
        return self.facts[host].named(self.nic_names.get(host)) if host in self.facts else None

    @cached_property
    def nic_rates(self) -> dict[str, float]:
        """The nominal NIC rate of each host in bytes per second; empty unless all are known."""
        rates = {}
        for host in self.nic_names:
            if self.transport == "mpi":
                rates[host] = self.facts[host].rdma_bytes_per_second
            else:
                nic = self.nic(host)
                rates[host] = nic.speed_bytes_per_second if nic else None
        return {host: rate for host, rate in rates.items() if rate} if all(rates.values()) else {}

    @cached_property
    def _host_classes(self) -> dict[str, float]:
        return rate_classes(self.nic_rates)

    def host_class(self, host: str) -> float:
        """Return the NIC rate, as far as another host can use it; 0 if unknown. Hosts of one rate are comparable.

        Args:
            host: Name of the host.
        """
        return self._host_classes.get(host, 0.0)

    def pair_class(self, record: PairMeasurement) -> float:
        """Return the class of the slower host of a pair.

        Args:
            record: A measurement of the pair.
        """
        return min(self.host_class(record.source), self.host_class(record.target))

    def limits_host(self, record: PairMeasurement, host: str) -> bool:
        """Return True if the peer's NIC is at least as fast, so that the measurement shows the rate of `host`.

        Args:
            record: A measurement of a pair.
            host: One host of the pair.
        """
        return self.pair_class(record) >= self.host_class(host)

    def over(self, transport: Transport) -> DiagnosisInputs:
        """Return the inputs of another transport on the same network.

        Args:
            transport: The other transport.
        """
        return dataclasses.replace(self, transport=transport)

    @cached_property
    def networks(self) -> tuple[DiagnosisInputs, ...]:
        """The inputs of each secondary network, sorted by subnet."""
        found = []
        for network in other_networks(tuple(self.facts.values())):
            hosts = {host for r in self.pairs if r.network == network.name for host in (r.source, r.target)}
            names = {host: name for host, (name, _) in network.nics.items() if host in hosts}
            found.append(
                dataclasses.replace(
                    self, transport="tcp", network=network.name, nic_names=names, hosts=tuple(sorted(hosts)), sides=None
                )
            )
        return tuple(each for each in found if each.hosts)


def rate_classes(nic_rates: Mapping[str, float]) -> dict[str, float]:
    """Map each host to its NIC rate, as far as the second fastest host can use it.

    Args:
        nic_rates: Bytes per second of each host's NIC.

    Returns:
        Bytes per second by host. Hosts of equal value are comparable.
    """
    second = sorted(nic_rates.values())[-2:][:1]
    return {host: min(rate, *second) for host, rate in nic_rates.items()}


def collect_inputs(
    records: Sequence[Record], configured_nics: Mapping[str, Sequence[Nic]] | None = None
) -> DiagnosisInputs | None:
    """Build the inputs of the job's network from a probe's records.

    Args:
        records: The records, oldest first.
        configured_nics: The NICs that the topology file gives each host.

    Returns:
        The inputs over the primary transport, or None if the probe did not start.
    """
    starts = [record for record in records if isinstance(record, ProbeStarted)]
    if not starts:
        return None
    facts = {each.host: each for start in starts for each in start.facts}
    sides = [record for record in records if isinstance(record, SharedLinkSides)]
    return DiagnosisInputs(
        hosts=starts[0].hosts,
        primary=starts[0].primary,
        slow_fraction=LIMITS.slow_fraction_quick if starts[0].mode == "quick" else LIMITS.slow_fraction,
        transport=starts[0].primary,
        facts=facts,
        pairs=tuple(record for record in records if isinstance(record, PairMeasurement)),
        nic_names={host: each.interface for host, each in facts.items()},
        sides=sides[-1] if sides else None,
        collectives=tuple(record.collective for record in records if isinstance(record, CollectiveMeasurement)),
        configured_nics=configured_nics or {},
        gpus_after_use={record.host: record.gpus for record in records if isinstance(record, GpuLinkStates)},
        copies=tuple(record.link for record in records if isinstance(record, IntraNodeMeasurement)),
    )
