"""Request of `distrib-topo plan`: hosts, ranks, networks and the workload, from the options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model import hypothetical
from distrib.bandwidth_model.hypothetical import NetworkOption
from distrib.bandwidth_model.planner import PlanRequest, first_gpu_kind
from distrib.bandwidth_model.training_cost import HostPrices, TrainingGoal
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.hardware_catalog import find_gpu
from distrib.cluster.hostfile import HostList
from distrib.cluster.hosts import Host
from distrib.cluster.node import MAX_GPUS
from distrib.cluster.topology import Topology, check_hosts
from distrib.errors import ConfigError
from distrib_launch.cli import plan_workload
from distrib_launch.host_selection import HostFilter, SelectedHost, select_hosts
from distrib_launch.runner import read_hosts, read_topology_for


def build_plan_request(options: argparse.Namespace, host_filter: HostFilter) -> PlanRequest:
    """Build the request from the options of `distrib-topo plan`.

    Args:
        options: The parsed options.
        host_filter: Selects hosts as in a launch.

    Raises:
        ConfigError: An option is missing, or names something unknown.
    """
    gpudirect = None if options.gpudirect is None else options.gpudirect == "on"
    listed = read_hosts(options.hosts) if options.hosts else None
    topology = read_topology_for(options.topology, options.hosts)
    if listed and topology:
        check_hosts(topology, listed)
    gpu = hypothetical.catalog_gpu_name(options.gpu) if options.gpu is not None else None
    choices = _selected_hosts(listed, topology, host_filter)
    cluster_gpu = first_gpu_kind(topology, [choice.host.name for choice in choices])
    given, strategy = plan_workload.read_strategy(options)
    workload = plan_workload.build_workload(options, gpu, cluster_gpu, given)
    network_text: str | None = options.network
    notes: tuple[str, ...] = ()
    if network_text is None and options.compare is None and topology is None:
        network_text = hypothetical.reference_network(workload.device)
    if network_text is not None and options.network is None:
        notes = ("no --network: that of NVIDIA's own hosts with these GPUs is assumed",)
    network = hypothetical.parse_network_option(network_text, gpudirect) if network_text is not None else None
    networks = _parse_compared_networks(options.compare, gpudirect) if options.compare is not None else []
    hosts = _ranks(choices, listed, topology, workload)
    most = options.ranks_per_node or max(hosts.values(), default=0)
    if most > MAX_GPUS:
        raise ConfigError(
            f"{options.hosts or '--ranks-per-node'}: {most} ranks on a host, expected {MAX_GPUS} at most",
            hint="lower --ranks-per-node, or the slots in the hostfile",
        )
    nodes = options.nodes or _powers_of_two(len(hosts) or 16)
    if max(nodes) > 1 and not network and not networks:
        _check_network(topology)
    if topology:
        if gpudirect and not network and not networks:
            hypothetical.check_gpudirect(topology)
        compared = [(each, hypothetical.changed_cluster(topology, gpu, each, gpudirect)) for each in networks]
        assumed = network or (None if _describes_network(topology) else next(iter(networks), None))
        is_changed = bool(gpu or assumed or gpudirect is not None)
        base = hypothetical.changed_cluster(topology, gpu, assumed, gpudirect) if is_changed else topology
    else:
        named = min(max(nodes), 64)  # further hosts are extrapolated, not modelled one by one
        hosts = hosts or {f"node{n + 1}": _default_ranks(workload) for n in range(named)}
        device = None if workload.device == "cpu" else workload.device
        most = most or _default_ranks(workload)
        compared = [(each, hypothetical.hypothetical_cluster(tuple(hosts), most, device, each)) for each in networks]
        base = hypothetical.hypothetical_cluster(tuple(hosts), most, device, network or next(iter(networks), None))
    used = network or (None if topology and _describes_network(topology) else next(iter(networks), None))
    return PlanRequest(
        workload=workload, topology=base, hosts=tuple(hosts), nodes=nodes, efficiency=options.efficiency,
        strategy=strategy, chooses_shard=options.shard == "auto", chooses_mode=options.mode == "auto",
        notes=notes if network and max(nodes) > 1 else (),
        network_choice="" if used is None else used.text if network else f"{used.text} (the first of --compare)",
        network_price=next((each.price for each in networks if used and each.nics == used.nics), None),
        goal=_goal(options, workload), prices=_prices(options, workload),
        ranks=(options.ranks_per_node,) if options.ranks_per_node else tuple(hosts.values()), networks=tuple(compared),
    )  # fmt: skip


def _goal(options: argparse.Namespace, workload: Workload) -> TrainingGoal:
    if options.tokens is not None and not workload.sample_tokens:
        raise ConfigError(
            f"--tokens: the samples of {workload.name} have no known number of tokens",
            hint="give --samples",
            code="option-conflict",
        )
    return TrainingGoal(tokens=options.tokens, samples=options.samples)


def _prices(options: argparse.Namespace, workload: Workload) -> HostPrices:
    if options.gpu_hour is not None and workload.device == "cpu":
        raise ConfigError("--gpu-hour: the ranks run on CPUs", hint="give --host-price", code="option-conflict")
    return HostPrices(gpu_hour=options.gpu_hour, host=options.host_price)


def _describes_network(topology: Topology) -> bool:
    return bool(topology.measured) or any(group.nics for group in topology.nodes)


def _check_network(topology: Topology | None) -> None:
    """Raise ConfigError if neither the user nor the topology describes the network between the hosts."""
    if topology is None:
        raise ConfigError(
            "the network is unknown",
            hint="add --network, such as 100GbE or HDR, or name a described cluster with -H or --topology",
            code="network-unknown",
        )
    if not _describes_network(topology):
        raise ConfigError(
            f"{topology.source} describes no network",
            hint="describe the NICs there, measure the links with distrib-topo probe, or add --network, such as HDR",
            code="network-unknown",
        )


def _parse_compared_networks(given: str, gpudirect: bool | None) -> list[NetworkOption]:
    if re.search(r"=[^,]*[0-9],[0-9]{3} *(,|$)", given):
        raise ConfigError(
            f"--compare {given}: a comma ends a network",
            hint="write prices without any: HDR=1000",
            code="network-unknown",
        )
    texts = [text.strip() for text in given.split(",") if text.strip()]
    if not texts:
        raise ConfigError(
            f"--compare {given or repr(given)}: no network", hint="write such as 100GbE,HDR", code="network-unknown"
        )
    return [hypothetical.parse_network_option(text, gpudirect, "--compare") for text in texts]


def _selected_hosts(
    listed: HostList | None, topology: Topology | None, host_filter: HostFilter
) -> tuple[SelectedHost, ...]:
    """Select hosts as a launch would; none if no hosts are named."""
    every = (
        listed.hosts if listed else tuple(Host(name=name, slots=None) for name in (topology.hosts if topology else ()))
    )
    if not every:
        if host_filter != HostFilter():
            raise ConfigError(
                "there are no hosts to choose from", hint="name them with -H or --topology", code="no-hosts"
            )
        return ()
    workers = [host for host in every if host.role == "worker"]
    known = {host.name: topology.gpus_of(host.name) if topology else None for host in workers}
    slots = {host.name: host.slots or _gpus(topology, host.name) or 1 for host in workers}
    servers = tuple(host.name for host in every if host.role == "server")
    return select_hosts(workers, known, slots, msgspec.structs.replace(host_filter, server_hosts=servers))


def _ranks(
    choices: Sequence[SelectedHost], listed: HostList | None, topology: Topology | None, workload: Workload
) -> dict[str, int]:
    """Count the ranks that a launch gives each host."""
    counts = {}
    for choice in choices:
        slots = choice.slots if choice.indices is not None else choice.host.slots
        counts[choice.host.name] = slots or (_gpus(topology, choice.host.name) if workload.device != "cpu" else 0)
    if listed is None:  # a host without GPUs beside hosts with GPUs, such as a file server, runs no ranks
        counts = {host: count for host, count in counts.items() if count} or counts
    return {host: count or _default_ranks(workload) for host, count in counts.items()}


def _gpus(topology: Topology | None, host: str) -> int:
    gpus = topology.gpus_of(host) if topology else None
    return gpus.count if gpus else 0


def _default_ranks(workload: Workload) -> int:
    """Return the ranks of a host without slots and GPUs."""
    if workload.device == "cpu":
        return 1
    spec = find_gpu(workload.device)
    return spec.gpus_per_host if spec else hypothetical.DEFAULT_GPUS_PER_HOST


def _powers_of_two(last: int) -> tuple[int, ...]:
    """List 1, 2, 4, ... and the last number."""
    return tuple(sorted({1, last} | {1 << power for power in range(30) if 1 << power < last}))
