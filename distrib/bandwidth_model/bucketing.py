"""Gradient bucketing: DDP's buckets, and bucket boundaries that finish the all-reduce of a step earliest.

Small buckets start early, large ones pay the latency of the network less often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model.workload import Gradient
from distrib.strategy import FORMATS, Strategy


class BucketSettings(msgspec.Struct, frozen=True):
    """Limits of gradient buckets; measured by benchmarks/synchronous.py where no source is named."""

    ddp_first_bytes: int = 1 << 20
    """DistributedDataParallel's first bucket (torch/nn/parallel/distributed.py)."""
    ddp_bytes: int = 25 << 20
    """Its other buckets."""
    max_ddp_count: int = 10
    """Buckets where DDP averages on CPUs: more cost too much on busy CPUs."""
    min_ddp_bytes: int = 2 << 20
    """The smallest bucket there."""
    default_bytes: int = 1 << 20
    """Buckets of the communication hook until the ready times are known, and always inside one host."""
    min_hook_bytes: int = 256 << 10
    """DDP's smallest bucket where the communication hook sets its own boundaries, so that the first is ready early. Models of this
    size or less have one bucket and no hook."""
    max_hook_count: int = 64
    """DDP's buckets there."""
    max_atoms: int = 192
    """Atoms of the dynamic program. Its time grows with the square: 10 ms here."""
    overhead_fraction: float = 0.005
    """The overhead of a bucket that is large enough, as a fraction of its time on the network."""
    busy_factor: int = 10
    """The overhead of a bucket on busy CPUs against idle ones, at most."""
    min_gain_fraction: float = 0.02
    """The least gain against DDP's buckets that is worth a trial where the network is idle for half of the step."""
    max_bucket_seconds: float = 0.06
    """Longest time of a bucket in the candidate for slow links. Two are in flight, and each waits for the other direction.

    With DDP's buckets 4 to 6 % of 200 Mb/s stayed unused on 2 hosts of 4 ranks.
    """


BUCKETS = BucketSettings()


class AllReduceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Linear cost of averaging one bucket: seconds per bucket and seconds per byte."""

    overhead_seconds: float
    """Cost of one more bucket while others are in flight."""
    seconds_per_byte: float
    inside_seconds_per_byte: float = 0.0
    """Copies and sums inside the host, before and again after the network."""

    @property
    def large_enough_bytes(self) -> int:
        """The bucket size whose overhead is `BUCKETS.overhead_fraction` of its time."""
        return int(self.overhead_seconds / BUCKETS.overhead_fraction / self.seconds_per_byte)


class GradientBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients that are averaged together; ready with the last of them, in seconds since backward began."""

    size_bytes: float
    elements: float
    tensors: int
    ready_seconds: float


def finish_seconds(
    ends: Sequence[int], sizes_bytes: Sequence[int], ready_seconds: Sequence[float], cost: AllReduceCost
) -> float:
    """Compute when the last bucket has been averaged, with buckets one after the other.

    Args:
        ends: Bucket boundaries, bytes from the first gradient.
        sizes_bytes: Gradients in the order in which they get ready.
        ready_seconds: Their ready times.
        cost: The cost of a bucket.

    Returns:
        Seconds on the clock of `ready_seconds`.
    """
    finish, start, last, index, gradient_end = 0.0, 0, 0, -1, 0
    for end in ends:
        while gradient_end < end:
            index += 1
            gradient_end += sizes_bytes[index]
        ready = max(ready_seconds[: index + 1])
        finish = _finish(finish, ready, end - start, cost)
        last, start = end - start, end
    return finish + last * cost.inside_seconds_per_byte


def _finish(free: float, ready: float, length: int, cost: AllReduceCost) -> float:
    """Compute when a bucket has crossed a network that is free at `free`."""
    begin = max(free, ready + length * cost.inside_seconds_per_byte)
    return begin + cost.overhead_seconds + length * cost.seconds_per_byte


def optimal_bounds(
    sizes_bytes: Sequence[int],
    ready_seconds: Sequence[float],
    cost: AllReduceCost,
    *,
    max_bytes: int | None = None,
    grain_bytes: int = 64,
) -> tuple[int, ...]:
    """Choose the bucket boundaries whose last bucket ends earliest.

    The exact optimum by dynamic programming over `BUCKETS.max_atoms` atoms, as MG-WFBP merges (Shi, Chu, Li 2019, arXiv:1811.11141).
    Larger gradients are split, smaller neighbours joined. Ties go to the larger last bucket.

    Args:
        sizes_bytes: Gradients in the order in which they get ready.
        ready_seconds: Their ready times. A time below the one before counts as equal.
        cost: The cost of a bucket.
        max_bytes: The largest bucket, so that a late gradient delays little. None: any size.
        grain_bytes: Boundaries inside a gradient are multiples of this.

    Returns:
        The end of each bucket, bytes from the first gradient.
    """
    atoms, ready = _atoms(sizes_bytes, ready_seconds, grain_bytes)
    if not atoms:
        return ()
    offsets = [0]
    for atom in atoms:
        offsets.append(offsets[-1] + atom)
    bound = max(max_bytes or offsets[-1], max(atoms))
    best = [(0.0, 0)]  # finish time, start of the last bucket
    for end in range(1, len(offsets)):
        inside = cost.inside_seconds_per_byte if end == len(atoms) else 0.0
        choices = []
        for start in range(end - 1, -1, -1):
            length = offsets[end] - offsets[start]
            if length > bound:
                break
            finish = _finish(best[start][0], ready[end - 1], length, cost) + length * inside
            choices.append((finish, start))
        best.append(min(choices))
    ends, at = [], len(offsets) - 1
    while at > 0:
        ends.append(offsets[at])
        at = best[at][1]
    return tuple(reversed(ends))


def ddp_bucket_bytes(total_bytes: int) -> int:
    """Compute the bytes of DDP's buckets where it averages gradients on CPUs.

    Args:
        total_bytes: All gradients.
    """
    return min(BUCKETS.ddp_bytes, max(BUCKETS.min_ddp_bytes, total_bytes // BUCKETS.max_ddp_count))


def hook_bucket_bytes(total_bytes: int) -> int:
    """Compute the bytes of DDP's buckets where the communication hook sets its own boundaries.

    Args:
        total_bytes: All gradients.
    """
    return max(BUCKETS.min_hook_bytes, total_bytes // BUCKETS.max_hook_count)


def ddp_bounds(sizes_bytes: Sequence[int], bucket_bytes: int | None = None) -> tuple[int, ...]:
    """Compute the boundaries of torch DDP's buckets: each ends with the gradient that fills it.

    Args:
        sizes_bytes: Gradients in the order in which they get ready.
        bucket_bytes: The size of a bucket. None: DDP's defaults.

    Returns:
        The end of each bucket, bytes from the first gradient.
    """
    ends, begun, end, limit = [], 0, 0, bucket_bytes or BUCKETS.ddp_first_bytes
    for size in sizes_bytes:
        end += size
        if end - begun >= limit:
            ends.append(end)
            begun, limit = end, bucket_bytes or BUCKETS.ddp_bytes
    return tuple(ends) if begun == end else (*ends, end)


def even_bounds(total_bytes: int, bucket_bytes: int, grain_bytes: int = 64) -> tuple[int, ...]:
    """Divide bytes into buckets of nearly equal size.

    Args:
        total_bytes: Bytes to divide.
        bucket_bytes: The largest bucket.
        grain_bytes: Boundaries are multiples of this; the smallest bucket.

    Returns:
        The end of each bucket.
    """
    if total_bytes <= 0:
        return ()
    count = max(1, math.ceil(total_bytes / max(bucket_bytes, grain_bytes)))
    ends = {min(total_bytes, round(total_bytes * i / count / grain_bytes) * grain_bytes) for i in range(1, count)}
    return (*sorted(ends - {0, total_bytes}), total_bytes)


def _atoms(sizes: Sequence[int], ready: Sequence[float], grain: int) -> tuple[list[int], list[float]]:
    """Divide the gradients into atoms of similar size, with their ready times."""
    target = max(grain, math.ceil(sum(sizes) / BUCKETS.max_atoms))
    parts: list[int] = []
    times: list[float] = []
    gathered, latest = 0, 0.0
    for size, seconds in zip(sizes, ready, strict=True):
        if gathered and gathered + size > target:
            parts.append(gathered)
            times.append(latest)
            gathered = 0
        latest = max(latest, seconds)
        if size > 2 * target:
            ends = even_bounds(size, 2 * target, grain)
            parts += [end - start for start, end in zip((0, *ends), ends, strict=False)]
            times += [latest] * len(ends)
        else:
            gathered += size
    if gathered:
        parts.append(gathered)
        times.append(latest)
    return parts, times


def ddp_buckets(gradients: Sequence[Gradient], bucket_bytes: int | None = None) -> tuple[GradientBucket, ...]:
    """Collect gradients into the buckets of torch DDP.

    Args:
        gradients: In the order in which they get ready.
        bucket_bytes: The size of a bucket. None: DDP's defaults.
    """
    ends = set(ddp_bounds([gradient.size_bytes for gradient in gradients], bucket_bytes))
    found: list[GradientBucket] = []
    members: list[Gradient] = []
    filled = 0
    for gradient in gradients:
        members.append(gradient)
        filled += gradient.size_bytes
        if filled in ends:
            found.append(
                GradientBucket(
                    size_bytes=sum(member.size_bytes for member in members),
                    elements=sum(member.elements for member in members),
                    tensors=len(members),
                    ready_seconds=max(member.ready_seconds for member in members),
                )
            )
            members = []
    return tuple(found)


def is_averaged_by_ddp(total_bytes: float, strategy: Strategy, *, one_rank_per_host: bool) -> bool:
    """Test if DDP averages these gradients on CPU hosts, without distrib's communication hook.

    Args:
        total_bytes: All gradients.
        strategy: The strategy of the job.
        one_rank_per_host: True if each rank has a host of its own.
    """
    if not strategy.gradients.exact or strategy.all_reduce != "auto" or strategy.bucket_bytes:
        return False
    return one_rank_per_host or total_bytes <= BUCKETS.min_hook_bytes


def candidate_bounds(
    sizes_bytes: Sequence[int], ready_seconds: Sequence[float], cost: AllReduceCost
) -> list[tuple[int, ...]]:
    """List the bucket boundaries that are worth a trial in real steps.

    Args:
        sizes_bytes: Gradients in the order in which they get ready.
        ready_seconds: Their ready times.
        cost: The measured cost of a bucket on idle CPUs.

    Returns:
        Boundaries: optimal by the model, with few buckets, with short buckets, and DDP's. Only DDP's where the network is idle
        for half of the step and the optimum gains less than `BUCKETS.min_gain_fraction`.
    """
    large_enough = max(BUCKETS.default_bytes, cost.large_enough_bytes)
    best = optimal_bounds(sizes_bytes, ready_seconds, cost, max_bytes=large_enough)
    plain = ddp_bounds(sizes_bytes)
    through = finish_seconds(plain, sizes_bytes, ready_seconds, cost)
    idle = sum(sizes_bytes) * cost.seconds_per_byte < through / 2
    if idle and finish_seconds(best, sizes_bytes, ready_seconds, cost) > (1 - BUCKETS.min_gain_fraction) * through:
        return [plain]
    busy = msgspec.structs.replace(cost, overhead_seconds=BUCKETS.busy_factor * cost.overhead_seconds)
    # Bounded, so that the copies out of shared memory do not all come at the end.
    largest = max(ddp_bucket_bytes(sum(sizes_bytes)), large_enough)
    coarse = optimal_bounds(sizes_bytes, ready_seconds, busy, max_bytes=largest)
    longest = max(BUCKETS.default_bytes, int(BUCKETS.max_bucket_seconds / cost.seconds_per_byte))
    short = optimal_bounds(sizes_bytes, ready_seconds, busy, max_bytes=min(largest, longest))
    return [best, coarse, short, plain]


def hook_buckets(
    gradients: Sequence[Gradient], strategy: Strategy, cost: AllReduceCost | None, *, ranks_per_host: int
) -> tuple[GradientBucket, ...]:
    """Predict the buckets of distrib's communication hook.

    Args:
        gradients: In the order in which they get ready.
        strategy: The strategy of the job.
        cost: The cost of a bucket. None: inside one host, where buckets are even.
        ranks_per_host: The most ranks of a host.
    """
    total = sum(gradient.size_bytes for gradient in gradients)
    if FORMATS[strategy.gradients.format].whole_buckets:
        return ddp_buckets(gradients, strategy.bucket_bytes)
    if is_averaged_by_ddp(total, strategy, one_rank_per_host=ranks_per_host == 1):
        return ddp_buckets(gradients, ddp_bucket_bytes(total))
    parts = ddp_buckets(gradients, strategy.bucket_bytes or hook_bucket_bytes(total))
    if strategy.bucket_bytes or cost is None:
        even = strategy.bucket_bytes or BUCKETS.default_bytes
        return tuple(bucket for part in parts for bucket in _split(part, even_bounds(int(part.size_bytes), even)))
    ends = optimal_bounds(
        [int(part.size_bytes) for part in parts],
        [part.ready_seconds for part in parts],
        cost,
        max_bytes=max(BUCKETS.default_bytes, cost.large_enough_bytes),
    )
    return tuple(_join(parts, ends))


def _split(part: GradientBucket, ends: Sequence[int]) -> list[GradientBucket]:
    return [
        msgspec.structs.replace(part, size_bytes=end - start, elements=part.elements * (end - start) / part.size_bytes)
        for start, end in itertools.pairwise((0, *ends))
    ]


def _join(parts: Sequence[GradientBucket], ends: Sequence[int]) -> list[GradientBucket]:
    """Join buckets at new boundaries; each is ready with its last byte."""
    density = sum(part.elements for part in parts) / sum(part.size_bytes for part in parts)
    edges = list(itertools.accumulate((part.size_bytes for part in parts), initial=0.0))
    found = []
    for begin, end in itertools.pairwise((0, *ends)):
        members = [part for at, part in enumerate(parts) if edges[at] < end and begin < edges[at + 1]]
        found.append(
            GradientBucket(
                size_bytes=end - begin,
                elements=(end - begin) * density,
                tensors=sum(part.tensors for part in members),
                ready_seconds=members[-1].ready_seconds,
            )
        )
    return found
