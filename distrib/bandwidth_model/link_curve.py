"""Link curves: the time that a message takes against its size.

Where probe has measured, between its samples; else a latency and a bandwidth from the catalogue. The latter alone is off by up to
41 % in the sizes that buckets have (fits to the sweeps of stas00/ml-engineering@744d01e network/), samples between which
one interpolates by far less.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable

import msgspec

from distrib.cluster.measurements import Point


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds against bytes, never falling.

    `logs` are the natural logarithms of (bytes, seconds) of what was measured, and the slope there; empty for a
    line, which is `latency_seconds` + bytes / `bandwidth_bytes_per_second`.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    logs: tuple[tuple[float, float, float], ...] = ()
    factor: float = 1.0
    """By how much what is beyond the latency takes longer than it was measured."""

    def seconds(self, size_bytes: float) -> float:
        """How long a message of this size takes."""
        if not self.logs:
            return self.latency_seconds + self.factor * size_bytes / self.bandwidth_bytes_per_second
        taken = self._measured(size_bytes)
        return taken if self.factor == 1.0 else self.latency_seconds + self.factor * max(
            0.0, taken - self.latency_seconds
        )  # fmt: skip

    def slower(self, factor: float) -> Curve:
        """The same way with `factor` times less bandwidth (more of it where `factor` is below 1)."""
        return msgspec.structs.replace(
            self,
            factor=self.factor * factor,
        )

    @property
    def large_bytes_per_second(self) -> float:
        """What large messages get."""
        return self.bandwidth_bytes_per_second / self.factor

    def _measured(self, size_bytes: float) -> float:
        first, last = self.logs[0], self.logs[-1]
        if size_bytes <= 0:
            return self.latency_seconds
        log = math.log(size_bytes)
        if log <= first[0]:
            return self.latency_seconds + (math.exp(first[1]) - self.latency_seconds) * size_bytes / math.exp(first[0])
        if log >= last[0]:
            return math.exp(last[1]) + (size_bytes - math.exp(last[0])) / self.bandwidth_bytes_per_second
        place = bisect.bisect_right(self.logs, log, key=lambda point: point[0])
        return math.exp(_cubic(self.logs[place - 1], self.logs[place], log))


def linear_curve(latency_seconds: float, bandwidth_bytes_per_second: float) -> Curve:
    """Hockney's model: a latency, and a bandwidth beyond it."""
    return Curve(latency_seconds=latency_seconds, bandwidth_bytes_per_second=bandwidth_bytes_per_second)


def measured_curve(
    points: Iterable[Point], *, latency_seconds: float | None = None, bandwidth: float | None = None
) -> Curve | None:
    """Through measured points, between them by log-log interpolation; None where there are fewer than two.

    The interpolation is cubic and monotone (Fritsch and Carlson, SIAM J. Numer. Anal. 17, 1980): straight lines between
    samples at four times the size are 5 % off where latency and bandwidth count the same. What disturbs a measurement makes it
    longer, so a message that took longer than a larger one is taken to take as long as that, and one whose overhead over the best
    rate stands out from those of its neighbours is taken to have theirs. Beyond the last point the rate is `bandwidth`, or the last point's own.
    """
    seconds: dict[int, float] = {}
    for point in points:
        if point.size_bytes > 0:
            seconds[point.size_bytes] = min(point.seconds, seconds.get(point.size_bytes, math.inf))
    if len(seconds) < 2:
        return None
    sizes = sorted(seconds)
    _straighten(sizes, seconds)
    logs: list[tuple[float, float]] = []
    for size in reversed(sizes):
        seconds[size] = min(seconds[size], seconds[sizes[-1]], *(math.exp(log) for _, log in logs[-1:]))
        logs.append((math.log(size), math.log(seconds[size])))
    logs.reverse()
    slopes = _slopes(logs)
    first = math.exp(logs[0][1])
    return Curve(
        latency_seconds=min(first, latency_seconds if latency_seconds is not None else first),
        bandwidth_bytes_per_second=bandwidth or sizes[-1] / seconds[sizes[-1]],
        logs=tuple((x, y, slope) for (x, y), slope in zip(logs, slopes, strict=True)),
    )


def _straighten(sizes: list[int], seconds: dict[int, float]) -> None:
    """Takes from a size what it took longer than the median of itself and its two neighbours, beyond the best rate."""
    best = min(seconds[size] / size for size in sizes)
    overheads = [seconds[size] - best * size for size in sizes]
    for place in range(1, len(sizes) - 1):
        usual = sorted(overheads[place - 1 : place + 2])[1]
        seconds[sizes[place]] = min(seconds[sizes[place]], best * sizes[place] + usual)


def _slopes(logs: list[tuple[float, float]]) -> list[float]:
    """The slope at each point with which a cubic never turns back."""
    steps = [(b[0] - a[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(logs)]
    slopes = [steps[0][1]]
    for (width, before), (next_width, after) in itertools.pairwise(steps):
        if before <= 0 or after <= 0:
            slopes.append(0.0)
            continue
        one, other = 2 * next_width + width, next_width + 2 * width
        slopes.append((one + other) / (one / before + other / after))
    return [*slopes, steps[-1][1]]


def _cubic(left: tuple[float, float, float], right: tuple[float, float, float], x: float) -> float:
    """Hermite's cubic between two points with their slopes."""
    width = right[0] - left[0]
    part = (x - left[0]) / width
    rise = part * part * (3 - 2 * part)
    return left[1] * (1 - rise) + right[1] * rise + width * part * (1 - part) * (left[2] * (1 - part) - right[2] * part)
