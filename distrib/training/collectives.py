"""What the ranks of a job tell each other besides gradients: numbers, and what one of them knows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from distrib.errors import DistribError, TrainingError
from distrib.training.checks.cross_rank import IS_MEAN
from distrib.training.flat import MESSAGE_BYTES
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.world import World

T = TypeVar("T")

Operation = Literal["mean", "sum", "max", "min"]
_WIDER = {
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64),
    **dict.fromkeys((torch.float16, torch.bfloat16), torch.float32),
}
_CARRIED = {torch.int16: torch.int32}
"""What neither Gloo nor NCCL adds up, and in which type it travels."""
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Exchange:
    """Between all ranks: through torch, or where ranks may come and go (`elastic`) through the servers."""

    def __init__(self, world: World, elastic: ElasticStrategy | None) -> None:
        self._world, self._elastic = world, elastic

    def all_reduce(self, value: float | torch.Tensor, op: Operation) -> float | torch.Tensor:
        """See `Job.all_reduce`. Every rank."""
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
            result = result.to(torch.int64)  # how many are true: the sum of truths is one
        # The sum that a mean is made of may be more than the type of the values can hold.
        wider = _WIDER.get(value.dtype) if op == "mean" else _CARRIED.get(value.dtype)
        if wider:
            result = result.to(wider)
        if self._elastic:
            result = self._elastic.reduce(result, op)
        elif self._world.size > 1:
            dist.all_reduce(result, op=_OPERATIONS[op])
        if op == "mean":
            if not self._elastic:  # which knows how many are there
                result = result / self._world.size
            if wider:
                result = result.to(value.dtype if value.is_floating_point() else torch.get_default_dtype())
            setattr(result, IS_MEAN, True)
        elif wider:
            result = result.to(value.dtype)
        return result

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on the main rank, where alone it is called; what it raises is raised on every rank. Every rank."""
        return self._elastic.from_main(work) if self._elastic else self.from_rank(0, work)

    def from_rank(self, source: int, work: Callable[[], T]) -> T:
        """The same of rank `source`, where ranks go in step."""
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
            raise problem or TrainingError(f"on rank {source}: {answer[1]}")
        result: T = answer[0]
        return result

    def content(self, source: int, read: Callable[[], bytes | None]) -> memoryview | None:
        """The bytes that `read` returns on rank `source`, if it does; what it raises is raised on every rank. Every rank.

        They may be many, and many ranks of a host get them: each has them once, and rank `source` twice for a moment.
        """
        if self._elastic or self._world.size == 1:
            data = self.from_main(read)
            return None if data is None else memoryview(data)
        mine: list[bytes | None] = []

        def size() -> int | None:
            mine.append(read())
            return None if mine[0] is None else len(mine[0])

        length = self.from_rank(source, size)
        if length is None:
            return None
        whole = torch.empty(length, dtype=torch.uint8, device="cpu")
        if mine and mine[0] is not None:
            whole.numpy().data[:] = mine[0]
            mine.clear()
        for part in torch.split(whole, MESSAGE_BYTES) if length else ():
            dist.broadcast(part, src=source)
        return whole.numpy().data
