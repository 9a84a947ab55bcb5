"""What probe measured, as the `measured:` part of a topology file holds it: seconds, bytes, bytes per second.

A curve is the time that a message takes against its size, both measured: medians of repetitions, each with the
coefficient of variation seen.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One size of a curve: bytes, the median of the seconds it took, and their coefficient of variation."""

    size_bytes: int
    seconds: float
    variation: float = 0.0


class LinkMeasurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The way from one host to another.

    `way` is how the bytes went. `load` is what else went on meanwhile: nothing (`alone`), every other pair of its round
    (`together`), or the other half of the cluster (`bisection`). `both_ways`: both hosts sent at the same time, and the curve is one
    direction's share. `interface` is the source's card; `network` its subnet, where that is not the job's. `latency_seconds`
    is half a round trip of 8 bytes; `bandwidth_bytes_per_second` the best that large messages reached. `streams`: how many
    connections TCP had, where that is known.
    """

    source: str
    target: str
    transport: Literal["mpi", "tcp"] = msgspec.field(name="way")
    load: Literal["alone", "together", "bisection"]
    both_ways: bool = False
    interface: str | None = None
    network: str | None = None
    latency_seconds: float | None = None
    bandwidth_bytes_per_second: float
    variation: float
    streams: int | None = None
    curve: tuple[Point, ...] = ()


class IntraNodeLinkMeasurement(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A way inside a host: `memory` copies, `gpuN` to or from `memory`, `gpuN` to `gpuM` or itself; `path` is NVLink, PCIe, ..."""

    host: str
    source: str
    target: str
    path: str | None = None
    bandwidth_bytes_per_second: float
    variation: float
    curve: tuple[Point, ...] = ()


class Collective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A collective over some hosts; sizes are those of each rank's buffer, as nccl-tests counts them.

    Bus bandwidth of an all-reduce is size / seconds x 2(n-1)/n for n ranks (nccl-tests, doc/PERFORMANCE.md).
    """

    name: Literal["all_reduce"]
    backend: Literal["gloo", "nccl", "mpi"]
    hosts: tuple[str, ...]
    ranks: int
    gpudirect: bool | None = None
    curve: tuple[Point, ...]


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The hosts that are one machine, as containers and namespaces are, and how many processors they may use together."""

    hosts: tuple[str, ...]
    processors: int


class Measurements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One probe: when (ISO 8601, UTC), with what software, of which hosts, and what it found."""

    when: str
    software: dict[str, str]
    hosts: tuple[str, ...]
    machines: tuple[Machine, ...] = ()
    pairs: tuple[LinkMeasurement, ...] = ()
    inside: tuple[IntraNodeLinkMeasurement, ...] = ()
    collectives: tuple[Collective, ...] = ()
