"""End all processes of a rank, even after the death of its agent. Standard library only.

The agent adopts the orphans of its script, so that it finds all processes of its rank below itself. The whole table of processes is read
only after the death of an agent, and on kernels that do not list the children of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from distrib.environment import DISTRIB_PROCESS_TAG
from distrib.utils import signals

LIBC = ctypes.CDLL(None)


def adopt_orphans() -> bool:
    """Make descendants of this process its children when their parents end, in place of children of init.

    Returns:
        True if this process adopts orphans now, and can list its children.
    """
    can_list = Path(f"/proc/self/task/{os.getpid()}/children").exists()
    return can_list and not LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def children_of(pid: int) -> set[int]:
    """Return the children of a process, with those that have ended and were not waited for.

    Args:
        pid: Its process id.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def wait_for_orphans(script: int) -> None:
    """Remove adopted processes that have ended from the table of processes.

    Args:
        script: Process id of the script, for which its owner waits.
    """
    for pid in children_of(os.getpid()) - {script}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_descendants() -> None:
    """Kill all descendants of this process, which adopts orphans, and wait for them."""
    for _ in range(50):  # a process in uninterruptible sleep may not end at all
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        level = left = children_of(os.getpid())
        if not left:
            return
        while level := {child for pid in level for child in children_of(pid)} - left:
            left |= level
        send(left, signal.SIGKILL)
        time.sleep(0.01)


def tagged(tags: Collection[str]) -> set[int]:
    """Return the processes of this user that were started with a value of DISTRIB_PROCESS_TAG, including orphans.

    Args:
        tags: The values.
    """
    wanted = {f"{DISTRIB_PROCESS_TAG}={tag}".encode() for tag in tags}
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if not wanted.isdisjoint(Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")):
                found.add(int(entry))
    return found


def in_sessions(sessions: Collection[int]) -> set[int]:
    """Return the processes of sessions.

    Args:
        sessions: Process ids of their leaders.
    """
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions and fields[0] != "Z":
                    found.add(int(entry))
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes that still run.

    Args:
        pids: Process ids.
        number: Number of the signal.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def sweep(tags: Collection[str], sessions: Collection[int]) -> None:
    """Kill all remaining processes of ranks.

    Args:
        tags: Their values of DISTRIB_PROCESS_TAG.
        sessions: Their sessions.
    """
    was_empty = False
    for _ in range(50):
        left = tagged(tags) | (in_sessions(sessions) if sessions else set())
        if was_empty and not left:
            return
        was_empty = not left  # a process shows no environment during its exec, so one empty result is not enough
        send(left, signal.SIGKILL)
        time.sleep(0.01)


def _fork_guard(run: Callable[[socket.socket], None]) -> socket.socket:
    """Fork a guard process: a child of init, so that Slurm does not end it with the descendants of this process.

    Every death of this process, also by SIGKILL, closes its end of a pair of sockets.

    Args:
        run: Called in the guard with the other end.

    Returns:
        The end of this process.
    """
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    between = os.fork()
    if between:
        there.close()
        os.waitpid(between, 0)
        return here
    try:
        os.setsid()
        if not os.fork():
            for number in (*signals.STOPPING, *signals.FORWARDED):
                signal.signal(number, signal.SIG_IGN)
            keep = os.dup2(there.fileno(), 0)
            os.closerange(keep + 1, 65536)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 2)
            run(socket.socket(fileno=0))
    finally:
        os._exit(0)


class Guard:
    """Guard process, which waits for this process to die and then cleans up.

    Args:
        cleanup: Called in the guard.
    """

    def __init__(self, cleanup: Callable[[], None]) -> None:
        def run(control: socket.socket) -> None:
            if not control.recv(1):
                cleanup()

        self._control = _fork_guard(run)

    def dismiss(self) -> None:
        """End the guard without its cleanup, and wait for its end."""
        with contextlib.suppress(OSError):
            self._control.send(b".")
            self._control.recv(1)
        self._control.close()


class HostGuard:
    """Guard process of all rank agents of a host, which ends the processes of each rank whose agent dies.

    The processes that fork from this one share it; it ends with the last of them.
    """

    def __init__(self) -> None:
        self._control = _fork_guard(_guard_ranks)

    def connect(self) -> RankGuard:
        """Return a connection for the agent that this process is."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError), there:  # the guard was killed
            socket.send_fds(self._control, [b"."], [there.fileno()])
        return RankGuard(here)

    def wait(self) -> None:
        """Wait for the end of the guard. No other process may use it any more."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
            self._control.recv(1)


class RankGuard:
    """Connection of a rank's agent to the guard of its host.

    Args:
        sock: The agent's end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def watch(self, tag: str, session: int = 0, removal: Sequence[str] = ()) -> None:
        """Let the guard end the processes of a rank if this process dies.

        Args:
            tag: Its value of DISTRIB_PROCESS_TAG.
            session: Its session, 0 if it has none yet.
            removal: Command that removes its container.
        """
        with contextlib.suppress(OSError):
            self._sock.send(json.dumps([session, tag, *removal]).encode())

    def dismiss(self) -> None:
        """Withdraw the last call of `watch`."""
        with contextlib.suppress(OSError):
            self._sock.send(b".")


def _guard_ranks(control: socket.socket) -> None:
    """Serve the agents of a host until the last process that may connect has ended."""
    watched: dict[socket.socket, list[Any]] = {}
    poller = selectors.DefaultSelector()
    poller.register(control, selectors.EVENT_READ)
    while poller.get_map():
        died = []
        for key, _ in poller.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            message, descriptors, _, _ = socket.recv_fds(sock, 8192, 1)
            if not message:
                poller.unregister(sock)
                died.append(watched.pop(sock, []))
                sock.close()
            elif sock is control:
                agent = socket.socket(fileno=descriptors[0])
                watched[agent] = []
                poller.register(agent, selectors.EVENT_READ)
            else:
                watched[sock] = [] if message == b"." else json.loads(message)
        if lost := [rank for rank in died if rank]:
            sweep({tag for _, tag, *_ in lost}, {session for session, *_ in lost if session})
            for _, _, *removal in lost:
                if removal:  # a container that was about to start
                    with contextlib.suppress(OSError):
                        subprocess.run(removal, stdin=subprocess.DEVNULL, capture_output=True, check=False)
