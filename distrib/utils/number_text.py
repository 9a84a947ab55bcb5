"""Numbers as people read them."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from distrib import units
from distrib.bandwidth_model.fewer_hosts import Fewer
from distrib.bandwidth_model.prediction import Prediction
from distrib.cluster.node import name_hosts, shown_hosts
from distrib.cluster.topology import Topology

OLD_DAYS = 180
"""What was measured longer ago may have changed."""


def time(seconds: float) -> str:
    """With three digits: `62.9 ms`."""
    return units.format_duration(seconds, digits=3)


def rate(bytes_per_second: float) -> str:
    """With as many digits as rates are known to: `24 MB/s`, `1.14 GB/s`."""
    return units.format_rate(bytes_per_second, digits=2 if bytes_per_second < 1e9 else 3)


def size(size_bytes: int) -> str:
    """With three digits: `102 MB`."""
    return units.format_size(size_bytes, digits=3, binary=False)


def number(value: float) -> str:
    """Thousands apart; small ones with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fewer(few: Fewer, than: Prediction) -> str:
    """`n1 alone would be faster, 370 samples/s instead of 125`."""
    faster, slower = few.prediction.samples_per_second, than.samples_per_second
    named = name_hosts(few.hosts)
    who = f"{named} alone" if len(few.hosts) == 1 else f"{len(few.hosts)} of the hosts ({named})"
    return f"{who} would be faster, {number(faster)} samples/s instead of {number(slower)}"


def include(few: Fewer) -> str:
    """`--include n[1-2]`, which takes these hosts alone."""
    folded = shown_hosts(few.hosts)
    is_one = "," not in re.sub(r"\[[^\]]*\]", "", folded) and ":" not in folded
    return f"--include {folded if is_one else '@'.join(f'[{name}]' if ':' in name else name for name in few.hosts)}"


def age(topology: Topology | None, now: datetime) -> tuple[str, ...]:
    """A note where the links were measured long ago: cables, and what shares them, change."""
    if topology is None or topology.measured is None:
        return ()
    said = topology.measured.when
    try:
        when = datetime.fromisoformat(re.sub(r"Z$", "+00:00", said))
    except ValueError:
        return (f"{topology.source} says that its links were measured {said!r}, which is no date",)
    days = (now - (when if when.tzinfo else when.replace(tzinfo=timezone.utc))).days
    if days <= OLD_DAYS:
        return ()
    return (
        f"the links were measured {days} days ago, {when:%Y-%m-%d}; distrib-topo probe -o {topology.source} measures them anew",
    )
