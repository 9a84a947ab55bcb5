"""Run the agent in a process of its own that the engine does not know, for jobs that continue without the engine (mode async).

PRRTE ends every rank that it knows when one of its daemons ends. It knows a process that waits; the agent runs in another one and obeys
the launcher alone.
"""

from __future__ import annotations

import os
import signal

FLAG = "--apart"


def detach_from_engine() -> None:
    """Return in a new process and session. The engine's process waits for it and ends with the same exit code."""
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
