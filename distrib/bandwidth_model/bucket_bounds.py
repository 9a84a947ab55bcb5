"""How the gradients of a step are cut: by torch's DDP on GPUs, by distrib itself on CPU hosts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model import bucketing
from distrib.bandwidth_model.workload import Gradient
from distrib.strategy import Strategy

FINE_BYTES, FINE_PARTS = 256 << 10, 64
"""DDP is made to cut what distrib cuts anew into about so many buckets, of so much at least: many, so that the first is ready early."""
FIRST_PIECE_BYTES = 1 << 20
"""How large pieces are until it is known when gradients get ready, and may be always."""
BUSY_FACTOR = 10
"""How much more than on idle processors a piece may cost on busy ones."""
WORTHWHILE = 0.02
"""How much sooner the last piece must be through, or it is left to DDP's buckets, where the wire waits for the ranks."""
LONGEST_SECONDS = 0.06
"""How long a piece may cross the wire in one of the cuts that are tried: two of a lane are under way, and each waits for the other
direction. With DDP's buckets 4 to 6 % of a wire of 200 Mb/s stayed unused (benchmarks/synchronous.py, 2 hosts of 4 ranks)."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients that travel together, and when the last of them is ready: seconds since backward began."""

    size_bytes: float
    elements: float
    tensors: int
    ready_seconds: float


def of_ddp(gradients: Sequence[Gradient], bucket_bytes: int | None = None) -> tuple[Piece, ...]:
    """DDP's buckets: gradients in the order in which they get ready, a bucket full once it has reached its size."""
    ends = set(bucketing.in_buckets([gradient.size_bytes for gradient in gradients], bucket_bytes))
    found: list[Piece] = []
    members: list[Gradient] = []
    filled = 0
    for gradient in gradients:
        members.append(gradient)
        filled += gradient.size_bytes
        if filled in ends:
            found.append(
                Piece(
                    size_bytes=sum(member.size_bytes for member in members),
                    elements=sum(member.elements for member in members),
                    tensors=len(members),
                    ready_seconds=max(member.ready_seconds for member in members),
                )
            )
            members = []
    return tuple(found)


def left_to_ddp(total_bytes: float, strategy: Strategy, *, alone: bool) -> bool:
    """Whether distrib has nothing to do with these gradients on CPU hosts. `alone`: each rank is on a host of its own."""
    if not strategy.gradients.exact or strategy.all_reduce != "auto" or strategy.bucket_bytes:
        return False
    return alone or total_bytes <= FINE_BYTES


def worth_trying(
    sizes_bytes: Sequence[int], ready_seconds: Sequence[float], wire: bucketing.Wire
) -> list[tuple[int, ...]]:
    """Where pieces may end, for the clock to decide: as the wire alone would have it, with few pieces, with none that is long on its
    way, and as DDP does. Only the last of these where the wire is idle for half of the step, and the first promises no more than `WORTHWHILE`.
    """  # fmt: skip
    large_enough = max(FIRST_PIECE_BYTES, wire.large_enough_bytes)
    best = bucketing.cut(sizes_bytes, ready_seconds, wire, largest_bytes=large_enough)
    plain = bucketing.in_buckets(sizes_bytes)
    through = bucketing.finish_seconds(plain, sizes_bytes, ready_seconds, wire)
    idle = sum(sizes_bytes) * wire.seconds_per_byte < through / 2
    if idle and bucketing.finish_seconds(best, sizes_bytes, ready_seconds, wire) > (1 - WORTHWHILE) * through:
        return [plain]
    busy = msgspec.structs.replace(wire, overhead_seconds=BUSY_FACTOR * wire.overhead_seconds)
    # None so large that its copies out of the shared memory, which the last pieces wait for, come all at the end.
    largest = max(bucketing.plain_bytes(sum(sizes_bytes)), large_enough)
    coarse = bucketing.cut(sizes_bytes, ready_seconds, busy, largest_bytes=largest)
    longest = max(FIRST_PIECE_BYTES, int(LONGEST_SECONDS / wire.seconds_per_byte))
    short = bucketing.cut(sizes_bytes, ready_seconds, busy, largest_bytes=min(largest, longest))
    return [best, coarse, short, plain]


def of_distrib(
    gradients: Sequence[Gradient], strategy: Strategy, wire: bucketing.Wire | None, *, ranks_per_host: int
) -> tuple[Piece, ...]:
    """The pieces of distrib.training.gradients: DDP's buckets, made small, cut anew so that the last one ends soonest.

    `wire` None: inside one host, where pieces are even.
    """
    total = sum(gradient.size_bytes for gradient in gradients)
    if strategy.gradients.format == "powersgd":
        return of_ddp(gradients, strategy.bucket_bytes)
    if left_to_ddp(total, strategy, alone=ranks_per_host == 1):
        return of_ddp(gradients, bucketing.plain_bytes(total))
    fine = max(FINE_BYTES, total // FINE_PARTS)
    parts = of_ddp(gradients, strategy.bucket_bytes or fine)
    if strategy.bucket_bytes or wire is None:
        even = strategy.bucket_bytes or FIRST_PIECE_BYTES
        return tuple(piece for part in parts for piece in _split(part, bucketing.evenly(int(part.size_bytes), even)))
    ends = bucketing.cut(
        [int(part.size_bytes) for part in parts],
        [part.ready_seconds for part in parts],
        wire,
        largest_bytes=max(FIRST_PIECE_BYTES, wire.large_enough_bytes),
    )
    return tuple(_joined(parts, ends))


def _split(part: Piece, ends: Sequence[int]) -> list[Piece]:
    return [
        msgspec.structs.replace(part, size_bytes=end - start, elements=part.elements * (end - start) / part.size_bytes)
        for start, end in itertools.pairwise((0, *ends))
    ]


def _joined(parts: Sequence[Piece], ends: Sequence[int]) -> list[Piece]:
    """The pieces of a stream that is cut at `ends`; each is ready with its last byte."""
    density = sum(part.elements for part in parts) / sum(part.size_bytes for part in parts)
    found, place, begun = [], 0, 0
    reached = parts[0].size_bytes
    for end in ends:
        tensors = parts[place].tensors
        while reached < end:
            place += 1
            reached += parts[place].size_bytes
            tensors += parts[place].tensors
        size = end - begun
        found.append(
            Piece(size_bytes=size, elements=size * density, tensors=tensors, ready_seconds=parts[place].ready_seconds)
        )
        begun = end
    return found
