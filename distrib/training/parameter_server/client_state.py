"""State of a worker's client that its connections and its host group share."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from distrib.training.parameter_server.chunk_buffers import ChunkBuffer
from distrib.training.parameter_server.event_loop import EventLoop
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts
from distrib.training.parameter_server.shared_memory import SharedArena
from distrib.training.parameter_server.transport import Frame

T = TypeVar("T")


class ClientState:
    """State of a worker's client, its event loop, and the replies that the training thread waits for.

    Args:
        addresses: Host and port of every server.
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
        self.push_id: int | None = None
        """Number under which servers count its pushes; None if it never had a group."""
        self.last_group_steps: dict[int, int] = {}
        """By table, the step that was in flight when this worker left its group."""

    # -- for the training thread ---------------------------------------------------------------------------------------

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

    @property
    def failed(self) -> bool:
        """True if replies will never arrive."""
        return self._error is not None

    def check(self) -> None:
        """Raise the error that has stopped the client, if any."""
        if self._error:
            raise self._error

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
