"""How busy the processors are while something is measured: they may be what limits it."""

from __future__ import annotations

import contextlib
from pathlib import Path


class Load:
    """How busy this host's processors are between two looks, as a part of 1."""

    def __init__(self) -> None:
        self._before = _processor_times()

    def busy(self) -> float:
        """The busy part since this object was made; 0 where the kernel does not tell."""
        now = _processor_times()
        total = now[0] - self._before[0]
        return max(0.0, 1.0 - (now[1] - self._before[1]) / total) if total > 0 else 0.0


def _processor_times() -> tuple[float, float]:
    """All time and idle time so far, of all processors, in ticks."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return float(sum(fields)), float(fields[3] + fields[4])
    return 0.0, 0.0
