"""Listener of the control channel, which authenticates the ranks."""

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

MAX_UNAUTHENTICATED = 256
"""Largest number of open connections that have not proven the token; further ones wait in the kernel's queue."""

OnFrame = Callable[[Kind, bytes], None]


class ControlListener:
    """Listener for ranks on a free port of each address.

    Args:
        selector: Selector of the supervisor's loop.
        token: Secret of the job.
        addresses: IP addresses of this machine.
        accept: Called with an authenticated channel and its hello. Takes the channel over and returns the handler of the frames
            that came with the hello, or raises ProtocolError to refuse it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        token: str,
        addresses: Iterable[str],
        accept: Callable[[Channel, dict[str, Any]], OnFrame],
    ) -> None:
        self._selector, self._token, self._accept_rank = selector, token, accept
        self.unauthenticated: dict[Channel, float] = {}
        self._sockets: list[socket.socket] = []
        self._is_paused = False
        for address in sorted(addresses):
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._sockets.append(listener)
            listener.bind((address, 0))
            listener.listen(512)
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def addresses(self) -> str:
        """`host:port` of each socket, IPv6 in brackets, separated by commas."""
        names = (listener.getsockname()[:2] for listener in self._sockets)
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in names)

    def drop_unauthenticated(self, now: float) -> None:
        """Close connections that have not proven the token in time.

        Args:
            now: Monotonic time.
        """
        for channel, since in list(self.unauthenticated.items()):
            if now - since > HANDSHAKE_TIMEOUT_SECONDS:
                self._drop(channel)

    def close(self) -> None:
        """Close the sockets and all connections that were not handed over."""
        for listener in self._sockets:
            listener.close()
        for channel in self.unauthenticated:
            channel.close()

    def _accept(self, listener: socket.socket, _: int) -> None:
        with contextlib.suppress(OSError):
            if len(self.unauthenticated) >= MAX_UNAUTHENTICATED:
                self._pause()
                return
            sock, _peer = listener.accept()
            channel = Channel(sock, self._token, listener=True)
            self.unauthenticated[channel] = time.monotonic()
            self._selector.register(sock, selectors.EVENT_READ, lambda _s, _e: self._receive_hello(channel))
            try:
                channel.flush()
            except OSError:
                self._drop(channel)

    def _receive_hello(self, channel: Channel) -> None:
        on_frame: OnFrame | None = None
        try:
            for kind, payload in channel.receive():
                if on_frame is not None:
                    on_frame(kind, payload)
                    continue
                if kind is not Kind.HELLO:
                    raise ProtocolError(f"the first frame is {kind.name}, expected HELLO")
                on_frame = self._accept_rank(channel, json.loads(payload))
                del self.unauthenticated[channel]
                self._resume()
        except (OSError, ProtocolError, ValueError, KeyError):
            channel.closed = True
        if channel.closed and channel in self.unauthenticated:
            self._drop(channel)

    def _pause(self) -> None:
        if not self._is_paused:  # another socket may have paused all of them in the same turn
            self._is_paused = True
            for listener in self._sockets:
                self._selector.unregister(listener)

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            for listener in self._sockets:
                self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _drop(self, channel: Channel) -> None:
        del self.unauthenticated[channel]
        self._resume()
        self._selector.unregister(channel.sock)
        channel.close()
