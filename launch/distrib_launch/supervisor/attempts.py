"""Restarts of a failed job: start it again on the healthy hosts, up to `--max-restarts` times."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from distrib.errors import DistribError
from distrib.utils import signals
from distrib_launch import engines, run_directory
from distrib_launch.console import Console
from distrib_launch.engines import ssh
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.launch_plan import LaunchPlan, without_secrets
from distrib_launch.open_files import require_open_files
from distrib_launch.preflight.gate import PreflightGate
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.rank_placement import NO_SLOTS, HostPlan
from distrib_launch.results import Attempt, Failure, Result
from distrib_launch.rsync import sync
from distrib_launch.status_lines import rank_count
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.host_liveness import LIVENESS
from distrib_launch.supervisor.rank_exit import RankExit, kind_of_error
from distrib_launch.supervisor.supervisor import Supervisor


class RestartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the restarts of a job, in seconds."""

    host_wait_seconds: float = 600.0
    """Longest wait for hosts without which the job may not be restarted."""
    retry_seconds: float = 5.0
    """Time between two checks of these hosts."""
    early_failure_seconds: float = 60.0
    """Time in which a repeated failure counts as a defect: two starts fail earlier, before a step and with the same error."""


RESTARTS = RestartSettings()


class CompletedAttempt(NamedTuple):
    """Start of the job that has ended."""

    plan: LaunchPlan
    result: Result
    exits: Sequence[RankExit]
    started: float
    """Unix time."""
    stepped: bool
    """True if its script has reported a step."""
    reported: bool = False
    """True if its failure was printed."""

    def report_failure(self, console: Console) -> None:
        """Print the failure, if there is one and it was not printed.

        Args:
            console: Terminal of the launcher.
        """
        failure = self.result.first_failure
        if failure and failure.code != "hang" and not self.reported:  # the hang detector has reported a hang
            console.say(f"error: {root_cause.failure_report(failure, self.exits, started=self.started)}")

    def with_result(self, **changes: object) -> CompletedAttempt:
        """Return a copy with other fields of the result.

        Args:
            **changes: Fields of `Result`.
        """
        return self._replace(result=msgspec.structs.replace(self.result, **changes))


class PlanLaunch(Protocol):
    """Function that plans a start of the job after `before`: `runner.plan_launch`."""

    def __call__(
        self,
        options: LaunchOptions,
        dropped: Collection[str] = (),
        before: LaunchPlan | None = None,
        *,
        restart: bool = False,
    ) -> LaunchPlan: ...


class _TimeLimitReached(Exception):
    """Error that ends a wait when the job's time limit is over."""


class AttemptLoop:
    """Loop that starts a job, and restarts it when it fails."""

    def __init__(
        self,
        options: LaunchOptions,
        console: Console,
        plan_launch: PlanLaunch,
        *,
        script_input: bytes = b"",
        input_ranks: Collection[int] | None = None,
    ) -> None:
        self._options, self._console, self._plan_launch = options, console, plan_launch
        self._script_input, self._input_ranks = script_input, input_ranks
        self._begun = time.monotonic()
        self._printed_notes: set[str] = set()
        self._warnings: list[str] = []
        self._restarts = 0  # of the job, and of single ranks in its starts
        self._earlier: list[Attempt] = []

    def run(self, plan: LaunchPlan) -> CompletedAttempt:
        """Run the job to its end.

        Args:
            plan: Plan of the first start.

        Returns:
            The last start; its result covers all starts.

        Raises:
            DistribError: The job could not be started.
        """
        self._options = msgspec.structs.replace(self._options, run_dir=plan.run_dir)
        with signals.ignored(*signals.FORWARDED):  # between two starts there are no scripts
            ended = self._keep(self._start(plan))
            before: CompletedAttempt | None = None
            while ended.result.status == "failed" and len(self._earlier) < self._options.max_restarts:
                if before and is_same_failure(before, ended):
                    self._warn("not restarted again: the job failed twice with the same error, before its first step")
                    break
                ended.report_failure(self._console)
                before = ended = ended._replace(reported=True)
                try:
                    ended = self._keep(self._restart(ended))
                except KeyboardInterrupt as interrupt:
                    ended = ended.with_result(status="stopped", exit_code=signals.exit_code(interrupt))
                except _TimeLimitReached:
                    ended = ended.with_result(status="stopped", exit_code=124)
                except (DistribError, OSError) as error:
                    self._warn(f"not restarted: {error}")
                    break
        return ended.with_result(
            restarts=self._restarts,
            seconds=time.monotonic() - self._begun,
            warnings=tuple(dict.fromkeys(self._warnings)),
            attempts=tuple(self._earlier),
        )

    def _keep(self, ended: CompletedAttempt) -> CompletedAttempt:
        """Add the warnings and restarts of a start to those of the job."""
        if self._earlier:
            failure = self._earlier[-1].first_failure
            self._warnings.append(f"restarted after {failure.host}: {failure.headline}" if failure else "restarted")
        self._warnings += ended.result.warnings
        self._restarts += bool(self._earlier) + ended.result.restarts
        return ended

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._console.say(f"warning: {text}")

    def _restart(self, last: CompletedAttempt) -> CompletedAttempt:
        """Restart the job on the healthy hosts, and wait for those that it needs. Restore the files of `last` if that fails."""
        number = len(self._earlier) + 1
        self._console.say(f"restarting the job ({number} of {self._options.max_restarts})")
        deadline, reported = 0.0, ""
        try:
            while True:
                try:
                    return self._start(self._plan_launch(self._options, before=last.plan, restart=True), last)
                except DistribError as error:
                    deadline = deadline or time.monotonic() + RESTARTS.host_wait_seconds
                    if time.monotonic() > deadline:
                        raise
                    if str(error) != reported:
                        reported = str(error)
                        minutes = max(1, round((deadline - time.monotonic()) / 60))
                        self._console.say(
                            f"error: {reported}\nchecking again for {minutes} minute{'s' * (minutes > 1)}"
                        )
                self._pause(RESTARTS.retry_seconds)
        except BaseException:
            if len(self._earlier) == number:
                run_directory.restore_start(Path(last.plan.run_dir), self._earlier.pop())
            raise

    def _pause(self, seconds: float) -> None:
        limit = self._options.timeout_seconds
        left = limit - (time.monotonic() - self._begun) if limit else seconds
        time.sleep(max(0.0, min(seconds, left)))
        if left <= seconds and limit:
            self._console.say(f"the time limit of {limit:g} s is over")
            raise _TimeLimitReached

    def _start(self, plan: LaunchPlan, last: CompletedAttempt | None = None) -> CompletedAttempt:
        """Run one start of the job; move the files of `last` aside when the hosts are healthy."""
        options, run_dir = self._options, Path(plan.run_dir)
        self._print_notes(plan)
        require_open_files(len(plan.hosts), len(plan.ranks))
        with HostSessions(ssh.sockets(plan)) as connections:

            def replan(without: Collection[str]) -> LaunchPlan:
                return self._plan_launch(options, without, plan)

            plan, warnings = PreflightGate(options, self._console, replan, self._prepare, connections).run(plan)
            self._set_aside(run_dir, last)
            self._print_notes(plan)
            if options.verbose:
                if plan.network:
                    self._console.say(
                        f"network: {', '.join(f'{h.address} on {h.name}' for h in plan.hosts)} ({plan.network})"
                    )
                self._console.say(f"command: {shlex.join(plan.command)}")
            self._console.place([rank.host for rank in plan.ranks])
            run_directory.write_json(run_dir / "plan.json", without_secrets(plan))
            self._console.status(f"starting {rank_count(plan)}")
            if last is None:
                self._begun = time.monotonic()
            supervisor = Supervisor(
                plan,
                self._console,
                timeout_seconds=options.timeout_seconds,
                spent_seconds=time.monotonic() - self._begun,
                hang_timeout_seconds=options.hang_timeout_seconds,
                host_timeout_seconds=options.host_timeout_seconds
                or (LIVENESS.async_silence_seconds if plan.mode == "async" else LIVENESS.silence_seconds),
                grace_seconds=options.grace_seconds,
                script_input=self._script_input,
                input_ranks=self._input_ranks,
                keep_result=bool(self._script_input or options.profile),
                was_checked=engines.shell_to_hosts(plan, preflight=options.preflight) is not None,
            )
            supervisor.job.warnings += warnings
            if plan.forecast and plan.forecast.warning:
                supervisor.job.warnings.append(plan.forecast.warning)
                self._console.say(f"warning: {plan.forecast.warning}")
            result = supervisor.run()
        stepped = any(state.step > 0 for state in supervisor.job.ranks)
        return CompletedAttempt(plan, result, supervisor.tolerance.first_exits, supervisor.job.started, stepped)

    def _print_notes(self, plan: LaunchPlan) -> None:
        for note in plan.notes:
            is_detail = note.startswith(NO_SLOTS) and not self._options.verbose
            if note not in self._printed_notes and not is_detail:
                self._printed_notes.add(note)
                self._console.say(f"note: {note}")

    def _prepare(self, plan: LaunchPlan, hosts: Sequence[HostPlan]) -> None:
        """Prepare the checks of `hosts`: write the ssh configuration and copy the folder of `--sync`."""
        run_dir = Path(plan.run_dir)
        ssh.write_ssh_config(run_dir, plan)
        if plan.sync:
            # Checkpoints on the hosts may be newer than those on this machine.
            keep_newer = self._options.max_restarts > 0
            names = [host.name for host in hosts]
            report = sync(Path(plan.sync), names, plan.ssh, leave_out=[run_dir], keep_newer=keep_newer)
            self._console.say(str(report))

    def _set_aside(self, run_dir: Path, last: CompletedAttempt | None) -> None:
        if last is None:
            return
        if len(self._earlier) == last.plan.restarts:
            self._earlier.append(run_directory.set_aside(run_dir, last.plan.restarts, last.result))
            self._console.say(f"logs of the previous start: {run_dir / self._earlier[-1].folder}")
        else:  # an earlier start moved the files of `last`, failed before its ranks ran, and left its own files
            run_directory.clear_start(run_dir)


def is_same_failure(before: CompletedAttempt, now: CompletedAttempt) -> bool:
    """Return True if the scripts of both starts ended early with the same error: a defect that a restart does not repair.

    Args:
        before: The first of two starts.
        now: The start after it.
    """
    first, second = before.result.first_failure, now.result.first_failure
    if first is None or second is None or second.exit_code is None or second.signal is not None:
        return False
    if any(ended.stepped or ended.result.seconds > RESTARTS.early_failure_seconds for ended in (before, now)):
        return False
    return _code_and_kind(first) == _code_and_kind(second)


def _code_and_kind(failure: Failure) -> tuple[int | None, tuple[str, str]]:
    return failure.exit_code, kind_of_error(failure.message, failure.traceback)
