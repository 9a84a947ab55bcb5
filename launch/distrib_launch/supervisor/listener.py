"""Where ranks call back: listens for them, and lets in who knows the job's token."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from distrib.utils.framing import HANDSHAKE_TIMEOUT_SECONDS, ProtocolError
from distrib_launch.rank_agent.control_channel import Channel, Kind

STRANGERS_LIMIT = 256
"""How many callers may stay at once who have not shown that they know the token."""

Hear = Callable[[Kind, bytes], None]


class Door:
    """Listens on `addresses`, on a port of the system's choice each, for callers that know `token`.

    `welcome` is given the channel of a caller and its hello, once that is proven to be signed with the token; it
    takes the channel over, or raises ProtocolError to turn it away, and returns what is to hear the frames that came
    along with the hello.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        token: str,
        addresses: Iterable[str],
        welcome: Callable[[Channel, dict[str, Any]], Hear],
    ) -> None:
        self._selector, self._token, self._welcome = selector, token, welcome
        self._strangers: dict[Channel, float] = {}
        self._listeners: list[socket.socket] = []
        self._is_shut = False
        for address in sorted(addresses):
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._listeners.append(listener)
            listener.bind((address, 0))
            listener.listen(512)
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def addresses(self) -> str:
        """Where it listens: `host:port`, IPv6 in brackets, joined by commas."""
        names = (listener.getsockname()[:2] for listener in self._listeners)
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in names)

    def turn_out(self, now: float) -> None:
        """Drop callers that have not shown in time that they know the token."""
        for stranger, since in list(self._strangers.items()):
            if now - since > HANDSHAKE_TIMEOUT_SECONDS:
                self._drop(stranger)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for stranger in self._strangers:
            stranger.close()

    def _accept(self, listener: socket.socket, _: int) -> None:
        with contextlib.suppress(OSError):
            if len(self._strangers) >= STRANGERS_LIMIT:
                self._shut()  # who calls now waits in the kernel's queue until one of them leaves
                return
            sock, _peer = listener.accept()
            channel = Channel(sock, self._token, listener=True)
            self._strangers[channel] = time.monotonic()
            self._selector.register(sock, selectors.EVENT_READ, lambda _s, _e: self._meet(channel))
            try:
                channel.flush()
            except OSError:
                self._drop(channel)

    def _meet(self, channel: Channel) -> None:
        hear: Hear | None = None
        try:
            for kind, payload in channel.receive():
                if hear is not None:
                    hear(kind, payload)
                    continue
                if kind is not Kind.HELLO:
                    raise ProtocolError("the first frame is no hello")
                hear = self._welcome(channel, json.loads(payload))
                del self._strangers[channel]
                self._open()
        except (OSError, ProtocolError, ValueError, KeyError):
            channel.closed = True
        if channel.closed and channel in self._strangers:
            self._drop(channel)

    def _shut(self) -> None:
        if self._is_shut:  # another of its listeners was called at the same time
            return
        self._is_shut = True
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _open(self) -> None:
        if self._is_shut:
            self._is_shut = False
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _drop(self, channel: Channel) -> None:
        del self._strangers[channel]
        self._open()
        self._selector.unregister(channel.sock)
        channel.close()
