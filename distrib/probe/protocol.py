"""Messages between rank 0 and the other ranks over MPI, each encoded with msgpack."""

from __future__ import annotations

import enum

import msgspec

from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, Point
from distrib.probe.records import GpuPcieLink, HostFacts, LoadPattern
from distrib.probe.settings import Mode, Transport


class MessageTag(enum.IntEnum):
    """MPI tag of each message. Tags from 16 on are those of measurements (`bench.mpi`)."""

    HELLO = 1
    SETUP = 2
    TASK = 3
    REPLY = 4


class ProbeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's request: the first argument of every rank."""

    hosts: tuple[str, ...]
    """All hosts of the probe, lost ones included."""
    present: tuple[str, ...]
    """The hosts that the job runs on, in its order."""
    mode: Mode = "default"
    done: tuple[str, ...] = ()
    """Keys of completed stages."""
    resumed: bool = False
    """True if rank 0 reads earlier records from its standard input, one per line."""
    primary: Transport | None = None
    """The transport whose rates decide about findings. None: MPI if every host has InfiniBand or RoCE, else TCP."""
    gpudirect: bool = True
    """False to measure only all-reduce, with GPUDirect RDMA turned off in NCCL."""


class RankHello(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a rank. The first rank of each host adds its facts and, by address, the ports it listens on."""

    rank: int = 0
    facts: HostFacts | None = None
    ports: dict[str, int] = {}
    on_gpu: bool = False


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's reply: the token that authenticates TCP connections, and the ports of all ranks by address."""

    token: bytes
    ports: dict[str, int]


class PairTask(msgspec.Struct, frozen=True, kw_only=True, tag="pair"):
    """Measure the link from rank `source` to rank `target`, or both directions at once."""

    number: int
    stage: str
    source: int
    target: int
    addresses: tuple[str, str]
    """Addresses of source and target on the network under test."""
    transport: Transport
    load: LoadPattern
    both_ways: bool = False
    seconds: float
    max_seconds: float = 0.0
    """Duration up to which a stream continues until its `variation` is reached."""
    variation: float | None = None
    streams: int = 1
    pings: int = 0
    sizes: tuple[int, ...] = ()
    timeout_seconds: float


class HostTask(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """Measure copies inside each host."""

    number: int
    seconds: float
    """Duration of each pair of GPUs or GPU and memory."""
    both_directions: bool
    """False for one direction between two GPUs."""
    memory: bool
    """True for copies within host memory: containers of one machine share it, and one of them measures."""
    timeout_seconds: float


class AllReduceTask(msgspec.Struct, frozen=True, kw_only=True, tag="all_reduce"):
    """Measure all-reduces over the first `host_counts[i]` hosts and their ranks, for each i."""

    number: int
    host_counts: tuple[int, ...]
    gpudirect: bool | None
    ranks: tuple[int, ...] = ()
    """The ranks that take part; empty for all."""
    sizes: tuple[int, ...]
    seconds: float
    """Duration of all counts; the largest sizes are left out if they take longer."""
    timeout_seconds: float


class ShutdownTask(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Exit. `skip_finalize`: without MPI_Finalize, which waits for every rank."""

    skip_finalize: bool = False


RankTask = PairTask | HostTask | AllReduceTask | ShutdownTask
Measurement = PairTask | HostTask | AllReduceTask


class ReceivedRate(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's measurement of one direction."""

    latency_seconds: float | None
    bandwidth_bytes_per_second: float
    variation: float
    repetitions: int
    outliers: int
    curve: tuple[Point, ...] = ()


class TaskReply(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's result of a task. If `failed` is set, there may still be partial measurements."""

    number: int
    rank: int
    seconds: float = 0.0
    busy: float = 0.0
    """The busy fraction of the host's CPUs."""
    received: ReceivedRate | None = None
    retransmits: int = 0
    path_mtu: int | None = None
    copies: tuple[IntraNodeLinkMeasurement, ...] = ()
    gpus: tuple[GpuPcieLink, ...] = ()
    collectives: tuple[Collective, ...] = ()
    failed: str | None = None


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; torch's messages are long.

    Args:
        error: Any exception.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
