"""Link curves: time of a message against its size, interpolated between measurements, or from latency and bandwidth.

Latency and bandwidth alone are wrong by up to 41 % at bucket sizes (fits to the sweeps of stas00/ml-engineering@744d01e network/).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable

import msgspec

from distrib.cluster.measurements import Point


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds against bytes, monotone.

    `logs`: logarithms of (bytes, seconds) of the measurements, with slopes; empty for a straight line.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    logs: tuple[tuple[float, float, float], ...] = ()
    factor: float = 1.0
    """Factor of the time beyond the latency against the measurement."""

    def seconds(self, size_bytes: float) -> float:
        """Compute the seconds of a message.

        Args:
            size_bytes: 0 or more.
        """
        return self.latency_seconds + self.factor * self._seconds_beyond_latency(size_bytes)

    def slower(self, factor: float) -> Curve:
        """Scale the bandwidth.

        Args:
            factor: The bandwidth is divided by it.
        """
        return msgspec.structs.replace(self, factor=self.factor * factor)

    @property
    def large_bytes_per_second(self) -> float:
        """The bandwidth of large messages."""
        return self.bandwidth_bytes_per_second / self.factor

    def _seconds_beyond_latency(self, size_bytes: float) -> float:
        if not self.logs:
            return size_bytes / self.bandwidth_bytes_per_second
        (first_log, first, _), (last_log, last, _) = self.logs[0], self.logs[-1]
        log = math.log(size_bytes) if size_bytes > 0 else -math.inf
        if log <= first_log:
            return (math.exp(first) - self.latency_seconds) * size_bytes / math.exp(first_log)
        if log >= last_log:
            beyond = (size_bytes - math.exp(last_log)) / self.bandwidth_bytes_per_second
            return math.exp(last) - self.latency_seconds + beyond
        place = bisect.bisect_right(self.logs, log, key=lambda point: point[0])
        return math.exp(_cubic(self.logs[place - 1], self.logs[place], log)) - self.latency_seconds


def linear_curve(latency_seconds: float, bandwidth_bytes_per_second: float) -> Curve:
    """Build a curve of Hockney's model: latency and bandwidth.

    Args:
        latency_seconds: The time of an empty message.
        bandwidth_bytes_per_second: The bandwidth beyond it.
    """
    return Curve(latency_seconds=latency_seconds, bandwidth_bytes_per_second=bandwidth_bytes_per_second)


def measured_curve(
    points: Iterable[Point], *, latency_seconds: float | None = None, bandwidth: float | None = None
) -> Curve | None:
    """Build a curve through measurements, by monotone cubic interpolation of the logarithms (Fritsch and Carlson, 1980).

    Disturbances make a measurement longer: a message slower than a larger one, or with more overhead than its neighbours, is corrected.
    Straight lines would be 5 % off where latency and bandwidth weigh the same.

    Args:
        points: The measurements.
        latency_seconds: The time of an empty message. None: that of the smallest one.
        bandwidth: Bytes per second beyond the largest message. None: its own.

    Returns:
        The curve; None for fewer than two sizes.
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
    fastest = math.inf
    for size in reversed(sizes):
        fastest = min(fastest, seconds[size])
        logs.append((math.log(size), math.log(fastest)))
    logs.reverse()
    slopes = _slopes(logs)
    first = math.exp(logs[0][1])
    return Curve(
        latency_seconds=min(first, latency_seconds if latency_seconds is not None else first),
        bandwidth_bytes_per_second=bandwidth or sizes[-1] / seconds[sizes[-1]],
        logs=tuple((x, y, slope) for (x, y), slope in zip(logs, slopes, strict=True)),
    )


def _straighten(sizes: list[int], seconds: dict[int, float]) -> None:
    """Reduce each overhead beyond the best rate to the median of itself and its neighbours."""
    best = min(seconds[size] / size for size in sizes)
    overheads = [seconds[size] - best * size for size in sizes]
    for place in range(1, len(sizes) - 1):
        usual = sorted(overheads[place - 1 : place + 2])[1]
        seconds[sizes[place]] = min(seconds[sizes[place]], best * sizes[place] + usual)


def _slopes(logs: list[tuple[float, float]]) -> list[float]:
    """Compute slopes with which the cubic stays monotone."""
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
    """Evaluate Hermite's cubic between two points."""
    width = right[0] - left[0]
    part = (x - left[0]) / width
    rise = part * part * (3 - 2 * part)
    return left[1] * (1 - rise) + right[1] * rise + width * part * (1 - part) * (left[2] * (1 - part) - right[2] * part)
