"""Keeps a rank out of the hands of the engine that started it, for jobs that go on without the engine (mode async).

PRRTE ends every rank it knows when one of its daemons ends, as where a host that lost its power is up again. What it knows is a
process that waits; the rank goes on in another one, and obeys the launcher alone.
"""

from __future__ import annotations

import os
import signal

FLAG = "--apart"


def step_apart() -> None:
    """Returns in a process of its own. The engine's stays, with the same end; what ends that one before ends no more than it."""
    rank = os.fork()
    if not rank:
        os.setsid()
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's, for the script
        signal.signal(number, lambda number, _: os.kill(rank, number))
    _, status = os.waitpid(rank, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
