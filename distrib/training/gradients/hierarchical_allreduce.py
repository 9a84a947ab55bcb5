"""The thread of a rank that averages pieces of the gradients: inside the host, between hosts, inside again.

A piece goes through four doors: every rank of the host has copied its gradients into the shared memory; each rank of a
lane sums its share of the piece over the host; the lane's ranks of all hosts sum that share over the wire; once all
lanes of the host are through, the piece is whole, in memory that every rank reads. Lanes work at the same time, and so
do pieces. Hosts with more ranks than the smallest have ranks without a lane, which copy and read only.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distrib.errors import TrainingError
from distrib.training.gradients.compression import Origin, Waits, Way
from distrib.training.gradients.host_shared_memory import Neighbours

COPIED, SUMMED = 0, 1
COUNTERS = 2
STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the step's gradients, `start` to `end` in bytes; `key` is its place within the step."""

    key: int
    start: int
    end: int
    dtype: torch.dtype
    origin: Origin | None = None

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.start : self.end].view(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """The ranks, one of each host, that sum a share of each piece over the wire; `number` of `count`."""

    number: int
    count: int
    hosts: int
    groups: list[dist.ProcessGroup]

    def share(self, piece: Piece, whole: torch.Tensor, *, undivided: bool) -> torch.Tensor:
        """This lane's part of `whole`, a tensor of the piece."""
        if undivided:
            return whole if piece.key % self.count == self.number else whole[:0]
        elements = whole.numel()
        return whole[elements * self.number // self.count : elements * (self.number + 1) // self.count]


@dataclass
class _Flight:
    waits: Waits
    waiting: torch.futures.Future[object] | None = None
    stage: int = 0


@dataclass
class _Promise:
    upto: int
    future: torch.futures.Future[torch.Tensor]
    value: torch.Tensor


class Engine:
    """Averages the pieces that are given to `copied`, in their order, which must be that of all ranks."""

    def __init__(
        self,
        neighbours: Neighbours,
        inputs: list[torch.Tensor],
        result: torch.Tensor,
        lane: Lane | None,
        lanes: int,
        way: Way,
    ) -> None:
        self._neighbours, self._inputs, self._result = neighbours, inputs, result
        self._lane, self._lanes = lane, lanes
        self.way = way
        """Between steps every rank may set another, with as many stages at most."""
        self._pieces: deque[Piece] = deque()
        self._flights: deque[_Flight] = deque()
        self._promises: deque[_Promise] = deque()
        self._errors: dict[tuple[int, int, int], torch.Tensor] = {}
        self._copied = self._begun = self._summed = 0
        self._failure: Exception | None = None
        self._stopped = False
        self.sent_bytes = 0
        """What this rank has sent over the wire."""
        self._thread = threading.Thread(target=self._run, name="distrib-gradients", daemon=True)
        self._thread.start()

    def copied(self, piece: Piece) -> None:
        """This rank's gradients of the piece lie in its input."""
        self._pieces.append(piece)
        self._copied += 1
        self._neighbours.tell(COPIED, self._copied)
        self._neighbours.wake()

    def promise(self, pieces: int, value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """A future of `value`, a part of the result, fulfilled when so many pieces since the beginning are averaged."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._promises.append(_Promise(pieces, future, value))
        if self._failure is not None:
            self._fail(self._failure)
        self._neighbours.wake()
        return future

    @property
    def pieces(self) -> int:
        """How many pieces were given to `copied` since the beginning."""
        return self._copied

    def forget(self) -> None:
        """Drops what compression keeps of each piece; to be called between steps, when pieces are cut anew."""
        self._errors.clear()
        self.way.forget()

    def rescale(self, factor: torch.Tensor) -> None:
        """Gradients come so many times as large from now on; to be called between steps."""
        for errors in self._errors.values():
            errors *= factor
        self.way.rescale(factor)

    def stop(self) -> None:
        """Ends the thread; what was promised and is not kept never will be.

        Python that ends while the thread runs kills it anywhere, and inside of torch's destructors that aborts the process.
        """
        self._stopped = True
        self._neighbours.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_SECONDS)
        self._neighbours.close()

    # In the thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._stopped:
                    self._advance()
                    self._begin()
                    self._finish()
                    if self._promises and self._neighbours.gone:
                        names = ", ".join(map(str, sorted(self._neighbours.gone)))
                        raise TrainingError(
                            f"local rank {names} of this host has gone in the middle of a step",
                            hint="why, is in that rank's log",
                        )
                    self._neighbours.sleep()
        except Exception as error:
            self._failure = error
            self._fail(error)

    def _begin(self) -> None:
        """Sums over the host, and sends away, what all its ranks have copied."""
        ready = self._neighbours.slowest(COPIED)
        while self._begun < ready and len(self._flights) < self.way.window:
            piece = self._pieces.popleft()
            self._begun += 1
            self._flights.append(flight := _Flight(self._sum(piece)))
            self._step(flight)
            self._advance()

    def _sum(self, piece: Piece) -> Waits:
        if self._lane is None:
            return
        result = self._lane.share(piece, piece.of(self._result), undivided=self.way.whole)
        if not result.numel():
            return
        if len(self._inputs) > 1:
            parts = [self._lane.share(piece, piece.of(i), undivided=self.way.whole) for i in self._inputs]
            torch.add(parts[0], parts[1], out=result)
            for part in parts[2:]:
                result += part
        if self._lane.hosts > 1:

            def errors(stage: int, elements: int) -> torch.Tensor:
                key = piece.key, stage, elements
                if key not in self._errors:
                    self._errors[key] = torch.zeros(elements, dtype=torch.float32, device=result.device)
                return self._errors[key]

            self.sent_bytes += self.way.sent_bytes(
                result.numel(), result.element_size(), self._lane.hosts, piece.origin
            )
            yield from self.way.sum(result, self._lane.groups, errors, piece.origin)

    def _step(self, flight: _Flight) -> None:
        """Takes a piece to the next thing that it must wait for."""
        flight.stage += 1
        flight.waiting = next(flight.waits, None)
        if flight.waiting is not None:
            flight.waiting.add_done_callback(lambda _: self._neighbours.wake())

    def _advance(self) -> None:
        """Takes on the pieces whose collective has ended, none past one before it: ranks must agree on the order."""
        ahead = self.way.stages + 1
        for flight in self._flights:
            while flight.waiting is not None and flight.waiting.done() and flight.stage < ahead:
                flight.waiting.wait()  # raises what went wrong
                self._step(flight)
            ahead = flight.stage if flight.waiting is not None else self.way.stages + 1
        summed = self._summed
        while self._flights and self._flights[0].waiting is None:
            self._flights.popleft()
            self._summed += 1
        if self._summed > summed:
            self._neighbours.tell(SUMMED, self._summed)

    def _finish(self) -> None:
        """Keeps the promises of which every lane has done its share."""
        done = self._neighbours.slowest(SUMMED, self._lanes)
        while self._promises and self._promises[0].upto <= done:
            promise = self._promises.popleft()
            promise.future.set_result(promise.value)

    def _fail(self, error: Exception) -> None:
        while True:
            try:
                promise = self._promises.popleft()
            except IndexError:
                return
            promise.future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
