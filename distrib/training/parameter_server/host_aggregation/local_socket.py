"""A connection between two workers of one host, over a local socket without a file."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

from distrib.training.parameter_server.transport import Connection, Frame, Loop
from distrib.utils.framing import ProtocolError


def open_door() -> socket.socket:
    """Where this worker is found by the others of its host, by the socket's name."""
    door = socket.socket(socket.AF_UNIX)
    door.bind("")  # the kernel chooses a free name
    door.listen(1024)
    door.setblocking(False)
    return door


def knock(name: bytes) -> socket.socket | None:
    """A connection to a worker's door; None when the worker is gone."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


def is_there(name: bytes) -> bool:
    """Whether the worker with this door lives."""
    sock = knock(name)
    if sock is not None:
        sock.close()
    return sock is not None


class Line:
    """One end. `receive(line, frame, payload)` gets what comes in, `closed(line)` is called when the other side is gone."""

    def __init__(
        self, loop: Loop, sock: socket.socket, key: bytes, *, listener: bool,
        receive: Callable[[Line, Frame, Any], None], closed: Callable[[Line], None],
    ) -> None:  # fmt: skip
        self.worker = -1
        """Who is at the other end."""
        self._loop, self._sock, self._closed = loop, sock, closed
        self._queued = False
        self._connection = Connection(
            sock,
            key,
            listener=listener,
            room=lambda _: None,
            receive=lambda f, p: receive(self, f, p),
            queued=self._queue,
        )
        loop.watch(sock, self._attend, writing=True)

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """Queues a frame; all that is queued in one turn of the loop is sent at its end."""
        self._connection.send(frame, payload)

    def close(self) -> None:
        """Hangs up; `closed` is not called."""
        if self._sock.fileno() >= 0:
            self._loop.forget(self._sock)
            self._sock.close()

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            self._loop.later(0.0, self._flush)

    def _flush(self) -> None:
        self._queued = False
        self._attend(0)

    def _attend(self, events: int) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            if events & selectors.EVENT_READ:
                self._connection.read()
            self._connection.flush()
            self._loop.watch(self._sock, self._attend, writing=self._connection.waits_to_send)
        except (OSError, ProtocolError):
            self.close()
            self._closed(self)
