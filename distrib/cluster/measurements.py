"""Measurements of a probe, the `measured:` section of a topology file: seconds, bytes, bytes per second.

A curve is the time of a message against its size: medians of repetitions with their coefficients of variation.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A point of a curve: bytes, median seconds, coefficient of variation."""

    size_bytes: int
    seconds: float
    variation: float = 0.0


class LinkMeasurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The measured link from one host to another.

    `transport` is `way` in the file. `load`: other traffic, none (`alone`), all pairs of the round (`together`) or the other half of the
    cluster (`bisection`). `both_ways`: both hosts sent, the curve is one direction. `interface`: the source's NIC. `network`: its
    subnet, None for the job's. `latency_seconds`: half a round trip of 8 bytes. `bandwidth_bytes_per_second`: the best of large
    messages. `streams`: TCP connections, None if unknown.
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
    """A measured link inside a host, between `memory` and `gpuN`; `path` is NVLink, PCIe, ..."""

    host: str
    source: str
    target: str
    path: str | None = None
    bandwidth_bytes_per_second: float
    variation: float
    curve: tuple[Point, ...] = ()


class Collective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A measured collective over hosts; sizes are those of each rank's buffer, as in nccl-tests.

    Bus bandwidth of an all-reduce is size / seconds x 2(n-1)/n for n ranks (nccl-tests, doc/PERFORMANCE.md).
    """

    name: Literal["all_reduce"]
    backend: Literal["gloo", "nccl", "mpi"]
    hosts: tuple[str, ...]
    ranks: int
    gpudirect: bool | None = None
    curve: tuple[Point, ...]


class SharedMachine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Hosts on one machine, such as containers, and the CPUs that they share."""

    hosts: tuple[str, ...]
    processors: int


class Measurements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The results of a probe; `when` is ISO 8601 in UTC."""

    when: str
    software: dict[str, str]
    hosts: tuple[str, ...]
    machines: tuple[SharedMachine, ...] = ()
    pairs: tuple[LinkMeasurement, ...] = ()
    inside: tuple[IntraNodeLinkMeasurement, ...] = ()
    collectives: tuple[Collective, ...] = ()
