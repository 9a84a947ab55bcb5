"""Separate process for the agent, which the engine does not monitor: for jobs that continue without the engine (mode async).

When one of its daemons ends, PRRTE ends every process that it started. It starts only a process that waits; the agent runs in
a second process and obeys the launcher alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

DETACH_OPTION = "--detach"


def detach_from_engine() -> None:
    """Continue in a new process and session. The engine's process waits for it and ends with the same exit code."""
    rank = os.fork()
    if not rank:
        os.setsid()
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # sent by Slurm for the script
        signal.signal(number, lambda number, _: os.kill(rank, number))
    _, status = os.waitpid(rank, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def end_engine_daemon(environ: Mapping[str, str]) -> None:
    """End the engine's daemon on a host that was cut off, which the daemon itself would detect only after minutes.

    A job that continues depends on it: if the host came back, the engine would end all ranks because of the failed daemon.

    Args:
        environ: Environment of the agent.
    """
    with contextlib.suppress(OSError):
        parent = os.getppid()
        if DETACH_OPTION in sys.argv:
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() == "prted":
            os.kill(parent, signal.SIGKILL)
            folder = Path(environ.get("PMIX_SERVER_TMPDIR", ""))
            if folder.name == f"prted.{parent}":
                import shutil  # not at the top: the agent must start fast

                shutil.rmtree(folder, ignore_errors=True)
