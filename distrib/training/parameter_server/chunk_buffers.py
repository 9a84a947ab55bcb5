"""Buffers of a worker for one chunk of a table, and a push of it that is not answered yet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distrib.training.parameter_server.transport import Outgoing


class ChunkBuffer:
    """Memory of one chunk on a worker: its gradient is sent from it, its new value is received into it.

    Args:
        table: Number of the table.
        chunk: Number of the chunk.
        shard: Number of the shard that the chunk belongs to.
        gradient: Flat tensor in host memory, in the format of transfer.
        value: Flat tensor of the same size and format.
    """

    def __init__(self, table: int, chunk: int, shard: int, gradient: torch.Tensor, value: torch.Tensor) -> None:
        self.table, self.chunk, self.shard = table, chunk, shard
        self.gradient, self.value = gradient, value
        self.version = 0
        """Version of `value`, as its server counts."""
        self.is_waiting = False
        """True while a push is not answered."""
        self.is_fresh = False
        """True if `value` holds a reply that was not copied into the model."""
        self.rejected = 0
        """Number of gradients that the server rejected because they came too late."""
        self.on_reply: Callable[[ChunkBuffer, bool], None] | None = None
        """Called with each reply, and True if the push was applied; None to wake the training thread."""


class InFlightPush:
    """A buffer's gradient of a step until the server answers it.

    Args:
        buffer: The buffer that it is sent from.
        step: The worker's step.
        final: False if it may still be replaced.
        weight: Number of workers whose mean it is; 0 for an empty gradient.
    """

    def __init__(self, buffer: ChunkBuffer, step: int, final: bool, weight: int = 1) -> None:
        self.buffer, self.step, self.final, self.weight = buffer, step, final, weight
        self.outgoing: Outgoing | None = None
        """The frame while it waits to be sent."""
