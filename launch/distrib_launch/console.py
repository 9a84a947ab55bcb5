"""The terminal: every rank's lines whole and tagged, and the launcher's own words, written by a thread of their own.

A terminal that stands still (Ctrl-S, a stuck ssh) must not hold up the job: what it cannot take waits here, and past
`BACKLOG_BYTES` it is dropped with a line that says so. The files under `ranks/` get everything.
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
from typing import TextIO

from distrib.errors import LaunchError
from distrib.utils import log
from distrib.utils.ranges import ranges

BACKLOG_BYTES = 64 << 20
PATIENCE_SECONDS = 5.0
"""At the end, for so long one is waited for who reads nothing."""

LINE_LIMIT_BYTES = 1 << 20
"""A longer line is shown in pieces."""

ALONE_LIMIT_BYTES = 16 << 20
"""So long may a line be where one rank alone is shown: the probe's first one tells of all hosts."""

BAR_SECONDS = 10.0
"""How often a progress bar is shown that is not at its end; ten times as seldom where no terminal is."""

FOLD_SECONDS = 0.1
FOLD_LIMIT_LINES = 2000
"""How long, and among how many lines, a line waits for the same line of other ranks."""

LOG_TIME = re.compile(rb"^\[([IWE])\d{3,4} [\d:.]+ ")
"""How torch's own log lines begin; the time tells them apart where nothing else does."""

RANK = re.compile(rb"^\[rank(\d+)\]: ?")
"""What torch puts before the lines of a traceback: which rank's it is our own tag tells."""

UP = b"\x1b[A"
"""Moves a terminal's cursor to the line above."""

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


def _without_way_up(bar: bytes) -> bytes:
    """The state of a bar that is drawn within another, without the way back to that."""
    while bar.endswith(UP):
        bar = bar.removesuffix(UP)
    return bar


class _Line:
    """A line that waits for other ranks to say the same."""

    __slots__ = ("key", "number", "ranks", "text", "time")

    def __init__(self, number: int, key: bytes, text: bytes, rank: int) -> None:
        self.number, self.key, self.text, self.ranks, self.time = number, key, text, [rank], time.monotonic()


class Folder:
    """Folds identical lines of several ranks into one, whatever time and rank torch writes into them; each rank's stay in their order."""

    def __init__(self) -> None:
        self._waiting: deque[_Line] = deque()
        self._by_key: dict[bytes, deque[_Line]] = {}
        self._last: dict[int, int] = {}  # by rank, the number of its last waiting line
        self._number = 0

    def add(self, rank: int, text: bytes) -> None:
        if (named := RANK.match(text)) and int(named[1]) == rank:
            text = text[named.end() :]
        key = LOG_TIME.sub(rb"[\1 ", text)
        same = self._by_key.setdefault(key, deque())
        last = self._last.get(rank, -1)
        if same and same[-1].number > last:
            # They are in order, and many where a rank says one thing over and over.
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
        """Lines that have waited long enough, or that each of `among` ranks has said."""
        old = time.monotonic() - FOLD_SECONDS
        taken = []
        while self._waiting:
            line = self._waiting[0]
            if not (
                all_of_them or line.time < old or len(line.ranks) >= among or len(self._waiting) > FOLD_LIMIT_LINES
            ):
                break
            taken.append(self._waiting.popleft())
            same = self._by_key[line.key]
            same.popleft()  # the first of them is this line, as the lines of a key wait in order
            if not same:
                del self._by_key[line.key]
        return taken


class Console:
    """Writes rank output and messages to standard output and error, in order, without ever blocking the caller.

    `hosts` names each rank's host. `streams` take what is written in place of standard output and error, as in a
    notebook. Call `tick` now and then: lines that were held back for folding are shown by it.
    """

    def __init__(
        self,
        hosts: list[str],
        *,
        quiet: bool = False,
        show_rank: int | None = None,
        dedup: bool = True,
        streams: tuple[TextIO, TextIO] | None = None,
    ) -> None:
        self._hosts = hosts
        self._quiet = quiet
        self._show_rank = show_rank
        self._line_limit_bytes = LINE_LIMIT_BYTES if show_rank is None else ALONE_LIMIT_BYTES
        self._folders = {1: Folder(), 2: Folder()} if dedup and len(hosts) > 1 and show_rank is None else {}
        self._streams = streams
        self._colour = {fd: streams is None and os.isatty(fd) and "NO_COLOR" not in os.environ for fd in (1, 2)}
        self._tags: dict[tuple[int, int], bytes] = {}
        self._partial: dict[tuple[int, int], bytes] = {}
        self._bar = b""
        self._bar_at = time.monotonic()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._dropped_lines = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def place(self, hosts: list[str]) -> None:
        """The ranks run elsewhere than was thought, or than before: on these hosts."""
        self._hosts = hosts
        self._tags.clear()

    def rank_output(self, rank: int, descriptor: int, data: bytes) -> None:
        """Show a piece of a rank's output (`descriptor` 1 or 2) as tagged whole lines."""
        if self._quiet or (self._show_rank is not None and rank != self._show_rank):
            return
        key = (rank, descriptor)
        data = self._partial.pop(key, b"") + data
        whole, newline, rest = data.rpartition(b"\n")
        rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]  # of a progress bar's states the last one is ever shown
        if len(rest) > self._line_limit_bytes:
            whole, newline, rest = data, b"\n", b""
        if rest:
            self._partial[key] = rest
        if newline:
            self._show(rank, descriptor, whole)

    def finish_rank(self, rank: int) -> None:
        """The rank has ended: show what it left without a line end."""
        for descriptor in (1, 2):
            if rest := _without_way_up(self._partial.pop((rank, descriptor), b"")):
                self._show(rank, descriptor, rest)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error, after all that the ranks have said so far."""
        self.tick(all_of_them=True)
        self._put(2, f"distrib-launch: {text}\n".encode(errors="replace"), own=True)

    def tick(self, *, all_of_them: bool = False) -> None:
        """Show lines that were held back for folding, and now and then how far a progress bar is."""
        if not all_of_them:
            self._show_bar()
        for descriptor, folder in self._folders.items():
            lines = folder.take(all_of_them=all_of_them, among=len(self._hosts))
            if lines:
                self._put(descriptor, b"".join(self._tag(line.ranks, descriptor) + line.text + b"\n" for line in lines))

    def close(self) -> None:
        """Write what waits, for as long as somebody takes it, and stop."""
        self.tick(all_of_them=True)
        with self._changed:
            self._note_dropped()
            self._closing = True
            self._changed.notify()
        left = self._queued_bytes + 1
        while self._thread.is_alive() and self._queued_bytes < left:
            left = self._queued_bytes
            self._thread.join(timeout=PATIENCE_SECONDS)

    def _show(self, rank: int, descriptor: int, whole: bytes) -> None:
        if UP in whole:
            # A bar within another is drawn a line below, and then the cursor goes back: nothing of it stays.
            lines = [line for line in whole.split(b"\n") if not line.endswith(UP)]
            if not lines:
                return
            whole = b"\n".join(lines)
        if b"\r" in whole:  # of a progress bar's states, the last one on each line
            whole = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n"))
        if not self._folders:
            tag = self._tag([rank], descriptor)
            self._put(descriptor, tag + whole.replace(b"\n", b"\n" + tag) + b"\n")
            return
        folder = self._folders[descriptor]
        for line in whole.split(b"\n"):
            folder.add(rank, line)
        self.tick()

    def _show_bar(self) -> None:
        """Of the bars that ranks draw, the first one's, if it is time and it has changed."""
        pause_seconds = BAR_SECONDS if self._streams or os.isatty(2) else 10 * BAR_SECONDS
        if time.monotonic() - self._bar_at <= pause_seconds:
            return
        self._bar_at = time.monotonic()
        drawn = min((key for key, partial in self._partial.items() if b"\r" in partial.rstrip(b"\r")), default=None)
        if drawn:
            bar = _without_way_up(self._partial[drawn]).rstrip(b"\r").rpartition(b"\r")[2]
            if bar.strip() and bar != self._bar:
                self._bar = bar
                self._put(drawn[1], self._tag([drawn[0]], drawn[1]) + bar + b"\n")

    def _tag(self, ranks: list[int], descriptor: int) -> bytes:
        if len(ranks) > 1:
            tag, colour = f"[{ranges(ranks)}] ", 1
        else:
            key = (ranks[0], descriptor)
            if key in self._tags:
                return self._tags[key]
            tag, colour = f"[{ranks[0]}@{self._hosts[ranks[0]]}] ", COLOURS[ranks[0] % len(COLOURS)]
        text = f"\x1b[{colour}m{tag}\x1b[0m" if self._colour[descriptor] else tag
        if len(ranks) == 1:
            self._tags[key] = text.encode()
        return text.encode()

    def _put(self, descriptor: int, data: bytes, *, own: bool = False) -> None:
        with self._changed:
            if self._queued_bytes + len(data) > BACKLOG_BYTES and not own:
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
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the job goes on
                if self._streams:
                    self._streams[descriptor - 1].write(data.decode(errors="replace"))
                    self._streams[descriptor - 1].flush()
                    continue
                left = memoryview(data)
                while left:
                    try:
                        left = left[os.write(descriptor, left) :]
                    except BlockingIOError:  # who shares this pipe, or terminal, has made it so
                        select.select([], [descriptor], [])


def report_error(error: object) -> None:
    """Report an error of `distrib-launch`.

    Args:
        error: Error or message.
    """
    log.get_logger("launch").error("%s", error)


def ignore_closed_streams() -> None:
    """Where standard output or error is closed (`>&-`), as Python then has none, what would be written is thrown away."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


@contextlib.contextmanager
def tolerate_closed_pipe() -> Iterator[None]:
    """What is printed may find nobody to read it, as in `... | head`; that is no failure.

    Raises LaunchError where it cannot be written: on a full disk, say.
    """
    try:
        yield
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left, when Python ends
        if not isinstance(error, BrokenPipeError):
            raise LaunchError(f"standard output: {error.strerror}") from error
