"""Event loop of parameter servers and of their clients."""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class EventLoop:
    """A loop of one thread over sockets, calls from other threads, and timers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._wake_lock = threading.Lock()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake_up)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._deferred: deque[Callable[[], None]] = deque()
        self._unwatched: set[socket.socket | int] = set()
        self.ended = False

    def call_soon(self, work: Callable[[], None]) -> None:
        """Run a function in the loop's thread. Any thread may call this.

        Args:
            work: The function.
        """
        self._calls.append(work)
        if self._wake_lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self._wake_write.send(b"!")

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        """Run a function after a time. For the loop's own thread.

        Args:
            seconds: The time from now.
            work: The function.
        """
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._count, work))

    def defer(self, work: Callable[[], None]) -> None:
        """Run a function once the present callback has returned. For the loop's own thread.

        Args:
            work: The function.
        """
        self._deferred.append(work)

    def watch(self, sock: socket.socket | int, on_events: Callable[[int], None], *, writing: bool = False) -> None:
        """Call a function when a socket is readable or writable.

        Args:
            sock: The socket, or the descriptor of a pipe, which may be watched already.
            on_events: Called with the events.
            writing: True to wait for the socket to be writable, too.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        try:
            key = self._selector.get_key(sock)
        except KeyError:
            self._selector.register(sock, events, on_events)
            return
        if key.events != events or key.data != on_events:
            self._selector.modify(sock, events, on_events)

    def unwatch(self, sock: socket.socket | int) -> None:
        """Stop watching a socket. Events that have happened already are not delivered.

        Args:
            sock: The socket, or the descriptor of a pipe.
        """
        self._unwatched.add(sock)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def run(self) -> None:
        """Run until `ended`."""
        while not self.ended:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            if self._calls:
                timeout = 0.0
            self._unwatched.clear()
            for key, events in self._selector.select(timeout):
                if key.fileobj not in self._unwatched:
                    self._run(key.data, events)
            if self._calls:  # one at a time, as each may wait for a GPU while there is data to send
                self._run(self._calls.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._run(heapq.heappop(self._timers)[2])
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self, work: Callable[..., None], *args: Any) -> None:
        work(*args)
        while self._deferred:
            self._deferred.popleft()()

    def _on_wake_up(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(64)
        self._wake_lock.release()
