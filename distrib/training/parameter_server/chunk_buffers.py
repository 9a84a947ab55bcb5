"""Buffers of a worker for one chunk of a table, and a push of it that is not answered yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from distrib.training.parameter_server.server_table import as_memoryview
from distrib.training.parameter_server.transport import Outgoing


@dataclass(eq=False)
class ChunkBuffer:
    """Memory of one chunk on a worker: its gradient is sent from it, its new value is received into it."""

    table: int
    chunk: int
    shard: int
    gradient: torch.Tensor
    """Flat tensor in host memory, in the format of transfer."""
    value: torch.Tensor
    """Flat tensor of the same size and format."""
    version: int = 0
    """Version of `value`, as its server counts."""
    is_waiting: bool = False
    """True while a push is not answered."""
    is_fresh: bool = False
    """True if `value` holds a reply that was not copied into the model."""
    rejected: int = 0
    """Number of gradients that the server rejected because they came too late."""
    on_reply: Callable[[ChunkBuffer, bool], None] | None = None
    """Called with each reply, and True if the push was applied; None to wake the training thread."""

    @functools.cached_property
    def gradient_bytes(self) -> memoryview:
        """The memory of `gradient`."""
        return as_memoryview(self.gradient)

    @functools.cached_property
    def value_bytes(self) -> memoryview:
        """The memory of `value`."""
        return as_memoryview(self.value)


@dataclass(eq=False)
class InFlightPush:
    """A buffer's gradient of a step of this worker until the server answers it."""

    buffer: ChunkBuffer
    step: int
    final: bool
    """False if it may still be replaced."""
    weight: int = 1
    """Number of workers whose mean it is; 0 for an empty gradient."""
    scale: float = 1.0
    """Factor of the gradient that the server knows and the buffer does not contain."""
    outgoing: Outgoing | None = None
    """The last frame with it; None if it was never sent to a server."""
