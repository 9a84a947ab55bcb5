"""Connection of a worker to the primary of one shard.

Requests and pushes that were not answered are repeated on the next connection; servers apply nothing twice. If a server is
unreachable, the worker asks the other servers in turn until one welcomes it as the primary of the shard.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from distrib.errors import TrainingError
from distrib.training.parameter_server.chunk_buffers import InFlightPush
from distrib.training.parameter_server.client_state import ClientState
from distrib.training.parameter_server.transport import (
    Connection,
    Frame,
    FrameFlag,
    FrameKind,
    decode,
    encode,
    start_connecting,
)


class ServerLink:
    """The connection to the primary of a shard. Lives in the client's thread."""

    def __init__(self, client: ClientState, shard: int) -> None:
        self.client, self.shard = client, shard
        self.epoch = 0
        """The highest epoch of a primary that this worker knows."""
        self.welcomed = self.was_welcomed = self.was_reported = False
        self.host = ""
        """Name of the host of the primary, once it is known."""
        self.down_since = time.monotonic()
        self.pushes: dict[tuple[int, int], InFlightPush] = {}
        """By table and chunk, pushes that are not answered."""
        self.options: dict[int, bytes] = {}
        """By table, the last settings of its parameter groups."""
        self._requests: dict[int, tuple[Frame, Any, Future[tuple[Frame, Any]]]] = {}
        self._last_gather: tuple[Frame, Any] | None = None
        self._sharing: set[int] = set()  # tables whose memory the server has mapped
        self.connection: Connection | None = None
        self._tries = 0
        self._connecting_to = shard
        self._connecting_since = 0.0
        self._silent = set(range(len(client.addresses)))  # servers that have not answered since the primary was lost

    # -- the connection ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Connect if disconnected, and try the next server if the present one does not accept this worker in time.

        Args:
            now: Seconds of the monotonic clock.
        """
        if self.connection is None:
            if not self.client.failed:
                self.connect()
        elif not self.welcomed and now - self._connecting_since > self.client.timeouts.connect_seconds:
            self.disconnect()
            self.connect()

    def connect(self) -> None:
        """Begin to connect to the next server that has this shard."""
        client, count = self.client, len(self.client.addresses)
        candidates = [(self.shard + n) % count for n in range(count)] if client.replicas else [self.shard]
        self._connecting_to = candidates[self._tries % len(candidates)]
        self._connecting_since = time.monotonic()
        self.connection = Connection(
            client.loop, start_connecting(client.addresses[self._connecting_to]), client.key, listener=False,
            on_frame=self._on_frame, on_closed=self.disconnect, allocate=self._allocate,
        )  # fmt: skip
        hello = {
            "worker": client.rank, "incarnation": client.incarnation, "restarted": client.restarted,
            "shard": self.shard, "epoch": self.epoch, "main": client.main,
            "silent": sorted(self._silent - {self._connecting_to}), "tables": sorted(client.descriptions),
        }  # fmt: skip
        self.connection.send(Frame(FrameKind.HELLO), encode(hello), priority=-2)

    def disconnect(self) -> None:
        """Close the connection. The next tick connects again."""
        if self.connection is None:
            return
        self.connection.close()
        if self.welcomed:
            self.down_since = time.monotonic()
            self._silent = set(range(len(self.client.addresses)))
            self._tries = 0
        else:
            self._tries += 1
        self.connection = None
        self.welcomed = False
        self._sharing.clear()

    # -- out -----------------------------------------------------------------------------------------------------------

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """Send a frame that is not repeated after a reconnection.

        Args:
            frame: The header.
            payload: Bytes or a buffer.
        """
        if self.connection and self.welcomed:
            self.connection.send(frame, payload)

    def request(self, frame: Frame, payload: Any, future: Future[tuple[Frame, Any]]) -> None:
        """Send a request, which is repeated until it is answered.

        Args:
            frame: The header; its step is the number of the request.
            payload: Bytes or a buffer.
            future: Receives the reply.
        """
        self._requests[frame.step] = frame, payload, future
        if frame.kind is FrameKind.ALL_GATHER:
            self._last_gather = frame, payload
        self.send(frame, payload)

    def push(self, push: InFlightPush) -> None:
        """Send a push, which replaces an earlier one of its chunk and is repeated until it is answered.

        Args:
            push: The push.
        """
        key = push.buffer.table, push.buffer.chunk
        old = self.pushes.get(key)
        if old and old.outgoing:
            old.outgoing.cancelled = True
        self.pushes[key] = push
        self._send_push(push)

    def _send_push(self, push: InFlightPush) -> None:
        if self.connection and self.welcomed:
            buffer = push.buffer
            if push.scale != 1:  # a new connection: the server has lost the gradient, or knows that it has applied it
                buffer.gradient.mul_(push.scale)
                push.scale = 1.0
            flags, payload = FrameFlag.FINAL if push.final else 0, buffer.gradient_bytes
            if buffer.table in self._sharing:
                flags, payload = flags | FrameFlag.SHARED, memoryview(b"")
            frame = Frame(FrameKind.PUSH, flags, buffer.table, buffer.chunk, push.step, buffer.version, push.weight)
            push.outgoing = self.connection.send(frame, payload, priority=buffer.chunk)

    def offer_memory(self, table: int) -> None:
        """Offer this worker's memory of a table to the server if it is on the same host.

        Args:
            table: Number of the table.
        """
        if self.connection and self.welcomed:
            sock, arena = self.connection.sock, self.client.arenas.get(table, {}).get(self.shard)
            if arena and sock.getsockname()[0] == sock.getpeername()[0]:
                self.connection.send(Frame(FrameKind.SHARE_MEMORY, table=table), encode(arena.description))

    def forget_table(self, table: int) -> None:
        """Drop all that refers to a table.

        Args:
            table: Number of the table.
        """
        self.options.pop(table, None)
        self._sharing.discard(table)
        for key, push in self.pushes.items():
            if key[0] == table and push.outgoing:
                push.outgoing.cancelled = True
        self.pushes = {key: push for key, push in self.pushes.items() if key[0] != table}

    # -- in ------------------------------------------------------------------------------------------------------------

    def _allocate(self, frame: Frame) -> memoryview | None:
        if frame.kind is FrameKind.VALUE:
            push = self.pushes.get((frame.table, frame.chunk))
            return push.buffer.value_bytes if push and push.step == frame.step else None
        return None

    def _on_frame(self, frame: Frame, payload: Any) -> None:
        if frame.kind is FrameKind.VALUE:
            self._on_value(frame)
        elif frame.kind is FrameKind.DONE:
            if not frame.step and len(payload) and decode(payload) is True:  # the reply to SHARE_MEMORY
                self._sharing.add(frame.table)
            if (request := self._requests.pop(frame.step, None)) is not None:
                request[2].set_result((frame, payload))
        elif frame.kind is FrameKind.WELCOME:
            self._on_welcome(decode(payload))
        elif frame.kind is FrameKind.MAIN:
            self.client.main = max(self.client.main, (frame.version, frame.step))
        elif frame.kind is FrameKind.REFUSED:
            self._silent.discard(self._connecting_to)
            if reason := decode(payload):
                self.client.fail(TrainingError(reason))
            raise ConnectionRefusedError

    def _on_value(self, frame: Frame) -> None:
        push = self.pushes.get((frame.table, frame.chunk))
        if push and push.step == frame.step:
            push.buffer.version = frame.version
            self._on_answered(push, applied=bool(frame.flags & FrameFlag.APPLIED))

    def _reject_sent_pushes(self) -> None:
        """Drop gradients that may be in the parameters of other workers, from which the shard was rebuilt."""
        for push in list(self.pushes.values()):
            if push.outgoing and push.outgoing.cancelled and push.outgoing.frame.flags & FrameFlag.FINAL:
                self._on_answered(push, applied=False)

    def _on_answered(self, push: InFlightPush, *, applied: bool) -> None:
        buffer = push.buffer
        del self.pushes[buffer.table, buffer.chunk]
        buffer.rejected += not applied
        if buffer.on_reply:
            buffer.on_reply(buffer, applied)
        else:
            self.client.mark_answered(buffer)

    def _on_welcome(self, welcome: dict[str, Any]) -> None:
        assert self.connection
        if welcome["epoch"] < self.epoch:
            raise ConnectionRefusedError
        client = self.client
        if welcome["rebuilt"] > self.epoch:
            self._reject_sent_pushes()
        self.epoch, self.host = welcome["epoch"], welcome["host"]
        client.main = max(client.main, (welcome["main"][0], welcome["main"][1]))
        self.welcomed = self.was_welcomed = True
        self.was_reported = False
        if not welcome["member"]:
            client.must_rejoin = True
            client.missed_rounds |= welcome["round"] > client.round
            client.round = max(client.round, welcome["round"])
        for number, describe in client.descriptions.items():
            if number not in welcome["tables"]:  # the server was restarted, and has lost everything
                for frame, payload in describe(self.shard):
                    self.connection.send(frame, payload)
        for number, (_, pieces) in client.stored_results.items():
            if self.shard == 0 and number not in welcome["results"]:
                for frame, piece in pieces:
                    self.connection.send(frame, piece)
        if client.push_id is not None:
            frame = Frame(FrameKind.GROUP, version=client.push_id)
            self.connection.send(frame, encode(client.last_group_steps))
        for table in client.arenas:
            self.offer_memory(table)
        if self._last_gather:
            self.connection.send(*self._last_gather)
        for frame, payload, _ in self._requests.values():
            self.connection.send(frame, payload)
        for table, payload in self.options.items():
            self.connection.send(Frame(FrameKind.OPTIONS, table=table), payload)
        for push in self.pushes.values():
            self._send_push(push)
