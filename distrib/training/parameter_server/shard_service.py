"""Service of one shard of the parameters: its workers, tables, collectives and replication."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from distrib.strategy import Strategy
from distrib.training.parameter_server.failover import DEFAULT_TIMEOUTS, FailoverTimeouts
from distrib.training.parameter_server.membership import Membership
from distrib.training.parameter_server.replication import ReplicationSource
from distrib.training.parameter_server.server_collectives import AllGatherRounds, StoredResults
from distrib.training.parameter_server.server_table import BufferPool, ServerTable, TableDescription
from distrib.training.parameter_server.table_requests import TableRequests
from distrib.training.parameter_server.transport import Connection, Frame, FrameFlag, FrameKind, decode, encode
from distrib.units import format_size


class ShardService:
    """One shard on the server that is its primary or stores its replica.

    Args:
        workers: Number of workers; 0 for a replica, which learns the members from the primary.
    """

    def __init__(
        self, shard: int, workers: int, strategy: Strategy, pool: BufferPool,
        timeouts: FailoverTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:  # fmt: skip
        self.shard, self.strategy, self.pool = shard, strategy, pool
        self.epoch = 0
        """Number of times that a server took over the shard. A worker follows the server with the highest."""
        self.rebuilt_epoch = 0
        """The epoch that began with a rebuild from the parameters of workers; 0 if none did."""
        self.is_primary = False
        self.any_describes = False
        """True if any worker may describe a table and give first values, as all have agreed on them before."""
        self.tables: dict[int, ServerTable] = {}
        self.retired: set[int] = set()
        """Tables that are trained no more. A replacement worker still prepares them, and trains copies of its own."""
        self.membership = Membership(shard, workers, timeouts)
        self.results = StoredResults()
        self.rounds = AllGatherRounds(self.membership.gatherers)
        self.replication = ReplicationSource(self.tables, self.retired, self.results, self.membership)
        self.requests = TableRequests(self.tables, self.membership, self.rounds, self.replication, pool)
        self.replication.run = self.requests.run
        self._users: dict[int, set[int]] = {}  # by table, the workers that have not retired it
        self._retired_staleness: Counter[int] = Counter()
        self._descriptions: list[tuple[int, Frame, bytes]] = []  # that wait for the request of the first worker

    @property
    def is_complete(self) -> bool:
        """True if a table was described, and all tables have their first values."""
        return bool(self.tables or self.retired) and all(table.is_set for table in self.tables.values())

    def expect_reconnection(self) -> None:
        """Expect workers that know this shard from another server or an earlier process."""
        self.any_describes = True
        self.membership.expect_reconnection()

    def become_primary(self, epoch: int) -> None:
        """Take over the shard. Members that do not connect are soon removed.

        Args:
            epoch: The new epoch, higher than any that a worker knows.
        """
        self.epoch, self.is_primary = epoch, True
        self.expect_reconnection()
        for table in self.tables.values():
            table.controller.members = self.membership.push_ids()

    def tick(self, now: float) -> None:
        """Stop waiting for workers that were disconnected for too long.

        Args:
            now: Seconds of the monotonic clock.
        """
        for worker in self.membership.overdue(now):
            self._remove(worker, lost=True)
            self.membership.note(f"worker rank {worker} is lost; the other workers continue without it")

    # -- workers that connect and leave --------------------------------------------------------------------------------

    def on_connected(self, worker: int, hello: dict[str, Any], connection: Connection) -> None:
        """Welcome a worker.

        Args:
            worker: Rank of the worker.
            hello: Its introduction.
            connection: Its connection, which replaces an earlier one.
        """
        membership, restarted = self.membership, hello["restarted"]
        if membership.is_new_incarnation(worker, hello["incarnation"], restarted=restarted):
            self._remove(worker, lost=True)
            membership.groups.pop(worker, None)
        if restarted:
            membership.replacements.add(worker)
            for table in self.tables.values():  # its own schedule is at its beginning
                table.options[worker] = table.last_options
        membership.connect(worker, hello["incarnation"], connection)
        self.rounds.forget_request(worker)
        self.results.forget_requests(worker)
        self.requests.forget_worker(worker)
        for number in self._users.keys() | set(hello["tables"]):
            users = self._users.setdefault(number, set())
            (users.add if number in hello["tables"] else users.discard)(worker)
        known_main = hello["main"][0], hello["main"][1]
        if known_main > membership.main:  # another server was primary, and has chosen it
            membership.set_main(*known_main)
        membership.choose_main()
        if not self.tables and not self.retired and not self.any_describes and not restarted:
            membership.members.add(worker)  # it was disconnected before there was anything to train
        welcome = {
            "member": worker in membership.members,
            "epoch": self.epoch,
            "rebuilt": self.rebuilt_epoch,
            "host": socket.gethostname(),
            "round": self.rounds.next_round(),
            "tables": [table.number for table in self.tables.values() if table.is_set],
            "main": membership.main,
            "results": sorted(self.results.pieces),
        }
        connection.send(Frame(FrameKind.WELCOME), encode(welcome))

    def on_disconnected(self, worker: int, connection: Connection) -> None:
        """Record that a worker's connection is lost; the worker may return.

        Args:
            worker: Rank of the worker.
            connection: The connection.
        """
        if self.membership.connections.get(worker) is connection:
            del self.membership.connections[worker]
            self.requests.forget_memory(worker)
            if worker in self.membership.dead:
                self._remove(worker, lost=True)
            else:
                self.membership.disconnect(worker)

    def on_worker_died(self, worker: int) -> None:
        """Stop waiting for a worker that the launcher has reported dead.

        Args:
            worker: Rank of the worker.
        """
        if worker in self.membership.connections:
            self.membership.dead.add(worker)  # its connection breaks in a moment, unless it was restarted already
        else:
            self._remove(worker, lost=True)

    def _remove(self, worker: int, *, lost: bool = False, suspended: bool = False) -> None:
        gave_first_values = worker == self.membership.first() and not self.any_describes
        self.membership.remove(worker, lost=lost, suspended=suspended)
        for table in self.tables.values():
            self._update_members(table, keep_pending=suspended)
        self._answer_rounds()
        self.replication.send_members()
        self._describe_all()
        if gave_first_values and not all(table.is_set for table in self.tables.values()):
            for other in self.membership.members:
                self.membership.refuse(
                    other,
                    f"worker rank {worker} was lost before the parameters had their first values; restart the job",
                )
        self._drop_retired()

    def _update_members(self, table: ServerTable, *, keep_pending: bool = False) -> None:
        wanted = set() if table.number in self.retired else self.membership.push_ids()
        removed = table.controller.members - wanted
        table.controller.members |= wanted
        for push_id in removed:
            self.requests.run(table, table.controller.remove_member(push_id, keep_pending=keep_pending))

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_frame(self, worker: int, frame: Frame, payload: Any) -> None:
        """Handle a worker's request.

        Args:
            worker: Rank of the worker.
            frame: Its header.
            payload: Its payload; for a PUSH the gradient, as a tensor.

        Raises:
            DistribError: The request is invalid.
        """
        if handler := _HANDLERS.get(frame.kind):
            handler(self, worker, frame, payload)
        else:
            self.requests.handle(worker, frame, payload)

    def _all_gather(self, worker: int, frame: Frame, payload: Any) -> None:
        self.membership.gathered.add(worker)
        self.rounds.contribute(worker, frame.version, frame.step, payload)
        self._answer_rounds()

    def _answer_rounds(self) -> None:
        for worker, reply, data in self.rounds.replies():
            self.membership.send(worker, reply, data)

    def _store(self, worker: int, frame: Frame, payload: Any) -> None:
        flags: int = FrameFlag.FINAL
        if frame.version not in self.results.pieces:
            flags = FrameFlag.FINAL | FrameFlag.APPLIED if self.results.store(worker, frame, payload) else 0
            if flags:
                self.replication.send_result(frame.version)
                self._answer_fetches()
        self.membership.send(worker, Frame(FrameKind.DONE, flags, step=frame.step))

    def _fetch(self, worker: int, frame: Frame, payload: Any) -> None:
        self.results.fetch(worker, frame)
        self._answer_fetches()

    def _answer_fetches(self) -> None:
        for worker, reply, piece in self.results.replies():
            self.membership.send(worker, reply, piece)
        if self.results.fetches:
            self.membership.replace_main_if_left()

    def _suspend(self, worker: int, frame: Frame, payload: Any) -> None:
        if self.is_complete:  # else it may yet give the first values
            self._remove(worker, suspended=True)

    def _set_group(self, worker: int, frame: Frame, payload: Any) -> None:
        before, steps = self.membership.push_id(worker), decode(payload)
        self.membership.groups[worker] = frame.version
        for table in self.tables.values():
            if worker == frame.version != before and worker in self.membership.members:  # its host leader has died
                last_step = max(table.controller.last_step(before), steps.get(str(table.number), 0))
                self.requests.run(table, table.controller.join(worker, last_step + 1))
            self._update_members(table)
        self.replication.send_members()

    def _leave(self, worker: int, frame: Frame, payload: Any) -> None:
        self.membership.left.add(worker)
        self._remove(worker)
        self._answer_fetches()
        self.membership.reply(worker, frame)

    def _statistics(self, worker: int, frame: Frame, payload: Any) -> None:
        counts = sum((table.staleness for table in self.tables.values()), self._retired_staleness)
        self.membership.reply(worker, frame, encode({str(staleness): count for staleness, count in counts.items()}))

    def _describe(self, worker: int, frame: Frame, payload: Any) -> None:
        self._descriptions.append((worker, frame, bytes(payload)))
        self._describe_all()

    def _describe_all(self) -> None:
        """Create a table as the first worker describes it; the descriptions of other workers must be equal."""
        while ready := [
            waiting
            for waiting in self._descriptions
            if self.any_describes
            or waiting[0] == self.membership.first()
            or waiting[1].table in self.tables.keys() | self.retired
        ]:
            self._descriptions.remove(ready[0])
            self._check_description(*ready[0])

    def _check_description(self, worker: int, frame: Frame, payload: bytes) -> None:
        description = msgspec.json.decode(payload, type=TableDescription)
        is_retired = frame.table in self.retired
        self._users.setdefault(frame.table, set()).add(worker)
        if (table := self.tables.get(frame.table)) is None:
            push_ids = set() if is_retired else self.membership.push_ids()
            table = ServerTable(frame.table, description, self.shard, push_ids, self.strategy, self.pool)
            needed, free = table.memory_bytes(), psutil.virtual_memory().available
            if needed > free:
                where = f"parameter server {self.shard} on {socket.gethostname()}"
                self.membership.refuse(
                    worker,
                    f"{where} needs {format_size(needed)} of memory for its shard, {format_size(free)} are free; "
                    "use more servers (--servers) or larger hosts",
                )
                return
            self.tables[frame.table] = table
            self.replication.add_table(table)
        elif difference := table.description.difference(description):
            reason = f"worker rank {worker} has another model or optimizer than the other workers: {difference}"
            self.membership.refuse(worker, f"{reason}; create the same on every rank")
            return
        gives_values = not table.is_set and (is_retired or worker == self.membership.first())
        self.membership.reply(worker, frame, encode({"give": gives_values}))

    def _retire(self, worker: int, frame: Frame, payload: Any) -> None:
        self._users.get(frame.table, set()).discard(worker)
        if worker not in self.membership.replacements:  # the others have met before, and none of them trains it
            self.retired.add(frame.table)
            if table := self.tables.get(frame.table):
                self._update_members(table)
        self._drop_retired()
        self.membership.reply(worker, frame)

    def _drop_retired(self) -> None:
        """Drop tables that no worker needs. A worker that was away describes its table anew when it connects."""
        for number in self.retired & self.tables.keys():
            users = self._users.get(number, set())
            if users.isdisjoint(self.membership.members | self.membership.connections.keys()):
                self._retired_staleness += self.tables.pop(number).staleness
                self.requests.forget_table(number)
                self.pool.clear()
                self.replication.send_retired(number)


_HANDLERS: dict[FrameKind, Callable[[ShardService, int, Frame, Any], None]] = {
    FrameKind.ALL_GATHER: ShardService._all_gather,
    FrameKind.STORE: ShardService._store,
    FrameKind.FETCH: ShardService._fetch,
    FrameKind.SUSPEND: ShardService._suspend,
    FrameKind.GROUP: ShardService._set_group,
    FrameKind.LEAVE: ShardService._leave,
    FrameKind.STATISTICS: ShardService._statistics,
    FrameKind.DESCRIBE: ShardService._describe,
    FrameKind.RETIRE: ShardService._retire,
}
