"""Progress of a probe: a bar with the remaining time on a terminal, else a line every few seconds."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from distrib.probe.records import Record, StageDone, decode_record
from distrib.utils.terminal_text import without_controls

LAUNCHER_PREFIX = "distrib-launch: "


class _LineStream(io.TextIOBase):
    """Text stream that passes on whole lines."""

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


class ProgressStreams:
    """Standard output and error of the probe's job: keeps records, shows progress, and passes on other lines to standard error.

    As a context it returns both streams.

    Args:
        keep: Called with the line of each record; may return a message for the user.
        show: False to show no progress.
    """

    def __init__(self, keep: Callable[[str], str | None], *, show: bool = True) -> None:
        self._keep = keep
        self._show = show
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._next_line = 0.0
        self._streams: tuple[TextIO, TextIO] = (_LineStream(self._take_output), _LineStream(self._take_error))  # type: ignore[assignment]

    def __enter__(self) -> tuple[TextIO, TextIO]:
        if self._show and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description:32.32}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"),
                TextColumn("{task.fields[left]}"), console=Console(file=sys.__stderr__), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=1.0, left="")
            self._bar.start()
        return self._streams

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def _take_output(self, line: str) -> None:
        encoded = line[line.find("{") :]  # the launcher writes the rank before it
        record = decode_record(encoded)
        if record is None:
            self._take_error(line)
            return
        if message := self._keep(encoded):
            self._take_error(message)
        self._show_progress(record)

    def _show_progress(self, record: Record) -> None:
        if not isinstance(record, StageDone):
            return
        fraction = record.done_seconds / max(record.done_seconds + record.remaining_seconds, 1e-9)
        left = f"{record.remaining_seconds:.0f} s left"
        if self._bar:
            self._bar.update(self._task, completed=fraction, description=record.title, left=left)
        elif self._show and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 2.0
            print(f"probe: {fraction:4.0%}, {left} (done: {record.title})", file=sys.stderr, flush=True)

    def _take_error(self, line: str) -> None:
        if line.startswith(LAUNCHER_PREFIX):
            line = f"distrib-topo: {line.removeprefix(LAUNCHER_PREFIX)}"
        if not line.strip():
            return
        if self._bar:
            self._bar.console.print(without_controls(line), markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)
