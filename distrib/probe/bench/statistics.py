"""From repetitions to one number that can be trusted, and how far. Pure.

The median is reported: a repetition that something else disturbed does not move it. Disturbed ones are counted, so that
they stay visible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

OUTLIER_DEVIATIONS = 5.0
"""Further than this many robust standard deviations from the median a repetition is an outlier."""

MIN_SPREAD = 0.01
"""Repetitions within this part of the median are never outliers, however well the others agree."""

MAD_TO_DEVIATION = 1.4826
"""Median absolute deviation to standard deviation, for normal errors (Rousseeuw and Croux, 1993)."""

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of the median over that of the mean, for normal errors."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Repetitions summed up.

    `variation` is the coefficient of variation (standard deviation over mean) of the repetitions that are no outliers;
    `median_variation` that of the median, which shrinks as repetitions are added. Without two repetitions both are 0.
    """

    median: float
    variation: float
    median_variation: float
    repetitions: int
    outliers: int


def summarise(values: Sequence[float]) -> Summary:
    """Sum up one repetition or more, each greater than 0."""
    median = statistics.median(values)
    spread = MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in values)
    limit = max(OUTLIER_DEVIATIONS * spread, MIN_SPREAD * median)
    kept = [value for value in values if abs(value - median) <= limit]
    mean = statistics.fmean(kept)
    variation = statistics.stdev(kept) / mean if len(kept) > 1 and mean else 0.0
    return Summary(
        median=median,
        variation=variation,
        median_variation=MEDIAN_ERROR * variation / math.sqrt(len(kept)),
        repetitions=len(values),
        outliers=len(values) - len(kept),
    )


def rates(stamps: Sequence[tuple[float, int]], *, skip_bytes: int, skip_seconds: float, windows: int) -> list[float]:
    """Bytes per second in up to `windows` equal spans of a stream.

    `stamps` are times in seconds, each with how many bytes had arrived by then. What arrived in the first `skip_bytes`
    or `skip_seconds`, whichever ends later, is left out: a shaped or paced link lets a first burst pass faster than it
    can go on.
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
