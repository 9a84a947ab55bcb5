"""Whether the kernel killed a process for want of memory. Standard library only."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path


class OutOfMemory:
    """Counts the kernel's kills from now on."""

    def __init__(self) -> None:
        self._before = _kills()

    def why_killed(self) -> str:
        """What to say of a process that was killed since, by whom nobody told; empty where the kernel has killed none."""
        own, host = (after - before for before, after in zip(self._before, _kills(), strict=True))
        if own > 0:
            return "killed by SIGKILL: out of memory, it went over the memory limit of its cgroup (job or container)"
        if host > 0:
            return f"killed by SIGKILL: out of memory, it seems; the kernel of {socket.gethostname()} killed a process meanwhile"
        return ""


def _kills() -> tuple[int, int]:
    """How often the kernel has killed for want of memory: in this process's cgroup, and on the whole host."""
    own = host = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                folder = f"/sys/fs/cgroup/{controllers}{path}"
                file = f"{folder}/memory.oom_control" if controllers else f"{folder}/memory.events"
                with contextlib.suppress(OSError):
                    own += sum(
                        int(word.split()[1]) for word in Path(file).read_text().splitlines() if "oom_kill " in word
                    )
    with contextlib.suppress(OSError, StopIteration):
        host = next(
            int(line.split()[1]) for line in Path("/proc/vmstat").read_text().splitlines() if "oom_kill " in line
        )
    return own, host
