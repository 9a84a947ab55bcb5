"""Primary's side of replication: sends its log to a replica on another server, and waits for acknowledgements.

A primary replies to a push only after its replica has acknowledged every update that the reply may show. While the replica is
unreachable the primary replies to no push. It resumes when the replica is reachable again, or continues without one when the
launcher reports that server dead. The replica becomes primary when the launcher reports the primary dead. A server that the
launcher has reported dead does not come back with its old state, so at most one server is primary, with every acknowledged
update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from distrib.training.parameter_server.membership import Membership
from distrib.training.parameter_server.server_collectives import StoredResults
from distrib.training.parameter_server.server_table import ServerTable, as_memoryview
from distrib.training.parameter_server.transport import Connection, Frame, FrameFlag, FrameKind, encode
from distrib.training.parameter_server.update_rules import ApplyUpdate, Effect


class ReplicationSource:
    """The primary's side: sends all changes of a shard to its replica."""

    def __init__(
        self, tables: dict[int, ServerTable], retired: set[int], results: StoredResults, membership: Membership
    ) -> None:
        self._tables, self._retired, self._results, self._membership = tables, retired, results, membership
        self.replica: Connection | None = None
        self.required = False
        """True if replies must wait until a replica is connected."""
        self.run: Callable[[ServerTable, list[Effect]], None] = lambda table, effects: None
        """Carries out effects of a table's update controller."""

    def require(self) -> None:
        """Hold back replies until there is a replica, or until `continue_without`."""
        self.required, self.replica = True, None
        for table in self._tables.values():
            if table.controller.replicated_to is None:
                table.controller.set_replicated(table.controller.index)

    def continue_without(self) -> None:
        """Continue without a replica: send all replies that wait for one."""
        self.required, self.replica = False, None
        for table in self._tables.values():
            self.run(table, table.controller.set_replicated(None))

    def attach(self, replica: Connection) -> None:
        """Send the shard to a replica, and all changes from now on.

        Args:
            replica: The connection to the server that stores it.
        """
        self.required, self.replica = False, replica
        for number in self._retired:
            self.send_retired(number)
        for table in self._tables.values():
            self.add_table(table)
        for number in self._results.pieces:
            self.send_result(number)
        self.send_members()

    def add_table(self, table: ServerTable) -> None:
        """Send a table to the replica, if there is one.

        Args:
            table: The table, new or from before the replica.
        """
        controller = table.controller
        if self.replica is None:
            self.run(table, controller.set_replicated(-1 if self.required else None))
            return
        state = controller.state()
        about = {"description": msgspec.to_builtins(table.description), "controller": state}
        self.replica.send(Frame(FrameKind.STATE, FrameFlag.MORE, table.number), encode(about))
        for chunk in table.optimizers:
            self.send_chunk(table, chunk)
        # Requests an acknowledgement of all of it.
        self.replica.send(Frame(FrameKind.STATE, FrameFlag.APPLIED, table.number, step=state["index"]))
        replicated = -1 if controller.replicated_to is None else controller.replicated_to
        controller.set_replicated(min(replicated, state["index"]))

    def send_chunk(self, table: ServerTable, chunk: int) -> None:
        """Send a chunk's value and optimizer state.

        Args:
            table: The table.
            chunk: Number of the chunk.
        """
        if self.replica:
            self.replica.send(Frame(FrameKind.STATE, 0, table.number, chunk), table.serialize(chunk))

    def send_result(self, number: int) -> None:
        """Send a stored result.

        Args:
            number: Number of the result.
        """
        if self.replica:
            for chunk, piece in enumerate(pieces := self._results.pieces[number]):
                frame = Frame(FrameKind.STATE, FrameFlag.SHARED, chunk=chunk, version=number, weight=len(pieces))
                self.replica.send(frame, piece)

    def send_members(self) -> None:
        """Send the members and their host groups."""
        if self.replica:
            groups = [[worker, group] for worker, group in self._membership.groups.items()]
            about = {"members": sorted(self._membership.members), "groups": groups}
            self.replica.send(Frame(FrameKind.STATE, FrameFlag.FINAL), encode(about))

    def send_retired(self, number: int) -> None:
        """Send that a table is trained no more.

        Args:
            number: Number of the table.
        """
        if self.replica:
            self.replica.send(Frame(FrameKind.RETIRE, table=number))

    def log(
        self,
        table: ServerTable,
        entry: ApplyUpdate,
        gradient: torch.Tensor | None,
        options: dict[str, Any],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Send an update.

        Args:
            table: The table.
            entry: The update.
            gradient: The gradient that was applied; None if none was.
            options: Optimizer settings that it was applied with.
            release: Called when the gradient is not needed any more.
        """
        if self.replica is None:
            release()
            return
        about = {"updates": [[update.worker, update.step] for update in entry.updates], "options": options}
        frame = Frame(FrameKind.LOG, FrameFlag.MORE, table.number, entry.chunk, entry.entry, entry.version)
        self.replica.send(frame, encode(about))
        payload = b"" if gradient is None else as_memoryview(gradient)
        self.replica.send(frame._replace(flags=0), payload, on_sent=release)

    def on_acknowledged(self, frame: Frame) -> None:
        """Send the replies that waited for an acknowledgement of the replica.

        Args:
            frame: The header of the acknowledgement.
        """
        if table := self._tables.get(frame.table):
            self.run(table, table.controller.set_replicated(frame.step))
