"""Predictions: the result types of the bandwidth model."""

from __future__ import annotations

from typing import Literal

import msgspec

from distrib.strategy import Strategy
from distrib.units import bit_rate_text, rate_text

Phase = Literal["loader", "forward", "backward", "communication", "optimizer", "wait"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a step on the `compute` or `network` stream, in seconds since the step began."""

    stream: Literal["compute", "network"]
    phase: Phase
    label: str
    start_seconds: float
    end_seconds: float


class NeededNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A network with which a job reaches an efficiency; so does one of this type with more bandwidth."""

    bytes_per_second: float
    """Bandwidth of each host."""
    network: str
    """The type, such as `Ethernet` or `8 ports of InfiniBand`; empty if the present one is not described."""
    ports: int
    """Ports of each host, at least."""
    latency_seconds: float
    """Latency of a message, at most."""

    @property
    def text(self) -> str:
        """Return such as `200 Gb/s a host over 8 ports of InfiniBand`."""
        return f"{bit_rate_text(self.bytes_per_second)} a host" + (f" over {self.network}" if self.network else "")


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """The link that limits a job, its bandwidth and the bandwidth for the target efficiency."""

    link: str
    """Such as `n1-n2, 10 GbE`."""
    source: str
    target: str
    bandwidth_bytes_per_second: float
    needed_bytes_per_second: float | None = None
    needed_network: NeededNetwork | None = None
    wanted_efficiency: float = 0.9
    is_inside: bool = False
    """True for a link inside a host, between ends such as `n1 gpu0`."""

    @property
    def bandwidth(self) -> str:
        """Return the bandwidth for a message: in bytes inside a host, in bits between hosts."""
        return (rate_text if self.is_inside else bit_rate_text)(self.bandwidth_bytes_per_second)


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of step time beyond that of one rank alone, such as `slower GPUs`."""

    what: str
    seconds: float


class ScalingLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The efficiency of a job with the fastest network, and the causes of the remaining loss."""

    efficiency: float
    losses: tuple[Overhead, ...]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of one step of a job."""

    hosts: int
    ranks_per_host: int
    """The most ranks of a host."""
    ranks: int
    strategy: Strategy
    step_seconds: float
    compute_seconds: float
    """The step of one rank alone, with its wait for data."""
    communication_seconds: float
    """Time for which the network is busy."""
    exposed_seconds: float
    """The part of the communication that computing does not hide."""
    loader_seconds: float = 0.0
    """The wait for data."""
    samples_per_second: float
    tokens_per_second: float = 0.0
    """0 if samples are not sequences."""
    efficiency: float
    """Samples per second and rank against one rank alone, 0 to 1."""
    cap: Bottleneck | None
    """The limiting link; None if something else limits."""
    losses: tuple[Overhead, ...] = ()
    """Causes of the loss, largest first."""
    fits_memory: bool | None = None
    expected_error: float
    """Expected relative error of `step_seconds`: small if links were measured."""
    notes: tuple[str, ...] = ()
    timeline: tuple[Span, ...] = ()
