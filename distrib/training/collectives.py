"""Communication between the ranks of a job besides gradients: objects, numbers, many tensors in one message, notes in the store."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from distrib.errors import DistribError, TrainingError
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.world import World

T = TypeVar("T")

Operation = Literal["mean", "sum", "max", "min"]
MESSAGE_BYTES = 250 << 20
"""The largest message of a broadcast, as in DistributedDataParallel."""
IS_AVERAGED = "distrib_is_averaged"
"""Attribute of a tensor that is already a mean over the ranks. A gradient with it needs no all-reduce."""
TYPES_OF_BACKENDS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip
"""Types that Gloo and NCCL carry. Other ones are sent as bytes."""
_WIDER = {
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64),
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
}
"""By type the one in which a mean is computed, as its sum may overflow."""
_SENT_AS = {torch.int16: torch.int32}
"""Replacement of types that neither Gloo nor NCCL can sum."""
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# Objects


def gather_objects(own: T) -> list[T]:
    """Gather one picklable object of every rank. Collective.

    Args:
        own: This rank's object.

    Returns:
        The objects of all ranks, by rank.
    """
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects


def find_differing(own: Sequence[str]) -> list[bool]:
    """Compare strings between ranks, position by position. Collective.

    Args:
        own: This rank's strings, as many on every rank. Empty strings are ignored.

    Returns:
        For each position, True if two ranks have different strings.
    """
    return [len(set(filter(None, column))) > 1 for column in zip(*gather_objects(list(own)), strict=True)]


def to_bytes(thing: Any) -> bytes:
    """Serialize an object with `torch.save`.

    Args:
        thing: The object; it may contain tensors.

    Returns:
        The serialized object.
    """
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


# Tensors


def broadcast_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors with those of rank 0. Collective.

    Args:
        tensors: Tensors of any types and devices, of the same shapes on every rank.
    """
    for part in _group_by_device([_real(tensor.detach()) for tensor in tensors]):
        with torch.no_grad():
            if known := [tensor for tensor in part if tensor.is_cuda and tensor.dtype in TYPES_OF_BACKENDS]:
                # With the fewest kernels, as DDP does.
                dist._broadcast_coalesced(dist.group.WORLD, known, MESSAGE_BYTES, 0)  # type: ignore[attr-defined, arg-type]
                part = [tensor for tensor in part if tensor.dtype not in TYPES_OF_BACKENDS]
            if not part:
                continue
            message = torch.cat([_bytes(tensor) for tensor in part])
            dist.broadcast(message, src=0)
            if dist.get_rank():
                sizes = [tensor.numel() * tensor.element_size() for tensor in part]
                for tensor, piece in zip(part, torch.split(message, sizes), strict=True):
                    # A piece may start at an unaligned address, which a copy of bytes allows.
                    _copy_bytes(tensor, piece)


def flatten_tensors(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors.

    Args:
        tensors: Tensors of any shapes on one device; complex ones count as pairs of real numbers.

    Returns:
        A tensor [elements] of float32, or float64 if one tensor has that type.
    """
    parts = [_real(tensor.detach()).reshape(-1) for tensor in tensors]
    wide = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(wide) for part in parts])


def unflatten_tensors(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the elements of a flat tensor into tensors. The reverse of `flatten_tensors`.

    Args:
        flat: A tensor [elements].
        tensors: The destinations, in the order of `flat`.
    """
    with torch.no_grad():
        reals = [_real(tensor.detach()) for tensor in tensors]
        for real, piece in zip(reals, torch.split(flat, [real.numel() for real in reals]), strict=True):
            real.copy_(piece.view(real.shape))


def _group_by_device(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by their device, without empty ones."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _copy_bytes(tensor: torch.Tensor, piece: torch.Tensor) -> None:
    tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# The store of the rendezvous


def publish(topic: str, rank: int, text: str | bytes) -> None:
    """Write a text of one rank into the rendezvous store, without waiting for other ranks.

    Nothing is written if rank 0, which has the store, has exited.

    Args:
        topic: The name under which all ranks publish.
        rank: The rank that publishes.
        text: The text, at most 8 MB.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        store, key = _get_default_store(), _key(topic, rank)
        store.set(key, text)  # type: ignore[arg-type]  # bytes are allowed
        store.check([key])  # waits until the store has the text, which set() does not


def collect_if_complete(topic: str, ranks: Iterable[int]) -> list[str]:
    """Read the texts that ranks have published, without waiting for missing ones.

    Args:
        topic: The name under which all ranks publish.
        ranks: The ranks to read.

    Returns:
        The text of each rank, in the order of `ranks`; an empty list if one is missing or rank 0 has exited.
    """
    keys = [_key(topic, rank) for rank in ranks]
    with contextlib.suppress(RuntimeError, ValueError):
        store = _get_default_store()
        if store.check(keys):
            return [store.get(key).decode() for key in keys]
    return []


def collect(topic: str, ranks: Iterable[int], seconds: float) -> list[bytes | None]:
    """Read what ranks have published, and wait for missing ones.

    Args:
        topic: The name under which all ranks publish.
        ranks: The ranks to read.
        seconds: Longest wait.

    Returns:
        The text of each rank, in the order of `ranks`; None for ranks that did not publish in time.
    """
    keys = [_key(topic, rank) for rank in ranks]
    with contextlib.suppress(RuntimeError, ValueError):
        store = _get_default_store()
        with contextlib.suppress(RuntimeError):  # the wait was too short
            store.wait(keys, timedelta(seconds=seconds))
        return [store.get(key) if store.check([key]) else None for key in keys]
    return [None for _ in keys]


def discard(topic: str, rank: int) -> None:
    """Remove the text of one rank from the store, if it is there.

    Args:
        topic: The name under which it was published.
        rank: The rank that published it.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        _get_default_store().delete_key(_key(topic, rank))


def _key(topic: str, rank: int) -> str:
    return f"distrib/{topic}/{rank}"


# Numbers and objects


class JobCollectives:
    """Collectives of all ranks: through torch.distributed, or in mode async through the parameter servers (`elastic`)."""

    def __init__(self, world: World, elastic: ElasticStrategy | None) -> None:
        self._world, self._elastic = world, elastic

    def all_reduce(self, value: float | torch.Tensor, op: Operation) -> float | torch.Tensor:
        """Reduce a number or a tensor over all ranks. Collective. See `Job.all_reduce`.

        Args:
            value: A number or a tensor.
            op: The reduction.

        Returns:
            A float, or a new tensor.

        Raises:
            TrainingError: `op` is unknown, or `value` is neither a number nor a tensor.
        """
        if op not in _OPERATIONS:
            raise TrainingError(f"all_reduce has no op {op!r}", hint=f"use {', '.join(_OPERATIONS)}")
        if not isinstance(value, torch.Tensor):
            try:
                number = torch.tensor(float(value), dtype=torch.float64, device="cpu")
            except (TypeError, ValueError) as error:
                raise TrainingError(
                    f"all_reduce of a {type(value).__name__}", hint="give it a number or a tensor"
                ) from error
            return float(self.all_reduce(number, op))
        result = value.detach().clone(memory_format=torch.contiguous_format)
        if value.dtype is torch.bool and op in ("mean", "sum"):
            result = result.to(torch.int64)  # the number of True values
        # The sum from which a mean is computed may exceed the range of the values' type.
        wider = _WIDER.get(value.dtype) if op == "mean" else _SENT_AS.get(value.dtype)
        if wider:
            result = result.to(wider)
        if self._elastic:
            result = self._elastic.reduce(result, op)
        elif self._world.size > 1:
            dist.all_reduce(result, op=_OPERATIONS[op])
        if op == "mean":
            if not self._elastic:  # the servers know the number of present ranks
                result = result / self._world.size
            if wider:
                result = result.to(value.dtype if value.is_floating_point() else torch.get_default_dtype())
            setattr(result, IS_AVERAGED, True)
        elif wider:
            result = result.to(value.dtype)
        return result

    def gather(self, own: bytes) -> list[bytes | None]:
        """Gather the bytes of every rank. Collective.

        Args:
            own: This rank's bytes.

        Returns:
            The bytes by rank; None for ranks of mode async that are not there.
        """
        if self._elastic:
            present = self._elastic.gather(own)
            return [present.get(rank) for rank in range(self._world.size)]
        return [*gather_objects(own)] if self._world.size > 1 else [own]

    def from_main(self, work: Callable[[], T]) -> T:
        """Run a function on the main rank and broadcast its result. Collective.

        Args:
            work: Called on the main rank only. Its OSError or DistribError is raised on every rank.

        Returns:
            The result, on every rank.
        """
        return self._elastic.from_main(work) if self._elastic else self._from_rank(0, work)

    def _from_rank(self, source: int, work: Callable[[], T]) -> T:
        """Run a function on one rank and broadcast its result or error. Collective, in modes sync and local."""
        if self._world.size == 1:
            return work()
        answer: list[Any] = [None, None]
        problem: Exception | None = None
        if self._world.rank == source:
            try:
                answer = [work(), None]
            except (OSError, DistribError) as error:
                problem, answer = error, [None, str(error)]
        dist.broadcast_object_list(answer, src=source)
        if answer[1] is not None:
            raise problem or TrainingError(f"on rank {source}: {answer[1]}", code="error-on-other-rank")
        result: T = answer[0]
        return result

    def broadcast_content(self, source: int, read: Callable[[], bytes | None]) -> memoryview | None:
        """Broadcast the content of a file. Collective.

        Args:
            source: The rank that reads.
            read: Returns the content, or None if there is none. Its errors are raised as in `_from_rank`.

        Returns:
            The content, or None. Each rank holds it once, rank `source` twice for a moment.
        """
        if self._elastic or self._world.size == 1:
            data = self.from_main(read)
            return None if data is None else memoryview(data)
        mine: list[bytes | None] = []

        def size() -> int | None:
            mine.append(read())
            return None if mine[0] is None else len(mine[0])

        length = self._from_rank(source, size)
        if length is None:
            return None
        whole = torch.empty(length, dtype=torch.uint8, device="cpu")
        if mine and mine[0] is not None:
            whole.numpy().data[:] = mine[0]
            mine.clear()
        for part in torch.split(whole, MESSAGE_BYTES) if length else ():
            dist.broadcast(part, src=source)
        return whole.numpy().data
