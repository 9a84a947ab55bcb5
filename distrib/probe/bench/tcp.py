"""Bandwidth and latency over plain TCP sockets: what the kernel's network stack gets through the wire.

The receiver leads and takes the times: it pings, says go, and hangs up when it has seen enough. Nothing spins; both ends
sleep in the kernel while they wait.
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
CHUNK_BYTES = 1 << 20
LOW_WATER_BYTES = 128 << 10
"""The kernel wakes the receiver when this much has come, not for every packet."""

SKIP_BYTES = 512 << 10
SKIP_SECONDS = 0.03
"""What is left out at the start of a stream: bursts, and the queue that the stream before it left in the switch."""

ENOUGH_BYTES = 2 << 20
SLOW_TIMES = 6
"""A stream that has not brought `ENOUGH_BYTES` in its time may take so many times as long."""

WINDOWS = 12
SKIP_PINGS = 3
PING = b"distrib!"  # 8 bytes
GO = b"go ahead"
CHECK_SECONDS = 0.05
CONNECT_SECONDS = 3.5
"""The kernel asks again after 1 and after 3 s. Where nothing has answered then, nothing will."""

ACCEPT_SECONDS = CONNECT_SECONDS + 1.0
"""How long the receiver waits for connections: it is not told when its sender could not make any."""

_TOTAL_RETRANS_OFFSET, _PATH_MTU_OFFSET = 100, 60
"""Where `struct tcp_info` (linux/tcp.h) has tcpi_total_retrans and tcpi_pmtu."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver of a stream saw."""

    latency_seconds: float | None
    rate: statistics.Summary | None
    busy: float = 0.0
    """The busy part of this host's processors while it took the stream."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What the sender of a stream knows: segments sent again, the largest packet for the way, and how busy its processors were."""

    retransmits: int = 0
    path_mtu: int | None = None
    busy: float = 0.0


class Listener:
    """Takes connections of this probe's other ranks on one address; strangers, who lack the token, are hung up on."""

    def __init__(self, address: str) -> None:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self.socket = socket.create_server((address, 0), family=family, backlog=256)
        self.port: int = self.socket.getsockname()[1]

    def accept(self, token: bytes, task: int, streams: int, deadline: float) -> list[socket.socket]:
        """The connections of one task, in order; those of tasks that were given up are closed."""
        deadline = min(deadline, time.monotonic() + ACCEPT_SECONDS)
        found: dict[int, socket.socket] = {}
        try:
            while len(found) < streams:
                self.socket.settimeout(_left(deadline, "no connection came"))
                try:
                    sock, _ = self.socket.accept()
                except TimeoutError:
                    raise ProbeTimeout("no connection came") from None
                try:
                    sock.settimeout(min(2.0, _left(deadline, "no connection came")))
                    theirs, number, index = _HELLO.unpack(_read(sock, bytearray(_HELLO.size)))
                except (OSError, ProbeTimeout):
                    sock.close()
                    continue
                if not hmac.compare_digest(theirs, token) or number != task or index in found or index >= streams:
                    sock.close()
                    continue
                found[index] = sock
        except BaseException:
            _close(found.values())
            raise
        return [found[index] for index in range(streams)]


def connect(
    own: str, place: tuple[str, int], token: bytes, task: int, streams: int, deadline: float
) -> list[socket.socket]:
    """Connections for one task, from this host's address `own` to another rank's listener."""
    made: list[socket.socket] = []
    try:
        for index in range(streams):
            sock = socket.create_connection(
                place, timeout=min(CONNECT_SECONDS, _left(deadline, "connecting")), source_address=(own, 0)
            )
            made.append(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(_HELLO.pack(token, task, index))
    except BaseException:
        _close(made)
        raise
    return made


def send(sockets: Sequence[socket.socket], buffer: memoryview, deadline: float) -> Sent:
    """Answer the receiver's pings, then fill the streams until it hangs up."""
    try:
        first = sockets[0]
        word = bytearray(len(PING))
        while True:
            first.settimeout(_left(deadline, "the receiver says nothing"))
            if _read(first, word) == GO:
                break
            first.sendall(word)
        return _fill(sockets, buffer[:CHUNK_BYTES], deadline)
    finally:
        _close(sockets)


def _fill(sockets: Sequence[socket.socket], chunk: memoryview, deadline: float) -> Sent:
    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_WRITE)
        load = CpuLoad()
        while True:
            for key, _ in selector.select(min(CHECK_SECONDS, _left(deadline, "the receiver does not hang up"))):
                try:
                    key.fileobj.send(chunk)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                except OSError:  # the receiver has hung up
                    return _told(sockets, load.busy_fraction())


def receive(
    sockets: Sequence[socket.socket],
    buffer: memoryview,
    deadline: float,
    *,
    pings: int,
    seconds: float,
    variation: float | None = None,
    longest: float = 0.0,
    begins: float = 0.0,
) -> Stream:
    """Ping over the first connection, then take what comes for `seconds`, not before `begins` (of time.monotonic).

    Whoever measures beside others must begin with them: pings wait in the queue that another's stream has filled, and what came
    after them would have the wire to itself.

    With `variation` the stream may go on up to `longest` seconds, until the median's variation is as low. Without `seconds`
    only pings are sent.
    """
    try:
        first = sockets[0]
        first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        word = bytearray(len(PING))
        for number in range(pings + SKIP_PINGS if pings else 0):
            if begins and number > SKIP_PINGS and time.monotonic() > begins:
                break
            first.settimeout(_left(deadline, "no answer to a ping"))
            begun = time.perf_counter()
            first.sendall(PING)
            _read(first, word)
            trips.append((time.perf_counter() - begun) / 2)
        latency = statistics.summarise(trips[SKIP_PINGS:]).median if pings else None
        time.sleep(max(0.0, begins - time.monotonic()))
        first.sendall(GO)
        load = CpuLoad()
        found = _drain(sockets, buffer[:CHUNK_BYTES], deadline, seconds, variation, longest) if seconds else []
        return Stream(
            latency_seconds=latency,
            rate=statistics.summarise(found) if found else None,
            busy=load.busy_fraction() if seconds else 0.0,
        )
    finally:
        _close(sockets, reset=True)


def _drain(
    sockets: Sequence[socket.socket],
    chunk: memoryview,
    deadline: float,
    seconds: float,
    variation: float | None,
    longest: float,
) -> list[float]:
    """Rates of equal spans of the stream."""
    skip = min(SKIP_SECONDS, seconds / 3)

    def cut() -> list[float]:
        return statistics.rates(stamps, skip_bytes=SKIP_BYTES, skip_seconds=skip, windows=WINDOWS)

    with selectors.DefaultSelector() as selector:
        for sock in sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOW_WATER_BYTES // len(sockets))
            selector.register(sock, selectors.EVENT_READ)
        total = 0
        stamps: list[tuple[float, int]] = []
        begun = looked = time.perf_counter()
        ends = begun + seconds
        waited = 0.0
        while True:
            ready = selector.select(min(CHECK_SECONDS, _left(deadline, STREAM_STALLED)))
            for key, _ in ready:
                try:
                    count = key.fileobj.recv_into(chunk)  # type: ignore[union-attr]
                except BlockingIOError:
                    continue
                if not count:
                    raise ConnectionError("the sender hung up")
                total += count
            now = time.perf_counter()
            waited += min(now - looked, 2 * CHECK_SECONDS)  # a machine that stood still has not waited for bytes
            looked = now
            if ready:
                stamps.append((now, total))
            if now < ends:
                continue
            found = cut()
            few = len(found) < 3 or total < SKIP_BYTES + ENOUGH_BYTES
            if few and waited < max(longest, SLOW_TIMES * seconds):
                continue  # too slow a link for this time: it gets more
            if variation is None or not found or now - begun >= longest:
                return found
            if statistics.summarise(found).median_variation <= variation:
                return found
            ends = now + CHECK_SECONDS


def _told(sockets: Sequence[socket.socket], busy: float) -> Sent:
    retransmits, mtu = 0, None
    for sock in sockets:
        with contextlib.suppress(OSError, struct.error):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            retransmits += struct.unpack_from("=I", info, _TOTAL_RETRANS_OFFSET)[0]
            mtu = struct.unpack_from("=I", info, _PATH_MTU_OFFSET)[0] or mtu
    return Sent(retransmits=retransmits, path_mtu=mtu, busy=busy)


def _read(sock: socket.socket, into: bytearray) -> bytes:
    """Exactly as many bytes as `into` has room for."""
    view = memoryview(into)
    while view:
        try:
            count = sock.recv_into(view)
        except TimeoutError:
            raise ProbeTimeout("nothing more came") from None
        if not count:
            raise ConnectionError("the other end hung up")
        view = view[count:]
    return bytes(into)


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise ProbeTimeout(what)
    return left


def _close(sockets: Iterable[socket.socket], *, reset: bool = False) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            if reset:  # what is still under way is of no use to anyone: SO_LINGER of 0 discards it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
