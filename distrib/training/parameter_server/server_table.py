"""A table: the parameters of one optimizer, as ranks describe it and as a server stores its chunks."""

from __future__ import annotations

import functools
import io
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from distrib.errors import TrainingError
from distrib.strategy import Gradients, Strategy
from distrib.training.collectives import to_bytes
from distrib.training.gradients.compression import create_compressor
from distrib.training.parameter_server.partitioning import Chunk, ParameterSpec, partition
from distrib.training.parameter_server.server_optimizer import (
    ChunkOptimizer,
    OptimizerSpec,
    rate_share,
    with_own_momentum,
)
from distrib.training.parameter_server.shared_memory import is_borrowed
from distrib.training.parameter_server.update_rules import UpdateController, WeightedGradient


class TableDescription(msgspec.Struct, frozen=True):
    """An optimizer and its parameters, equal on all ranks."""

    optimizer: OptimizerSpec
    parameters: tuple[ParameterSpec, ...]
    options: tuple[dict[str, Any], ...]
    """Settings of each parameter group."""
    servers: int
    transfer_format: str = "fp32"
    shared: bool = False
    """True if all workers share memory with the servers."""
    pushers: int = 1
    """Number of host groups and of workers without one."""

    def chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks of all servers."""
        return partition(self.parameters, self.servers, whole=self.optimizer.whole, shared=self.shared)

    def difference(self, other: TableDescription) -> str:
        """Describe how another description differs; empty if it does not. Settings may differ: learning rates do.

        Args:
            other: The description of another rank.
        """
        if self.optimizer != other.optimizer:
            return f"its optimizer is {other.optimizer.name}, expected {self.optimizer.name}"
        if len(self.parameters) != len(other.parameters):
            return f"its optimizer has {len(other.parameters)} parameters, expected {len(self.parameters)}"
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if mine != theirs:
                return f"its parameter {theirs.name} is {_format(theirs)}, expected {mine.name}, {_format(mine)}"
        if self.transfer_format == other.transfer_format:
            return ""
        return f"it sends {other.transfer_format}, expected {self.transfer_format}"


def _format(parameter: ParameterSpec) -> str:
    return f"{parameter.kind} {list(parameter.shape)} in group {parameter.group}"


@functools.cache
def transfer_dtype(transfer_format: str, kind: str) -> torch.dtype:
    """Return the dtype in which numbers are sent.

    Args:
        transfer_format: A gradient format that can carry parameters.
        kind: Name of the numbers' dtype on the server, as in torch.
    """
    own: torch.dtype = getattr(torch, kind)
    return create_compressor(Gradients(transfer_format)).value_dtype or own


def as_memoryview(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor without a copy.

    Args:
        tensor: A contiguous tensor in host memory.
    """
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
        tensor = tensor.view(-1).view(torch.uint8)
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy lacks the annotation before Python 3.12


class BufferPool:
    """Buffers for gradients that are used again: new pages from the kernel cost more than the copy into them."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of any content.

        Args:
            size: Bytes.
        """
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu")

    def give_back(self, memory: torch.Tensor | None) -> None:
        """Return a buffer that is not used any more. Memory that a worker shares is left alone.

        Args:
            memory: The buffer; None if there is none.
        """
        if memory is not None and not is_borrowed(memory):
            self._free.setdefault(memory.numel(), []).append(memory)

    def clear(self) -> None:
        """Drop all free buffers, as their sizes may not be needed again."""
        self._free.clear()


class _SentValue:
    """A chunk's value in the format of transfer while it is sent to workers: the value itself, or a copy of another dtype."""

    def __init__(self, memory: torch.Tensor, *, is_copy: bool) -> None:
        self.memory, self.is_copy, self.users = memory, is_copy, 0


class ServerTable:
    """One server's chunks of a table: values, optimizers and their update controller.

    Args:
        members: Push ids that the controller waits for.
    """

    def __init__(
        self, number: int, description: TableDescription, server: int, members: Iterable[int], strategy: Strategy,
        pool: BufferPool,
    ) -> None:  # fmt: skip
        self.number, self.description, self.strategy = number, description, strategy
        self.chunks = {chunk.number: chunk for chunk in description.chunks() if chunk.server == server}
        kinds = {number: chunk.kind for number, chunk in self.chunks.items()}
        self._dtypes = {number: getattr(torch, kind) for number, kind in kinds.items()}
        self._transfer_dtypes = {
            number: transfer_dtype(description.transfer_format, kind) for number, kind in kinds.items()
        }
        self.transfer_bytes = {
            number: chunk.elements * self._transfer_dtypes[number].itemsize for number, chunk in self.chunks.items()
        }
        """Size of each chunk as it is sent, in bytes."""
        self.controller = UpdateController(self.chunks, members, strategy.staleness)
        self.options: dict[int, list[dict[str, Any]]] = {}
        """Settings of the parameter groups that each worker sent last."""
        self.last_options = list(description.options)
        """Settings that any worker sent last."""
        self.staleness: Counter[int] = Counter()
        """Number of updates by their staleness."""
        self._updates = self._total_staleness = 0
        self.optimizers: dict[int, ChunkOptimizer] = {}
        """Chunks that have a value, and their optimizers."""
        self._pool = pool
        self._sent: dict[int, _SentValue] = {}
        self.snapshot_cache: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by chunk, version and bytes
        self._sent_values: dict[tuple[int, int], torch.Tensor] = {}  # by worker and chunk, for delay compensation

    @property
    def is_set(self) -> bool:
        """True if every chunk has its first value."""
        return len(self.optimizers) == len(self.chunks)

    def memory_bytes(self) -> int:
        """Return the memory that this server needs: values, data in flight, optimizer state and a gradient per pusher."""
        pushers = self.description.pushers
        state = self.description.optimizer.state_tensors
        if (
            self.strategy.momentum_correction
            and state
            and any(group.get("momentum") for group in self.description.options)
        ):
            state += pushers  # one momentum each
        if self.strategy.delay_compensation:
            state += pushers  # the value that was sent to each
        return sum(chunk.bytes for chunk in self.chunks.values()) * (2 + state + pushers)

    def set_value(self, chunk: int, value: Any, *, replace: bool) -> None:
        """Set the value of a chunk.

        Args:
            chunk: Number of the chunk.
            value: Bytes in the dtype of the server.
            replace: False to leave a value that is set.
        """
        at = self.chunks[chunk]
        if chunk not in self.optimizers:
            like = self.description.parameters[at.pieces[0].parameter]
            shape = like.shape if self.description.optimizer.whole else (at.elements,)
            self.optimizers[chunk] = ChunkOptimizer(
                self.description.optimizer,
                torch.empty(shape, dtype=self._dtypes[chunk], device="cpu"),
                self.description.options[at.group],
            )
        elif not replace:
            return
        self._before_change(chunk)
        target = self.value(chunk)
        target.copy_(torch.frombuffer(value, dtype=target.dtype))

    def value(self, chunk: int) -> torch.Tensor:
        """Return the present value of a chunk without a copy, flat, in the dtype of the server.

        Args:
            chunk: Number of the chunk.
        """
        return self.optimizers[chunk].flat_value

    def snapshot(self, chunk: int) -> memoryview:
        """Return the present value of a chunk as bytes that do not change; one copy per version while it is in use.

        Args:
            chunk: Number of the chunk.
        """
        version = self.controller.version(chunk)
        of_version, cached = self.snapshot_cache.get(chunk, (-1, None))
        array = cached() if cached and of_version == version else None
        if array is None:
            array = self.value(chunk).clone().view(torch.uint8).numpy()
            self.snapshot_cache[chunk] = version, weakref.ref(array)
        return memoryview(array)  # type: ignore[arg-type]  # as in `as_memoryview`

    # -- updates ----------------------------------------------------------------------------------------------------

    def apply(self, chunk: int, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        """Update a chunk.

        Args:
            chunk: Number of the chunk.
            gradient: The gradient, from `effective_update` or from the log of another server.
            options: The optimizer settings.
        """
        self._before_change(chunk)
        self.optimizers[chunk].apply(gradient, options)

    def effective_update(
        self, chunk: int, updates: tuple[WeightedGradient, ...], groups: list[dict[str, Any]] | None
    ) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor | None]:
        """Return the gradient and the optimizer settings with which a chunk is updated.

        Args:
            chunk: Number of the chunk.
            updates: The gradients, whose weighted mean counts.
            groups: Settings of the parameter groups; None for those of the description.

        Returns:
            The gradient, the settings, and the memory to give back after the update; None if there is none.
        """
        at = self.chunks[chunk]
        dtype, target = self._transfer_dtypes[chunk], self._dtypes[chunk]
        first = updates[0]
        result = first.gradient.view(dtype)
        memory = None if is_borrowed(first.gradient) else first.gradient
        changes = len(updates) > 1 or first.scale != 1 or self.strategy.delay_compensation is not None
        if dtype != target or (changes and memory is None):
            memory = self._pool.take(at.bytes)
            result = memory.view(target).copy_(result)
            self._pool.give_back(first.gradient)
        if len(updates) > 1:
            total = sum(update.weight for update in updates)
            result.mul_(first.scale * first.weight / total)
            for update in updates[1:]:
                result.add_(update.gradient.view(dtype), alpha=update.scale * update.weight / total)
                self._pool.give_back(update.gradient)
        elif first.scale != 1:
            result.mul_(first.scale)
        for update in updates:
            self.staleness[update.staleness] += 1
            self._updates += 1
            self._total_staleness += update.staleness
        options = (groups or list(self.description.options))[at.group]
        if len(updates) == 1:
            options = self._correct(chunk, result, first, options)
        if self.description.optimizer.whole:
            result = result.view(self.optimizers[chunk].value.shape)
        return result, options, memory

    def _correct(
        self, chunk: int, gradient: torch.Tensor, update: WeightedGradient, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Compensate for staleness as far as the settings demand."""
        strength = self.strategy.delay_compensation
        if strength and (seen := self._sent_values.get((update.worker, chunk))) is not None:
            # Zheng et al. 2016 (arXiv:1609.08326), equation 10: the outer product of the gradient with itself, of which
            # only the diagonal is used, stands for the Hessian.
            gradient.addcmul_(gradient * gradient, self.value(chunk) - seen, value=strength)
        mean = self._total_staleness / self._updates
        if self.strategy.stale_rate:
            share = rate_share(self.description.optimizer.name, max(update.staleness, mean))
            options = {**options, "lr": options["lr"] * share}
        if self.strategy.momentum_correction and max(update.staleness, mean) > 0:
            options = with_own_momentum(self.description.optimizer, options, update.worker)
        return options

    # -- values for workers -------------------------------------------------------------------------------------------

    def publish(self, chunk: int, worker: int) -> tuple[memoryview, Any]:
        """Return a chunk's present value for a worker as bytes in the format of transfer.

        Args:
            chunk: Number of the chunk.
            worker: The worker or push id, for delay compensation.

        Returns:
            Bytes that do not change, and a function to call when they are sent.
        """
        if (value := self._sent.get(chunk)) is None:
            value = self._sent[chunk] = self._value_to_send(chunk)
        value.users += 1
        self._record_sent(chunk, worker)

        def sent() -> None:
            value.users -= 1
            if not value.users and self._sent.get(chunk) is not value:
                self._pool.give_back(value.memory)

        return as_memoryview(value.memory), sent

    def _value_to_send(self, chunk: int) -> _SentValue:
        own, dtype = self.value(chunk), self._transfer_dtypes[chunk]
        if dtype == own.dtype:
            return _SentValue(own.view(torch.uint8), is_copy=False)
        memory = self._pool.take(self.transfer_bytes[chunk])
        memory.view(dtype).copy_(own)
        return _SentValue(memory, is_copy=True)

    def publish_into(self, chunk: int, worker: int, memory: torch.Tensor) -> None:
        """Write a chunk's present value into memory that a worker shares.

        Args:
            chunk: Number of the chunk.
            worker: The worker or push id, for delay compensation.
            memory: The memory.
        """
        memory.view(self._transfer_dtypes[chunk]).copy_(self.value(chunk))
        self._record_sent(chunk, worker)

    def _record_sent(self, chunk: int, worker: int) -> None:
        if self.strategy.delay_compensation:
            self._sent_values[worker, chunk] = self.value(chunk).clone()

    def _before_change(self, chunk: int) -> None:
        """Prepare a chunk's value for a change: drop its cached copies, and move it to new memory while the old is being sent."""
        self.snapshot_cache.pop(chunk, None)
        if (value := self._sent.pop(chunk, None)) is None:
            return
        if value.users and not value.is_copy:
            self.optimizers[chunk].use_memory(self._pool.take(value.memory.numel()).copy_(value.memory))
        elif value.is_copy and not value.users:
            self._pool.give_back(value.memory)

    # -- serialization -------------------------------------------------------------------------------------------------

    def serialize(self, chunk: int) -> bytes:
        """Return value, optimizer state and momenta of a chunk, for torch.load(weights_only=True).

        Args:
            chunk: Number of the chunk.
        """
        return to_bytes({"value": self.value(chunk), **self.optimizers[chunk].full_state()})

    def optimizer_state(self, chunk: int) -> bytes:
        """Return the optimizer state of a chunk as in a checkpoint, for torch.load(weights_only=True).

        Args:
            chunk: Number of the chunk.
        """
        return to_bytes(self.optimizers[chunk].state())

    def deserialize(self, chunk: int, data: Any) -> None:
        """Restore a result of `serialize`.

        Args:
            chunk: Number of the chunk.
            data: The bytes.

        Raises:
            TrainingError: The chunk has another size here.
        """
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if content["value"].numel() != self.chunks[chunk].elements:
            raise TrainingError(
                f"chunk {chunk} has {content['value'].numel()} elements, expected {self.chunks[chunk].elements}",
                code="checkpoint-mismatch",
            )
        self.set_value(chunk, as_memoryview(content["value"].contiguous()), replace=True)
        self.optimizers[chunk].restore_full_state(content)

    def set_optimizer_state(self, chunk: int, data: Any) -> None:
        """Set the optimizer state of a chunk.

        Args:
            chunk: Number of the chunk.
            data: A result of `optimizer_state`, or the same from a checkpoint.
        """
        self.optimizers[chunk].restore(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
