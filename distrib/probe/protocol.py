"""What rank 0 and the others say to each other over MPI, each a message of msgpack."""

from __future__ import annotations

import msgspec

from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, Point
from distrib.probe.records import Facts, Gpu, LoadPattern
from distrib.probe.settings import Mode, Transport

HELLO, SETUP, TASK, REPLY = 1, 2, 3, 4
"""Tags."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher wants: all hosts of the probe in order, even those that are gone, and what is done already."""

    hosts: tuple[str, ...]
    present: tuple[str, ...]
    """Those that the job runs on, in its order."""
    mode: Mode = "default"
    done: tuple[str, ...] = ()
    resumed: bool = False
    """What was measured before stands on rank 0's standard input, a record on each line."""
    primary: Transport | None = None
    """None: MPI where every host has InfiniBand or RoCE, TCP elsewhere."""
    gpudirect: bool = True
    """False: NCCL was told to do without GPUDirect RDMA, and all-reduce is measured alone."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is there; the first one of each host tells its facts, and by address the ports where it takes TCP connections."""

    facts: Facts | None = None
    ports: dict[str, int] = {}
    on_gpu: bool = False


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank must know of the others. `ports` are those of each address that a rank listens on."""

    token: bytes
    ports: dict[str, int]


class Transfer(msgspec.Struct, frozen=True, kw_only=True, tag="transfer"):
    """Measure the way from rank `source` to rank `target`, or both ways at once.

    `longest`: how long the stream may go on for the sake of `variation`. `addresses` are those of source and target, by
    which the bytes go. Whoever has waited `patience_seconds` gives up.
    """

    number: int
    stage: str
    source: int
    target: int
    addresses: tuple[str, str]
    transport: Transport
    load: LoadPattern
    both_ways: bool = False
    seconds: float
    longest: float = 0.0
    variation: float | None = None
    streams: int = 1
    pings: int = 0
    sizes: tuple[int, ...] = ()
    patience_seconds: float


class Inside(msgspec.Struct, frozen=True, kw_only=True, tag="inside"):
    """Measure the ways inside each host, each for about `seconds`; between two GPUs `backwards` too, or one way only.

    Copies within the memory of a machine count only where nobody else makes them: `memory` is for one of its hosts.
    """

    number: int
    seconds: float
    backwards: bool
    memory: bool
    patience_seconds: float


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, tag="all_reduce"):
    """Measure all-reduces over the first `counts[i]` hosts and all their ranks, for each i, together for about `seconds`.

    What of the largest sizes would take longer than that is left out. `ranks` are those that take part where not all do.
    """

    number: int
    counts: tuple[int, ...]
    gpudirect: bool | None
    ranks: tuple[int, ...] = ()
    sizes: tuple[int, ...]
    seconds: float
    patience_seconds: float


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """This was all. `at_once`: without MPI's end, which waits for every rank, and some will not come to it."""

    at_once: bool = False


Task = Transfer | Inside | AllReduce | Leave


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver saw of one direction."""

    latency_seconds: float | None
    bandwidth_bytes_per_second: float
    variation: float
    repetitions: int
    outliers: int
    curve: tuple[Point, ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """How a task went for one rank. With `failed` there may still be what was measured before, or beside it."""

    number: int
    rank: int
    seconds: float = 0.0
    busy: float = 0.0
    arrived: Arrived | None = None
    retransmits: int = 0
    path_mtu: int | None = None
    inside: tuple[IntraNodeLinkMeasurement, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    collectives: tuple[Collective, ...] = ()
    failed: str | None = None


def first_line(error: Exception) -> str:
    """What went wrong, in so many words as fit beside others: torch tells stories."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
