"""Stop sequence of a job: SIGTERM to the workers, then to the servers, and SIGKILL after the grace time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.rank_connections import RankConnections
from distrib_launch.supervisor.rank_state import SETTINGS, JobState, RankState


class StopSequence:
    """Stop of a job's ranks. Servers run until the workers have ended, which may still save the servers' state."""

    def __init__(self, job: JobState, connections: RankConnections, on_lost: Callable[[RankState, str], None]) -> None:
        self._job, self._connections, self._on_lost = job, connections, on_lost
        self._deadline = float("inf")
        self._servers_grace_seconds: float | None = None  # while servers wait for the workers' end

    def begin(self, grace_seconds: float) -> None:
        """Stop the job; a later call may shorten the grace time.

        Args:
            grace_seconds: Time between SIGTERM and SIGKILL.
        """
        self._job.stopping = True
        self._job.grace_seconds = grace_seconds
        self._servers_grace_seconds = grace_seconds
        self._signal("worker", grace_seconds)
        self._stop_servers()
        if not self._job.assigned:
            for state in self._job.ranks:
                if not state.exit:
                    self._on_lost(state, "the job was stopped before it had started")

    def check(self, now: float) -> None:
        """Continue with the servers when the workers have ended, and give up ranks that send no exit record.

        Args:
            now: Monotonic time.
        """
        self._stop_servers()
        if now > self._deadline:
            for state in self._job.ranks:
                if not state.exit:
                    self._on_lost(state, "did not end when it was stopped")

    def _stop_servers(self) -> None:
        grace_seconds = self._servers_grace_seconds
        workers_run = self._job.assigned and any(not state.exit for state in self._job.workers)
        if grace_seconds is not None and not workers_run:
            self._servers_grace_seconds = None
            self._signal("server", grace_seconds)

    def _signal(self, role: str, grace_seconds: float) -> None:
        for state in self._job.ranks:
            if state.plan.role == role and not state.exit:
                order = {"signal": int(signal.SIGTERM), "grace_seconds": grace_seconds}
                self._connections.send(state, Kind.STOP, order)
        self._deadline = time.monotonic() + grace_seconds + SETTINGS.exit_record_seconds
