"""Processes that a rank forks, as loaders do for their workers.

Before 3.12 (and the last releases of 3.9 to 3.11), Python takes the lock of its list of threads in a new process before it makes
that lock anew (CPython issue 112275). If another thread had it at the moment of the fork, the new process waits for ever, and
whoever waits for its first batch, too. Gloo's threads have it when they come to Python for the first time, to free a tensor that
the script has let go of, which is just after an all-reduce: where a loop often begins.
"""

from __future__ import annotations

import os
import sys
import time

QUIET_SECONDS = 0.01
"""In which a thread that is about to enter Python, or to leave it, has done so."""

TOGETHER_SECONDS = 0.1
"""Within which forks are those of one loader, which calls no collective between them."""


def make_safe() -> None:
    """Lets other threads finish what they are at before this process forks. Once a process."""
    last = -TOGETHER_SECONDS

    def rest() -> None:
        nonlocal last
        if time.monotonic() - last > TOGETHER_SECONDS:
            time.sleep(QUIET_SECONDS)
        last = time.monotonic()

    if sys.version_info < (3, 12):
        os.register_at_fork(before=rest)
