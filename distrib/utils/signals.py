"""Signals as events of a selector: a loop handles them between its other events, and nothing is interrupted."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

FORWARDED = signal.SIGUSR1, signal.SIGUSR2
"""Signals for the scripts, which may save a checkpoint: schedulers send them before a time limit."""

STOPPING = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGPWR),
    *(signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGPOLL),
)
"""Signals that stop the job. All of them end a process by default, and schedulers can be configured to send them."""


def raise_on_termination() -> None:
    """Let the signals that stop a job raise KeyboardInterrupt with their number, as Ctrl-C does, unless they are ignored (nohup)."""
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _raise_interrupt)


def exit_code(interrupted: KeyboardInterrupt) -> int:
    """Return the exit code of an interrupted command: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    Args:
        interrupted: The exception that ended it.
    """
    return 128 + int((interrupted.args or (signal.SIGINT,))[0])


def _raise_interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def on_selector(
    selector: selectors.BaseSelector, numbers: Iterable[signal.Signals], handler: Callable[[int], None]
) -> Iterator[None]:
    """Deliver signals through a selector. Does nothing outside the main thread, which alone receives signals.

    Args:
        selector: Wakes up for a signal; the data of its event is a function that calls `handler`.
        numbers: Signals to deliver. SIGHUP stays ignored if it is: after nohup a job outlives its terminal.
        handler: Called with the number of each signal.
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
                handler(number)

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
        for number, previous in handlers.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(before)
        os.close(wake_read)
        os.close(wake_write)


@contextlib.contextmanager
def ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore signals in this process alone: programs that it starts get them, and so does `on_selector`.

    Args:
        numbers: The signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
