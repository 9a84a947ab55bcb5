"""End all processes of a rank, even after the death of its agent. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from distrib.environment import DISTRIB_PROCESS_TAG
from distrib.utils import signals


def tagged(tag: str) -> set[int]:
    """Return the processes of this user that were started with a value of DISTRIB_PROCESS_TAG, including orphans.

    Args:
        tag: The value.
    """
    wanted = f"{DISTRIB_PROCESS_TAG}={tag}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
    return found


def in_session(session: int) -> set[int]:
    """Return the processes of a session.

    Args:
        session: Process id of its leader.
    """
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
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


def sweep(tag: str, session: int | None = None) -> None:
    """Kill all remaining processes of a rank.

    Args:
        tag: Its value of DISTRIB_PROCESS_TAG.
        session: Its session, None for none.
    """
    was_empty = False
    for _ in range(50):
        left = tagged(tag) | (in_session(session) if session else set())
        if was_empty and not left:
            return
        was_empty = not left  # a process shows no environment during its exec, so one empty result is not enough
        send(left, signal.SIGKILL)
        time.sleep(0.01)


class Guard:
    """Guard process, which waits for this process to die and then cleans up.

    Both processes hold one end of a pair of sockets; every death of this process, also by SIGKILL, closes its end. The guard is a child
    of init, so that Slurm does not end it with the descendants of this process.

    Args:
        cleanup: Called in the guard.
    """

    def __init__(self, cleanup: Callable[[], None]) -> None:
        self._here, there = socket.socketpair()
        between = os.fork()
        if between:
            there.close()
            os.waitpid(between, 0)
            return
        try:
            os.setsid()
            if os.fork():
                return
            for number in (*signals.STOPPING, *signals.FORWARDED):
                signal.signal(number, signal.SIG_IGN)
            keep = os.dup2(there.fileno(), 0)
            os.closerange(keep + 1, 65536)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 2)
            if not os.read(0, 1):
                cleanup()
        finally:
            os._exit(0)

    def dismiss(self) -> None:
        """End the guard without its cleanup, and wait for its end."""
        with contextlib.suppress(OSError):
            self._here.send(b".")
            self._here.recv(1)
        self._here.close()
