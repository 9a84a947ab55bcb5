"""The time of a device: marks in its stream of work, and the seconds between them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Takes marks on a device. On a GPU a mark is an event in its current stream, so that taking it waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Now, in the order of the device's work."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until every mark has happened; before that nothing can be said of them."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def has_happened(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        return not self._cuda or bool(mark.query())

    def seconds(self, since: Any, until: Any) -> float:
        """Between two marks that have happened; negative where `until` was first."""
        seconds: float = since.elapsed_time(until) / 1000 if self._cuda else until - since
        return seconds
