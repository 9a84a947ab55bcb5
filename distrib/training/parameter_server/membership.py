"""Workers of one shard as its server sees them: connections, members, replacement workers, and the main worker."""

from __future__ import annotations

import os
import time
from typing import Any

from distrib.environment import DISTRIB_SERVER
from distrib.training.parameter_server.failover import FailoverTimeouts
from distrib.training.parameter_server.transport import Connection, Frame, FrameKind, encode
from distrib.utils.log import PLAIN, get_logger

log = get_logger("parameter_server")


def report(text: str) -> None:
    """Print a line to the output of the job.

    Args:
        text: The line, without the name of the server.
    """
    log.info(f"parameter server {os.environ.get(DISTRIB_SERVER, '?')}: {text}", extra=PLAIN)


class Membership:
    """The workers of one shard.

    Members are the workers for which other workers wait. A replacement worker was restarted by the launcher: its gradients count,
    but it is at another place of the script. The main worker prints and saves; shard 0 chooses it.
    """

    def __init__(self, shard: int, workers: int, timeouts: FailoverTimeouts) -> None:
        self.shard, self._reconnect_seconds = shard, timeouts.reconnect_seconds
        self.members = set(range(workers))
        self.replacements: set[int] = set()
        self.connections: dict[int, Connection] = {}
        self.main = 0, 0
        """Number of changes of the main worker so far, and its rank."""
        self.groups: dict[int, int] = {}
        """By worker, the number under which its host group pushes."""
        self.left: set[int] = set()
        """Workers that have closed their job."""
        self.gathered: set[int] = set()
        """Workers that came to a collective since they last trained or were lost, members or not."""
        self.dead: set[int] = set()
        """Connected workers that the launcher has reported dead: their connections will break."""
        self._incarnations: dict[int, str] = {}
        self._main_is_lost = False
        first_deadline = time.monotonic() + timeouts.first_connect_seconds - timeouts.reconnect_seconds
        self._disconnected = dict.fromkeys(range(workers), first_deadline)

    def push_id(self, worker: int) -> int:
        """Return the number under which pushes of a worker count: its own or that of its host group.

        Args:
            worker: Rank of the worker.
        """
        return self.groups.get(worker, worker)

    def push_ids(self) -> set[int]:
        """Return the numbers under which the members push."""
        return {self.push_id(member) for member in self.members}

    def present(self) -> set[int]:
        """Return the members without replacement workers; without members, the connected workers that have not left.

        Members are all gone if every worker has lost another server; such workers still take part in collectives.
        """
        return (self.members - self.replacements) or (self.connections.keys() - self.left - self.replacements)

    def gatherers(self) -> set[int]:
        """Return the workers that a collective waits for."""
        return self.present() | (self.gathered - self.replacements)

    def first(self) -> int | None:
        """Return the lowest present worker, which describes tables and gives first values."""
        return min(self.present(), default=None)

    def is_new_incarnation(self, worker: int, incarnation: str, *, restarted: bool) -> bool:
        """Return True if a worker that connects is another process than the one before.

        Args:
            worker: Rank of the worker.
            incarnation: Random text of its process.
            restarted: True if the launcher has restarted it.
        """
        return self._incarnations.get(worker, None if restarted else incarnation) != incarnation

    def connect(self, worker: int, incarnation: str, connection: Connection) -> None:
        """Record a worker's connection.

        Args:
            worker: Rank of the worker.
            incarnation: Random text of its process.
            connection: The connection, which replaces an earlier one.
        """
        self.dead.discard(worker)
        self._incarnations[worker] = incarnation
        self.connections[worker] = connection
        self._disconnected.pop(worker, None)

    def disconnect(self, worker: int) -> None:
        """Record that a worker's connection is lost. It gets `reconnect_seconds` to return.

        Args:
            worker: Rank of the worker.
        """
        is_main = worker == self.main[1] and worker not in self.left
        if is_main or worker in self.members | self.gathered:
            self._disconnected[worker] = time.monotonic()

    def expect_reconnection(self) -> None:
        """Expect all members to connect now: they know this shard from another server or from an earlier process."""
        self._disconnected = dict.fromkeys(self.members, time.monotonic())

    def overdue(self, now: float) -> list[int]:
        """Return the workers that were disconnected for too long.

        Args:
            now: Seconds of the monotonic clock.
        """
        return [worker for worker, since in self._disconnected.items() if now - since > self._reconnect_seconds]

    def remove(self, worker: int, *, lost: bool = False, suspended: bool = False) -> None:
        """Stop waiting for a worker.

        Args:
            worker: Rank of the worker.
            lost: True if it has died or was disconnected for too long.
            suspended: True if it cannot reach another server and will join again; a collective still waits for it.
        """
        self._disconnected.pop(worker, None)
        self.members.discard(worker)
        if not suspended:
            self.gathered.discard(worker)
        self._main_is_lost |= lost and worker == self.main[1] and worker not in self.left
        self.choose_main()

    def choose_main(self) -> None:
        """Make the first connected worker main if main is lost.

        Replacement workers are never main. A worker that has left stays main until another worker waits for it.
        """
        candidates = self.connections.keys() - self.replacements - self.left
        if self.shard or not self._main_is_lost or not candidates:
            return
        self._main_is_lost = False
        self.set_main(self.main[0] + 1, min(candidates & self.members or candidates))
        self.note(f"worker rank {self.main[1]} is now the main rank, which prints and saves")

    def replace_main_if_left(self) -> None:
        """Choose another main worker if main has left while a worker waits for its result."""
        if self.main[1] in self.left:
            self._main_is_lost = True
            self.choose_main()

    def set_main(self, number: int, main: int) -> None:
        """Set the main worker and report it to all workers.

        Args:
            number: Number of changes of the main worker.
            main: Its rank.
        """
        self.main = number, main
        for worker in self.connections:
            self.send(worker, Frame(FrameKind.MAIN, step=main, version=number))

    def note(self, text: str) -> None:
        """Print a line, once for all shards.

        Args:
            text: The line.
        """
        if not self.shard:
            report(text)

    def send(self, worker: int, frame: Frame, payload: Any = b"", *, priority: int = -1) -> None:
        """Send a frame to a worker if it is connected.

        Args:
            worker: Rank of the worker.
            frame: The header.
            payload: Bytes or a buffer.
            priority: Frames of lower priority numbers go first.
        """
        if connection := self.connections.get(worker):
            connection.send(frame, payload, priority=priority)

    def reply(self, worker: int, request: Frame, payload: Any = b"") -> None:
        """Answer a worker's request.

        Args:
            worker: Rank of the worker.
            request: The header of the request.
            payload: Bytes or a buffer.
        """
        self.send(worker, Frame(FrameKind.DONE, table=request.table, chunk=request.chunk, step=request.step), payload)

    def refuse(self, worker: int, reason: str) -> None:
        """Make a worker fail with an error.

        Args:
            worker: Rank of the worker.
            reason: Text of the error.
        """
        self.send(worker, Frame(FrameKind.REFUSED), encode(reason))
