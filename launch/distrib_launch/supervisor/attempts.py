"""A job from its first start to its last: one that failed is started again on the hosts that are fit then, `--max-restarts` times."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from distrib.errors import DistribError
from distrib.utils import rlimits, signals
from distrib_launch import engines, results, runner
from distrib_launch.console import Console
from distrib_launch.engines import mpirun
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan, without_secrets
from distrib_launch.preflight.gate import Admission
from distrib_launch.preflight.host_sessions import Connections
from distrib_launch.rank_placement import HostPlan
from distrib_launch.results import Attempt, Result
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.rank_exit import RankExit
from distrib_launch.supervisor.supervisor import HOST_SILENCE_SECONDS, Supervisor
from distrib_launch.supervisor.tolerance_rules import ASYNC_HOST_SILENCE_SECONDS

WAIT_SECONDS = 600.0
"""For so long hosts that are not fit are asked again where the job may not go on without them."""

ASK_AGAIN_SECONDS = 5.0

AT_ONCE_SECONDS = 60.0
"""A start that failed within this time, without a step, and so did the one before in the same way: the next one would, too."""


class Ended(NamedTuple):
    """A start of the job that has ended."""

    plan: LaunchPlan
    result: Result
    endings: Sequence[RankExit]
    started: float
    """Unix time."""
    stepped: bool
    """Whether its script has reported a step."""
    told: bool = False
    """Whether its failure was told."""

    def tell_failure(self, console: Console) -> None:
        """Say what it died of, if it failed and nobody has said it."""
        if self.result.first_failure and not self.told:
            console.say(f"error: {root_cause.report(self.result.first_failure, self.endings, started=self.started)}")


class _OutOfTime(Exception):
    """The job's time limit is over."""


class Attempts:
    """Starts a job, and starts it again. `run` returns its last start, with what the others left in its result."""

    def __init__(
        self,
        options: LaunchOptions,
        console: Console,
        *,
        script_input: bytes = b"",
        input_ranks: Collection[int] | None = None,
    ) -> None:
        self.options = options
        self.console = console
        self.script_input = script_input
        self.input_ranks = input_ranks
        self.begun = time.monotonic()
        self.said: set[str] = set()
        self.warnings: list[str] = []
        self.restarts = 0
        """Of the job, and of single ranks in its starts."""
        self.earlier: list[Attempt] = []

    def run(self, plan: LaunchPlan) -> Ended:
        """Raises `DistribError` when the job could not be started at all."""
        self.options = msgspec.structs.replace(self.options, run_dir=plan.run_dir)
        # Scripts are sent SIGUSR1, to save; between two starts there is nobody to pass it on to.
        with signals.passed_over(signal.SIGUSR1):
            ended = self._keep(self._start(plan))
            before: Ended | None = None
            while ended.result.status == "failed" and len(self.earlier) < self.options.max_restarts:
                if before and _fails_alike(before, ended):
                    self._warn("it failed twice at once with the same error: it was not started once more")
                    break
                ended.tell_failure(self.console)
                before = ended = ended._replace(told=True)
                try:
                    ended = self._keep(self._start_again(ended))
                except KeyboardInterrupt as interrupt:
                    ended = _instead(ended, status="stopped", exit_code=signals.exit_code(interrupt))
                except _OutOfTime:
                    ended = _instead(ended, status="stopped", exit_code=124)
                except (DistribError, OSError) as error:
                    self._warn(f"it was not started again: {error}")
                    break
        return _instead(
            ended,
            restarts=self.restarts,
            seconds=time.monotonic() - self.begun,
            warnings=tuple(dict.fromkeys(self.warnings)),
            attempts=tuple(self.earlier),
        )

    def _keep(self, ended: Ended) -> Ended:
        """Take down what is to be said of a start in the result of the job."""
        if self.earlier:
            failure = self.earlier[-1].first_failure
            self.warnings.append(
                f"started again after {failure.host}: {failure.message.splitlines()[0]}" if failure else "started again"
            )
        self.warnings += ended.result.warnings
        self.restarts += bool(self.earlier) + ended.result.restarts
        return ended

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self.console.say(f"warning: {text}")

    def _start_again(self, last: Ended) -> Ended:
        """Start the job on the hosts that are fit now, waiting for those that it needs.

        Raises `DistribError` where they do not come, and `_OutOfTime` where the job's time is over before; then what `last` left
        is where it was.
        """
        number = len(self.earlier) + 1
        self.console.say(f"starting the job again ({number} of {self.options.max_restarts})")
        deadline, told = 0.0, ""
        try:
            while True:
                try:
                    return self._start(runner.plan_launch(self.options, before=last.plan, restart=True), last)
                except DistribError as error:
                    deadline = deadline or time.monotonic() + WAIT_SECONDS
                    if time.monotonic() > deadline:
                        raise
                    if str(error) != told:
                        told = str(error)
                        minutes = max(1, round((deadline - time.monotonic()) / 60))
                        self.console.say(f"error: {told}\nasking again for {minutes} minute{'s' * (minutes > 1)}")
                self._pause(ASK_AGAIN_SECONDS)
        except BaseException:
            if len(self.earlier) == number:
                results.bring_back(Path(last.plan.run_dir), self.earlier.pop())
            raise

    def _pause(self, seconds: float) -> None:
        limit = self.options.timeout_seconds
        left = limit - (time.monotonic() - self.begun) if limit else seconds
        time.sleep(max(0.0, min(seconds, left)))
        if left <= seconds and limit:
            self.console.say(f"the time limit of {limit:g} s is over")
            raise _OutOfTime

    def _start(self, plan: LaunchPlan, last: Ended | None = None) -> Ended:
        """Start the job and see it end. What `last` left is moved out of the way when the hosts are found fit."""
        options, run_dir = self.options, Path(plan.run_dir)
        self._say_notes(plan)
        rlimits.allow(len(plan.hosts), len(plan.ranks))
        with Connections(mpirun.sockets(plan)) as connections:

            def replan(without: Collection[str]) -> LaunchPlan:
                return runner.plan_launch(options, without, plan)

            plan, warnings = Admission(options, self.console, replan, self._prepare, connections).run(plan)
            self._make_room(run_dir, last)
            self._say_notes(plan)
            if options.verbose:
                if plan.network:
                    self.console.say(
                        f"network: {', '.join(f'{h.address} on {h.name}' for h in plan.hosts)} ({plan.network})"
                    )
                self.console.say(f"starting {shlex.join(plan.command)}")
            self.console.place([rank.host for rank in plan.ranks])
            results.write_json(run_dir / "plan.json", without_secrets(plan))
            if last is None:
                self.begun = time.monotonic()
            supervisor = Supervisor(
                plan,
                self.console,
                timeout_seconds=options.timeout_seconds,
                spent_seconds=time.monotonic() - self.begun,
                hang_timeout_seconds=options.hang_timeout_seconds,
                host_timeout_seconds=options.host_timeout_seconds
                or (ASYNC_HOST_SILENCE_SECONDS if plan.mode == "async" else HOST_SILENCE_SECONDS),
                grace_seconds=options.grace_seconds,
                script_input=self.script_input,
                input_ranks=self.input_ranks,
                keep_value=bool(self.script_input or options.profile),
                asked=engines.remote_shell(plan, preflight=options.preflight) is not None,
            )
            supervisor.warnings += warnings
            if plan.forecast and plan.forecast.warning:
                supervisor.warnings.append(plan.forecast.warning)
                self.console.say(f"warning: {plan.forecast.warning}")
            result = supervisor.run()
        stepped = any(state.step > 0 for state in supervisor.ranks)
        return Ended(plan, result, supervisor.recovery.first_endings, supervisor.started, stepped)

    def _say_notes(self, plan: LaunchPlan) -> None:
        for note in plan.notes:
            if note not in self.said:
                self.said.add(note)
                self.console.say(f"note: {note}")

    def _prepare(self, plan: LaunchPlan, hosts: Sequence[HostPlan]) -> None:
        """What must be before `hosts`, of the plan, can be asked."""
        run_dir = Path(plan.run_dir)
        mpirun.write_ssh_config(run_dir, plan)
        if plan.sync:
            from distrib_launch.rsync import sync

            # Of a job that goes on from its checkpoints those on the hosts may be newer than what lies here.
            keep_newer = self.options.max_restarts > 0
            names = [host.name for host in hosts]
            told = sync(Path(plan.sync), names, plan.ssh, leave_out=[run_dir], keep_newer=keep_newer)
            self.console.say(str(told))

    def _make_room(self, run_dir: Path, last: Ended | None) -> None:
        if last is None:
            return
        if len(self.earlier) == last.plan.restarts:
            self.earlier.append(results.set_aside(run_dir, last.plan.restarts, last.result))
            self.console.say(f"the logs of the start before are in {run_dir / self.earlier[-1].folder}")
        else:  # they were moved by a start that came to nothing, and has left something since
            results.clear(run_dir)


def _fails_alike(before: Ended, now: Ended) -> bool:
    """Whether both starts ended of their scripts' own accord, of the same error and at their beginning: of a mistake."""
    first, second = before.result.first_failure, now.result.first_failure
    if first is None or second is None or second.exit_code is None or second.signal is not None:
        return False
    if any(ended.stepped or ended.result.seconds > AT_ONCE_SECONDS for ended in (before, now)):
        return False
    return (first.exit_code, first.message, first.traceback) == (second.exit_code, second.message, second.traceback)


def _instead(ended: Ended, **changes: object) -> Ended:
    return ended._replace(result=msgspec.structs.replace(ended.result, **changes))
