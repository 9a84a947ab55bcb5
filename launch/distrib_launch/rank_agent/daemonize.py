"""Run the agent in a process of its own that the engine does not know, for jobs that continue without the engine (mode async).

PRRTE ends every rank that it knows when one of its daemons ends. It knows a process that waits; the agent runs in another one and obeys
the launcher alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

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


def end_engine_daemon(environ: Mapping[str, str]) -> None:
    """End the engine's daemon on a host that was cut off: it would not notice for minutes.

    A job that continues needs it: if the host came back, the engine would end all ranks for the daemon's loss.

    Args:
        environ: Environment of the agent.
    """
    with contextlib.suppress(OSError):
        parent = os.getppid()
        if FLAG in sys.argv:
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() == "prted":
            os.kill(parent, signal.SIGKILL)
            folder = Path(environ.get("PMIX_SERVER_TMPDIR", ""))
            if folder.name == f"prted.{parent}":
                import shutil  # not at the start, which must be quick

                shutil.rmtree(folder, ignore_errors=True)
