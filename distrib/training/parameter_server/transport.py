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
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from distrib.errors import TrainingError
from distrib.units import format_size
from distrib.utils.framing import Handshake, ProtocolError

HEADER = struct.Struct("!BBHIQQHI")
GREETING = b"dps1"
MAX_PAYLOAD_BYTES = 1 << 31
SILENCE_TIMEOUT_SECONDS = 5.0
"""Time without acknowledgement after which the kernel closes a connection. The peer may connect again."""

MAX_UNSENT_BYTES = 512 << 10
"""Data of a connection that the kernel holds and has not sent: nothing can overtake it."""

WAKE_UP_BYTES = 128 << 10
"""Data of a large payload that wakes the process: a wake-up costs as much as copying 50 KiB."""

READ_TURN_BYTES = 4 << 20
"""Data that is read from one connection before other connections get their turn."""


class FrameKind(enum.IntEnum):
    """FrameKind of a frame. Workers send HELLO to RETIRE, servers to workers WELCOME to MAIN, servers to servers HELLO, RETIRE and
    STATE to LOG_ACK. Members of a host group and their leader use those that they need."""

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
    WELCOME = 32
    VALUE = 33
    DONE = 34
    REFUSED = 35
    EXCLUDED = 37
    MAIN = 38
    STATE = 49
    LOG = 50
    LOG_ACK = 51


FINAL, APPLIED, MORE, SHARED = 1, 2, 4, 8
"""Flags of a frame.

FINAL: a PUSH needs no COMMIT; a SET_VALUE replaces values that are set; a STATE lists the members; a STORE is complete.
APPLIED: the gradient of a VALUE was applied; the STATE of a table is complete; a STORE was this worker's.
MORE: another frame of a LOG or STATE follows.
SHARED: the payload of a PUSH or VALUE is in shared memory; a STATE is a stored result.
"""


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


class Outgoing:
    """A queued frame. Until its first byte is sent it may be changed or cancelled.

    Args:
        frame: The header.
        payload: A buffer, sent from where it lies.
        on_sent: Called when the frame was sent or cancelled.
    """

    __slots__ = ("cancelled", "frame", "on_sent", "payload")

    def __init__(self, frame: Frame, payload: Any, on_sent: Callable[[], None] | None) -> None:
        self.frame, self.payload, self.on_sent = frame, payload, on_sent
        self.cancelled = False


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
    """One end of a connection. After `OSError` or `ProtocolError` it must be closed.

    Args:
        sock: A socket that is connected or connecting. It becomes non-blocking.
        key: The key of the job.
        listener: True for the side that accepted the connection.
        allocate: Returns the memory for a frame's payload; None for new memory.
        on_frame: Called with each frame and its complete payload.
        on_queued: Called when there is something to send.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        *,
        listener: bool,
        allocate: Callable[[Frame], memoryview | None],
        on_frame: Callable[[Frame, Any], None],
        on_queued: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        set_tcp_options(sock)
        self.sock = sock
        self.opened = time.monotonic()
        self._allocate, self._on_frame, self._on_queued = allocate, on_frame, on_queued
        self._low_water_bytes = 1
        self._handshake = Handshake(key, GREETING, listener=listener)
        self._unsent_handshake = self._handshake.opening
        self._head = memoryview(bytearray(HEADER.size))
        self._got = 0
        self._frame: Frame | None = None
        self._body: Any = None
        self._queue: list[tuple[int, int, Outgoing]] = []
        self._count = 0
        self._current: tuple[Outgoing, list[memoryview]] | None = None

    @property
    def proven(self) -> bool:
        """True once the peer has proven that it knows the job's key."""
        return self._handshake.proven

    # -- out ------------------------------------------------------------------------------------------------------

    def send(
        self, frame: Frame, payload: Any = b"", *, priority: int = -1, on_sent: Callable[[], None] | None = None
    ) -> Outgoing:
        """Queue a frame.

        Args:
            frame: The header; its length is filled in.
            payload: Bytes or a buffer, which must not change until it is sent.
            priority: Frames of lower priority numbers go first, frames of the same in their order.
            on_sent: Called when the frame was sent or cancelled.

        Returns:
            The queued frame.

        Raises:
            TrainingError: The payload is too large for a frame.
        """
        outgoing = Outgoing(frame, memoryview(payload), on_sent)
        check_payload_size(len(outgoing.payload))
        self._count += 1
        heapq.heappush(self._queue, (priority, self._count, outgoing))
        self._on_queued()
        return outgoing

    @property
    def has_unsent(self) -> bool:
        """True if there is something to send."""
        return bool(self._unsent_handshake or self._current or (self._queue and self.proven))

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._unsent_handshake:
                self._unsent_handshake = self._unsent_handshake[self.sock.send(self._unsent_handshake) :]
            while self.proven:
                if self._current is None and not self._next():
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

    def _next(self) -> bool:
        while self._queue:
            outgoing = heapq.heappop(self._queue)[2]
            if not outgoing.cancelled:
                outgoing.cancelled = True  # it cannot be changed any more
                header = HEADER.pack(*outgoing.frame[:-1], len(outgoing.payload))
                self._current = outgoing, [memoryview(header), *([outgoing.payload] if outgoing.payload else [])]
                return True
            if outgoing.on_sent:
                outgoing.on_sent()
        return False

    # -- in -------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Receive the bytes that have arrived, up to `READ_TURN_BYTES`."""
        left = READ_TURN_BYTES
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while left > 0:
                if not self.proven:
                    self._shake_hands()
                    continue
                target = self._head if self._frame is None else self._body
                if self._got < len(target):
                    got = self.sock.recv_into(target[self._got :])
                    if not got:
                        raise ConnectionResetError("the peer has closed the connection")
                    self._got += got
                    left -= got
                if self._got == len(target):
                    self._complete()
        if self.proven:
            self._set_low_water()

    def _set_low_water(self) -> None:
        """Wake up when the rest of a payload or much of it has arrived, not for each packet."""
        left = len(self._body) - self._got if self._frame is not None else 1
        low_water = min(left, WAKE_UP_BYTES)
        if low_water != self._low_water_bytes:
            self._low_water_bytes = low_water
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _complete(self) -> None:
        self._got = 0
        if self._frame is None:
            kind, *rest = HEADER.unpack(self._head)
            try:
                frame = Frame(FrameKind(kind), *rest)
            except ValueError:
                raise ProtocolError(f"a frame has the unknown kind {kind}") from None
            if frame.length > MAX_PAYLOAD_BYTES:
                raise ProtocolError(f"a frame has {frame.length} bytes, expected at most {MAX_PAYLOAD_BYTES}")
            if frame.length:
                body = self._allocate(frame)
                if body is not None and len(body) != frame.length:
                    raise ProtocolError(f"a frame has {frame.length} bytes, expected {len(body)}")
                self._frame = frame
                self._body = memoryview(bytearray(frame.length)) if body is None else body
                return
            self._on_frame(frame, b"")
            return
        frame, body = self._frame, self._body
        self._frame = self._body = None
        self._on_frame(frame, body)

    def _shake_hands(self) -> None:
        data = self.sock.recv(self._handshake.missing_bytes)
        if not data:
            raise ConnectionResetError("the peer has closed the connection")
        self._unsent_handshake += self._handshake.feed(data)
        self.flush()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, keep the kernel's queue short, and fail when the peer is silent.

    Args:
        sock: Any socket; options that it does not have are left out.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(SILENCE_TIMEOUT_SECONDS) - 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_TIMEOUT_SECONDS * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def encode(value: Any) -> bytes:
    """Encode a small value as a payload.

    Args:
        value: Plain values that JSON can express.

    Returns:
        JSON.
    """
    return msgspec.json.encode(value)


def decode(payload: Any) -> Any:
    """Decode a result of `encode`.

    Args:
        payload: Bytes or a buffer.

    Returns:
        The value.

    Raises:
        ProtocolError: The payload is not JSON.
    """
    try:
        return msgspec.json.decode(payload)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a payload is not JSON: {error}") from None


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
        self._unwatched: set[socket.socket] = set()
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

    def watch(self, sock: socket.socket, on_events: Callable[[int], None], *, writing: bool = False) -> None:
        """Call a function when a socket is readable or writable.

        Args:
            sock: The socket, which may be watched already.
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

    def unwatch(self, sock: socket.socket) -> None:
        """Stop watching a socket. Events that have happened already are not delivered.

        Args:
            sock: The socket.
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
                    key.data(events)
            if self._calls:  # one at a time, as each may wait for a GPU while there is data to send
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _on_wake_up(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(64)
        self._wake_lock.release()
