"""Process of the engine on this machine. A guard ends it if the launcher is killed."""

from __future__ import annotations

import contextlib
import errno
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
from distrib.errors import LaunchError
from distrib_launch import engines, run_directory
from distrib_launch.engines import mpirun, ssh
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent import reaper
from distrib_launch.rank_agent.forwarding import encode_environment
from distrib_launch.supervisor.rank_state import SETTINGS


class EngineProcess:
    """Engine of a plan, started in a session of its own. Its output goes to `log`, a file of the run directory.

    Args:
        plan: Plan of the job.
        token: Secret of the control channel; passed in the environment, never as an argument.
        addresses: Addresses of the control channel.
    """

    def __init__(self, plan: LaunchPlan, *, token: str, addresses: str) -> None:
        self.log = Path(plan.run_dir) / run_directory.ENGINE_LOG
        self._plan = plan
        self._runtime = engines.get(plan.engine)
        self._runtime.write_files(Path(plan.run_dir), plan)
        environ = {
            **self._runtime.environment(os.environ), **plan.engine_environment, DISTRIB_TOKEN: token, DISTRIB_CONTROL: addresses,
            DISTRIB_RUN_DIR: plan.run_dir,
            **encode_environment(
                os.environ, {name: plan.ranks[0].environment[name] for name in plan.forwarded}, plan.script[0],
                has_transport=self._runtime.forwards_environment,
            ),
        }  # fmt: skip
        environ.setdefault("HOME", str(Path.home()))  # Open MPI does not start without
        environ.setdefault("PATH", os.defpath)
        self._read_bytes = self._shown = 0
        self._begun = mmap.mmap(-1, 1)  # shared with the guard
        try:
            with self.log.open("wb") as file:
                self._process = subprocess.Popen(
                    plan.command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        except OSError as error:
            hint = "unset long variables: they are forwarded to the ranks" if error.errno == errno.E2BIG else ""
            raise LaunchError(f"cannot start {plan.command[0]}: {error.strerror}", hint=hint, code="too-long") from None
        self._guard = reaper.Guard(self._end_after_launcher)

    @property
    def output(self) -> str:
        """Return the output of the engine so far, empty if the run directory was removed."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")
        return ""

    def new_messages(self) -> list[str]:
        """Return messages of the engine for the user since the last call."""
        with contextlib.suppress(OSError):
            if (size := self.log.stat().st_size) != self._read_bytes:
                self._read_bytes = size
                messages = self._runtime.messages(self.output)
                new, self._shown = messages[self._shown :], len(messages)
                return new
        return []

    @property
    def is_starting(self) -> bool:
        """Return True while daemons may be starting; they would outlive a killed engine."""
        return self._awaits_daemons and self._process.poll() is None

    @property
    def _awaits_daemons(self) -> bool:
        """Return True while daemons may be missing: all are connected before the first rank starts. The guard has this state too."""
        return self._runtime.uses_ssh_daemons and not self._begun[0]

    def note_first_rank(self) -> None:
        """Note that a rank has connected, or that the engine needs no daemons."""
        self._begun[0] = 1

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self, wait: Callable[[], None]) -> None:
        """Wait for the end of the engine, and kill it if it takes too long.

        Args:
            wait: Called again and again meanwhile.
        """
        deadline = time.monotonic() + SETTINGS.engine_start_seconds
        while self.is_starting and time.monotonic() < deadline:
            wait()
        deadline = time.monotonic() + SETTINGS.engine_end_seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            wait()
        if self._process.poll() is None:
            _end_session(self._process.pid)
            self._process.wait()
        if self._process.returncode < 0:
            self._end_leftovers()
        self._remove_traces()
        self._guard.dismiss()

    def _end_after_launcher(self) -> None:
        """End the engine and its leftovers after the launcher was killed; runs in the guard."""
        _end_session(
            self._process.pid, SETTINGS.engine_start_seconds if self._awaits_daemons else self._runtime.shutdown_seconds
        )
        self._end_leftovers()
        self._remove_traces()
        if sockets := ssh.sockets(self._plan):
            shutil.rmtree(sockets, ignore_errors=True)

    def _remove_traces(self) -> None:
        """Remove mpirun's files in /tmp, and the shared-memory folder of an mpirun that was killed."""
        for file in (mpirun.ranks_file(self._plan), mpirun.wrapper_file(self._plan)):
            file.unlink(missing_ok=True)
        shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{self._process.pid}"), ignore_errors=True)

    def _end_leftovers(self) -> None:
        """Run the engine's cleanup command after the engine was killed."""
        if command := self._runtime.cleanup_command(self._plan):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10)


def _end_session(leader: int, patience_seconds: float = 0.0) -> None:
    """End a session's processes: those that do not end by themselves get SIGTERM and, a second later, SIGKILL."""
    deadline = time.monotonic() + patience_seconds
    while (members := reaper.in_sessions({leader})) and time.monotonic() < deadline:
        time.sleep(0.02)
    reaper.send(members, signal.SIGTERM)
    deadline = time.monotonic() + SETTINGS.engine_end_seconds
    while (members := reaper.in_sessions({leader})) and time.monotonic() < deadline:
        time.sleep(0.02)
    reaper.send(members, signal.SIGKILL)
