"""CPU time and time in the queue for a CPU, from the statistics of Linux's scheduler (Documentation/scheduler/sched-stats)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def scheduled_seconds(process: str) -> tuple[float, float]:
    """Return the seconds of a thread on a CPU and in the queue for one; zeros without statistics.

    Args:
        process: Folder below /proc: a process number for its main thread, or `thread-self`.
    """
    with contextlib.suppress(OSError, ValueError):
        running, queued, _ = Path(f"/proc/{process}/schedstat").read_text().split()
        return int(running) / 1e9, int(queued) / 1e9
    return 0.0, 0.0


def queued_by_thread() -> dict[str, float]:
    """Return the seconds in the queue for a CPU so far, by thread of this process."""
    return {thread: scheduled_seconds(f"self/task/{thread}")[1] for thread in os.listdir("/proc/self/task")}


def longest_queue_seconds(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the time that one thread spent in the queue between two measurements, of the thread that waited longest.

    Args:
        before: The first result of `queued_by_thread`.
        after: The second one.
    """
    return max((seconds - before.get(thread, 0.0) for thread, seconds in after.items()), default=0.0)
