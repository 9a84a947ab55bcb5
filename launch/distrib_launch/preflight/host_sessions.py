"""Sessions on the hosts during the preflight; the engine reuses their ssh connections.

Each session is an ssh with a control socket (ssh_config(5), ControlPath), so that the engine needs no logins of its own. A session ends
when the launcher closes its pipe, or after some seconds; its connection then lasts as long as the engine's sessions on it.
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
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from distrib.cluster.inventory import is_complete_reply
from distrib.cluster.remote import connectivity_agent
from distrib.utils.threads import Item, Outcome, map_in_threads

LOADER = (
    "import os,sys;at=sys.path.index(os.path.dirname(os.__file__));sys.path=sys.path[at:]+[p for p in sys.path[:at]if p];"
    "exec(sys.stdin.read(next(int(l)for l in iter(sys.stdin.readline,'')if l.strip())))"
)
"""Python source that reads the length of a program and the program from standard input, and runs it.

The standard library comes before PYTHONPATH, and the working directory is not on sys.path: their modules could hide its modules. Empty
lines before the length are for a login shell whose settings read lines."""
BLANK_LINES = "\n" * 16
SHELL_MARK = "<<distrib-shell>>"
"""Text that a host's shell prints before it starts Python."""


class SessionOutput(NamedTuple):
    """Output of the program on one host."""

    out: str
    err: str
    code: int | None
    """Exit code; None: the program still runs after its reply or the timeout."""


class ReplyTimeout(NamedTuple):
    """Time limits of a reply."""

    login_seconds: float = 20.0
    """Until `SHELL_MARK` arrives; twice sshd's usual delay for a DNS lookup that fails."""
    total_seconds: float = 90.0
    """Python on a cold network file system takes a minute."""


class HostSessions:
    """Open sessions by host; a context that ends them all.

    Args:
        folder: Folder for the control sockets of ssh; None: connections are not shared.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._listeners: list[socket.socket] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._has_folder = False

    def __enter__(self) -> HostSessions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def shared(self, ssh: Sequence[str]) -> list[str]:
        """Return an ssh command whose connection other ssh processes can use; ssh obeys the first of several settings.

        Args:
            ssh: ssh command with its options.
        """
        if self.folder is None:
            return list(ssh)
        with self._lock:
            if not self._has_folder:
                self.folder.mkdir(mode=0o700)
                self._has_folder = True
        return [ssh[0], "-o", "ControlMaster=yes", *ssh[1:]]

    def run_program(
        self,
        host: str,
        command: Sequence[str],
        program: str,
        timeout: ReplyTimeout,
        environment: Mapping[str, str] | None = None,
    ) -> SessionOutput:
        """Run a program on a host until it has replied; end a former session of the host.

        Args:
            host: Name of the host.
            command: Command that starts Python with `LOADER` there.
            program: Python source.
            timeout: Time limits.
            environment: Environment of the command; None: that of this process.

        Raises:
            OSError: The command cannot be started.
            InterruptedError: The sessions were closed.
        """
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
        if before:  # it timed out before
            before.wait()
            _close_pipes(before)
        output = self._exchange(process, f"{BLANK_LINES}{len(program)}\n{program}".encode(), timeout)
        if output.code is None and not is_complete_reply(output.out.encode()):
            _kill(process)
        return output

    def query_again(self, host: str, line: str, seconds: float) -> str:
        """Send one more line to the program on a host, and return its output.

        Args:
            host: Name of a host with a session.
            line: Request.
            seconds: Time limit.

        Raises:
            InterruptedError: The sessions were closed.
        """
        process = self._processes.get(host)
        if process is None:
            raise InterruptedError
        output = self._exchange(process, f"{line}\n".encode(), ReplyTimeout(seconds, seconds))
        if output.code is None and not is_complete_reply(output.out.encode()):
            _kill(process)  # a late reply would be read as the reply to the next request
        return output.out

    def map_hosts(self, work: Callable[[Item], Outcome], items: Sequence[Item], at_once: int = 128) -> list[Outcome]:
        """Call a function for all items in threads, and return the results in their order. An exception ends all sessions.

        Args:
            work: Function that waits for a host.
            items: Its arguments.
            at_once: Number of threads, each with three pipes.
        """
        return map_in_threads(work, items, at_once=at_once, interrupt=self.close)

    def listen(self) -> tuple[int, ...]:
        """Listen on this machine until the sessions are closed, and return the ports."""
        with self._lock:
            if self._listeners is None and not self._closed:
                self._listeners = connectivity_agent.open_listeners()
            return tuple(connectivity_agent.port_number(listener) for listener in self._listeners or ())

    def stop_listening(self) -> None:
        """Stop listening on this machine."""
        with self._lock:
            for listener in self._listeners or ():
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
                listener.close()
            self._listeners = None

    def release(self) -> None:
        """End the programs on all hosts; the engine does not need the connections."""
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def has_session(self, host: str) -> bool:
        """Return True if a program was started for a host.

        Args:
            host: Name of the host.

        Raises:
            InterruptedError: The sessions were closed.
        """
        if self._closed:
            raise InterruptedError
        return host in self._processes

    def has_ended(self, host: str) -> bool:
        """Return True if the program of a host has ended.

        Args:
            host: Name of the host.
        """
        return self.has_session(host) and self._processes[host].poll() is not None

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes, timeout: ReplyTimeout) -> SessionOutput:
        """Send `data` and read until a reply is complete, the process ends, or the time is over."""
        assert process.stdin and process.stdout and process.stderr
        received: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for stream in (process.stdin, process.stdout, process.stderr):
                os.set_blocking(stream.fileno(), False)
                events = selectors.EVENT_WRITE if stream is process.stdin else selectors.EVENT_READ
                selector.register(stream, events)
            open_streams = len(received)
            while open_streams and not is_complete_reply(received[process.stdout]):
                seconds = (
                    timeout.total_seconds if SHELL_MARK.encode() in received[process.stdout] else timeout.login_seconds
                )
                if (remaining := begun + seconds - time.monotonic()) <= 0:
                    return SessionOutput(_text(received[process.stdout]), _text(received[process.stderr]), None)
                ready = selector.select(min(remaining, 0.2))
                if self._closed:  # closing a pipe does not wake a thread that polls it
                    raise InterruptedError
                for key, _ in ready:
                    stream = key.fileobj  # type: ignore[assignment]
                    if stream is process.stdin:
                        data = _write(process.stdin, data)
                        if not data:
                            selector.unregister(process.stdin)
                        continue
                    read = os.read(key.fd, 1 << 16)
                    received[stream] += read
                    if not read:
                        selector.unregister(stream)
                        open_streams -= 1
        code = None if is_complete_reply(received[process.stdout]) else process.wait()
        return SessionOutput(_text(received[process.stdout]), _text(received[process.stderr]), code)

    def close(self) -> None:
        """End all sessions; kill processes that do not end by themselves."""
        self.stop_listening()
        self.release()
        with self._lock:
            self._closed = True
            processes, self._processes = list(self._processes.values()), {}
        deadline = time.monotonic() + 0.5  # in which programs may end by themselves
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
    """Kill the process group: `--ssh-command` may be a script with children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _write(stream: IO[bytes], data: bytes) -> bytes:
    """Write what the pipe takes and return the rest; empty if the reader has gone."""
    try:
        return data[os.write(stream.fileno(), data) :]
    except BlockingIOError:
        return data
    except OSError:
        return b""


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
