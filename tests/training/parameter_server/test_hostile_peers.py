"""Keys and frames of mode async: peers without the job's key, and frames that are changed, repeated, reordered or cut off."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from distrib.training.parameter_server import transport
from distrib.training.parameter_server.server import ParameterServer
from distrib.training.parameter_server.server_connections import ServerConnections
from distrib.training.parameter_server.transport import GREETING, HEADER, Frame, FrameFlag, FrameKind, decode, encode
from distrib.utils.framing import NONCE_BYTES, PROOF_BYTES, Handshake, ProtocolError
from tests.conftest import ROOT
from tests.support import parameter_server_cluster
from tests.support.parameter_server_cluster import Cluster, comes_true, straight, take_step, weight

make = parameter_server_cluster.make
KEY = b"key"
ONES = struct.pack("4f", 1, 1, 1, 1)
"""The gradient of `straight`."""


def shake_hands(
    listener: Handshake, caller: Handshake, change: Callable[[int, bytes], bytes] = lambda _, sent: sent
) -> bool:
    """Exchange the three messages of a handshake. Return True if both sides are proven."""
    answer = caller.feed(change(0, listener.opening))
    proof = listener.feed(change(1, answer))
    return caller.feed(change(2, proof)) == b"" and listener.proven and caller.proven


def sides(
    listener_key: bytes = KEY, caller_key: bytes = KEY, greeting: bytes = GREETING
) -> tuple[Handshake, Handshake]:
    return Handshake(listener_key, GREETING, listener=True), Handshake(caller_key, greeting, listener=False)


def test_a_handshake_proves_the_same_key_and_protocol_only():
    listener, caller = sides()
    assert shake_hands(listener, caller)
    assert (listener.send_key, listener.receive_key) == (caller.receive_key, caller.send_key)
    assert len({listener.send_key, caller.send_key, b""}) == 3
    for other in (b"kez", b"", b"key2", KEY * 20):
        with pytest.raises(ProtocolError, match="key of this job"):
            shake_hands(*sides(caller_key=other))
        with pytest.raises(ProtocolError, match="key of this job"):
            shake_hands(*sides(listener_key=other))
    with pytest.raises(ProtocolError, match="greeting"):
        shake_hands(*sides(greeting=b"dps2"))


def test_a_handshake_with_any_changed_byte_fails():
    for message, size in enumerate((len(GREETING) + NONCE_BYTES, NONCE_BYTES + PROOF_BYTES, PROOF_BYTES)):
        for position in range(size):

            def change(number: int, sent: bytes, message: int = message, position: int = position) -> bytes:
                if number != message:
                    return sent
                return sent[:position] + bytes([sent[position] ^ 1]) + sent[position + 1 :]

            with pytest.raises(ProtocolError):
                shake_hands(*sides(), change)


def test_a_proof_of_another_connection_and_the_own_one_prove_nothing():
    recorded: list[bytes] = []
    listener, caller = sides()
    shake_hands(listener, caller, lambda _, sent: recorded.append(sent) or sent)
    again, _ = sides()
    with pytest.raises(ProtocolError, match="key of this job"):
        again.feed(recorded[1])  # the caller's answer to another nonce
    assert not again.proven
    _, caller = sides()
    own = caller.feed(GREETING + bytes(NONCE_BYTES))
    with pytest.raises(ProtocolError, match="key of this job"):
        caller.feed(own[NONCE_BYTES:])
    assert not caller.proven


class RawPeer:
    """A caller over a plain socket that sends any bytes."""

    def __init__(self, server: ParameterServer, key: bytes = KEY) -> None:
        self.sock = socket.create_connection(server.addresses[server.number], timeout=5)
        self.handshake = Handshake(key, GREETING, listener=False)
        self.answer = self.handshake.feed(self._receive(len(GREETING) + NONCE_BYTES))

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.sock.recv(size - len(data))
            if not more:
                raise ConnectionResetError
            data += more
        return data

    def prove(self) -> RawPeer:
        self.sock.sendall(self.answer)
        self.handshake.feed(self._receive(PROOF_BYTES))
        return self

    def send(self, frame: Frame, payload: bytes = b"", length: int | None = None) -> None:
        self.sock.sendall(pack(frame, payload, length))

    def receive(self) -> tuple[Frame, bytes]:
        kind, *rest = HEADER.unpack(self._receive(HEADER.size))
        frame = Frame(FrameKind(kind), *rest)
        return frame, self._receive(frame.length)

    def introduce(self, worker: int, incarnation: str) -> RawPeer:
        hello = {
            "worker": worker, "incarnation": incarnation, "restarted": False, "shard": 0, "epoch": 0, "main": (0, 0), "silent": [],
            "tables": [0],
        }  # fmt: skip
        self.send(Frame(FrameKind.HELLO), encode(hello))
        assert self.receive()[0].kind is FrameKind.WELCOME
        return self

    def is_closed_by_peer(self) -> bool:
        """Read to the end of the connection. Return False if it is still open after two seconds."""
        self.sock.settimeout(2)
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


def pack(frame: Frame, payload: bytes = b"", length: int | None = None) -> bytes:
    return HEADER.pack(*frame[:-1], len(payload) if length is None else length) + payload


def hello_of(worker: int) -> bytes:
    about = {"worker": worker, "incarnation": "stranger", "restarted": False, "shard": 0, "epoch": 0, "main": (0, 0), "silent": [], "tables": []}  # fmt: skip
    return pack(Frame(FrameKind.HELLO), encode(about))


def test_a_server_reads_no_frame_of_a_peer_that_does_not_prove_the_key(make):
    cluster = make(servers=2)
    backend = cluster.worker(0)
    model, optimizer = straight(backend)
    take_step(model, optimizer)
    backend.synchronize()
    server = cluster.servers[0]
    connection = server.services[0].membership.connections[0]
    options = pack(Frame(FrameKind.OPTIONS), encode([{"lr": 100.0}]))
    frames = hello_of(0) + options + pack(Frame(FrameKind.PUSH, FrameFlag.FINAL, step=9), ONES)
    replica = pack(Frame(FrameKind.HELLO), encode({"shard": 1, "epoch": 7, "server": 1}))
    wrong = RawPeer(server, b"kez").answer
    for attack in (
        frames,  # no handshake
        bytes(NONCE_BYTES + PROOF_BYTES) + frames,  # no key
        wrong + frames,  # a proof for another nonce, with another key
        replica * 2,
        bytes(NONCE_BYTES + PROOF_BYTES) + replica,
    ):
        peer = RawPeer(server)
        peer.sock.sendall(attack)
        assert peer.is_closed_by_peer(), attack
    for key in (b"kez", b""):
        peer = RawPeer(server, key)
        peer.sock.sendall(peer.answer + frames)
        assert peer.is_closed_by_peer(), key
    changed = RawPeer(server)
    changed.sock.sendall(changed.answer[:-1] + bytes([changed.answer[-1] ^ 1]) + frames)
    assert changed.is_closed_by_peer()
    assert server.services[0].membership.connections == {0: connection} and set(server.services) == {0}
    take_step(model, optimizer)
    assert weight(model) == -2


def test_a_peer_that_sends_nothing_is_closed_after_the_time_for_the_handshake(make, monkeypatch):
    page = (ROOT / "docs/explanation/security.md").read_text()
    assert f"Parameter servers close each after {transport.HANDSHAKE_TIMEOUT_SECONDS:g} s" in page
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_SECONDS", 0.4)
    peer = RawPeer(make(servers=1).servers[0])
    begun = time.monotonic()
    assert peer.is_closed_by_peer() and 0.2 < time.monotonic() - begun < 1.5


@pytest.mark.parametrize("reply", ["of another key", "own proof", "none"])
def test_a_worker_sends_nothing_to_a_server_that_does_not_prove_the_key(reply):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = ServerConnections(0, [listener.getsockname()[:2]], KEY, replicas=False)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(5)
            handshake = Handshake(b"kez", GREETING, listener=True)
            sock.sendall(handshake.opening)
            answer = sock.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            with contextlib.suppress(ProtocolError):
                handshake.feed(answer)
            proofs = {"of another key": handshake._own_proof, "own proof": answer[NONCE_BYTES:], "none": b""}
            welcome = {
                "member": True,
                "epoch": 0,
                "rebuilt": 0,
                "host": "h",
                "round": 0,
                "tables": [],
                "main": (0, 0),
                "results": [],
            }
            sock.sendall(proofs[reply] + pack(Frame(FrameKind.WELCOME), encode(welcome)))
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(4096) == b""
            assert not client.links[0].welcomed and not client.links[0].was_welcomed
        client.close()


@pytest.fixture
def shard(make) -> Iterator[Callable[[], tuple[RawPeer, Callable[[], float]]]]:
    """Connect as a second worker, whose program is gone, to a server with one model of four zeros."""
    cluster: Cluster = make(servers=1, workers=2)
    _, (second, _, _) = cluster.each(lambda backend: (backend, *straight(backend)))
    second.client.close()
    service = cluster.servers[0].services[0]
    assert comes_true(lambda: second.world.rank not in service.membership.connections)
    peers: list[RawPeer] = []

    def connect() -> tuple[RawPeer, Callable[[], float]]:
        peers.append(RawPeer(cluster.servers[0]).prove().introduce(second.world.rank, second.client.incarnation))
        return peers[-1], lambda: service.tables[0].value(0)[0].item()

    yield connect
    for peer in peers:
        peer.sock.close()


PUSH = Frame(FrameKind.PUSH, FrameFlag.FINAL)


def test_a_push_that_is_repeated_or_late_is_applied_once(shard):
    peer, value = shard()
    for step, applied, expected in (
        (1, True, -1),
        (1, True, -1),
        (3, True, -2),
        (2, False, -2),
        (3, True, -2),
        (4, True, -3),
    ):
        peer.send(PUSH._replace(step=step), ONES)
        reply, _ = peer.receive()
        assert (reply.kind, reply.step, bool(reply.flags & FrameFlag.APPLIED)) == (FrameKind.VALUE, step, applied)
        assert value() == expected, step


def test_a_push_that_is_cut_off_changes_nothing(shard):
    for size in (0, 1, HEADER.size - 1, HEADER.size, HEADER.size + 1, HEADER.size + len(ONES) - 1):
        peer, value = shard()
        peer.sock.sendall(pack(PUSH._replace(step=1), ONES)[:size])
        peer.sock.close()
    peer, value = shard()
    peer.send(PUSH._replace(step=1), ONES)
    peer.receive()
    assert value() == -1


@pytest.mark.parametrize(
    ("frame", "payload", "says"),
    [
        (PUSH, ONES + b"\0", "17 bytes for chunk 0"),
        (PUSH, ONES[:-1], "15 bytes for chunk 0"),
        (PUSH._replace(chunk=1), ONES, "chunk 1 of table 0"),
        (PUSH._replace(table=1), ONES, "chunk 0 of table 1"),
        (PUSH._replace(flags=FrameFlag.SHARED), b"", "cannot handle"),  # it shares no memory
        (Frame(FrameKind.SET_VALUE, FrameFlag.FINAL), ONES[:-4], "cannot handle"),
        (Frame(FrameKind.SET_STATE), b"no tensors", "cannot handle"),
        (Frame(FrameKind.GET_STATE, table=5), b"", "not described"),
        *((Frame(kind), b"", "unexpected frame") for kind in (FrameKind.VALUE, FrameKind.LOG, FrameKind.STATE, FrameKind.MAIN)),
    ],
)  # fmt: skip
def test_a_frame_with_another_size_place_or_kind_is_refused(shard, capfd, frame, payload, says):
    peer, value = shard()
    peer.send(frame._replace(step=1), payload)
    reply, reason = peer.receive()
    assert reply.kind is FrameKind.REFUSED and says in decode(reason), decode(reason)
    peer.send(PUSH._replace(step=1), ONES)  # the server does not listen any more
    assert value() == 0
    peer, value = shard()
    peer.send(PUSH._replace(step=1), ONES)
    assert peer.receive()[0].kind is FrameKind.VALUE and value() == -1
    assert capfd.readouterr().err.count("invalid request of worker rank") == 1


@pytest.mark.parametrize(
    "data",
    [
        pack(Frame(FrameKind.STATISTICS), b"", length=transport.MAX_PAYLOAD_BYTES + 1),
        pack(PUSH._replace(step=1), ONES, length=0xFFFFFFFF),
        b"\xff" + pack(PUSH._replace(step=1), ONES)[1:],
        b"\0" * HEADER.size,
        pack(Frame(FrameKind.COMMIT), b"{"),
        pack(Frame(FrameKind.HELLO), b"\xff"),
    ],
    ids=["too large", "too large push", "unknown kind", "zeros", "no JSON", "no hello"],
)
def test_a_frame_that_cannot_be_read_ends_its_connection_and_nothing_else(shard, data):
    peer, value = shard()
    peer.sock.sendall(data)
    assert peer.is_closed_by_peer() and value() == 0
    peer, value = shard()
    peer.send(PUSH._replace(step=1), ONES)
    assert peer.receive()[0].kind is FrameKind.VALUE and value() == -1


def test_a_frame_before_the_introduction_ends_the_connection(make):
    server = make(servers=1).servers[0]
    for kind in (FrameKind.STATISTICS, FrameKind.STATE, FrameKind.LOG, FrameKind.LEAVE):
        peer = RawPeer(server).prove()
        peer.send(Frame(kind), b"null")
        assert peer.is_closed_by_peer(), kind


def test_a_replica_applies_each_entry_of_the_log_once_and_none_that_is_incomplete(make):
    cluster = make(servers=2, workers=1)
    backend = cluster.worker(0)
    straight(backend)
    source = cluster.servers[0].services[0].tables[0]
    about = {"description": msgspec.to_builtins(source.description), "controller": source.controller.state()}

    def primary() -> tuple[RawPeer, Callable[[], float]]:
        """Connect to server 1 as the primary of a shard that it does not have, and send it the shard."""
        peer = RawPeer(cluster.servers[1]).prove()
        peer.send(Frame(FrameKind.HELLO), encode({"shard": 0, "epoch": 3, "server": 0}))
        peer.send(Frame(FrameKind.STATE, FrameFlag.MORE), encode(about))
        peer.send(Frame(FrameKind.STATE), source.serialize(0))
        peer.send(Frame(FrameKind.STATE, FrameFlag.APPLIED, step=0))
        assert peer.receive()[0].kind is FrameKind.LOG_ACK
        return peer, lambda: cluster.servers[1].services[0].tables[0].value(0)[0].item()

    def log(peer: RawPeer, entry: int, gradient: bytes = ONES) -> None:
        frame = Frame(FrameKind.LOG, FrameFlag.MORE, step=entry, version=entry)
        peer.send(frame, encode({"updates": [[0, entry]], "options": source.last_options[0]}))
        peer.send(frame._replace(flags=0), gradient)

    wrong = RawPeer(cluster.servers[1], b"kez")
    wrong.sock.sendall(wrong.answer + pack(Frame(FrameKind.HELLO), encode({"shard": 0, "epoch": 9, "server": 0})))
    assert wrong.is_closed_by_peer() and set(cluster.servers[1].services) == {1}
    peer, value = primary()
    for entry, expected in ((1, -1), (1, -1), (2, -2), (1, -2), (2, -2)):
        log(peer, entry)
        assert peer.receive()[0][:5] == (FrameKind.LOG_ACK, 0, 0, 0, entry) and value() == expected
    log(peer, 3, ONES[:-4])
    assert peer.is_closed_by_peer() and value() == -2
    peer, value = primary()
    peer.send(Frame(FrameKind.LOG, step=1, version=1), ONES)  # without the first half of the entry
    peer.send(Frame(FrameKind.LOG, FrameFlag.MORE, step=1, version=1), b"{}")
    peer.sock.close()
    peer, value = primary()
    assert value() == 0
    log(peer, 1)
    peer.receive()
    assert value() == -1
