"""Messages on standard error: `logging` loggers `distrib.<area>` with one format, `<program>: <level>: <message>`.

A program may replace the handler of the logger `distrib`, as of any library.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from distrib.errors import DistribError
from distrib.utils.terminal_text import without_controls

PROGRAMS = {"distrib.launch": "distrib-launch", "distrib.topo": "distrib-topo"}
"""Prefix of messages by logger; `distrib` for all others."""
LEVELS = {"INFO": "note: ", "WARNING": "warning: ", "ERROR": "error: "}


class _Handler(logging.Handler):
    """Write to the present `sys.stderr`, which notebooks and tests replace. A closed terminal is not an error."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if getattr(record, "plain", False) else LEVELS.get(record.levelname, "")
        with contextlib.suppress(OSError, ValueError):
            print(f"{PROGRAMS.get(record.name, 'distrib')}: {level}{_text(record)}", file=sys.stderr, flush=True)


def _text(record: logging.LogRecord) -> str:
    """Return the message; on a terminal without control sequences, and the hint of an error has its own line."""
    if not sys.stderr.isatty():
        return record.getMessage()
    error = record.args[0] if isinstance(record.args, tuple) and record.args else None
    if isinstance(error, DistribError) and error.hint:
        return without_controls(f"{error.what}\n  {error.hint}")
    return without_controls(record.getMessage())


def get_logger(area: str) -> logging.Logger:
    """Return the logger of an area, such as `launch` or `training`.

    Args:
        area: Name of the area.
    """
    root = logging.getLogger("distrib")
    if not root.handlers:
        root.addHandler(_Handler())
        root.setLevel(logging.INFO)
        root.propagate = False
    return logging.getLogger(f"distrib.{area}")


PLAIN = {"plain": True}
"""`extra=PLAIN` leaves out the level: progress of a command, not a note."""
