"""Connections between workers and servers: frames over TCP, without copies, on sockets that never block.

TCP, not MPI and not torch's process groups: a peer may die, be cut off and come back, and nobody else may notice. A frame is
a header of fixed size and a payload that is received into the memory where it belongs and sent from where it
lies. Frames that wait are sent by priority: a late frame that the next forward pass needs first overtakes.

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

HEADER = struct.Struct("!BBHIQQHII")
GREETING = b"dps1"
LONGEST_BYTES = 1 << 31
SILENCE_SECONDS = 5.0
"""After which a peer that acknowledges nothing is taken for lost: its connection ends, the peer may call again."""

UNSENT_BYTES = 512 << 10
"""What the kernel may hold of a connection that is not yet on the wire: all that nothing can overtake any more."""

WORTHWHILE_BYTES = 128 << 10
"""What must have arrived of a large payload before the process is woken to take it: waking costs as much as 50 KiB."""

TURN_BYTES = 4 << 20
"""What is read from one connection before others have their turn."""


class Kind(enum.IntEnum):
    """What a frame is. From workers: HELLO to RETIRE; from servers: WELCOME to MAIN; between servers: HELLO, RETIRE, STATE to LOGGED;
    between workers of a host, those of both that they need."""

    HELLO = 1
    DESCRIBE = 2
    SET = 3
    OPTIONS = 4
    PUSH = 5
    COMMIT = 6
    PULL = 7
    GET_STATE = 8
    SET_STATE = 9
    NEWEST = 10
    JOIN = 11
    SUSPEND = 12
    GATHER = 13
    STATISTICS = 14
    LEAVE = 15
    AGREED = 16
    KEEP = 17
    FETCH = 18
    SHARE = 19
    GROUP = 20
    RETIRE = 21
    WELCOME = 32
    VALUE = 33
    DONE = 34
    REFUSED = 35
    ALONE = 36
    OUTSIDE = 37
    MAIN = 38
    STATE = 49
    LOG = 50
    LOGGED = 51


FINAL, APPLIED, MORE, SHARED = 1, 2, 4, 8
"""Flags, in this order. FINAL: a PUSH needs no COMMIT; a SET replaces all values before; a STATE says who are members; what was kept is complete.
APPLIED: the gradient counted that a VALUE answers; a table's STATE is complete; what was kept is this worker's. MORE: to a LOG or STATE. SHARED: the payload
of a PUSH or VALUE lies in memory that both share; a STATE is what main has kept for the others. In a REFUSED, any: the worker's voice did not count."""


class Frame(NamedTuple):
    """A header. `step` is the number of the request where the frame is no push or answer to one; `weight` says of how many
    workers a pushed gradient is the mean, and `mark` which they are; of a KEEP, and of what is fetched then, in how many
    pieces it is, of which this is number `chunk`."""

    kind: Kind
    flags: int = 0
    table: int = 0
    chunk: int = 0
    step: int = 0
    version: int = 0
    weight: int = 1
    mark: int = 0
    length: int = 0


class Outgoing:
    """A frame that waits to be sent. It may be changed, or left out (`cancelled`), until its first byte is sent."""

    __slots__ = ("cancelled", "frame", "payload", "sent")

    def __init__(self, frame: Frame, payload: Any, sent: Callable[[], None] | None) -> None:
        self.frame, self.payload, self.sent = frame, payload, sent
        self.cancelled = False


def check_size(size: int, hint: str = "use an optimizer that does not need tensors whole, such as AdamW") -> None:
    """Raises TrainingError for what is too large for a frame: no connection would ever carry it."""
    if size > LONGEST_BYTES:
        limit = f"mode async sends {format_size(LONGEST_BYTES)} at most"
        raise TrainingError(f"{format_size(size)} are to be sent in one piece: {limit}", hint=hint)


class Connection:
    """One end of a connection. `OSError` and `ProtocolError` mean that it is of no more use.

    `room(frame)` gives the memory for a payload, or None for memory of the frame's own; `receive(frame, payload)` gets it whole.
    `queued` is called when there is something to send.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        *,
        listener: bool,
        room: Callable[[Frame], memoryview | None],
        receive: Callable[[Frame, Any], None],
        queued: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        settle(sock)
        self.sock = sock
        self.opened = time.monotonic()
        self._room, self._receive, self._queued = room, receive, queued
        self._least = 1
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
        self, frame: Frame, payload: Any = b"", *, priority: int = -1, sent: Callable[[], None] | None = None
    ) -> Outgoing:
        """Queue a frame; those of a lower `priority` go first, those of the same in their order.

        Raises TrainingError for what is too large for one.
        """
        outgoing = Outgoing(frame, memoryview(payload), sent)
        check_size(len(outgoing.payload))
        self._count += 1
        heapq.heappush(self._queue, (priority, self._count, outgoing))
        self._queued()
        return outgoing

    @property
    def waits_to_send(self) -> bool:
        return bool(self._unsent_handshake or self._current or (self._queue and self.proven))

    def flush(self) -> None:
        """Send what the socket takes."""
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
                    if outgoing.sent:
                        outgoing.sent()

    def _next(self) -> bool:
        while self._queue:
            outgoing = heapq.heappop(self._queue)[2]
            if not outgoing.cancelled:
                outgoing.cancelled = True  # too late to change it
                header = HEADER.pack(*outgoing.frame[:-1], len(outgoing.payload))
                self._current = outgoing, [memoryview(header), *([outgoing.payload] if outgoing.payload else [])]
                return True
            if outgoing.sent:
                outgoing.sent()
        return False

    # -- in -------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Take what has arrived, up to a turn's worth."""
        left = TURN_BYTES
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while left > 0:
                if not self.proven:
                    self._shake_hands()
                    continue
                target = self._head if self._frame is None else self._body
                if self._got < len(target):
                    got = self.sock.recv_into(target[self._got :])
                    if not got:
                        raise ConnectionResetError("the other side has closed the connection")
                    self._got += got
                    left -= got
                if self._got == len(target):
                    self._complete()
        if self.proven:
            self._sleep_until_worthwhile()

    def _sleep_until_worthwhile(self) -> None:
        """Be woken when the rest of a payload, or much of it, is there, not for each packet."""
        left = len(self._body) - self._got if self._frame is not None else 1
        least = min(left, WORTHWHILE_BYTES)
        if least != self._least:
            self._least = least
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _complete(self) -> None:
        self._got = 0
        if self._frame is None:
            kind, *rest = HEADER.unpack(self._head)
            try:
                frame = Frame(Kind(kind), *rest)
            except ValueError:
                raise ProtocolError(f"a frame of unknown kind {kind}") from None
            if frame.length > LONGEST_BYTES:
                raise ProtocolError(f"a frame of {frame.length} bytes is announced")
            if frame.length:
                body = self._room(frame)
                if body is not None and len(body) != frame.length:
                    raise ProtocolError(f"{frame.length} bytes where {len(body)} belong")
                self._frame = frame
                self._body = memoryview(bytearray(frame.length)) if body is None else body
                return
            self._receive(frame, b"")
            return
        frame, body = self._frame, self._body
        self._frame = self._body = None
        self._receive(frame, body)

    def _shake_hands(self) -> None:
        data = self.sock.recv(self._handshake.missing_bytes)
        if not data:
            raise ConnectionResetError("the other side has closed the connection")
        self._unsent_handshake += self._handshake.feed(data)
        self.flush()

    def close(self) -> None:
        self.sock.close()


def settle(sock: socket.socket) -> None:
    """No delay for small frames, a short queue in the kernel, and an end when the other side falls silent."""
    with contextlib.suppress(OSError):  # not every kind of socket has these
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(SILENCE_SECONDS) - 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_SECONDS * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def packed(value: Any) -> bytes:
    """A small value as a payload."""
    return msgspec.json.encode(value)


def unpacked(payload: Any) -> Any:
    """What `packed` packed. Raises ProtocolError for what it did not."""
    try:
        return msgspec.json.decode(payload)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a payload that is no JSON: {error}") from None


class Loop:
    """One thread that waits for sockets, for calls from other threads, and for time to pass."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._rung = threading.Lock()
        self._selector.register(self._bell, selectors.EVENT_READ, self._answer_bell)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._forgotten: set[socket.socket] = set()
        self.ended = False

    def call(self, work: Callable[[], None]) -> None:
        """Have the loop's thread do `work` soon. May be called by any thread."""
        self._calls.append(work)
        if self._rung.acquire(blocking=False):
            with contextlib.suppress(OSError):
                self._ring.send(b"!")

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Do `work` after `seconds`; for the loop's own thread."""
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._count, work))

    def watch(self, sock: socket.socket, attend: Callable[[int], None], *, writing: bool = False) -> None:
        """Call `attend(events)` when the socket can be read, or written where `writing`."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        try:
            key = self._selector.get_key(sock)
        except KeyError:
            self._selector.register(sock, events, attend)
            return
        if key.events != events or key.data != attend:
            self._selector.modify(sock, events, attend)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching; what has happened to the socket already is not told any more."""
        self._forgotten.add(sock)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def run(self) -> None:
        """Until `ended`."""
        while not self.ended:
            wait = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            if self._calls:
                wait = 0.0
            self._forgotten.clear()
            for key, events in self._selector.select(wait):
                if key.fileobj not in self._forgotten:
                    key.data(events)
            if self._calls:  # one at a time: each may wait for a GPU, and meanwhile there is to send and to read
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        self._selector.close()
        self._bell.close()
        self._ring.close()

    def _answer_bell(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(64)
        self._rung.release()
