"""Signals as events of a selector: a loop hears of them between its other events, and nothing is interrupted."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn


def interrupt() -> None:
    """From now on SIGTERM and SIGHUP end the command as Ctrl-C does, by a KeyboardInterrupt that has their number; nohup's wish is left alone."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _interrupted)


def exit_code(interrupted: KeyboardInterrupt) -> int:
    """What a command that was interrupted exits with: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + int((interrupted.args or (signal.SIGINT,))[0])


def _interrupted(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def heard(
    selector: selectors.BaseSelector, numbers: Iterable[signal.Signals], hear: Callable[[int], None]
) -> Iterator[None]:
    """While this lasts, `selector` wakes up for `numbers`; its event's data, called with any arguments, calls `hear` for each.

    SIGHUP stays ignored where it is: after nohup a job outlives its terminal. In a thread no signal can be had, and none is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)

    def wake(*_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(wake_read, 64):
                hear(number)

    before = signal.set_wakeup_fd(wake_write)
    handlers = {
        number: signal.signal(number, lambda *_: None)
        for number in numbers
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    selector.register(wake_read, selectors.EVENT_READ, wake)
    try:
        yield
    finally:
        selector.unregister(wake_read)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(wake_read)
        os.close(wake_write)


@contextlib.contextmanager
def passed_over(number: signal.Signals) -> Iterator[None]:
    """While this lasts, `number` does nothing here; programs that are started meanwhile have it as ever, and `heard` hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, before)
