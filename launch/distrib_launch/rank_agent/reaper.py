"""End all processes of a rank, even after the death of its agent. Standard library only.

The agent adopts the orphans of its script, so that it finds all processes of its rank below itself. The whole table of processes is read
only after the death of an agent, and on kernels that do not list the children of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from distrib.environment import DISTRIB_PROCESS_TAG
from distrib.utils import signals


def adopt_orphans(*, enabled: bool) -> bool:
    """Set if descendants of this process become its children when their parents end, in place of children of init.

    Args:
        enabled: True to adopt orphans.

    Returns:
        True if this process adopts orphans now, and can list its children.
    """
    can_list = Path(f"/proc/self/task/{os.getpid()}/children").exists()
    subreaper, zero = 36, ctypes.c_ulong(0)  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
    failed = ctypes.CDLL(None).prctl(subreaper, ctypes.c_ulong(enabled and can_list), zero, zero, zero)
    return enabled and can_list and not failed


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


def sweep(tag: str, session: int) -> None:
    """Kill all remaining processes of a rank.

    Args:
        tag: Its value of DISTRIB_PROCESS_TAG.
        session: Its session, 0 for none.
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
