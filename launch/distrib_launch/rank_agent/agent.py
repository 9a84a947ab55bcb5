"""Rank agent: the process around each rank, `python -m distrib_launch.rank_agent`, started by the engine on every host.

The agent connects to the launcher, receives its assignment, and runs the script in a session of its own. It forwards output and progress,
and reports the script's exit. All processes of the rank end with the script, after the loss of the launcher, and if the agent is killed.
Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from distrib.environment import DISTRIB_CONTROL, DISTRIB_KEY, DISTRIB_SERVERS, DISTRIB_TOKEN
from distrib.utils import signals
from distrib.utils.framing import ProtocolError
from distrib.utils.mpi_env import rank_identity
from distrib.utils.netif import interface_of
from distrib_launch.rank_agent import host_agents, reaper
from distrib_launch.rank_agent.control_channel import (
    Assignment,
    Channel,
    Kind,
    SilenceMonitor,
    connect_to_launcher,
    reserve_port,
)
from distrib_launch.rank_agent.forwarding import script_environment
from distrib_launch.rank_agent.script_process import Refused, ScriptProcess
from distrib_launch.rank_agent.stack_dump import StackDumper


class AgentSettings(NamedTuple):
    """Times and limits of the agent."""

    heartbeat_seconds: float = 1.0
    """Interval of the heartbeats to the launcher."""
    launcher_silence_seconds: float = 6.0
    """Time after which a rank that cannot reach the launcher ends: longer than a few lost packets, short enough to free the host."""
    lost_grace_seconds: float = 2.0
    """Time between SIGTERM and SIGKILL if the launcher is lost."""
    buffer_limit_bytes: int = 16 << 20
    """Limit of the output that waits for a slow network; beyond it the script blocks in its `print`."""
    drain_seconds: float = 2.0
    """Longest time for the rest of the output of a script that has ended."""
    rejoin_limit_seconds: float = 3600.0
    """Time in which a rank that was cut off tries to rejoin a job that continues without it."""
    rejoin_interval_seconds: float = 2.0
    """Time between two attempts to rejoin."""


SETTINGS = AgentSettings()


class RankAgent:
    """Agent of one rank: runs the script and owns the channel to the launcher.

    Args:
        environ: Environment in which the engine started this rank.
        guard: Guard of the rank's processes.
        engine: Process that the engine started for this rank, with whose end the rank ends. None if the engine signals this process.
    """

    def __init__(self, environ: dict[str, str], guard: reaper.RankGuard, engine: int | None = None) -> None:
        self._guard, self._engine = guard, engine
        identity = rank_identity(environ)
        if identity is None:
            raise SystemExit("distrib: neither mpirun nor srun started this process: its environment has no rank")
        self._identity = identity
        self._environ = script_environment(environ)
        self._token = environ[DISTRIB_TOKEN]
        self._channel = connect_to_launcher(environ[DISTRIB_CONTROL], self._token)
        self._launcher = self._channel.sock.getpeername()[:2]
        self._silence = SilenceMonitor(self._channel.sock, SETTINGS.launcher_silence_seconds)
        self._said_hello = False
        self._port = reserve_port()
        self._selector = selectors.DefaultSelector()
        self._stacks = StackDumper(self._selector, self._send_stack)
        self._script: ScriptProcess | None = None
        self._script_input: int | None = None
        self._device = ""
        self._stopped_by = ""  # "launcher", "engine" or "lost"
        self._grace_seconds = 0.0  # after a signal from the engine
        self._kill_at = float("inf")
        self._may_return = False  # the job continues without this rank if the launcher is lost
        self._rejoin_at = self._give_up_at = float("inf")
        self._engine_pid = os.getppid()
        self._sent_exit = False
        self._done = False  # the launcher needs nothing more, or is lost

    @property
    def _is_away(self) -> bool:
        """Return True if the rank was cut off and has had no new assignment since."""
        return self._give_up_at < float("inf")

    @property
    def _running(self) -> ScriptProcess | None:
        """Return the script whose exit record was not sent yet, None if there is none."""
        return None if self._sent_exit else self._script

    def run(self) -> int:
        """Run until the launcher has everything that it needs. Return the exit code of the agent."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (*signals.STOPPING, *signals.FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._selector.register(wake_read, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._channel.sock, selectors.EVENT_READ, self._on_messages)
        next_beat = 0.0
        while not self._done:
            for key, _ in self._selector.select(timeout=0.2):
                key.data(key.fd)
            now = time.monotonic()
            if self._channel.proven and not self._channel.closed:
                if not self._said_hello:
                    self._channel.send(Kind.HELLO, self._hello())
                    self._said_hello = True
                elif now >= next_beat:
                    self._channel.send(Kind.HEARTBEAT, {"time": time.time()})
                    next_beat = now + SETTINGS.heartbeat_seconds
            self._flush()
            if self._engine and not Path(f"/proc/{self._engine}").exists():
                self._engine = None
                self._stop("engine", signal.SIGTERM, self._grace_seconds)
            if script := self._running:
                if script.has_ended:
                    self._finish(script)
                elif now >= self._kill_at:
                    script.signal(signal.SIGKILL)
            elif self._is_away and (now >= self._give_up_at or os.getppid() != self._engine_pid):
                self._done = True
            elif now >= self._rejoin_at:
                self._rejoin()
        if script := self._running:
            self._finish(script)
        if self._script:
            self._script.close()
        if self._stopped_by == "lost" and not self._may_return:
            host_agents.end_engine_daemon()
        return 0

    def _hello(self) -> dict[str, Any]:
        address = self._channel.sock.getsockname()[0]
        return {
            **self._identity._asdict(), "host": socket.gethostname(), "port": self._port.getsockname()[1],
            "returns": self._may_return, "cpus": len(os.sched_getaffinity(0)), "interface": interface_of(address),
        }  # fmt: skip

    # -- events -------------------------------------------------------------------------------------------------

    def _on_signals(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(descriptor, 64):
                if number in signals.STOPPING:
                    self._stop("engine", signal.SIGTERM, self._grace_seconds)
                elif number in signals.FORWARDED and self._script:
                    self._script.signal(number)  # Slurm's --signal reaches the tasks, which are the agents
                elif number == signal.SIGCHLD and self._script:
                    reaper.wait_for_orphans(self._script.child_pid)

    def _on_messages(self, _: int) -> None:
        is_refusal, is_wrong = True, False
        try:
            for kind, payload in self._channel.receive():
                if kind is Kind.INPUT:
                    self._keep_input(payload)
                    continue
                self._obey(kind, json.loads(payload) if payload else {})
        except OSError:  # the launcher died or the network broke, so a message on stderr would not arrive
            self._channel.closed = True
            is_refusal = False
        except (ProtocolError, ValueError) as error:
            with contextlib.suppress(OSError):  # the engine may be gone
                print(f"distrib: rank {self._identity.rank}: control channel: {error}", file=sys.stderr, flush=True)
            self._channel.closed = is_wrong = True
        if self._channel.closed and not self._done:
            is_refused = is_refusal and self._is_away and self._said_hello
            self._on_launcher_lost(refused=is_refused or (is_wrong and not self._channel.proven))

    def _obey(self, kind: Kind, order: dict[str, Any]) -> None:
        if kind is Kind.ASSIGN and not self._done:
            try:
                self._start(Assignment(**order))
            except Refused as why:
                self._send_exit(exit_code=1, number=None, message=str(why))
            except OSError as error:  # too many open files or processes
                message = f"{socket.gethostname()}: cannot start rank {self._identity.rank}: {error}"
                self._send_exit(exit_code=1, number=None, message=message)
        elif kind is Kind.PING:
            self._channel.send(Kind.HEARTBEAT, {"time": time.time(), "ping": order["time"]})
        elif kind is Kind.SIGNAL and self._script:
            self._script.signal(order["signal"])
        elif kind is Kind.TAKE_STACKS and self._running:
            self._stacks.take(self._running.pid)
        elif kind is Kind.EVENT and self._script:
            self._script.send_event(order)
        elif kind is Kind.STOP:
            self._stop("launcher", order["signal"], order["grace_seconds"])
        elif kind is Kind.END:
            self._done = True

    def _keep_input(self, chunk: bytes) -> None:
        """Keep a part of the script's standard input in memory: there may be no writable folder."""
        if self._script_input is None:
            self._script_input = os.memfd_create("distrib-input")
        with open(self._script_input, "ab", closefd=False) as file:
            file.write(chunk)

    # -- the launcher is lost -----------------------------------------------------------------------------------

    def _on_launcher_lost(self, *, refused: bool = False) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._channel.sock)
        self._stopped_by = "lost"
        if script := self._running:
            self._stop("lost", signal.SIGTERM, SETTINGS.lost_grace_seconds)
            deadline = time.monotonic() + SETTINGS.lost_grace_seconds
            while not script.has_ended and time.monotonic() < deadline:
                time.sleep(0.02)
        # A launcher to which many connections came drops the oldest that have not proven the token.
        may_retry = self._may_return or not self._channel.proven
        if refused or not may_retry:
            self._done = True
        elif self._is_away:  # the network broke again
            self._rejoin_at = time.monotonic() + SETTINGS.rejoin_interval_seconds
        else:
            self._rejoin_at = time.monotonic()
            self._engine_pid = os.getppid()
            self._give_up_at = self._rejoin_at + SETTINGS.rejoin_limit_seconds

    def _rejoin(self) -> None:
        """Try to reconnect; the launcher sends a new assignment, or closes the connection."""
        self._rejoin_at = time.monotonic() + SETTINGS.rejoin_interval_seconds
        try:
            sock = socket.create_connection(self._launcher, timeout=SETTINGS.rejoin_interval_seconds)
        except ConnectionRefusedError:
            self._done = True
            return
        except OSError:
            return
        self._rejoin_at = float("inf")
        self._stopped_by, self._said_hello = "", False
        if self._script:
            self._script.close()
            self._script = None
        self._channel.close()
        self._channel = Channel(sock, self._token, listener=False)
        self._silence = SilenceMonitor(sock, SETTINGS.launcher_silence_seconds)
        self._selector.register(sock, selectors.EVENT_READ, self._on_messages)

    # -- the script ---------------------------------------------------------------------------------------------

    def _start(self, assignment: Assignment) -> None:
        """Run the script; in mode async it may replace one that has ended."""
        if self._script:
            self._script.close()
            self._script = None
        self._stopped_by, self._kill_at, self._sent_exit = "", float("inf"), False
        self._grace_seconds = assignment.grace_seconds
        self._may_return, self._give_up_at = assignment.may_return, float("inf")
        silence_seconds = max(SETTINGS.launcher_silence_seconds, 2 * assignment.host_timeout_seconds)
        self._silence = SilenceMonitor(self._channel.sock, silence_seconds)
        environ = {**self._environ, **assignment.environment}
        if DISTRIB_SERVERS in environ:
            environ[DISTRIB_KEY] = hmac.digest(self._token.encode(), b"parameter servers", "sha256").hex()
        self._script = ScriptProcess(
            assignment, environ, self._identity, guard=self._guard,
            script_input=self._script_input, selector=self._selector, on_output=self._send_output,
        )  # fmt: skip
        self._device = self._script.device

    def _stop(self, who: str, number: int, grace_seconds: float) -> None:
        self._stopped_by = self._stopped_by or who
        if self._script is None or self._is_away:
            if who == "engine":
                # Without an exit record it would look as if this process had been killed.
                if not self._sent_exit and self._channel.proven and not self._is_away:
                    self._send_exit(exit_code=128 + number, number=number)
                self._done = True
            return
        self._script.signal(number)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)

    def _finish(self, script: ScriptProcess) -> None:
        """End the script's remaining processes, send the rest of its output, its result and its exit record."""
        ended = time.time()
        code = script.end()
        deadline = time.monotonic() + SETTINGS.drain_seconds
        while time.monotonic() < deadline and script.read_rest() and self._flush(wait=True):
            pass
        for chunk in script.result_chunks():
            if not self._flush(wait=True):
                break
            self._channel.send(Kind.RESULT, chunk)
        self._send_exit(
            exit_code=code if code >= 0 else 128 - code,
            number=-code if code < 0 else None,
            message="" if self._stopped_by else script.why_ended(code),
            ended=ended,
        )

    # -- to the launcher ----------------------------------------------------------------------------------------

    def _send_output(self, kind: Kind, data: bytes) -> None:
        if not self._channel.closed:
            self._channel.send(kind, data)

    def _send_stack(self, dump: bytes) -> None:
        if self._channel.proven and not self._channel.closed and not self._is_away:
            self._channel.send(Kind.STACKS, dump)

    def _send_exit(self, *, exit_code: int, number: int | None, message: str = "", ended: float = 0.0) -> None:
        self._sent_exit = True
        if self._channel.closed:
            return
        script = self._script
        record = {
            "exit_code": exit_code, "signal": number, "started": script.started if script else 0.0,
            "ended": ended or time.time(), "stopped_by": self._stopped_by, "message": message, "device": self._device,
            "placed": script.placed if script else {}, "error": script.error() if script else "",
        }  # fmt: skip
        self._channel.send(Kind.EXIT, record)
        self._flush()

    def _flush(self, *, wait: bool = False) -> bool:
        """Send as much as the network accepts; stop reading the script while too much waits. Return False if the launcher is lost."""
        if self._channel.closed:
            return False
        try:
            self._send_pending()
            while wait and self._channel.waiting_bytes > SETTINGS.buffer_limit_bytes // 2:
                with selectors.DefaultSelector() as writable:
                    writable.register(self._channel.sock, selectors.EVENT_WRITE)
                    writable.select(SilenceMonitor.LOOK_SECONDS)
                self._send_pending()
        except OSError:
            self._channel.closed = True
            self._on_launcher_lost()
            return False
        waiting = self._channel.waiting_bytes
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if self._selector.get_key(self._channel.sock).events != events:
            self._selector.modify(self._channel.sock, events, self._on_messages)
        if self._script:
            self._script.set_reading(enabled=waiting <= SETTINGS.buffer_limit_bytes)
        return True

    def _send_pending(self) -> None:
        """Send queued frames. Raises OSError if the launcher is lost."""
        if self._silence.is_over_limit():
            raise TimeoutError
        self._channel.flush()


def main() -> int:
    """Run the agent of this process's rank. Return its exit code."""
    folder, is_detached = host_agents.take_options()
    guard = reaper.HostGuard()
    if not folder and not is_detached:
        exit_code = RankAgent(dict(os.environ), guard.connect()).run()
        guard.wait()
        return exit_code
    engine, environ = host_agents.fork_agents(folder, guard, is_detached=is_detached)
    exit_code = RankAgent(environ, guard.connect(), None if is_detached else engine).run()
    os._exit(exit_code)  # the end of the interpreter would copy most of the memory that the agents share
