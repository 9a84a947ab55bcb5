"""Authenticated control channel between the launcher and the rank agents.

Both sides know the job's random token and begin with `distrib.utils.framing.Handshake`, which derives one key per direction
from two fresh nonces. Every frame carries an HMAC-SHA256 of its number in the stream, its kind and its payload. A forged,
changed, repeated or missing frame fails the check, and the connection is closed. Payloads are JSON or raw bytes, never pickle.
Standard library only: the rank agent must start fast on every host.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distrib.utils.framing import Handshake, ProtocolError
from distrib.utils.mpi_env import OMPI_RANK

GREETING = b"distrib1"
MAC_BYTES = 16
HEADER = struct.Struct("!IB")
PAYLOAD_LIMIT_BYTES = 4 << 20
"""Largest payload of a frame; a header with a larger size is an attack or a bug."""


class Kind(enum.IntEnum):
    """Kind of a frame."""

    # rank agent to launcher
    HELLO = 1
    OUT = 2
    ERR = 3
    STATUS = 4
    HEARTBEAT = 5
    EXIT = 6
    STACKS = 7
    RESULT = 8
    # launcher to rank agent
    ASSIGN = 16
    SIGNAL = 17
    STOP = 18
    TAKE_STACKS = 19
    PING = 20
    END = 21
    INPUT = 22
    EVENT = 23


class Assignment(NamedTuple):
    """Payload of ASSIGN: command, environment and limits of a rank's script."""

    command: list[str]
    is_python: bool
    """True if `command` is a Python interpreter with a script or module, which `run_script` then runs."""
    directory: str
    environment: dict[str, str]
    device: str
    """`cpu`, `cuda:N`, or `auto` for the GPU of the local rank if there is one, else the CPU."""
    tag: str
    """Value of DISTRIB_PROCESS_TAG, by which the processes of the rank are found."""
    gpus: list[int] | None
    """Indices of the GPUs of the host that belong to the job, None for all."""
    bind: str
    cpu_sharers: int
    """Number of ranks that share the host's CPUs."""
    grace_seconds: float
    """Time between SIGTERM and SIGKILL when the engine ends the job."""
    host_timeout_seconds: float
    may_return: bool
    """True if the job continues without a rank that lost the launcher."""
    keep_result: bool
    """True if what the script writes to DISTRIB_RESULT_FD is sent to the launcher."""
    container: str = ""
    """Image in which the script runs; empty: on the host itself."""
    container_runtime: str = "auto"
    container_mounts: Sequence[str] = ()


class Channel:
    """End of a control connection: signed frames over a non-blocking socket that the owner selects on.

    `receive` yields complete, verified frames. `send` queues a frame, `flush` writes as much as the socket accepts.
    After `ProtocolError` or `OSError` the connection must be closed.

    Args:
        sock: A connected socket. It becomes non-blocking.
        token: The token of the job.
        listener: True for the side that accepted the connection.
    """

    def __init__(self, sock: socket.socket, token: str, *, listener: bool) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.closed = False
        self._handshake = Handshake(token.encode(), GREETING, listener=listener)
        self._in = bytearray()
        self.outgoing = bytearray(self._handshake.opening)
        self._sent = self._received = 0

    # -- out ----------------------------------------------------------------------------------------------------

    @property
    def proven(self) -> bool:
        """Return True once the peer has proven that it knows the token; frames can be sent from then on."""
        return self._handshake.proven

    @property
    def waiting_bytes(self) -> int:
        """Return the number of bytes that `flush` has still to write."""
        return len(self.outgoing)

    def send(self, kind: Kind, payload: bytes | dict[str, Any] = b"") -> None:
        """Queue one frame.

        Args:
            kind: Kind of the frame.
            payload: Bytes, or an object that is sent as JSON.

        Raises:
            ValueError: The payload is larger than `PAYLOAD_LIMIT_BYTES`.
        """
        body = payload if isinstance(payload, bytes) else json.dumps(payload, separators=(",", ":")).encode()
        if len(body) > PAYLOAD_LIMIT_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes; at most {PAYLOAD_LIMIT_BYTES} fit")
        header = HEADER.pack(len(body), kind)
        self.outgoing += header + body + self._mac(self._handshake.send_key, self._sent, header, body)
        self._sent += 1

    def flush(self) -> None:
        """Write as much as the socket accepts now."""
        while self.outgoing:
            try:
                # A slice, because a memoryview would lock the buffer that `send` extends.
                written = self.sock.send(self.outgoing[: 1 << 18])
            except (BlockingIOError, InterruptedError):
                return
            del self.outgoing[:written]

    # -- in -----------------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[Kind, bytes]]:
        """Read the bytes that have arrived and yield their frames; set `closed` if the peer has closed the connection."""
        for _ in range(16):  # a fast sender must not starve the other connections
            try:
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                break
            if not data:
                self.closed = True
                break
            self._in += data
            yield from self._frames()

    def _frames(self) -> Iterator[tuple[Kind, bytes]]:
        while missing := self._handshake.missing_bytes:
            if not self._in:
                return
            self.outgoing += self._handshake.feed(bytes(self._in[:missing]))
            del self._in[:missing]
            self.flush()
        position = 0
        try:
            while len(self._in) - position >= HEADER.size:
                length, number = HEADER.unpack_from(self._in, position)
                if length > PAYLOAD_LIMIT_BYTES:
                    raise ProtocolError(
                        f"a frame of {length} bytes was announced, expected at most {PAYLOAD_LIMIT_BYTES}"
                    )
                end = position + HEADER.size + length + MAC_BYTES
                if len(self._in) < end:
                    break
                header = bytes(self._in[position : position + HEADER.size])
                body = bytes(self._in[position + HEADER.size : end - MAC_BYTES])
                mac = self._mac(self._handshake.receive_key, self._received, header, body)
                if not hmac.compare_digest(mac, bytes(self._in[end - MAC_BYTES : end])):
                    raise ProtocolError("a frame is not signed with this job's token")
                position = end
                self._received += 1
                try:
                    kind = Kind(number)
                except ValueError:
                    raise ProtocolError(f"a frame of unknown kind {number}") from None
                yield kind, body
        finally:
            del self._in[:position]

    @staticmethod
    def _mac(key: bytes, number: int, header: bytes, body: bytes) -> bytes:
        if not key:
            raise ProtocolError("a frame was sent before the handshake was complete")
        return hmac.digest(key, number.to_bytes(8, "big") + header + body, "sha256")[:MAC_BYTES]

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.sock.close()


def connect_to_launcher(addresses: str, token: str, timeout_seconds: float = 20.0) -> Channel:
    """Connect to the first address of the launcher that accepts.

    Args:
        addresses: `host:port` of each address, separated by commas.
        token: Secret of the job.
        timeout_seconds: Time in which one of them must accept.

    Raises:
        SystemExit: None accepted in time.
    """
    deadline = time.monotonic() + timeout_seconds
    last: OSError | None = None
    while time.monotonic() < deadline:
        for address in addresses.split(","):
            host, _, port = address.rpartition(":")
            try:
                sock = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            except OSError as error:
                last = error
                continue
            return Channel(sock, token, listener=False)
        time.sleep(0.2)
    hint = " --interface chooses another network" if OMPI_RANK in os.environ else ""  # not with srun
    raise SystemExit(
        f"distrib: {socket.gethostname()} cannot reach the launcher at {addresses} ({last}); "
        f"is a firewall between them?{hint}"
    )


def reserve_port() -> socket.socket:
    """Bind a free port for the script's rendezvous, without listening.

    With SO_REUSEADDR on both sides the script can bind the port. The kernel gives it to no process that requests a free port.
    """
    sock = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("", 0))
    return sock


def set_dead_peer_timeout(sock: socket.socket, seconds: float) -> None:
    """Set the time after which the kernel fails a connection whose bytes stay unacknowledged or unread.

    The peer's kernel acknowledges even while its processes get no CPU. So the timeout distinguishes a lost host or network from a busy
    host; heartbeats between processes cannot. It is only for small messages: the kernel also treats a peer that reads nothing as lost.

    Args:
        sock: A connected socket.
        seconds: Time without acknowledgement.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


class SilenceMonitor:
    """Monitor of a connection that distinguishes a lost peer from one that does not read, because it is stopped or its disk hangs.

    The kernel of a peer that does not read acknowledges bytes until its buffer is full, and then replies to window probes. The interval
    of the probes grows, and one reply may be lost.

    Args:
        sock: A connected socket.
        patience_seconds: Silence after which the peer is lost.
    """

    LOOK_SECONDS = 1.0
    """Longest time counted between two calls of `is_over_limit`: if this process was stopped, the silence is not the peer's."""

    INFO_BYTES = 60
    TICK_MILLISECONDS = 10
    """Coarsest resolution of the kernel's times."""
    TCP_RTO_MAX_MS = 44
    """Socket option for the longest time between two probes (linux/tcp.h, Linux 6.15 or later); without it, 120 s."""

    def __init__(self, sock: socket.socket, patience_seconds: float) -> None:
        self._sock, self._patience_seconds = sock, patience_seconds
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, self.TCP_RTO_MAX_MS, max(1000, int(patience_seconds * 1000 / 4)))
        self._looked = time.monotonic()
        self._silent_seconds = 0.0

    def is_over_limit(self) -> bool:
        """Return True if nothing was acknowledged for too long. Call often, and before something is sent.

        Raises:
            OSError: The connection has failed.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        # struct tcp_info of linux/tcp.h: tcpi_probes, of a closed window; tcpi_unacked; tcpi_last_ack_recv in ms.
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, self.INFO_BYTES)
        probes = info[3]
        unacked, ago_milliseconds = (struct.unpack_from("=I", info, offset)[0] for offset in (24, 56))
        if (probes < 2 and not unacked) or ago_milliseconds <= since * 1000 + self.TICK_MILLISECONDS:
            self._silent_seconds = 0.0
        else:
            self._silent_seconds += min(since, self.LOOK_SECONDS)
        return self._silent_seconds > self._patience_seconds
