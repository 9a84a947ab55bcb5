"""How much is measured, and how long: `--quick`, the default, `--full`. Pure.

Every link is measured for a time, not for a number of bytes: a slow link must not make the probe last.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["quick", "default", "full"]
Transport = Literal["mpi", "tcp"]

GPUDIRECT_LEVEL = "NCCL_NET_GDR_LEVEL"
"""How far apart GPU and network card may be for NCCL to use GPUDirect RDMA."""

NEVER = "LOC", "0"
"""Values of it with which it does not."""

KIB, MIB = 1024, 1024 * 1024


def doubling(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    """Sizes from `first` to `last`, each `factor` times the one before."""
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


ONE_STREAM_BYTES_PER_SECOND = 1.25e9
"""One TCP connection fills links of this rate; a faster one tells nothing of itself by a single one."""

FAST_STREAMS = 4


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe does. Sizes in bytes, times in seconds.

    `inside_seconds` is how long each way between GPUs and memory of a host is used. `stream_seconds` is how long a link is filled while others are too. All directions alone share
    `alone_budget_seconds` for each way; each gets at least `alone_seconds[0]` and at most `alone_seconds[1]`, and where
    the least is too much, as many rounds as fit are measured alone. `variation` is the coefficient of variation of the
    median at which repeating ends early. `streams` are the TCP connections of a link; of one that is faster than
    `ONE_STREAM_BYTES_PER_SECOND`, or may be, there are `FAST_STREAMS` at least.
    """

    mode: Mode
    inside_seconds: float
    stream_seconds: float
    alone_seconds: tuple[float, float]
    alone_budget_seconds: float
    streams: int
    pings: int
    variation: float
    sizes: tuple[int, ...]
    together_sizes: tuple[int, ...]
    collective_sizes: tuple[int, ...]
    collective_seconds: float
    both_ways: bool
    second_way: bool
    suspects: int
    """How many directions may be measured again because they looked bad."""


QUICK = Settings(
    mode="quick", inside_seconds=0.05, stream_seconds=0.12, alone_seconds=(0.12, 0.12), alone_budget_seconds=0.8, streams=1, pings=15,
    variation=0.03, sizes=(), together_sizes=(), collective_sizes=(), collective_seconds=0.0, both_ways=False,
    second_way=False, suspects=12,
)  # fmt: skip
DEFAULT = Settings(
    mode="default", inside_seconds=0.1, stream_seconds=0.2, alone_seconds=(0.15, 0.6), alone_budget_seconds=10.0, streams=4, pings=30,
    variation=0.01, sizes=doubling(8, 8 * MIB, 4), together_sizes=(), collective_sizes=doubling(KIB, 64 * MIB, 4),
    collective_seconds=6.0, both_ways=True, second_way=True, suspects=24,
)  # fmt: skip
FULL = Settings(
    mode="full", inside_seconds=0.2, stream_seconds=0.25, alone_seconds=(0.1, 1.0), alone_budget_seconds=5.6, streams=4, pings=30,
    variation=0.01, sizes=doubling(8, 4 * MIB), together_sizes=doubling(8 * MIB, 64 * MIB),
    collective_sizes=doubling(KIB, 256 * MIB), collective_seconds=13.5, both_ways=True, second_way=True, suspects=32,
)  # fmt: skip
MODES: dict[Mode, Settings] = {"quick": QUICK, "default": DEFAULT, "full": FULL}
