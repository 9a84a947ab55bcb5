"""Whether this machine's processors are its own just now: one that others share cannot carry what virtual links are shaped to."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

CALM = 0.03
"""The part of the processors' time that others may take."""


def wait_for_calm(most_seconds: float = 150.0) -> None:
    """Until nobody else takes much of the processors' time."""
    deadline = time.monotonic() + most_seconds
    while _stolen() > CALM and time.monotonic() < deadline:
        time.sleep(3)


def _stolen() -> float:
    """The part that others take while all processors have something to do."""
    before = _times()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    time.sleep(1)
    for process in busy:
        process.kill()
        process.wait()
    spent = [now - then for now, then in zip(_times(), before, strict=True)]
    return spent[7] / max(1, sum(spent))


def _times() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq and steal of all processors so far, in ticks."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
