"""CPUs of this machine that a process may use: physical cores, CPU quota, load. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

Core = tuple[int, ...]
"""The logical CPUs of one physical core: two with hyperthreading."""


def usable_cores(root: Path = Path("/")) -> tuple[Core, ...]:
    """Return the physical cores in this process's affinity mask.

    Args:
        root: The root of the file system, another one in tests.

    Returns:
        One tuple of logical CPU numbers for each core.
    """
    return physical_cores(root, os.sched_getaffinity(0))


def physical_cores(root: Path, cpus: set[int]) -> tuple[Core, ...]:
    """Group logical CPUs by physical core.

    Args:
        root: The root of the file system, another one in tests.
        cpus: Logical CPU numbers.

    Returns:
        One tuple for each core. A CPU that /sys does not describe is a core of its own.
    """
    found: dict[Core, None] = {}
    for cpu in sorted(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = read_cpu_list(topology / "thread_siblings_list") or {cpu}
        found[tuple(sorted((siblings | {cpu}) & cpus))] = None
    return tuple(found)


def read_cpu_list(path: Path) -> set[int]:
    """Read a CPU list such as `0-3,8` from a file of /sys.

    Args:
        path: The file.

    Returns:
        The CPU numbers, empty if there is no such file.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text().strip().split(","):
            if part:
                first, _, last = part.partition("-")
                found.update(range(int(first), int(last or first) + 1))
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the tightest CPU quota of this process's control groups, version 1 or 2.

    Args:
        root: The root of the file system, another one in tests.

    Returns:
        The quota in CPUs, None without a limit.
    """
    quotas = []
    own_group = ""
    with contextlib.suppress(OSError):
        match = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        own_group = match[1] if match else ""
    top = root / "sys/fs/cgroup"
    for folder in (top / own_group, *(top / own_group).parents):
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


class CpuLoad:
    """CPU load of this host between two points in time. Busy CPUs may limit a measurement of the network."""

    def __init__(self) -> None:
        self._before = _cpu_ticks()

    def busy_fraction(self) -> float:
        """Return the busy fraction, 0 to 1, since this object was made; 0 if the kernel does not report it."""
        now = _cpu_ticks()
        total = now[0] - self._before[0]
        return max(0.0, 1.0 - (now[1] - self._before[1]) / total) if total > 0 else 0.0


def _cpu_ticks() -> tuple[float, float]:
    """Return all ticks and the idle ticks of all CPUs since the machine started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return float(sum(fields)), float(fields[3] + fields[4])
    return 0.0, 0.0
