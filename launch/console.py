"""The terminal: every rank's lines whole and tagged, and the launcher's own words, written by a thread of their own.

A terminal that stands still (Ctrl-S, a stuck ssh) must not hold up the job: what it cannot take waits here, and past
`BACKLOG_BYTES` it is dropped with a line that says so. The files under `ranks/` get everything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque

BACKLOG_BYTES = 64 << 20
LINE_LIMIT_BYTES = 1 << 20
"""A longer line is shown in pieces."""

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class Console:
    """Writes rank output and messages to standard output and error, in order, without ever blocking the caller."""

    def __init__(self, *, quiet: bool = False, only_rank: int | None = None) -> None:
        self._quiet = quiet
        self._only_rank = only_rank
        self._colour = {fd: os.isatty(fd) and "NO_COLOR" not in os.environ for fd in (1, 2)}
        self._partial: dict[tuple[int, int], bytes] = {}
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._dropped_lines = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def rank_output(self, rank: int, host: str, descriptor: int, data: bytes) -> None:
        """Show a piece of a rank's output (`descriptor` 1 or 2) as tagged whole lines."""
        if self._quiet or (self._only_rank is not None and rank != self._only_rank):
            return
        key = (rank, descriptor)
        data = self._partial.pop(key, b"") + data
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > LINE_LIMIT_BYTES:
            whole, newline, rest = data, b"\n", b""
        if rest:
            self._partial[key] = rest
        if newline:
            self._put(descriptor, self._tagged(rank, host, descriptor, whole))

    def finish_rank(self, rank: int, host: str) -> None:
        """The rank has ended: show what it left without a line end."""
        for descriptor in (1, 2):
            if rest := self._partial.pop((rank, descriptor), b""):
                self._put(descriptor, self._tagged(rank, host, descriptor, rest))

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self._put(2, f"distrib-launch: {text}\n".encode(errors="replace"))

    def close(self) -> None:
        """Write what waits, for a few seconds at most, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=5.0)

    def _tagged(self, rank: int, host: str, descriptor: int, whole: bytes) -> bytes:
        tag = f"[{rank}@{host}] "
        if self._colour[descriptor]:
            tag = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{tag}\x1b[0m"
        prefix = tag.encode()
        if b"\r" in whole:  # of a progress bar's states, the last one on each line
            whole = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n"))
        return prefix + whole.replace(b"\n", b"\n" + prefix) + b"\n"

    def _put(self, descriptor: int, data: bytes) -> None:
        with self._changed:
            if self._queued_bytes + len(data) > BACKLOG_BYTES:
                self._dropped_lines += data.count(b"\n")
                return
            if self._dropped_lines:
                note = f"distrib-launch: {self._dropped_lines} lines not shown: the terminal was too slow; ranks/ has them\n"
                self._dropped_lines = 0
                self._queue.append((2, note.encode()))
            self._queue.append((descriptor, data))
            self._queued_bytes += len(data)
            self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                descriptor, data = self._queue.popleft()
                while self._queue and self._queue[0][0] == descriptor and len(data) < 1 << 20:
                    data += self._queue.popleft()[1]
                self._queued_bytes -= len(data)
            with contextlib.suppress(OSError):  # nobody reads any more: the job goes on
                while data:
                    data = data[os.write(descriptor, data) :]


def complain(error: object) -> None:
    """Print an error of the command itself."""
    with contextlib.suppress(OSError):
        print(f"distrib-launch: error: {error}", file=sys.stderr, flush=True)
