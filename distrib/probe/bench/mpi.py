"""Time against size between two ranks over MPI point to point: what its transport gets through the wire.

The receiver leads and takes the times: it orders messages of a size and stamps their arrival. The sender only obeys. As in the OSU benchmarks (osu_bw.c) all messages of a size land
in one buffer; nobody reads them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from distrib.cluster.measurements import Point
from distrib.probe.bench import statistics
from distrib.probe.bench.polling import SLEEP_SECONDS, SPIN_SECONDS, ProbeTimeout, wait
from distrib.probe.records import STREAM_STALLED

FIRST_TAG = 16
"""Each exchange has tags of its own, so that what is left of one that was given up meets no other."""

SMALL_BYTES = 1024
"""Up to this size half a round trip is the time of a message; beyond it, half a round trip and the message's time on the wire."""

BLOCK_BYTES, BLOCK_MESSAGES = 256 << 10, 128
WARM_BYTES = 384 << 10
LARGE_BYTES, LARGE_WARM_SECONDS = 1 << 20, 0.22
"""What is streamed before large messages. A connection that was idle for 10 s and wakes up under BBR spends its first 0.2 s
finding the shortest round trip, with four packets under way (tcp_bbr.c, BBR_PROBE_RTT)."""

MAX_BLOCKS = 1000
LONGER = 3
FEW_SECONDS = 0.015
"""Messages that take longer may be timed once only, but for the largest."""

MANY_SECONDS = 0.25
"""Messages that take longer are timed once."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiver saw: half a round trip, and a point for each size."""

    latency_seconds: float
    points: tuple[Point, ...]
    large: statistics.Summary | None
    """Seconds of the largest messages, without the latency."""


class Order(msgspec.Struct, frozen=True, array_like=True):
    """`count` messages of `size` bytes, please; `echo`: each is to be answered by one like it. A count of 0 is the end."""

    size: int
    count: int
    echo: bool = False


class Sender:
    """Obeys orders of the rank `peer` until it says that it is done; call `step` until it returns True."""

    def __init__(self, comm: Any, peer: int, exchange: int, buffer: memoryview) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._peer, self._buffer = MPI, comm, peer, buffer
        self._tags = tags(exchange)
        self._slot = bytearray(64)
        self._order = comm.Irecv([self._slot, MPI.BYTE], peer, self._tags.order)
        self._under_way: deque[Any] = deque()
        self._echo: Order | None = None
        self._left = 0
        self._incoming: Any = None
        self._ended = False
        self.active = time.monotonic()
        """When something last arrived."""

    def step(self) -> bool:
        """Do what can be done now; whether all is done."""
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
        if self._left:
            self._answer()
        elif not self._ended and self._order.Test():
            self.active = time.monotonic()
            order = msgspec.msgpack.decode(self._slot.rstrip(b"\0"), type=Order)
            self._slot[:] = bytes(64)
            if not order.count:
                self._ended = True
            else:
                self._order = self._comm.Irecv([self._slot, self._mpi.BYTE], self._peer, self._tags.order)
                part = [self._buffer[: order.size], self._mpi.BYTE]
                if order.echo:
                    self._echo, self._left = order, order.count
                    self._expect()
                else:
                    self._under_way += [self._comm.Isend(part, self._peer, self._tags.data) for _ in range(order.count)]
        return self._ended and not self._under_way

    def _expect(self) -> None:
        assert self._echo
        self._incoming = self._comm.Irecv(
            [self._buffer[: self._echo.size], self._mpi.BYTE], self._peer, self._tags.ping
        )

    def _answer(self) -> None:
        assert self._echo
        if not self._incoming.Test():
            return
        self.active = time.monotonic()
        self._left -= 1
        answer = [self._buffer[: self._echo.size], self._mpi.BYTE]
        self._under_way.append(self._comm.Isend(answer, self._peer, self._tags.answer))
        if self._left:
            self._expect()


class Receiver:
    """Leads the rank `peer`, which runs a `Sender`. `sender`: what this rank sends meanwhile, for both ways at once."""

    def __init__(
        self, comm: Any, peer: int, exchange: int, buffer: memoryview, deadline: float, sender: Sender | None = None
    ) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._peer, self._buffer = MPI, comm, peer, buffer
        self._deadline = deadline
        self._sender = sender
        self._tags = tags(exchange)
        self._orders: deque[tuple[Any, bytearray]] = deque()
        self._block: list[Any] = []
        self.round_trip = 0.0

    @property
    def sends(self) -> bool:
        """Whether this rank sends at the same time."""
        return self._sender is not None

    def half_round_trip(self, size: int, repetitions: int) -> statistics.Summary:
        """Seconds for half a round trip of `size` bytes, after a few trips that do not count."""
        warm = 3
        self._order(Order(size, repetitions + warm, echo=True))
        part = [self._buffer[:size], self._mpi.BYTE]
        trips = []
        for _ in range(repetitions + warm):
            back = self._comm.Irecv(part, self._peer, self._tags.answer)
            begun = time.perf_counter()
            out = self._comm.Isend(part, self._peer, self._tags.ping)
            self._spin(back, "no answer to a ping")
            trips.append((time.perf_counter() - begun) / 2)
            out.Wait()  # it has been answered, so it has gone
        return statistics.summarise(trips[warm:])

    def stream(
        self, size: int, seconds: float, *, largest: bool = False, variation: float | None = None
    ) -> statistics.Summary:
        """Seconds that a message of `size` bytes adds to those before it, from blocks of messages for about `seconds`.

        Small messages come in blocks; a block is ordered when the one before has arrived, and the round trip that this
        costs is taken off. More than one large message at a time would share the wire, and arrive together.
        At least two blocks are timed, or one where it takes long, and at most `MAX_BLOCKS`. With `variation` it may go on
        for `LONGER` times as long, until the median's variation is as low.
        """
        each = max(1, min(BLOCK_MESSAGES, BLOCK_BYTES // size))
        # Not timed: bursts pass, windows open.
        warm = min(size, WARM_BYTES)
        self._take(warm, max(1, min(BLOCK_MESSAGES, WARM_BYTES // warm)))
        spans: list[float] = []
        begun = before = now = time.perf_counter()
        while (
            not spans
            or (len(spans) < 2 and spans[0] < (MANY_SECONDS if largest else FEW_SECONDS))
            or (now - begun + spans[-1] / 2 < seconds and len(spans) < MAX_BLOCKS)
            or (
                variation is not None
                and now - begun + spans[-1] / 2 < LONGER * seconds
                and statistics.summarise(spans).median_variation > variation
            )
        ):
            self._take(size, each)
            now = time.perf_counter()
            spans.append(now - before)
            before = now
        bunch = max(1, len(spans) // 10)
        joined = [sum(spans[i : i + bunch]) / bunch for i in range(0, len(spans) - bunch + 1, bunch)]
        return statistics.summarise([max(span - self.round_trip, span / 10) / each for span in joined])

    def flood(self, size: int, seconds: float) -> statistics.Summary:
        """The same while this rank sends too: more and more messages at once, until they take about `seconds`.

        An order is behind the data that goes the same way, so that one block after another would make both ends wait
        for each other.
        """
        count = 2
        while True:
            begun = time.perf_counter()
            self._take(size, count)
            span = time.perf_counter() - begun
            if span > seconds / 2:
                return statistics.summarise([max(span - self.round_trip, span / 10) / count])
            count *= 2

    def finish(self) -> None:
        """Tell the sender that this is all; see this rank's own sending to its end."""
        self._order(Order(0, 0))
        wait(self._all_sent, self._deadline, "the other rank does not end")

    def _all_sent(self) -> bool:
        done = self._sender.step() if self._sender else True
        while self._orders and self._orders[0][0].Test():
            self._orders.popleft()
        return done and not self._orders

    def _order(self, order: Order) -> None:
        slot = bytearray(msgspec.msgpack.encode(order).ljust(64, b"\0"))
        self._orders.append((self._comm.Isend([slot, self._mpi.BYTE], self._peer, self._tags.order), slot))
        while self._orders[0][0].Test() and len(self._orders) > 1:
            self._orders.popleft()

    def _take(self, size: int, count: int) -> None:
        """Order a block of messages and wait for it."""
        part = [self._buffer[:size], self._mpi.BYTE]
        self._block = [self._comm.Irecv(part, self._peer, self._tags.data) for _ in range(count)]
        self._order(Order(size, count))
        self._spin_all(self._block, STREAM_STALLED)

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

    def _spin_all(self, requests: Sequence[Any], what: str) -> None:
        if len(requests) == 1:
            request = requests[0]
            self._wait(lambda: bool(request.Test()), what)
        else:
            self._wait(lambda: bool(self._mpi.Request.Testall(requests)), what)

    def _wait(self, ready: Any, what: str) -> None:
        def step() -> bool:
            if self._sender:
                self._sender.step()
            return bool(ready())

        wait(step, self._deadline, what)


class Tags(NamedTuple):
    """The tags of an exchange. Both ends may lead at the same time, so that pings and their answers are told apart."""

    order: int
    data: int
    ping: int
    answer: int


def tags(exchange: int) -> Tags:
    """The tags of the exchange of that number."""
    first = FIRST_TAG + 4 * exchange
    return Tags(first, first + 1, first + 2, first + 3)


def obey(sender: Sender, deadline: float) -> None:
    """Send what the `Receiver` at the other end asks for, to the end."""
    while not sender.step():
        now = time.monotonic()
        if now > deadline:
            raise ProbeTimeout("the receiver does not end")
        if now - sender.active < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(SLEEP_SECONDS)


def sweep(
    receiver: Receiver,
    sizes: Sequence[int],
    pings: int,
    seconds: float,
    stream_seconds: float,
    variation: float | None = None,
) -> Curve:
    """A curve over `sizes`.

    `seconds` are shared evenly by the sizes that are streamed; the largest gets `stream_seconds`.
    """
    latency = receiver.half_round_trip(8, pings)
    receiver.round_trip = 2 * latency.median
    points = []
    last: statistics.Summary | None = None
    streamed = [size for size in sizes if size > SMALL_BYTES]
    if streamed and streamed[0] >= LARGE_BYTES and not receiver.sends:
        receiver.stream(LARGE_BYTES, LARGE_WARM_SECONDS)
    for size in sizes:
        if size <= SMALL_BYTES:
            trip = receiver.half_round_trip(size, max(10, pings // 2)) if size != 8 else latency
            points.append(Point(size, trip.median, trip.variation))
            continue
        largest = size == streamed[-1]
        share = stream_seconds if largest else seconds / len(streamed)
        if receiver.sends:
            last = receiver.flood(size, share)
        else:
            last = receiver.stream(size, share, largest=largest, variation=variation if largest else None)
        points.append(Point(size, latency.median + last.median, last.variation))
    return Curve(latency_seconds=latency.median, points=tuple(points), large=last)
