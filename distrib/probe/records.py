"""Records of a probe: one JSON object per line on rank 0's standard output.

The launcher keeps the lines, shows progress, and resumes an interrupted probe from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from distrib.cluster.inventory import Interface
from distrib.cluster.measurements import (
    Collective,
    IntraNodeLinkMeasurement,
    LinkMeasurement,
    Measurements,
    Point,
    SharedMachine,
)
from distrib.probe.settings import Mode, Transport

STREAM_STALLED, NEARLY_NOTHING = "the stream stalled", "nearly nothing arrived"
STALL_MESSAGES = STREAM_STALLED, NEARLY_NOTHING
"""Failures of a stream after a connection was made and pings were answered."""

NO_REPLY = "did not reply"
"""Failure of a host from which no reply came in time; its name comes before it."""

LoadPattern = Literal["alone", "together", "bisection", "sharing"]
"""Traffic during the measurement of a pair. `sharing`: pairs chosen to find a shared link; their rates are not those of the pair."""


class GpuPcieLink(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's PCIe link at present, and its maximum."""

    index: int
    name: str
    pcie_generation: int | None = None
    pcie_generation_possible: int | None = None
    pcie_width: int | None = None
    pcie_width_possible: int | None = None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host's report about itself."""

    host: str
    address: str
    """The address by which other hosts reach it in the job."""
    interface: str | None
    """The interface with that address."""
    cpus: int
    machine: str = ""
    """Equal for containers of one machine; empty if unknown."""
    cores: tuple[int, ...] = ()
    """Numbers of the physical cores that the host may use, on its machine."""
    cpu_quota: float | None = None
    """CPU time per second that its control group allows, in CPUs; None for no limit."""
    interfaces: tuple[Interface, ...] = ()
    rdma_bytes_per_second: float | None = None
    """Total rate of its fastest active ports, either InfiniBand or RoCE; None if there is none."""
    rdma_ports: int = 1
    rdma_kind: Literal["infiniband", "roce"] = "infiniband"
    rdma_devices: tuple[str, ...] = ()
    """All RDMA devices, such as `mlx5_0`."""
    mpi_over_rdma: bool = True
    """True if MPI has opened an RDMA device in the probe, or there is none."""
    gpus: tuple[GpuPcieLink, ...] = ()
    software: dict[str, str] = {}

    def named(self, interface: str | None) -> Interface | None:
        """Return the interface of a name, or None.

        Args:
            interface: The name; None for none.
        """
        return next((each for each in self.interfaces if each.name == interface), None)


class ProbeStarted(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """First record. `primary` is the transport by which links are judged."""

    when: str
    """ISO 8601, UTC."""
    mode: Mode
    hosts: tuple[str, ...]
    primary: Transport
    facts: tuple[HostFacts, ...]


LinkKey = tuple[str, str, str, str, bool, str | None]


class PairMeasurement(msgspec.Struct, frozen=True, kw_only=True, tag="pair"):
    """One measurement of one direction between two hosts."""

    stage: str
    phase: int = 0
    """Pairs of one stage and phase were measured at once."""
    source: str
    target: str
    transport: Transport
    load: LoadPattern
    both_ways: bool = False
    network: str | None = None
    """The subnet of the NICs; None for the network of the job."""
    interface: str | None = None
    """The source's NIC in a secondary network."""
    latency_seconds: float | None = None
    bandwidth_bytes_per_second: float = 0.0
    variation: float = 0.0
    repetitions: int = 0
    outliers: int = 0
    curve: tuple[Point, ...] = ()
    streams: int = 1
    busy: float = 0.0
    """Busy fraction of the CPUs of the busier host. Near 1, the CPUs may have limited the rate instead of the link."""
    retransmits: int = 0
    path_mtu: int | None = None
    seconds: float = 0.0
    failed: str | None = None
    """Reason for the failure of the measurement; None if it succeeded."""

    @property
    def key(self) -> LinkKey:
        """Identify the link, its transport and the traffic."""
        return self.source, self.target, self.transport, self.load, self.both_ways, self.network


class IntraNodeMeasurement(msgspec.Struct, frozen=True, kw_only=True, tag="inside"):
    """A copy inside a host."""

    link: IntraNodeLinkMeasurement


class GpuLinkStates(msgspec.Struct, frozen=True, kw_only=True, tag="gpus"):
    """The PCIe links of a host's GPUs directly after their use."""

    host: str
    gpus: tuple[GpuPcieLink, ...]


class CollectiveMeasurement(msgspec.Struct, frozen=True, kw_only=True, tag="collective"):
    """A collective over some hosts."""

    collective: Collective


class SharedLinkSides(msgspec.Struct, frozen=True, kw_only=True, tag="groups"):
    """Hosts on the two sides of a shared link, found by concurrent streams."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]


class StageDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Progress: a stage has ended."""

    stage: str
    title: str
    done_seconds: float
    remaining_seconds: float
    complete: bool = True
    """True if nothing failed: the stage is not repeated, except for hosts in `without`."""
    without: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Failures and omissions, for the user."""


class ProbeEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Last record: all stages were tried."""

    seconds: float
    notes: tuple[str, ...] = ()


Record = (
    ProbeStarted
    | PairMeasurement
    | IntraNodeMeasurement
    | GpuLinkStates
    | CollectiveMeasurement
    | SharedLinkSides
    | StageDone
    | ProbeEnded
)
_DECODER = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> str:
    """Encode a record as a line of JSON, without its end.

    Args:
        record: Any record.
    """
    return msgspec.json.encode(record).decode()


def decode_record(line: str | bytes) -> Record | None:
    """Decode a line.

    Args:
        line: A line of rank 0's output.

    Returns:
        The record, or None for other output and truncated lines.
    """
    try:
        record: Record = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record


def fastest_measurements(records: Iterable[PairMeasurement]) -> dict[LinkKey, PairMeasurement]:
    """Select the fastest measurement of each link: disturbances can only make a link look slower.

    Args:
        records: Measurements; failed ones are ignored.

    Returns:
        By link, the fastest measurement, with the lowest latency and the shortest time of each message size of all.
    """
    found: dict[LinkKey, PairMeasurement] = {}
    for record in records:
        if record.failed:
            continue
        before = found.get(record.key)
        if before is None:
            found[record.key] = record
            continue
        new, old = sorted((record, before), key=lambda r: -r.bandwidth_bytes_per_second)
        latencies = [r.latency_seconds for r in (new, old) if r.latency_seconds is not None]
        found[record.key] = msgspec.structs.replace(
            new, curve=_merge_curves(new.curve, old.curve), latency_seconds=min(latencies, default=None)
        )
    return found


def _merge_curves(one: tuple[Point, ...], other: tuple[Point, ...]) -> tuple[Point, ...]:
    points: dict[int, Point] = {}
    for point in (*one, *other):
        if point.size_bytes not in points or point.seconds < points[point.size_bytes].seconds:
            points[point.size_bytes] = point
    return tuple(points[size] for size in sorted(points))


def build_measured(records: Iterable[Record]) -> Measurements | None:
    """Build the part of the topology file that holds a probe's measurements.

    Args:
        records: The records, oldest first.

    Returns:
        The measurements, or None if the probe did not start.
    """
    kept = list(records)
    start = next((r for r in kept if isinstance(r, ProbeStarted)), None)
    if start is None:
        return None
    facts = {host.host: host for r in kept if isinstance(r, ProbeStarted) for host in r.facts}
    pairs = fastest_measurements(r for r in kept if isinstance(r, PairMeasurement) and r.load != "sharing")
    return Measurements(
        when=start.when,
        software=next((dict(f.software) for f in facts.values()), {}),
        hosts=start.hosts,
        machines=tuple(
            SharedMachine(hosts=tuple(facts.host for facts in same), processors=_usable_cores(same))
            for same in group_by_machine(facts.values())
        ),
        pairs=tuple(
            LinkMeasurement(
                source=seen.source,
                target=seen.target,
                transport=seen.transport,
                load=seen.load,  # type: ignore[arg-type]
                both_ways=seen.both_ways,
                interface=seen.interface or (facts[seen.source].interface if seen.source in facts else None),
                network=seen.network,
                latency_seconds=seen.latency_seconds,
                bandwidth_bytes_per_second=seen.bandwidth_bytes_per_second,
                variation=seen.variation,
                streams=seen.streams if seen.transport == "tcp" else None,
                curve=seen.curve,
            )
            for seen in pairs.values()
        ),
        inside=tuple(
            {
                (r.link.host, r.link.source, r.link.target): r.link for r in kept if isinstance(r, IntraNodeMeasurement)
            }.values()
        ),
        collectives=tuple(
            {
                (r.collective.hosts, r.collective.ranks, r.collective.gpudirect): r.collective
                for r in kept
                if isinstance(r, CollectiveMeasurement)
            }.values()
        ),
    )


def group_by_machine(hosts: Iterable[HostFacts]) -> list[list[HostFacts]]:
    """Group hosts that are containers of one machine.

    Args:
        hosts: The hosts' reports; one that does not know its machine is a group of its own.
    """
    on: dict[str, list[HostFacts]] = {}
    for facts in hosts:
        on.setdefault(facts.machine or f"host {facts.host}", []).append(facts)
    return list(on.values())


def _usable_cores(hosts: list[HostFacts]) -> int:
    """Return the number of cores that hosts of one machine may use together."""
    cores = len({number for facts in hosts for number in facts.cores}) or max(facts.cpus for facts in hosts)
    quotas = [facts.cpu_quota for facts in hosts if facts.cpu_quota is not None]
    return max(1, min(cores, int(sum(quotas)))) if len(quotas) == len(hosts) else cores
