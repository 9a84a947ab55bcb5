"""The connections over which hosts are asked. The engine goes over them too, if it comes soon.

Each is an ssh that serves others through a socket (ssh_config(5), ControlPath), which saves the engine the keys and the
logins. None outlives its use, nor the launcher: the session that holds it open ends with our end of its pipe, or after
some seconds; from then on it lives as long as the engine's own sessions on it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, TypeVar

from distrib.cluster.inventory import is_complete_reply
from distrib.cluster.remote import connectivity_agent

LOADER = "import sys;exec(sys.stdin.read(int(sys.stdin.readline())))"
"""Runs, in the Python of any host, a program of a given length: its end need not be the end of the pipe."""
SIGN = "<<distrib-shell>>"
"""What a host's shell says before Python begins there."""

AT_ONCE = 128
"""So many hosts are spoken with at a time."""
CLOSE_SECONDS = 0.5
LOOK_SECONDS = 0.2
"""So often those who wait for an answer see whether it is wanted still: closing a pipe wakes nobody who polls it."""

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Conversation(NamedTuple):
    """What came of asking one host. `code` is None where it answered, or was silent for too long."""

    out: str
    err: str
    code: int | None


class Patience(NamedTuple):
    """For how many seconds a host's answer is waited for: `until_sign` for the word of its shell, which ssh has let in, and `in_all`."""

    until_sign: float
    in_all: float


class Connections:
    """Open conversations by the processes that hold them; a context that ends them all.

    `folder` is where their sockets go, None for connections that nobody else shall use.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._doors: list[socket.socket] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._has_folder = False

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def shared(self, ssh: Sequence[str]) -> list[str]:
        """The words of an ssh whose connection others may use: the first setting of an option is the one that counts."""
        if self.folder is None:
            return list(ssh)
        with self._lock:
            if not self._has_folder:
                self.folder.mkdir(mode=0o700)
                self._has_folder = True
        return [ssh[0], "-o", "ControlMaster=yes", *ssh[1:]]

    def ask(
        self,
        host: str,
        command: Sequence[str],
        program: str,
        patience: Patience,
        environment: Mapping[str, str] | None = None,
    ) -> Conversation:
        """Run `program` in the Python that `command` starts with `LOADER`, until it has answered; `environment` is the command's,
        this process's own for None. Raises OSError."""
        with self._lock:
            if self._closed:
                raise InterruptedError
            # A session of its own: Ctrl-C in the terminal must not cut the engine's connections.
            process = subprocess.Popen(
                command, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            before = self._processes.pop(host, None)
            self._processes[host] = process
        if before:  # it was silent, and is ended
            before.wait()
            _close_pipes(before)
        told = self._exchange(process, f"{len(program)}\n{program}".encode(), patience)
        if told.code is None and not is_complete_reply(told.out.encode()):
            _kill(process)
        return told

    def ask_again(self, host: str, line: str, seconds: float) -> str:
        """What the program on `host`, which has answered before, says to one line more; empty where it says nothing."""
        process = self._processes.get(host)
        if process is None:
            raise InterruptedError
        told = self._exchange(process, f"{line}\n".encode(), Patience(seconds, seconds))
        if told.code is None and not is_complete_reply(told.out.encode()):
            _kill(process)  # what it says later would be taken for the next answer
        return told.out

    def all_at_once(
        self, work: Callable[[Item], Outcome], items: Sequence[Item], at_once: int = AT_ONCE
    ) -> list[Outcome]:
        """What `work`, which waits for hosts, returns for each item. Whatever interrupts it ends the connections."""
        pool = ThreadPoolExecutor(max_workers=min(at_once, max(1, len(items))), thread_name_prefix="preflight")
        try:
            return list(pool.map(work, items))
        except BaseException:  # what still runs would be waited for
            self.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def listen(self) -> tuple[int, ...]:
        """The ports at which this machine can be called while the connections are held."""
        with self._lock:
            if self._doors is None and not self._closed:
                self._doors = connectivity_agent.open_listeners()
            return tuple(connectivity_agent.port_number(door) for door in self._doors or ())

    def stop_listening(self) -> None:
        """Nobody needs to call this machine any more."""
        with self._lock:
            for door in self._doors or ():
                with contextlib.suppress(OSError):
                    door.shutdown(socket.SHUT_RDWR)  # wakes who waits for callers
                door.close()
            self._doors = None

    def let_go(self) -> None:
        """Nothing more is asked, and no engine goes over them: the programs there end."""
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def asked(self, host: str) -> bool:
        """Whether `host` was asked by a program of its own. Raises InterruptedError where the connections have been closed."""
        if self._closed:
            raise InterruptedError
        return host in self._processes

    def ended(self, host: str) -> bool:
        """Whether that program has ended, as far as can be seen from here."""
        return self.asked(host) and self._processes[host].poll() is not None

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes, patience: Patience) -> Conversation:
        """Send `data`, and take what is said until an answer is whole, the process ends, or the time is over."""
        assert process.stdin and process.stdout and process.stderr
        heard: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for stream in (process.stdin, process.stdout, process.stderr):
                os.set_blocking(stream.fileno(), False)
                events = selectors.EVENT_WRITE if stream is process.stdin else selectors.EVENT_READ
                selector.register(stream, events)
            open_streams = len(heard)
            while open_streams and not is_complete_reply(heard[process.stdout]):
                seconds = patience.in_all if SIGN.encode() in heard[process.stdout] else patience.until_sign
                if (remaining := begun + seconds - time.monotonic()) <= 0:
                    return Conversation(_text(heard[process.stdout]), _text(heard[process.stderr]), None)
                ready = selector.select(min(remaining, LOOK_SECONDS))
                if self._closed:
                    raise InterruptedError
                for key, _ in ready:
                    stream = key.fileobj  # type: ignore[assignment]
                    if stream is process.stdin:
                        data = _write(process.stdin, data)
                        if not data:
                            selector.unregister(process.stdin)
                        continue
                    read = os.read(key.fd, 1 << 16)
                    heard[stream] += read
                    if not read:
                        selector.unregister(stream)
                        open_streams -= 1
        code = None if is_complete_reply(heard[process.stdout]) else process.wait()
        return Conversation(_text(heard[process.stdout]), _text(heard[process.stderr]), code)

    def close(self) -> None:
        """End all of them, by force where they do not end by themselves."""
        self.stop_listening()
        self.let_go()
        with self._lock:
            self._closed = True
            processes, self._processes = list(self._processes.values()), {}
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.returncode is None:
                _kill(process)
                process.wait()
            _close_pipes(process)
        if self.folder and self._has_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            with contextlib.suppress(OSError):
                stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started: `--ssh-command` may be a script."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _write(stream: IO[bytes], data: bytes) -> bytes:
    """What is left of `data` when the pipe takes no more; nothing if nobody reads."""
    try:
        return data[os.write(stream.fileno(), data) :]
    except BlockingIOError:
        return data
    except OSError:
        return b""


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
