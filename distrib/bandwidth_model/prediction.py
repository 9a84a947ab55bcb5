"""What the model predicts of one configuration."""

from __future__ import annotations

from typing import Literal

import msgspec

from distrib.strategy import Strategy

Phase = Literal["loader", "forward", "backward", "communication", "optimizer", "wait"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Something that takes time in a step: on the `compute` stream or on the `wire`, seconds since the step began."""

    stream: Literal["compute", "wire"]
    phase: Phase
    label: str
    start_seconds: float
    end_seconds: float


class Cap(msgspec.Struct, frozen=True, kw_only=True):
    """The link that holds a job back: its name, what it carries, and what the efficiency that was wanted would need."""

    link: str
    """Such as `n1-n2, 10 GbE`."""
    source: str
    target: str
    bandwidth_bytes_per_second: float
    needed_bytes_per_second: float | None = None
    wanted_efficiency: float = 0.9
    is_inside: bool = False
    """Whether the link is one inside a host, whose ends are called such as `n1 gpu0`."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Something that makes a step longer than it would be alone: its name, such as `slower GPUs`, and by how much."""

    what: str
    seconds: float


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What a job would reach if wires between its hosts carried any number of bytes, and what would hold it back then."""

    efficiency: float
    losses: tuple[Loss, ...]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a job."""

    hosts: int
    ranks_per_host: int
    """The most that a host has."""
    ranks: int
    strategy: Strategy
    step_seconds: float
    compute_seconds: float
    """What the step takes on one rank alone, its wait for data included."""
    communication_seconds: float
    """How long the wire is busy."""
    exposed_seconds: float
    """How much of that nothing hides."""
    loader_seconds: float = 0.0
    """How much of the step is waiting for data."""
    samples_per_second: float
    efficiency: float
    """Samples per second and rank against those of one rank alone, 0 to 1."""
    cap: Cap | None
    """The link that keeps the step from being shorter; None where that is something else."""
    losses: tuple[Loss, ...] = ()
    """What makes it longer than alone, most first."""
    fits_memory: bool | None = None
    expected_error: float
    """The relative error of `step_seconds` to expect: small where the links were measured."""
    notes: tuple[str, ...] = ()
    timeline: tuple[Span, ...] = ()
