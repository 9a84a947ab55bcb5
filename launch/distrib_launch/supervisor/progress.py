"""Whether the ranks of a job get on together: what is said of those that wait for each other in vain, or have never met."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from distrib_launch import results
from distrib_launch.console import Console
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor import hang_detector, hang_report
from distrib_launch.supervisor.rank_state import RankState
from distrib_launch.supervisor.secondlook import SecondLook


class Progress:
    """Looks at the workers now and then, and asks for their stacks by `send`.

    `hang_timeout_seconds` is how long no rank may get on before the job fails, None to say so only; `warnings` are for the result.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        hang_timeout_seconds: float | None,
        send: Callable[[RankState, Kind, dict[str, Any]], None],
        console: Console,
        warnings: list[str],
    ) -> None:
        self._ends = bool(hang_timeout_seconds)
        self._send, self._console, self._warnings = send, console, warnings
        self._plan = plan
        self._look: SecondLook | None = None
        self._failure: results.Failure | None = None
        """By which the job ends as soon as the look is over."""
        self._standstill = hang_detector.Standstill(hang_timeout_seconds or 0.0)

    def start(self) -> None:
        """The scripts start now."""
        self._standstill.start()

    def seen(self) -> None:
        """A rank has printed something, or reported a step."""
        self._standstill.progress()
        self._failure = None

    def add(self, state: RankState, dump: bytes) -> None:
        """A rank's stack has come, as py-spy wrote it."""
        stack = hang_report.parse_stack(state.plan.rank, state.plan.host, state.step, dump, closing=state.closing)
        self._standstill.add(stack)

    def close(self) -> None:
        """The job is over."""
        if self._look:
            self._look.close()

    def watch(self, now: float, ranks: Sequence[RankState]) -> results.Failure | None:
        """Says what there is to say of `ranks`, all of the job's. Why it is to end, if it is."""
        if self._look:
            if (found := self._look.found()) is None:
                return None
            self._tell_look(found)
            if self._failure:
                return self._failure
        there = [state for state in ranks if not state.ending and state.plan.role == "worker"]
        self._standstill.some_at_end = len({state.closing for state in there}) > 1
        if self._standstill.begins(now):
            self._ask(there)
        stacks = self._standstill.stacks(now, [(s.plan.rank, s.plan.host, s.step) for s in there])
        return self._judge(stacks, ranks) if stacks else None

    def _ask(self, ranks: Sequence[RankState]) -> None:
        for state in ranks:
            self._send(state, Kind.TAKE_STACKS, {})

    def _judge(self, stacks: Sequence[hang_report.Stack], ranks: Sequence[RankState]) -> results.Failure | None:
        still = self._standstill
        lines = hang_report.report(stacks, still.silent_seconds)
        self._console.say("\n".join(lines))
        if hang_report.all_wait(stacks) and SecondLook.is_possible(self._plan):
            self._look = SecondLook(self._plan)
        if not still.hopeless and (still.early or not self._ends):
            self._warnings.append(lines[0])
            if still.early and (still.in_vain or self._ends):
                limit = (
                    min(hang_detector.HOPELESS_SECONDS, still.limit_seconds) if still.in_vain else still.limit_seconds
                )
                self._console.say(f"the job is ended when it is so for {limit:g} s")
            else:
                self._console.say("the job goes on; --hang-timeout TIME would end it")
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
        if self._look:
            self._failure = failure
            return None
        return failure

    def _tell_look(self, found: Sequence[str]) -> None:
        """What came of the second look, which is over."""
        self.close()
        self._look = None
        for line in found or ["the hosts were asked again, and all reach each other over TCP"]:
            self._console.say(f"warning: {line}")
        self._warnings += found
