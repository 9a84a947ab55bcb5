"""Listener of the control channel, which authenticates the ranks."""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from distrib.utils.framing import ProtocolError
from distrib.utils.json_text import decode_json
from distrib_launch.rank_agent.control_channel import Channel, Kind

MAX_UNAUTHENTICATED = 256
"""Largest number of open connections without proof of the token, beyond one per rank. A further one replaces the oldest."""

OnFrame = Callable[[Kind, bytes], None]


class ControlListener:
    """Listener for ranks on a free port of each address.

    Args:
        selector: Selector of the supervisor's loop.
        token: Secret of the job.
        addresses: IP addresses of this machine.
        ranks: Number of ranks, which may all connect at once.
        accept: Called with an authenticated channel and its hello. Takes the channel over and returns the handler of the frames
            that came with the hello, or raises ProtocolError to refuse it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        token: str,
        addresses: Iterable[str],
        ranks: int,
        accept: Callable[[Channel, dict[str, Any]], OnFrame],
    ) -> None:
        self._selector, self._token, self._accept_rank = selector, token, accept
        self._limit = MAX_UNAUTHENTICATED + ranks
        self.unauthenticated: dict[Channel, str] = {}
        """Open connections without a hello, the oldest first, with the address of their peer."""
        self._dropped: Counter[str] = Counter()
        self._sockets: list[socket.socket] = []
        for address in sorted(addresses):
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._sockets.append(listener)
            listener.bind((address, 0))
            listener.listen(4096)  # the kernel's own limit is net.core.somaxconn
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def addresses(self) -> str:
        """`host:port` of each socket, IPv6 in brackets, separated by commas."""
        names = (listener.getsockname()[:2] for listener in self._sockets)
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in names)

    def describe_unauthenticated(self) -> str:
        """Describe the connections that did not prove the token, open and dropped ones; empty if there were none."""
        counts = self._dropped + Counter(self.unauthenticated.values())
        by_address = ", ".join(f"{count} from {address}" for address, count in counts.most_common(4))
        return f"; connections without proof of the job's token: {by_address}" if by_address else ""

    def close(self) -> None:
        """Close the sockets and all connections that were not handed over."""
        for listener in self._sockets:
            listener.close()
        for channel in self.unauthenticated:
            channel.close()

    def _accept(self, listener: socket.socket, _: int) -> None:
        try:
            for _ in range(self._limit):
                self._greet(*listener.accept())
        except BlockingIOError:  # no further connection waits
            return
        except OSError:  # too many open files
            self._drop_oldest()

    def _greet(self, sock: socket.socket, peer: tuple[Any, ...]) -> None:
        channel = Channel(sock, self._token, listener=True)
        self.unauthenticated[channel] = peer[0]
        self._selector.register(sock, selectors.EVENT_READ, lambda _s, _e: self._receive_hello(channel))
        try:
            channel.flush()
        except OSError:
            self._drop(channel)
        if len(self.unauthenticated) > self._limit:
            self._drop_oldest()

    def _receive_hello(self, channel: Channel) -> None:
        on_frame: OnFrame | None = None
        try:
            for kind, payload in channel.receive():
                if on_frame is not None:
                    on_frame(kind, payload)
                    continue
                if kind is not Kind.HELLO:
                    raise ProtocolError(f"the first frame is {kind.name}, expected HELLO")
                on_frame = self._accept_rank(channel, decode_json(payload, dict[str, Any]))
                del self.unauthenticated[channel]
        except (OSError, ProtocolError, ValueError, KeyError, TypeError):
            channel.closed = True
        if channel.closed and channel in self.unauthenticated:
            self._drop(channel)

    def _drop_oldest(self) -> None:
        for channel in [one for one in self.unauthenticated if not one.proven][:1]:
            self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        self._dropped[self.unauthenticated.pop(channel)] += 1
        self._selector.unregister(channel.sock)
        channel.close()
