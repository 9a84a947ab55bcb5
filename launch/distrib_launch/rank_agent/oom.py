"""Detect that the kernel killed a process for lack of memory. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import socket
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
HOST = Path("/proc/vmstat")


class OutOfMemory:
    """Counter of the kernel's out-of-memory kills since its creation."""

    def __init__(self) -> None:
        self._before = _counts()

    def why_killed(self) -> str:
        """Return the reason of a SIGKILL; empty if the kernel killed no process."""
        own, limits, host = (after - before for before, after in zip(self._before, _counts(), strict=True))
        if own > 0 and limits > 0:
            return "killed by SIGKILL: out of memory, its job or container reached its memory limit (cgroup)"
        if own > 0:  # this counter includes kills because the host's memory is full
            return f"killed by SIGKILL: out of memory, host {socket.gethostname()} had none left"
        if host > 0:
            return f"killed by SIGKILL: probably out of memory, the kernel of {socket.gethostname()} killed a process"
        return ""


def _counts() -> tuple[int, int, int]:
    """Return three counts: kills in this process's cgroup, hits of a memory limit there or above, and kills on the host."""
    own, limits = _files()
    return sum(_value(*file) for file in own), sum(_value(*file) for file in limits), _value(HOST, "oom_kill")


@functools.cache
def _files() -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """Return the files with the first two counts, each with its key."""
    own, limits = [], []
    with contextlib.suppress(OSError, ValueError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder = CGROUPS / controllers / path.strip("/")
            own.append((folder / ("memory.oom_control" if controllers else "memory.events"), "oom_kill"))
            while folder != CGROUPS.parent:
                limits.append((folder / "memory.failcnt", "") if controllers else (folder / "memory.events", "oom"))
                folder = folder.parent
    return own, limits


def _value(file: Path, key: str) -> int:
    """Return the count in a file of the kernel, after `key` if given; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        words = (line.split() for line in file.read_text().splitlines())
        return int(next(line[-1] for line in words if not key or line[0] == key))
    return 0
