"""A job from its first start to its last: one that failed is started again on the hosts that are fit then, `--max-restarts` times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from distrib_launch import admission, failures, job, results
from distrib_launch.connections import Connections
from distrib_launch.console import Console
from distrib_launch.engines import mpirun
from distrib_launch.plan import HostPlan, LaunchPlan, without_secrets
from distrib_launch.results import Attempt, Result
from distrib_launch.supervisor import HOST_SILENCE_SECONDS, Supervisor
from distrib_launch.tolerance import HOST_SILENCE_SECONDS as PATIENT_SECONDS

from distrib.errors import ConfigError, DistribError

WAIT_SECONDS = 600.0
"""For so long hosts that are not fit are asked again where the job may not go on without them."""

ASK_AGAIN_SECONDS = 5.0

AT_ONCE_SECONDS = 60.0
"""A start that failed within this time, without a step, and so did the one before with the same traceback: the next one would, too."""


class Ended(NamedTuple):
    """A start of the job that has ended."""

    plan: LaunchPlan
    result: Result
    endings: Sequence[failures.Ending]
    started: float
    """Unix time."""
    stepped: bool
    """Whether its script has reported a step."""


def tell_failure(ended: Ended, console: Console) -> None:
    """Say what it died of, if it failed."""
    if ended.result.first_failure:
        told = failures.report(ended.result.first_failure, ended.endings, started=ended.started)
        console.say(f"error: {told}")


class Attempts:
    """Starts a job, and starts it again. `run` returns its last start, with what the others left in its result."""

    def __init__(
        self,
        options: argparse.Namespace,
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
        self.earlier: list[Attempt] = []

    def run(self, plan: LaunchPlan) -> Ended:
        """Raises `DistribError` when the job could not be started at all."""
        self.said = set(plan.notes)
        self.options = argparse.Namespace(**{**vars(self.options), "run_dir": plan.run_dir})
        ended = self._start(plan)
        warnings, restarts = list(ended.result.warnings), ended.result.restarts
        while ended.result.status == "failed" and len(self.earlier) < self.options.max_restarts:
            if self._would_fail_again(ended):
                warnings.append("it failed twice at once with the same error: it was not started once more")
                self.console.say(f"warning: {warnings[-1]}")
                break
            tell_failure(ended, self.console)
            try:
                last, ended = ended, self._start_again(ended)
            except KeyboardInterrupt as interrupt:
                number = int((interrupt.args or (2,))[0])
                ended = _instead(ended, status="stopped", exit_code=128 + number)
                break
            except TimeoutError:
                ended = _instead(ended, status="stopped", exit_code=124)
                break
            except DistribError as error:
                warnings.append(f"it was not started again: {error}")
                self.console.say(f"error: {warnings[-1]}")
                break
            failure = last.result.first_failure
            why = f" after {failure.host}: {failure.message.splitlines()[0]}" if failure else ""
            warnings += [f"started again{why}", *ended.result.warnings]
            restarts += 1 + ended.result.restarts
        return _instead(
            ended,
            restarts=restarts,
            seconds=time.monotonic() - self.begun,
            warnings=tuple(dict.fromkeys(warnings)),
            attempts=tuple(self.earlier),
        )

    def _would_fail_again(self, ended: Ended) -> bool:
        """Whether this start and the one before failed of the same mistake, at their beginning."""
        if not self.earlier or ended.stepped or ended.result.seconds > AT_ONCE_SECONDS:
            return False
        before, now = self.earlier[-1].first_failure, ended.result.first_failure
        return bool(before and now and now.traceback and now.traceback == before.traceback)

    def _start_again(self, last: Ended) -> Ended:
        """Start the job on the hosts that are fit now, waiting for those that it needs.

        Raises `DistribError` where they do not come, and TimeoutError where the job's time is over before.
        """
        number = len(self.earlier) + 1
        self.console.say(f"starting the job again ({number} of {self.options.max_restarts})")
        deadline, told = time.monotonic() + WAIT_SECONDS, ""
        while True:
            try:
                return self._start(job.make_plan(self.options, before=last.plan, again=True), last)
            except ConfigError:
                raise
            except DistribError as error:
                if time.monotonic() > deadline:
                    raise
                if str(error) != told:
                    told = str(error)
                    self.console.say(f"error: {told}\nasking again for {WAIT_SECONDS / 60:g} minutes")
            self._pause(ASK_AGAIN_SECONDS)

    def _pause(self, seconds: float) -> None:
        limit = self.options.timeout
        if limit and time.monotonic() + seconds - self.begun > limit:
            self.console.say(f"the time limit of {limit:g} s is over")
            raise TimeoutError
        time.sleep(seconds)

    def _start(self, plan: LaunchPlan, last: Ended | None = None) -> Ended:
        """Start the job and see it end. What `last` left is moved out of the way when the hosts are found fit."""
        options, run_dir = self.options, Path(plan.run_dir)
        with Connections(mpirun.sockets(plan)) as connections:

            def replan(without: Collection[str]) -> LaunchPlan:
                return job.make_plan(options, without, plan)

            plan, warnings = admission.admit(plan, options, self.console, replan, self._prepare, connections)
            self._make_room(run_dir, last)
            for note in plan.notes:
                if note not in self.said:
                    self.said.add(note)
                    self.console.say(f"note: {note}")
            self.console.place([rank.host for rank in plan.ranks])
            results.write_json(run_dir / "plan.json", without_secrets(plan))
            supervisor = Supervisor(
                plan,
                self.console,
                timeout_seconds=options.timeout,
                spent_seconds=time.monotonic() - self.begun if last else 0.0,
                hang_timeout_seconds=options.hang_timeout,
                host_timeout_seconds=options.host_timeout
                or (PATIENT_SECONDS if plan.mode == "async" else HOST_SILENCE_SECONDS),
                grace_seconds=options.grace,
                script_input=self.script_input,
                input_ranks=self.input_ranks,
                keep_value=bool(self.script_input or options.profile),
            )
            supervisor.warnings += warnings
            if plan.outlook and plan.outlook.warning:
                supervisor.warnings.append(plan.outlook.warning)
                self.console.say(f"warning: {plan.outlook.warning}")
            if last:
                where = run_dir / self.earlier[-1].folder
                self.console.say(
                    f"{plan.world_size} rank(s) on {len(plan.hosts)} host(s); the logs of the start before are in {where}"
                )
            result = supervisor.run()
        stepped = any(state.step > 0 for state in supervisor.ranks)
        return Ended(plan, result, supervisor.recovery.first_endings, supervisor.started, stepped)

    def _prepare(self, plan: LaunchPlan, hosts: Sequence[HostPlan]) -> None:
        """What must be before `hosts`, of the plan, can be asked."""
        run_dir = Path(plan.run_dir)
        mpirun.write_ssh_config(run_dir, plan)
        if plan.sync:
            from distrib_launch.sync import sync

            told = sync(Path(plan.sync), [host.name for host in hosts], plan.ssh, leave_out=[run_dir])
            self.console.say(str(told))

    def _make_room(self, run_dir: Path, last: Ended | None) -> None:
        if last is None:
            return
        if len(self.earlier) == last.plan.restarts:
            self.earlier.append(results.set_aside(run_dir, last.plan.restarts, last.result))
        else:  # a start that came to nothing has left something since
            results.clear(run_dir)


def _instead(ended: Ended, **changes: object) -> Ended:
    return ended._replace(result=msgspec.structs.replace(ended.result, **changes))
