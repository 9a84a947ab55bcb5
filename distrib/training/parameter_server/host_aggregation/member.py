"""Member of a host group: notifies the host leader of its gradients and receives new values from it."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from typing import Any

from distrib.training.parameter_server.chunk_buffers import InFlightPush
from distrib.training.parameter_server.host_aggregation.host_group import HostGroup, HostTable
from distrib.training.parameter_server.server_connections import ServerConnections
from distrib.training.parameter_server.transport import Connection, Frame, FrameFlag, FrameKind, decode, encode


class HostMember(HostGroup):
    """Member of a host group: sends its gradients to the host leader instead of the servers."""

    def __init__(self, client: ServerConnections, push_id: int, leader_socket: bytes, *, synchronous: bool) -> None:
        super().__init__(client, push_id, synchronous=synchronous)
        self._leader_socket = leader_socket
        self.leader: Connection | None = None
        self._joins: dict[int, Future[int]] = {}

    def begin(self) -> None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(self._leader_socket)
        except OSError:
            sock.close()
            self._leave()
            return
        self.leader = Connection(
            self.client.loop, sock, self.client.key, listener=False, on_frame=self._on_frame, on_closed=self._leave
        )
        self.leader.send(Frame(FrameKind.HELLO), encode(self.client.rank))

    def close(self) -> None:
        if self.leader:
            self.leader.close()

    def _leave(self) -> None:
        """Push to the servers directly from now on. Pushes in flight count as rejected, so that none is applied twice."""
        self.leader = None
        pushes, self._pushes = self._pushes, {}
        steps: dict[int, int] = {}
        for push in pushes.values():
            steps[push.buffer.table] = max(push.step, steps.get(push.buffer.table, 0))
            push.buffer.rejected += 1
            self.client.mark_answered(push.buffer)
        joins, self._joins = self._joins, {}
        for future in joins.values():
            future.set_result(0)
        self.on_leader_died(steps, bool(self._excluded))

    def _on_frame(self, frame: Frame, payload: Any) -> None:
        if frame.kind is FrameKind.VALUE:
            self._on_push_reply(
                frame.table, frame.chunk, frame.step, frame.version, bool(frame.flags & FrameFlag.APPLIED)
            )
        elif frame.kind is FrameKind.DONE and frame.step in self._joins:
            self._joins.pop(frame.step).set_result(frame.version)
        elif frame.kind is FrameKind.EXCLUDED or (frame.kind is FrameKind.WELCOME and not decode(payload)):
            self._excluded.update(self._tables)

    def _send(self, frame: Frame, payload: Any = b"") -> None:
        if self.leader:
            self.leader.send(frame, payload)

    def _add_table(self, number: int, table: HostTable) -> None:
        self._tables[number] = table
        self._send(Frame(FrameKind.SHARE_MEMORY, table=number), encode(table.arena.description))

    def _announce_wait(self) -> None:
        self._send(Frame(FrameKind.SUSPEND))

    def _end_wait(self) -> None:
        self._send(Frame(FrameKind.RESUME))

    def _join(self, table: int, future: Future[int]) -> None:
        if self.leader is None:
            future.set_result(0)
            return
        number = max(self._joins, default=0) + 1
        self._joins[number] = future
        self._send(Frame(FrameKind.JOIN, table=table, step=number))

    def _push(self, push: InFlightPush) -> None:
        buffer, flags = push.buffer, FrameFlag.SHARED | (FrameFlag.FINAL if push.final else 0)
        frame = Frame(FrameKind.PUSH, flags, buffer.table, buffer.chunk, push.step, buffer.version, push.weight)
        self._send(frame)

    def _commit(self, table: int, step: int, chunks: list[int]) -> None:
        self._send(Frame(FrameKind.COMMIT, table=table, step=step), encode(chunks))
