"""Where the stream of gradients is cut: small enough to start early, large enough for the wire's latency."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

DDP_FIRST_BYTES, DDP_BYTES = 1 << 20, 25 << 20
"""What torch's DistributedDataParallel fills its first bucket with, and each other (torch/nn/parallel/distributed.py)."""

PLAIN_BUCKETS, PLAIN_BYTES = 10, 2 << 20
"""Into how many buckets of DDP's own gradients are divided, and how large these are at least: on busy processors more cost too much."""

FINEST = 192
"""Into how many atoms at most the gradients are divided before they are put together again."""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What averaging a piece of the gradients costs: an overhead, and seconds for every byte of the gradient."""

    overhead_seconds: float
    """What one more piece costs the wire while others are on their way."""
    seconds_per_byte: float
    inside_seconds_per_byte: float = 0.0
    """How long a piece is copied and summed before it is on the wire, and again after it."""

    @property
    def large_enough_bytes(self) -> int:
        """The size of a piece of which the overhead is 0.5 % of its time."""
        return int(self.overhead_seconds / 0.005 / self.seconds_per_byte)


def finish_seconds(
    ends: Sequence[int], sizes_bytes: Sequence[int], ready_seconds: Sequence[float], wire: Wire
) -> float:
    """When the last piece has been averaged, if the stream is cut at `ends` and pieces go one after the other.

    `sizes_bytes` are the gradients in the order in which they get ready, `ready_seconds` when they do; a piece begins
    once its last byte is ready.
    """
    finish, start, last, index, gradient_end = 0.0, 0, 0, -1, 0
    for end in ends:
        while gradient_end < end:
            index += 1
            gradient_end += sizes_bytes[index]
        ready = max(ready_seconds[: index + 1], default=0.0)
        finish = _finish(finish, ready, end - start, wire)
        last, start = end - start, end
    return finish + last * wire.inside_seconds_per_byte


def _finish(free: float, ready: float, length: int, wire: Wire) -> float:
    """When a piece that is ready then has crossed a wire that is free then."""
    begin = max(free, ready + length * wire.inside_seconds_per_byte)
    return begin + wire.overhead_seconds + length * wire.seconds_per_byte


def cut(
    sizes_bytes: Sequence[int],
    ready_seconds: Sequence[float],
    wire: Wire,
    *,
    largest_bytes: int | None = None,
    grain_bytes: int = 64,
) -> tuple[int, ...]:
    """Where each piece ends, in bytes from the first gradient's beginning, so that the last piece ends soonest.

    The exact optimum by dynamic programming over `FINEST` atoms (gradients that are larger are divided, at multiples of
    `grain_bytes`; smaller neighbours are put together), as MG-WFBP does by merging (Shi, Chu, Li 2019, arXiv:1811.11141).
    Of two cuts that end at the same time the one with fewer pieces is taken. Ready times that go back are read as if
    they did not. `largest_bytes` bounds a piece, so that a gradient which comes late holds up little.
    """
    atoms, ready = _atoms(sizes_bytes, ready_seconds, grain_bytes)
    if not atoms:
        return ()
    offsets = [0]
    for atom in atoms:
        offsets.append(offsets[-1] + atom)
    bound = max(largest_bytes or offsets[-1], max(atoms))
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # finish, pieces, where the last piece begins
    for end in range(1, len(offsets)):
        choice = (math.inf, 0, 0)
        for start in range(end - 1, -1, -1):
            length = offsets[end] - offsets[start]
            if length > bound:
                break
            finish = _finish(best[start][0], ready[end - 1], length, wire)
            if end == len(atoms):
                finish += length * wire.inside_seconds_per_byte
            if finish < choice[0] or (finish == choice[0] and best[start][1] + 1 < choice[1]):
                choice = (finish, best[start][1] + 1, start)
        best.append(choice)
    ends, at = [], len(offsets) - 1
    while at > 0:
        ends.append(offsets[at])
        at = best[at][2]
    return tuple(reversed(ends))


def plain_bytes(total_bytes: int) -> int:
    """How large DDP's buckets are made where it averages gradients itself, with one rank on each host."""
    return min(DDP_BYTES, max(PLAIN_BYTES, total_bytes // PLAIN_BUCKETS))


def in_buckets(sizes_bytes: Sequence[int], bucket_bytes: int | None = None) -> tuple[int, ...]:
    """Where torch's DDP ends its buckets, of its own sizes or of `bucket_bytes`: with the gradient with which one is full."""
    ends, begun, end, limit = [], 0, 0, bucket_bytes or DDP_FIRST_BYTES
    for size in sizes_bytes:
        end += size
        if end - begun >= limit:
            ends.append(end)
            begun, limit = end, bucket_bytes or DDP_BYTES
    return tuple(ends) if begun == end else (*ends, end)


def evenly(total_bytes: int, piece_bytes: int, grain_bytes: int = 64) -> tuple[int, ...]:
    """The ends of pieces of `piece_bytes` at most (and `grain_bytes` at least), as equal as they can be."""
    if total_bytes <= 0:
        return ()
    count = max(1, math.ceil(total_bytes / max(piece_bytes, grain_bytes)))
    ends = {min(total_bytes, round(total_bytes * i / count / grain_bytes) * grain_bytes) for i in range(1, count)}
    return (*sorted(ends - {0, total_bytes}), total_bytes)


def _atoms(sizes: Sequence[int], ready: Sequence[float], grain: int) -> tuple[list[int], list[float]]:
    """The gradients in parts of similar size, and when each is ready."""
    target = max(grain, math.ceil(sum(sizes) / FINEST))
    parts: list[int] = []
    times: list[float] = []
    gathered, latest, before = 0, 0.0, 0.0
    for size, seconds in zip(sizes, ready, strict=True):
        latest = max(latest, seconds)
        if gathered and gathered + size > target:
            parts.append(gathered)
            times.append(before)
            gathered = 0
        if size > 2 * target:
            ends = evenly(size, 2 * target, grain)
            parts += [end - start for start, end in zip((0, *ends), ends, strict=False)]
            times += [latest] * len(ends)
        else:
            gathered += size
        before = latest
    if gathered:
        parts.append(gathered)
        times.append(latest)
    return parts, times
