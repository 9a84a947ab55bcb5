"""Detect hangs: no rank printed a line or reported a step for the hang timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from distrib_launch import results
from distrib_launch.console import Console
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.hang_report import HangReport, Stack, parse_stack
from distrib_launch.supervisor.rank_state import RankState


class HangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the hang detection, in seconds."""

    hint_seconds: float = 60.0
    """Silence after which one line announces the report, once in a job: longer than most steps, short for a user who watches."""
    notice_seconds: float = 600.0
    """Timeout without `--hang-timeout`: the hang is reported once and the job continues. torch's own timeouts are 10 and 30 minutes."""
    closed_seconds: float = 10.0
    """Silence after which ranks are reported that wait for a rank at the end of its script, which calls no collective any more."""
    startup_seconds: float = 60.0
    """Shortest timeout until a rank writes to standard output or reports a step: imports from a network file system are slow."""
    stacks_seconds: float = 3.0
    """Longest wait for the stacks of all ranks; py-spy takes a second."""


SETTINGS = HangSettings()


class HangDetector:
    """Detector of hangs: takes the stacks of all workers when none makes progress, and reports which ranks wait for which.

    Args:
        timeout_seconds: Time without progress after which the job fails; None: the hang is only reported.
        send: Sends a frame to a rank.
        console: Terminal of the launcher.
        warnings: Warnings of `result.json`, to which reports are added.
        settings: Other times.
    """

    def __init__(
        self,
        timeout_seconds: float | None,
        send: Callable[[RankState, Kind, dict[str, Any]], None],
        console: Console,
        warnings: list[str],
        settings: HangSettings = SETTINGS,
    ) -> None:
        self._send, self._console, self._warnings = send, console, warnings
        self._settings = settings
        self._ends_job = bool(timeout_seconds)
        self._timeout_seconds = timeout_seconds or settings.notice_seconds
        self._is_starting = True
        self._is_requested = False
        self._closed_reported = self._hinted = False
        self.start()

    def start(self) -> None:
        """Begin to measure when the scripts start."""
        self._started = time.monotonic()
        self._reset(self._started)

    def on_progress(self, *, to_stderr: bool = False) -> None:
        """Note that a rank printed something or reported a step.

        Args:
            to_stderr: True for standard error, where libraries also write while a script starts.
        """
        self._is_starting = self._is_starting and to_stderr
        self._reset(time.monotonic())

    def _reset(self, now: float) -> None:
        self._last_progress = now
        self._stacks: dict[int, Stack] | None = None  # while they are collected
        self._deadline = 0.0
        self._reported = False
        self._closed_seconds = self._settings.closed_seconds

    def request_report(self) -> None:
        """Show the stacks of all ranks as soon as they have arrived."""
        self._is_requested = True

    def add_stack(self, state: RankState, dump: bytes) -> None:
        """Note a rank's stack.

        Args:
            state: The rank.
            dump: Output of py-spy.
        """
        if self._stacks is not None:
            self._stacks[state.plan.rank] = parse_stack(state, dump)

    def check(self, now: float, ranks: Sequence[RankState]) -> results.Failure | None:
        """Request stacks if a check is due, and report a hang when they have arrived. Call several times a second.

        Args:
            now: Monotonic time.
            ranks: All ranks of the job.

        Returns:
            The failure by which the job must end, or None.
        """
        workers = [state for state in ranks if not state.exit and state.is_worker]
        silent_seconds = now - self._last_progress
        if silent_seconds > self._settings.hint_seconds and not self._hinted and not self._closed_reported:
            self._hinted = True
            what = "the job ends" if self._ends_job else "the launcher shows them"
            self._console.say(
                f"note: no rank has printed a line or finished a step for {self._settings.hint_seconds:.0f} s; Ctrl-\\ shows the "
                f"stacks of all ranks, and {what} after {self._limit_seconds:g} s (--hang-timeout)"
            )
        if self._stacks is None:
            if self._is_due(silent_seconds, workers):
                self._stacks, self._deadline = {}, now + self._settings.stacks_seconds
                for state in workers:
                    self._send(state, Kind.TAKE_STACKS, {})
            return None
        if now <= self._deadline and not all(state.plan.rank in self._stacks for state in workers):
            return None
        for state in workers:
            if state.plan.rank not in self._stacks:
                self.add_stack(state, b"no stack came")
        stacks, self._stacks = [self._stacks[state.plan.rank] for state in workers], None
        if not stacks:
            return None
        report = HangReport(stacks)
        if self._is_requested:
            self._is_requested = False
            self._console.say("\n".join(report.lines(round(silent_seconds))))
            return None
        if silent_seconds > self._limit_seconds:
            self._reported = True
            return self._report_hang(report, ranks)
        self._closed_seconds = 2 * silent_seconds
        if report.waits_for_closed:
            self._closed_reported = True
            self._say(report.lines(self._settings.closed_seconds), ends=False)
        return None

    @property
    def _limit_seconds(self) -> float:
        """Return the time without progress that counts as a hang."""
        return max(self._timeout_seconds, self._settings.startup_seconds * self._is_starting)

    def _is_due(self, silent_seconds: float, workers: Sequence[RankState]) -> bool:
        if self._is_requested:
            return True
        if silent_seconds > self._limit_seconds:
            return not self._reported
        some_closed = len({state.closing for state in workers}) > 1
        return some_closed and not self._closed_reported and silent_seconds > self._closed_seconds

    def _report_hang(self, report: HangReport, ranks: Sequence[RankState]) -> results.Failure | None:
        """Report a hang. Return the failure if the job must end."""
        lines = report.lines(self._limit_seconds)
        self._say(lines, ends=self._ends_job)
        if not self._ends_job:
            return None
        first = (report.culprits or report.stacks)[0]
        return results.Failure(
            rank=first.rank,
            host=first.host,
            time=time.time(),
            code="hang",
            message=lines[0],
            traceback="\n".join(
                f"{frame.filename}:{frame.line} in {frame.name}"
                for frame in first.frames
                if "/rank_agent/" not in frame.filename
            ),
            log=str(ranks[first.rank].error_log),
        )

    def _say(self, lines: Sequence[str], *, ends: bool) -> None:
        """Print a report, with what follows if the job does not end now."""
        if ends:
            self._console.say("\n".join([f"error: {lines[0]}", *lines[1:]]))
            return
        self._warnings.append(lines[0])
        follows = (
            f"the job ends if this lasts for {self._timeout_seconds:g} s"
            if self._ends_job
            else "the job continues; --hang-timeout TIME ends it"
        )
        self._console.say("\n".join([f"warning: {lines[0]}", *lines[1:], f"  {follows}"]))
