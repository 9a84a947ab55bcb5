"""Filter for the error output of ranks on the terminal. The files under `ranks/` keep everything.

Lines that help no user are left out. A rank that loses its connection to a failed rank prints a traceback too, often before the
failed rank's own error arrives. Such a traceback waits until the rank ends, and is then left out if the rank did not fail first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

NOISE = re.compile(
    rb"hostname of the client socket cannot be retrieved|^Extension modules: |"
    rb"^\[[^\s:]+:\d+\] (\*\*\* |Signal( code)?: |Failing at address: |\[ ?\d+\] )"
)
"""torch's warning about host names, the list of modules by Python's faulthandler, and Open MPI's report of a signal with its C stack."""

LOST_CONNECTION = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection was likely closed|"
    r"ncclRemoteError|remote process exited|communicator was aborted|NCCL communicator .* aborted|"
    r"socket has failed to connect|client socket has timed out|recvValue failed|MPI_ERR_PROC_FAILED|MPI_ERR_REVOKED|"
    r"gloo.*timed out|timed out waiting .*ms for recv|watchdog caught collective operation timeout|"
    r"HorovodInternalError|failed to recv, got 0 bytes|of this host exited in the middle of a step",
    re.IGNORECASE,
)
"""Messages of Gloo, NCCL, torch's store, MPI, Horovod and distrib after another rank died."""

TRACEBACK = re.compile(rb"(\[rank\d+\]: ?)?Traceback \(most recent call last\):$")
FRAME = re.compile(rb"(\[rank\d+\]: ?)?(\s|$)")
"""Line within a traceback; its first other line is the error."""

HOLD_SECONDS = 10.0
"""Longest wait for the end of a rank that lost a connection; a rank that ends takes a second, or the grace time of a stopped job."""


class _HeldLines:
    """Lines of a rank since the beginning of a traceback, or since the first message about a lost connection."""

    def __init__(self, *, lost_connection: bool) -> None:
        self.lines: list[bytes] = []
        self.lost_connection = lost_connection
        self.since = time.monotonic()


class OutputFilter:
    """Filter of lines that ranks print to standard error."""

    def __init__(self) -> None:
        self._held: dict[int, _HeldLines] = {}
        self._failing: set[int] = set()

    def expect_traceback(self, rank: int) -> None:
        """Hold the next traceback of a rank and what follows it until the rank ends.

        Args:
            rank: Global rank, which an uncaught exception ends.
        """
        self._failing.add(rank)

    def add(self, rank: int, lines: Iterable[bytes]) -> list[bytes]:
        """Add lines of a rank.

        Args:
            rank: Global rank.
            lines: Lines without their ends.

        Returns:
            The lines to show now.
        """
        shown: list[bytes] = []
        for line in lines:
            if NOISE.search(line):
                continue
            lost_connection = bool(LOST_CONNECTION.search(line.decode(errors="replace")))
            held = self._held.get(rank)
            if held is None and (lost_connection or TRACEBACK.match(line)):
                held = self._held[rank] = _HeldLines(lost_connection=lost_connection)
            if held is None:
                shown.append(line)
                continue
            held.lines.append(line)
            held.lost_connection |= lost_connection
            may_be_whole = rank not in self._failing and not held.lost_connection
            if may_be_whole and not TRACEBACK.match(line) and not FRAME.match(line):
                shown += self.release(rank)
        return shown

    def release(self, rank: int, *, failed_by_other: bool = False, reported: bool = False) -> list[bytes]:
        """Return the held lines of a rank, and hold them no longer.

        Args:
            rank: Global rank.
            failed_by_other: True if the rank ended because of another one: messages about a lost connection are left out.
            reported: True if the failure report has the traceback that the lines begin with.
        """
        self._failing.discard(rank)
        held = self._held.pop(rank, None)
        return [] if held is None or reported or (failed_by_other and held.lost_connection) else held.lines

    def overdue(self, *, all_of_them: bool) -> list[tuple[int, list[bytes]]]:
        """Return the held lines of ranks that have not ended in time.

        Args:
            all_of_them: True for those of all ranks.
        """
        old = time.monotonic() - HOLD_SECONDS
        return [(rank, self.release(rank)) for rank, held in [*self._held.items()] if all_of_them or held.since < old]
