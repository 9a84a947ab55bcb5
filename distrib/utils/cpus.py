"""The processors of this machine that a process may use: physical cores, and how much of their time. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

Core = tuple[int, ...]
"""The processor numbers of one physical core: two where it has hyperthreads."""


def usable_cores(root: Path = Path("/")) -> tuple[Core, ...]:
    """The physical cores that this process may use."""
    return cores_of(root, os.sched_getaffinity(0))


def cores_of(root: Path, cpus: set[int]) -> tuple[Core, ...]:
    """What /sys tells of them; what it does not tell is taken as single-threaded."""
    found: dict[Core, None] = {}
    for cpu in sorted(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = cpu_list(topology / "thread_siblings_list") or {cpu}
        found[tuple(sorted((siblings | {cpu}) & cpus))] = None
    return tuple(found)


def cpu_list(path: Path) -> set[int]:
    """The processors of a file such as `0-3,8`; none where there is no such file."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            if part:
                first, _, last = part.partition("-")
                found.update(range(int(first), int(last or first) + 1))
    return found


def read_quota(root: Path = Path("/")) -> float | None:
    """The tightest `cpu.max` from this process's control group up to the root; version 1 has its own two files."""
    quotas = []
    own = ""
    with contextlib.suppress(OSError):
        told = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        own = told[1] if told else ""
    top = root / "sys/fs/cgroup"
    for folder in (top / own, *(top / own).parents):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        if folder == top:
            break
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((top / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)
