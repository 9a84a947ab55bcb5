"""From exit records to the one failure that came first, told so that a tired person can act on it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec
from distrib_launch.results import Failure

TAIL_BYTES = 64 << 10
TAIL_LINES = 20


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended, as its exit record told or its silence showed.

    `time` is on the launcher's clock. `exit_code` is None where no record came. `stopped_by` is empty when it ended of
    its own accord.
    """

    rank: int
    local_rank: int
    host: str
    time: float
    exit_code: int | None
    signal: int | None
    stopped_by: str
    message: str

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 or self.signal is not None

    @property
    def code(self) -> int:
        """What the launcher exits with when this failure came first."""
        return 128 + self.signal if self.signal else self.exit_code or 1


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The earliest failure that nobody asked for; one that was asked for only where there is no other."""
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda ending: (bool(ending.stopped_by), ending.time, ending.rank), default=None)


def describe(ending: Ending, log: Path, interpreter: str) -> Failure:
    """Read the rank's error output for what it died of."""
    tail = _tail(log)
    # Python prints a traceback and then exits; one that died of a signal left at most an old, handled one behind.
    traceback = last_traceback(tail) if ending.exit_code else ""
    message = ending.message
    if not message and traceback:
        message = traceback.rstrip().splitlines()[-1]
        if missing := re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", message):
            message += f" (install {missing[1].partition('.')[0]} for {interpreter} on {ending.host})"
    if not message and ending.signal:
        message = f"killed by {signal_name(ending.signal)}"
    if not message:
        last = [line for line in tail.splitlines() if line.strip()][-1:]
        message = f"exit code {ending.exit_code}" + (f"; last words: {last[0].strip()}" if last else "")
    return Failure(
        rank=ending.rank,
        host=ending.host,
        time=ending.time,
        exit_code=ending.exit_code,
        signal=ending.signal,
        message=message,
        traceback=traceback,
        log=str(log),
    )


def last_traceback(text: str) -> str:
    """The last Python traceback in a text, whole, or an empty string."""
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return ""
    # A chained exception has several; the story begins with the first of the chain.
    chained = ("\nThe above exception was the direct cause", "\nDuring handling of the above exception")
    while (link := max(text.rfind(words, 0, start) for words in chained)) > 0:
        earlier = text.rfind("Traceback (most recent call last):", 0, link)
        if earlier < 0 or text[link:start].count("\n") > 4:
            break
        start = earlier
    start = text.rfind("\n", 0, start) + 1
    lines = text[start:].splitlines()
    end = len(lines)
    for index in range(1, len(lines)):
        line = lines[index]
        if line and not line[0].isspace() and not line.startswith(("Traceback", "The above", "During")):
            end = index + 1
            if not any(words.strip() in "\n".join(lines[index : index + 4]) for words in chained):
                break
    return "\n".join(lines[:end])


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(failure: Failure, *, others: int) -> str:
    """The failure in a few lines, for the end of the terminal's output."""
    who = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host
    lines = [f"{who} failed first: {failure.message}"]
    if failure.traceback:
        lines += ["  " + line for line in failure.traceback.splitlines()[-TAIL_LINES:]]
    lines.append(f"  its error output: {failure.log}")
    if others:
        lines.append(f"  the other {others} rank(s) were stopped")
    return "\n".join(lines)


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
