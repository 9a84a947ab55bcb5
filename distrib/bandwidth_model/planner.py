"""What `distrib-topo plan` is asked, and the model's answer."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TypedDict

import msgspec

from distrib.bandwidth_model import hypothetical, workload_catalog
from distrib.bandwidth_model.hypothetical import Network
from distrib.bandwidth_model.prediction import Limit, Prediction
from distrib.bandwidth_model.recommendations import HostSubset, Recommendation, find_faster_subset, recommend
from distrib.bandwidth_model.scaling import needed_bandwidth, predict_step, unlimited
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.hosts import Host
from distrib.cluster.node import MAX_GPUS
from distrib.cluster.topology import Topology, age_notes
from distrib.errors import ConfigError
from distrib_launch.host_selection import HostFilter, SelectedHost, select_hosts

if TYPE_CHECKING:
    from distrib.cluster.hostfile import HostList

NAMED_NODES = 64
"""Of a cluster that does not exist; more of them are the same again, and the model says that it extrapolates."""

UNKNOWN_HOSTS = 16
"""Up to how many is predicted where nobody says how many there are."""


class Job(TypedDict):
    """The arguments of the model that say where a job runs."""

    hosts: tuple[str, ...]
    nodes: int
    ranks_per_host: int | tuple[int, ...]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A workload on a cluster: `hosts` by name, with so many `ranks` each; `nodes` may be more than those."""

    workload: Workload
    topology: Topology
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    efficiency: float
    networks: tuple[tuple[Network, Topology], ...] = ()
    """What is compared."""

    @property
    def largest(self) -> int:
        return max(self.nodes)

    def job(self, nodes: int) -> Job:
        """So many hosts: the first by name, and after the last of them the same again."""
        ranks: int | tuple[int, ...] = self.ranks[0]
        if len(set(self.ranks)) > 1:
            ranks = tuple(self.ranks[place % len(self.ranks)] for place in range(nodes))
        return {"hosts": self.hosts[:nodes], "nodes": nodes, "ranks_per_host": ranks}


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The same job on one of several networks; prices are those of all nodes of the largest job together."""

    network: str
    predictions: tuple[Prediction, ...]
    price: float | None = None
    price_per_efficiency_percent: float | None = None


class WorkloadShown(msgspec.Struct, frozen=True, kw_only=True):
    """The workload without its gradients."""

    name: str
    origin: str
    device: str
    batch: int
    compute_seconds: float
    loader_seconds: float
    gradient_bytes: int
    gradients: int
    memory_bytes: int | None
    expected_error: float
    source: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `needed_bytes_per_second`: of each host's wire, for `wanted_efficiency` at the largest count."""

    workload: WorkloadShown
    topology: str
    ranks_per_node: int
    """The most that a host has."""
    predictions: tuple[Prediction, ...]
    wanted_efficiency: float
    needed_bytes_per_second: float | None
    limit: Limit | None
    """What the largest job would reach with any network, where that is less than what is wanted."""
    fewer: HostSubset | None
    """Some of the hosts, where they would train faster than all of the largest job."""
    advice: tuple[Recommendation, ...]
    compared: tuple[Compared, ...]
    expected_error: float
    """Of a step's time: of the links and of the workload together."""
    notes: tuple[str, ...]


def question(options: argparse.Namespace, host_filter: HostFilter) -> Question:
    """What the options ask. Raises ConfigError where they leave open what is needed, or name what is not there."""
    from distrib_launch.runner import read_hosts, read_topology_for

    gpudirect = None if options.gpudirect is None else options.gpudirect == "on"
    listed = read_hosts(options.hosts) if options.hosts else None
    topology = read_topology_for(options.topology, options.hosts)
    if listed and topology:
        from distrib.cluster.topology import check_hosts

        check_hosts(topology, listed)
    gpu = hypothetical.gpu_named(options.gpu) if options.gpu is not None else None
    choices = _taking_part(listed, topology, host_filter)
    there = first_kind(topology, [choice.host.name for choice in choices])
    workload = workload_of(options.workload, gpu, there, options.batch, hint="add --gpu, such as A100")
    network = hypothetical.parse_network_option(options.network, gpudirect) if options.network is not None else None
    networks = _compared_networks(options.compare, gpudirect) if options.compare is not None else []
    hosts = _ranks(choices, listed, topology, workload)
    most = options.ranks_per_node or max(hosts.values(), default=0)
    if most > MAX_GPUS:
        raise ConfigError(
            f"{options.hosts or '--ranks-per-node'}: {most} ranks on a host, and none has more than {MAX_GPUS}",
            hint="lower --ranks-per-node, or the slots in the hostfile",
        )
    nodes = options.nodes or _counts(len(hosts) or UNKNOWN_HOSTS)
    if max(nodes) > 1 and not network and not networks:
        _check_wired(topology)
    if topology:
        if gpudirect and not network and not networks:
            hypothetical.check_gpudirect(topology)
        compared = [(each, hypothetical.changed(topology, gpu, each, gpudirect)) for each in networks]
        assumed = network or (None if _tells_of_wires(topology) else next(iter(networks), None))
        asked = bool(gpu or assumed or gpudirect is not None)
        base = hypothetical.changed(topology, gpu, assumed, gpudirect) if asked else topology
    else:
        hosts = hosts or {f"node{n + 1}": _usual(workload) for n in range(min(max(nodes), NAMED_NODES))}
        device = None if workload.device == "cpu" else workload.device
        most = most or _usual(workload)
        compared = [(each, hypothetical.imagined(tuple(hosts), most, device, each)) for each in networks]
        base = hypothetical.imagined(tuple(hosts), most, device, network or next(iter(networks), None))
    return Question(
        workload=workload, topology=base, hosts=tuple(hosts), nodes=nodes, efficiency=options.efficiency,
        ranks=(options.ranks_per_node,) if options.ranks_per_node else tuple(hosts.values()), networks=tuple(compared),
    )  # fmt: skip


def _tells_of_wires(topology: Topology) -> bool:
    return bool(topology.measured) or any(group.nics for group in topology.nodes)


def _check_wired(topology: Topology | None) -> None:
    """Raises ConfigError where nobody has said what joins the hosts."""
    if topology is None:
        raise ConfigError(
            "on which network?",
            hint="add --network, such as 100GbE or HDR, or name a described cluster with -H or --topology",
        )
    if not _tells_of_wires(topology):
        raise ConfigError(
            f"{topology.source} says nothing of a network",
            hint="describe the NICs there, measure the links with distrib-topo probe, or add --network, such as HDR",
        )


def _compared_networks(given: str, gpudirect: bool | None) -> list[Network]:
    if re.search(r"=[^,]*[0-9],[0-9]{3} *(,|$)", given):
        raise ConfigError(f"--compare {given}: a comma ends a network", hint="write prices without any: HDR=1000")
    texts = [text.strip() for text in given.split(",") if text.strip()]
    if not texts:
        raise ConfigError(f"--compare {given or repr(given)}: no network", hint="write such as 100GbE,HDR")
    return [hypothetical.parse_network_option(text, gpudirect, "--compare") for text in texts]


def first_kind(topology: Topology | None, hosts: Iterable[str]) -> str | None:
    """The GPU of the first of the hosts of which one is known."""
    known = (topology.gpus_of(host) for host in hosts) if topology else ()
    return next((gpus.kind for gpus in known if gpus and gpus.kind), None)


def workload_of(given: str, gpu: str | None, there: str | None, batch: int | None, *, hint: str) -> Workload:
    """The workload of `--workload`: of a file, or of the catalogue for `gpu`, else for the GPUs that are `there`.

    `hint` is how to name these. Raises ConfigError.
    """
    if workload_catalog.is_file(given):
        found = workload_catalog.read_workload(given)
        return workload_catalog.scaled(found, batch=batch, gpu=gpu) if batch or gpu else found
    kind = gpu or there
    if kind is None:
        workload_catalog.network(given)  # a name that nobody knows is the first mistake to tell
        raise ConfigError(
            f"--workload {given}: on which GPU?",
            hint=f"{hint}, or profile your script: distrib-launch --profile FILE SCRIPT",
        )
    return workload_catalog.workload(given, kind, batch)


def answer(question: Question) -> Answer:
    """Ask the model. Raises ConfigError where nothing is known of a link that is needed."""
    workload = question.workload

    def predicted(topology: Topology) -> tuple[Prediction, ...]:
        return tuple(predict_step(topology, workload, **question.job(count)) for count in question.nodes)

    base = predicted(question.topology)
    largest = question.job(question.largest)
    needed = None
    if question.largest > 1:
        needed = needed_bandwidth(question.topology, workload, **largest, efficiency=question.efficiency)
    last = base[-1]
    return Answer(
        workload=WorkloadShown(
            name=workload.name, origin=workload.origin, device=workload.device, batch=workload.batch,
            compute_seconds=workload.compute_seconds, loader_seconds=workload.loader_seconds,
            gradient_bytes=workload.gradient_bytes, gradients=len(workload.gradients), memory_bytes=workload.memory_bytes,
            expected_error=workload.expected_error, source=workload.software.get("speed", "a profile"),
        ),
        topology=question.topology.source,
        ranks_per_node=last.ranks_per_host,
        predictions=base,
        wanted_efficiency=question.efficiency,
        needed_bytes_per_second=needed,
        limit=None if needed or question.largest == 1 else unlimited(question.topology, workload, **largest),
        fewer=find_faster_subset(
            question.topology, workload, hosts=largest["hosts"], ranks_per_host=largest["ranks_per_host"],
            baseline=max(base, key=lambda each: each.hosts),
        ),
        advice=() if last.ranks == 1 else recommend(question.topology, workload, **largest),
        compared=tuple(_compared(network, predicted(topology), question.largest) for network, topology in question.networks),
        expected_error=(last.expected_error**2 + workload.expected_error**2) ** 0.5,
        notes=(*last.notes, *age_notes(question.topology, datetime.now(timezone.utc))),
    )  # fmt: skip


def _compared(network: Network, predictions: tuple[Prediction, ...], nodes: int) -> Compared:
    price = network.price * nodes if network.price is not None else None
    per = price / (100 * predictions[-1].efficiency) if price is not None else None
    return Compared(network=network.text, predictions=predictions, price=price, price_per_efficiency_percent=per)


def _taking_part(
    listed: HostList | None, topology: Topology | None, host_filter: HostFilter
) -> tuple[SelectedHost, ...]:
    """The hosts that would train, as a launch would choose them; none where nobody names any. Raises ConfigError."""
    every = (
        listed.hosts if listed else tuple(Host(name=name, slots=None) for name in (topology.hosts if topology else ()))
    )
    if not every:
        if host_filter != HostFilter():
            raise ConfigError("there are no hosts to choose from", hint="name them with -H or --topology")
        return ()
    workers = [host for host in every if host.role == "worker"]
    known = {host.name: topology.gpus_of(host.name) if topology else None for host in workers}
    slots = {host.name: host.slots or _gpus(topology, host.name) or 1 for host in workers}
    servers = tuple(host.name for host in every if host.role == "server")
    return select_hosts(workers, known, slots, msgspec.structs.replace(host_filter, server_hosts=servers))


def _ranks(
    choices: Sequence[SelectedHost], listed: HostList | None, topology: Topology | None, workload: Workload
) -> dict[str, int]:
    """How many ranks a launch gives each of the hosts."""
    counts = {}
    for choice in choices:
        said = choice.slots if choice.indices is not None else choice.host.slots
        counts[choice.host.name] = said or (_gpus(topology, choice.host.name) if workload.device != "cpu" else 0)
    if listed is None:  # a file server without GPUs trains nothing
        counts = {host: count for host, count in counts.items() if count} or counts
    return {host: count or _usual(workload) for host, count in counts.items()}


def _gpus(topology: Topology | None, host: str) -> int:
    gpus = topology.gpus_of(host) if topology else None
    return gpus.count if gpus else 0


def _usual(workload: Workload) -> int:
    """The ranks of a host of which nobody says how many."""
    return 1 if workload.device == "cpu" else hypothetical.GPUS_PER_NODE


def _counts(last: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the last."""
    return tuple(sorted({1, last} | {1 << power for power in range(30) if 1 << power < last}))
