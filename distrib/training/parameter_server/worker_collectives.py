"""What workers do together: what main reads for all, and what each brings and all get. Server 0 keeps the one and collects the other."""

from __future__ import annotations

import concurrent.futures
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from distrib.errors import DistribError, TrainingError
from distrib.training.parameter_server.client import Client
from distrib.training.parameter_server.transport import APPLIED, FINAL, Frame, Kind, check_size, packed, unpacked
from distrib.training.world import World

T = TypeVar("T")

PIECE_BYTES = 256 << 20
"""In which pieces what main reads for all travels: a frame has an end, and a server others to answer."""

INDEX_BYTES = 32
"""What is said of each part of what all workers bring, at most."""

VIEW = "view"
"""What is brought to the beginning of an evaluation."""


class Meeting:
    """A worker's part of it. A `substitute` is elsewhere in the script: it hears what main has read, and meets nobody."""

    def __init__(self, client: Client, world: World, *, substitute: bool) -> None:
        self._client, self._world, self._substitute = client, world, substitute
        self._kept = 0
        self._place: int | None = None  # how often all have met since an evaluation began

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on main; what it raises is raised on every rank. It stays known: substitutes ask for it later."""
        self._step_aside()
        number, self._kept = self._kept, self._kept + 1
        problem: Exception | None = None
        kept = self._fetched(number)
        if kept is None:
            try:
                answer: tuple[Any, str | None] = work(), None
            except (OSError, DistribError) as error:
                problem, answer = error, (None, str(error))
            own = pickle.dumps(answer)
            fetch = Frame(Kind.FETCH, version=number)
            kept = own if self._keep(number, own) else self._whole(*self._client.result(self._client.ask(0, fetch)))
        value, why = pickle.loads(kept)  # written by a rank of this job, whose key it proved
        if why is not None:
            raise problem or TrainingError(f"on the main rank: {why}")
        result: T = value
        return result

    def _step_aside(self) -> None:
        """Others of this host may be in another step, and must not wait for one who waits for them."""
        if self._client.group:
            self._client.group.leave()

    def _keep(self, number: int, content: bytes) -> bool:
        """Has the servers keep this under `number`, in pieces. False where they had another's already, who was main before."""
        whole, count = memoryview(content), -(-len(content) // PIECE_BYTES)
        pieces = [
            (Frame(Kind.KEEP, chunk=piece, version=number, weight=count), whole[piece * PIECE_BYTES :][:PIECE_BYTES])
            for piece in range(count)
        ]
        while True:  # again from the first piece where the server was lost between two
            for frame, data in pieces:
                if (flags := self._client.result(self._client.ask(0, frame, data))[0].flags) & FINAL:
                    if flags & APPLIED:
                        self._client.keep(number, pieces)
                    return bool(flags & APPLIED)

    def _fetched(self, number: int) -> Any:
        """What main has kept under this number; None where this worker is main, or becomes it while it waits."""
        asked = None if self._client.is_main() else self._client.ask(0, Frame(Kind.FETCH, version=number))
        while asked and not self._client.is_main():
            concurrent.futures.wait([asked], timeout=0.2)
            if asked.done():
                return self._whole(*asked.result())
            self._client.check()
        return None

    def _whole(self, first: Frame, content: Any) -> Any:
        """All of what main has kept, of which the first piece has come."""
        rest = []
        for piece in range(1, first.weight):
            frame = Frame(Kind.FETCH, chunk=piece, version=first.version)
            rest.append(self._client.result(self._client.ask(0, frame))[1])
        return b"".join([content, *rest]) if rest else content

    def gather(self, what: str, part: Any = b"") -> list[tuple[int, Any]]:
        """What every worker that is there has brought to the same place of the script, as bytes, and who brought it.

        A substitute, which is elsewhere in the script, is alone. One that was cut off may have come back in the middle of what
        the others do there: whoever brings something else is not counted, and its next evaluation begins with that of the others.
        Raises TrainingError where all of it is too large for a frame.
        """
        if self._substitute:
            return [(self._world.rank, part)]
        self._step_aside()
        if what == VIEW:
            self._place = 0
        elif self._place is not None:
            self._place += 1
        head = packed([what, self._place]) + b"\n"
        own = b"".join([head, part])
        check_size(self._world.size * (len(own) + INDEX_BYTES), hint="reduce one part of it after the other")
        while True:
            parts = self._round(own)
            here = [(who, whole[len(head) :]) for who, whole in parts if whole[: len(head)] == head]
            if what != VIEW or not self._client.astray or len(here) == len(parts):
                break
        if what == VIEW:
            self._client.astray = False
        return here or [(self._world.rank, part)]

    def _round(self, part: bytes) -> list[tuple[int, memoryview]]:
        """What the members have brought to the next round, whatever it is."""
        number, self._client.round = self._client.round, self._client.round + 1
        asked = self._client.ask(0, Frame(Kind.GATHER, version=number), part)
        answer = self._client.result(asked)[1]
        offset = 4 + int.from_bytes(answer[:4], "big")
        parts = []
        for who, size in unpacked(answer[4:offset]):
            parts.append((who, answer[offset : offset + size]))
            offset += size
        return parts
