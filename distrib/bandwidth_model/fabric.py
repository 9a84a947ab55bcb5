"""What joins the ranks of one job: their wires, the all-reduces that were measured over them, and who computes slower."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model.bottleneck import RingLink, slowest_between_hosts, slowest_inside_host
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import scaled_error, times_as_long
from distrib.cluster.hardware_catalog import GpuSpec, find_gpu
from distrib.cluster.links import intra_node_link
from distrib.cluster.measurements import Collective
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError

MEASURED_ERROR, CATALOGUED_ERROR = 0.05, 0.15
"""Relative errors of a step to expect where links were measured and where they are read from data sheets."""

SAME = 0.1
"""By how much links of one kind may differ for what was measured over some of them to be as good as over the others."""

MUCH_BYTES, EXPLAINED = 1 << 20, 0.7
"""Of so many bytes an all-reduce should take little longer than its slowest link, which is to explain so much of it."""

IMAGINED = "imagined"
"""The name of a cluster that exists in the options of a command alone."""


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The ways between the ranks of a job; `wire` is None for one host, `inside` where each host has one rank."""

    hosts: int
    ranks: int
    ranks_per_host: int
    """The most that a host has."""
    gpus: bool
    processors: int | None
    """What each rank has of a CPU host's, at least; None where nobody says."""
    ranks_per_processor: float
    """On the machine where they are most, counting all of the job's hosts that it is; 0 where nobody says. Of a host's own
    processors, also where ranks compute on GPUs."""
    wire: RingLink | None
    inside: RingLink | None
    collectives: tuple[Collective, ...] = ()
    """All-reduces measured over hosts of this cluster."""
    memory_bytes_per_second: float | None = None
    """Copies in a host's memory, or in a GPU's."""
    memory_bytes: int | None = None
    """Of the smallest GPU."""
    slowness: tuple[tuple[float, int], ...] = ()
    """Kinds of ranks where they differ: what they take for what takes the workload's own device 1, and how many there are."""
    expected_error: float = MEASURED_ERROR
    notes: tuple[str, ...] = ()

    @property
    def crowding(self) -> float:
        """How many ranks that compute on them want the same processor at once; 1 where each has its own."""
        return 1.0 if self.gpus else max(1.0, self.ranks_per_processor)

    @property
    def is_slower_than_links(self) -> bool:
        """Whether an all-reduce of much took clearly longer than the slowest link does for what it carries."""
        if self.wire is None:
            return False
        for collective in self.collectives:
            n, last = collective.ranks, collective.curve[-1]
            carried_seconds = 2 * (n - 1) / n * last.size_bytes / self.wire.bytes_per_second
            if last.size_bytes >= MUCH_BYTES and carried_seconds < EXPLAINED * last.seconds:
                return True
        return False

    def with_wire(self, bytes_per_second: float) -> Fabric:
        """The same job where all links between hosts carry so much."""
        if self.wire is None:
            return self
        factor = self.wire.bytes_per_second / bytes_per_second
        collectives = tuple(_faster(each, self.wire, factor) for each in self.collectives)
        wire = msgspec.structs.replace(self.wire, curve=self.wire.curve.slower(factor))
        return msgspec.structs.replace(self, wire=wire, collectives=collectives)

    def with_inside(self, bytes_per_second: float) -> Fabric:
        """The same job where links inside hosts carry so much."""
        if self.inside is None:
            return self
        curve = self.inside.curve.slower(self.inside.bytes_per_second / bytes_per_second)
        return msgspec.structs.replace(self, inside=msgspec.structs.replace(self.inside, curve=curve))


def find_fabric(
    topology: Topology | None,
    workload: Workload,
    hosts: Sequence[str] | int,
    ranks_per_host: int | Sequence[int],
    nodes: int | None = None,
) -> Fabric:
    """What joins these ranks. `nodes`: so many hosts, `hosts` being the first of them; None: no more than those.

    Raises ConfigError where nothing is known of a link that is needed.
    """
    count = nodes or (hosts if isinstance(hosts, int) else len(hosts))
    each = (ranks_per_host,) if isinstance(ranks_per_host, int) else tuple(ranks_per_host)
    _check(count, each)
    ranks = each[0] * count if len(each) == 1 else sum(each)
    gpus = workload.device != "cpu"
    names, notes = _names(topology, hosts, count, gpus)
    most = max(each)
    wire = slowest_between_hosts(topology, names, gpus=gpus) if count > 1 else None
    inside = _inside(topology, names, workload, each) if most > 1 else None
    slowness, said = _slowness(topology, names, workload, each, ranks) if gpus and topology else ((), ())
    notes += said
    if (
        inside
        and inside.kind == "nvlink"
        and topology
        and (group := topology.group_of(inside.host))
        and not group.links
    ):
        notes += (f"nobody described the `links` in {inside.host}: {inside.text} is taken, as the catalogue has it",)
    links = [link for link in (wire, inside) if link]
    if wire and not gpus:  # ranks of a CPU host share memory
        links = [wire]
    for link in links:
        if not link.measured and (gpus or link is wire):
            notes += (f"{link.name} was not measured: its rate is the catalogue's; distrib-topo probe measures it",)
    shares = _shares(topology, names, each, count)
    most_shared = max((ranks / processors for ranks, processors in shares), default=0.0)
    if most_shared > 1 and not gpus:
        notes += (
            f"{most_shared:.2g} ranks share each processor{_machine_of(topology, names)}: more processors would help",
        )
    known = [link.measured for link in links]
    spec = find_gpu(workload.device) if gpus else None
    if gpus and spec is None:
        notes += (f"{workload.device} is no GPU of the catalogue: nothing is known of its memory and links",)
    return Fabric(
        hosts=count,
        ranks=ranks,
        ranks_per_host=most,
        gpus=gpus,
        processors=None if gpus else min((max(1, count // ranks) for ranks, count in shares), default=None),
        ranks_per_processor=most_shared,
        wire=wire,
        inside=inside,
        collectives=_collectives(topology, wire, gpus, most),
        memory_bytes_per_second=_memory_rate(topology, names, spec, gpus),
        memory_bytes=_smallest(topology, names, spec) if gpus else None,
        slowness=slowness,
        expected_error=max(MEASURED_ERROR if all(known) else CATALOGUED_ERROR, scaled_error() if slowness else 0.0),
        notes=notes,
    )


def _check(count: int, each: tuple[int, ...]) -> None:
    if count < 1:
        raise ConfigError(f"{count} hosts: a job has at least one", hint="say how many hosts it has")
    if min(each, default=0) < 1:
        raise ConfigError("a host without ranks is none of the job's", hint="leave it out")
    if len(each) > 1 and len(each) != count:
        raise ConfigError(
            f"{len(each)} counts of ranks for {count} hosts", hint="give one for each host, or one for all"
        )


def _names(
    topology: Topology | None, hosts: Sequence[str] | int, count: int, gpus: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts that are known, at most as many as there shall be, and what to say where they are fewer."""
    if not isinstance(hosts, int):
        known = tuple(hosts)
    elif topology is None:
        return ("localhost",) if count == 1 else (), ()
    else:
        known = topology.hosts
        if gpus:
            known = tuple(host for host in known if (found := topology.gpus_of(host)) and found.count) or known
    if count > len(known):
        if topology and topology.name == IMAGINED:
            return known, ()  # all of them are
        have = "1 host is known" if len(known) == 1 else f"{len(known)} hosts are known"
        return known, (f"{have}; {count} are extrapolated: more of the same, joined as these are",)
    return known[:count], ()


# What else is known


def _inside(topology: Topology | None, names: tuple[str, ...], workload: Workload, each: tuple[int, ...]) -> RingLink:
    """The slowest of what joins the ranks inside the hosts, looked at once for hosts that are built alike."""
    places = topology.places if topology else {}
    most: dict[int | None, tuple[int, str]] = {}
    for place, host in enumerate(names or ("localhost",)):
        ranks, kind = each[place % len(each)], places[host.lower()][0] if host.lower() in places else None
        if ranks > max(1, most.get(kind, (0, ""))[0]):
            most[kind] = ranks, host
    # All of the named hosts may have one rank, and those that are like them more.
    wires = [
        slowest_inside_host(topology, host, workload, ranks) for ranks, host in most.values() or [(max(each), names[0])]
    ]
    return min(wires, key=lambda wire: wire.bytes_per_second)


def _slowness(
    topology: Topology, names: tuple[str, ...], workload: Workload, each: tuple[int, ...], ranks: int
) -> tuple[tuple[tuple[float, int], ...], tuple[str, ...]]:
    """How long each kind of GPU takes against the one that the workload was measured on, by the catalogue."""
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
            factor = times_as_long(own, spec)
            found[spec.name] = factor, found.get(spec.name, (1.0, 0))[1] + count * ranks // named
    if all(factor == 1.0 for factor, _ in found.values()):
        return (), ()
    kinds = ", ".join(f"{name} takes {factor:.2g} times as long" for name, (factor, _) in found.items() if factor != 1)
    return tuple(found.values()), (
        f"computed for {workload.device}; by the catalogue's peak throughput and memory bandwidth, {kinds}",
    )


def _collectives(topology: Topology | None, wire: RingLink | None, gpus: bool, each: int) -> tuple[Collective, ...]:
    """The all-reduces that probe measured with the backend that training uses, fewest ranks first.

    Those with as many ranks on each host, where there are any; else those with one; else all. One over hosts whose slowest
    link is another than the job's is read as if it had been the job's.
    """
    if topology is None or topology.measured is None or wire is None:
        return ()
    backend = "nccl" if gpus else "gloo"
    found = [
        one for one in topology.measured.collectives if one.backend == backend and len(one.hosts) > 1 and one.curve
    ]
    direct = wire.gpudirect is not False
    found = [one for one in found if one.gpudirect in (None, direct)] or found
    for wanted in (each, 1):
        alike = [one for one in found if one.ranks == wanted * len(one.hosts)]
        if alike:
            found = alike
            break
    over = [_over(topology, one, wire) for one in sorted(found, key=lambda one: one.ranks)]
    return tuple(one for one in over if one)


def _over(topology: Topology, collective: Collective, wire: RingLink) -> Collective | None:
    """What an all-reduce would take if `wire` were the slowest link of its hosts; None where nothing is known of theirs."""
    try:
        own = slowest_between_hosts(topology, collective.hosts, gpus=collective.backend == "nccl")
    except ConfigError:
        return None
    factor = own.bytes_per_second / wire.bytes_per_second
    return collective if abs(factor - 1) <= SAME else _faster(collective, own, factor)


def _faster(collective: Collective, wire: RingLink, factor: float) -> Collective:
    """What an all-reduce would take if the wire took `factor` times as long for each byte."""
    n = collective.ranks
    points = []
    for point in collective.curve:
        carried = 2 * (n - 1) / n * point.size_bytes / wire.bytes_per_second
        busy = min(carried, point.seconds)
        points.append(msgspec.structs.replace(point, seconds=point.seconds + busy * (factor - 1)))
    return msgspec.structs.replace(collective, curve=tuple(points))


def _shares(
    topology: Topology | None, names: tuple[str, ...], each: tuple[int, ...], count: int
) -> list[tuple[int, int]]:
    """The ranks of each machine and its processors, as far as anybody says: probe, else the file of each host.

    Hosts that probe found to be one machine share its processors.
    """
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
    """Which of the hosts are one machine, in words; empty where none are."""
    chosen = {name.lower() for name in names}
    for machine in topology.measured.machines if topology and topology.measured else ():
        same = [host for host in machine.hosts if host.lower() in chosen]
        if len(same) > 1:
            return f" ({same[0]} and {same[-1]}, for one, are the same machine)"
    return ""


def _memory_rate(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None, gpus: bool) -> float | None:
    if gpus:
        return spec.memory_bandwidth_bytes_per_second.value if spec else None
    ways = [intra_node_link(topology, host, "memory", "memory") for host in names[:1]] if topology else []
    return min((way.bandwidth_bytes_per_second for way in ways if way), default=None)


def _smallest(topology: Topology | None, names: tuple[str, ...], spec: GpuSpec | None) -> int | None:
    places = topology.places if topology else {}
    groups = {places[host.lower()][0] for host in names if host.lower() in places}
    known = [gpus.memory_bytes for number in groups if topology and (gpus := topology.nodes[number].gpus)]
    sizes = [size for size in known if size is not None]
    return min(sizes) if sizes else int(spec.memory_bytes.value) if spec else None
