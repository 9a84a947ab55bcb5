"""Cause of slow steps: the part of a rank's step that explains most of the time lost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Literal

import msgspec

from distrib_launch.supervisor.rank_report import RankReport

EXPLAINING_FRACTION = 0.5
"""Fraction of the lost time that a cause must explain."""


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Cause of slow steps."""

    cause: Literal["loader", "busy CPUs", "straggler", "network", "waiting"]
    """`waiting`: ranks wait for each other, and none of the other causes explains it."""
    seconds: float
    """Time in a step: wait for data, for a CPU, computing, or wait for gradients."""
    rank: int = -1
    """Rank in which the time is longest; -1 for `network` and `waiting`, which concern all."""
    usual_seconds: float = 0.0
    """Computing time of other ranks, for a straggler."""


def find_cause(
    reports: Mapping[int, RankReport],
    *,
    lost_seconds: float,
    exposed_seconds: float,
    network_seconds: float | None,
    predicted_compute_seconds: float | None = None,
) -> Slowdown | None:
    """Find the cause of slow steps.

    Busy CPUs come before a straggler and the network: they delay computing and gradients, and make every link look slow.

    Args:
        reports: One report of each rank.
        lost_seconds: Time of a step beyond that of one rank alone.
        exposed_seconds: Time of a step beyond that which the slowest rank computes.
        network_seconds: Time that the network needs for the gradients; None if it is not known.
        predicted_compute_seconds: Computing time by a profile; None to compare a rank with the median of the others.

    Returns:
        The cause; None if no part of a step explains the time lost.
    """
    enough = EXPLAINING_FRACTION * lost_seconds
    computing = {rank: report.compute_seconds - report.loader_seconds for rank, report in reports.items()}
    loading = max(reports, key=lambda rank: reports[rank].loader_seconds)
    queued = max(reports, key=lambda rank: reports[rank].queued_seconds)
    latest = max(computing, key=lambda rank: computing[rank])
    others = [seconds for rank, seconds in computing.items() if rank != latest] or [computing[latest]]
    usual = statistics.median(others) if predicted_compute_seconds is None else predicted_compute_seconds
    if reports[loading].loader_seconds > enough:
        return Slowdown(cause="loader", rank=loading, seconds=reports[loading].loader_seconds)
    if reports[queued].queued_seconds > enough:
        return Slowdown(cause="busy CPUs", rank=queued, seconds=reports[queued].queued_seconds)
    if computing[latest] - usual > enough:
        return Slowdown(cause="straggler", rank=latest, seconds=computing[latest], usual_seconds=usual)
    if exposed_seconds < enough:
        return None
    by_network = network_seconds is None or network_seconds > EXPLAINING_FRACTION * exposed_seconds
    return Slowdown(cause="network" if by_network else "waiting", seconds=exposed_seconds)
