"""Connections of a worker to the primaries of all shards, in one thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from distrib.errors import TrainingError
from distrib.training.parameter_server.chunk_buffers import ChunkBuffer, InFlightPush
from distrib.training.parameter_server.client_state import ClientState
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts
from distrib.training.parameter_server.server_link import ServerLink
from distrib.training.parameter_server.shared_memory import SharedArena
from distrib.training.parameter_server.transport import Frame, FrameFlag, FrameKind, check_payload_size, encode
from distrib.utils.log import PLAIN, get_logger

log = get_logger("parameter_server")


class ServerConnections(ClientState):
    """Connections of this worker to the primaries of all shards, in a separate thread, and requests to them."""

    def __init__(
        self, rank: int, addresses: Sequence[tuple[str, int]], key: bytes, *, replicas: bool, restarted: bool = False,
        timeouts: FailoverTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:  # fmt: skip
        super().__init__(rank, addresses, key, replicas=replicas, restarted=restarted, timeouts=timeouts)
        self._request_count = 0
        self._is_suspended = False
        self.links = [ServerLink(self, shard) for shard in range(len(self.addresses))]
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
        self.loop.call_soon(lambda: self.links[shard].request(request, payload, future))
        return future

    def request_all(self, frame: Frame, payload: Any = b"") -> list[tuple[Frame, Any]]:
        """Send a request to the primary of every shard, wait for all replies, and return them by shard.

        Args:
            frame: The header; its step is filled in.
            payload: Bytes or a buffer.
        """
        futures = [self.request(shard, frame, payload) for shard in range(len(self.addresses))]
        return [self.result(future) for future in futures]

    def retain_result(self, number: int, pieces: list[tuple[Frame, Any]]) -> None:
        """Give a result again to a server that has lost it.

        Args:
            number: Number of the result.
            pieces: The frames of its pieces.
        """
        self.loop.call_soon(lambda: self.stored_results.update({number: (time.monotonic(), pieces)}))

    def is_main(self) -> bool:
        """Return True if this worker is main. A disconnected worker waits until it knows if another was chosen."""
        link = self.links[0]
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
            TrainingError(
                "the parameter servers were asked after job.close()",
                hint="call it before job.close()",
                code="job-closed",
            )
        )

    # -- in the client's thread ----------------------------------------------------------------------------------------

    def send_push(self, buffer: ChunkBuffer, step: int, *, final: bool, weight: int = 1) -> None:
        """Send a gradient to its server, in place of an earlier one of the chunk.

        Args:
            buffer: The buffer of the chunk.
            step: The step.
            final: False if it may still be replaced or committed.
            weight: Number of workers whose mean it is; 0 for an empty gradient.
        """
        self.links[buffer.shard].push(InFlightPush(buffer, step, final, weight))

    def send_commit(self, buffers: Iterable[ChunkBuffer], step: int, scale: float = 1.0) -> None:
        """Commit pushes of these buffers at their servers.

        Args:
            buffers: The buffers.
            step: The step of the pushes.
            scale: Factor by which the gradients changed since they were pushed. The server multiplies a gradient that it has received;
                one that it reads later, from its frame or shared memory, is multiplied here.
        """
        chunks: dict[tuple[int, int, float], list[int]] = {}
        for buffer in buffers:
            link = self.links[buffer.shard]
            push = link.pushes.get((buffer.table, buffer.chunk))
            if push is None or push.final:
                continue
            push.final = True
            is_sent = push.outgoing is not None and push.outgoing.cancelled
            is_shared = push.outgoing is not None and bool(push.outgoing.frame.flags & FrameFlag.SHARED)
            if is_sent and not is_shared and link.welcomed:
                push.scale = scale
            elif scale != 1:
                buffer.gradient.mul_(scale)
            if is_sent and not link.welcomed:
                continue  # it is sent again, as final
            if push.outgoing is None or push.outgoing.cancelled:
                chunks.setdefault((buffer.shard, buffer.table, push.scale), []).append(buffer.chunk)
            if push.outgoing:
                push.outgoing.frame = push.outgoing.frame._replace(flags=push.outgoing.frame.flags | FrameFlag.FINAL)
        for (shard, table, factor), numbers in chunks.items():
            self.links[shard].send(Frame(FrameKind.COMMIT, table=table, step=step), encode((factor, numbers)))

    def offer_memory(self, table: int, arenas: dict[int, SharedArena]) -> None:
        """Offer memory to servers of this host. In the client's thread.

        Args:
            table: Number of the table.
            arenas: The memory by shard.
        """
        self.arenas[table] = arenas
        for link in self.links:
            link.offer_memory(table)

    def _send_all(self, frame: Frame, payload: Any = b"") -> None:
        for link in self.links:
            link.send(frame, payload)

    def _run(self) -> None:
        try:
            self.loop.call_soon(self._tick)
            self.loop.run()
        except Exception as error:  # the training thread must not wait forever
            self.fail(error)
        for link in self.links:
            link.disconnect()

    def _tick(self) -> None:
        now = time.monotonic()
        # Later, the server has written them to its replica and its disk.
        self.stored_results = {
            number: result for number, result in self.stored_results.items() if now - result[0] < 30.0
        }
        for link in self.links:
            link.tick(now)
            self._check_reachable(link, now)
        # A server that was never reached has taken no step without this worker.
        away = any(
            link.was_welcomed and not link.welcomed and now - link.down_since > self.timeouts.report_away_seconds
            for link in self.links
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
            text = f"{name} is unreachable for {down_seconds:.0f} s; the job fails after {self.timeouts.give_up_seconds:.0f} s"
            log.info(text, extra=PLAIN)
        if down_seconds > self.timeouts.give_up_seconds:
            hint = f"check the network between these hosts with distrib-topo check, and the log of server {link.shard}"
            if not self.replicas:
                hint += "; --replicas 1 survives the death of a server"
            worker = f"worker rank {self.rank} on {socket.gethostname()}"
            self.fail(
                TrainingError(
                    f"{name} is unreachable from {worker} for {down_seconds:.0f} s",
                    hint=hint,
                    code="server-unreachable",
                )
            )
