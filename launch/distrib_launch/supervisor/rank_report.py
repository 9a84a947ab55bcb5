"""Measured steps of one rank, as `distrib.training.telemetry.step_timer` reports them."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from distrib_launch.supervisor.loading_check import LoadingReport


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the steps in a window; rates and sizes are by address of the peer."""

    steps: int
    step_seconds: float
    compute_seconds: float
    """Time of a step without the wait for gradients."""
    exposed_seconds: float
    """Wait for gradients."""
    queued_seconds: float = 0.0
    """Time of a step in which a thread of the rank was ready to run and had no CPU."""
    samples: float = 0.0
    """Samples of this rank in a step, 0 if not known."""
    sent_bytes_per_second: dict[str, float] = {}
    sent_bytes_per_step: dict[str, float] = {}
    loading: LoadingReport | None = None

    @property
    def loader_seconds(self) -> float:
        """Wait for data in a step, a part of `compute_seconds`; 0 without a prepared loader."""
        return min(self.compute_seconds, self.loading.loader_seconds) if self.loading else 0.0


def parse(report: Any) -> RankReport:
    """Return a rank's report.

    Args:
        report: JSON object of its status line, which a script may have written.

    Raises:
        ValueError: The object is not valid, or its times and rates are impossible.
    """
    try:
        found = msgspec.convert(report, RankReport)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    numbers = (
        found.step_seconds,
        found.compute_seconds,
        found.exposed_seconds,
        found.queued_seconds,
        found.samples,
        *found.sent_bytes_per_second.values(),
        *found.sent_bytes_per_step.values(),
    )
    if found.loading and not found.loading.is_valid:
        raise ValueError("times of data loading are not possible")
    if not all(math.isfinite(value) and value >= 0 for value in numbers) or not found.step_seconds or found.steps < 1:
        raise ValueError(f"a step of {found.step_seconds} s is not possible")
    return found
