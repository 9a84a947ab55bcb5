"""What is seen of a probe while it runs: a bar with the time left on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from distrib.probe.records import Record, StageDone, decode

LINE_SECONDS = 2.0
LAUNCHER = "distrib-launch: "
"""How the launcher's own lines begin, which says them in the name of probe."""
_TAG = re.compile(r"^(?:\x1b\[\d+m)?\[[^\]]*\] (?:\x1b\[0m)?")


class _Lines(io.TextIOBase):
    """A stream that hands on whole lines."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)


class View:
    """Takes the place of standard output and error of the probe's job.

    `keep` is given each record's line, and may return words that people should read; those, and what else ranks and
    launcher say, go to standard error.
    """

    def __init__(self, keep: Callable[[str], str | None], *, bar: bool = True) -> None:
        self._keep = keep
        self._progress: Any = None
        self._task: Any = None
        self._quiet = not bar
        self._next_line = 0.0
        self._bar = bar and sys.stderr.isatty()
        self.streams: tuple[TextIO, TextIO] = (_Lines(self._out), _Lines(self._err))  # type: ignore[assignment]

    def __enter__(self) -> View:
        if self._bar:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description:32.32}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"),
                TextColumn("{task.fields[left]}"), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("starting", total=1.0, left="")
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def _out(self, line: str) -> None:
        line = _TAG.sub("", line)
        record = decode(line)
        if record is None:
            self._err(line)
            return
        if words := self._keep(line):
            self._err(words)
        self._show(record)

    def _show(self, record: Record) -> None:
        if not isinstance(record, StageDone):
            return
        still = max(0.0, record.left_seconds)
        part = record.done_seconds / max(record.done_seconds + still, 1e-9)
        left = f"{still:.0f} s left"
        if self._progress:
            self._progress.update(self._task, completed=part, description=record.what, left=left)
        elif not self._quiet and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            print(f"probe: {part:4.0%}, {left} (done: {record.what})", file=sys.stderr, flush=True)

    def _err(self, line: str) -> None:
        if line.startswith(LAUNCHER):
            line = f"distrib-topo: {line.removeprefix(LAUNCHER)}"
        if line.strip():
            if self._progress:
                self._progress.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)
