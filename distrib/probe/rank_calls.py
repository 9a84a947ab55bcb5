"""Calls from rank 0: tasks for other ranks, and their replies within a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from distrib.probe.bench.polling import ProbeTimeout, wait
from distrib.probe.protocol import Measurement, MessageTag, RankTask, ShutdownTask, TaskReply
from distrib.probe.settings import ProbeTimeouts


class RankCalls:
    """Task calls from rank 0: sends tasks to ranks, collects replies, and tracks unresponsive ranks.

    Args:
        comm: MPI communicator of all ranks.
        perform: Performs a task of rank 0.
        timeouts: Timeouts of the probe.
    """

    def __init__(self, comm: Any, perform: Callable[[Measurement], TaskReply], timeouts: ProbeTimeouts) -> None:
        self.size: int = comm.size
        self.silent: set[int] = set()
        """Ranks that have not replied to their last task."""
        self._comm, self._perform, self._timeouts = comm, perform, timeouts
        self._missed: dict[int, int] = {}
        self._last_number: dict[int, int] = {}

    def is_unresponsive(self, rank: int) -> bool:
        """Return True if a rank missed two replies. It gets no more tasks until a late reply to its last one comes.

        Args:
            rank: The rank.
        """
        return self._missed.get(rank, 0) >= 2

    def call(self, tasks: Mapping[int, Measurement], timeout_seconds: float) -> dict[int, TaskReply]:
        """Have ranks do their tasks at the same time.

        Args:
            tasks: The task of each rank.
            timeout_seconds: Time for the tasks.

        Returns:
            The replies that came in time, by rank.
        """
        self._last_number |= {rank: task.number for rank, task in tasks.items()}
        for rank in sorted(tasks):
            if rank:
                self._send(rank, tasks[rank])
        deadline = time.monotonic() + timeout_seconds + self._timeouts.reply_seconds
        replies = {0: self._perform(tasks[0])} if 0 in tasks else {}

        def all_replied() -> bool:
            for reply in self._receive():
                if self._last_number.get(reply.rank) != reply.number:
                    continue  # a late reply, after which another is due
                if reply.rank in tasks:
                    replies[reply.rank] = reply
                else:
                    self._missed.pop(reply.rank, None)
            return len(replies) == len(tasks)

        try:
            wait(all_replied, deadline, "replies", idle=True)
        except ProbeTimeout:
            for rank in tasks.keys() - replies.keys():
                self._missed[rank] = self._missed.get(rank, 0) + 1
        self.silent |= set(tasks)
        self.silent -= set(replies)
        return replies

    def _receive(self) -> Iterator[TaskReply]:
        """Receive the replies that have arrived, late ones included."""
        while self._comm.iprobe(tag=MessageTag.REPLY):
            reply = msgspec.msgpack.decode(self._comm.recv(tag=MessageTag.REPLY), type=TaskReply)
            self.silent.discard(reply.rank)
            yield reply

    def wait_for_silent(self) -> None:
        """Give ranks that have not replied a last chance."""

        def none_silent() -> bool:
            self._drop_replies()
            return not self.silent

        try:
            wait(none_silent, time.monotonic() + self._timeouts.transfer_seconds, "late replies", idle=True)
        except ProbeTimeout:
            pass

    def shut_down(self, *, skip_finalize: bool) -> None:
        """Send all ranks the request to exit.

        Args:
            skip_finalize: True to exit without MPI_Finalize.
        """
        for rank in range(1, self.size):
            self._send(rank, ShutdownTask(skip_finalize=skip_finalize))
        self._drop_replies()

    def _drop_replies(self) -> None:
        for _ in self._receive():
            pass

    def _send(self, rank: int, task: RankTask) -> None:
        self._comm.send(msgspec.msgpack.encode(task), rank, MessageTag.TASK)
