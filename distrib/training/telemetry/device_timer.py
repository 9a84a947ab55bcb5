"""The time of a device: marks in its stream of work, and the seconds between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch


def typical_seconds(seconds: Sequence[float], *, in_bursts: bool) -> float:
    """What one of these takes as a rule: the median, as a hiccup does not count.

    Several processes that load begin together, and their batches come `in_bursts`: one step in so many waits for all. Then it is the
    mean, with the longest cut to the second longest.
    """
    if not in_bursts or len(seconds) < 2:
        return statistics.median(seconds)
    *most, second, _ = sorted(seconds)
    return statistics.fmean([*most, second, second])


class DeviceTimer:
    """Takes marks on a device. On a GPU a mark is an event in its current stream, so that taking it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Now, in the order of the device's work; None while that is captured as a CUDA graph, whose events tell no time."""
        if not self._cuda:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until every mark has happened; before that nothing can be said of them."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def wait(self, mark: Any) -> None:
        """Wait until the device has come to a mark."""
        if self._cuda:
            mark.synchronize()

    def has_happened(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        return not self._cuda or bool(mark.query())

    def seconds(self, since: Any, until: Any) -> float:
        """Between two marks that have happened; negative where `until` was first."""
        seconds: float = since.elapsed_time(until) / 1000 if self._cuda else until - since
        return seconds
