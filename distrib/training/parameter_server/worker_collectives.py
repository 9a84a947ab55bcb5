"""Collectives of elastic workers: all-gather, and results of the main rank for all. Shard 0 stores and collects."""

from __future__ import annotations

import concurrent.futures
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from distrib.errors import DistribError, TrainingError
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.transport import (
    APPLIED,
    FINAL,
    Frame,
    FrameKind,
    check_payload_size,
    decode,
    encode,
)
from distrib.training.world import World

T = TypeVar("T")

PIECE_BYTES = 256 << 20
"""Size of the pieces of a result: a frame has a maximum size, and a server must answer other workers meanwhile."""

INDEX_ENTRY_BYTES = 32
"""Upper bound for the index entry of one contribution."""

EVALUATION = "view"
"""Tag of the collective at the beginning of an evaluation."""


class WorkerCollectives:
    """A worker's side of the collectives.

    Args:
        client: The client of this worker.
        world: The ranks of the job.
        is_replacement: True for a replacement worker, which is at another place of the script. It receives the results of
            main, and takes part in no all-gather.
    """

    def __init__(self, client: ParameterClient, world: World, *, is_replacement: bool) -> None:
        self._client, self._world, self._is_replacement = client, world, is_replacement
        self._results = 0
        self._since_evaluation: int | None = None  # collectives since an evaluation began

    def from_main(self, work: Callable[[], T]) -> T:
        """Run a function on the main rank and return its result on every rank. The result stays stored for replacement workers.

        Args:
            work: The function, which is called on the main rank only.

        Returns:
            The result, on every rank.

        Raises:
            TrainingError: The function raised an error on the main rank; there the error itself is raised.
        """
        self._announce_wait()
        number, self._results = self._results, self._results + 1
        error: Exception | None = None
        content = self._fetch_from_main(number)
        if content is None:
            try:
                outcome: tuple[Any, str | None] = work(), None
            except (OSError, DistribError) as caught:
                error, outcome = caught, (None, str(caught))
            own = pickle.dumps(outcome)
            # Another worker was main before if the servers have its result.
            content = own if self._store(number, own) else self._join_pieces(*self._fetch(number, 0))
        value, reason = pickle.loads(content)  # written by a rank of this job, which has proven that it knows the key
        if reason is not None:
            raise error or TrainingError(f"on the main rank: {reason}")
        result: T = value
        return result

    def _announce_wait(self) -> None:
        """Let other workers of this host continue: they may be in another step."""
        if self._client.group:
            self._client.group.announce_wait()

    def _store(self, number: int, content: bytes) -> bool:
        """Store a result on the servers. Returns False if they have one of another worker."""
        whole, count = memoryview(content), -(-len(content) // PIECE_BYTES)
        pieces = [
            (Frame(FrameKind.STORE, chunk=n, version=number, weight=count), whole[n * PIECE_BYTES :][:PIECE_BYTES])
            for n in range(count)
        ]
        while True:  # from the first piece again if the server was lost between two
            for frame, piece in pieces:
                flags = self._client.result(self._client.request(0, frame, piece))[0].flags
                if flags & FINAL:
                    if flags & APPLIED:
                        self._client.retain_result(number, pieces)
                    return bool(flags & APPLIED)

    def _fetch(self, number: int, piece: int) -> tuple[Frame, Any]:
        frame = Frame(FrameKind.FETCH, chunk=piece, version=number)
        return self._client.result(self._client.request(0, frame))

    def _fetch_from_main(self, number: int) -> Any:
        """Return main's stored result; None if this worker is main or becomes it meanwhile."""
        if self._client.is_main():
            return None
        future = self._client.request(0, Frame(FrameKind.FETCH, version=number))
        while not self._client.is_main():
            concurrent.futures.wait([future], timeout=0.2)
            if future.done():
                return self._join_pieces(*future.result())
            self._client.check()
        return None

    def _join_pieces(self, first: Frame, content: Any) -> Any:
        rest = [self._fetch(first.version, piece)[1] for piece in range(1, first.weight)]
        return b"".join([content, *rest]) if rest else content

    def gather(self, tag: str, data: Any = b"") -> list[tuple[int, Any]]:
        """Gather bytes of all workers that are at the same place of the script.

        A replacement worker is alone. A worker that was disconnected may return in the middle of the others' collectives: a
        contribution with another tag does not count, and its next evaluation begins with that of the others.

        Args:
            tag: Text that distinguishes places of the script.
            data: The bytes of this worker.

        Returns:
            Rank and bytes of each worker.

        Raises:
            TrainingError: All of it is too large for a frame.
        """
        if self._is_replacement:
            return [(self._world.rank, data)]
        self._announce_wait()
        if tag == EVALUATION:
            self._since_evaluation = 0
        elif self._since_evaluation is not None:
            self._since_evaluation += 1
        head = encode([tag, self._since_evaluation]) + b"\n"
        own = b"".join([head, data])
        check_payload_size(self._world.size * (len(own) + INDEX_ENTRY_BYTES), hint="reduce it in several parts")
        while True:
            contributions = self._all_gather(own)
            same = [(rank, whole[len(head) :]) for rank, whole in contributions if whole[: len(head)] == head]
            if tag != EVALUATION or not self._client.missed_rounds or len(same) == len(contributions):
                break
        if tag == EVALUATION:
            self._client.missed_rounds = False
        return same or [(self._world.rank, data)]

    def _all_gather(self, data: Any) -> list[tuple[int, memoryview]]:
        number, self._client.round = self._client.round, self._client.round + 1
        reply = self._client.result(self._client.request(0, Frame(FrameKind.ALL_GATHER, version=number), data))[1]
        offset = 4 + int.from_bytes(reply[:4], "big")
        found = []
        for rank, size in decode(reply[4:offset]):
            found.append((rank, reply[offset : offset + size]))
            offset += size
        return found
