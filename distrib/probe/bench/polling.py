"""Polling with a deadline, without keeping a CPU from processes that compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


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
    nap = 0.0002
    while not ready():
        now = time.monotonic()
        if now > deadline:
            raise ProbeTimeout(what)
        if idle:
            time.sleep(nap)
            nap = min(nap * 1.5, 0.002)
        else:
            yield_cpu(now - begun)


def yield_cpu(waited_seconds: float) -> None:
    """Let other processes run before the next poll: without sleep for 0.4 ms, as small messages arrive within microseconds.

    Args:
        waited_seconds: Time since the first poll, or since the last message.
    """
    if waited_seconds < 0.0004:
        os.sched_yield()
    else:
        time.sleep(0.0001)
