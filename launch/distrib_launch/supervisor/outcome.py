"""How a job ends: what was decided from outside its ranks goes before what they have said."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from distrib.utils import local_addresses
from distrib_launch import engines
from distrib_launch.engines import mpirun
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.results import Failure, Status
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.fault_tolerance import Recovery
from distrib_launch.supervisor.rank_exit import RankExit

ORPHANED_SECONDS = 30.0
"""For how long the daemons of an engine that has left may still be ending its ranks."""


class Verdict:
    """On one start of a job."""

    def __init__(self, plan: LaunchPlan, recovery: Recovery) -> None:
        self._plan, self._recovery = plan, recovery
        self._decided: tuple[Status, int] | None = None
        self._failure: Failure | None = None
        self._had_failed = False
        self.engine_left: Failure | None = None
        """Before its ranks; without it a job of mode async may go on."""

    @property
    def is_decided(self) -> bool:
        """Whether it does not depend any more on what the ranks will say."""
        return self._decided is not None

    def stop(self, exit_code: int, *, had_failed: bool = False) -> None:
        """Somebody wants the job to end, who may want it more than once: the first time counts.

        `had_failed`: it had failed before, which is to be told.
        """
        if not self._decided:
            self._decided, self._had_failed = ("stopped", exit_code), had_failed

    def fail(self, failure: Failure) -> None:
        """The job cannot go on, whatever its ranks say."""
        self._decided, self._failure = ("failed", 1), failure

    def hear_engine(self, words: str) -> str:
        """All that the engine has said: whether somebody has stopped the job through it. Why, where that is so."""
        if self.is_decided:
            return ""
        first = self._first
        told = [first] if first else self._recovery.endings  # a script that is stopped may save, and end well
        if any(ending.stopped_by == "engine" or ending.signal == signal.SIGTERM for ending in told):
            why = engines.runtime(self._plan.engine).cancelled(words)
        elif first and first.lost == "closed":  # as where its rank was ended before it had saved
            why = engines.runtime(self._plan.engine).cancelled(words, for_a_reason=True)
        else:
            return ""
        if why:
            self.stop(128 + signal.SIGTERM)
        return why

    def final(self, logs: dict[int, Path]) -> tuple[Status, int, Failure | None]:
        """What became of the job, its exit code, and its first failure. `logs` are the error outputs by rank."""
        if not self.is_decided and self._ended_with_the_engine and self.engine_left:
            self.fail(self.engine_left)
        first = self._first
        status, code = self._decided or (("failed", first.code) if first else ("succeeded", 0))
        if not self._failure and first and (status == "failed" or (self._had_failed and not first.stopped_by)):
            host = next(host for host in self._plan.hosts if host.name == first.host)
            interpreter = self._plan.script_on(host)[0]
            lacks_pythonpath = mpirun.keeps_here("PYTHONPATH", self._plan, os.environ) and not local_addresses.is_here(
                first.host
            )
            return (
                status,
                code,
                root_cause.describe(
                    first,
                    self._recovery.first_endings,
                    logs[first.rank],
                    interpreter,
                    lacks_pythonpath=lacks_pythonpath,
                ),
            )
        return status, code, self._failure

    @property
    def _first(self) -> RankExit | None:
        return None if self._recovery.succeeded else root_cause.first_failure(self._recovery.first_endings)

    @property
    def _ended_with_the_engine(self) -> bool:
        """Whether a job that may go on without the engine did not, as ranks were ended when it left."""
        left = self.engine_left
        if left is None or self._recovery.succeeded:
            return False
        ended = [ending for ending in self._recovery.endings if ending.stopped_by == "engine"]
        return any(abs(ending.time - left.time) < ORPHANED_SECONDS for ending in ended)
