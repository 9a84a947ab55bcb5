"""Exit of one rank, as its exit record or its silence shows it."""

from __future__ import annotations

import signal
from typing import Any, Literal

import msgspec

from distrib.utils.json_text import decode_json

Lost = Literal["", "closed", "silence"]
"""Loss of a rank without an exit record: its connection closed, or its host fell silent; empty: it was not lost."""


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Uncaught exception of a rank: `message` in one line, and Python's `traceback`."""

    message: str
    traceback: str
    secondary: bool = False
    """True if the rank reported that it failed because of another rank or a server."""
    own_traceback: str = ""
    """Traceback of an error of distrib without the frames of libraries; empty for other errors."""

    @property
    def shown(self) -> str:
        """Return the traceback for the user."""
        return self.own_traceback or self.traceback

    @property
    def kind(self) -> tuple[str, str]:
        """Return the type of the exception and the innermost frame of the script."""
        return kind_of_error(self.message, self.shown)


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """Exit of one rank."""

    rank: int
    local_rank: int
    host: str
    time: float
    """Unix time on the launcher's clock."""
    exit_code: int | None
    """None if no exit record came."""
    signal: int | None
    """Signal that ended it; without an exit record, the signal of the fault in its stderr."""
    stopped_by: str
    """`launcher`, `engine` or `lost`; empty if it ended by itself."""
    message: str
    lost: Lost = ""
    consequence: bool = False
    """True if it failed because its connection to another rank broke."""
    closing: bool = False
    """True if it reported the end of its script."""
    error: ErrorRecord | None = None

    @property
    def failed(self) -> bool:
        """Return True if it did not end with exit code 0."""
        return self.exit_code != 0 or self.signal is not None

    @property
    def code(self) -> int:
        """Return the exit code of the launcher if this is the first failure."""
        return 128 + self.signal if self.signal else self.exit_code or 1

    @property
    def how(self) -> str:
        """Return `SIGKILL`, `exit code 3` or `no exit record`."""
        if self.exit_code is None:
            return "no exit record"
        return signal_name(self.signal) if self.signal else f"exit code {self.exit_code}"


def kind_of_error(message: str, traceback: str) -> tuple[str, str]:
    """Return the type of an exception and the innermost frame of the script, as messages may name a host, a port or a time.

    Args:
        message: Exception in one line.
        traceback: Its traceback.
    """
    lines = traceback.splitlines()
    frames = [line.strip() for line in lines if line.startswith('  File "') and "/lib/python" not in line]
    if not frames:
        return message, ""
    return message.partition(":")[0], frames[-1]


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9, `signal 99` for a number without a name.

    Args:
        number: Number of the signal.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def parse_error_record(text: str) -> ErrorRecord | None:
    """Return the error in an error file of torchrun's format, None if the text is none.

    Args:
        text: Content of the file that TORCHELASTIC_ERROR_FILE names.
    """
    try:
        record: Any = decode_json(text, dict[str, Any])["message"]
        message = record if isinstance(record, str) else record["message"]
        extra = {"py_callstack": ""} if isinstance(record, str) else record["extraInfo"]
        return ErrorRecord(
            message=message.strip().splitlines()[0],
            traceback=extra["py_callstack"].strip("\n"),
            secondary=extra.get("secondary") is True,
            own_traceback=str(extra.get("own_callstack", "")),
        )
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError):
        return None
