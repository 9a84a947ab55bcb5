"""Connections between the workers of one host: local sockets with abstract names, without a file."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

from distrib.training.parameter_server.transport import Connection, EventLoop, Frame
from distrib.utils.framing import ProtocolError


def open_local_listener() -> socket.socket:
    """Listen on a local socket whose name the kernel chooses.

    Returns:
        The listening socket, non-blocking.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def connect_locally(name: bytes) -> socket.socket | None:
    """Connect to a worker of this host.

    Args:
        name: Name of its listening socket.

    Returns:
        The connected socket; None if the worker has died.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(name)
    except OSError:
        sock.close()
        return None
    return sock


class LocalConnection:
    """One end of a connection between a host leader and a member. Lives in the thread of the loop.

    Args:
        loop: The event loop that serves it.
        sock: A connected socket.
        key: The key of the job.
        listener: True for the side that accepted the connection.
        on_frame: Called with this connection, a frame and its payload.
        on_closed: Called with this connection when the peer has closed it.
    """

    def __init__(
        self, loop: EventLoop, sock: socket.socket, key: bytes, *, listener: bool,
        on_frame: Callable[[LocalConnection, Frame, Any], None], on_closed: Callable[[LocalConnection], None],
    ) -> None:  # fmt: skip
        self.worker = -1
        """Rank of the peer, once it is known."""
        self._loop, self._sock, self._on_closed = loop, sock, on_closed
        self._flush_is_scheduled = False
        self._connection = Connection(
            sock,
            key,
            listener=listener,
            allocate=lambda _: None,
            on_frame=lambda frame, payload: on_frame(self, frame, payload),
            on_queued=self._schedule_flush,
        )
        loop.watch(sock, self._on_events, writing=True)

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """Queue a frame. All frames of one turn of the loop are sent at its end.

        Args:
            frame: The header.
            payload: Bytes or a buffer.
        """
        self._connection.send(frame, payload)

    def close(self) -> None:
        """Close the connection without calling `on_closed`."""
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock)
            self._sock.close()

    def _schedule_flush(self) -> None:
        if not self._flush_is_scheduled:
            self._flush_is_scheduled = True
            self._loop.call_later(0.0, self._flush)

    def _flush(self) -> None:
        self._flush_is_scheduled = False
        self._on_events(0)

    def _on_events(self, events: int) -> None:
        if self._sock.fileno() < 0:
            return
        try:
            if events & selectors.EVENT_READ:
                self._connection.read()
            self._connection.flush()
            self._loop.watch(self._sock, self._on_events, writing=self._connection.has_unsent)
        except (OSError, ProtocolError):
            self.close()
            self._on_closed(self)
