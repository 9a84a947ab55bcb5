"""How parameters are cut into chunks and spread over the servers. Pure, and the same on every rank.

The parameters of one optimizer group are laid end to end and cut into chunks of nearly equal size, a multiple of
the number of servers: every server gets the same share of each group, a large tensor has several chunks, and many small
tensors share one, so that what is said about a chunk is small beside its bytes. A chunk goes to the server with the
least so far, so those that the forward pass needs first are spread over all servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import msgspec

from distrib.bandwidth_model.server_throughput import MIN_CHUNK_BYTES, chunk_bytes
from distrib.errors import TrainingError

ALIGNMENT = 64
"""Elements; chunks begin where vector units and caches like them to."""


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One parameter as every rank must have it. `group` is that of its optimizer, `kind` its number format on the servers."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    kind: str = "float32"

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Elements `start` to `stop` of the flattened parameter number `parameter`."""

    parameter: int
    start: int
    stop: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What travels and is updated at once: `pieces` end to end, all of one group and kind."""

    number: int
    server: int
    group: int
    kind: str
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def bytes(self) -> int:
        return self.elements * item_bytes(self.kind)


def item_bytes(kind: str) -> int:
    """Bytes of one number."""
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[kind]


def cut(
    parameters: Sequence[Parameter], servers: int, *, whole: bool = False, shared: bool = False
) -> tuple[Chunk, ...]:
    """The chunks of `parameters`, those of each group in their order, which is taken for that of the forward pass.

    `whole` leaves every tensor in one piece and alone, for optimizers that look at a tensor as a whole; `shared` says that
    workers and servers share memory.
    Raises TrainingError when there is nothing to cut.
    """
    if not any(parameter.elements for parameter in parameters):
        raise TrainingError("the optimizer has no parameters to train", hint="give it parameters with requires_grad")
    if whole:
        return _whole(parameters, servers)
    total = sum(parameter.elements * item_bytes(parameter.kind) for parameter in parameters)
    aim = chunk_bytes(total, servers, shared=shared)
    chunks: list[Chunk] = []
    loads = [0] * servers
    numbered = sorted(enumerate(parameters), key=lambda item: (item[1].group, item[1].kind))
    for (group, kind), members in groupby(numbered, key=lambda item: (item[1].group, item[1].kind)):
        run = [Piece(number, 0, parameter.elements) for number, parameter in members if parameter.elements]
        size = sum(piece.stop for piece in run)
        for pieces in _divide(run, _count(size * item_bytes(kind), aim, servers)):
            server = min(range(servers), key=lambda s: (loads[s], s))
            chunks.append(Chunk(len(chunks), server, group, kind, pieces))
            loads[server] += chunks[-1].bytes
    return tuple(chunks)


def _whole(parameters: Sequence[Parameter], servers: int) -> tuple[Chunk, ...]:
    loads = [0] * servers
    chosen: dict[int, int] = {}
    for number, parameter in sorted(enumerate(parameters), key=lambda item: -item[1].elements):
        if parameter.elements:
            chosen[number] = server = min(range(servers), key=lambda s: (loads[s], s))
            loads[server] += parameter.elements * item_bytes(parameter.kind)
    return tuple(
        Chunk(at, chosen[number], parameters[number].group, parameters[number].kind,
              (Piece(number, 0, parameters[number].elements),))
        for at, number in enumerate(sorted(chosen))
    )  # fmt: skip


def _count(size: int, aim: int, servers: int) -> int:
    """Into how many chunks `size` bytes are cut: as many for every server, unless they would be very small."""
    if size >= servers * MIN_CHUNK_BYTES // 4:
        return -(-size // (aim * servers)) * servers
    return -(-size // aim) or 1


def _divide(run: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """`run` in at most `count` parts of nearly equal size, in order."""
    total = sum(piece.stop - piece.start for piece in run)
    edges = [total * n // count // ALIGNMENT * ALIGNMENT for n in range(1, count)] + [total]
    parts: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    begin, pieces = 0, list(reversed(run))
    for edge in edges:
        while pieces and begin < edge:
            piece = pieces.pop()
            taken = min(piece.stop - piece.start, edge - begin)
            current.append(Piece(piece.parameter, piece.start, piece.start + taken))
            begin += taken
            if piece.start + taken < piece.stop:
                pieces.append(Piece(piece.parameter, piece.start + taken, piece.stop))
        if current:
            parts.append(tuple(current))
            current = []
    return parts
