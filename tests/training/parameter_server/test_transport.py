"""Connections of mode async between two ends in one event loop: order, memory, ends, options of sockets."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distrib.errors import TrainingError
from distrib.training.parameter_server import transport
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.transport import (
    GREETING,
    HEADER,
    MAX_PAYLOAD_BYTES,
    Connection,
    Frame,
    FrameKind,
    check_payload_size,
    decode,
    encode,
    start_connecting,
)
from distrib.utils.framing import Handshake, ProtocolError
from tests.support.parameter_server_cluster import comes_true

KEY = b"key"


class RecordingLoop(EventLoop):
    """Event loop that tells which sockets wait until they are writable."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: dict[socket.socket, bool] = {}

    def watch(self, sock: socket.socket, on_events: Callable[[int], None], *, writing: bool = False) -> None:
        self.writing[sock] = writing
        super().watch(sock, on_events, writing=writing)

    def do(self, work: Callable[[], Any]) -> Any:
        """Return the result of a function that runs in the loop's thread."""
        results: queue.Queue[Any] = queue.Queue()
        self.call_soon(lambda: results.put(work()))
        return results.get(timeout=10)


class End:
    """One end of a connection, with what it received."""

    def __init__(self, loop: RecordingLoop, sock: socket.socket, *, listener: bool, key: bytes = KEY, **options: Any):
        self.received: queue.Queue[tuple[Frame, Any]] = queue.Queue()
        self.closed = 0
        options = {"on_frame": lambda *frame: self.received.put(frame), "on_closed": self._count, **options}
        self.loop, self.sock = loop, sock
        self.connection = loop.do(lambda: Connection(loop, sock, key, listener=listener, **options))

    def _count(self) -> None:
        self.closed += 1

    def send(self, *frames: tuple[Frame, bytes], **options: Any) -> list[transport.Outgoing]:
        sent: list[transport.Outgoing] = self.loop.do(
            lambda: [self.connection.send(frame, payload, **options) for frame, payload in frames]
        )
        return sent

    def next(self) -> tuple[Frame, bytes]:
        frame, payload = self.received.get(timeout=10)
        return frame, bytes(payload)


@pytest.fixture
def loop() -> Iterator[RecordingLoop]:
    loop = RecordingLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.call_soon(lambda: setattr(loop, "ended", True))
    thread.join(10)
    for sock in loop.writing:
        sock.close()


def pair(loop: RecordingLoop, **options: Any) -> tuple[End, End]:
    """Return the accepting and the calling end; `options` are of the accepting one."""
    accepting, calling = socket.socketpair()
    return End(loop, accepting, listener=True, **options), End(loop, calling, listener=False)


def pushes(*numbers: int) -> list[tuple[Frame, bytes]]:
    return [(Frame(FrameKind.PUSH, chunk=number, length=number), bytes([number]) * number) for number in numbers]


def test_frames_arrive_whole_in_both_directions(loop):
    ends = pair(loop)
    large = bytes(range(256)) * 20_000  # more than a socket buffers
    frames = [
        (Frame(FrameKind.PUSH, 1, 2, 3, 4, 5, 6, len(large)), large),
        (Frame(FrameKind.HELLO, 255, 255, (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1, 9, 0), b""),
        (Frame(FrameKind.LOG, length=3), b"abc"),
    ]
    for sender, receiver in (ends, ends[::-1]):
        sender.send(*frames)
        assert [receiver.next() for _ in frames] == frames
    for end in ends:
        assert comes_true(lambda end=end: not loop.writing[end.sock])
        assert end.closed == 0 and end.connection.peer == -1


def test_queued_frames_are_sent_by_priority_and_in_order(loop):
    accepting, calling = pair(loop)
    order: list[int] = []

    def send() -> None:
        for number, priority in ((1, 5), (2, 3), (3, 5), (4, None), (5, 3)):
            (frame,) = pushes(number)
            options = {} if priority is None else {"priority": priority}
            calling.connection.send(*frame, on_sent=lambda number=number: order.append(number), **options)

    loop.do(send)
    assert [accepting.next()[0].chunk for _ in range(5)] == [4, 2, 5, 1, 3]
    assert comes_true(lambda: order == [4, 2, 5, 1, 3])


def test_a_frame_can_be_cancelled_until_its_first_byte_is_sent(loop):
    accepting, calling = pair(loop)
    sent: list[bool] = []

    def send() -> list[transport.Outgoing]:
        queued = [calling.connection.send(*frame, on_sent=lambda: sent.append(True)) for frame in pushes(1, 2, 3)]
        queued[1].cancelled = True
        queued[2].payload = memoryview(b"new")
        return queued

    queued = loop.do(send)
    assert [accepting.next() for _ in range(2)] == [pushes(1)[0], (pushes(3)[0][0], b"new")]
    assert comes_true(lambda: len(sent) == 3)
    assert all(outgoing.cancelled for outgoing in queued)
    assert loop.do(calling.connection.start_next_outgoing) is False


def test_frames_queued_before_the_handshake_are_sent_after_it(loop):
    accepting, calling = socket.socketpair()
    caller = End(loop, calling, listener=False)
    (outgoing,) = caller.send(*pushes(7))
    assert not outgoing.cancelled and not loop.do(lambda: loop.writing[calling])  # no busy loop
    assert loop.do(caller.connection.start_next_outgoing) is True and outgoing.cancelled
    loop.do(lambda: caller.connection.send(Frame(FrameKind.LEAVE)))
    receiver = End(loop, accepting, listener=True)
    assert [receiver.next() for _ in range(2)] == [pushes(7)[0], (Frame(FrameKind.LEAVE), b"")]


def test_a_payload_is_received_into_the_memory_of_its_owner(loop):
    memory = bytearray(9)
    accepting, calling = pair(loop, allocate=lambda frame: memoryview(memory)[: frame.chunk] if frame.chunk else None)
    calling.send((Frame(FrameKind.PUSH, chunk=4), b"abcd"), (Frame(FrameKind.PUSH), b"own"))
    assert [accepting.next()[1] for _ in range(2)] == [b"abcd", b"own"] and memory == b"abcd" + bytes(5)
    calling.send((Frame(FrameKind.PUSH, chunk=5), b"abcd"))
    assert comes_true(lambda: (accepting.closed, calling.closed) == (1, 1))


def test_an_end_that_closes_is_not_called_and_the_other_one_is(loop):
    accepting, calling = pair(loop)
    calling.send(*pushes(1))
    accepting.next()
    for _ in range(2):
        loop.do(accepting.connection.close)
    assert comes_true(lambda: calling.closed == 1)
    assert accepting.closed == 0 and accepting.sock.fileno() == calling.sock.fileno() == -1
    accepting.send(*pushes(1))  # is lost


def test_an_owner_that_refuses_a_frame_ends_the_connection(loop):
    def refuse(frame: Frame, payload: Any) -> None:
        raise OSError("refused")

    accepting, calling = pair(loop, on_frame=refuse)
    calling.send(*pushes(1))
    assert comes_true(lambda: (accepting.closed, calling.closed) == (1, 1))


def test_another_key_ends_the_connection(loop):
    accepting, calling = pair(loop, key=b"another key")
    assert comes_true(lambda: (accepting.closed, calling.closed) == (1, 1))


def test_only_a_peer_that_proves_nothing_is_closed_after_the_time_for_the_handshake(loop, monkeypatch):
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_SECONDS", 0.2)
    ends = pair(loop)
    own, stranger = socket.socketpair()
    with stranger:
        silent = End(loop, own, listener=True)
        assert comes_true(lambda: silent.closed == 1)
    ends[1].send(*pushes(1))
    assert ends[0].next() == pushes(1)[0] and ends[0].closed == ends[1].closed == 0


def proven(loop: RecordingLoop) -> tuple[End, socket.socket]:
    """Return an end and the plain TCP socket of its peer, which has proven the key."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname(), timeout=10)
        end = End(loop, server.accept()[0], listener=True)
    handshake = Handshake(KEY, GREETING, listener=False)
    while not handshake.proven:
        sock.sendall(handshake.feed(sock.recv(handshake.missing_bytes)))
    return end, sock


@pytest.mark.parametrize(("kind", "length"), [(200, 0), (FrameKind.PUSH, MAX_PAYLOAD_BYTES + 1)])
def test_a_header_that_is_not_valid_ends_the_connection(loop, kind, length):
    end, sock = proven(loop)
    with sock:
        sock.sendall(HEADER.pack(kind, 0, 0, 0, 0, 0, 1, length))
        assert comes_true(lambda: end.closed == 1)
        assert end.received.empty()


def test_a_peer_that_ends_in_a_frame_closes_the_connection(loop):
    end, sock = proven(loop)
    with sock:
        sock.sendall(HEADER.pack(FrameKind.PUSH, 0, 0, 0, 0, 0, 1, 9) + b"half")
    assert comes_true(lambda: end.closed == 1)
    assert end.received.empty()


def test_the_loop_wakes_up_when_much_of_a_payload_has_arrived(loop):
    end, sock = proven(loop)

    def low_water(expected: int) -> None:
        assert comes_true(lambda: end.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == expected)

    with sock:
        sock.sendall(HEADER.pack(FrameKind.PUSH, 0, 0, 0, 0, 0, 1, 900 << 10))
        low_water(512 << 10)
        sock.sendall(bytes(800 << 10))
        low_water(100 << 10)
        sock.sendall(bytes(100 << 10))
        assert len(end.next()[1]) == 900 << 10
        low_water(1)


def test_tcp_connections_send_at_once_and_notice_a_lost_peer(loop):
    options = {
        (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1, (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 2, (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3, (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 5000,
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT): 512 << 10,
    }  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server, start_connecting(server.getsockname()) as calling:
        End(loop, calling, listener=False)
        assert not calling.getblocking()
        assert {option: calling.getsockopt(*option) for option in options} == options


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_socket_connects_without_blocking(host):
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server, start_connecting(server.getsockname()[:2]) as sock:
        server.accept()[0].close()
        assert not sock.getblocking() and sock.getpeername()[0] == host


def test_a_payload_may_have_the_size_of_the_limit_of_a_frame_and_not_more():
    check_payload_size(MAX_PAYLOAD_BYTES)
    with pytest.raises(TrainingError, match="GB") as refused:
        check_payload_size(MAX_PAYLOAD_BYTES + 1)
    assert "AdamW" in str(refused.value.hint)
    with pytest.raises(TrainingError) as refused:
        check_payload_size(MAX_PAYLOAD_BYTES + 1, hint="shorten it")
    assert refused.value.hint == "shorten it"


def test_small_values_are_sent_as_json():
    assert decode(memoryview(encode({"a": [1, None]}))) == {"a": [1, None]}
    with pytest.raises(ProtocolError, match="JSON"):
        decode(b"{")
