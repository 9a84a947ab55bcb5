"""Hosts and ranks that take part in a probe."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distrib.cluster.node import name_hosts
from distrib.probe.protocol import ProbeSpec, RankHello
from distrib.probe.records import HostFacts
from distrib.probe.secondary_networks import other_networks


class Participants:
    """The hosts, by their number in `spec.hosts`, their ranks, addresses and NICs.

    Args:
        spec: The launcher's request.
        hellos: The first message of each rank.
    """

    def __init__(self, spec: ProbeSpec, hellos: Sequence[RankHello]) -> None:
        self.names = spec.hosts
        self.facts: dict[int, HostFacts] = {spec.hosts.index(h.facts.host): h.facts for h in hellos if h.facts}
        self.ranks = {spec.hosts.index(h.facts.host): rank for rank, h in enumerate(hellos) if h.facts}
        """The rank that measures, by host number."""
        self.missing = [number for number in range(len(spec.hosts)) if number not in self.ranks]
        self.host_of_rank: list[str] = []
        for hello in hellos:  # further ranks of a host follow the one that measures
            self.host_of_rank.append(hello.facts.host if hello.facts else self.host_of_rank[-1])
        on_gpus = tuple(rank for rank, hello in enumerate(hellos) if hello.on_gpu)
        self.has_gpus = bool(on_gpus) or any(facts.gpus for facts in self.facts.values())
        self.collective_ranks = on_gpus or tuple(range(len(hellos)))
        """The ranks of all-reduces. If some ranks have GPUs, only these take part: NCCL and Gloo cannot be combined."""
        self.networks = {network.name: network for network in other_networks(tuple(self.facts.values()))}

    @property
    def collective_hosts(self) -> set[str]:
        """The hosts of `collective_ranks`."""
        return {self.host_of_rank[rank] for rank in self.collective_ranks}

    def name_ranks(self, ranks: Collection[int]) -> str:
        """Name the hosts of some ranks.

        Args:
            ranks: The ranks.
        """
        return name_hosts(self.host_of_rank[rank] for rank in sorted(ranks))

    def address(self, host: int, network: str | None) -> str:
        """Return the address of a host.

        Args:
            host: Number of the host.
            network: A secondary network, or None for that of the job.
        """
        if network is None:
            return self.facts[host].address
        return self.networks[network].nics[self.names[host]][1]
