"""Server side of the workers' collectives: all-gather rounds, and results of the main rank that are stored for all workers."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from distrib.training.parameter_server.transport import Frame, FrameKind, encode


class AllGatherRounds:
    """Numbered rounds in which every worker contributes bytes and receives the bytes of all. No I/O.

    All workers count the same rounds, from 0. A round is complete when every expected worker has contributed. Its result is
    stored until every worker has come to a later round, for workers whose connection broke before they received it.

    Args:
        expected: Returns the workers that are waited for now.
    """

    def __init__(self, expected: Callable[[], Set[int]]) -> None:
        self._expected = expected
        self._contributions: dict[int, dict[int, Any]] = {}
        self._results: dict[int, dict[int, Any]] = {}
        self._reached: dict[int, int] = {}  # the last round of each worker
        self._requests: dict[int, tuple[int, int]] = {}  # by waiting worker, its round and the number of its request

    @property
    def waiting(self) -> Set[int]:
        """Workers that wait for a result."""
        return self._requests.keys()

    def contribute(self, worker: int, number: int, request: int, data: Any) -> None:
        """Record a worker's contribution. The worker has received the results of earlier rounds.

        Args:
            worker: Rank of the worker.
            number: Number of the round.
            request: Number of the worker's request, for the reply.
            data: Bytes or a buffer.
        """
        self._requests[worker] = number, request
        self._reached[worker] = max(number, self._reached.get(worker, 0))
        if number not in self._results:
            self._contributions.setdefault(number, {})[worker] = data
        slowest = min((self._reached.get(other, 0) for other in self._expected()), default=number)
        for old in [n for n in self._results if n < slowest]:
            del self._results[old]

    def forget_request(self, worker: int) -> None:
        """Drop a worker's request after its connection was lost. The worker will repeat it.

        Args:
            worker: Rank of the worker.
        """
        self._requests.pop(worker, None)

    def _complete(self) -> dict[int, dict[int, Any]]:
        """Return all stored results: contributions by round and worker."""
        for number in sorted(self._contributions):
            expected = {worker for worker in self._expected() if self._reached.get(worker, 0) <= number}
            if expected <= self._contributions[number].keys():
                self._results[number] = self._contributions.pop(number)
        return self._results

    def replies(self) -> list[tuple[int, Frame, bytes]]:
        """Return worker, header and payload of all replies that can be sent now. They are returned once.

        A payload is the length of an index (4 bytes), the index as JSON (rank and size of each contribution) and the data.
        """
        results = self._complete()
        payloads: dict[int, bytes] = {}  # built once per round, as it is the same for many workers
        found = []
        for worker, (number, request) in list(self._requests.items()):
            if (contributions := results.get(number)) is None:
                continue
            del self._requests[worker]
            if number not in payloads:
                ranks = sorted(contributions)
                index = encode([[rank, len(contributions[rank])] for rank in ranks])
                data = (contributions[rank] for rank in ranks)
                payloads[number] = b"".join([len(index).to_bytes(4, "big"), index, *data])
            found.append((worker, Frame(FrameKind.DONE, step=request), payloads[number]))
        return found

    def next_round(self) -> int:
        """Return the number of the round that a worker which joins now takes part in first."""
        finished = (number + 1 for number in self._results)
        return max([*self._contributions, *finished, *self._reached.values()], default=0)


class StoredResults:
    """Results of the main rank for all workers, by number, in pieces. No I/O."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[Any]] = {}
        """Complete results."""
        self._partial: dict[tuple[int | None, int], dict[int, Any]] = {}  # by source and number
        self.fetches: list[tuple[int, Frame]] = []
        """Workers and requests that wait for a result."""

    def store(self, source: int | None, frame: Frame, piece: Any) -> bool:
        """Store a piece of a result. Returns True if the result is complete with it.

        Args:
            source: Rank of the worker that sends it; None for the primary server.
            frame: Its header: `version` is the number of the result, `chunk` that of the piece, `weight` the number of pieces.
            piece: The bytes.
        """
        partial = self._partial.setdefault((source, frame.version), {})
        partial[frame.chunk] = piece
        if len(partial) < frame.weight:
            return False
        del self._partial[source, frame.version]
        self.pieces[frame.version] = [partial[number] for number in range(frame.weight)]
        return True

    def fetch(self, worker: int, request: Frame) -> None:
        """Record that a worker waits for a piece.

        Args:
            worker: Rank of the worker.
            request: Its header, as for `store`.
        """
        self.fetches.append((worker, request))

    def forget_requests(self, worker: int) -> None:
        """Drop a worker's requests after its connection was lost. The worker will repeat them.

        Args:
            worker: Rank of the worker.
        """
        self.fetches = [(other, request) for other, request in self.fetches if other != worker]

    def replies(self) -> list[tuple[int, Frame, Any]]:
        """Return worker, header and payload of all replies that can be sent now. They are returned once."""
        fetches, self.fetches = self.fetches, []
        found = []
        for worker, request in fetches:
            if (pieces := self.pieces.get(request.version)) is None:
                self.fetches.append((worker, request))
            else:
                reply = Frame(FrameKind.DONE, 0, 0, request.chunk, request.step, request.version, len(pieces))
                found.append((worker, reply, pieces[request.chunk]))
        return found
