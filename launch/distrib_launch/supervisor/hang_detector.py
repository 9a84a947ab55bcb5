"""Detect hangs: no rank printed a line or reported a step for the hang timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from distrib_launch import engines, results
from distrib_launch.console import Console
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import running_job
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor import hang_report
from distrib_launch.supervisor.rank_state import RankState

NOTICE_SECONDS = 600.0
"""Timeout without `--hang-timeout`: the hang is reported once and the job continues. torch's own timeouts are 10 and 30 minutes."""

ENDED_SECONDS = 10.0
"""Silence after which ranks are reported that wait for a rank at the end of its script, which calls no collective any more."""

HOPELESS_SECONDS = 60.0
"""Silence after which the job ends if ranks wait for such a rank in calls of `Job`."""

STARTUP_SECONDS = 120.0
"""Time after the start in which ranks that import, or compute before any output, do not count as hung."""

STACKS_SECONDS = 3.0
"""Longest wait for the stacks of all ranks; py-spy takes a second."""

CONFIRM_SECONDS = 1.0
"""Time between two stack dumps that must be equal."""

RECHECK_SECONDS = 20.0
"""Longest check of the network during a hang; a host that hangs does not reply."""


class HangDetector:
    """Detector of hangs: takes the stacks of all workers when none makes progress, and reports which ranks wait for which.

    Args:
        plan: Plan of the job.
        timeout_seconds: Time without progress after which the job fails; None: the hang is only reported.
        send: Sends a frame to a rank.
        console: Terminal of the launcher.
        warnings: Warnings of `result.json`, to which reports are added.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        timeout_seconds: float | None,
        send: Callable[[RankState, Kind, dict[str, Any]], None],
        console: Console,
        warnings: list[str],
    ) -> None:
        self._plan, self._send, self._console, self._warnings = plan, send, console, warnings
        self._ends_job = bool(timeout_seconds)
        self._timeout_seconds = timeout_seconds or NOTICE_SECONDS
        self._recheck: NetworkRecheck | None = None
        self._failure: results.Failure | None = None  # the job ends with it after the check of the network
        self._silent_so_far = True
        self._next_early_seconds = ENDED_SECONDS
        self.start()

    def start(self) -> None:
        """Begin to measure when the scripts start."""
        self._started = time.monotonic()
        self._reset(self._started)

    def on_progress(self) -> None:
        """Note that a rank printed something or reported a step."""
        self._silent_so_far = False
        self._failure = None
        self._reset(time.monotonic())

    def _reset(self, now: float) -> None:
        self._last_progress = now
        self._stacks: dict[int, hang_report.Stack] | None = None  # while they are collected
        self._deadline = 0.0
        self._reported = False
        if self._next_early_seconds < float("inf"):  # infinite: already reported, and perhaps intended
            self._next_early_seconds = ENDED_SECONDS
        self._early_frames: list[tuple[hang_report.StackFrame, ...]] | None = None
        self._early_reported = False

    def add_stack(self, state: RankState, dump: bytes) -> None:
        """Note a rank's stack.

        Args:
            state: The rank.
            dump: Output of py-spy.
        """
        if self._stacks is not None:
            self._stacks[state.plan.rank] = hang_report.parse_stack(
                state.plan.rank, state.plan.host, state.step, dump, closing=state.closing
            )

    def close(self) -> None:
        """Cancel a check of the network that still runs."""
        if self._recheck:
            self._recheck.close()
            self._recheck = None

    def check(self, now: float, ranks: Sequence[RankState]) -> results.Failure | None:
        """Request stacks if a check is due, and report a hang when they have arrived. Call several times a second.

        Args:
            now: Monotonic time.
            ranks: All ranks of the job.

        Returns:
            The failure by which the job must end, or None.
        """
        if self._recheck:
            if (found := self._recheck.result()) is None:
                return None
            self._report_recheck(found)
            if self._failure:
                return self._failure
        workers = [state for state in ranks if not state.exit and state.plan.role == "worker"]
        silent_seconds = now - self._last_progress
        if self._stacks is None:
            if self._is_due(silent_seconds, workers):
                self._stacks, self._deadline = {}, now + STACKS_SECONDS
                for state in workers:
                    self._send(state, Kind.TAKE_STACKS, {})
            return None
        taken = self._stacks
        if now <= self._deadline and not all(state.plan.rank in taken for state in workers):
            return None
        self._stacks = None
        stacks = [
            taken.get(s.plan.rank) or hang_report.parse_stack(s.plan.rank, s.plan.host, s.step, b"no stack came")
            for s in workers
        ]
        if not stacks:
            return None
        if silent_seconds <= self._timeout_seconds:
            return self._on_early_look(silent_seconds, stacks, ranks)
        if now - self._started <= STARTUP_SECONDS and any(
            hang_report.is_starting(stack, silent=self._silent_so_far) for stack in stacks
        ):
            self._reset(now)
            return None
        self._reported = True
        return self._report(stacks, ranks, self._timeout_seconds, ends=self._ends_job)

    def _is_due(self, silent_seconds: float, workers: Sequence[RankState]) -> bool:
        if silent_seconds > self._timeout_seconds:
            return not self._reported
        return silent_seconds > self._next_early_seconds and len({state.closing for state in workers}) > 1

    def _on_early_look(
        self, silent_seconds: float, stacks: Sequence[hang_report.Stack], ranks: Sequence[RankState]
    ) -> results.Failure | None:
        """Report ranks that wait for ranks at the end of their script, if two stack dumps are equal."""
        frames = [stack.frames for stack in stacks]
        if not hang_report.wait_for_ended(stacks):
            self._early_frames, self._next_early_seconds = None, 2 * silent_seconds
            return None
        if frames != self._early_frames:
            self._early_frames, self._next_early_seconds = frames, silent_seconds + CONFIRM_SECONDS
            return None
        is_hopeless = hang_report.wait_for_ended_in_job(stacks)
        self._next_early_seconds = HOPELESS_SECONDS if is_hopeless and not self._early_reported else float("inf")
        if self._early_reported:
            return self._report(stacks, ranks, HOPELESS_SECONDS, ends=True) if is_hopeless else None
        self._early_reported = True
        limit_seconds = min(HOPELESS_SECONDS, self._timeout_seconds) if is_hopeless else self._timeout_seconds
        return self._report(
            stacks, ranks, ENDED_SECONDS, ends=False, ends_at=limit_seconds if is_hopeless or self._ends_job else None
        )

    def _report(
        self,
        stacks: Sequence[hang_report.Stack],
        ranks: Sequence[RankState],
        silent_seconds: float,
        *,
        ends: bool,
        ends_at: float | None = None,
    ) -> results.Failure | None:
        """Print the report. Return the failure if the job `ends`; else announce the end after `ends_at` seconds, if any."""
        lines = hang_report.report_lines(stacks, silent_seconds)
        self._console.say("\n".join(lines))
        if not self._recheck and hang_report.all_wait(stacks) and NetworkRecheck.is_possible(self._plan):
            self._recheck = NetworkRecheck(self._plan)
        if not ends:
            self._warnings.append(lines[0])
            self._console.say(
                f"the job ends if this lasts for {ends_at:g} s"
                if ends_at
                else "the job continues; --hang-timeout TIME ends it"
            )
            return None
        guilty = (hang_report.culprits(stacks) or stacks)[0]
        failure = results.Failure(
            rank=guilty.rank,
            host=guilty.host,
            time=time.time(),
            exit_code=None,
            signal=None,
            message=lines[0],
            traceback="\n".join(f"{frame.filename}:{frame.line} in {frame.name}" for frame in guilty.frames),
            log=str(ranks[guilty.rank].error_log),
        )
        if self._recheck:
            self._failure = failure
            return None
        return failure

    def _report_recheck(self, problems: Sequence[str]) -> None:
        self.close()
        for line in problems or ["the hosts were checked again, and all reach each other over TCP"]:
            self._console.say(f"warning: {line}")
        self._warnings += problems


class NetworkRecheck:
    """Preflight of the hosts and their network, repeated in a thread while all ranks of the job wait."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._connections = HostSessions()
        self._problems: list[str] | None = None
        self._deadline = time.monotonic() + RECHECK_SECONDS
        self._thread = threading.Thread(target=self._check, name="network recheck", daemon=True)
        self._thread.start()

    @staticmethod
    def is_possible(plan: LaunchPlan) -> bool:
        """Return True if preflight checked the network between the hosts before the start.

        Args:
            plan: Plan of the job.
        """
        return len(plan.hosts) > 1 and bool(plan.network) and engines.shell_to_hosts(plan) is not None

    def result(self) -> list[str] | None:
        """Return the problems, an empty list for none, None while the check runs."""
        if self._problems is None and time.monotonic() > self._deadline:
            self._problems = [f"the hosts were checked again, and did not all reply within {RECHECK_SECONDS:.0f} s"]
            self._connections.close()
        return self._problems

    def close(self) -> None:
        """End the check."""
        self._connections.close()
        self._thread.join(1.0)  # not longer: a lost GPU or file system of this machine may block the thread

    def _check(self) -> None:
        try:
            problems = running_job.recheck(self._plan, self._connections)
        except Exception as error:  # no error may end the job; closed connections raise as well
            problems = [f"the hosts could not be checked again: {error}"]
        if self._problems is None:
            self._problems = problems
