"""Timeline of one step: computing, communication beside it, and the exposed part of the communication."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from distrib.bandwidth_model.prediction import Phase, Span
from distrib.bandwidth_model.workload import Workload


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of averaging one bucket.

    `ready_seconds` since backward began. Packing delays computing when the bucket is ready, unpacking after backward.
    """

    ready_seconds: float
    network_seconds: float
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step: its duration, the time for which the network is busy, the exposed part of it; seconds."""

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    starved_seconds: float = 0.0
    """Wait for data beyond that of one rank alone."""
    spans: tuple[Span, ...] = ()


def slowest_of(count: int, variation: float) -> float:
    """Compute the factor by which the slowest of several ranks exceeds the median, for normal errors (Blom, 1958).

    Args:
        count: The ranks.
        variation: The coefficient of variation of their steps.
    """
    if count < 2 or variation <= 0:
        return 1.0
    return 1 + variation * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def synchronous_step(
    workload: Workload,
    transfers: Sequence[Transfer],
    *,
    batches: int = 1,
    slowness: float = 1.0,
    overlap_slowdown: float = 0.0,
    hook_seconds: float = 0.0,
    spans: bool = False,
) -> Step:
    """Simulate a data-parallel step: buckets in order on one stream, each when it is ready and the one before is done.

    Args:
        workload: One rank's step.
        transfers: The buckets in order.
        batches: Batches per optimizer step; gradients are averaged in the last one.
        slowness: The slowdown of the slowest rank.
        overlap_slowdown: Relative slowdown of computing while the network is busy.
        hook_seconds: The time from the last bucket to the optimizer.
        spans: True to record the timeline.
    """
    clock = _Clock(draws=spans)
    for number in range(batches):
        label = f" {number + 1}" if batches > 1 else ""
        clock.compute("loader", "loader" + label, workload.loader_seconds)
        clock.compute("forward", "forward" + label, workload.forward_seconds * slowness)
        if number < batches - 1:
            clock.compute("backward", "backward" + label, workload.backward_seconds * slowness)
    begun, progress, busy = clock.now, 0.0, 0.0
    free = clock.now
    ends = []

    def backward_until(seconds: float) -> None:
        """Advance backward, slower while the network is busy."""
        nonlocal progress
        left = max(0.0, seconds * slowness - progress)
        overlapped = min(left, max(0.0, free - clock.now) / (1 + overlap_slowdown))
        clock.now += left + overlapped * overlap_slowdown
        progress += left

    for number, transfer in enumerate(transfers):
        backward_until(min(transfer.ready_seconds, workload.backward_seconds))
        clock.now += transfer.pack_seconds
        start = max(clock.now, free)
        free = start + transfer.network_seconds
        busy += transfer.network_seconds
        ends.append(free)
        clock.draw("network", "communication", f"bucket {number + 1}", start, free)
    backward_until(workload.backward_seconds)
    clock.draw("compute", "backward", f"backward {batches}" if batches > 1 else "backward", begun, clock.now)
    waited = clock.now
    for transfer, end in zip(transfers, ends, strict=True):
        clock.now = max(clock.now, end) + transfer.unpack_seconds
    if transfers:
        clock.now += hook_seconds
    exposed = max(0.0, free - waited)
    clock.draw("compute", "wait", "wait for gradients", waited, clock.now)
    clock.compute("optimizer", "optimizer", workload.optimizer_seconds * slowness)
    return Step(seconds=clock.now, communication_seconds=busy, exposed_seconds=exposed, spans=tuple(clock.spans))


def delay_for_data(step: Step, seconds: float) -> Step:
    """Delay a step by a wait for data.

    Args:
        step: The step.
        seconds: The wait.
    """
    late = Span(stream="compute", phase="loader", label="loader", start_seconds=0.0, end_seconds=seconds)
    moved = (
        msgspec.structs.replace(
            span, start_seconds=span.start_seconds + seconds, end_seconds=span.end_seconds + seconds
        )
        for span in step.spans
    )
    return msgspec.structs.replace(
        step, seconds=step.seconds + seconds, starved_seconds=seconds, spans=(late, *moved) if step.spans else ()
    )


class _Clock:
    """The clock of the compute stream, and the recorded spans."""

    def __init__(self, *, draws: bool) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._draws = draws

    def compute(self, phase: Phase, label: str, seconds: float) -> None:
        self.draw("compute", phase, label, self.now, self.now + seconds)
        self.now += seconds

    def draw(self, stream: Literal["compute", "network"], phase: Phase, label: str, start: float, end: float) -> None:
        if self._draws and end > start:
            self.spans.append(Span(stream=stream, phase=phase, label=label, start_seconds=start, end_seconds=end))
