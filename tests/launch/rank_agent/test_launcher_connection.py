"""Connection of a rank agent to the launcher: bytes of frames, addresses, reserved ports, silence of the peer."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading

import pytest

from distrib.utils.framing import ProtocolError, new_token
from distrib_launch.rank_agent import control_channel
from distrib_launch.rank_agent.control_channel import (
    HEADER,
    MAC_BYTES,
    PAYLOAD_LIMIT_BYTES,
    Channel,
    Kind,
    SilenceMonitor,
    connect_to_launcher,
    reserve_port,
    set_dead_peer_timeout,
)
from tests.launch.supervisor.test_control_channel import exchange, pair


@pytest.fixture
def ends():
    listener, caller = pair()
    yield listener, caller
    for end in (listener, caller):
        end.close()
        assert end.closed is True


def signed(channel: Channel, number: int, header: bytes, body: bytes) -> bytes:
    key = channel._handshake.send_key
    return header + body + hmac.digest(key, number.to_bytes(8, "big") + header + body, "sha256")[:MAC_BYTES]


def test_a_frame_is_signed_with_its_number_kind_and_payload(ends):
    _, caller = ends
    assert caller.closed is False
    caller.send(Kind.HELLO, {"rank": 1, "pid": 2})
    caller.send(Kind.PING)
    body = b'{"rank":1,"pid":2}'
    first = signed(caller, 0, HEADER.pack(len(body), Kind.HELLO), body)
    assert caller.outgoing == first + signed(caller, 1, HEADER.pack(0, Kind.PING), b"")
    assert caller.waiting_bytes == len(caller.outgoing)


def test_a_payload_may_have_the_size_of_the_limit_and_not_more(ends):
    listener, caller = ends
    largest = bytes(PAYLOAD_LIMIT_BYTES)
    caller.send(Kind.OUT, largest)
    assert exchange(caller, listener) == [(Kind.OUT, largest)]
    with pytest.raises(ValueError, match=f"{PAYLOAD_LIMIT_BYTES + 1} .*{PAYLOAD_LIMIT_BYTES}"):
        caller.send(Kind.OUT, largest + b"x")
    caller.sock.sendall(HEADER.pack(PAYLOAD_LIMIT_BYTES + 1, Kind.OUT))
    with pytest.raises(ProtocolError, match=f"{PAYLOAD_LIMIT_BYTES + 1} .*{PAYLOAD_LIMIT_BYTES}"):
        list(listener.receive())


def test_a_signed_frame_of_an_unknown_kind_is_refused(ends):
    listener, caller = ends
    caller.send(99)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="99"):
        exchange(caller, listener)


def test_nothing_is_sent_before_the_handshake():
    a, b = socket.socketpair()
    channel = Channel(a, new_token(), listener=True)
    with a, b, pytest.raises(ProtocolError, match="handshake"):
        channel.send(Kind.PING)


def test_a_peer_that_closes_its_end_is_noticed(ends):
    listener, caller = ends
    caller.send(Kind.EXIT)
    caller.flush()
    caller.close()
    assert list(listener.receive()) == [(Kind.EXIT, b"")] and listener.closed is True


def test_small_frames_are_sent_at_once_over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        Channel(sock, "token", listener=False)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) and not sock.getblocking()


def test_the_first_address_that_accepts_is_taken():
    with reserve_port() as closed, socket.create_server(("127.0.0.1", 0)) as server:
        addresses = f"127.0.0.1:{closed.getsockname()[1]},127.0.0.1:{server.getsockname()[1]}"
        with contextlib.closing(connect_to_launcher(addresses, "token")) as channel:
            accepted, _ = server.accept()
            with accepted, contextlib.closing(Channel(accepted, "token", listener=True)) as listener:
                for end in (listener, channel, listener, channel):
                    end.flush()
                    list(end.receive())
                assert channel.proven and listener.proven


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_in_brackets():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        address = f"[::1]:{server.getsockname()[1]}"
        with contextlib.closing(connect_to_launcher(address, "token")) as channel:
            assert channel.sock.getpeername()[0] == "::1"


def test_a_launcher_that_listens_later_is_reached():
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        started = []
        later = threading.Timer(0.3, lambda: started.append(socket.create_server(("127.0.0.1", port))))
        later.start()
        with contextlib.closing(connect_to_launcher(f"127.0.0.1:{port}", "token")):
            later.join()
            started[0].close()


@pytest.mark.parametrize("under_mpirun", [True, False])
def test_a_launcher_that_cannot_be_reached_is_named(monkeypatch, under_mpirun):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    if under_mpirun:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with reserve_port() as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(SystemExit) as ended:
            connect_to_launcher(address, "token", timeout_seconds=0.1)
    said = str(ended.value.code)
    assert socket.gethostname() in said and address in said and "refused" in said
    assert ("--interface" in said) == under_mpirun and said.endswith("?") != under_mpirun


@pytest.mark.parametrize("ipv6", [True, False])
def test_a_reserved_port_is_free_for_the_script_and_refuses_connections(monkeypatch, ipv6):
    if not ipv6:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    elif not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        assert port >= 1024 and reserved.family == (socket.AF_INET6 if ipv6 else socket.AF_INET)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.socket() as script:
            script.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            script.bind(("0.0.0.0", port))
            script.listen()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("0.0.0.0", port))


def test_the_kernel_fails_a_connection_without_acknowledgement_after_the_time():
    with socket.socket() as sock:
        set_dead_peer_timeout(sock, 1.5)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


class KernelState:
    """Socket whose TCP_INFO the test sets."""

    def __init__(self) -> None:
        self.options: list[tuple[int, int, int]] = []
        self.probes = self.unacked = self.milliseconds = 0

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)
        raise OSError("an old kernel")

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        info = bytearray(b"\xff" * size)
        info[3] = self.probes
        struct.pack_into("=I", info, 24, self.unacked)
        struct.pack_into("=I", info, 56, self.milliseconds)
        return bytes(info)


def test_silence_counts_while_bytes_are_unacknowledged_or_the_window_is_closed(monkeypatch):
    now = 100.0
    monkeypatch.setattr(control_channel.time, "monotonic", lambda: now)
    kernel = KernelState()
    monitor = SilenceMonitor(kernel, 2.5)  # type: ignore[arg-type]

    def look(seconds: float, milliseconds: int, unacked: int = 0, probes: int = 0) -> bool:
        nonlocal now
        now += seconds
        kernel.milliseconds, kernel.unacked, kernel.probes = milliseconds, unacked, probes
        return monitor.is_over_limit()

    for waits in ({"unacked": 1}, {"probes": 2}):
        assert not look(1.0, 5000, **waits)
        assert not look(60.0, 60_011, **waits)  # this process was stopped: one second counts
        assert not look(0.5, 0xFFFFFFFF, **waits)
        assert look(0.125, 99_999, **waits)
        assert not look(0.5, 510, **waits)  # acknowledged since the last look
        assert not any(look(0.5, 511, **waits) for _ in range(5)) and look(0.5, 511, **waits)
        assert not look(0.5, 5000, probes=1)  # nothing is under way
        assert not any(look(0.5, 5000, **waits) for _ in range(5)) and look(0.5, 5000, **waits)
        assert not look(0.5, 0)


@pytest.mark.parametrize(("patience_seconds", "milliseconds"), [(20.0, 5000), (2.0, 1000)])
def test_four_probes_fit_into_the_patience(patience_seconds, milliseconds):
    kernel = KernelState()
    SilenceMonitor(kernel, patience_seconds)  # type: ignore[arg-type]
    assert kernel.options == [(socket.IPPROTO_TCP, 44, milliseconds)]
