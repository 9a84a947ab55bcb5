"""Watches a job from its first process to its last: who called back, who failed first, who is still there.

One thread, one selector. The engine only starts processes; the truth about them comes over the control channel.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, NoReturn

from distrib import strategy
from distrib.cluster.node import name_hosts
from distrib.errors import DistribError, LaunchError
from distrib.utils import local_addresses, signals
from distrib.utils.framing import ProtocolError, new_token
from distrib_launch import engines, results
from distrib_launch.console import Console
from distrib_launch.engines.srun import MORE_PROCESSORS, few_processors
from distrib_launch.launch_options import GRACE_SECONDS
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import preflight
from distrib_launch.preflight.check_result import folded
from distrib_launch.rank_agent.control_channel import Channel, Kind, give_up_on_silence
from distrib_launch.supervisor import listener, performance_monitor, root_cause
from distrib_launch.supervisor.assignments import assignments
from distrib_launch.supervisor.engine_process import STARTING_SECONDS, EngineProcess
from distrib_launch.supervisor.fault_tolerance import Recovery
from distrib_launch.supervisor.hang_detector import HangDetector
from distrib_launch.supervisor.host_liveness import Liveness
from distrib_launch.supervisor.outcome import Verdict
from distrib_launch.supervisor.rank_exit import ErrorRecord, RankExit, parse_error_record, signal_name
from distrib_launch.supervisor.rank_state import RankState

START_SECONDS = 120.0
"""How long hosts may take to call back; a cold Python on a network file system is slow."""

SETTLE_SECONDS = 0.3
"""After the first failure, how long to wait for an earlier one that is still on the wire."""

CAUSE_SECONDS = 2.5
"""The same when all that failed so far only lost their connection to another rank: it may have been a host that vanished."""

PING_SECONDS = 0.4
HOST_SILENCE_SECONDS = 1.8
DEAD_CONNECTION_SECONDS = 30.0
"""After which the kernel gives up a connection whose bytes nobody acknowledges; a host that vanished is known before."""


INPUT_PIECE_BYTES = 1 << 20


class _NotStarted(Exception):
    """Ranks of `hosts` have not called back, and nothing that was said tells why; `error` is told where the hosts do not either."""

    def __init__(self, hosts: list[str], error: LaunchError) -> None:
        super().__init__(hosts, error)
        self.hosts, self.error = hosts, error


class Supervisor:
    """Runs one plan to its end. `run` returns the result; `LaunchError` when the job could not be started."""

    def __init__(
        self,
        plan: LaunchPlan,
        console: Console,
        *,
        timeout_seconds: float | None = None,
        spent_seconds: float = 0.0,
        hang_timeout_seconds: float | None = None,
        host_timeout_seconds: float = HOST_SILENCE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        script_input: bytes = b"",
        input_ranks: Collection[int] | None = None,
        keep_value: bool = False,
        asked: bool = False,
    ) -> None:
        self.plan = plan
        self.asked = asked  # before, what its hosts are
        self.console = console
        self.run_dir = Path(plan.run_dir)
        self.hosts = {host.name: host for host in plan.hosts}
        self.runtime = engines.runtime(plan.engine)
        self.timeout_seconds = timeout_seconds
        self.spent_seconds = spent_seconds  # of it, by the job's starts before
        self.grace_seconds = grace_seconds
        self.script_input = script_input
        self.input_ranks = range(len(plan.ranks)) if input_ranks is None else input_ranks
        self.keep_value = keep_value  # of what each rank's script writes to DISTRIB_RESULT_FD
        self.liveness = Liveness(host_timeout_seconds)
        self.token = new_token()
        self.ranks = [RankState(rank, self.run_dir / "ranks") for rank in plan.ranks]
        self.started_ranks = [self.ranks[rank.rank] for rank in plan.started]
        self.recovery = Recovery(plan, self.ranks, self._send, self._warn)
        self.selector = selectors.DefaultSelector()
        self.missing = len(self.ranks)  # that have not called back
        self.engine: EngineProcess | None = None
        self.tried_again = False
        self.assigned = False
        self.first_bad = 0.0  # when the first bad ending came in, monotonic
        self.stopping = False
        self.stop_deadline = float("inf")
        self.servers_grace_seconds: float | None = (
            None  # what servers are given that go on until the workers have ended
        )
        self.interrupts = 0
        self.verdict = Verdict(plan, self.recovery)
        self.log_lost = False  # and said so
        self.warnings: list[str] = []
        self.hang_detector = HangDetector(plan, hang_timeout_seconds, self._send, console, self.warnings)
        self.watch = performance_monitor.PerformanceMonitor(plan, self._warn, self._host_of)
        self.started = time.time()

    @property
    def is_local(self) -> bool:
        return all(host.name == "localhost" for host in self.plan.hosts)

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> results.Result:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
        try:
            with contextlib.closing(self.selector), signals.heard(self.selector, numbers, self._hear_signal):
                self._run()
        except _NotStarted as failed:  # hosts are asked where a signal interrupts that
            if not self.interrupts:
                raise preflight.diagnose(self.plan, failed.hosts, self.console.say) or failed.error from None
        return self._result()

    def _run(self) -> None:
        entrance: listener.Door | None = None
        try:
            entrance = self._listen()
            self.engine = self._start_engine(entrance)
            self._watch(self.engine, entrance)
        finally:
            self._say_goodbye()
            self.hang_detector.close()
            if entrance:
                entrance.close()
            for state in self.ranks:
                state.close_files()
                if state.channel:
                    state.channel.close()

    def _listen(self) -> listener.Door:
        """Listen on the addresses by which the hosts reach this machine, and on no others."""
        addresses = set(self.plan.listen)
        if not addresses:
            addresses = {"127.0.0.1"} if self.is_local else local_addresses.own_addresses(self.plan)
        return listener.Door(self.selector, self.token, addresses, self._welcome)

    def _start_engine(self, entrance: listener.Door) -> EngineProcess:
        engine = EngineProcess(self.plan, token=self.token, addresses=entrance.addresses)
        if self.is_local:  # there are no daemons
            engine.has_begun()
        return engine

    def _may_try_again(self, failed: EngineProcess) -> bool:
        """Whether the engine failed before any rank called back, for no reason that would be there again, and for the first time."""
        if self.tried_again or any(state.hello for state in self.ranks):
            return False
        return self.runtime.may_succeed(failed.words)

    def _try_again(self, failed: EngineProcess, entrance: listener.Door) -> EngineProcess:
        self.tried_again = True
        failed.end(self._turn_once)
        host = self.runtime.lost_host(failed.words)
        where = f" on {host}" if host else ""
        self._warn(f"{self.plan.engine} could not start its daemon{where} and did not say why; trying once more")
        failed.log.rename(self.run_dir / results.FIRST_ENGINE_LOG)
        return self._start_engine(entrance)

    def _watch(self, engine: EngineProcess, entrance: listener.Door) -> None:
        next_ping = 0.0
        for host in self.hosts.values():
            # Its address in the chosen network: one that we reach only if we are in that network, too.
            # Nor by srun, whose hosts need let nobody in by ssh.
            if host.address and self.plan.listen and not self.is_local and self.plan.engine == "mpirun":
                self.liveness.watch(host.name, host.address, host.port)
        begun = start = time.monotonic()
        missing = self.missing
        while not all(state.ending for state in self.ranks):
            self._turn(0.1)
            now = time.monotonic()
            if not self.assigned and (why := self.runtime.queued(engine.log)):
                if start == begun:
                    self.console.say(f"{self.plan.engine} waits for the hosts to be free: {why}")
                start = now
            if self.missing < missing:  # they come, one after the other: of thousands the last may take long
                missing, start = self.missing, max(start, now)
            if now >= next_ping:
                self._ping()
                next_ping = now + PING_SECONDS
            entrance.turn_out(now)
            engine_code = engine.exit_code()
            if engine_code is not None and not self.stopping:
                if not self.assigned and self._may_try_again(engine):
                    self.engine = engine = self._try_again(engine, entrance)
                    start = now
                    continue
                if not self.assigned:
                    self._start_failed(engine, "it ended before every rank had called back")
                if not self.verdict.engine_left:
                    self._hear_all()
                    if not self.stopping and not all(state.ending for state in self.ranks):
                        self._engine_lost(engine, engine_code)
            elif not self.assigned and not self.stopping and now - start > START_SECONDS:
                self._start_failed(
                    engine,
                    f"{self.missing} of {len(self.ranks)} ranks have not called back, and none has for {START_SECONDS:.0f} s",
                )
            spent_seconds = now - begun + self.spent_seconds
            if self.timeout_seconds and spent_seconds > self.timeout_seconds and not self.verdict.is_decided:
                self.console.say(f"the time limit of {self.timeout_seconds:g} s is over; stopping the job")
                self.verdict.stop(124, had_failed=bool(self.first_bad))
                self._stop(self.grace_seconds)
            if not self.stopping and not self.first_bad:
                self.recovery.start_waiting(now)
            if not self.stopping and self.assigned and self.recovery.is_over:
                self._stop(self.grace_seconds)
            if self.first_bad and not self.stopping and now - self.first_bad > self._settle_seconds():
                self._stop(self.grace_seconds)
            self._watch_hosts()
            self._watch_progress(now)
            self.console.tick()
            self._stop_servers()
            if now > self.stop_deadline:
                for state in self.ranks:
                    if not state.ending:
                        self._lost(state, "did not end when it was told to")
            elif self.stopping and engine_code is not None and not self.assigned:
                break

    def _settle_seconds(self) -> float:
        causes = [s.ending for s in self.ranks if s.ending and s.ending.failed and not s.ending.consequence]
        return SETTLE_SECONDS if causes else CAUSE_SECONDS

    def _watch_progress(self, now: float) -> None:
        """When nobody has got on for too long, say who waits for whom, and end the job if that was asked for."""
        if not self.assigned or self.stopping:
            return
        if failure := self.hang_detector.check(now, self.ranks):
            self.verdict.fail(failure)
            self._stop(self.grace_seconds)

    def _turn(self, seconds: float) -> bool:
        """Handle what arrives within `seconds`. Whether anything did."""
        ready = self.selector.select(seconds)
        for key, events in ready:
            handler: Callable[[Any, int], None] = key.data
            handler(key.fileobj, events)
        return bool(ready)

    def _hear_all(self) -> None:
        """Handle what has arrived already, in a second at most: why the engine left is in the ranks' last words."""
        deadline = time.monotonic() + 1.0
        while self._turn(0) and time.monotonic() < deadline:
            pass

    # -- who calls --------------------------------------------------------------------------------------------------

    def _welcome(self, channel: Channel, hello: dict[str, Any]) -> listener.Hear:
        there = 0 <= hello["rank"] < len(self.ranks)
        state: RankState | None = self.started_ranks[hello["rank"]] if there else None
        if hello["world_size"] != len(self.ranks) or state is None:
            raise self._refuse_world(f"the engine started {hello['world_size']} ranks")
        if hello["returns"]:
            if state.channel and not state.channel.closed:
                self._hang_up(state, "its connection broke")
            if self.stopping or self.first_bad or not self.recovery.may_return(state):
                raise ProtocolError(f"rank {hello['rank']} was cut off, and nobody waits for it")
        elif state.channel is not None:
            raise ProtocolError(f"rank {hello['rank']} has called already")
        host = self.hosts[state.plan.host]
        if (hello["local_rank"], hello["local_world_size"]) != (state.plan.local_rank, host.ranks):
            raise self._refuse_world(
                f"rank {hello['rank']} is local rank {hello['local_rank']} of {hello['local_world_size']} on "
                f"{hello['host']}, not {state.plan.local_rank} of {host.ranks} on {state.plan.host}"
            )
        if self.engine:
            self.engine.has_begun()
        state.channel = channel
        state.hello = hello
        state.address = channel.sock.getpeername()[0]
        give_up_on_silence(channel.sock, DEAD_CONNECTION_SECONDS)
        if not self.is_local:
            # By srun, or through a jump host, sshd may not be reached from here; this port is the rank's, or its script's.
            self.liveness.watch(host.name, state.address, host.port, hello["port"])
        self.selector.modify(channel.sock, selectors.EVENT_READ, lambda _s, events: self._attend(state, events))
        if hello["returns"]:
            self.recovery.start_again(state)
        else:
            self.missing -= 1
            if not self.missing and not self.stopping:
                self._assign()
        return lambda kind, payload: self._hear(state, kind, payload)

    def _refuse_world(self, what: str) -> LaunchError:
        return LaunchError(
            f"{what}, but the plan has {len(self.ranks)}: the job is not started",
            hint=f"see {self.run_dir / 'engine.log'}",
        )

    def _assign(self) -> None:
        """Everyone is here: tell each rank what to run."""
        self.assigned = True
        self.hang_detector.start()
        if self.plan.engine == "srun":
            self._tell_few_processors()
        told = assignments(
            self.plan,
            self.ranks,
            host_timeout_seconds=self.liveness.silence_seconds,
            grace_seconds=self.grace_seconds,
            keep_value=self.keep_value,
        )
        for state, assignment in told:
            given = self.script_input if state.plan.rank in self.input_ranks else b""
            for start in range(0, len(given), INPUT_PIECE_BYTES):
                self._send(state, Kind.INPUT, given[start : start + INPUT_PIECE_BYTES])
            state.assignment = assignment
            try:
                self._send(state, Kind.ASSIGN, assignment._asdict())
            except ValueError as error:
                raise LaunchError(
                    f"the command and the environment of rank {state.plan.rank} are too long: {error}",
                    hint="give a long list to the script in a file",
                ) from None

    def _tell_few_processors(self) -> None:
        """Of hosts that were not asked before."""
        if self.asked:
            return
        found = []
        for host in self.hosts.values():
            there = next(state for state in self.ranks if state.plan.host == host.name)
            on_gpus = there.plan.device != "cpu"
            if told := few_processors(there.hello["cpus"], host.ranks, on_gpus=on_gpus):
                found.append((host.name, f"{host.name}: {told}; {MORE_PROCESSORS}"))
        for line in folded(found):
            self._warn(line)

    # -- what ranks say -----------------------------------------------------------------------------------------------

    def _attend(self, state: RankState, events: int) -> None:
        channel = state.channel
        assert channel
        if events & selectors.EVENT_WRITE:
            self._flush(state)
        why = "its connection closed"
        if not channel.closed:  # as it may be since it introduced itself
            try:
                for kind, payload in channel.receive():
                    self._hear(state, kind, payload)
            except (OSError, ProtocolError, ValueError) as error:  # the kernel here has given it up, perhaps
                why = str(error)
                channel.closed = True
            else:
                self.liveness.heard(state.plan.host)
        if channel.closed:
            self._hang_up(state, why)

    def _hear(self, state: RankState, kind: Kind, payload: bytes) -> None:
        if kind in (Kind.OUT, Kind.ERR):
            descriptor = 1 if kind is Kind.OUT else 2
            if problem := state.write(descriptor, payload):
                self._log_lost(problem)
            self.hang_detector.on_progress()
            self.console.rank_output(state.plan.rank, descriptor, payload)
        elif kind is Kind.BEAT:
            beat = json.loads(payload)
            if "ping" in beat:
                state.learn_clock(beat["ping"], beat["time"], time.time())
        elif kind is Kind.STATUS:
            self._note_status(state, payload)
        elif kind is Kind.STACKS:
            self.hang_detector.add_stack(state, payload)
        elif kind is Kind.VALUE:
            self._keep_value(state, payload)
        elif kind is Kind.EXIT and self.assigned:  # before that, the engine's own words tell why it ended its ranks
            self._ended(state, json.loads(payload))

    def _keep_value(self, state: RankState, payload: bytes) -> None:
        """What a rank returns is what the job is for: where it cannot be kept, the job has failed."""
        path = self.run_dir / "ranks" / f"{state.plan.rank}.value"
        try:
            with path.open("ab") as file:
                file.write(payload)
        except OSError as error:
            if not self.verdict.is_decided:
                what = f"what rank {state.plan.rank} returned cannot be kept: {path}: {error.strerror}"
                self.verdict.fail(self._failure_here(what, log=str(path)))
                self._stop(self.grace_seconds)

    def _note_status(self, state: RankState, payload: bytes) -> None:
        for line in payload.splitlines():
            # A script may write anything into its pipe.
            with contextlib.suppress(ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                status = json.loads(line)
                state.step = max(state.step, int(status.get("step", -1)))
                state.closing = state.closing or "closing" in status
                state.independent = state.independent or status.get("independent") is True
                state.prepared = state.prepared or "prepared" in status
                self.hang_detector.on_progress()
                if "measured" in status:
                    self.watch.hear(state.plan.rank, status["measured"])
                if "metrics" in status and status.get("main", state.plan.rank == self.recovery.main):
                    try:
                        with (self.run_dir / "metrics.jsonl").open("ab") as file:
                            file.write(line + b"\n")
                    except OSError as error:
                        self._log_lost(f"{self.run_dir / 'metrics.jsonl'}: {error.strerror}")

    def _warn(self, what: str) -> None:
        self.warnings.append(what)
        self.console.say(f"warning: {what}")

    def _host_of(self, address: str) -> str | None:
        """The host that has an address which leads to its ranks."""
        address = address.removeprefix("::ffff:")
        known = (host.name for host in self.hosts.values() if host.address == address)
        return next(known, None) or next((state.plan.host for state in self.ranks if state.address == address), None)

    def _log_lost(self, problem: str) -> None:
        """A log could not be written, which is no reason to end the job; said once."""
        if not self.log_lost:
            self.log_lost = True
            self.warnings.append(f"logs are not complete: {problem}")
            self.console.say(f"warning: logs are not complete, the job goes on: {problem}")

    def _ended(self, state: RankState, record: dict[str, Any]) -> None:
        state.device = record["device"] or state.device
        state.placed = record["placed"]
        if problem := state.placed.get("problem"):
            self.warnings.append(f"rank {state.plan.rank} on {state.plan.host} ran unbound: {problem}")
        self._settle(
            state,
            record["exit_code"],
            record["signal"],
            record["stopped_by"],
            time_=record["ended"] - self._clock_offset(state.plan.host),
            message=record["message"],
            error=parse_error_record(record["error"]),
        )

    def _lost(self, state: RankState, why: str, lost: Literal["closed", "silence"] = "closed") -> None:
        """The rank is gone without a record."""
        stopped_by = "launcher" if self.stopping else ""
        fault = None if stopped_by else root_cause.fault_in(root_cause.tail(state.error_log))
        self._settle(state, None, fault, stopped_by, time_=time.time(), message=why, lost=lost)

    def _settle(
        self,
        state: RankState,
        exit_code: int | None,
        number: int | None,
        stopped_by: str,
        *,
        time_: float,
        message: str,
        lost: Literal["", "closed", "silence"] = "",
        error: ErrorRecord | None = None,
    ) -> None:
        if state.ending:
            return
        consequence = False
        if not stopped_by and (exit_code or number):
            consequence = root_cause.is_consequence(error, root_cause.tail(state.error_log), number)
        state.ending = RankExit(
            rank=state.plan.rank,
            local_rank=state.plan.local_rank,
            host=state.plan.host,
            exit_code=exit_code,
            signal=number,
            stopped_by=stopped_by,
            closing=state.closing,
            consequence=consequence,
            error=error,
            time=time_,
            message=message,
            lost=lost,
        )
        self.console.finish_rank(state.plan.rank)
        state.close_files()
        if self.first_bad or self.stopping:
            return
        if not state.ending.failed:
            self.recovery.left(state)
        elif not self.recovery.died(state):
            self.first_bad = time.monotonic()

    def _hang_up(self, state: RankState, why: str, lost: Literal["closed", "silence"] = "closed") -> None:
        assert state.channel
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(state.channel.sock)
        state.channel.close()
        if lost == "closed" and not self.assigned and not self.stopping:
            # The engine ends all where one could not start: that one has failed, and is told of when the engine is gone.
            state.channel = None
            self.missing += 1
            return
        self._lost(state, why, lost)

    # -- what ranks are told ------------------------------------------------------------------------------------------

    def _send(self, state: RankState, kind: Kind, payload: dict[str, Any] | bytes) -> None:
        if state.channel and not state.channel.closed and state.channel.proven:
            state.channel.send(kind, payload)
            self._flush(state)

    def _flush(self, state: RankState) -> None:
        channel = state.channel
        assert channel
        try:
            channel.flush()
        except OSError as error:
            channel.closed = True
            self._hang_up(state, str(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.waiting_bytes else 0)
        key = self.selector.get_key(channel.sock)
        if key.events != events:
            self.selector.modify(channel.sock, events, key.data)

    def _watch_hosts(self) -> None:
        for host in self.liveness.vanished():
            why = f"nothing was heard from it for {self.liveness.silence_seconds:g} s, nor did it answer"
            if not self.assigned and not self.stopping:
                self.stopping = True
                raise LaunchError(
                    f"host {host} vanished while the job was starting: {why}",
                    hint="see whether it is up; --drop-bad-hosts starts without it",
                )
            for state in self.ranks:
                if state.plan.host == host and (not state.ending or state.again_at) and state.channel:
                    self._hang_up(state, why, "silence")

    def _clock_offset(self, host: str) -> float:
        """By how much its clock is ahead, as the rank knows that is pinged there."""
        return next(s.clock_offset for s in self.ranks if s.plan.host == host and s.plan.local_rank == 0)

    def _ping(self) -> None:
        for state in self.ranks:
            if state.plan.local_rank == 0 and not state.ending:
                self._send(state, Kind.PING, {"time": time.time()})

    # -- the end ------------------------------------------------------------------------------------------------------

    def _hear_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._interrupted(number)
        elif number == signal.SIGUSR1:  # the user's, or Slurm's before its limit: a chance to save
            for state in self.ranks:
                if not state.ending and state.plan.role == "worker":
                    self._send(state, Kind.SIGNAL, {"signal": int(signal.SIGUSR1)})

    def _interrupted(self, number: int) -> None:
        # As a terminal closes its shell passes one SIGHUP on, and the kernel sends another.
        if number == signal.SIGHUP and self.interrupts:
            return
        self.interrupts += 1
        if not all(state.ending and not state.ending.failed for state in self.ranks):  # else it has reached its end
            self.verdict.stop(128 + number, had_failed=bool(self.first_bad))
        if self.interrupts == 1:
            self.console.say(f"{signal_name(number)}: stopping the job (once more: at once)")
            self._stop(self.grace_seconds)
        else:
            self._stop(0.0)
            if self.engine:
                self.engine.has_begun()

    def _stop(self, grace_seconds: float) -> None:
        """Ends the workers, and then the servers, which a script asks as it saves in its last seconds."""
        self.stopping = True
        self.servers_grace_seconds = grace_seconds
        self._tell_to_stop("worker", grace_seconds)
        self._stop_servers()
        if not self.assigned:
            for state in self.ranks:
                if not state.ending:
                    self._lost(state, "the job was stopped before it had started")

    def _stop_servers(self) -> None:
        grace_seconds = self.servers_grace_seconds
        workers_go_on = self.assigned and any(not s.ending for s in self.ranks if s.plan.role == "worker")
        if grace_seconds is not None and not workers_go_on:
            self.servers_grace_seconds = None
            self._tell_to_stop("server", grace_seconds)

    def _tell_to_stop(self, role: str, grace_seconds: float) -> None:
        for state in self.ranks:
            if state.plan.role == role and not state.ending:
                order = {"signal": int(signal.SIGTERM), "grace_seconds": grace_seconds}
                self._send(state, Kind.STOP, order)
        self.stop_deadline = time.monotonic() + grace_seconds + 3.0

    def _start_failed(self, engine: EngineProcess, what: str) -> NoReturn:
        missing = [state for state in self.ranks if state.channel is None]
        missing = [state for state in missing if not state.hello] or missing  # not those that the engine took along
        hosts = list(dict.fromkeys(state.plan.host for state in missing))
        self.stopping = True
        words = engine.words.strip()
        if explained := self.runtime.explain(words):
            raise LaunchError(explained[0], hint=explained[1])
        failed = LaunchError(
            f"the job did not start: {what} ({len(missing)} of {len(self.ranks)} missing, on {name_hosts(hosts)})"
            + (f"\n{words}" if words else ""),
            hint=f"the engine's own words are in {engine.log}",
        )
        raise failed if self.is_local else _NotStarted(hosts, failed)

    def _engine_lost(self, engine: EngineProcess, code: int) -> None:
        """The engine ended under its ranks; without it MPI is broken, so the job ends too, unless it does without MPI."""
        causes = [e for e in self.recovery.endings if e.failed and not e.stopped_by and not e.consequence]
        lost = self.runtime.lost_host(engine.words)
        if self.plan.mode != "async" and code >= 0 and not lost and causes:
            self._stop(self.grace_seconds)  # it left because of that rank, and both were seen at once
            return
        where = socket.gethostname()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if lost in self.hosts:
            where, how = lost, f"lost its daemon on {lost}, or the ssh connection to it,"
        what = f"{self.plan.engine} {how} while its ranks were running"
        failure = self._failure_here(what, log=str(engine.log), host=where)
        self.verdict.engine_left = failure
        if self.plan.mode == "async":
            self._warn(f"{failure.message}; mode async needs it no more")
        else:
            self.verdict.fail(failure)
            self._stop(self.grace_seconds)

    def _failure_here(self, message: str, *, log: str, host: str = "") -> results.Failure:
        """Of no rank's, but of this machine, or of another one."""
        return results.Failure(
            rank=None, host=host or socket.gethostname(), time=time.time(), exit_code=None, signal=None, message=message,
            traceback="", log=log,
        )  # fmt: skip

    def _say_goodbye(self) -> None:
        """Tell the ranks that nothing more is wanted, and see the engine go, by force if it must."""
        for state in self.ranks:
            self._send(state, Kind.END, {})
        if self.engine:
            if self.engine.is_starting:
                self.console.say(
                    f"waiting for daemons that are being started, {STARTING_SECONDS:.0f} s at most (Ctrl-C: no longer)"
                )
            self.engine.end(self._turn_once)

    def _turn_once(self) -> None:
        with contextlib.suppress(OSError, DistribError):
            self._turn(0.01)

    def _idle_options(self) -> str:
        """That options were given which nothing in the script has heard of; empty where that is not so."""
        asked = strategy.asked(self.plan.strategy)
        if not asked or self.plan.mode == "async" or any(state.prepared for state in self.ranks):  # its servers say it
            return ""
        return (
            f"{', '.join(asked)} changed nothing: the script has given no model that learns to job.prepare "
            "(README.md, In a script)"
        )

    def _independent_copies(self) -> str:
        """Return a warning if every worker trained by itself, else an empty string."""
        workers = [state for state in self.ranks if state.plan.role == "worker"]
        if len(workers) < 2 or not all(state.independent for state in workers):
            return ""
        return (
            f"no rank called distrib.init() or init_process_group(): {len(workers)} independent copies of the script ran; "
            "job = distrib.init() and job.prepare(...) make them train one model"
        )

    def _result(self) -> results.Result:
        if self.engine and (why := self.verdict.hear_engine(self.engine.words)):
            self.warnings.append(why)
            self.console.say(why)
        status, code, failure = self.verdict.final({state.plan.rank: state.error_log for state in self.ranks})
        if status == "succeeded":
            for warning in filter(None, (self._independent_copies(), self._idle_options())):
                self._warn(warning)
        return results.Result(
            status=status,
            exit_code=code,
            world_size=self.plan.world_size,
            hosts=tuple(host.name for host in self.plan.hosts),
            seconds=time.time() - self.started,
            restarts=sum(state.restarts for state in self.ranks),
            ranks=tuple(state.result() for state in self.ranks),
            first_failure=failure,
            warnings=tuple(self.warnings),
            predicted=self.plan.forecast.predicted if self.plan.forecast else None,
            measured=self.watch.measured,
        )
