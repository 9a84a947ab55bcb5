"""A table: the parameters of one optimizer, as ranks describe it and as a server holds its chunks of it."""

from __future__ import annotations

import io
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import torch

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.parameter_server.partitioning import Chunk, Parameter, cut
from distrib.training.parameter_server.server_optimizer import Recipe, Updater, by_own_momentum, share_of_rate
from distrib.training.parameter_server.shared_memory import is_borrowed
from distrib.training.parameter_server.update_rules import Shard, Update

Wire = Literal["fp32", "bf16", "fp16"]
STATES = {"SGD": 1, "RMSprop": 1, "Adagrad": 1, "Adafactor": 0}
"""Tensors of a parameter's size that an optimizer keeps at most, where that is not two."""

_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Description(msgspec.Struct, frozen=True):
    """What all ranks must agree on, and what a server needs to know, of one optimizer and its parameters."""

    recipe: Recipe
    parameters: tuple[Parameter, ...]
    options: tuple[dict[str, Any], ...]
    """The settings of each parameter group."""
    servers: int
    wire: Wire = "fp32"
    shared: bool = False
    """Whether all workers share the servers' memory."""
    pushers: int = 1
    """How many there are of hosts whose workers push as one, and of other workers."""

    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all servers."""
        return cut(self.parameters, self.servers, whole=self.recipe.whole, shared=self.shared)

    def differs(self, other: Description) -> str:
        """What is not the same in `other`, in words; empty where they agree. Settings may differ: learning rates do."""
        if self.recipe != other.recipe:
            return f"its optimizer is {other.recipe.name}, not {self.recipe.name}"
        if len(self.parameters) != len(other.parameters):
            return f"its optimizer has {len(other.parameters)} parameters, not {len(self.parameters)}"
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if mine != theirs:
                return f"its parameter {theirs.name} is {_shown(theirs)}, where others have {mine.name}, {_shown(mine)}"
        return "" if self.wire == other.wire else f"it sends {other.wire}, not {self.wire}"


def _shown(parameter: Parameter) -> str:
    return f"{parameter.kind} {list(parameter.shape)} in group {parameter.group}"


def wire_dtype(wire: Wire, kind: str) -> torch.dtype:
    """In which format numbers of `kind` travel."""
    own: torch.dtype = getattr(torch, kind)
    return _WIRE.get(wire, own)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, where they are."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # before Python 3.12 numpy cannot say


def _bytes_of(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


class Pool:
    """Memory that is used again and again: pages fresh from the kernel cost more than the copy into them."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """`size` bytes of whatever content."""
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu")

    def give(self, memory: torch.Tensor) -> None:
        """Nobody uses it any more."""
        if is_borrowed(memory):
            return
        self._free.setdefault(memory.numel(), []).append(memory)

    def clear(self) -> None:
        """What is free now is of sizes that nobody may need again."""
        self._free.clear()


class _Published:
    """A chunk as it is sent to workers; kept while it is under way."""

    def __init__(self, version: int, memory: torch.Tensor) -> None:
        self.version, self.memory, self.users = version, memory, 0


class Table:
    """One server's chunks of a table: values, optimizers, and the state machine that decides about them."""

    def __init__(
        self, number: int, description: Description, server: int, members: Iterable[int], strategy: Strategy, pool: Pool
    ) -> None:
        self.number, self.description, self.strategy = number, description, strategy
        self.chunks = {chunk.number: chunk for chunk in description.chunks() if chunk.server == server}
        self.shard = Shard(self.chunks, members, strategy.staleness)
        self.options: dict[int, list[dict[str, Any]]] = {}  # the settings that each worker sent last
        self.last_options = list(description.options)  # and the last of all
        self.staleness: Counter[int] = Counter()
        self.updaters: dict[int, Updater] = {}
        self._pool = pool
        self._published: dict[int, _Published] = {}
        self._copies: dict[int, tuple[int, weakref.ref[Any]]] = {}  # what `copied` gave, and of which version
        self._seen: dict[tuple[int, int], torch.Tensor] = {}  # what each worker has, for delay compensation

    @property
    def is_set(self) -> bool:
        """Whether every chunk has its first value."""
        return len(self.updaters) == len(self.chunks)

    def dtype(self, chunk: int) -> torch.dtype:
        """The format in which the chunk travels."""
        return wire_dtype(self.description.wire, self.chunks[chunk].kind)

    def wire_bytes(self, chunk: int) -> int:
        """The size of the chunk on the wire."""
        return self.chunks[chunk].elements * self.dtype(chunk).itemsize

    def memory_bytes(self) -> int:
        """What this server needs of memory: values, what is under way, the optimizer's state, and a gradient of all who push."""
        pushers = self.description.pushers
        state = STATES.get(self.description.recipe.name, 2)
        if (
            self.strategy.momentum_correction
            and state
            and any(group.get("momentum") for group in self.description.options)
        ):
            state += pushers  # of which each has its own
        if self.strategy.delay_compensation:
            state += pushers  # the values that each has
        return sum(chunk.bytes for chunk in self.chunks.values()) * (2 + state + pushers)

    def set(self, chunk: int, value: Any, *, replace: bool) -> None:
        """Gives a chunk its value, bytes in the servers' format: the first one, or any with `replace`."""
        at = self.chunks[chunk]
        if chunk not in self.updaters:
            like = self.description.parameters[at.pieces[0].parameter]
            shape = like.shape if self.description.recipe.whole else (at.elements,)
            self.updaters[chunk] = Updater(
                self.description.recipe,
                torch.empty(shape, dtype=getattr(torch, at.kind), device="cpu"),
                self.description.options[at.group],
            )
        elif not replace:
            return
        target = self.updaters[chunk].value.data.view(-1)
        target.copy_(torch.frombuffer(value, dtype=target.dtype))
        self._forget(chunk)

    def value(self, chunk: int) -> torch.Tensor:
        """The chunk's present value, flat, in the servers' format. Not a copy."""
        return self.updaters[chunk].value.data.view(-1)

    def copied(self, chunk: int) -> memoryview:
        """The same as bytes that do not change: one copy for all who ask for a version, for as long as it is on its way to any."""
        version = self.shard.version(chunk)
        of_version, kept = self._copies.get(chunk, (-1, None))
        array = kept() if kept and of_version == version else None
        if array is None:
            array = self.value(chunk).clone().view(torch.uint8).numpy()
            self._copies[chunk] = version, weakref.ref(array)
        return memoryview(array)  # type: ignore[arg-type]  # as in `raw`

    # -- updates ----------------------------------------------------------------------------------------------------

    def effective(
        self, chunk: int, updates: tuple[Update, ...], settings: list[dict[str, Any]] | None
    ) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor | None]:
        """The gradient and the settings with which the chunk is updated, and the memory to give back then, if any.

        `settings` are those of the parameter groups, None: as described.
        """
        at, shape = self.chunks[chunk], self.updaters[chunk].value.shape
        dtype, target = self.dtype(chunk), getattr(torch, at.kind)
        first = updates[0]
        result = first.gradient.view(dtype)
        memory = None if is_borrowed(first.gradient) else first.gradient
        changes = len(updates) > 1 or self.strategy.delay_compensation is not None
        if dtype != target or (changes and memory is None):
            memory = self._pool.take(at.bytes)
            result = memory.view(target).copy_(result)
            self._pool.give(first.gradient)
        if len(updates) > 1:
            total = sum(update.weight for update in updates)
            result.mul_(first.weight / total)
            for update in updates[1:]:
                result.add_(update.gradient.view(dtype), alpha=update.weight / total)
                self._pool.give(update.gradient)
        for update in updates:
            self.staleness[update.staleness] += 1
        options = (settings or list(self.description.options))[at.group]
        if len(updates) == 1:
            options = self._corrected(chunk, result, first, options)
        return result.view(shape), options, memory

    def _corrected(self, chunk: int, gradient: torch.Tensor, update: Update, options: dict[str, Any]) -> dict[str, Any]:
        """What asynchrony does to an update, undone as far as was asked for."""
        strength = self.strategy.delay_compensation
        if strength and (seen := self._seen.get((update.worker, chunk))) is not None:
            # Zheng et al. 2016 (arXiv:1609.08326), equation 10: the outer product of the gradient with itself, of which
            # only the diagonal is used, stands for the Hessian.
            gradient.addcmul_(gradient * gradient, self.value(chunk) - seen, value=strength)
        mean = self._mean_staleness()
        if self.strategy.stale_rate:
            share = share_of_rate(self.description.recipe.name, max(update.staleness, mean))
            options = {**options, "lr": options["lr"] * share}
        if self.strategy.momentum_correction and max(update.staleness, mean) > 0:
            options = by_own_momentum(self.description.recipe, options, update.worker)
        return options

    def _mean_staleness(self) -> float:
        return sum(n * count for n, count in self.staleness.items()) / max(1, self.staleness.total())

    def apply(self, chunk: int, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        """One step of the chunk's optimizer."""
        self.updaters[chunk].apply(gradient, options)

    def give_back(self, memory: torch.Tensor | None) -> None:
        """The memory of an effective gradient is not needed any more."""
        if memory is not None:
            self._pool.give(memory)

    # -- what workers get ---------------------------------------------------------------------------------------------

    def publish(self, chunk: int, worker: int) -> tuple[memoryview, Any]:
        """The chunk's bytes as they travel, unchanging, and what to call when they are sent."""
        version = self.shard.version(chunk)
        published = self._published.get(chunk)
        if published is None or published.version != version:
            self._forget(chunk)
            memory = self._pool.take(self.wire_bytes(chunk))
            memory.view(self.dtype(chunk)).copy_(self.value(chunk))
            published = self._published[chunk] = _Published(version, memory)
        published.users += 1
        self._note(chunk, worker)

        def sent() -> None:
            published.users -= 1
            if not published.users and self._published.get(chunk) is not published:
                self._pool.give(published.memory)

        return raw(published.memory), sent

    def publish_into(self, chunk: int, worker: int, memory: torch.Tensor) -> None:
        """The same, into memory that the worker shares."""
        memory.view(self.dtype(chunk)).copy_(self.value(chunk))
        self._note(chunk, worker)

    def _note(self, chunk: int, worker: int) -> None:
        if self.strategy.delay_compensation:
            self._seen[worker, chunk] = self.value(chunk).clone()

    def _forget(self, chunk: int) -> None:
        self._copies.pop(chunk, None)
        published = self._published.pop(chunk, None)
        if published and not published.users:
            self._pool.give(published.memory)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def saved(self, chunk: int) -> bytes:
        """All there is of a chunk, to be opened with torch.load(weights_only=True)."""
        return _bytes_of({"value": self.value(chunk), **self.updaters[chunk].parts()})

    def state(self, chunk: int) -> bytes:
        """Its optimizer's state, as a checkpoint has it, to be opened in the same way."""
        return _bytes_of(self.updaters[chunk].state())

    def load(self, chunk: int, data: Any) -> None:
        """Takes over what `saved` gave."""
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if content["value"].numel() != self.chunks[chunk].elements:
            raise TrainingError(f"chunk {chunk} does not fit: {content['value'].numel()} elements")
        self.set(chunk, raw(content["value"].contiguous()), replace=True)
        self.updaters[chunk].take_over(content)

    def restore(self, chunk: int, data: Any) -> None:
        """Takes over an optimizer's state of the chunk."""
        self.updaters[chunk].restore(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
