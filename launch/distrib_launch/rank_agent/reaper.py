"""Nothing outlives its job: find the processes of a rank, end them, and do so even after our own death.

Standard library only, like all that runs around a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from distrib.environment import DISTRIB_PROCESS_TAG


def marked(mark: str) -> set[int]:
    """Processes of this user that were started with `DISTRIB_PROCESS_TAG` set to `mark`, whoever their parent is now."""
    wanted = f"{DISTRIB_PROCESS_TAG}={mark}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.add(int(entry))
    return found


def in_session(session: int) -> set[int]:
    """Processes whose session is `session`."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.add(int(entry))
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes; those that are gone already are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def sweep(mark: str, session: int | None = None) -> None:
    """SIGKILL whatever is left of a rank: what carries its mark and what is in its session."""
    calm = False
    for _ in range(50):
        left = marked(mark) | (in_session(session) if session else set())
        if calm and not left:
            return
        calm = not left  # a process that is at its exec shows no environment for a moment: look twice
        send(left, signal.SIGKILL)
        time.sleep(0.01)


class Guard:
    """A process that waits for this one to die and then runs `cleanup`.

    The two hold the ends of a pair of sockets; death by any signal, SIGKILL included, closes this one's. The guard is a child
    of init: Slurm and others that end all descendants of a process would else end it in the middle of its work.
    `dismiss` sends it home without a cleanup.
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
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
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
        """End the guard without its cleanup; it is gone afterwards."""
        with contextlib.suppress(OSError):
            self._here.send(b".")
            self._here.recv(1)
        self._here.close()
