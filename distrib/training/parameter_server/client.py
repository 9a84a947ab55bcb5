"""Client of a worker: one thread that keeps a connection to the primary of every shard.

Requests and pushes that were not answered are repeated on the next connection; servers apply nothing twice. If a server is
unreachable, the client asks the other servers in turn until one welcomes it as the primary of the shard.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from distrib.errors import TrainingError
from distrib.training.parameter_server.chunk_buffers import ChunkBuffer, InFlightPush
from distrib.training.parameter_server.server_link import ServerLink
from distrib.training.parameter_server.shared_memory import SharedArena
from distrib.training.parameter_server.transport import FINAL, EventLoop, Frame, FrameKind, check_payload_size, encode
from distrib.utils.log import PLAIN, get_logger

if TYPE_CHECKING:
    from distrib.training.parameter_server.host_aggregation.host_group import HostGroup

log = get_logger("parameter_server")


T = TypeVar("T")

TICK_SECONDS = 0.2
SUSPEND_AFTER_SECONDS = 4.0
"""Time without a server after which a worker reports to the other servers that they must not wait for it."""

RESULT_RETENTION_SECONDS = 30.0
"""Time in which a server has written a stored result to its replica and its disk."""

WARN_AFTER_SECONDS = 15.0
"""Time without a server after which the main rank prints a warning."""

FAIL_AFTER_SECONDS = 120.0
"""Time without a server after which a worker fails: a server that is restarted returns far earlier."""


class ServerConnections:
    """Connections of this worker to the primaries of all shards, in a separate thread, and requests to them.

    Args:
        rank: Rank of this worker.
        addresses: Host and port of every server.
        key: The key of the job.
    """

    def __init__(
        self, rank: int, addresses: Sequence[tuple[str, int]], key: bytes, *, replicas: bool, restarted: bool = False
    ) -> None:
        self.rank, self.addresses, self.key, self.replicas, self.restarted = rank, addresses, key, replicas, restarted
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
        self.group: HostGroup | None = None
        """The host group that this worker pushes with."""
        self.push_id: int | None = None
        """Number under which servers count its pushes; None if it never had a group."""
        self.last_group_steps: dict[int, int] = {}
        """By table, the step that was in flight when this worker left its group."""
        self._links = [ServerLink(self, shard) for shard in range(len(addresses))]
        self._thread = threading.Thread(target=self._run, name="parameter-server client", daemon=True)
        self._thread.start()

    # -- for the training thread ---------------------------------------------------------------------------------------

    def request(self, shard: int, frame: Frame, payload: Any = b"") -> Future[tuple[Frame, Any]]:
        """Send a request to a shard's primary. It is repeated until it is answered.

        Args:
            shard: Number of the shard.
            frame: The header; its step is filled in.
            payload: Bytes or a buffer.

        Returns:
            The future reply.

        Raises:
            TrainingError: The payload is too large for a frame.
        """
        check_payload_size(len(payload))
        self._request_count += 1
        request = frame._replace(step=self._request_count)
        future: Future[tuple[Frame, Any]] = Future()
        self.loop.call_soon(lambda: self._links[shard].request(request, payload, future))
        return future

    def request_all(self, frame: Frame, payload: Any = b"") -> list[tuple[Frame, Any]]:
        """Send a request to the primary of every shard, and wait for all replies.

        Args:
            frame: The header; its step is filled in.
            payload: Bytes or a buffer.

        Returns:
            The replies by shard.

        Raises:
            TrainingError: There will be no reply.
        """
        futures = [self.request(shard, frame, payload) for shard in range(len(self.addresses))]
        return [self.result(future) for future in futures]

    def result(self, future: Future[T]) -> T:
        """Wait for a reply.

        Args:
            future: A result of `request`.

        Returns:
            The reply.

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

    def _send_all(self, frame: Frame, payload: Any = b"") -> None:
        for link in self._links:
            link.send(frame, payload)
            link.flush()

    def _run(self) -> None:
        try:
            self._tick()
            self.loop.run()
        except Exception as error:  # the training thread must not wait forever
            self.fail(error)
        for link in self._links:
            link.disconnect()
        if self.group:
            self.group.close()

    def _tick(self) -> None:
        now = time.monotonic()
        self.stored_results = {
            number: result
            for number, result in self.stored_results.items()
            if now - result[0] < RESULT_RETENTION_SECONDS
        }
        for link in self._links:
            link.tick(now)
            self._check_reachable(link, now)
        # A server that was never reached has taken no step without this worker.
        away = any(
            link.was_welcomed and not link.welcomed and now - link.down_since > SUSPEND_AFTER_SECONDS
            for link in self._links
        )
        if away and not self._is_suspended:
            self.must_rejoin = True
            self._send_all(Frame(FrameKind.SUSPEND))
        self._is_suspended = away
        if self.group:
            self.group.tick(now)
        self.loop.call_later(TICK_SECONDS, self._tick)

    def _check_reachable(self, link: ServerLink, now: float) -> None:
        down_seconds = 0.0 if link.welcomed else now - link.down_since
        if down_seconds <= WARN_AFTER_SECONDS:
            return
        host, port = self.addresses[link.shard]
        name = f"parameter server {link.shard} at {host}:{port}"
        if not link.was_reported and self.main[1] == self.rank:
            link.was_reported = True
            text = f"{name} was unreachable for {down_seconds:.0f} s; the job fails after {FAIL_AFTER_SECONDS:.0f} s"
            log.info(f"{text}", extra=PLAIN)
        if down_seconds > FAIL_AFTER_SECONDS:
            hint = "read its log; --replicas 1 survives the loss of a server"
            if self.replicas:
                hint = "read the logs of the servers: a replica takes over when the launcher knows that its server has died"
            self.fail(TrainingError(f"{name} is unreachable", hint=hint))


class ParameterClient(ServerConnections):
    """The client of a worker: pushes, host group and shared memory, on top of its connections.

    The training thread may call the methods of the first part.
    """

    def push(
        self, buffer: ChunkBuffer, step: int, *, final: bool, weight: int = 1, ready: Callable[[], None] | None = None
    ) -> None:
        """Push a gradient. If it is final it must not change until it is answered.

        Args:
            buffer: The buffer of the chunk.
            step: The step of this worker.
            final: False if it may still be replaced or committed.
            weight: 0 for an empty gradient, else 1.
            ready: Waits until the gradient is in the buffer; None if it is.
        """
        buffer.is_waiting = True

        def send() -> None:
            if ready:
                ready()
            if self.group:
                self.group.push(InFlightPush(buffer, step, final, weight))
            else:
                self.send_push(buffer, step, final=final, weight=weight)

        self.loop.call_soon(send)

    def commit(self, buffers: Iterable[ChunkBuffer], step: int) -> None:
        """Commit the pushed gradients of some buffers.

        Args:
            buffers: The buffers.
            step: The step of the pushes.
        """
        buffers = list(buffers)
        self.loop.call_soon(lambda: (self.group.commit if self.group else self.send_commit)(buffers, step))

    def set_options(self, table: int, groups: list[dict[str, Any]]) -> None:
        """Send the settings of a table's parameter groups, for the pushes that follow.

        Args:
            table: Number of the table.
            groups: The settings by group.
        """
        payload = encode(groups)

        def send() -> None:
            for link in self._links:
                link.options[table] = payload
                link.send(Frame(FrameKind.OPTIONS, table=table), payload)

        self.loop.call_soon(send)

    def share_memory(self, table: int, arenas: dict[int, SharedArena]) -> None:
        """Offer memory to servers of this host.

        Args:
            table: Number of the table.
            arenas: The memory by shard.
        """
        self.loop.call_soon(lambda: self.offer_memory(table, arenas))

    def join_group(self, group: HostGroup) -> None:
        """Join a host group, which pushes the mean of this host's workers from now on.

        Args:
            group: This worker's part in the group.
        """

        def join() -> None:
            self._set_push_id(group.push_id)
            group.begin()

        self.group = group
        self.loop.call_soon(join)

    def forget_table(self, table: int) -> None:
        """Drop a table that is not trained any more. Returns once no reference to its memory is left.

        Args:
            table: Number of the table.
        """
        done: Future[None] = Future()

        def forget() -> None:
            self.descriptions.pop(table, None)
            self.arenas.pop(table, None)
            for link in self._links:
                link.forget_table(table)
            if self.group:
                self.group.forget_table(table)
            done.set_result(None)

        self.loop.call_soon(forget)
        self.result(done)

    def wait(self, buffers: Iterable[ChunkBuffer]) -> None:
        """Wait until every push of these buffers is answered.

        Args:
            buffers: The buffers.

        Raises:
            TrainingError: A push will not be answered.
        """
        for buffer in buffers:
            if not buffer.is_waiting:
                continue
            begun = time.monotonic()
            while buffer.is_waiting:
                with self._changed:
                    if buffer.is_waiting:
                        self._changed.wait(1.0)
                self.check()
            self.waited_seconds += time.monotonic() - begun

    # -- in the client's thread ----------------------------------------------------------------------------------------

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
            if push.outgoing and not push.outgoing.cancelled:
                push.outgoing.frame = push.outgoing.frame._replace(flags=push.outgoing.frame.flags | FINAL)
            elif link.welcomed:
                chunks.setdefault((buffer.shard, buffer.table), []).append(buffer.chunk)
        for (shard, table), numbers in chunks.items():
            self._links[shard].send(Frame(FrameKind.COMMIT, table=table, step=step), encode(numbers))
        for link in self._links:
            link.flush()

    def offer_memory(self, table: int, arenas: dict[int, SharedArena]) -> None:
        """Offer memory to servers of this host. In the client's thread.

        Args:
            table: Number of the table.
            arenas: The memory by shard.
        """
        self.arenas[table] = arenas
        for link in self._links:
            link.offer_memory(table)
            link.flush()

    def leave_group(self, steps: dict[int, int], *, excluded: bool) -> None:
        """Push alone from now on, as the host leader has died.

        Args:
            steps: By table, the step of which pushes were in flight; this worker continues after it.
            excluded: True if the group was ahead of this worker, which must join again.
        """
        self.group, self.last_group_steps = None, steps
        if excluded:
            self.must_rejoin = True
            self._send_all(Frame(FrameKind.SUSPEND))
        self._set_push_id(self.rank)

    def _set_push_id(self, push_id: int) -> None:
        self.push_id = push_id
        self._send_all(Frame(FrameKind.GROUP, version=push_id), encode(self.last_group_steps))
