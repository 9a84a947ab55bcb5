"""Waiting with an end, and without keeping a processor from those who compute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_SECONDS = 0.0004
SLEEP_SECONDS = 0.0001
IDLE_SLEEP_SECONDS = 0.002


class ProbeTimeout(Exception):
    """What was waited for did not come in time."""


def wait(ready: Callable[[], bool], deadline: float, what: str, *, idle: bool = False) -> None:
    """Return when `ready` says so; `ProbeTimeout` at `deadline` (monotonic seconds).

    Looks often at first, letting others run in between, for what comes within microseconds; then sleeps between looks.
    `idle`: what is waited for may take long, so that sleeping begins at once and grows.
    """
    begun = time.monotonic()
    nap = 2 * SLEEP_SECONDS if idle else SLEEP_SECONDS
    while not ready():
        now = time.monotonic()
        if now > deadline:
            raise ProbeTimeout(what)
        if idle:
            time.sleep(nap)
            nap = min(nap * 1.5, IDLE_SLEEP_SECONDS)
        elif now - begun < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(nap)
