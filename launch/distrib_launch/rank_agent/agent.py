"""The small process around each rank: `python -m distrib_launch.rank_agent`, started by the engine on every host.

It calls the launcher back, learns what to run, runs it in a session of its own, passes its output and progress on, and
tells how it ended. When the script ends, or the launcher is gone, or this process itself is killed, every process of
the rank goes too. Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distrib.environment import (
    DISTRIB_CONTROL,
    DISTRIB_DEVICE,
    DISTRIB_EVENTS_FD,
    DISTRIB_KEY,
    DISTRIB_PROCESS_TAG,
    DISTRIB_RESULT_FD,
    DISTRIB_SERVER,
    DISTRIB_SERVERS,
    DISTRIB_STATUS_FD,
    DISTRIB_TOKEN,
    TORCHELASTIC_ERROR_FILE,
)
from distrib.utils.framing import ProtocolError
from distrib.utils.mpi_env import identity
from distrib.utils.ranges import ranges
from distrib_launch.rank_agent import affinity, daemonize, reaper
from distrib_launch.rank_agent.control_channel import Assignment, Channel, Kind, Silence
from distrib_launch.rank_agent.oom import OutOfMemory
from distrib_launch.rank_agent.sockets import call_back, hold_port, interface_with
from distrib_launch.rank_agent.stack_dump import PR_SET_PTRACER, Spies

BEAT_SECONDS = 1.0
LAUNCHER_SILENCE_SECONDS = 6.0
"""After which a rank that cannot reach the launcher ends: long enough for lost packets, not for an orphan."""

OPEN_FILES = 65536

BUFFER_LIMIT_BYTES = 16 << 20
"""Output kept for the launcher while the wire is slow; beyond it the script waits in its `print`."""

CHUNK_BYTES = 1 << 18
RUN_SCRIPT = Path(__file__).with_name("run_script.py")
ERROR_LIMIT_BYTES = 1 << 20
DRAIN_SECONDS = 2.0

RETURN_SECONDS = 3600.0
"""How long a rank that was cut off asks to be let in again, by a job that goes on without it."""
RETURN_INTERVAL_SECONDS = 2.0


class Refused(Exception):
    """Why this rank cannot run its script here."""


class Rank:
    """One rank's script and the channel to the launcher; `run` returns when the launcher has all it needs."""

    def __init__(self) -> None:
        environ = dict(os.environ)
        self.environ = {k: v for k, v in environ.items() if k not in (DISTRIB_CONTROL, DISTRIB_TOKEN)}
        self.rank, self.world_size, self.local_rank, self.local_world_size = identity(environ)
        self.token = environ[DISTRIB_TOKEN]
        self.channel = call_back(environ[DISTRIB_CONTROL], self.token)
        self.launcher = self.channel.sock.getpeername()[:2]
        self.introduced = False
        self.silence = Silence(self.channel.sock, LAUNCHER_SILENCE_SECONDS)
        self.port = hold_port()
        self.key = hmac.digest(self.token.encode(), b"parameter servers", "sha256").hex()
        self.selector = selectors.DefaultSelector()
        self.child: subprocess.Popen[bytes] | None = None
        self.guard: reaper.Guard | None = None
        self.mark = ""
        self.started = 0.0
        self.device = ""
        self.stopping = ""  # who asked for the end: "launcher", "engine", "lost"
        self.may_return = False  # where the launcher is lost, the job goes on without this rank
        self.call_at = self.give_up_at = float("inf")  # when it tries to return, and until when
        self.grace_seconds = 0.0  # between SIGTERM and SIGKILL when the engine ends the job; known with the script
        self.kill_at = float("inf")
        self.streams: dict[int, Kind] = {}
        self.parent = os.getppid()
        self.finished = False  # the exit record is sent
        self.ended = False  # the launcher has said goodbye, or is gone
        self.tail = bytearray()
        self.placed: dict[str, Any] = {}
        self.input: int | None = None  # what the launcher has for the script's standard input
        self.value: int | None = None  # what the script has for the launcher
        self.news: socket.socket | None = None  # by which a parameter server hears what the launcher knows of workers
        self.error_file: int | None = None  # to which the script's process writes its uncaught exception
        self.memory: OutOfMemory | None = None
        self.spies = Spies(self.selector, self._tell_stack)

    @property
    def is_away(self) -> bool:
        """Whether it was cut off, and has not been told to go on since."""
        return self.give_up_at < float("inf")

    # -- life ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (
            signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2,
        ):  # fmt: skip
            signal.signal(number, lambda *_: None)
        self.selector.register(wake_read, selectors.EVENT_READ, self._wake)
        self.selector.register(self.channel.sock, selectors.EVENT_READ, self._converse)
        next_beat = 0.0
        while not self.ended:
            for key, _ in self.selector.select(timeout=0.2):
                key.data(key.fd)
            now = time.monotonic()
            if self.channel.proven and not self.channel.closed:
                if not self.introduced:
                    self.channel.send(Kind.HELLO, self._hello())
                    self.introduced = True
                elif now >= next_beat:
                    self.channel.send(Kind.HEARTBEAT, {"time": time.time()})
                    next_beat = now + BEAT_SECONDS
            self._flush()
            if self.child and not self.finished:
                if self.child.poll() is not None:
                    self._finish()
                elif now >= self.kill_at:
                    self._signal_child(signal.SIGKILL)
            elif self.is_away and (now >= self.give_up_at or os.getppid() != self.parent):
                self.ended = True
            elif now >= self.call_at:
                self._call_again()
        if self.child and not self.finished:
            self._finish()
        if self.guard:
            self.guard.dismiss()
        if self.stopping == "lost" and not self.may_return:
            self._end_daemon()
        return 0

    def _hello(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "world_size": self.world_size,
            "local_rank": self.local_rank, "local_world_size": self.local_world_size,
            "host": socket.gethostname(), "port": self.port.getsockname()[1], "returns": self.may_return,
            "cpus": len(os.sched_getaffinity(0)), "interface": interface_with(self.channel.sock.getsockname()[0]),
        }  # fmt: skip

    # -- what arrives -------------------------------------------------------------------------------------------

    def _wake(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(descriptor, 64):
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    self._stop("engine", signal.SIGTERM, self.grace_seconds)
                elif number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's --signal goes to its tasks, which we are
                    self._signal_child(number)

    def _converse(self, _: int) -> None:
        hung_up = True
        try:
            for kind, payload in self.channel.receive():
                if kind is Kind.INPUT:
                    self._keep_input(payload)
                    continue
                self._obey(kind, json.loads(payload) if payload else {})
        except OSError:  # the launcher is gone, or the wire is broken: the engine could not pass on a word about it
            self.channel.closed = True
            hung_up = False
        except (ProtocolError, ValueError) as error:
            with contextlib.suppress(OSError):  # the engine may be gone
                print(f"distrib: rank {self.rank}: control channel: {error}", file=sys.stderr, flush=True)
            self.channel.closed = True
        if self.channel.closed and not self.ended:
            self._launcher_lost(turned_away=hung_up and self.is_away and self.introduced)

    def _obey(self, kind: Kind, order: dict[str, Any]) -> None:
        if kind is Kind.ASSIGN and not self.ended:
            try:
                self._start(Assignment(**order))
            except Refused as why:
                self._refuse(str(why))
            except OSError as error:  # too many open files or processes
                self._signal_child(signal.SIGKILL)
                self._refuse(f"{socket.gethostname()}: cannot start rank {self.rank}: {error}")
        elif kind is Kind.PING:
            self.channel.send(Kind.HEARTBEAT, {"time": time.time(), "ping": order["time"]})
        elif kind is Kind.SIGNAL:
            self._signal_child(order["signal"])
        elif kind is Kind.TAKE_STACKS:
            if self.child and not self.finished:
                self.spies.take(self.child.pid)
        elif kind is Kind.EVENT and self.news:
            with contextlib.suppress(OSError):
                self.news.send(json.dumps(order).encode())
        elif kind is Kind.STOP:
            self._stop("launcher", order["signal"], order["grace_seconds"])
        elif kind is Kind.END:
            self.ended = True

    def _keep_input(self, piece: bytes) -> None:
        """A piece of what the script reads; it stays in memory, for there may be no folder to write to."""
        if self.input is None:
            self.input = os.memfd_create("distrib-input")
        with open(self.input, "ab", closefd=False) as file:
            file.write(piece)

    def _launcher_lost(self, *, turned_away: bool = False) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(self.channel.sock)
        self.stopping = "lost"
        if self.child and not self.finished:
            self._stop("lost", signal.SIGTERM, 2.0)
            deadline = time.monotonic() + 2.0
            while self.child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        if not self.may_return or turned_away:
            self.ended = True
        elif self.is_away:  # the wire broke again
            self.call_at = time.monotonic() + RETURN_INTERVAL_SECONDS
        else:
            self.call_at = time.monotonic()
            self.parent = os.getppid()  # the engine's process, if it is there still
            self.give_up_at = self.call_at + RETURN_SECONDS

    def _call_again(self) -> None:
        """Try to return to the launcher, which tells what to run as it did at first, or hangs up."""
        self.call_at = time.monotonic() + RETURN_INTERVAL_SECONDS
        try:
            sock = socket.create_connection(self.launcher, timeout=RETURN_INTERVAL_SECONDS)
        except ConnectionRefusedError:
            self.ended = True
            return
        except OSError:
            return
        self.call_at = float("inf")
        self.stopping = ""
        self.introduced = False
        for descriptor in list(self.streams):  # what the script before has left unread, where much waited for the wire
            self._forget(descriptor)
        self.channel.close()
        self.channel = Channel(sock, self.token, listener=False)
        self.silence = Silence(sock, LAUNCHER_SILENCE_SECONDS)
        self.selector.register(sock, selectors.EVENT_READ, self._converse)

    def _end_daemon(self) -> None:
        """On a host that was cut off, the engine's daemon does not notice for minutes: end it.

        Not where the job goes on: should the host be reached again, the engine would end all ranks for it.
        """
        with contextlib.suppress(OSError):
            parent = os.getppid()
            if daemonize.FLAG in sys.argv:
                parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            if Path(f"/proc/{parent}/comm").read_text().strip() == "prted":
                os.kill(parent, signal.SIGKILL)
                folder = Path(self.environ.get("PMIX_SERVER_TMPDIR", ""))
                if folder.name == f"prted.{parent}":
                    import shutil  # what takes long to load is loaded when it is needed

                    shutil.rmtree(folder, ignore_errors=True)

    # -- the script ---------------------------------------------------------------------------------------------

    def _start(self, assignment: Assignment) -> None:
        """Run what is assigned. Raises Refused where it cannot be, and OSError where too many files are open, or processes there."""
        if self.guard:
            self._forget_start()
        self.grace_seconds = assignment.grace_seconds
        self.may_return, self.give_up_at = assignment.may_return, float("inf")
        self.silence = Silence(self.channel.sock, max(LAUNCHER_SILENCE_SECONDS, 2 * assignment.host_timeout_seconds))
        environ = {**self.environ, **assignment.environment}
        if DISTRIB_SERVERS in environ:
            environ[DISTRIB_KEY] = self.key
        self.mark = environ[DISTRIB_PROCESS_TAG] = assignment.tag
        gpus = self._choose_device(assignment, environ)
        share = affinity.share_of(
            affinity.read_machine(), self.local_rank, assignment.cpu_sharers, environ, assignment.bind, on_gpus=gpus > 0
        )
        environ.setdefault("OMP_NUM_THREADS", str(share.threads))
        with self._channels(assignment, environ) as (status, passed):
            self.child = self._spawn(assignment, environ, share, passed)
        mark, session = self.mark, self.child.pid
        self.guard = reaper.Guard(lambda: reaper.sweep(mark, session))
        assert self.child.stdout and self.child.stderr
        for descriptor, kind in (
            (self.child.stdout.fileno(), Kind.OUT),
            (self.child.stderr.fileno(), Kind.ERR),
            (status, Kind.STATUS),
        ):
            os.set_blocking(descriptor, False)
            self.streams[descriptor] = kind
            self.selector.register(descriptor, selectors.EVENT_READ, self._pass_on)

    def _forget_start(self) -> None:
        """It has run before, and is started again."""
        assert self.guard
        self.guard.dismiss()
        if self.error_file is not None:
            os.close(self.error_file)
        self.guard, self.finished, self.stopping, self.kill_at = None, False, "", float("inf")
        self.tail.clear()

    def _choose_device(self, assignment: Assignment, environ: dict[str, str]) -> int:
        """Set this rank's device, and what `environ` says of devices; returns how many GPUs its host shows the job."""
        gpus = affinity.count_gpus(environ)
        if gpus and assignment.gpus is not None:
            try:
                environ["CUDA_VISIBLE_DEVICES"] = affinity.take_gpus(environ, assignment.gpus, gpus)
            except IndexError as missing:
                raise Refused(f"{socket.gethostname()} has no GPU {missing}: it shows {gpus}, counted from 0") from None
            gpus = len(assignment.gpus)
        self.device = assignment.device
        if self.device == "auto":
            self.device = f"cuda:{self.local_rank}" if gpus else "cpu"
        if self.device.startswith("cuda:") and int(self.device[5:]) >= gpus:
            raise Refused(
                f"rank {self.rank} wants {self.device}, but {socket.gethostname()} shows {gpus} GPU(s) for "
                f"{self.local_world_size} rank(s); give the host fewer slots, or run on its CPUs with "
                "-x CUDA_VISIBLE_DEVICES="
            )
        environ[DISTRIB_DEVICE] = self.device
        if gpus:  # count them as nvidia-smi does, not the fastest first
            environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        if self.device == "cpu":
            # A rank that waits must not take the core from one that computes.
            environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        own = Path(sys.executable).parent.parent
        if not Path(environ.get("OPAL_PREFIX", "/")).is_dir() and (own / "bin/prted").exists():
            environ["OPAL_PREFIX"] = str(own)  # Open MPI is elsewhere here than where the job was started
        return gpus

    @contextlib.contextmanager
    def _channels(self, assignment: Assignment, environ: dict[str, str]) -> Iterator[tuple[int, list[int]]]:
        """Open what the script talks through besides its output, and name it in `environ`.

        Yields where its status is read, and the descriptors to pass on to it, whose ends here are closed then.
        """
        status, theirs = os.pipe()
        os.set_blocking(theirs, False)
        with contextlib.suppress(OSError):  # a user who has many pipes gets small ones
            fcntl.fcntl(status, fcntl.F_SETPIPE_SZ, 1 << 16)
        environ[DISTRIB_STATUS_FD] = str(theirs)
        passed = [theirs]
        if self.input is not None:
            os.lseek(self.input, 0, os.SEEK_SET)
        if assignment.keep_result:
            self.value = os.memfd_create("distrib-value")
            environ[DISTRIB_RESULT_FD] = str(self.value)
            passed.append(self.value)
        # Reached through this process, so that the script inherits no descriptor for it.
        self.error_file = os.memfd_create("distrib-error")
        environ[TORCHELASTIC_ERROR_FILE] = f"/proc/{os.getpid()}/fd/{self.error_file}"
        news: socket.socket | None = None
        if DISTRIB_SERVER in environ:
            if self.news:
                self.news.close()
            self.news, news = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.news.setblocking(False)
            environ[DISTRIB_EVENTS_FD] = str(news.fileno())
            passed.append(news.fileno())
        try:
            yield status, passed
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
            if news:
                news.close()

    def _spawn(
        self, assignment: Assignment, environ: dict[str, str], share: affinity.Share, passed: list[int]
    ) -> subprocess.Popen[bytes]:
        """Start the script, on its share of the processors."""
        self.started = time.time()
        self.memory = OutOfMemory()
        command = assignment.command
        if assignment.is_python:
            command = [command[0], str(RUN_SCRIPT), *command[1:]]
        libc, parent = ctypes.CDLL(None), ctypes.c_ulong(os.getpid())
        _allow_files()
        try:
            with affinity.bound(share.cpus) as problem:
                child = subprocess.Popen(
                    command, cwd=assignment.directory, env=environ,
                    stdin=subprocess.DEVNULL if self.input is None else self.input,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=passed,
                    preexec_fn=lambda: libc.prctl(PR_SET_PTRACER, parent, 0, 0, 0),
                )  # fmt: skip
        except OSError as error:
            what = error.filename if isinstance(error.filename, str) else assignment.command[0]
            raise Refused(
                f"{socket.gethostname()}: cannot start {assignment.command[0]}: {what}: {error.strerror}"
            ) from None
        threads = environ["OMP_NUM_THREADS"]
        self.placed = {
            "cpus": "" if problem else ranges(share.cpus),
            "threads": int(threads) if threads.isdigit() else None, "problem": problem,
        }  # fmt: skip
        return child

    def _refuse(self, why: str) -> None:
        self._send_exit(exit_code=1, number=None, message=why)

    def _pass_on(self, descriptor: int) -> None:
        kind = self.streams[descriptor]
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._forget(descriptor)
            return
        if kind is Kind.STATUS:  # whole lines only
            data = bytes(self.tail) + data
            whole, newline, rest = data.rpartition(b"\n")
            self.tail = bytearray(rest[-4096:])
            data = whole + newline
        if data and not self.channel.closed:
            self.channel.send(kind, data)

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):  # not watched while too much waits for the wire
            self.selector.unregister(descriptor)
        if self.streams.pop(descriptor) is Kind.STATUS:
            os.close(descriptor)  # the others belong to the child's object

    def _signal_child(self, number: int) -> None:
        """The script alone, whose loader's workers would die of it, or run the handler that they inherited; SIGKILL is for all."""
        if self.child and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.child.pid, number)

    def _tell_stack(self, printed: bytes) -> None:
        if self.channel.proven and not self.channel.closed and not self.is_away:
            self.channel.send(Kind.STACKS, printed)

    def _stop(self, who: str, number: int, grace_seconds: float) -> None:
        self.stopping = self.stopping or who
        if self.child is None or self.is_away:
            if who == "engine":
                # Without a word it would look as if this process had been killed.
                if not self.finished and self.channel.proven and not self.is_away:
                    self._send_exit(exit_code=128 + number, number=number)
                self.ended = True
            return
        self._signal_child(number)
        self.kill_at = min(self.kill_at, time.monotonic() + grace_seconds)

    def _finish(self) -> None:
        """The script has ended, or must: clear what is left of it, send the rest of its output, then its record."""
        assert self.child
        ended = time.time()
        reaper.sweep(self.mark, self.child.pid)
        code = self.child.wait()
        deadline = time.monotonic() + DRAIN_SECONDS
        while self.streams and time.monotonic() < deadline:
            for descriptor in list(self.streams):
                self._pass_on(descriptor)
            if not self._flush(wait=True):
                break
        if self.value is not None:
            os.lseek(self.value, 0, os.SEEK_SET)
            while (piece := os.read(self.value, CHUNK_BYTES)) and self._flush(wait=True):
                self.channel.send(Kind.RESULT, piece)
        message = self.memory.why_killed() if self.memory and code == -signal.SIGKILL and not self.stopping else ""
        self._send_exit(
            exit_code=code if code >= 0 else 128 - code,
            number=-code if code < 0 else None,
            message=message,
            ended=ended,
        )

    def _send_exit(self, *, exit_code: int, number: int | None, message: str = "", ended: float = 0.0) -> None:
        self.finished = True
        if self.channel.closed:
            return
        self.channel.send(
            Kind.EXIT,
            {
                "exit_code": exit_code, "signal": number, "started": self.started, "ended": ended or time.time(),
                "stopped_by": self.stopping, "message": message, "device": self.device,
                "placed": self.placed, "error": self._read_error(),
            },
        )  # fmt: skip
        self._flush()

    def _read_error(self) -> str:
        if self.error_file is None:
            return ""
        os.lseek(self.error_file, 0, os.SEEK_SET)
        return os.read(self.error_file, ERROR_LIMIT_BYTES).decode(errors="replace")

    # -- the wire -----------------------------------------------------------------------------------------------

    def _flush(self, *, wait: bool = False) -> bool:
        """Write what the wire takes; stop reading the script's output while too much waits. False: the wire is gone."""
        if self.channel.closed:
            return False
        try:
            self._send_on()
            while wait and self.channel.waiting_bytes > BUFFER_LIMIT_BYTES // 2:
                with selectors.DefaultSelector() as writable:
                    writable.register(self.channel.sock, selectors.EVENT_WRITE)
                    writable.select(Silence.LOOK_SECONDS)
                self._send_on()
        except OSError:
            self.channel.closed = True
            self._launcher_lost()
            return False
        waiting = self.channel.waiting_bytes
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if self.selector.get_key(self.channel.sock).events != events:
            self.selector.modify(self.channel.sock, events, self._converse)
        full = waiting > BUFFER_LIMIT_BYTES
        for descriptor in self.streams:
            watched = descriptor in self.selector.get_map()
            if full and watched:
                self.selector.unregister(descriptor)
            elif not full and not watched:
                self.selector.register(descriptor, selectors.EVENT_READ, self._pass_on)
        return True

    def _send_on(self) -> None:
        """Raises OSError where nobody hears it."""
        if self.silence.too_long():
            raise TimeoutError
        self.channel.flush()


def _allow_files() -> None:
    """As many open files as may be: a rank is connected with every other one, for each of its groups, and 1024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> int:
    if daemonize.FLAG in sys.argv:
        daemonize.step_apart()
    return Rank().run()
