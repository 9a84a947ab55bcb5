"""Connections of a worker to the primary of every shard, in one thread.

Requests and pushes that were not answered are repeated on the next connection; servers apply nothing twice. If a server is
unreachable, the worker asks the other servers in turn until one welcomes it as the primary of the shard.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from distrib.errors import TrainingError
from distrib.training.parameter_server.chunk_buffers import ChunkBuffer, InFlightPush
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts
from distrib.training.parameter_server.server_table import as_memoryview
from distrib.training.parameter_server.shared_memory import SharedArena
from distrib.training.parameter_server.transport import (
    Connection,
    Frame,
    FrameFlag,
    FrameKind,
    check_payload_size,
    decode,
    encode,
    start_connecting,
)
from distrib.utils.log import PLAIN, get_logger

log = get_logger("parameter_server")

T = TypeVar("T")


class ServerLink:
    """The connection to the primary of a shard. Lives in the client's thread.

    Args:
        client: The client of this worker.
        shard: Number of the shard.
    """

    def __init__(self, client: ServerConnections, shard: int) -> None:
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
        self._connection: Connection | None = None
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
        if self._connection is None:
            if not self.client.failed:
                self._connect()
        elif not self.welcomed and now - self._connecting_since > self.client.timeouts.connect_seconds:
            self.disconnect()
            self._connect()

    def _connect(self) -> None:
        client, count = self.client, len(self.client.addresses)
        candidates = [(self.shard + n) % count for n in range(count)] if client.replicas else [self.shard]
        self._connecting_to = candidates[self._tries % len(candidates)]
        self._connecting_since = time.monotonic()
        self._connection = Connection(
            client.loop, start_connecting(client.addresses[self._connecting_to]), client.key, listener=False,
            on_frame=self._on_frame, on_closed=self.disconnect, allocate=self._allocate,
        )  # fmt: skip
        hello = {
            "worker": client.rank, "incarnation": client.incarnation, "restarted": client.restarted,
            "shard": self.shard, "epoch": self.epoch, "main": client.main,
            "silent": sorted(self._silent - {self._connecting_to}), "tables": sorted(client.descriptions),
        }  # fmt: skip
        self._connection.send(Frame(FrameKind.HELLO), encode(hello), priority=-2)

    def disconnect(self) -> None:
        """Close the connection. The next tick connects again."""
        if self._connection is None:
            return
        self._connection.close()
        if self.welcomed:
            self.down_since = time.monotonic()
            self._silent = set(range(len(self.client.addresses)))
            self._tries = 0
        else:
            self._tries += 1
        self._connection = None
        self.welcomed = False
        self._sharing.clear()

    # -- out -----------------------------------------------------------------------------------------------------------

    def send(self, frame: Frame, payload: Any = b"") -> None:
        """Send a frame that is not repeated after a reconnection.

        Args:
            frame: The header.
            payload: Bytes or a buffer.
        """
        if self._connection and self.welcomed:
            self._connection.send(frame, payload)

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
        if self._connection and self.welcomed:
            buffer = push.buffer
            flags, payload = FrameFlag.FINAL if push.final else 0, as_memoryview(buffer.gradient)
            if buffer.table in self._sharing:
                flags, payload = flags | FrameFlag.SHARED, memoryview(b"")
            frame = Frame(FrameKind.PUSH, flags, buffer.table, buffer.chunk, push.step, buffer.version, push.weight)
            push.outgoing = self._connection.send(frame, payload, priority=buffer.chunk)

    def offer_memory(self, table: int) -> None:
        """Offer this worker's memory of a table to the server if it is on the same host.

        Args:
            table: Number of the table.
        """
        if self._connection and self.welcomed:
            sock, arena = self._connection.sock, self.client.arenas.get(table, {}).get(self.shard)
            if arena and sock.getsockname()[0] == sock.getpeername()[0]:
                self._connection.send(Frame(FrameKind.SHARE_MEMORY, table=table), encode(arena.description))

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
            return as_memoryview(push.buffer.value) if push and push.step == frame.step else None
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
        assert self._connection
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
                    self._connection.send(frame, payload)
        for number, (_, pieces) in client.stored_results.items():
            if self.shard == 0 and number not in welcome["results"]:
                for frame, piece in pieces:
                    self._connection.send(frame, piece)
        if client.push_id is not None:
            frame = Frame(FrameKind.GROUP, version=client.push_id)
            self._connection.send(frame, encode(client.last_group_steps))
        for table in client.arenas:
            self.offer_memory(table)
        if self._last_gather:
            self._connection.send(*self._last_gather)
        for frame, payload, _ in self._requests.values():
            self._connection.send(frame, payload)
        for table, payload in self.options.items():
            self._connection.send(Frame(FrameKind.OPTIONS, table=table), payload)
        for push in self.pushes.values():
            self._send_push(push)


class ServerConnections:
    """Connections of this worker to the primaries of all shards, in a separate thread, and requests to them.

    Args:
        rank: Rank of this worker.
        addresses: Host and port of every server.
        key: The key of the job.
        replicas: True if a shard may have moved to another server.
        restarted: True for a replacement worker.
        timeouts: Times after which it reacts to a lost server.
    """

    def __init__(
        self, rank: int, addresses: Sequence[tuple[str, int]], key: bytes, *, replicas: bool, restarted: bool = False,
        timeouts: FailoverTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:  # fmt: skip
        self.rank, self.addresses, self.key, self.replicas, self.restarted = rank, addresses, key, replicas, restarted
        self.timeouts = timeouts
        self.incarnation = os.urandom(8).hex()
        """Random text of this process, by which servers notice a restarted worker."""
        self.main = 0, 0
        """Number of changes of the main worker, and its rank, as far as is known here."""
        self.must_rejoin = False
        """True if a server does not wait for this worker, which must join again."""
        self.descriptions: dict[int, Callable[[int], list[tuple[Frame, Any]]]] = {}
        """By table, a function that returns the frames for a shard's server that knows nothing of the table."""
        self.stored_results: dict[int, tuple[float, list[tuple[Frame, Any]]]] = {}
        """Results of this worker by number: time, and the frames of their pieces, until no server can lose them."""
        self.arenas: dict[int, dict[int, SharedArena]] = {}
        """Memory for servers of this host, by table and shard."""
        self.rejoin: Callable[[], None] = lambda: None
        """Joins all tables again."""
        self.round = 0
        """Number of this worker's next all-gather round."""
        self.missed_rounds = False
        """True if other workers may be at another place of the script."""
        self.waited_seconds = 0.0
        """Time that training has waited for replies."""
        self.loop = EventLoop()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._request_count = 0
        self._is_suspended = False
        self.push_id: int | None = None
        """Number under which servers count its pushes; None if it never had a group."""
        self.last_group_steps: dict[int, int] = {}
        """By table, the step that was in flight when this worker left its group."""
        self._links = [ServerLink(self, shard) for shard in range(len(addresses))]
        self._thread = threading.Thread(target=self._run, name="parameter-server client", daemon=True)
        self._thread.start()

    # -- for the training thread ---------------------------------------------------------------------------------------

    def request(self, shard: int, frame: Frame, payload: Any = b"") -> Future[tuple[Frame, Any]]:
        """Send a request to a shard's primary, and return the future reply. It is repeated until it is answered.

        Args:
            shard: Number of the shard.
            frame: The header; its step is filled in.
            payload: Bytes or a buffer.
        """
        check_payload_size(len(payload))
        self._request_count += 1
        request = frame._replace(step=self._request_count)
        future: Future[tuple[Frame, Any]] = Future()
        self.loop.call_soon(lambda: self._links[shard].request(request, payload, future))
        return future

    def request_all(self, frame: Frame, payload: Any = b"") -> list[tuple[Frame, Any]]:
        """Send a request to the primary of every shard, wait for all replies, and return them by shard.

        Args:
            frame: The header; its step is filled in.
            payload: Bytes or a buffer.
        """
        futures = [self.request(shard, frame, payload) for shard in range(len(self.addresses))]
        return [self.result(future) for future in futures]

    def result(self, future: Future[T]) -> T:
        """Wait for a reply and return it.

        Args:
            future: A result of `request`.

        Raises:
            TrainingError: There will be no reply.
        """
        while not future.done():
            self.check()
            try:
                return future.result(timeout=0.2)
            except concurrent.futures.TimeoutError:  # not the built-in one in Python 3.10
                continue
        return future.result()

    def retain_result(self, number: int, pieces: list[tuple[Frame, Any]]) -> None:
        """Give a result again to a server that has lost it.

        Args:
            number: Number of the result.
            pieces: The frames of its pieces.
        """
        self.loop.call_soon(lambda: self.stored_results.update({number: (time.monotonic(), pieces)}))

    @property
    def failed(self) -> bool:
        """True if replies will never arrive."""
        return self._error is not None

    def check(self) -> None:
        """Raise the error that has stopped the client, if any."""
        if self._error:
            raise self._error

    def is_main(self) -> bool:
        """Return True if this worker is main. A disconnected worker waits until it knows if another was chosen."""
        link = self._links[0]
        while self.main[1] == self.rank and not self.restarted:
            is_known = link.welcomed or not link.was_welcomed or self.loop.ended
            if is_known and self.main[1] == self.rank:  # in this order: a welcome reports another main first
                return True
            self.check()
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """End the thread. Requests fail from now on."""

        def end() -> None:
            self.loop.ended = True

        self.loop.call_soon(end)
        self._thread.join(5.0)
        self.fail(
            TrainingError("the parameter servers were asked after job.close()", hint="call it before job.close()")
        )

    # -- in the client's thread ----------------------------------------------------------------------------------------

    def mark_answered(self, buffer: ChunkBuffer) -> None:
        """Wake the training thread, as a push was answered.

        Args:
            buffer: The buffer of the push.
        """
        with self._changed:
            buffer.is_waiting, buffer.is_fresh = False, True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Let all waiting calls raise an error.

        Args:
            error: The error; the first one counts.
        """
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def send_push(self, buffer: ChunkBuffer, step: int, *, final: bool, weight: int = 1) -> None:
        """Send a gradient to its server, in place of an earlier one of the chunk.

        Args:
            buffer: The buffer of the chunk.
            step: The step.
            final: False if it may still be replaced or committed.
            weight: Number of workers whose mean it is; 0 for an empty gradient.
        """
        self._links[buffer.shard].push(InFlightPush(buffer, step, final, weight))

    def send_commit(self, buffers: Iterable[ChunkBuffer], step: int) -> None:
        """Commit pushes of these buffers at their servers.

        Args:
            buffers: The buffers.
            step: The step of the pushes.
        """
        chunks: dict[tuple[int, int], list[int]] = {}
        for buffer in buffers:
            link = self._links[buffer.shard]
            push = link.pushes.get((buffer.table, buffer.chunk))
            if push is None or push.final:
                continue
            push.final = True
            if push.outgoing and push.outgoing.cancelled and not link.welcomed:
                continue  # it is sent again, as final
            if push.outgoing is None or push.outgoing.cancelled:
                chunks.setdefault((buffer.shard, buffer.table), []).append(buffer.chunk)
            if push.outgoing:
                push.outgoing.frame = push.outgoing.frame._replace(flags=push.outgoing.frame.flags | FrameFlag.FINAL)
        for (shard, table), numbers in chunks.items():
            self._links[shard].send(Frame(FrameKind.COMMIT, table=table, step=step), encode(numbers))

    def offer_memory(self, table: int, arenas: dict[int, SharedArena]) -> None:
        """Offer memory to servers of this host. In the client's thread.

        Args:
            table: Number of the table.
            arenas: The memory by shard.
        """
        self.arenas[table] = arenas
        for link in self._links:
            link.offer_memory(table)

    def _send_all(self, frame: Frame, payload: Any = b"") -> None:
        for link in self._links:
            link.send(frame, payload)

    def _run(self) -> None:
        try:
            self.loop.call_soon(self._tick)
            self.loop.run()
        except Exception as error:  # the training thread must not wait forever
            self.fail(error)
        for link in self._links:
            link.disconnect()

    def _tick(self) -> None:
        now = time.monotonic()
        # Later, the server has written them to its replica and its disk.
        self.stored_results = {
            number: result for number, result in self.stored_results.items() if now - result[0] < 30.0
        }
        for link in self._links:
            link.tick(now)
            self._check_reachable(link, now)
        # A server that was never reached has taken no step without this worker.
        away = any(
            link.was_welcomed and not link.welcomed and now - link.down_since > self.timeouts.suspend_seconds
            for link in self._links
        )
        if away and not self._is_suspended:
            self.must_rejoin = True
            self._send_all(Frame(FrameKind.SUSPEND))
        self._is_suspended = away
        self.loop.call_later(self.timeouts.tick_seconds, self._tick)

    def _check_reachable(self, link: ServerLink, now: float) -> None:
        down_seconds = 0.0 if link.welcomed else now - link.down_since
        if down_seconds <= self.timeouts.warn_seconds:
            return
        host, port = self.addresses[link.shard]
        name = f"parameter server {link.shard} at {host}:{port}{link.host and f' ({link.host})'}"
        if not link.was_reported and self.main[1] == self.rank:
            link.was_reported = True
            text = f"{name} is unreachable for {down_seconds:.0f} s; the job fails after {self.timeouts.fail_seconds:.0f} s"
            log.info(text, extra=PLAIN)
        if down_seconds > self.timeouts.fail_seconds:
            hint = f"check the network between these hosts with distrib-topo check, and the log of server {link.shard}"
            if not self.replicas:
                hint += "; --replicas 1 survives the death of a server"
            worker = f"worker rank {self.rank} on {socket.gethostname()}"
            self.fail(TrainingError(f"{name} is unreachable from {worker} for {down_seconds:.0f} s", hint=hint))
