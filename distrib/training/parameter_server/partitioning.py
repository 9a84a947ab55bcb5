"""Partitioning of parameters into chunks, and of chunks over the servers. Pure, and equal on every rank.

The parameters of one optimizer group are concatenated and divided into chunks of nearly equal size. The number of chunks is a
multiple of the number of servers, so every server gets the same share of each group. A large tensor has several chunks, and many
small tensors share one, so headers are small beside the data. A chunk goes to the server with the least data so far. So the chunks
that the forward pass needs first are spread over all servers.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import msgspec

from distrib.bandwidth_model.server_throughput import CHUNKS, chunk_bytes
from distrib.errors import TrainingError


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """A parameter, equal on every rank. `group` is its parameter group, `kind` the name of its dtype on the servers."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    kind: str = "float32"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Elements `start` to `stop` of the flat parameter with number `parameter`."""

    parameter: int
    start: int
    stop: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The unit of transfer and update: `pieces` concatenated, all of one group and kind."""

    number: int
    server: int
    group: int
    kind: str
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def bytes(self) -> int:
        """Size on the server."""
        return self.elements * item_bytes(self.kind)


def item_bytes(kind: str) -> int:
    """Return the size of one element in bytes.

    Args:
        kind: Name of its dtype in torch.
    """
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[kind]


def partition(
    parameters: Sequence[ParameterSpec], servers: int, *, whole: bool = False, shared: bool = False
) -> tuple[Chunk, ...]:
    """Divide parameters into chunks.

    Args:
        parameters: The parameters, in the order of the forward pass.
        servers: Number of servers.
        whole: True to give every tensor a chunk of its own, for optimizers that need tensors whole.
        shared: True if workers and servers share memory, where larger chunks are faster.

    Returns:
        The chunks, those of each group in the order of its parameters.

    Raises:
        TrainingError: All parameters are empty, or too large for mode async.
    """
    if not any(parameter.elements for parameter in parameters):
        raise TrainingError(
            "the optimizer has no parameters that require gradients", hint="give it parameters with requires_grad"
        )
    total = sum(parameter.elements * item_bytes(parameter.kind) for parameter in parameters)
    if not 0 < servers <= 1 << 16 or not 0 < total <= 1 << 40:  # larger numbers would take minutes
        raise TrainingError(
            f"{total} bytes of parameters on {servers} servers, expected at most {1 << 40} on {1 << 16}"
        )
    if whole:
        return _whole(parameters, servers)
    target_bytes = chunk_bytes(total, servers, shared=shared)
    chunks: list[Chunk] = []
    loads = [(0, server) for server in range(servers)]  # a heap
    numbered = sorted(enumerate(parameters), key=lambda item: (item[1].group, item[1].kind))
    for (group, kind), members in groupby(numbered, key=lambda item: (item[1].group, item[1].kind)):
        run = [Piece(number, 0, parameter.elements) for number, parameter in members if parameter.elements]
        size = sum(piece.stop for piece in run)
        for pieces in _divide(run, _count(size * item_bytes(kind), target_bytes, servers)):
            load, server = loads[0]
            chunks.append(Chunk(len(chunks), server, group, kind, pieces))
            heapq.heapreplace(loads, (load + chunks[-1].bytes, server))
    return tuple(chunks)


def _whole(parameters: Sequence[ParameterSpec], servers: int) -> tuple[Chunk, ...]:
    loads: Counter[int] = Counter()
    chosen: dict[int, int] = {}
    for number, parameter in sorted(enumerate(parameters), key=lambda item: -item[1].elements):
        if parameter.elements:
            chosen[number] = server = min(range(servers), key=loads.__getitem__)
            loads[server] += parameter.elements * item_bytes(parameter.kind)
    return tuple(
        Chunk(at, chosen[number], parameters[number].group, parameters[number].kind,
              (Piece(number, 0, parameters[number].elements),))
        for at, number in enumerate(sorted(chosen))
    )  # fmt: skip


def _count(size: int, target_bytes: int, servers: int) -> int:
    """Return the number of chunks for `size` bytes: a multiple of `servers`, unless they would be very small."""
    if size >= servers * CHUNKS.min_bytes // 4:
        return -(-size // (target_bytes * servers)) * servers
    return -(-size // target_bytes)


def _divide(run: Sequence[Piece], count: int) -> list[tuple[Piece, ...]]:
    """Divide `run` into at most `count` parts of nearly equal size, in order. They begin at multiples of 64, for vector units."""
    total = sum(piece.stop - piece.start for piece in run)
    edges = [total * n // count // 64 * 64 for n in range(1, count)] + [total]
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
