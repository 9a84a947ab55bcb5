"""Terminal output of a job: tagged whole lines of the ranks, and messages of the launcher, written by a thread.

A terminal that accepts nothing (Ctrl-S, a stuck ssh) must not stop the job. Its output waits in memory; beyond `backlog_bytes`
lines are dropped and their number is reported. The files under `ranks/` are always complete.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec

from distrib.errors import LaunchError
from distrib.utils import log
from distrib.utils.ranges import ranges
from distrib.utils.terminal_text import without_control_bytes, without_controls
from distrib_launch.output_filter import OutputFilter

LOG_TIME = re.compile(rb"^\[([IWE])\d{3,4} [\d:.]+ ")
"""Prefix of torch's log lines, with a time that differs between ranks in otherwise equal lines."""

AFTER_BAR = re.compile(rb"distrib: |(\[rank\d+\]: ?)?Traceback \(most recent call last\):$")
"""Beginning of a message that a rank prints while its progress bar stands on the line."""

UP = b"\x1b[A"
"""Escape sequence that moves the cursor to the line above."""


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and times of the terminal output."""

    backlog_bytes: int = 64 << 20
    """Output kept in memory for a slow terminal; further lines are dropped."""
    close_seconds: float = 5.0
    """Time that `Console.close` waits for a terminal that accepts nothing."""
    line_limit_bytes: int = 1 << 20
    """Longest line that is shown whole; a longer one is shown in pieces."""
    single_rank_limit_bytes: int = 16 << 20
    """The same if only one rank is shown: the first record of a probe describes all hosts in one line."""
    bar_seconds: float = 10.0
    """Interval at which an unfinished progress bar is shown; ten times as long if the output is not a terminal."""
    dedup_seconds: float = 0.1
    """Time that a line waits for the same line of other ranks."""
    dedup_limit_lines: int = 2000
    """Largest number of waiting lines."""
    colors: tuple[int, ...] = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
    """SGR codes of the tags, by rank modulo their number."""


SETTINGS = ConsoleSettings()


def _without_way_up(bar: bytes) -> bytes:
    """Remove the cursor movements at the end of a nested progress bar."""
    while bar.endswith(UP):
        bar = bar.removesuffix(UP)
    return bar


class _Line:
    """Line that waits for the same line of other ranks."""

    __slots__ = ("key", "number", "ranks", "text", "time")

    def __init__(self, number: int, key: bytes, text: bytes, rank: int) -> None:
        self.number, self.key, self.text, self.ranks, self.time = number, key, text, [rank], time.monotonic()


class LineDeduplicator:
    """Deduplication of lines: merges equal lines of several ranks, whose times and rank prefixes may differ.

    Lines of one rank stay in their order.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Line] = deque()
        self._by_key: dict[bytes, deque[_Line]] = {}
        self._last: dict[int, int] = {}  # by rank, the number of its last waiting line
        self._number = 0

    def add(self, rank: int, text: bytes) -> None:
        """Add a line of a rank.

        Args:
            rank: Global rank.
            text: Line without its end.
        """
        prefix = b"[rank%d]:" % rank  # of torch's tracebacks; the tag names the rank
        if text.startswith(prefix):
            text = text.removeprefix(prefix).removeprefix(b" ")
        key = LOG_TIME.sub(rb"[\1 ", text)
        same = self._by_key.setdefault(key, deque())
        last = self._last.get(rank, -1)
        if same and same[-1].number > last:
            # Sorted by number; there are many if a rank repeats a line.
            line = same[bisect.bisect_right(same, last, key=lambda line: line.number)]
            line.ranks.append(rank)
            self._last[rank] = line.number
            return
        self._number += 1
        line = _Line(self._number, key, text, rank)
        self._waiting.append(line)
        same.append(line)
        self._last[rank] = self._number

    def take(self, *, all_of_them: bool, among: int) -> list[_Line]:
        """Remove and return lines that are due.

        Args:
            all_of_them: True to return all lines at once.
            among: Number of ranks; a line that all of them printed is due.
        """
        old = time.monotonic() - SETTINGS.dedup_seconds
        taken = []
        while self._waiting:
            line = self._waiting[0]
            if not (
                all_of_them
                or line.time < old
                or len(line.ranks) >= among
                or len(self._waiting) > SETTINGS.dedup_limit_lines
            ):
                break
            taken.append(self._waiting.popleft())
            same = self._by_key[line.key]
            same.popleft()  # this line: the lines of a key are in order
            if not same:
                del self._by_key[line.key]
        return taken


class Console:
    """Writer of rank output and messages to standard output and error, in order and without blocking the caller.

    Call `tick` several times a second: it shows lines that waited for deduplication.

    Args:
        hosts: Host of each rank.
        quiet: True to show no output of ranks.
        status_lines: True to show start, progress and end of the run.
        show_rank: Rank whose output is shown; None: all.
        dedup: True to merge equal lines of several ranks.
        streams: Replacements of standard output and error, as in a notebook.
        settings: Limits and times.
    """

    def __init__(
        self,
        hosts: list[str],
        *,
        quiet: bool = False,
        status_lines: bool = False,
        show_rank: int | None = None,
        dedup: bool = True,
        streams: tuple[TextIO, TextIO] | None = None,
        settings: ConsoleSettings = SETTINGS,
    ) -> None:
        self.settings = settings
        self._hosts = hosts
        self._quiet, self._status_lines = quiet, status_lines
        self._show_rank = show_rank
        self._line_limit_bytes = settings.line_limit_bytes if show_rank is None else settings.single_rank_limit_bytes
        dedup = dedup and len(hosts) > 1 and show_rank is None
        self._deduplicators = {descriptor: LineDeduplicator() for descriptor in (1, 2) if dedup}
        self._filter = OutputFilter()
        self._streams = streams
        self._is_terminal = {fd: _is_terminal(streams[fd - 1]) if streams else os.isatty(fd) for fd in (1, 2)}
        has_colors = streams is None and "NO_COLOR" not in os.environ
        self._color = {fd: has_colors and self._is_terminal[fd] for fd in (1, 2)}
        self._tags: dict[tuple[int, int], bytes] = {}
        self._partial: dict[tuple[int, int], bytes] = {}
        self._bar = b""
        self._bar_rank = len(hosts)
        """Lowest rank that has drawn a progress bar; bars of other ranks are not shown."""
        self._bar_at = time.monotonic()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._dropped_lines = 0
        self._changed = threading.Condition()
        self._closing = False
        self._last_message = ""
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def place(self, hosts: list[str]) -> None:
        """Set the hosts of the ranks after a change of the plan.

        Args:
            hosts: Host of each rank.
        """
        self._hosts = hosts
        self._tags.clear()

    def rank_output(self, rank: int, descriptor: int, data: bytes) -> None:
        """Show a piece of a rank's output as tagged whole lines.

        Args:
            rank: Global rank.
            descriptor: 1 for standard output, 2 for standard error.
            data: Bytes, which may begin and end within a line.
        """
        if self._quiet or (self._show_rank is not None and rank != self._show_rank):
            return
        key = (rank, descriptor)
        data = self._partial.pop(key, b"") + data
        whole, newline, rest = data.rpartition(b"\n")
        rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]  # only the last state of a progress bar is shown
        if len(rest) > self._line_limit_bytes:
            whole, newline, rest = data, b"\n", b""
        if rest:
            self._partial[key] = rest
        if newline:
            self._show(rank, descriptor, whole)

    def expect_traceback(self, rank: int) -> None:
        """Hold the traceback of a rank that an uncaught exception ends.

        Args:
            rank: Global rank.
        """
        self._filter.expect_traceback(rank)

    def finish_rank(self, rank: int, *, failed_by_other: bool = False, reported: bool = False) -> None:
        """Show the unfinished last line of a rank that has ended, and its held lines.

        Args:
            rank: Global rank.
            failed_by_other: True if it ended because of another rank; errors about lost connections are then only in its log.
            reported: True if the failure report has its traceback.
        """
        for descriptor in (1, 2):
            if rest := _without_way_up(self._partial.pop((rank, descriptor), b"")):
                self._show(rank, descriptor, rest)
        self._show_lines(rank, 2, self._filter.release(rank, failed_by_other=failed_by_other, reported=reported))

    def say(self, text: str) -> None:
        """Print a message of the launcher on standard error, after all output that the ranks have sent so far.

        Args:
            text: The message.
        """
        self.tick(all_of_them=True)
        self._put(2, f"distrib-launch: {text}\n".encode(errors="replace"), own=True)

    def say_at_close(self, text: str) -> None:
        """Print a message of the launcher after all others.

        Args:
            text: The message.
        """
        self._last_message = text

    def status(self, text: str) -> None:
        """Print a status line of the run, unless they are switched off.

        Args:
            text: The line.
        """
        if self._status_lines:
            self.say(text)

    def tick(self, *, all_of_them: bool = False) -> None:
        """Show lines whose wait for deduplication is over, and from time to time a progress bar.

        Args:
            all_of_them: True to show all waiting lines at once, without progress bars.
        """
        if not all_of_them:
            self._show_bar()
            self._show_overdue(all_of_them=False)
        for descriptor, deduplicator in self._deduplicators.items():
            lines = deduplicator.take(all_of_them=all_of_them, among=len(self._hosts))
            if lines:
                self._put(descriptor, b"".join(self._tag(line.ranks, descriptor) + line.text + b"\n" for line in lines))

    def close(self) -> None:
        """Write the remaining output as long as the terminal accepts it, and stop the thread."""
        self._show_overdue(all_of_them=True)
        self.tick(all_of_them=True)
        if self._last_message:
            self.say(self._last_message)
        with self._changed:
            self._note_dropped()
            self._closing = True
            self._changed.notify()
        left = self._queued_bytes + 1
        while self._thread.is_alive() and self._queued_bytes < left:
            left = self._queued_bytes
            self._thread.join(timeout=self.settings.close_seconds)

    def _show(self, rank: int, descriptor: int, whole: bytes) -> None:
        if UP in whole:
            # A nested progress bar is drawn on the line below the outer one, and the cursor then returns; it is not shown.
            lines = [line for line in whole.split(b"\n") if not line.endswith(UP)]
            if not lines:
                return
            whole = b"\n".join(lines)
        lines = [text for line in whole.split(b"\n") if (text := self._without_bar(rank, line)) is not None]
        self._show_lines(rank, descriptor, self._filter.add(rank, lines) if descriptor == 2 else lines)

    def _without_bar(self, rank: int, line: bytes) -> bytes | None:
        """Return a line as it is shown: a message without the bar before it, or the last state of a bar; None for bars of other ranks."""
        _, drawn, text = line.rstrip(b"\r").rpartition(b"\r")
        if not drawn:
            return text
        if message := AFTER_BAR.search(text):
            return text[message.start() :]
        self._bar_rank = min(self._bar_rank, rank)
        return text if rank == self._bar_rank else None

    def _show_lines(self, rank: int, descriptor: int, lines: list[bytes]) -> None:
        if not self._deduplicators:
            tag = self._tag([rank], descriptor)
            self._put(descriptor, b"".join(tag + line + b"\n" for line in lines))
            return
        deduplicator = self._deduplicators[descriptor]
        for line in lines:
            deduplicator.add(rank, line)
        self.tick()

    def _show_overdue(self, *, all_of_them: bool) -> None:
        for rank, lines in self._filter.overdue(all_of_them=all_of_them):
            self._show_lines(rank, 2, lines)

    def _show_bar(self) -> None:
        """Show the progress bar of the lowest rank that draws one, if the interval is over and it has changed."""
        pause_seconds = self.settings.bar_seconds * (1 if self._streams or os.isatty(2) else 10)
        if time.monotonic() - self._bar_at <= pause_seconds:
            return
        self._bar_at = time.monotonic()
        drawn = min((key for key, partial in self._partial.items() if b"\r" in partial.rstrip(b"\r")), default=None)
        if drawn and drawn[0] <= self._bar_rank:
            self._bar_rank = drawn[0]
            bar = _without_way_up(self._partial[drawn]).rstrip(b"\r").rpartition(b"\r")[2]
            if bar.strip() and bar != self._bar:
                self._bar = bar
                self._put(drawn[1], self._tag([drawn[0]], drawn[1]) + bar + b"\n")

    def _tag(self, ranks: list[int], descriptor: int) -> bytes:
        if len(ranks) > 1:
            tag, color = f"[{ranges(ranks)}] ", 1
        else:
            key, colors = (ranks[0], descriptor), self.settings.colors
            if key in self._tags:
                return self._tags[key]
            tag, color = f"[{ranks[0]}@{self._hosts[ranks[0]]}] ", colors[ranks[0] % len(colors)]
        text = f"\x1b[{color}m{tag}\x1b[0m" if self._color[descriptor] else tag
        if len(ranks) == 1:
            self._tags[key] = text.encode()
        return text.encode()

    def _put(self, descriptor: int, data: bytes, *, own: bool = False) -> None:
        with self._changed:
            if self._queued_bytes + len(data) > self.settings.backlog_bytes and not own:
                self._dropped_lines += data.count(b"\n")
                return
            self._note_dropped()
            self._queue.append((descriptor, data))
            self._queued_bytes += len(data)
            self._changed.notify()

    def _note_dropped(self) -> None:
        if self._dropped_lines:
            what = f"{self._dropped_lines} lines not shown: the terminal was too slow; ranks/ has them"
            note = f"distrib-launch: {what}\n".encode()
            self._dropped_lines = 0
            self._queue.append((2, note))
            self._queued_bytes += len(note)

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                descriptor, data = self._queue.popleft()
                parts = [data]
                size = len(data)
                while self._queue and self._queue[0][0] == descriptor and size < 1 << 20:
                    parts.append(self._queue.popleft()[1])
                    size += len(parts[-1])
                self._queued_bytes -= size
            data = b"".join(parts)
            if self._is_terminal[descriptor]:
                data = without_control_bytes(data)
            with contextlib.suppress(OSError, ValueError):  # the reader has gone; the job continues
                if self._streams:
                    self._streams[descriptor - 1].write(data.decode(errors="replace"))
                    self._streams[descriptor - 1].flush()
                    continue
                left = memoryview(data)
                while left:
                    try:
                        left = left[os.write(descriptor, left) :]
                    except BlockingIOError:  # another process that shares the pipe or terminal made it non-blocking
                        select.select([], [descriptor], [])


def report_error(error: object) -> None:
    """Report an error of `distrib-launch`.

    Args:
        error: Error or message.
    """
    log.get_logger("launch").error("%s", error)


class _TerminalStream:
    """Standard stream that is a terminal: names and messages of hosts and files print without control sequences."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(without_controls(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_terminal(stream: object) -> bool:
    return bool(getattr(stream, "isatty", bool)())


def prepare_streams() -> None:
    """Replace closed standard streams (`>&-`), for which Python has None, by /dev/null. Let text that is not UTF-8 be printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        with contextlib.suppress(AttributeError):  # replaced by a notebook
            getattr(sys, name).reconfigure(errors="backslashreplace")
        if _is_terminal(stream := getattr(sys, name)):
            setattr(sys, name, _TerminalStream(stream))


@contextlib.contextmanager
def tolerate_closed_pipe() -> Iterator[None]:
    """Ignore a closed pipe while the block prints to standard output, as in `... | head`.

    Raises:
        LaunchError: Standard output cannot be written for another reason, such as a full disk.
    """
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        if not isinstance(error, BrokenPipeError):
            raise LaunchError(f"standard output: {error.strerror}", code="file-not-written") from error
