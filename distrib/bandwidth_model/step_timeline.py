"""One step as a timeline: what computes, what crosses the wire meanwhile, and what of that nothing hides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from distrib.bandwidth_model.prediction import Phase, Span
from distrib.bandwidth_model.workload import Workload


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What averaging one piece of the gradients costs.

    `ready_seconds` since backward began. Packing takes the computing side's time once it is ready, unpacking after backward.
    """

    ready_seconds: float
    network_seconds: float
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes, how long its wires are busy, how much of that stands alone; seconds."""

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    starved_seconds: float = 0.0
    """That it waits for data, beyond what it waits alone."""
    spans: tuple[Span, ...] = ()


def slowest_of(count: int, variation: float) -> float:
    """By what factor the slowest of `count` ranks exceeds the median, for normal errors (Blom, 1958)."""
    if count < 2 or variation <= 0:
        return 1.0
    return 1 + variation * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def synchronous(
    workload: Workload,
    transfers: Sequence[Transfer],
    *,
    batches: int = 1,
    slowness: float = 1.0,
    overlap_slowdown: float = 0.0,
    hook_seconds: float = 0.0,
    spans: bool = False,
) -> Step:
    """A step of data-parallel training: pieces in order on one stream, each when it is ready and the one before is through.

    `slowness` is what the slowest rank takes for what the workload says takes 1; `overlap_slowdown` how much longer
    computing takes while the wire is busy, `hook_seconds` what the last piece takes to the optimizer. All but the last of
    `batches` are computed without communication.
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
        """Slower as long as the wire is busy."""
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
        clock.draw("wire", "communication", f"piece {number + 1}", start, free)
    backward_until(workload.backward_seconds)
    clock.draw("compute", "backward", f"backward {batches}" if batches > 1 else "backward", begun, clock.now)
    waited = clock.now
    for transfer, end in zip(transfers, ends, strict=True):
        clock.now = max(clock.now, end) + transfer.unpack_seconds
    if transfers:
        clock.now += hook_seconds
    exposed = max(0.0, free - waited)
    clock.draw("compute", "wait", "wait for the wire", waited, clock.now)
    clock.compute("optimizer", "optimizer", workload.optimizer_seconds * slowness)
    return Step(seconds=clock.now, communication_seconds=busy, exposed_seconds=exposed, spans=tuple(clock.spans))


def starved(step: Step, seconds: float) -> Step:
    """The step where its data comes so much later."""
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
    """How far the computing side is, and what was drawn on the way."""

    def __init__(self, *, draws: bool) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self._draws = draws

    def compute(self, phase: Phase, label: str, seconds: float) -> None:
        self.draw("compute", phase, label, self.now, self.now + seconds)
        self.now += seconds

    def draw(self, stream: Literal["compute", "wire"], phase: Phase, label: str, start: float, end: float) -> None:
        if self._draws and end > start:
            self.spans.append(Span(stream=stream, phase=phase, label=label, start_seconds=start, end_seconds=end))
