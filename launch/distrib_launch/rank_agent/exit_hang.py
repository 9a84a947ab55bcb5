"""A script that has died of an exception and does not end: Python is gone, and what C does at a program's exit waits.

mpi4py leaves MPI there, and MPI_Finalize waits for all ranks, of which some wait for this one: nobody would ever be told.
Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
from collections.abc import Callable
from pathlib import Path

from distrib_launch.rank_agent.stack_dump import Spies

FIRST_LOOK_SECONDS = 2.0
HEAD = b"Traceback (most recent call last):"
ASIDE = re.compile(rb"(^|\n)Exception (ignored|in thread)[^\n]*\n\Z")
"""Before a traceback that ends no script: of a thread, or of a destructor, which may come at a script's end."""
KEPT_BYTES = 1024
"""So much of what was said before is looked at: a head and the line before it may come in pieces."""
GONE = b"Failed to find a python interpreter"
"""What py-spy says of a process whose interpreter has been taken down; it may say so of an interpreter that it does not know, too."""
STACK = json.dumps([{"thread_name": "MainThread", "active": True, "frames": [], "state": "gone"}]).encode()
"""What is told in place of the stack of a script whose Python is gone."""
PR_SET_PTRACER = 0x59616D61
"""Lets a process's memory be read by another's children, such as py-spy, where the kernel's Yama forbids it (linux/prctl.h)."""


class Departed:
    """Looks, ever less often, after a script that has printed a traceback and lives on; `left` is called when its Python is gone."""

    def __init__(self, selector: selectors.BaseSelector, left: Callable[[], None]) -> None:
        self._left = left
        self._script = Spies(selector, self._hear_of_script)
        self._own = Spies(selector, self._hear_of_ourselves)
        self._has_spoken = False
        self._seen = b""
        self._look_at = float("inf")
        self._wait_seconds = FIRST_LOOK_SECONDS
        self._pid = 0
        self._knows_python = False
        """Whether py-spy reads the stack of this process, which runs in the script's interpreter."""

    def hear(self, errors: bytes, now: float) -> None:
        """What the script has written to standard error, or nothing where it was to standard output."""
        self._has_spoken = True
        text = self._seen + errors
        end = 0
        for head in re.finditer(re.escape(HEAD), text):
            end = head.end()
            if not ASIDE.search(text[: head.start()]):
                self._wait_seconds = FIRST_LOOK_SECONDS
                self._look_at = now + self._wait_seconds
        self._seen = text[end:][-KEPT_BYTES:]

    def look(self, pid: int, now: float) -> None:
        """Look whether it is time; `pid` is the script's."""
        if now >= self._look_at:
            self._wait_seconds *= 2
            self._look_at = now + self._wait_seconds
            self._pid = pid
            self._script.take(pid)

    def translate(self, dump: bytes) -> bytes:
        """What py-spy says of the script; a Python that had something to say, and is not to be found, is gone."""
        return STACK if GONE in dump and self._has_spoken else dump

    def _hear_of_script(self, dump: bytes) -> None:
        if _is_in_its_code(dump):
            self._look_at = float("inf")  # it has survived that traceback, and may end well
            return
        if GONE not in dump or not _is_our_interpreter(self._pid):
            return
        if self._knows_python:
            self._left()
            return
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0)
        self._own.take(os.getpid())

    def _hear_of_ourselves(self, dump: bytes) -> None:
        if _is_stack(dump):
            self._knows_python = True
            self._script.take(self._pid)


def _is_our_interpreter(pid: int) -> bool:
    """Whether a process runs in the interpreter of this one: a script may have become another program."""
    try:
        return Path(f"/proc/{pid}/exe").samefile("/proc/self/exe")
    except OSError:
        return False


def _is_in_its_code(dump: bytes) -> bool:
    """Whether the main thread is in the script, and not in what Python does at its end."""
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        main = [thread for thread in json.loads(dump) if thread["thread_name"] in ("MainThread", None)]
        return main[0]["frames"][-1]["name"] in ("<module>", "_run_module_as_main")
    return False


def _is_stack(dump: bytes) -> bool:
    try:
        return isinstance(json.loads(dump), list)
    except ValueError:
        return False
