"""One step as a timeline: what computes, what crosses the wire meanwhile, and what of that nothing hides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from distrib.bandwidth.prediction import Span
from distrib.bandwidth.workload import Gradient, Workload

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""What torch's DistributedDataParallel fills a bucket with, and the first one (torch/nn/parallel/distributed.py)."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients that travel together: bytes of their own, and when the last of them is ready, since backward began."""

    size_bytes: int
    elements: int
    ready_seconds: float
    tensors: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """How long a step takes, how long its wires are busy, how much of that stands alone; seconds."""

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    spans: tuple[Span, ...] = ()


def buckets(gradients: Sequence[Gradient], bucket_bytes: int | None) -> tuple[Bucket, ...]:
    """Buckets as torch's DDP forms them: gradients in the order in which they get ready, a bucket full when it reaches its size.

    `bucket_bytes` None: 25 MiB, and 1 MiB for the first bucket.
    """
    found = []
    limit = FIRST_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    size = elements = tensors = 0
    ready = 0.0
    for position, gradient in enumerate(gradients):
        size += gradient.size_bytes
        elements += gradient.elements
        tensors += 1
        ready = max(ready, gradient.ready_seconds)
        if size >= limit or position == len(gradients) - 1:
            found.append(Bucket(size_bytes=size, elements=elements, ready_seconds=ready, tensors=tensors))
            size = elements = tensors = 0
            limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    return tuple(found)


def slowest_of(count: int, variation: float) -> float:
    """By what factor the slowest of `count` ranks exceeds the median, for normal errors (Blom, 1958)."""
    if count < 2 or variation <= 0:
        return 1.0
    return 1 + variation * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def synchronous(
    workload: Workload,
    parts: Sequence[Bucket],
    cost: Callable[[Bucket], float],
    *,
    batches: int = 1,
    slowness: float = 1.0,
    overlap_slowdown: float = 0.0,
    spans: bool = False,
) -> Step:
    """A step of data-parallel training: buckets in order on one stream, each when it is ready and the one before is through.

    `slowness` is what the slowest rank takes for what the workload says takes 1; `overlap_slowdown` how much longer
    computing takes while the wire is busy. All but the last of `batches` are computed without communication.
    """
    drawn: list[Span] = []

    def draw(stream: str, phase: str, label: str, start: float, end: float) -> None:
        if spans and end > start:
            drawn.append(
                Span(stream=stream, phase=phase, label=label, start_seconds=start, end_seconds=end)  # type: ignore[arg-type]
            )

    now = 0.0
    for number in range(batches):
        label = f" {number + 1}" if batches > 1 else ""
        draw("compute", "loader", "loader" + label, now, now + workload.loader_seconds)
        now += workload.loader_seconds
        forward = workload.forward_seconds * slowness
        draw("compute", "forward", "forward" + label, now, now + forward)
        now += forward
        if number < batches - 1:
            backward = workload.backward_seconds * slowness
            draw("compute", "backward", "backward" + label, now, now + backward)
            now += backward
    begun, done, free, busy = now, 0.0, now, 0.0

    def compute_until(progress: float) -> None:
        """Backward up to `progress`, slower as long as the wire is busy."""
        nonlocal now, done
        left = max(0.0, progress * slowness - done)
        overlapped = min(left, max(0.0, free - now) / (1 + overlap_slowdown))
        now += overlapped * (1 + overlap_slowdown) + left - overlapped
        done += left

    for number, part in enumerate(parts):
        compute_until(min(part.ready_seconds, workload.backward_seconds))
        start = max(now, free)
        free = start + cost(part)
        busy += free - start
        draw("wire", "communication", f"bucket {number + 1}", start, free)
    compute_until(workload.backward_seconds)
    draw("compute", "backward", "backward" + (f" {batches}" if batches > 1 else ""), begun, now)
    exposed = max(0.0, free - now)
    draw("compute", "wait", "wait for the wire", now, free)
    now = max(now, free)
    optimizer = workload.optimizer_seconds * slowness
    draw("compute", "optimizer", "optimizer", now, now + optimizer)
    return Step(seconds=now + optimizer, communication_seconds=busy, exposed_seconds=exposed, spans=tuple(drawn))
