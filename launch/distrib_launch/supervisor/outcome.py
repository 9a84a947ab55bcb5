"""Outcome of a job: decisions of the launcher take precedence over the exits of the ranks."""

from __future__ import annotations

import signal
import socket
import time

from distrib import strategy
from distrib.utils.ranges import ranges
from distrib_launch import engines, results, status_lines
from distrib_launch.results import Failure, MeasuredPerformance, Status
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.fault_tolerance import FaultTolerance
from distrib_launch.supervisor.rank_exit import RankExit
from distrib_launch.supervisor.rank_state import SETTINGS, JobState


class JobOutcome:
    """Outcome of one start of a job."""

    def __init__(self, job: JobState, tolerance: FaultTolerance) -> None:
        self._job, self._tolerance = job, tolerance
        self._decided: tuple[Status, int] | None = None
        self._failure: Failure | None = None
        self._failed_before_stop = False
        self.engine_failure: Failure | None = None
        """End of the engine before its ranks; a job of mode async may continue without it."""

    @property
    def is_decided(self) -> bool:
        """Return True if the exits of the ranks do not matter any more."""
        return self._decided is not None

    def stop(self, exit_code: int) -> None:
        """Decide that the job was stopped; later calls change nothing.

        Args:
            exit_code: Exit code of the launcher.
        """
        if not self._decided:
            self._decided, self._failed_before_stop = ("stopped", exit_code), bool(self._job.failed_at)

    def fail(self, failure: Failure) -> None:
        """Decide that the job failed.

        Args:
            failure: Its first failure.
        """
        self._decided, self._failure = ("failed", 1), failure

    def failure_here(self, message: str, *, code: str, log: str, host: str = "") -> Failure:
        """Return a failure of the launcher, the engine or a host, not of a rank.

        Args:
            message: Description of the failure.
            code: Kind of the failure.
            log: Path of a file with details.
            host: Host on which it failed, empty for this one.
        """
        return Failure(host=host or socket.gethostname(), time=time.time(), code=code, message=message, log=log)

    def check_cancelled(self, engine_output: str) -> str:
        """Decide that the job was stopped if its engine reports that a user or the batch system cancelled it.

        Args:
            engine_output: Everything that the engine printed.

        Returns:
            The reason, empty if it was not cancelled.
        """
        if self.is_decided:
            return ""
        first = self._first
        runtime = engines.get(self._job.plan.engine)
        exits = [first] if first else self._tolerance.exits  # a script that is stopped may save and exit with 0
        if any(one.stopped_by == "engine" or one.signal == signal.SIGTERM for one in exits):
            why = runtime.cancelled(engine_output)
        elif first and first.lost == "closed":  # Slurm may have killed the rank before it sent its exit record
            why = runtime.cancelled(engine_output, for_a_reason=True)
        else:
            return ""
        if why:
            self.stop(128 + signal.SIGTERM)
        return why

    def result(self, measured: MeasuredPerformance | None) -> results.Result:
        """Return the content of `result.json`, and warn of options and copies of the script that had no effect.

        Args:
            measured: Measured steps, None for none.
        """
        job, plan = self._job, self._job.plan
        status, exit_code, failure = self._final()
        if killed := self._killed_while_stopping():
            job.warn(killed)
        if status == "succeeded":
            if copies := self._independent_copies():
                job.warnings.append(copies)
                job.console.say_at_close(f"warning: {copies}")
            if unused := self._unused_options():
                job.warn(unused)
            if job.rank_warnings:
                job.console.status(status_lines.warning_line(job.rank_warnings))
        return results.Result(
            status=status,
            exit_code=exit_code,
            world_size=plan.world_size,
            hosts=tuple(host.name for host in plan.hosts),
            seconds=time.time() - job.started,
            restarts=sum(state.restarts for state in job.ranks),
            ranks=tuple(state.result() for state in job.ranks),
            first_failure=failure,
            warnings=tuple(job.warnings),
            predicted=plan.forecast.predicted if plan.forecast else None,
            measured=measured,
        )

    def _final(self) -> tuple[Status, int, Failure | None]:
        if not self.is_decided and self.engine_failure and self._ended_with_engine(self.engine_failure):
            self.fail(self.engine_failure)
        first = self._first
        status, code = self._decided or (("failed", first.code) if first else ("succeeded", 0))
        failed_first = status == "failed" or (self._failed_before_stop and first and not first.stopped_by)
        if self._failure or not first or not failed_first:
            return status, code, self._failure
        plan = self._job.plan
        interpreter = plan.script_on(self._job.hosts[first.host])[0]
        log = self._job.ranks[first.rank].error_log
        exits = self._tolerance.first_exits
        return (
            status,
            code,
            root_cause.describe_failure(first, exits, log, interpreter),
        )

    @property
    def _first(self) -> RankExit | None:
        return None if self._tolerance.rules.succeeded else root_cause.first_failure(self._tolerance.first_exits)

    def _ended_with_engine(self, failure: Failure) -> bool:
        """Return True if ranks of a job that may continue without the engine were ended when it ended."""
        if self._tolerance.rules.succeeded:
            return False
        ended = [one for one in self._tolerance.exits if one.stopped_by == "engine"]
        return any(abs(one.time - failure.time) < SETTINGS.orphan_seconds for one in ended)

    def _killed_while_stopping(self) -> str:
        job = self._job
        exits = [state.exit for state in job.ranks if state.exit]
        killed = [one.rank for one in exits if one.stopped_by == "launcher" and one.signal == signal.SIGKILL]
        if not killed or not job.grace_seconds:  # 0: the user pressed Ctrl-C twice
            return ""
        return (
            f"rank{'s' * (len(killed) > 1)} {ranges(killed)} still ran {job.grace_seconds:g} s after SIGTERM, and the launcher killed "
            "them; if they were saving, give them more time with --grace"
        )

    def _independent_copies(self) -> str:
        workers = self._job.workers
        if len(workers) < 2 or not all(state.independent for state in workers):
            return ""
        return (
            f"no rank called distrib.init() or init_process_group(): {len(workers)} independent copies of the script ran\n"
            "  call job = distrib.init() and job.prepare(...) to train one model"
        )

    def _unused_options(self) -> str:
        plan = self._job.plan
        options = strategy.strategy_options(plan.strategy)
        if (
            not options or plan.mode == "async" or any(state.prepared for state in self._job.ranks)
        ):  # the parameter servers report unused options
            return ""
        return (
            f"{' '.join(options)} changed nothing: no model that learns was passed to job.prepare\n"
            "  in the script, call model, optimizer = job.prepare(model, optimizer)"
        )
