"""Polling with a deadline, without keeping a CPU from processes that compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_SECONDS = 0.0004
"""Polls yield the CPU, but do not sleep, for this long: small messages arrive within microseconds."""

SLEEP_SECONDS, MAX_SLEEP_SECONDS = 0.0001, 0.002
"""Sleep between later polls, and its maximum while nothing is expected soon."""


class ProbeTimeout(Exception):
    """An expected message or state did not come in time."""


def wait(ready: Callable[[], bool], deadline: float, what: str, *, idle: bool = False) -> None:
    """Poll until `ready` returns True.

    Args:
        ready: The condition.
        deadline: Monotonic seconds.
        what: Name of the awaited event, the message of the exception.
        idle: True if waiting may take long: polls then sleep at once, and longer each time.

    Raises:
        ProbeTimeout: The deadline passed.
    """
    begun = time.monotonic()
    nap = 2 * SLEEP_SECONDS if idle else SLEEP_SECONDS
    while not ready():
        now = time.monotonic()
        if now > deadline:
            raise ProbeTimeout(what)
        if idle:
            time.sleep(nap)
            nap = min(nap * 1.5, MAX_SLEEP_SECONDS)
        elif now - begun < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(nap)
