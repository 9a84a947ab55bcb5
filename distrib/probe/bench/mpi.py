"""Time against message size between two ranks over MPI point to point.

The receiver controls and times the exchange: it requests messages of a size and measures their arrival; the sender only obeys.
As in the OSU benchmarks (osu_bw.c), all messages of a size arrive in one buffer, which is never read.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from distrib.cluster.measurements import Point
from distrib.probe.bench import statistics
from distrib.probe.bench.polling import ProbeTimeout, wait, yield_cpu
from distrib.probe.records import STREAM_STALLED


class MpiBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of exchanges over MPI."""

    max_ping_bytes: int = 1024
    """Up to this size, a message takes half a round trip; beyond it, the latency plus the time of a stream's message."""
    block_bytes: int = 256 << 10
    block_messages: int = 128
    """Maximum size of a block: the messages that are requested at once."""
    warm_up_bytes: int = 384 << 10
    """Data that opens the TCP windows before a stream, and does not count."""
    large_bytes: int = 1 << 20
    large_warm_up_seconds: float = 0.22
    """Warm-up before messages of `large_bytes` or more. A connection that was idle for 10 s spends its first 0.2 s under BBR with
    four packets in flight (tcp_bbr.c, BBR_PROBE_RTT)."""
    max_blocks: int = 1000
    max_prolongation: int = 3
    """Multiple of its duration that a stream may take until its variation is reached."""
    single_block_seconds: float = 0.015
    """Blocks that take longer may be timed once only, except for the largest size."""
    single_largest_seconds: float = 0.25
    """Blocks of the largest size that take longer are timed once."""


SETTINGS = MpiBenchSettings()


class MpiCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer times that the receiver measured, with a point for each size."""

    latency_seconds: float
    """Half a round trip of 8 bytes."""
    points: tuple[Point, ...]
    large: statistics.SampleSummary | None
    """Seconds of a message of the largest size, without the latency."""


class MessageRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request for `count` messages of `size` bytes. `echo`: each is returned. A count of 0 ends the exchange."""

    size: int
    count: int
    echo: bool = False


class MpiSender:
    """Sender's side of a measurement: answers the requests of an `MpiReceiver`. Call `serve`, or `step` until it returns True.

    Args:
        comm: MPI communicator.
        peer: The receiver's rank.
        exchange: Number of the exchange.
        buffer: Data to send.
    """

    def __init__(self, comm: Any, peer: int, exchange: int, buffer: memoryview) -> None:
        self._comm, self._peer, self._buffer = comm, peer, buffer
        self._tags = _ExchangeTags(exchange)
        self._slot = bytearray(64)
        self._request_receive = comm.Irecv(self._slot, peer, self._tags.request)
        self._under_way: deque[Any] = deque()
        self._echo, self._left = buffer, 0
        """The message that comes and is returned, and how many times more."""
        self._incoming: Any = None
        self._ended = False
        self._active = time.monotonic()  # when the last message came

    def serve(self, deadline: float) -> None:
        """Answer requests until the exchange ends.

        Args:
            deadline: Monotonic seconds.

        Raises:
            ProbeTimeout: The deadline passed.
        """
        while not self.step():
            now = time.monotonic()
            if now > deadline:
                raise ProbeTimeout("the receiver did not end the exchange")
            yield_cpu(now - self._active)

    def step(self) -> bool:
        """Handle messages that have come. Returns True when the exchange ended and all was sent."""
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
        if self._left:
            self._answer()
        elif not self._ended and self._request_receive.Test():
            self._active = time.monotonic()
            request = msgspec.msgpack.decode(self._slot.rstrip(b"\0"), type=MessageRequest)
            self._slot[:] = bytes(64)
            if not request.count:
                self._ended = True
            else:
                self._request_receive = self._comm.Irecv(self._slot, self._peer, self._tags.request)
                part = self._buffer[: request.size]
                if request.echo:
                    self._echo, self._left = part, request.count
                    self._expect()
                else:
                    self._under_way += [
                        self._comm.Isend(part, self._peer, self._tags.data) for _ in range(request.count)
                    ]
        return self._ended and not self._under_way

    def _expect(self) -> None:
        self._incoming = self._comm.Irecv(self._echo, self._peer, self._tags.ping)

    def _answer(self) -> None:
        if not self._incoming.Test():
            return
        self._active = time.monotonic()
        self._left -= 1
        self._under_way.append(self._comm.Isend(self._echo, self._peer, self._tags.answer))
        if self._left:
            self._expect()


class MpiReceiver:
    """Receiver's side of a measurement: requests messages of an `MpiSender` on another rank and times them.

    Args:
        comm: MPI communicator.
        peer: The sender's rank.
        exchange: Number of the exchange.
        buffer: Memory for received data.
        deadline: Monotonic seconds after which methods raise ProbeTimeout.
        sender: This rank's sender, for both directions at once.
    """

    def __init__(
        self, comm: Any, peer: int, exchange: int, buffer: memoryview, deadline: float, sender: MpiSender | None = None
    ) -> None:
        self._comm, self._peer, self._buffer = comm, peer, buffer
        self._deadline = deadline
        self._sender = sender
        self._tags = _ExchangeTags(exchange)
        self._requests: deque[tuple[Any, bytearray]] = deque()
        self._block: list[Any] = []
        self._round_trip_seconds = 0.0

    def measure_curve(
        self, sizes: Sequence[int], pings: int, seconds: float, stream_seconds: float, variation: float | None = None
    ) -> MpiCurve:
        """Measure time against size, then end the exchange.

        Args:
            sizes: Message sizes in bytes, ascending.
            pings: Round trips of the latency.
            seconds: Duration of all streamed sizes but the largest, in equal shares.
            stream_seconds: Duration of the largest size.
            variation: Variation of the median until which the largest size continues; None to ignore it.

        Returns:
            Latency, seconds for each size, and the summary of the largest size.
        """
        latency = self._half_round_trip(8, pings)
        self._round_trip_seconds = 2 * latency.median
        points = []
        last: statistics.SampleSummary | None = None
        streamed = [size for size in sizes if size > SETTINGS.max_ping_bytes]
        if streamed and streamed[0] >= SETTINGS.large_bytes and not self._sender:
            self._stream(SETTINGS.large_bytes, SETTINGS.large_warm_up_seconds)
        for size in sizes:
            if size <= SETTINGS.max_ping_bytes:
                trip = self._half_round_trip(size, max(10, pings // 2)) if size != 8 else latency
                points.append(Point(size, trip.median, trip.variation))
                continue
            largest = size == streamed[-1]
            share = stream_seconds if largest else seconds / len(streamed)
            if self._sender:
                last = self._flood(size, share)
            else:
                last = self._stream(size, share, largest=largest, variation=variation if largest else None)
            points.append(Point(size, latency.median + last.median, last.variation))
        self._finish()
        return MpiCurve(latency_seconds=latency.median, points=tuple(points), large=last)

    def _half_round_trip(self, size: int, repetitions: int) -> statistics.SampleSummary:
        """Measure half a round trip in seconds, after a few that do not count."""
        warm = 3
        self._request(MessageRequest(size, repetitions + warm, echo=True))
        part = self._buffer[:size]
        trips = []
        for _ in range(repetitions + warm):
            back = self._comm.Irecv(part, self._peer, self._tags.answer)
            begun = time.perf_counter()
            out = self._comm.Isend(part, self._peer, self._tags.ping)
            self._spin(back, "no reply to a ping")
            trips.append((time.perf_counter() - begun) / 2)
            out.Wait()  # it has been answered, so it has gone
        return statistics.summarize(trips[warm:])

    def _stream(
        self, size: int, seconds: float, *, largest: bool = False, variation: float | None = None
    ) -> statistics.SampleSummary:
        """Measure the seconds that each message adds to a stream, until the variation of their median is reached, if one is given.

        Small messages come in blocks; each block is requested when the previous one has arrived, and that round trip is
        subtracted. Concurrent large messages would share the link. At least two blocks are timed, one if it takes long.
        """
        each = max(1, min(SETTINGS.block_messages, SETTINGS.block_bytes // size))
        warm = min(size, SETTINGS.warm_up_bytes)
        self._take(warm, max(1, min(SETTINGS.block_messages, SETTINGS.warm_up_bytes // warm)))
        single_seconds = SETTINGS.single_largest_seconds if largest else SETTINGS.single_block_seconds
        spans: list[float] = []
        begun = before = now = time.perf_counter()
        while (
            not spans
            or (len(spans) < 2 and spans[0] < single_seconds)
            or (now - begun + spans[-1] / 2 < seconds and len(spans) < SETTINGS.max_blocks)
            or (
                variation is not None
                and now - begun + spans[-1] / 2 < SETTINGS.max_prolongation * seconds
                and statistics.summarize(spans).median_variation > variation
            )
        ):
            self._take(size, each)
            now = time.perf_counter()
            spans.append(now - before)
            before = now
        bunch = max(1, len(spans) // 10)
        joined = [sum(spans[i : i + bunch]) / bunch for i in range(0, len(spans) - bunch + 1, bunch)]
        return statistics.summarize([max(span - self._round_trip_seconds, span / 10) / each for span in joined])

    def _flood(self, size: int, seconds: float) -> statistics.SampleSummary:
        """Measure the seconds of each message while this rank sends too: ever more at once, until they take `seconds`.

        A request waits behind data of the same direction: blocks one after another would make both ends wait for each other.
        """
        count = 2
        while True:
            begun = time.perf_counter()
            self._take(size, count)
            span = time.perf_counter() - begun
            if span > seconds / 2:
                return statistics.summarize([max(span - self._round_trip_seconds, span / 10) / count])
            count *= 2

    def _finish(self) -> None:
        """End the exchange, and finish this rank's own sending."""
        self._request(MessageRequest(0, 0))
        wait(self._all_sent, self._deadline, "the other rank did not end the exchange")

    def _all_sent(self) -> bool:
        done = self._sender.step() if self._sender else True
        while self._requests and self._requests[0][0].Test():
            self._requests.popleft()
        return done and not self._requests

    def _request(self, request: MessageRequest) -> None:
        slot = bytearray(msgspec.msgpack.encode(request).ljust(64, b"\0"))
        self._requests.append((self._comm.Isend(slot, self._peer, self._tags.request), slot))
        while self._requests[0][0].Test() and len(self._requests) > 1:
            self._requests.popleft()

    def _take(self, size: int, count: int) -> None:
        """Request a block of messages and wait for it."""
        part = self._buffer[:size]
        self._block = [self._comm.Irecv(part, self._peer, self._tags.data) for _ in range(count)]
        self._request(MessageRequest(size, count))
        all_arrived = self._block[0].Testall  # a class method
        self._wait(lambda: bool(all_arrived(self._block)), STREAM_STALLED)

    def _spin(self, request: Any, what: str) -> None:
        if self._sender:
            self._wait(lambda: bool(request.Test()), what)
            return
        checks = 0
        while not request.Test():
            os.sched_yield()
            checks += 1
            if checks & 255 == 0 and time.monotonic() > self._deadline:
                self._wait(lambda: bool(request.Test()), what)

    def _wait(self, ready: Any, what: str) -> None:
        def step() -> bool:
            if self._sender:
                self._sender.step()
            return bool(ready())

        wait(step, self._deadline, what)


class _ExchangeTags:
    """MPI tags of one exchange: no other exchange receives messages of an abandoned one.

    Both ends may be receivers, so pings and their echoes differ. Lower tags are those of `protocol`.
    """

    def __init__(self, exchange: int) -> None:
        self.request, self.data, self.ping, self.answer = range(16 + 4 * exchange, 20 + 4 * exchange)
