"""What was predicted of a job, as `plan.json` keeps it."""

from __future__ import annotations

import msgspec

from distrib.bandwidth_model.prediction import Prediction


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What was predicted of a job with the strategy that it runs with, and the warning that this is worth."""

    workload: str
    source: str
    """Where the workload is from: a file, or the catalogue."""
    predicted: Prediction
    expected_error: float
    """Of the step's time: of links and workload together."""
    warning: str = ""


class LinkSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a link carried during the run while it had something to carry, and what the topology says of it."""

    source: str
    target: str
    bytes_per_second: float
    expected_bytes_per_second: float | None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks measured of their steps; times are medians, those of the slowest rank.

    `exposed_seconds` is what a step takes beyond computing. `efficiency`: the step of one rank alone, as profiled, or else
    computing alone, against the step. `prediction_error`: how much longer the step was than predicted, as a part of that.
    `network_seconds`: what the links of the busiest host need for what it sends in a step, by the rates that they have; None where
    nobody counted.
    """

    steps: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    efficiency: float
    slowest_rank: int
    links: tuple[LinkSeen, ...] = ()
    prediction_error: float | None = None
    network_seconds: float | None = None
