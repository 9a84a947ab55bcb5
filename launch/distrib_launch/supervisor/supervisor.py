"""Supervise one start of a job: start the engine, wait for the ranks, watch them, stop them and report the outcome.

One thread with one selector. The engine only starts processes; the control channel alone shows their state.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from distrib.cluster.node import name_hosts
from distrib.errors import DistribError, LaunchError
from distrib.utils import signals
from distrib.utils.framing import new_token
from distrib.utils.ranges import ranges
from distrib_launch import engines, results, run_directory
from distrib_launch.console import Console
from distrib_launch.launch_options import GRACE_SECONDS
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import preflight, running_job
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor.assignments import send_assignments, warn_few_cpus
from distrib_launch.supervisor.engine_process import EngineProcess
from distrib_launch.supervisor.fault_tolerance import FaultTolerance
from distrib_launch.supervisor.hang_detector import HangDetector
from distrib_launch.supervisor.host_liveness import LIVENESS, HostLiveness
from distrib_launch.supervisor.listener import ControlListener
from distrib_launch.supervisor.outcome import JobOutcome
from distrib_launch.supervisor.performance_monitor import PerformanceMonitor
from distrib_launch.supervisor.rank_connections import RankConnections
from distrib_launch.supervisor.rank_exit import signal_name
from distrib_launch.supervisor.rank_messages import RankMessages
from distrib_launch.supervisor.rank_state import SETTINGS, JobState, RankState
from distrib_launch.supervisor.stop_sequence import StopSequence


class _NotStarted(Exception):
    """Error for hosts whose ranks did not connect; `error` is raised if the hosts show no reason."""

    def __init__(self, hosts: list[str], error: LaunchError) -> None:
        super().__init__(hosts, error)
        self.hosts, self.error = hosts, error


class Supervisor:
    """Supervisor of one start of a job.

    Args:
        plan: Plan of the job.
        console: Terminal of the launcher.
        timeout_seconds: Time limit of the job, None for none.
        spent_seconds: Part of it that earlier starts of the job took.
        hang_timeout_seconds: Time without progress after which the job fails; None: a hang is only reported.
        host_timeout_seconds: Silence after which a host is probed.
        grace_seconds: Time between SIGTERM and SIGKILL.
        script_input: Standard input of the scripts.
        input_ranks: Ranks that get it, None for all.
        keep_result: True if what scripts write to DISTRIB_RESULT_FD is kept.
        was_checked: True if preflight has checked the hosts.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        console: Console,
        *,
        timeout_seconds: float | None = None,
        spent_seconds: float = 0.0,
        hang_timeout_seconds: float | None = None,
        host_timeout_seconds: float = LIVENESS.silence_seconds,
        grace_seconds: float = GRACE_SECONDS,
        script_input: bytes = b"",
        input_ranks: Collection[int] | None = None,
        keep_result: bool = False,
        was_checked: bool = False,
    ) -> None:
        self.job = JobState(plan, console, grace_seconds)
        self.selector = selectors.DefaultSelector()
        self._timeout_seconds, self._spent_seconds = timeout_seconds, spent_seconds
        self._script_input, self._keep_result, self._was_checked = script_input, keep_result, was_checked
        self._input_ranks = range(len(plan.ranks)) if input_ranks is None else input_ranks
        self._runtime = engines.get(plan.engine)
        self._token = new_token()
        self._liveness = HostLiveness(host_timeout_seconds)
        self.tolerance = FaultTolerance(self.job, self._send)
        self._outcome = JobOutcome(self.job, self.tolerance)
        self._hang_detector = HangDetector(hang_timeout_seconds, self._send, console, self.job.warnings)
        self._monitor = PerformanceMonitor(plan, self.job.warn, self.job.host_of)
        self._messages = RankMessages(
            self.job, self.tolerance, self._hang_detector, self._monitor, self._on_result_lost
        )
        self.connections = RankConnections(
            self.job, self.selector, self._liveness,
            on_frame=self._messages.handle, on_lost=self._messages.on_lost, on_complete=self.assign,
            may_return=self.tolerance.may_rejoin, on_return=self.tolerance.restart,
        )  # fmt: skip
        self._stop = StopSequence(self.job, self.connections, self._messages.on_lost)
        self._engine: EngineProcess | None = None
        self._retried = False
        self._interrupts = 0

    def _send(self, state: RankState, kind: Kind, payload: dict[str, Any] | bytes) -> None:
        self.connections.send(state, kind, payload)  # created after the parts that use this method

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> results.Result:
        """Run the job, and return its result.

        Raises:
            LaunchError: The job could not be started.
        """
        numbers = (*signals.STOPPING, *signals.FORWARDED, signal.SIGCHLD)
        try:
            with contextlib.closing(self.selector), signals.on_selector(self.selector, numbers, self._on_signal):
                self._run()
        except _NotStarted as failed:  # the hosts are queried outside `_run`, where a signal can interrupt the query
            if not self._interrupts:
                found = running_job.diagnose(self.job.plan, failed.hosts, self.job.console.say)
                raise found or failed.error from None
        if self._engine and (why := self._outcome.check_cancelled(self._engine.output)):
            self.job.warnings.append(why)
            self.job.console.say(why)
        return self._outcome.result(self._monitor.measured)

    def _run(self) -> None:
        listener: ControlListener | None = None
        try:
            listener = self._listen()
            self._engine = self._start_engine(listener)
            self._watch(listener)
        finally:
            self._release_ranks()
            if listener:
                listener.close()
            self.connections.close()

    def _listen(self) -> ControlListener:
        """Listen on the addresses by which the hosts reach this machine, and on no others."""
        own = {"127.0.0.1"} if self.job.is_local else None
        addresses = set(self.job.plan.listen) or own or preflight.launcher_addresses(self.job.plan)
        ranks = len(self.job.ranks)
        return ControlListener(self.selector, self._token, addresses, ranks, self.connections.accept)

    def _start_engine(self, listener: ControlListener) -> EngineProcess:
        engine = EngineProcess(self.job.plan, token=self._token, addresses=listener.addresses)
        if self.job.is_local:  # there are no daemons
            engine.note_first_rank()
        return engine

    def _watch(self, listener: ControlListener) -> None:
        """Handle events until every rank has ended."""
        job, plan = self.job, self.job.plan
        for host in plan.hosts:
            # The address in the chosen network is reachable only from that network, and hosts of srun may have no sshd.
            if host.address and plan.listen and not job.is_local and self._runtime.uses_ssh_daemons:
                self._liveness.watch(host.name, host.address, host.port)
        begun = start = time.monotonic()
        next_ping, missing = 0.0, job.missing
        while not job.all_ended:
            self._turn(0.1)
            now = time.monotonic()
            assert self._engine
            if any(state.hello for state in job.ranks):
                self._engine.note_first_rank()
            if not job.assigned and (why := self._runtime.queued(self._engine.log)):
                if start == begun:
                    job.console.say(f"{plan.engine} waits for the hosts to be free: {why}")
                start = now
            if job.missing < missing:  # the last of thousands of ranks may take long
                missing, start = job.missing, max(start, now)
            if now >= next_ping:
                self.connections.ping()
                next_ping = now + SETTINGS.ping_seconds
            if self._engine.exit_code() is not None and not job.stopping:
                if self._may_retry(self._engine):
                    self._retry(self._engine, listener)
                    start = now
                    continue
                self._on_engine_end(self._engine)
            elif not job.assigned and not job.stopping and now - start > SETTINGS.connect_seconds:
                what = f"no further rank connected for {SETTINGS.connect_seconds:.0f} s"
                what += listener.describe_unauthenticated()
                raise _start_failure(job, self._engine, what)
            self._check_limits(now, now - begun + self._spent_seconds)
            self._check_hosts()
            if job.assigned and not job.stopping and (failure := self._hang_detector.check(now, job.ranks)):
                self._outcome.fail(failure)
                self._stop.begin(job.grace_seconds)
            _update_console(job, self._engine)
            self._stop.check(now)
            if job.stopping and not job.assigned and self._engine.exit_code() is not None:
                break

    def _check_limits(self, now: float, spent_seconds: float) -> None:
        """Stop the job if its time is over, it failed, or only ranks run that are no longer needed."""
        job = self.job
        if self._timeout_seconds and spent_seconds > self._timeout_seconds and not self._outcome.is_decided:
            job.console.say(f"the time limit of {self._timeout_seconds:g} s is over; stopping the job")
            self._outcome.stop(124)
            self._stop.begin(job.grace_seconds)
        if job.stopping:
            return
        if not job.failed_at:
            self.tolerance.restart_due(now)
        if job.assigned and self.tolerance.rules.is_over:
            self._stop.begin(job.grace_seconds)
        elif job.failed_at:
            found = any(one.failed and not one.consequence for one in self.tolerance.exits)
            if now - job.failed_at > (SETTINGS.cause_seconds if found else SETTINGS.late_cause_seconds):
                self._stop.begin(job.grace_seconds)

    def _check_hosts(self) -> None:
        for host in self._liveness.take_lost_hosts():
            why = f"silent for {self._liveness.silence_seconds:g} s, and no reply to a probe"
            if not self.job.assigned and not self.job.stopping:
                self.job.stopping = True
                raise LaunchError(
                    f"host {host} was lost while the job was starting: {why}",
                    hint="check that it is up, or start without it: --drop-bad-hosts",
                    code="host-lost",
                )
            if self.job.plan.mode != "async" and not self.job.stopping:
                self.job.console.say(f"host {host} was lost: {why}; stopping the other ranks")
            for state in self.job.ranks:
                if state.plan.host == host and (not state.exit or state.restart_at) and state.channel:
                    self.connections.disconnect_rank(state, why, "silence")

    def _turn(self, seconds: float) -> bool:
        """Handle the events of the next `seconds`. Return True if there were any."""
        ready = self.selector.select(seconds)
        for key, events in ready:
            handler: Callable[[Any, int], None] = key.data
            handler(key.fileobj, events)
        return bool(ready)

    def _turn_once(self) -> None:
        with contextlib.suppress(OSError, DistribError):
            self._turn(0.01)

    # -- the start ------------------------------------------------------------------------------------------------

    def assign(self) -> None:
        """Send the assignments when all ranks have connected."""
        job = self.job
        job.assigned = True
        self._hang_detector.start()
        if self._runtime.limits_cpus and not self._was_checked:
            warn_few_cpus(job)
        send_assignments(
            job,
            self._send,
            host_timeout_seconds=self._liveness.silence_seconds,
            keep_result=self._keep_result,
            script_input=self._script_input,
            input_ranks=self._input_ranks,
        )

    def _may_retry(self, failed: EngineProcess) -> bool:
        """Return True if the engine failed for the first time, before any rank connected, and may succeed the next time."""
        if self.job.assigned or self._retried or any(state.hello for state in self.job.ranks):
            return False
        return self._runtime.is_transient_failure(failed.output)

    def _retry(self, failed: EngineProcess, listener: ControlListener) -> None:
        self._retried = True
        failed.end(self._turn_once)
        host = self._runtime.lost_host(failed.output)
        where = f" on {host}" if host else ""
        self.job.warn(f"{self.job.plan.engine} could not start its daemon{where}; trying once more")
        failed.log.rename(self.job.run_dir / run_directory.FIRST_ENGINE_LOG)
        self._engine = self._start_engine(listener)

    # -- the end --------------------------------------------------------------------------------------------------

    def _on_engine_end(self, engine: EngineProcess) -> None:
        """Handle the end of the engine: without it MPI is broken, so the job ends, unless mode async needs no MPI."""
        job = self.job
        if not job.assigned:
            raise _start_failure(job, engine, "the engine ended before every rank had connected")
        if self._outcome.engine_failure:
            return
        deadline = time.monotonic() + 1.0  # exit records that have arrived show why it ended
        while self._turn(0) and time.monotonic() < deadline:
            pass
        if job.stopping or job.all_ended:
            return
        code = engine.exit_code() or 0
        causes = [e for e in self.tolerance.exits if e.failed and not e.stopped_by and not e.consequence]
        lost = self._runtime.lost_host(engine.output)
        if job.plan.mode != "async" and code >= 0 and not lost and causes:
            self._stop.begin(job.grace_seconds)  # the engine ended because of the failed rank
            return
        lost = lost if lost in job.hosts else ""
        what = _engine_end_text(job, code, lost)
        code_of_error = "host-lost" if lost else "engine-ended"
        failure = self._outcome.failure_here(what, code=code_of_error, log=str(engine.log), host=lost)
        self._outcome.engine_failure = failure
        if job.plan.mode == "async":
            job.warn(f"{failure.message}; mode async continues without it")
        else:
            self._outcome.fail(failure)
            self._stop.begin(job.grace_seconds)

    def _on_result_lost(self, what: str, log: str) -> None:
        if not self._outcome.is_decided:
            self._outcome.fail(self._outcome.failure_here(what, code="result-lost", log=log))
            self._stop.begin(self.job.grace_seconds)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGQUIT:  # Ctrl-\, at which other runtimes show stacks, too
            self._hang_detector.request_report()
        elif number in signals.STOPPING:
            self._on_interrupt(number)
        elif number in signals.FORWARDED:
            for state in self.job.workers:
                if not state.exit:
                    self._send(state, Kind.SIGNAL, {"signal": number})

    def _on_interrupt(self, number: int) -> None:
        # When a terminal closes, its shell forwards one SIGHUP, and the kernel sends another.
        if number == signal.SIGHUP and self._interrupts:
            return
        self._interrupts += 1
        if not all(state.exit and not state.exit.failed for state in self.job.ranks):  # otherwise the job has succeeded
            self._outcome.stop(128 + number)
        if number == signal.SIGINT and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)  # the terminal has echoed ^C
        if self._interrupts == 1:
            self.job.console.say(f"{signal_name(number)}: stopping the job (once more: at once)")
            self._stop.begin(self.job.grace_seconds)
        else:
            self._stop.begin(0.0)
            if self._engine:
                self._engine.note_first_rank()

    def _release_ranks(self) -> None:
        """Let the agents end, and wait for the engine."""
        for state in self.job.ranks:
            self._send(state, Kind.END, {})
        if self._engine:
            if self._engine.is_starting:
                self.job.console.say(
                    f"waiting for daemons that are being started, {SETTINGS.engine_start_seconds:.0f} s at most (Ctrl-C: no longer)"
                )
            self._engine.end(self._turn_once)


def _update_console(job: JobState, engine: EngineProcess) -> None:
    for message in engine.new_messages() if job.assigned and not job.stopping else ():
        job.console.say(f"{job.plan.engine}: {message}")
    job.console.tick()


def _start_failure(job: JobState, engine: EngineProcess, what: str) -> Exception:
    """Return the error that ends a job whose ranks did not all connect; `what` was observed."""
    missing = [state for state in job.ranks if state.channel is None]
    missing = [
        state for state in missing if not state.hello
    ] or missing  # without ranks that connected and were then ended by the engine
    hosts = list(dict.fromkeys(state.plan.host for state in missing))
    job.stopping = True
    output = engine.output.strip()
    if explained := engines.get(job.plan.engine).explain(output):
        return LaunchError(explained[0], hint=explained[1])
    failed = LaunchError(
        f"the job did not start: {what} ({len(missing)} of {len(job.ranks)} missing, on {name_hosts(hosts)})"
        + (f"\n{output}" if output else ""),
        hint=f"the engine's own output is in {engine.log}",
        code="ranks-missing",
    )
    return failed if job.is_local else _NotStarted(hosts, failed)


def _engine_end_text(job: JobState, code: int, lost: str) -> str:
    """Return how the engine ended before its ranks; `lost` is the host whose daemon it lost, if any."""
    engine = job.plan.engine
    if lost:
        numbers = [state.plan.rank for state in job.ranks if state.plan.host == lost]
        with_ranks = f"with rank{'s' * (len(numbers) > 1)} {ranges(numbers)}"
        return f"host {lost} was lost, {with_ranks}: {engine} lost its daemon there, or the ssh connection to it"
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return f"{engine} {how} while its ranks were running"
