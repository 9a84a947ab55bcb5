"""Bandwidth and latency over TCP sockets.

The receiver controls and times a stream: it pings, sends a start message, and closes the connections when it has measured enough.
Both ends sleep in the kernel while they wait.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Sequence

import msgspec

from distrib.probe.bench import statistics
from distrib.probe.bench.polling import ProbeTimeout
from distrib.probe.records import STREAM_STALLED
from distrib.utils.cpus import CpuLoad

TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sQI")
PING, START = b"distrib!", b"go ahead"  # equal length


class TcpBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of streams over TCP."""

    chunk_bytes: int = 1 << 20
    """Buffer of one call of send or recv."""
    low_water_bytes: int = 128 << 10
    """The kernel wakes the receiver when this much has arrived, not for every packet."""
    skip_bytes: int = 512 << 10
    skip_seconds: float = 0.03
    """Start of a stream that does not count: bursts, and the queue of the previous stream in the switch."""
    min_stream_bytes: int = 2 << 20
    """Bytes that a stream transfers even if that takes longer than planned."""
    slow_link_factor: int = 6
    """Maximum duration of a stream of fewer bytes, as a multiple of the planned one."""
    windows: int = 12
    """Windows of equal duration, each of which is a repetition of the measurement."""
    skip_pings: int = 3
    """Round trips that warm the connection up and do not count."""
    poll_seconds: float = 0.05
    """Maximum time between two checks of the deadline and of the end of a stream."""
    connect_seconds: float = 3.5
    """Timeout of a connection. The kernel repeats SYN after 1 s and 3 s."""
    accept_seconds: float = 4.5
    """Timeout of the receiver for connections. It does not learn that its sender could not connect."""
    max_silent_connections: int = 256
    """Open connections of a listener that have sent no token. A further one replaces the oldest."""


SETTINGS = TcpBenchSettings()


class ReceivedStream(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's measurement of a stream."""

    latency_seconds: float | None
    rate: statistics.SampleSummary | None
    """Bytes per second; None if too little arrived."""
    busy: float = 0.0
    """The busy fraction of this host's CPUs during the stream."""


class SentStream(msgspec.Struct, frozen=True, kw_only=True):
    """The sender's counters of a stream."""

    retransmits: int = 0
    """Retransmitted TCP segments."""
    path_mtu: int | None = None
    busy: float = 0.0


class ProbeListener:
    """Listener for connections of the probe's other ranks on one address. Clients without the token are disconnected, and silent ones
    delay no other.

    Args:
        address: The local address; the kernel chooses the port.
        accept_seconds: Timeout for the connections of one task.
    """

    def __init__(self, address: str, accept_seconds: float = SETTINGS.accept_seconds) -> None:
        self._accept_seconds = accept_seconds
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.create_server((address, 0), family=family, backlog=4096)
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self._silent: dict[socket.socket, bytearray] = {}
        """Connections with an incomplete hello, the oldest first."""

    def accept(self, token: bytes, task: int, streams: int, deadline: float) -> list[socket.socket]:
        """Accept the connections of one task; those of abandoned tasks are closed.

        Args:
            token: The probe's token.
            task: Number of the task.
            streams: Number of connections.
            deadline: Monotonic seconds.

        Returns:
            The connections, by index.

        Raises:
            ProbeTimeout: Not all connections came in time.
        """
        deadline = min(deadline, time.monotonic() + self._accept_seconds)
        found: dict[int, socket.socket] = {}
        try:
            with selectors.DefaultSelector() as selector:
                for sock in (self.socket, *self._silent):
                    selector.register(sock, selectors.EVENT_READ, sock)
                while len(found) < streams:
                    for key, _ in selector.select(_remaining(deadline, "no connection came")):
                        sock = key.data
                        if sock is self.socket:
                            self._accept_waiting(selector)
                        elif sock in self._silent and (hello := self._read_hello(sock, selector)):
                            theirs, number, index = hello
                            if hmac.compare_digest(theirs, token) and number == task and index < streams:
                                found.setdefault(index, sock)
                            if found.get(index) is not sock:
                                sock.close()
        except BaseException:
            _close(found.values())
            raise
        for sock in found.values():
            sock.settimeout(self._accept_seconds)
        return [found[index] for index in range(streams)]

    def _accept_waiting(self, selector: selectors.BaseSelector) -> None:
        """Accept all connections that wait in the kernel's queue."""
        with contextlib.suppress(OSError):  # no further one waits
            while True:
                sock, _ = self.socket.accept()
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, sock)
                self._silent[sock] = bytearray()
                if len(self._silent) > SETTINGS.max_silent_connections:
                    self._forget(next(iter(self._silent)), selector).close()

    def _read_hello(self, sock: socket.socket, selector: selectors.BaseSelector) -> tuple[bytes, int, int] | None:
        """Return token, task and index of a connection if its hello is complete. A connection that ended is closed."""
        hello = self._silent[sock]
        try:
            data = sock.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        hello += data
        if data and len(hello) < _HELLO.size:
            return None
        self._forget(sock, selector)
        if data:
            return _HELLO.unpack(hello)
        sock.close()
        return None

    def _forget(self, sock: socket.socket, selector: selectors.BaseSelector) -> socket.socket:
        selector.unregister(sock)
        del self._silent[sock]
        return sock


def connect_streams(
    own: str, place: tuple[str, int], token: bytes, task: int, streams: int, deadline: float
) -> list[socket.socket]:
    """Connect to another rank's listener for one task.

    Args:
        own: Local address.
        place: Address and port of the listener.
        token: The probe's token.
        task: Number of the task.
        streams: Number of connections.
        deadline: Monotonic seconds.

    Returns:
        The connections, accepted by the listener.
    """
    made: list[socket.socket] = []
    try:
        for index in range(streams):
            timeout = min(SETTINGS.connect_seconds, _remaining(deadline, "connecting"))
            sock = socket.create_connection(place, timeout=timeout, source_address=(own, 0))
            made.append(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(_HELLO.pack(token, task, index))
    except BaseException:
        _close(made)
        raise
    return made


def send_stream(sockets: Sequence[socket.socket], buffer: memoryview, deadline: float) -> SentStream:
    """Answer the receiver's pings, then send until it closes the connections.

    Args:
        sockets: The connections, which are closed afterwards.
        buffer: Data to send.
        deadline: Monotonic seconds.

    Returns:
        Retransmitted segments, path MTU and CPU use of the sender.

    Raises:
        ProbeTimeout: The receiver sent nothing, or did not close, in time.
    """
    try:
        first = sockets[0]
        message = bytearray(len(PING))
        while True:
            first.settimeout(_remaining(deadline, "no message from the receiver"))
            if _receive_exactly(first, message) == START:
                break
            first.sendall(message)
        return _send_until_closed(sockets, buffer[: SETTINGS.chunk_bytes], deadline)
    finally:
        _close(sockets)


def _send_until_closed(sockets: Sequence[socket.socket], chunk: memoryview, deadline: float) -> SentStream:
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_WRITE)
        load = CpuLoad()
        while True:
            timeout = min(SETTINGS.poll_seconds, _remaining(deadline, "the receiver did not close the stream"))
            for key, _ in selector.select(timeout):
                try:
                    key.fileobj.send(chunk)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                except OSError:  # the receiver has closed
                    return _read_counters(sockets, load.busy_fraction())


def receive_stream(
    sockets: Sequence[socket.socket],
    buffer: memoryview,
    deadline: float,
    *,
    pings: int,
    seconds: float,
    variation: float | None = None,
    max_seconds: float = 0.0,
    starts: float = 0.0,
) -> ReceivedStream:
    """Ping over the first connection, then receive a stream.

    Concurrent streams must start together. Pings would wait in queues that another stream has filled, and data sent after the end
    of the other streams would not share the link.

    Args:
        sockets: The connections, which are closed afterwards.
        buffer: Memory for received data.
        deadline: Monotonic seconds.
        pings: Number of round trips.
        seconds: Duration of the stream; 0 for pings only.
        variation: Variation of the median until which the stream continues; None to ignore it.
        max_seconds: Maximum duration while `variation` is not reached.
        starts: Monotonic seconds of the start; 0 for at once.

    Returns:
        Latency, summary of the rates, and CPU use of the receiver.

    Raises:
        ProbeTimeout: No ping was answered, or the stream stalled.
    """
    try:
        latency_seconds = _ping(sockets[0], pings, starts, deadline)
        time.sleep(max(0.0, starts - time.monotonic()))
        sockets[0].sendall(START)
        load = CpuLoad()
        chunk = buffer[: SETTINGS.chunk_bytes]
        rates = _receive_rates(sockets, chunk, deadline, seconds, variation, max_seconds) if seconds else []
        return ReceivedStream(
            latency_seconds=latency_seconds,
            rate=statistics.summarize(rates) if rates else None,
            busy=load.busy_fraction() if seconds else 0.0,
        )
    finally:
        _close(sockets, reset=True)


def _ping(sock: socket.socket, pings: int, starts: float, deadline: float) -> float | None:
    """Return half the median round trip in seconds; None without pings."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    message = bytearray(len(PING))
    for number in range(pings + SETTINGS.skip_pings if pings else 0):
        if starts and number > SETTINGS.skip_pings and time.monotonic() > starts:
            break
        sock.settimeout(_remaining(deadline, "no reply to a ping"))
        begun = time.perf_counter()
        sock.sendall(PING)
        _receive_exactly(sock, message)
        trips.append((time.perf_counter() - begun) / 2)
    return statistics.summarize(trips[SETTINGS.skip_pings :]).median if pings else None


def _receive_rates(
    sockets: Sequence[socket.socket],
    chunk: memoryview,
    deadline: float,
    seconds: float,
    variation: float | None,
    max_seconds: float,
) -> list[float]:
    """Receive a stream. Returns bytes per second in equal windows."""
    skip = min(SETTINGS.skip_seconds, seconds / 3)
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, SETTINGS.low_water_bytes // len(sockets))
            selector.register(sock, selectors.EVENT_READ)
        total = 0
        stamps: list[tuple[float, int]] = []
        begun = polled = time.perf_counter()
        ends = begun + seconds
        waited = 0.0
        while True:
            ready = selector.select(min(SETTINGS.poll_seconds, _remaining(deadline, STREAM_STALLED)))
            for key, _ in ready:
                total += _receive_some(key.fileobj, chunk)  # type: ignore[arg-type]
            now = time.perf_counter()
            waited += min(now - polled, 2 * SETTINGS.poll_seconds)  # a suspended machine has not waited for data
            polled = now
            if ready:
                stamps.append((now, total))
            if now < ends:
                continue
            rates = statistics.stream_rates(
                stamps, skip_bytes=SETTINGS.skip_bytes, skip_seconds=skip, windows=SETTINGS.windows
            )
            few = len(rates) < 3 or total < SETTINGS.skip_bytes + SETTINGS.min_stream_bytes
            if few and waited < max(max_seconds, SETTINGS.slow_link_factor * seconds):
                continue
            if variation is None or not rates or now - begun >= max_seconds:
                return rates
            if statistics.summarize(rates).median_variation <= variation:
                return rates
            ends = now + SETTINGS.poll_seconds


def _receive_some(sock: socket.socket, chunk: memoryview) -> int:
    try:
        count = sock.recv_into(chunk)
    except BlockingIOError:
        return 0
    if not count:
        raise ConnectionError("the sender closed the connection")
    return count


def _read_counters(sockets: Sequence[socket.socket], busy: float) -> SentStream:
    retransmits, mtu = 0, None
    for sock in sockets:
        with contextlib.suppress(OSError, struct.error):  # offsets in `struct tcp_info` (linux/tcp.h)
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            retransmits += struct.unpack_from("=I", info, 100)[0]  # tcpi_total_retrans
            mtu = struct.unpack_from("=I", info, 60)[0] or mtu  # tcpi_pmtu
    return SentStream(retransmits=retransmits, path_mtu=mtu, busy=busy)


def _receive_exactly(sock: socket.socket, into: bytearray) -> bytes:
    view = memoryview(into)
    while view:
        try:
            count = sock.recv_into(view)
        except TimeoutError:
            raise ProbeTimeout("no more data came") from None
        if not count:
            raise ConnectionError("the other end closed the connection")
        view = view[count:]
    return bytes(into)


def _remaining(deadline: float, what: str) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise ProbeTimeout(what)
    return seconds


def _close(sockets: Iterable[socket.socket], *, reset: bool = False) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            if reset:  # SO_LINGER of 0 discards data in flight
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
