"""The engine's own process on this machine, from its start to its end, which comes even when the launcher is killed."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from distrib.environment import DISTRIB_CONTROL, DISTRIB_RUN_DIR, DISTRIB_TOKEN
from distrib_launch import engines, run_directory
from distrib_launch.engines import ssh
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent import reaper

ENGINE_GRACE_SECONDS = 1.0
"""How long the engine may take to end once its ranks have, and then after SIGTERM; it was seen to hang for ever."""
STARTING_SECONDS = 15.0
"""How long mpirun may go on with a start that nobody wants any more: a daemon whose mpirun is killed before it has called back
waits for it for ever, on a host of its own."""


class EngineProcess:
    """Starts the engine of a plan in a session of its own; what it prints goes to `log`, a file of the run directory.

    `token` and `addresses` of the control channel travel in its environment, never in its arguments.
    """

    def __init__(self, plan: LaunchPlan, *, token: str, addresses: str) -> None:
        self.log = Path(plan.run_dir) / run_directory.ENGINE_LOG
        self._plan = plan
        self._runtime = engines.get(plan.engine)
        self._runtime.write_files(Path(plan.run_dir), plan)
        environ = {
            **self._runtime.environment(os.environ), **plan.engine_environment, DISTRIB_TOKEN: token, DISTRIB_CONTROL: addresses,
            DISTRIB_RUN_DIR: plan.run_dir,
        }  # fmt: skip
        environ.setdefault("HOME", str(Path.home()))  # Open MPI does not start without
        environ.setdefault("PATH", os.defpath)
        self._begun = mmap.mmap(-1, 1)  # shared with the guard
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                plan.command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._guard = reaper.Guard(self._end_after_launcher)

    @property
    def output(self) -> str:
        """What it has printed so far, as far as that can be read."""
        with contextlib.suppress(OSError):  # somebody has removed the run directory
            return self.log.read_text(errors="replace")
        return ""

    @property
    def is_starting(self) -> bool:
        """Whether daemons may be starting that nobody would end."""
        return self._awaits_daemons and self._process.poll() is None

    @property
    def _awaits_daemons(self) -> bool:
        """Whether they may not all be there yet, as they are before the first rank is started. Known to the guard, too."""
        return self._runtime.uses_ssh_daemons and not self._begun[0]

    def has_begun(self) -> None:
        """A rank has called back, or nobody shall wait for that."""
        self._begun[0] = 1

    def exit_code(self) -> int | None:
        """How it ended, as `subprocess` counts; None while it runs."""
        return self._process.poll()

    def end(self, wait: Callable[[], None]) -> None:
        """See it go, by force if it must; `wait` is called meanwhile."""
        deadline = time.monotonic() + STARTING_SECONDS
        while self.is_starting and time.monotonic() < deadline:
            wait()
        deadline = time.monotonic() + ENGINE_GRACE_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            wait()
        if self._process.poll() is None:
            _end_session(self._process.pid)
            self._process.wait()
        if self._process.returncode < 0:
            self._give_up()
            self._remove_traces()
        self._guard.dismiss()

    def _end_after_launcher(self) -> None:
        """What the guard does when the launcher was killed."""
        _end_session(self._process.pid, STARTING_SECONDS if self._awaits_daemons else self._runtime.shutdown_seconds)
        self._give_up()
        self._remove_traces()
        if sockets := ssh.sockets(self._plan):
            shutil.rmtree(sockets, ignore_errors=True)

    def _remove_traces(self) -> None:
        """An mpirun that was killed leaves its folder of shared memory behind."""
        shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{self._process.pid}"), ignore_errors=True)

    def _give_up(self) -> None:
        """It was killed: have what it may have left ended."""
        if command := self._runtime.cleanup_command(self._plan):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)


def _end_session(leader: int, patience_seconds: float = 0.0) -> None:
    """End a session's processes: those that do not end by themselves get SIGTERM and, a second later, SIGKILL."""
    deadline = time.monotonic() + patience_seconds
    while (members := reaper.in_session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    reaper.send(members, signal.SIGTERM)
    deadline = time.monotonic() + ENGINE_GRACE_SECONDS
    while (members := reaper.in_session(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    reaper.send(members, signal.SIGKILL)
