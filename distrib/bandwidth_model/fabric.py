"""Fabric of a job: its limiting links, measured all-reduces, shared CPUs and slower GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model import link_curve
from distrib.bandwidth_model.bottleneck import (
    RingLink,
    limited_by_slots,
    slots_bandwidth,
    slowest_between_hosts,
    slowest_inside_host,
)
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import gpu_scaling_error, step_time_ratio
from distrib.cluster.hardware_catalog import GpuSpec, find_gpu, hardware_catalog
from distrib.cluster.links import intra_node_link
from distrib.cluster.measurements import Collective
from distrib.cluster.topology import LIMITS, Topology
from distrib.errors import ConfigError

MEASURED_ERROR, CATALOGUED_ERROR = 0.05, 0.15
"""Expected relative errors of a step with measured links and with data sheets."""

HYPOTHETICAL = "hypothetical"
"""The name of a cluster that is given by options only."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The limiting links between the ranks of a job; `network` is None for one host, `intra_node` for one rank per host."""

    hosts: int
    ranks: int
    ranks_per_host: int
    """The most ranks of a host."""
    gpus: bool
    cpus_per_rank: int | None
    """CPUs of each rank on CPU hosts, at least; None if unknown."""
    ranks_per_cpu: float
    """Ranks per CPU on the fullest machine, over all hosts of the job on it; 0 if unknown."""
    network: RingLink | None
    intra_node: RingLink | None
    nvswitch: bool = False
    """True if switches join the GPUs of each host."""
    compute_capability: float | None = None
    """Compute capability of the oldest GPU; None if unknown."""
    collectives: tuple[Collective, ...] = ()
    """Measured all-reduces of this cluster."""
    memory_bytes_per_second: float | None = None
    """Rate of copies in host memory, or in GPU memory."""
    slots_bytes_per_second: float = math.inf
    """The most bandwidth between hosts that the PCIe slots of the GPUs carry."""
    memory_bytes: int | None = None
    """Memory of the smallest GPU."""
    slowness: tuple[tuple[float, int], ...] = ()
    """Slowdown and number of each kind of rank, where kinds differ."""
    expected_error: float = MEASURED_ERROR
    notes: tuple[str, ...] = ()

    @property
    def crowding(self) -> float:
        """Computing ranks per CPU, 1 if each has its own."""
        return 1.0 if self.gpus else max(1.0, self.ranks_per_cpu)

    @property
    def is_slower_than_links(self) -> bool:
        """True if an all-reduce of 1 MiB or more took longer than its slowest link explains: the link explains less than 70 %."""
        if self.network is None:
            return False
        for collective in self.collectives:
            n, last = collective.ranks, collective.curve[-1]
            carried_seconds = 2 * (n - 1) / n * last.size_bytes / self.network.bytes_per_second
            if last.size_bytes >= 1 << 20 and carried_seconds < 0.7 * last.seconds:
                return True
        return False

    def with_network_bandwidth(self, bytes_per_second: float) -> Fabric:
        """Change the bandwidth of all links between hosts.

        Args:
            bytes_per_second: The new bandwidth.
        """
        if self.network is None:
            return self
        factor = self.network.bytes_per_second / bytes_per_second
        collectives = tuple(_faster(each, self.network, factor) for each in self.collectives)
        network = msgspec.structs.replace(self.network, curve=self.network.curve.slower(factor))
        return msgspec.structs.replace(self, network=network, collectives=collectives)

    def at_full_speed(self) -> Fabric:
        """Raise the bandwidth between hosts to the most that networks of this type have and PCIe slots carry."""
        if self.network is None:
            return self
        most = LIMITS.max_bytes_per_second
        if self.network.kind == "ethernet":
            most = max(
                link.rate_bytes_per_second.value * link.usable.value
                for link in hardware_catalog().links
                if link.kind == "ethernet"
            )
        # Through host memory, a gradient crosses a slot twice.
        most = min(most, self.slots_bytes_per_second / (2 if self.network.gpudirect is False else 1))
        return self.with_network_bandwidth(max(most, self.network.bytes_per_second))

    def with_best_network(self) -> Fabric:
        """Replace the network by the fastest one: a port of InfiniBand for each rank of a host, as fast as PCIe slots are.

        Measured all-reduces describe the present network, except for those that its links do not explain.
        """
        if self.network is None:
            return self
        links = [link for link in hardware_catalog().links if link.kind == "infiniband"]
        latency = min([link.latency_seconds.value for link in links] + [self.network.curve.latency_seconds])
        bandwidth = min(LIMITS.max_bytes_per_second, self.slots_bytes_per_second)
        network = msgspec.structs.replace(
            self.network,
            kind="infiniband",
            family="",
            ports=self.ranks_per_host if self.gpus else 1,
            curve=link_curve.linear_curve(latency, bandwidth),
        )
        best = msgspec.structs.replace(self.with_network_bandwidth(bandwidth), network=network)
        return best if self.is_slower_than_links else msgspec.structs.replace(best, collectives=())

    def with_intra_node_bandwidth(self, bytes_per_second: float) -> Fabric:
        """Change the bandwidth of all links inside hosts.

        Args:
            bytes_per_second: The new bandwidth.
        """
        if self.intra_node is None:
            return self
        curve = self.intra_node.curve.slower(self.intra_node.bytes_per_second / bytes_per_second)
        return msgspec.structs.replace(self, intra_node=msgspec.structs.replace(self.intra_node, curve=curve))


def find_fabric(
    topology: Topology | None,
    workload: Workload,
    hosts: Sequence[str] | int,
    ranks_per_host: int | Sequence[int],
    nodes: int | None = None,
) -> Fabric:
    """Find the links between the ranks of a job.

    Args:
        topology: The cluster. None: one host that is not described.
        workload: One rank's step, with its device.
        hosts: Host names, or a number of the topology's hosts.
        ranks_per_host: One number, or one for each host.
        nodes: The number of hosts, where more than the names.

    Raises:
        ConfigError: A link is neither described nor measured.
    """
    count = nodes or (hosts if isinstance(hosts, int) else len(hosts))
    each = (ranks_per_host,) if isinstance(ranks_per_host, int) else tuple(ranks_per_host)
    _check(count, each)
    ranks = each[0] * count if len(each) == 1 else sum(each)
    gpus = workload.device != "cpu"
    names, notes = _names(topology, hosts, count, gpus)
    most = max(each)
    network = slowest_between_hosts(topology, names, gpus=gpus) if count > 1 else None
    slots = math.inf
    if network and gpus:
        slots = slots_bandwidth(topology, network, workload, min(each))
        network = limited_by_slots(topology, network, workload, min(each))
    intra_node = _intra_node(topology, names, workload, each) if most > 1 else None
    slowness, slowness_notes = _slowness(topology, names, workload, each, ranks) if gpus and topology else ((), ())
    notes += slowness_notes
    group = topology.group_of(intra_node.host) if topology and intra_node and intra_node.kind == "nvlink" else None
    if intra_node and group and not group.links:
        notes += (f"`links` are not described for {intra_node.host}: {intra_node.text} is assumed from the catalogue",)
    links = [link for link in (network, intra_node) if link]
    if network and not gpus:  # ranks of a CPU host share memory
        links = [network]
    unmeasured = [link.name for link in links if not link.measured and (gpus or link is network)]
    # Hosts that the options invent cannot be measured.
    if unmeasured and not (topology and topology.name == HYPOTHETICAL):
        was = "was" if len(unmeasured) == 1 else "were"
        notes += (f"{' and '.join(unmeasured)} {was} not measured: rates from the catalogue; see distrib-topo probe",)
    shares = _shares(topology, names, each, count)
    highest_share = max((ranks / cpus for ranks, cpus in shares), default=0.0)
    if highest_share > 1 and not gpus:
        notes += (f"{highest_share:.2g} ranks share each CPU{_machine_of(topology, names)}: more CPUs would help",)
    known = [link.measured for link in links]
    spec = find_gpu(workload.device) if gpus else None
    if gpus and spec is None:
        notes += (f"{workload.device} is not in the catalogue: memory and links are unknown",)
    return Fabric(
        hosts=count,
        ranks=ranks,
        ranks_per_host=most,
        gpus=gpus,
        cpus_per_rank=None if gpus else min((max(1, count // ranks) for ranks, count in shares), default=None),
        ranks_per_cpu=highest_share,
        network=network,
        intra_node=intra_node,
        nvswitch=_has_nvswitch(topology, intra_node, spec),
        compute_capability=_capability(topology, names, spec) if gpus else None,
        collectives=_collectives(topology, network, gpus, most),
        memory_bytes_per_second=_memory_rate(topology, names, spec, gpus),
        slots_bytes_per_second=slots,
        memory_bytes=_smallest(topology, names, spec) if gpus else None,
        slowness=slowness,
        expected_error=max(
            MEASURED_ERROR if all(known) else CATALOGUED_ERROR, gpu_scaling_error() if slowness else 0.0
        ),
        notes=notes,
    )


def _check(count: int, each: tuple[int, ...]) -> None:
    if count < 1:
        raise ConfigError(f"{count} hosts, expected 1 or more", hint="say how many hosts it has")
    if min(each, default=0) < 1:
        raise ConfigError("0 ranks on a host, expected 1 or more", hint="leave it out")
    if len(each) > 1 and len(each) != count:
        raise ConfigError(
            f"{len(each)} counts of ranks, expected {count}, one for each host",
            hint="give one for each host, or one for all",
        )


def _names(
    topology: Topology | None, hosts: Sequence[str] | int, count: int, gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Select the known hosts of a job; a note if they are fewer than its hosts."""
    if not isinstance(hosts, int):
        known = tuple(hosts)
    elif topology is None:
        return ("localhost",) if count == 1 else (), ()
    else:
        known = topology.hosts
        if gpus:
            known = tuple(host for host in known if (found := topology.gpus_of(host)) and found.count) or known
    if count > len(known):
        if topology and topology.name == HYPOTHETICAL:
            return known, ()  # all of them are
        have = "1 host is known" if len(known) == 1 else f"{len(known)} hosts are known"
        return known, (f"{have}; {count} are extrapolated: more of the same, linked in the same way",)
    return known[:count], ()


def _intra_node(
    topology: Topology | None, names: tuple[str, ...], workload: Workload, each: tuple[int, ...]
) -> RingLink:
    """Find the slowest link inside hosts, once for each kind of host."""
    places = topology.places if topology else {}
    most: dict[int | None, tuple[int, str]] = {}
    for place, host in enumerate(names or ("localhost",)):
        ranks, kind = each[place % len(each)], places[host.lower()][0] if host.lower() in places else None
        if ranks > max(1, most.get(kind, (0, ""))[0]):
            most[kind] = ranks, host
    # All named hosts may have one rank, and extrapolated ones more.
    links = [
        slowest_inside_host(topology, host, workload, ranks) for ranks, host in most.values() or [(max(each), names[0])]
    ]
    return min(links, key=lambda link: link.bytes_per_second)


def _has_nvswitch(topology: Topology | None, intra_node: RingLink | None, spec: GpuSpec | None) -> bool:
    """Test if switches join a host's GPUs: as described, else in the catalogue's hosts with NVLink."""
    if intra_node is None or intra_node.kind != "nvlink":
        return False
    group = topology.group_of(intra_node.host) if topology else None
    if group and group.links:
        return bool(group.links.nvswitch)
    return bool(spec and spec.nvlink)


def _capability(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None) -> float | None:
    """Return the lowest compute capability of the job's GPUs."""
    places = topology.places if topology else {}
    groups = {places[host.lower()][0] for host in names if host.lower() in places}
    specs = [gpus.spec for number in groups if topology and (gpus := topology.nodes[number].gpus)]
    known = [one.compute_capability.value for one in (*specs, spec) if one and one.compute_capability]
    return min(known, default=None)


def _slowness(
    topology: Topology, names: tuple[str, ...], workload: Workload, each: tuple[int, ...], ranks: int
) -> tuple[tuple[tuple[float, int], ...], tuple[str, ...]]:
    """Compute the slowdown of each kind of GPU against the workload's, by the catalogue."""
    own = find_gpu(workload.device)
    places = topology.places
    ranks_of: dict[int, int] = {}
    for place, host in enumerate(names):
        if host.lower() in places:
            number = places[host.lower()][0]
            ranks_of[number] = ranks_of.get(number, 0) + each[place % len(each)]
    named = sum(each[place % len(each)] for place in range(len(names)))
    found: dict[str, tuple[float, int]] = {}
    for number, count in ranks_of.items():
        gpus = topology.nodes[number].gpus
        spec = gpus.spec if gpus else None
        if own and spec:
            factor = step_time_ratio(own, spec)
            found[spec.name] = factor, found.get(spec.name, (1.0, 0))[1] + count * ranks // named
    if all(factor == 1.0 for factor, _ in found.values()):
        return (), ()
    kinds = ", ".join(f"{name} takes {factor:.2g} times as long" for name, (factor, _) in found.items() if factor != 1)
    return tuple(found.values()), (
        f"computed for {workload.device}; by peak throughput and memory bandwidth of the catalogue, {kinds}",
    )


def _collectives(topology: Topology | None, network: RingLink | None, gpus: bool, each: int) -> tuple[Collective, ...]:
    """Select the measured all-reduces of the backend, fewest ranks first.

    Preferred: as many ranks per host, else one per host. They are scaled to the slowest link of the job.
    """
    if topology is None or topology.measured is None or network is None:
        return ()
    backend = "nccl" if gpus else "gloo"
    found = [
        one for one in topology.measured.collectives if one.backend == backend and len(one.hosts) > 1 and one.curve
    ]
    direct = network.gpudirect is not False
    found = [one for one in found if one.gpudirect in (None, direct)] or found
    for wanted in (each, 1):
        matching = [one for one in found if one.ranks == wanted * len(one.hosts)]
        if matching:
            found = matching
            break
    over = [_over(topology, one, network) for one in sorted(found, key=lambda one: one.ranks)]
    return tuple(one for one in over if one)


def _over(topology: Topology, collective: Collective, network: RingLink) -> Collective | None:
    """Scale an all-reduce to `network` as its slowest link, if the rates differ by over 10 %; None if its own links are unknown."""
    try:
        own = slowest_between_hosts(topology, collective.hosts, gpus=collective.backend == "nccl")
    except ConfigError:
        return None
    factor = own.bytes_per_second / network.bytes_per_second
    return collective if abs(factor - 1) <= 0.1 else _faster(collective, own, factor)


def _faster(collective: Collective, network: RingLink, factor: float) -> Collective:
    """Scale the part of an all-reduce's time that its link explains."""
    n = collective.ranks
    points = []
    for point in collective.curve:
        carried = 2 * (n - 1) / n * point.size_bytes / network.bytes_per_second
        busy = min(carried, point.seconds)
        points.append(msgspec.structs.replace(point, seconds=point.seconds + busy * (factor - 1)))
    return msgspec.structs.replace(collective, curve=tuple(points))


def _shares(
    topology: Topology | None, names: tuple[str, ...], each: tuple[int, ...], count: int
) -> list[tuple[int, int]]:
    """List ranks and CPUs of each machine; hosts that are one machine share its CPUs."""
    if topology is None:
        return []
    machines = topology.measured.machines if topology.measured else ()
    on = {host.lower(): number for number, machine in enumerate(machines) for host in machine.hosts}
    ranks: dict[int, int] = {}
    found = []
    for place, host in enumerate(names):
        own = each[place % len(each)]
        if host.lower() in on:
            ranks[on[host.lower()]] = ranks.get(on[host.lower()], 0) + own
        elif (group := topology.group_of(host)) and group.cores:
            found.append((own, group.cores))
    if len(machines) == 1 and len(machines[0].hosts) > 1:  # what is extrapolated is more of the same
        ranks = {number: math.ceil(total * count / len(names)) for number, total in ranks.items()}
    return found + [(total, machines[number].processors) for number, total in ranks.items()]


def _machine_of(topology: Topology | None, names: tuple[str, ...]) -> str:
    """Name two hosts that are one machine, empty if there are none."""
    chosen = {name.lower() for name in names}
    for machine in topology.measured.machines if topology and topology.measured else ():
        same = [host for host in machine.hosts if host.lower() in chosen]
        if len(same) > 1:
            return f" ({same[0]} and {same[-1]}, for one, are one machine)"
    return ""


def _memory_rate(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None, gpus: bool) -> float | None:
    if gpus:
        return spec.memory_bandwidth_bytes_per_second.value if spec else None
    links = [intra_node_link(topology, host, "memory", "memory") for host in names[:1]] if topology else []
    return min((link.bandwidth_bytes_per_second for link in links if link), default=None)


def _smallest(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None) -> int | None:
    places = topology.places if topology else {}
    groups = {places[host.lower()][0] for host in names if host.lower() in places}
    known = [gpus.memory_bytes for number in groups if topology and (gpus := topology.nodes[number].gpus)]
    sizes = [size for size in known if size is not None]
    return min(sizes) if sizes else int(spec.memory_bytes.value) if spec else None
