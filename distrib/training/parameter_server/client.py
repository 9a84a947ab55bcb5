"""Client of a worker: pushes gradients to the servers, alone or with its host group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from distrib.training.parameter_server.chunk_buffers import ChunkBuffer, InFlightPush
from distrib.training.parameter_server.host_aggregation.host_group import HostGroup
from distrib.training.parameter_server.server_connections import ServerConnections
from distrib.training.parameter_server.transport import Frame, FrameKind, encode


class ParameterClient(ServerConnections):
    """Client of a worker, for the training thread: pushes, host group and shared memory, on top of its connections."""

    group: HostGroup | None = None
    """The host group that this worker pushes with."""

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

    def commit(self, buffers: Iterable[ChunkBuffer], step: int, scale: float = 1.0) -> None:
        """Commit the pushed gradients of some buffers.

        Args:
            buffers: The buffers.
            step: The step of the pushes.
            scale: Factor by which the gradients changed since they were pushed; 1 in a host group, which has sent a mean of several.
        """
        buffers = list(buffers)

        def send() -> None:
            if self.group:
                self.group.commit(buffers, step)
            else:
                self.send_commit(buffers, step, scale)

        self.loop.call_soon(send)

    def set_options(self, table: int, groups: list[dict[str, Any]]) -> None:
        """Send the settings of a table's parameter groups, for the pushes that follow.

        Args:
            table: Number of the table.
            groups: The settings by group.
        """
        payload = encode(groups)

        def send() -> None:
            for link in self.links:
                link.options[table] = payload
                link.send(Frame(FrameKind.OPTIONS, table=table), payload)

        self.loop.call_soon(send)

    def join_group(self, group: HostGroup) -> None:
        """Join a host group, which pushes the mean of this host's workers from now on.

        Args:
            group: This worker's part in the group.
        """

        def join() -> None:
            self._set_push_id(group.push_id)
            group.begin()

        group.on_leader_died = self._leave_group
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
            for link in self.links:
                link.forget_table(table)
            if self.group:
                self.group.forget_table(table)
            done.set_result(None)

        self.loop.call_soon(forget)
        self.result(done)

    # -- in the client's thread ----------------------------------------------------------------------------------------

    def _leave_group(self, steps: dict[int, int], excluded: bool) -> None:
        """Push alone from now on. `steps` has, by table, the step of which pushes were in flight; this worker continues after it."""
        self.group, self.last_group_steps = None, steps
        if excluded:
            self.must_rejoin = True
            self._send_all(Frame(FrameKind.SUSPEND))
        self._set_push_id(self.rank)

    def _set_push_id(self, push_id: int) -> None:
        self.push_id = push_id
        self._send_all(Frame(FrameKind.GROUP, version=push_id), encode(self.last_group_steps))

    def _tick(self) -> None:
        super()._tick()
        if self.group:
            self.group.tick(time.monotonic())

    def _run(self) -> None:
        super()._run()
        if self.group:
            self.group.close()
