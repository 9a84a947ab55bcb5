"""Watch for time that the machine loses to other loads, and that would spoil a measurement of rates."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CALM = 0.03
"""Largest fraction of CPU time that other virtual machines may steal, and of wall time that a wake-up may be late."""
TRIES = 4


class MachineWatch:
    """Fraction of time that the machine lost in a `with` block. `spoiled` is True if a measurement meant nothing."""

    def __enter__(self) -> MachineWatch:
        self.late_seconds, self._begun, self._before, self._ended = 0.0, time.monotonic(), _times(), threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        late = self.late_seconds / (time.monotonic() - self._begun)
        self.spoiled = late > CALM or _stolen_since(self._before) > CALM

    def _count(self) -> None:
        """Add up how late this thread wakes. It has the priority of the test and waits for a CPU as the ranks do."""
        while not self._ended.is_set():
            before = time.monotonic()
            self._ended.wait(0.02)
            self.late_seconds += max(0.0, time.monotonic() - before - 0.03)


def repeat_if_spoiled(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat a failed measurement of rates if the machine spoiled it. Otherwise its first failure counts.

    Args:
        measure: A test, or a part of one.
    """

    @functools.wraps(measure)
    def run(*args: Any, **kwargs: Any) -> Any:
        for _ in range(TRIES - 1):
            watch = MachineWatch()
            try:
                with watch:
                    return measure(*args, **kwargs)
            except Exception as error:
                if not watch.spoiled:
                    raise
                warnings.warn(f"{measure.__name__}: the machine was busy and spoiled it: {error}"[:500])
                wait_for_calm()
        return measure(*args, **kwargs)

    return run


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
    return _stolen_since(before)


def _stolen_since(before: list[int]) -> float:
    spent = [now - then for now, then in zip(_times(), before, strict=True)]
    return spent[7] / max(1, sum(spent))


def _times() -> list[int]:
    """Return user, nice, system, idle, iowait, irq, softirq and steal of all CPUs so far, in ticks."""
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
