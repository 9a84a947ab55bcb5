"""How a script ends: whether it failed, and that it ends at all."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

FAILED_EXIT_SECONDS = 10.0


class ExitWatch:
    """Calls `leave(failed)` when the interpreter exits, for scripts that do not close their job themselves.

    `failed` is True after an uncaught exception or a `sys.exit`, `exit` or `quit` with anything but success: then the others
    must not be waited for. They have to be seen as they happen; an `atexit` function is not told the exit code.
    Whoever raises SystemExit is not seen: Python tells nobody. Nor is a `sys.exit` that another module than the script has imported by its name.
    """

    def __init__(self, leave: Callable[[bool], None]) -> None:
        self._leave = leave
        self._failed = self._abandoned = False
        self._process = os.getpid()
        self._hook, self._exit = sys.excepthook, sys.exit
        self._own_hook, self._own_exit = self._on_exception, self._on_exit  # a bound method is made anew each time
        sys.excepthook, sys.exit = self._own_hook, self._own_exit
        self._quitters = {name: getattr(builtins, name) for name in ("exit", "quit") if hasattr(builtins, name)}
        for name in self._quitters:
            setattr(builtins, name, self._own_exit)
        script = vars(sys.modules["__main__"])
        self._imported = [name for name, value in script.items() if value is self._exit]
        script.update(dict.fromkeys(self._imported, self._own_exit))
        atexit.register(self._at_exit)

    def end(self, *, failed: bool = False) -> None:
        """Stops watching. After one that `failed` Python may take `FAILED_EXIT_SECONDS` to end: from when it does so, as the
        script may handle its error, and have much to do still."""
        self._abandoned = failed
        if not failed:
            atexit.unregister(self._at_exit)
        if sys.excepthook == self._own_hook:
            sys.excepthook = self._hook
        if sys.exit == self._own_exit:
            sys.exit = self._exit
        vars(sys.modules["__main__"]).update(dict.fromkeys(self._imported, self._exit))
        for name, quitter in self._quitters.items():
            if getattr(builtins, name, None) == self._own_exit:
                setattr(builtins, name, quitter)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._failed = True
        self._hook(kind, error, traceback)

    def _on_exit(self, status: str | int | None = None, /) -> NoReturn:
        self._failed = status not in (None, 0)
        self._exit(status)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # not in a forked worker
            if not self._abandoned:
                self._leave(self._failed)
            if self._abandoned:
                no_later_than()


def succeeded(error: BaseException | None) -> bool:
    """Whether a block that ended with `error` did what it should."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def no_later_than() -> None:
    """Ends this process with exit code 1, showing where it hangs, if it is still there after `FAILED_EXIT_SECONDS`.

    The destructors of communication libraries may wait for peers that will never answer.
    """
    faulthandler.dump_traceback_later(FAILED_EXIT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)


def fail() -> NoReturn:
    """Ends this process with exit code 1 while Python is ending already, which would end it with 0."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(1)


def let_go_of_tensors() -> None:
    """Gives Gloo's threads the time to drop the tensors of the last collectives, for which they take Python's lock.

    Before torch 2.8 whoever destroys their group waits for them with the lock in his hand, for ever (pytorch pull request 154976).
    Where a model keeps the group alive, or the rank has failed, nothing waits for them, and one that asks for the lock when
    Python has begun to end aborts the process (seen in one exit of four with torch 2.13; pytorch pull request 179291).
    """
    time.sleep(0.1)


def succeed_no_later_than(seconds: float) -> None:
    """Ends this process with exit code 0 if it is still there after `seconds`: a thread of the script's may go on for ever."""
    timer = threading.Timer(seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
