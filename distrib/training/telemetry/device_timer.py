"""Timing on a CPU or GPU: marks in its stream of work, and the seconds between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch


def typical_seconds(seconds: Sequence[float], *, in_bursts: bool) -> float:
    """Compute a typical duration: the median, or with bursts the mean, with the longest cut to the second longest.

    Args:
        seconds: Durations.
        in_bursts: True if loader processes make one step in several wait for all of them.

    Returns:
        Seconds.
    """
    if not in_bursts or len(seconds) < 2:
        return statistics.median(seconds)
    *most, second, _ = sorted(seconds)
    return statistics.fmean([*most, second, second])


class DeviceTimer:
    """Timer of a device. On a GPU a mark is an event in the current stream, so that taking a mark does not block."""

    def __init__(self, device: torch.device) -> None:
        """Create the timer.

        Args:
            device: The device whose work is timed.
        """
        self._device = device
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark in the order of the device's work; None during the capture of a CUDA graph, which has no times."""
        if not self._cuda:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until the device has reached every mark."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached a mark.

        Args:
            mark: A result of `mark`.
        """
        if self._cuda:
            mark.synchronize()

    def has_happened(self, mark: Any) -> bool:
        """Test if the device has reached a mark.

        Args:
            mark: A result of `mark`.

        Returns:
            True if it has.
        """
        return not self._cuda or bool(mark.query())

    def seconds(self, since: Any, until: Any) -> float:
        """Compute the time between two marks that the device has reached.

        Args:
            since: The first mark.
            until: The second mark.

        Returns:
            Seconds, negative if `until` was first.
        """
        seconds: float = since.elapsed_time(until) / 1000 if self._cuda else until - since
        return seconds
