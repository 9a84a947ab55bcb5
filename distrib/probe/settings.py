"""Probe settings: durations and message sizes of each mode, and the limits of the diagnosis.

Every link is measured for a duration, not for a number of bytes, so that slow links do not prolong the probe.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["quick", "default", "full"]
Transport = Literal["mpi", "tcp"]

GPUDIRECT_VARIABLE = "NCCL_NET_GDR_LEVEL"
"""NCCL's maximum distance between GPU and NIC for GPUDirect RDMA."""

GPUDIRECT_OFF_VALUES = "LOC", "0"
"""Values of `GPUDIRECT_VARIABLE` that turn GPUDirect RDMA off."""

TCP_STREAMS = 4
"""TCP connections per link. One fills links up to 10 Gb/s only, and cloud providers limit the rate of each."""


def _geometric_sizes(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    """List sizes from `first` to at most `last`."""
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations (seconds) and sizes (bytes) of one probe mode."""

    mode: Mode
    gpu_copy_seconds: float
    """Duration of the copies between one pair of GPUs, or one GPU and host memory."""
    concurrent_seconds: float
    """Duration of a stream while other pairs send too."""
    alone_seconds: tuple[float, float]
    """Minimum and maximum duration of one direction measured alone."""
    alone_budget_seconds: float
    """Maximum duration of the measurement of directions alone, per transport. It limits the number of rounds."""
    pings: int
    variation: float
    """Coefficient of variation of the median at which a stream ends early."""
    sizes: tuple[int, ...]
    concurrent_sizes: tuple[int, ...]
    large_seconds: tuple[float, float] = (1.0, 3.0)
    """Minimum and maximum duration of a round of `concurrent_sizes`."""
    large_budget_seconds: float = 8.0
    """Duration of all these rounds."""
    collective_sizes: tuple[int, ...]
    collective_seconds: float
    both_ways: bool
    second_transport: bool
    max_remeasured: int
    """Directions that may be measured again because they looked slow."""


QUICK = ProbeSettings(
    mode="quick", gpu_copy_seconds=0.05, concurrent_seconds=0.12, alone_seconds=(0.12, 0.12), alone_budget_seconds=0.8,
    pings=15, variation=0.03, sizes=(), concurrent_sizes=(), collective_sizes=(), collective_seconds=0.0,
    both_ways=False, second_transport=False, max_remeasured=12,
)  # fmt: skip
DEFAULT = ProbeSettings(
    mode="default", gpu_copy_seconds=0.1, concurrent_seconds=0.2, alone_seconds=(0.15, 0.6), alone_budget_seconds=10.0,
    pings=30, variation=0.01, sizes=_geometric_sizes(8, 8 << 20, 4), concurrent_sizes=(),
    collective_sizes=_geometric_sizes(1 << 10, 64 << 20, 4), collective_seconds=6.0, both_ways=True, second_transport=True,
    max_remeasured=24,
)  # fmt: skip
FULL = ProbeSettings(
    mode="full", gpu_copy_seconds=0.2, concurrent_seconds=0.25, alone_seconds=(0.1, 1.0), alone_budget_seconds=5.6,
    pings=30, variation=0.01, sizes=_geometric_sizes(8, 4 << 20),
    concurrent_sizes=_geometric_sizes(8 << 20, 64 << 20), collective_sizes=_geometric_sizes(1 << 10, 256 << 20),
    collective_seconds=13.5, both_ways=True, second_transport=True, max_remeasured=32,
)  # fmt: skip
MODES: dict[Mode, ProbeSettings] = {"quick": QUICK, "default": DEFAULT, "full": FULL}


class ProbeTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of the coordination between ranks, in seconds."""

    hello_seconds: float = 60.0
    """Rank 0 waits this long for each rank's first message."""
    idle_seconds: float = 3600.0
    """A rank without a task for this long exits. Longer than `hello_seconds`: rank 0 reports the missing ranks."""
    reply_seconds: float = 2.0
    """Rank 0 waits this long for replies after the timeout of a task."""
    transfer_seconds: float = 6.0
    """Time added to eight times the planned duration of a transfer."""
    copies_seconds: float = 60.0
    """Time for torch and the driver to start, added to the duration of GPU copies."""
    all_reduce_seconds: float = 60.0
    """Time for the process group to form, added to three times the planned duration."""
    exit_seconds: float = 3.0
    """Time between SIGTERM and SIGKILL of a rank, which saves nothing; a frozen rank would use all of it."""


TIMEOUTS = ProbeTimeouts()


class DiagnosisLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits beyond which a measurement becomes a finding. Fractions are of the median of comparable links."""

    slow_fraction: float = 0.95
    """A host or link below it is measured again, and reported if it stays there. Clean links scatter by 1 to 2 %."""
    slow_fraction_quick: float = 0.92
    """The same for reports of a quick probe. One stream of 0.12 s showed 0.948 of a clean link of a busy machine."""
    severe_fraction: float = 0.75
    """A finding below it is an error, above it a warning. Also the limit for NICs and GPU copies below their rating."""
    min_deviations: float = 6.0
    """Robust standard deviations below the median, besides `slow_fraction`, of a slow host or link."""
    noisy_variation: float = 0.15
    """Coefficient of variation of a noisy link."""
    retransmitted_fraction: float = 0.02
    """Fraction of retransmitted TCP segments of a lossy link."""
    min_carrier_changes: int = 20
    """Link-down and link-up events of a flapping NIC. Reboots and maintenance cause some."""
    saturated_cpu_fraction: float = 0.9
    """Busy fraction of CPUs above which the CPUs, not a link, may limit concurrent streams."""
    faster_network_factor: float = 1.25
    """Median rate of another network, over the used one's, at which it is recommended."""
    gpudirect_gain: float = 1.05
    """All-reduce time without GPUDirect RDMA over the time with it. Measured elsewhere: 1.2 (NCCL issue 1579), 2 (465)."""
    regression_fraction: float = 0.9
    """A bandwidth below it of an earlier probe's is a regression."""
    latency_factor: float = 2.0
    latency_increase_seconds: float = 50e-6
    """A latency is a regression if both this increase and `latency_factor` are exceeded."""
    regressed_host_fraction: float = 0.8
    """Fraction of its links that must be slower before a host is reported instead of the links."""
    regressed_network_fraction: float = 0.95
    """Fraction of all links that must be slower before the network is reported instead of hosts."""
    one_thread_bytes_per_second: float = 12.5e9
    """Rate of a NIC (100 Gb/s) above which TCP does not show it: one thread of the probe receives everything."""


LIMITS = DiagnosisLimits()
