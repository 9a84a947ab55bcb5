"""Calls of a function in threads that a signal can interrupt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TypeVar

WAKE_SECONDS = 0.1
"""Time between wake-ups of the main thread. A signal just before a wait does not wake it: Python handles the signal afterwards."""

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def map_in_threads(
    work: Callable[[Item], Outcome], items: Sequence[Item], *, at_once: int, interrupt: Callable[[], None]
) -> list[Outcome]:
    """Call a function for all items in threads, and return the results in their order.

    Args:
        work: Function to call.
        items: Its arguments.
        at_once: Largest number of threads.
        interrupt: Called at the first exception, KeyboardInterrupt included: makes the running calls end.

    Raises:
        BaseException: The first exception of a call, or the interrupt, after all calls have ended.
    """
    pool = futures.ThreadPoolExecutor(max_workers=min(at_once, max(1, len(items))))
    try:
        calls = [pool.submit(work, item) for item in items]
        running = set(calls)
        while running:
            ended, running = futures.wait(running, WAKE_SECONDS, futures.FIRST_EXCEPTION)
            for call in ended:
                call.result()
        return [call.result() for call in calls]
    except BaseException:
        interrupt()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
