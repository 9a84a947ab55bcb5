"""The workers of one host that push together: their mean gradient crosses the network once.

The lowest rank is the host leader for the whole job. The other workers are members: they connect to the leader's local socket
and notify it of gradients in memory that both share. If the leader fails, its members push to the servers directly. Pushes in
flight at that time count as rejected.

A worker that is about to wait for other workers (an evaluation, `job.all_reduce`) announces it. If a round is blocked by it, the
leader excludes the worker, which joins again with its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from distrib.training.gradients.host_shared_memory import kernel_identity
from distrib.training.parameter_server.chunk_buffers import ChunkBuffer, InFlightPush
from distrib.training.parameter_server.server_connections import ServerConnections
from distrib.training.parameter_server.shared_memory import SharedArena


def host_identity() -> str:
    """Return text that is equal for two processes if and only if they reach each other's local sockets and memory."""
    namespaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("pid", "user"))
    return " ".join([kernel_identity(), *map(str, namespaces)])


class HostTable(NamedTuple):
    """One table as a worker registers it with its host group."""

    buffers: Sequence[ChunkBuffer]
    arena: SharedArena
    """Memory of all buffers, which the leader reads and writes."""
    sizes: Mapping[int, int]
    """Bytes of each chunk."""
    create_server_buffers: Callable[[], tuple[dict[int, ChunkBuffer], dict[int, SharedArena]]]
    """Creates the leader's buffers by chunk, and their memory by server."""


class HostGroup:
    """Membership of this worker in its host group. Methods run in the client's thread, unless documented otherwise.

    Args:
        push_id: Number under which the servers count the group's pushes.
        synchronous: True if every step needs all workers, so that the leader never excludes one.
    """

    is_leader = False

    def __init__(self, client: ServerConnections, push_id: int, *, synchronous: bool) -> None:
        self.client, self.push_id, self.synchronous = client, push_id, synchronous
        self.on_leader_died: Callable[[dict[int, int], bool], None] = lambda steps, excluded: None
        """Called with the steps in flight by table, and True if the group was ahead of this worker, which must join again."""
        self._excluded: set[int] = set()
        self._is_away = False
        self._tables: dict[int, HostTable] = {}
        self._pushes: dict[tuple[int, int], InFlightPush] = {}

    # -- called by the training thread --------------------------------------------------------------------------------

    def add_table(self, number: int, table: HostTable) -> None:
        """Register a table before its first push. For the training thread.

        Args:
            number: Number of the table.
            table: Its buffers and memory.
        """
        self.client.loop.call_soon(lambda: self._add_table(number, table))

    def is_excluded(self, table: int) -> bool:
        """Return True if the group does not wait for this worker, which must join again. For the training thread.

        Args:
            table: Number of the table.
        """
        return table in self._excluded

    def announce_wait(self) -> None:
        """Let the group continue without this worker while it waits for other workers. For the training thread."""
        if not self._is_away and not self.synchronous:
            self._is_away = True
            self.client.loop.call_soon(self._announce_wait)

    def end_wait(self) -> None:
        """Let the group wait for this worker again. For the training thread."""
        if self._is_away:
            self._is_away = False
            self.client.loop.call_soon(self._end_wait)

    def join(self, table: int) -> int:
        """Take part in the group's steps again. For the training thread.

        Args:
            table: Number of the table.

        Returns:
            The last step of the group, after which this worker continues.
        """
        future: Future[int] = Future()
        self.client.loop.call_soon(lambda: self._join(table, future))
        self._excluded.discard(table)
        return self.client.result(future)

    def restart(self, table: int, step: int) -> None:
        """Continue after the whole host was disconnected and the leader has rejoined the servers. For the leader's training thread.

        Args:
            table: Number of the table.
            step: The last step, as counted by the servers.
        """
        self.client.loop.call_soon(lambda: self._restart(table, step))

    def wait_for_members(self) -> None:
        """Wait until no member needs the leader any more. For the training thread of the leader."""

    # -- called by the client ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the connections of the group."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Handle timeouts.

        Args:
            now: Seconds of the monotonic clock.
        """

    def close(self) -> None:
        """Close the connections of the group."""
        raise NotImplementedError

    def push(self, push: InFlightPush) -> None:
        """Push a chunk's gradient of this worker.

        Args:
            push: The push; its buffer must not change until it is answered if it is final.
        """
        self._is_away = False
        self._pushes[push.buffer.table, push.buffer.chunk] = push
        self._push(push)

    def commit(self, buffers: Iterable[ChunkBuffer], step: int) -> None:
        """Commit the pushed gradients of some buffers.

        Args:
            buffers: Buffers of this worker.
            step: The step of the pushes.
        """
        chunks: dict[int, list[int]] = {}
        for buffer in buffers:
            push = self._pushes.get((buffer.table, buffer.chunk))
            if push is not None and not push.final:
                push.final = True
                chunks.setdefault(buffer.table, []).append(buffer.chunk)
        for table, numbers in chunks.items():
            self._commit(table, step, numbers)

    def forget_table(self, table: int) -> None:
        """Drop a table that no worker trains any more.

        Args:
            table: Number of the table.
        """
        self._forget_table(table)
        self._tables.pop(table, None)
        self._excluded.discard(table)
        self._pushes = {key: push for key, push in self._pushes.items() if key[0] != table}

    # -- internals -----------------------------------------------------------------------------------------------------

    def _add_table(self, number: int, table: HostTable) -> None:
        raise NotImplementedError

    def _forget_table(self, table: int) -> None:
        pass

    def _restart(self, table: int, step: int) -> None:
        """Continue alone: members are excluded until they join again."""
        raise NotImplementedError

    def _announce_wait(self) -> None:
        raise NotImplementedError

    def _end_wait(self) -> None:
        raise NotImplementedError

    def _join(self, table: int, future: Future[int]) -> None:
        raise NotImplementedError

    def _push(self, push: InFlightPush) -> None:
        raise NotImplementedError

    def _commit(self, table: int, step: int, chunks: list[int]) -> None:
        raise NotImplementedError

    def _on_push_reply(self, table: int, chunk: int, step: int, version: int, applied: bool) -> None:
        push = self._pushes.get((table, chunk))
        if push and push.step == step:
            del self._pushes[table, chunk]
            push.buffer.version = version
            push.buffer.rejected += not applied
            self.client.mark_answered(push.buffer)
