"""Control channel: clients without the token are rejected, and no client stalls or crashes the launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import selectors
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrib.utils.framing import NONCE_BYTES, PROOF_BYTES, ProtocolError, new_token
from distrib.utils.rlimits import raise_open_files
from distrib_launch.rank_agent.control_channel import GREETING, HEADER, Channel, Kind
from distrib_launch.supervisor.listener import MAX_UNAUTHENTICATED, ControlListener
from tests.conftest import LAUNCH, MARK, SCRIPTS

TOKEN = new_token()


def pair(token: str = TOKEN) -> tuple[Channel, Channel]:
    """Return a listener's and a caller's channel after their handshake."""
    a, b = socket.socketpair()
    listener, caller = Channel(a, TOKEN, listener=True), Channel(b, token, listener=False)
    for _ in range(2):
        for channel in (listener, caller):
            channel.flush()
        assert not list(caller.receive()) + list(listener.receive())
    assert listener.proven and caller.proven
    return listener, caller


def exchange(sender: Channel, receiver: Channel) -> list[tuple[Kind, bytes]]:
    got = []
    while sender.waiting_bytes:
        sender.flush()
        got += receiver.receive()
    return got + list(receiver.receive())


@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=3000)), max_size=20))
@settings(deadline=None)
def test_frames_arrive_whole_and_in_order(frames):
    listener, caller = pair()
    try:
        for sender, receiver in ((caller, listener), (listener, caller)):
            for kind, payload in frames:
                sender.send(kind, payload)
            assert exchange(sender, receiver) == frames
    finally:
        listener.close()
        caller.close()


def captured(frames: int) -> tuple[Channel, list[bytes]]:
    """Return a listener and the encoded frames for it, not yet delivered."""
    listener, caller = pair()
    wire = []
    for number in range(frames):
        caller.send(Kind.HEARTBEAT, f"frame {number}".encode())
        wire.append(bytes(caller.outgoing))
        caller.outgoing.clear()
    caller.sock.setblocking(True)
    listener.spare = caller  # type: ignore[attr-defined]
    return listener, wire


def deliver(listener: Channel, data: bytes) -> list[tuple[Kind, bytes]]:
    listener.spare.sock.sendall(data)  # type: ignore[attr-defined]
    return list(listener.receive())


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_a_changed_frame_is_refused(data):
    listener, (wire,) = captured(1)
    position = data.draw(st.integers(0, len(wire) - 1))
    changed = bytearray(wire)
    changed[position] ^= data.draw(st.integers(1, 255))
    try:
        # With a larger length the listener waits for more bytes, and accepts nothing either.
        assert deliver(listener, bytes(changed)) == []
    except ProtocolError:
        pass
    finally:
        listener.spare.close()
        listener.close()


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (1, 0)])
def test_replayed_left_out_and_reordered_frames_are_refused(order):
    listener, wire = captured(3)
    with pytest.raises(ProtocolError, match="not signed"):
        for number in order:
            deliver(listener, wire[number])
    listener.spare.close()
    listener.close()


def test_frames_of_another_session_and_the_own_ones_sent_back_are_refused():
    listener, wire = captured(1)
    other, _ = captured(1)
    with pytest.raises(ProtocolError, match="not signed"):
        deliver(other, wire[0])
    for channel in (listener, other):
        channel.spare.close()
        channel.close()
    mirror_listener, mirror_caller = pair()
    mirror_listener.send(Kind.PING, b"{}")
    own = bytes(mirror_listener.outgoing)
    mirror_listener.outgoing.clear()
    mirror_caller.sock.setblocking(True)
    mirror_caller.sock.sendall(own)
    with pytest.raises(ProtocolError, match="not signed"):
        list(mirror_listener.receive())
    mirror_listener.close()
    mirror_caller.close()


def test_the_wrong_token_is_refused():
    with pytest.raises(ProtocolError, match="key"):
        pair(token=new_token())


def test_a_caller_refuses_a_listener_without_the_token():
    a, b = socket.socketpair()
    caller = Channel(b, TOKEN, listener=False)
    a.sendall(GREETING + bytes(NONCE_BYTES))
    list(caller.receive())
    answer = a.recv(1024)
    assert len(answer) == NONCE_BYTES + PROOF_BYTES
    a.sendall(answer[NONCE_BYTES:])  # its own proof, sent back
    with pytest.raises(ProtocolError, match="key"):
        list(caller.receive())
    assert not caller.proven
    a.close()
    b.close()


def test_a_huge_frame_is_refused_before_it_is_read():
    listener, caller = pair()
    caller.sock.setblocking(True)
    caller.sock.sendall(HEADER.pack(1 << 31, Kind.HELLO))
    with pytest.raises(ProtocolError, match="announced"):
        list(listener.receive())
    listener.close()
    caller.close()


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=60), st.integers(0, 400))
@settings(deadline=None, max_examples=100)
def test_slow_and_truncated_streams_yield_whole_frames_only(payload, sizes, kept):
    listener, _ = captured(0)
    sender = listener.spare  # type: ignore[attr-defined]
    sender.send(Kind.OUT, payload)
    sender.send(Kind.ERR, payload)
    frame = len(sender.outgoing) // 2
    wire = bytes(sender.outgoing[:kept])
    got, at = [], 0
    for size in (*sizes, len(wire)):
        sender.sock.sendall(wire[at : at + size])
        at += size
        got += listener.receive()
    sender.close()
    got += listener.receive()
    assert listener.closed and got == [(Kind.OUT, payload), (Kind.ERR, payload)][: min(kept // frame, 2)]
    listener.close()


def attack(address: tuple[str, int], token: bytes, seed: int, frames: int) -> tuple[int, int]:
    """Send random and mutated frames, one connection each. Count connections and reply bytes after the greeting."""
    rng = random.Random(seed)
    stranger_token = new_token()
    connections = answers = 0
    for _ in range(frames):
        with socket.create_connection(address, timeout=20) as sock:
            connections += 1
            greeting = b""
            while len(greeting) < len(GREETING) + NONCE_BYTES:
                part = sock.recv(64)
                if not part:
                    break
                greeting += part
            kind = rng.randrange(5)
            if kind == 0:  # noise
                data: bytes | bytearray = rng.randbytes(rng.randrange(1, 400))
            elif kind == 1:  # a nonce and a wrong proof, then a frame with an invalid signature
                body = rng.randbytes(rng.randrange(0, 100))
                frame = HEADER.pack(len(body), rng.randrange(256)) + body + rng.randbytes(16)
                data = rng.randbytes(NONCE_BYTES + PROOF_BYTES) + frame
            elif kind < 4:  # a proof by a wrong token; a correct proof with one bit changed
                a, b = socket.socketpair()
                forger = Channel(a, stranger_token if kind == 2 else token.decode(), listener=False)
                b.sendall(greeting)
                list(forger.receive())
                data = bytearray(b.recv(1024))
                if kind == 3:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                a.close()
                b.close()
            else:  # the greeting sent back and a header of any length
                data = greeting + HEADER.pack(rng.randrange(1 << 32), rng.randrange(256))
            sock.sendall(data)
            if rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                try:
                    while answer := sock.recv(1024):
                        answers += len(answer)
                except OSError:
                    pass
    return connections, answers


def listening_address(launcher: int) -> tuple[str, int]:
    links = [str(entry.readlink()) for entry in Path(f"/proc/{launcher}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            host, port = fields[1].split(":")
            assert host == "0100007F", "the control port of a job on this machine listens on loopback only"
            return "127.0.0.1", int(port, 16)
    raise AssertionError("the launcher does not listen")


@pytest.mark.processes
def test_ten_thousand_attacks_on_a_running_job(tmp_path):
    process = subprocess.Popen(
        [str(LAUNCH), "-np", "2", "--run-dir", str(tmp_path / "run"), str(SCRIPTS / "ticker.py")],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout
    first = process.stdout.readline()
    assert "tick" in first
    address = listening_address(process.pid)

    token = token_of_own_job()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and token in read(f"/proc/{pid}/cmdline")]

    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=lambda: lines.extend((time.monotonic(), line) for line in process.stdout))
    reader.start()
    counts = [attack(address, token, seed=seed, frames=2500) for seed in range(4)]
    assert sum(connections for connections, _ in counts) == 10_000
    assert sum(answers for _, answers in counts) == 0
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(lines)]
    assert max(gaps) < 4.5, "the job's output stalled"
    assert process.poll() is None, "the launcher fell over"
    (tmp_path / "enough").touch()
    process.wait(timeout=200)
    reader.join()
    assert process.returncode == 0, process.stderr.read()
    process.stderr.close()
    process.stdout.close()
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or token not in file.read_bytes(), f"the token is in {file}"


def token_of_own_job() -> bytes:
    """Return the token from the environment of a rank process that this test started."""
    mark = f"{MARK}={os.getpid()}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        variables = read(f"/proc/{pid}/environ").split(b"\0")
        if mark in variables and b"distrib_launch.rank_agent" in read(f"/proc/{pid}/cmdline"):
            for variable in variables:
                if variable.startswith(b"DISTRIB_TOKEN="):
                    return variable.partition(b"=")[2]
    raise AssertionError("no rank process has a token")


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def test_a_silent_stranger_is_dropped_and_keeps_nobody_out():
    # The listener limits unauthenticated clients by number. Here: the channel alone never blocks on one.
    a, b = socket.socketpair()
    channel = Channel(a, TOKEN, listener=True)
    channel.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(a, selectors.EVENT_READ)
        assert list(channel.receive()) == []
    assert not channel.proven
    a.close()
    b.close()


@pytest.mark.parametrize(
    "hello", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"rank": []}', b'{"rank": -1}', b'{"rank": "x"}', b'{"rank": 1e999}']
)  # fmt: skip
def test_a_hostile_hello_closes_its_connection_only(hello):
    def accept(channel, hello):
        if not 0 <= hello["rank"] < 2:
            raise ProtocolError("no such rank")
        return lambda kind, payload: None

    with selectors.DefaultSelector() as selector:
        entrance = ControlListener(selector, TOKEN, ["127.0.0.1"], 2, accept)
        host, _, port = entrance.addresses.rpartition(":")
        caller = Channel(socket.create_connection((host, int(port))), TOKEN, listener=False)
        sent = False
        deadline = time.monotonic() + 4
        while not caller.closed and time.monotonic() < deadline:
            for key, events in selector.select(0.02):
                key.data(key.fileobj, events)
            with contextlib.suppress(ConnectionError):
                assert not list(caller.receive())
                if caller.proven and not sent:
                    caller.send(Kind.HELLO, hello)
                    sent = True
                caller.flush()
        assert sent and caller.closed and not entrance.unauthenticated
        entrance.close()
        caller.close()


def test_silent_connections_keep_no_rank_out():
    """300 ranks connect at once, after 500 connections that stay silent."""
    raise_open_files(4096)
    met = []

    def welcome(channel, hello):
        met.append(hello["rank"])
        selector.unregister(channel.sock)
        welcomed.append(channel)
        return lambda kind, payload: None

    welcomed: list[Channel] = []
    said: set[int] = set()
    with selectors.DefaultSelector() as selector:
        entrance = ControlListener(selector, TOKEN, ["127.0.0.1"], 300, welcome)
        host, _, port = entrance.addresses.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(500)]
        socks = [socket.create_connection((host, int(port))) for _ in range(300)]

        def turn_until(done):
            deadline = time.monotonic() + 4
            while not done() and time.monotonic() < deadline:
                for key, events in selector.select(0.05):
                    key.data(key.fileobj, events)
                for rank, caller in enumerate(callers):
                    list(caller.receive())
                    if caller.proven and rank not in said:
                        said.add(rank)
                        caller.send(Kind.HELLO, {"rank": rank})
                    caller.flush()
            assert done()

        callers: list[Channel] = []
        turn_until(lambda: len(entrance.unauthenticated) == MAX_UNAUTHENTICATED + 300)
        callers += [Channel(sock, TOKEN, listener=False) for sock in socks]
        turn_until(lambda: len(met) == len(socks))
        assert sorted(met) == list(range(len(socks)))
        assert entrance.describe_unauthenticated().endswith("500 from 127.0.0.1")
        entrance.close()
    for end in (*callers, *welcomed, *silent):
        end.close()
