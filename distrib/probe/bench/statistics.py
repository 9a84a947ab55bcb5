"""Statistics of repeated measurements.

The median is reported: a disturbed repetition does not move it. Outliers are counted, so that disturbances stay visible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for normal errors (Rousseeuw and Croux, 1993)."""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of the median over that of the mean, for normal errors."""


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of repetitions. Variations are 0 for a single repetition."""

    median: float
    variation: float
    """Coefficient of variation (standard deviation over mean) without outliers."""
    median_variation: float
    """Coefficient of variation of the median, which decreases with the number of repetitions."""
    repetitions: int
    outliers: int


def summarize(values: Sequence[float]) -> SampleSummary:
    """Summarize repetitions.

    Args:
        values: At least one value, each above 0.

    Returns:
        The summary. Outliers count for the median only.
    """
    median = statistics.median(values)
    spread = MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in values)
    # Outliers are more than five deviations from the median, and more than 1 % of it.
    limit = max(5 * spread, 0.01 * median)
    kept = [value for value in values if abs(value - median) <= limit]
    mean = statistics.fmean(kept)
    variation = statistics.stdev(kept) / mean if len(kept) > 1 and mean else 0.0
    return SampleSummary(
        median=median,
        variation=variation,
        median_variation=MEDIAN_ERROR * variation / math.sqrt(len(kept)),
        repetitions=len(values),
        outliers=len(values) - len(kept),
    )


def stream_rates(
    stamps: Sequence[tuple[float, int]], *, skip_bytes: int, skip_seconds: float, windows: int
) -> list[float]:
    """Compute the rates of a stream in equal windows of time.

    A shaped link transfers a first burst faster than later data. So data of the first `skip_bytes` or `skip_seconds`, whichever
    ends later, does not count.

    Args:
        stamps: Times in seconds, each with the bytes that had arrived.
        skip_bytes: Bytes to leave out.
        skip_seconds: Seconds to leave out.
        windows: Maximum number of windows.

    Returns:
        Bytes per second of each window; none if the stream was too short.
    """
    if len(stamps) < 3:
        return []
    first = stamps[0][0]
    steady = [stamp for stamp in stamps if stamp[1] >= skip_bytes and stamp[0] - first >= skip_seconds]
    if len(steady) < 2:
        return []
    span = (steady[-1][0] - steady[0][0]) / windows
    found = []
    begin = steady[0]
    for stamp in steady[1:]:
        seconds = stamp[0] - begin[0]
        if seconds > 0 and seconds >= span * 0.999:
            found.append((stamp[1] - begin[1]) / seconds)
            begin = stamp
    return found
