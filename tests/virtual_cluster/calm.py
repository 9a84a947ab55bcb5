"""CPU steal check: a machine that shares its CPUs with others cannot sustain the rates of virtual links."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

CALM = 0.03
"""Largest fraction of CPU time that other virtual machines may steal."""


def wait_for_calm(most_seconds: float = 150.0) -> None:
    """Wait until the stolen fraction of CPU time is at most `CALM`, or for `most_seconds`."""
    deadline = time.monotonic() + most_seconds
    while _stolen() > CALM and time.monotonic() < deadline:
        time.sleep(3)


def _stolen() -> float:
    """Return the stolen fraction of CPU time while all CPUs are busy."""
    before = _times()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    time.sleep(1)
    for process in busy:
        process.kill()
        process.wait()
    spent = [now - then for now, then in zip(_times(), before, strict=True)]
    return spent[7] / max(1, sum(spent))


def _times() -> list[int]:
    """Return user, nice, system, idle, iowait, irq, softirq and steal of all CPUs so far, in ticks."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
