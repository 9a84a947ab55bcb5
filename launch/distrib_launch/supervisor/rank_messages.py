"""Messages of the ranks: output, status lines, stacks, results and exit records."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec

from distrib.utils.json_text import decode_json
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.fault_tolerance import FaultTolerance
from distrib_launch.supervisor.hang_detector import HangDetector
from distrib_launch.supervisor.performance_monitor import PerformanceMonitor
from distrib_launch.supervisor.rank_exit import ErrorRecord, Lost, RankExit, parse_error_record
from distrib_launch.supervisor.rank_state import JobState, RankState


class _Heartbeat(msgspec.Struct):
    """Payload of HEARTBEAT: Unix times of the launcher's last ping and of the host."""

    ping: float | None = None
    time: float = 0.0


class _ExitRecord(msgspec.Struct):
    """Payload of EXIT."""

    device: str | None
    placed: dict[str, Any]
    exit_code: int | None
    signal: int | None
    stopped_by: str
    ended: float
    message: str
    error: str


class RankMessages:
    """Handler of everything that ranks send.

    Args:
        job: State of the job.
        tolerance: Decides whether the job continues after a rank died.
        hang_detector: Gets progress and stacks.
        monitor: Gets measured steps.
        on_result_lost: Called with the reason and the file if a rank's return value cannot be written.
    """

    def __init__(
        self,
        job: JobState,
        tolerance: FaultTolerance,
        hang_detector: HangDetector,
        monitor: PerformanceMonitor,
        on_result_lost: Callable[[str, str], None],
    ) -> None:
        self._job, self._tolerance, self._hang_detector, self._monitor = job, tolerance, hang_detector, monitor
        self._on_result_lost = on_result_lost

    def handle(self, state: RankState, kind: Kind, payload: bytes) -> None:
        """Handle one frame.

        Args:
            state: The rank that sent it.
            kind: Kind of the frame.
            payload: Its content.

        Raises:
            ValueError: The content is not valid.
        """
        if kind in (Kind.OUT, Kind.ERR):
            descriptor = 1 if kind is Kind.OUT else 2
            if problem := state.write(descriptor, payload):
                self._job.warn_log(problem)
            self._hang_detector.on_progress(to_stderr=kind is Kind.ERR)
            self._job.console.rank_output(state.plan.rank, descriptor, payload)
        elif kind is Kind.HEARTBEAT:
            beat = decode_json(payload, _Heartbeat)
            if beat.ping is not None:
                state.measure_clock(beat.ping, beat.time, time.time())
        elif kind is Kind.STATUS:
            for line in payload.splitlines():
                # A script may write arbitrary bytes into its status pipe.
                with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                    self._on_status(state, json.loads(line), line)
        elif kind is Kind.STACKS:
            self._hang_detector.add_stack(state, payload)
        elif kind is Kind.RESULT:
            self._keep_result(state, payload)
        elif (
            kind is Kind.EXIT and self._job.assigned
        ):  # before the assignments, the engine's output has the reason why it ended its ranks
            self._on_exit_record(state, decode_json(payload, _ExitRecord))

    def _on_status(self, state: RankState, status: dict[str, Any], line: bytes) -> None:
        if int(status.get("step", -1)) > 0 and not any(other.step > 0 for other in self._job.ranks):
            self._job.console.status(f"first step after {time.time() - self._job.started:.1f} s")
        state.step = max(state.step, int(status.get("step", -1)))
        if "failing" in status:
            self._job.console.expect_traceback(state.plan.rank)
        state.closing = state.closing or "closing" in status
        state.independent = state.independent or status.get("independent") is True
        state.prepared = state.prepared or "prepared" in status
        self._hang_detector.on_progress()
        if "warning" in status and (text := str(status["warning"])) not in self._job.warnings:
            self._job.warnings.append(text)  # the rank has printed it
            self._job.rank_warnings.append(text)
        if "measured" in status:
            self._monitor.add_report(state.plan.rank, status["measured"])
        if isinstance(status.get("metrics"), dict) and status.get("main", state.plan.rank == self._tolerance.main):
            path = self._job.run_dir / "metrics.jsonl"
            try:
                with path.open("ab") as file:
                    file.write(line + b"\n")
            except OSError as error:
                self._job.warn_log(f"{path}: {error.strerror}")

    def _keep_result(self, state: RankState, payload: bytes) -> None:
        path = self._job.run_dir / "ranks" / f"{state.plan.rank}.value"
        try:
            with path.open("ab") as file:
                file.write(payload)
        except OSError as error:
            self._on_result_lost(
                f"cannot write the return value of rank {state.plan.rank}: {path}: {error.strerror}", str(path)
            )

    def _on_exit_record(self, state: RankState, record: _ExitRecord) -> None:
        state.device = record.device or state.device
        state.placed = record.placed
        if problem := state.placed.get("problem"):
            self._job.warnings.append(f"rank {state.plan.rank} on {state.plan.host} ran unbound: {problem}")
        first_there = next(s for s in self._job.ranks if s.plan.host == state.plan.host and s.plan.local_rank == 0)
        self._end(
            state,
            record.exit_code,
            record.signal,
            stopped_by=record.stopped_by,
            ended=record.ended - first_there.clock_offset,
            message=record.message,
            error=parse_error_record(record.error),
        )

    def on_lost(self, state: RankState, why: str, lost: Lost = "closed") -> None:
        """Note that a rank was lost without an exit record.

        Args:
            state: The rank.
            why: Reason in words.
            lost: `closed` if its connection closed, `silence` if its host fell silent.
        """
        stopped_by = "launcher" if self._job.stopping else ""
        fault = None if stopped_by else root_cause.fault_in(root_cause.tail(state.error_log))
        self._end(state, None, fault, stopped_by=stopped_by, ended=time.time(), message=why, lost=lost)

    def _end(
        self,
        state: RankState,
        exit_code: int | None,
        number: int | None,
        *,
        stopped_by: str,
        ended: float,
        message: str,
        lost: Lost = "",
        error: ErrorRecord | None = None,
    ) -> None:
        job = self._job
        if state.exit:
            return
        failed_by_itself = not stopped_by and bool(exit_code or number)
        state.exit = RankExit(
            rank=state.plan.rank,
            local_rank=state.plan.local_rank,
            host=state.plan.host,
            exit_code=exit_code,
            signal=number,
            stopped_by=stopped_by,
            closing=state.closing,
            consequence=failed_by_itself and root_cause.is_consequence(error, root_cause.tail(state.error_log), number),
            error=error,
            time=ended,
            message=message,
            lost=lost,
        )
        job.console.finish_rank(
            state.plan.rank,
            failed_by_other=state.exit.consequence or state.exit.stopped_by == "launcher",
            reported=self._is_reported(state.exit),
        )
        state.close_files()
        if job.failed_at or job.stopping:
            return
        if not state.exit.failed:
            self._tolerance.on_success(state)
        elif not self._tolerance.on_death(state):
            job.failed_at = time.monotonic()

    def _is_reported(self, ended: RankExit) -> bool:
        """Return True if the failure report will have the exception of a rank, or count the rank among those with the same one."""
        job = self._job
        if ended.error is None or ended.signal or (job.stopping and not job.failed_at) or job.plan.mode == "async":
            return False  # mode async may continue without the rank
        exits = [state.exit for state in job.ranks if state.exit and state.exit is not ended]
        return not ended.stopped_by or any(one.error and one.error.kind == ended.error.kind for one in exits)
