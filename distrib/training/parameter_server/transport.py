"""Connections between workers and servers: frames over TCP, without copies, on sockets that never block.

TCP is used, not MPI or torch's process groups, because a peer may die, be disconnected and return without effect on other
peers. A frame is a header of fixed size and a payload, which is received into its final memory and sent from where it lies.
Queued frames are sent by priority: a chunk that the next forward pass needs first overtakes.

Both sides prove that they know the job's key (`distrib.utils.framing`) before any frame is read. Frames are neither signed nor
encrypted, as with NCCL, Gloo and MPI, which do not authenticate at all: the network between the hosts is trusted.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from distrib.errors import TrainingError
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.units import format_size
from distrib.utils.framing import HANDSHAKE_TIMEOUT_SECONDS, Handshake, ProtocolError

HEADER = struct.Struct("!BBHIQQHI")
GREETING = b"dps1"
MAX_PAYLOAD_BYTES = 1 << 31
"""Maximum size of a frame's payload, whose length is a field of 4 bytes."""


class FrameKind(enum.IntEnum):
    """Kind of a frame."""

    # worker to server; also member of a host group to its leader
    HELLO = 1
    DESCRIBE = 2
    SET_VALUE = 3
    OPTIONS = 4
    PUSH = 5
    COMMIT = 6
    PULL = 7
    GET_STATE = 8
    SET_STATE = 9
    LAST_STEP = 10
    JOIN = 11
    SUSPEND = 12
    ALL_GATHER = 13
    STATISTICS = 14
    LEAVE = 15
    STORE = 17
    FETCH = 18
    SHARE_MEMORY = 19
    GROUP = 20
    RETIRE = 21
    RESUME = 22
    # server to worker
    WELCOME = 32
    VALUE = 33
    DONE = 34
    REFUSED = 35
    EXCLUDED = 37
    MAIN = 38
    # server to its replica, besides HELLO and RETIRE
    STATE = 49
    LOG = 50
    LOG_ACK = 51


class FrameFlag(enum.IntEnum):
    """Flags of a frame, whose meaning depends on its kind.

    An IntEnum, because each operation of `enum.IntFlag` takes a microsecond.
    """

    FINAL = 1
    """A PUSH needs no COMMIT; a SET_VALUE replaces values that are set; a STATE lists the members; a STORE is complete."""
    APPLIED = 2
    """The gradient of a VALUE was applied; the STATE of a table is complete; a STORE was this worker's."""
    MORE = 4
    """Another frame of a LOG or STATE follows."""
    SHARED = 8
    """The payload of a PUSH or VALUE is in shared memory; a STATE is a stored result."""


class Frame(NamedTuple):
    """A header. `step` is the number of the request if the frame is neither a push nor a reply to one.

    `weight` is the number of workers whose mean a pushed gradient is. For STORE and FETCH, `weight` is the number of pieces and
    `chunk` the number of this piece.
    """

    kind: FrameKind
    flags: int = 0
    table: int = 0
    chunk: int = 0
    step: int = 0
    version: int = 0
    weight: int = 1
    length: int = 0


class Outgoing(msgspec.Struct):
    """A queued frame. Until its first byte is sent it may be changed or cancelled."""

    frame: Frame
    payload: Any
    """A buffer, sent from where it lies."""
    on_sent: Callable[[], None] | None
    """Called when the frame was sent or cancelled."""
    cancelled: bool = False


def check_payload_size(
    size: int, hint: str = "use an optimizer that does not need tensors whole, such as AdamW"
) -> None:
    """Check that a payload does not exceed the size of a frame.

    Args:
        size: Bytes.
        hint: Advice for the error.

    Raises:
        TrainingError: The payload is larger than `MAX_PAYLOAD_BYTES`.
    """
    if size > MAX_PAYLOAD_BYTES:
        raise TrainingError(
            f"message too large for mode async: {format_size(size)}, expected at most {format_size(MAX_PAYLOAD_BYTES)}",
            hint=hint,
        )


class Connection:
    """One end of a connection, served by an event loop. All methods are for the loop's thread.

    Args:
        sock: A socket that is connected or connecting. It becomes non-blocking.
        listener: True for the side that accepted the connection.
        on_frame: Called with each frame and its complete payload. It may raise OSError to close the connection.
        on_closed: Called when the connection has broken or the handshake has failed; not after `close`.
        allocate: Returns the memory for a frame's payload; None for new memory.
    """

    def __init__(
        self, loop: EventLoop, sock: socket.socket, key: bytes, *, listener: bool,
        on_frame: Callable[[Frame, Any], None], on_closed: Callable[[], None],
        allocate: Callable[[Frame], memoryview | None] = lambda _: None,
    ) -> None:  # fmt: skip
        sock.setblocking(False)
        _set_tcp_options(sock)
        self.sock = sock
        self.peer = -1
        """Rank of the worker at the other end, if the owner sets it."""
        self._loop, self._allocate, self._on_frame, self._on_closed = loop, allocate, on_frame, on_closed
        self._is_closed = self._flush_is_scheduled = False
        self._waits_to_send = True
        self._low_water_bytes = 1
        self._handshake = Handshake(key, GREETING, listener=listener)
        self._unsent_handshake = self._handshake.opening
        self._head = memoryview(bytearray(HEADER.size))
        self._got = 0
        self._frame: Frame | None = None
        self._body: Any = None
        self._queue: list[tuple[int, int, Outgoing]] = []
        self._numbers = itertools.count()
        self._current: tuple[Outgoing, list[memoryview]] | None = None
        loop.watch(sock, self._on_events, writing=True)
        loop.call_later(HANDSHAKE_TIMEOUT_SECONDS, lambda: None if self._handshake.proven else self._break())

    def _on_events(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
        except (OSError, ProtocolError):
            self._break()
        if events & selectors.EVENT_WRITE:
            self._flush()

    def _break(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_closed()

    def close(self) -> None:
        """Close the socket."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.unwatch(self.sock)
            self.sock.close()

    # -- out ------------------------------------------------------------------------------------------------------

    def send(
        self, frame: Frame, payload: Any = b"", *, priority: int = -1, on_sent: Callable[[], None] | None = None
    ) -> Outgoing:
        """Queue a frame. It is sent once the present callback of the loop has returned.

        Args:
            frame: The header; its length is filled in.
            payload: Bytes or a buffer, which must not change until it is sent.
            priority: Frames of lower priority numbers go first, frames of the same in their order.
            on_sent: Called when the frame was sent or cancelled.
        """
        outgoing = Outgoing(frame, memoryview(payload), on_sent)
        check_payload_size(len(outgoing.payload))
        heapq.heappush(self._queue, (priority, next(self._numbers), outgoing))
        self._schedule_flush()
        return outgoing

    def _schedule_flush(self) -> None:
        if not self._flush_is_scheduled:
            self._flush_is_scheduled = True
            self._loop.defer(self._flush)

    def _flush(self) -> None:
        """Send as much as the socket accepts."""
        self._flush_is_scheduled = False
        if self._is_closed:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                self._send_queued()
            has_unsent = bool(self._unsent_handshake or self._current or (self._queue and self._handshake.proven))
            if has_unsent != self._waits_to_send:
                self._waits_to_send = has_unsent
                self._loop.watch(self.sock, self._on_events, writing=has_unsent)
        except (OSError, ValueError, struct.error):  # a closed socket; a number that its field cannot hold
            self._break()

    def _send_queued(self) -> None:
        while self._unsent_handshake:
            self._unsent_handshake = self._unsent_handshake[self.sock.send(self._unsent_handshake) :]
        while self._handshake.proven:
            if self._current is None and not self.start_next_outgoing():
                return
            assert self._current
            outgoing, parts = self._current
            sent = self.sock.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
            else:
                self._current = None
                if outgoing.on_sent:
                    outgoing.on_sent()

    def start_next_outgoing(self) -> bool:
        """Begin to send the queued frame of highest priority. Returns False if none is queued."""
        while self._queue:
            outgoing = heapq.heappop(self._queue)[2]
            if not outgoing.cancelled:
                outgoing.cancelled = True  # it cannot be changed any more
                header = HEADER.pack(*outgoing.frame[:-1], len(outgoing.payload))
                self._current = outgoing, [memoryview(header), outgoing.payload]
                return True
            if outgoing.on_sent:
                outgoing.on_sent()
        return False

    # -- in -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        left = 4 << 20  # then other connections get their turn
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                if not self._handshake.proven:
                    self._shake_hands()
                    continue
                target = self._head if self._frame is None else self._body
                if self._got < len(target):
                    got = self.sock.recv_into(target[self._got :])
                    if not got:
                        raise ConnectionResetError
                    self._got += got
                    left -= got
                if self._got == len(target) and self._complete():
                    break  # so that replies are sent before the next frame is handled
        if self._handshake.proven:
            self._set_low_water()

    def _set_low_water(self) -> None:
        """Wake up when the rest of a payload or 512 KiB of it have arrived: a wake-up costs as much as copying 50 KiB or more."""
        low_water = min(len(self._body) - self._got, 512 << 10) if self._frame is not None else 1
        if low_water != self._low_water_bytes:
            self._low_water_bytes = low_water
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _complete(self) -> bool:
        """Handle the header or the payload that has been received. Returns True if the frame is complete."""
        self._got = 0
        if self._frame is None:
            kind, *rest = HEADER.unpack(self._head)
            try:
                frame = Frame(FrameKind(kind), *rest)
            except ValueError:
                raise ProtocolError from None
            if frame.length > MAX_PAYLOAD_BYTES:
                raise ProtocolError
            if frame.length:
                body = self._allocate(frame)
                if body is not None and len(body) != frame.length:
                    raise ProtocolError
                self._frame = frame
                self._body = memoryview(bytearray(frame.length)) if body is None else body
                return False
            self._on_frame(frame, b"")
            return True
        frame, body = self._frame, self._body
        self._frame = self._body = None
        self._on_frame(frame, body)
        return True

    def _shake_hands(self) -> None:
        data = self.sock.recv(self._handshake.missing_bytes)
        if not data:
            raise ConnectionResetError
        self._unsent_handshake += self._handshake.feed(data)
        self._schedule_flush()


def start_connecting(address: tuple[str, int]) -> socket.socket:
    """Return a non-blocking TCP socket that is connecting.

    Args:
        address: Host and port, IPv4 or IPv6.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    sock.setblocking(False)
    sock.connect_ex(address)
    return sock


def _set_tcp_options(sock: socket.socket, silence_seconds: int = 5) -> None:
    """Send small frames at once, and close the connection after `silence_seconds` without acknowledgement. The peer may return."""
    with contextlib.suppress(OSError):  # a local socket has no such options
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silence_seconds - 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_seconds * 1000)
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 512 << 10
        )  # nothing can overtake what the kernel holds


def encode(value: Any) -> bytes:
    """Encode a small value as a JSON payload.

    Args:
        value: Plain values that JSON can express.
    """
    return msgspec.json.encode(value)


def decode(payload: Any) -> Any:
    """Decode a result of `encode`.

    Args:
        payload: Bytes or a buffer.

    Raises:
        ProtocolError: The payload is not JSON.
    """
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a payload is not JSON: {error}") from None
