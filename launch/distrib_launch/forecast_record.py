"""Predicted and measured performance of a job, as `plan.json` and `result.json` contain them."""

from __future__ import annotations

import msgspec

from distrib.bandwidth_model.prediction import Prediction


class ForecastRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted performance of a job with its strategy."""

    workload: str
    source: str
    """Origin of the workload: a file, or the catalogue."""
    predicted: Prediction
    expected_error: float
    """Relative error to expect of the step time, of links and workload together."""
    warning: str = ""


class LinkUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Rate of a link while it was in use, and the rate that the topology predicts."""

    source: str
    target: str
    bytes_per_second: float
    expected_bytes_per_second: float | None


class MeasuredPerformance(msgspec.Struct, frozen=True, kw_only=True):
    """Measured steps of a job. Times are medians of the slowest rank."""

    steps: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """Time of a step beyond computing."""
    efficiency: float
    """Step time of one rank alone, as profiled or else computing only, divided by the step time."""
    slowest_rank: int
    links: tuple[LinkUsage, ...] = ()
    prediction_error: float | None = None
    """Relative excess of the step time over the predicted one."""
    network_seconds: float | None = None
    """Time that the links of the busiest host need for a step at their rates; None: traffic was not counted."""
