"""Whether the ranks still train one model: looked at now and then, without any of them waiting for another."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.checks.cross_rank import common
from distrib.training.checksums import split_for_sum
from distrib.training.collectives import collect_if_complete, gather_objects, publish
from distrib.training.strategies.ddp_module import is_in_join
from distrib.training.world import World

_AFTER_STEPS = frozenset({10, 30, 100, 300, 1_000, 3_000, 10_000})
_MUCH = 1e-3
"""How far two ranks' values may be from each other, as a share of their size. Processors and GPUs of different kinds round
differently, by 1e-7 a step; gradients that nobody averages part ranks by about the learning rate."""
_SMALL = 1e-3
"""The size that values have at least, in this comparison: what is next to zero may be so on each rank by itself."""
_ROUNDING = 1e-2
"""How much less far from each other they may be before anything has learnt."""
_UNKNOWN = -1.0
"""A norm that none is."""
_WHY_RATES = (
    "the ranks train apart. A schedule that follows what was measured (ReduceLROnPlateau) must be told the same on every rank, "
    "such as job.all_reduce(loss)"
)
_WHY = (
    "the ranks train apart. What model(...) and its methods return is averaged, where model is what job.prepare returned; what its "
    "parts compute by themselves is each rank's own, and so is what a script changes in parameters, gradients that it sets by "
    "itself (p.grad = job.all_reduce(gradient) averages them), or a step() that is not called on all ranks alike"
)


def check_same_values(models: Sequence[nn.Module]) -> None:
    """Raises TrainingError, on every rank, where training begins with other values in a parameter than rank 0's. Every rank.

    Rounding is no difference: what a script has changed for a while (sharpness-aware minimization) does not come back exactly.
    """
    own = [_Digest.of(name, values).no_more_than_rounding() for model in models for name, values in common(model)]
    if not own:
        return
    all_ = gather_objects([(digest.sum, digest.norm) for digest in own])
    for rank, found in enumerate(all_):
        for digest, first, other in zip(own, all_[0], found, strict=False):
            if digest._replace(sum=first[0], norm=first[1]).is_far_from(*other):
                raise TrainingError(
                    f"training begins with other values in {digest.name} on rank {rank} than on rank 0",
                    hint="load or compute weights before job.prepare, which hands out rank 0's, or load them on every rank, "
                    "as job.restore does",
                )


class Drift:
    """Tells of what ranks should have alike, and do not: parameters of `models()`, and `rates()`, the learning rates and their names.

    Ranks write sums of theirs into the store that they met in, and rank 0 reads those when all are there. An exchange would hang
    where the ranks have come to different numbers of steps, which is one way to train apart.
    """

    def __init__(
        self,
        world: World,
        models: Callable[[], Sequence[nn.Module]],
        rates: Callable[[], Sequence[tuple[str, float]]] = tuple,
    ) -> None:
        self._world, self._models, self._rates = world, models, rates
        self._steps = 0
        self._asked: dict[int, list[_Digest]] = {}
        """By the number of steps, what rank 0 had then, until it has been compared with what all others have written."""
        self._told = False

    def after(self, steps: int) -> None:
        """The job's optimizers have taken so many steps, all together."""
        begun, self._steps = self._steps, steps
        if steps != begun and steps in _AFTER_STEPS and not self._told:
            own = [_Digest.of_rate(name, rate) for name, rate in self._rates()]
            own += [_Digest.of(name, values) for model in self._models() for name, values in common(model)]
            if self._world.rank:
                numbers = [number for digest in own for number in (digest.sum, digest.norm)]
                publish(f"drift/{steps}", self._world.rank, " ".join(map(str, numbers)))
            else:
                self._asked[steps] = own
        self.hear()

    def hear(self) -> None:
        """Rank 0 compares with what the others have written meanwhile."""
        ranks = range(1, self._world.size)
        for steps, own in [*self._asked.items()]:
            if left := collect_if_complete(f"drift/{steps}", ranks):
                del self._asked[steps]
                for rank, text in zip(ranks, left, strict=True):
                    self._compare(steps, own, rank, [float(number) for number in text.split()])

    def _compare(self, steps: int, own: Sequence[_Digest], rank: int, numbers: Sequence[float]) -> None:
        for digest, sum_, norm in zip(own, numbers[::2], numbers[1::2], strict=False):
            if not self._told and digest.is_far_from(sum_, norm):
                self._told = True
                what = f"after {steps} steps {digest.name} is another on rank {rank} than on rank 0"
                print(f"distrib: warning: {what}: {digest.why}", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """The job ends. To be called before the last barrier, and `hear_of_steps` after it."""
        rates = [repr(rate) for _, rate in self._rates()]
        publish("drift/all", self._world.rank, " ".join([str(self._steps), *rates]))

    def parted(self) -> str:
        """Which rank has taken more steps than another, in words; empty where none has. To be called after all have left."""
        taken = [int(steps) for steps, *_ in self._all_left()]
        if not taken or any(map(is_in_join, self._models())):
            return ""
        most, least = (taken.index(pick(taken)) for pick in (max, min))
        return "" if most == least else f"rank {most} has taken {taken[most]} steps, rank {least} {taken[least]}"

    def hear_of_steps(self) -> None:
        """Rank 0 tells of ranks that have taken more steps than others, or have other learning rates."""
        self.hear()
        if self._world.rank or self._told or any(map(is_in_join, self._models())):
            return
        if what := self.parted():
            print(f"distrib: warning: {what}: {_WHY}", file=sys.stderr, flush=True)
            return
        own = [_Digest.of_rate(name, rate) for name, rate in self._rates()]
        for rank, (_, *rates) in enumerate(self._all_left()):
            self._compare(
                self._steps, own, rank, [number for rate in map(float, rates) for number in (rate, abs(rate))]
            )

    def _all_left(self) -> list[list[str]]:
        """What each rank has left behind, in their order; nothing where it cannot be had."""
        return [text.split() for text in collect_if_complete("drift/all", range(self._world.size))]


class _Digest(NamedTuple):
    """Two numbers of a parameter's values, which are others where the values are, and why they may be."""

    name: str
    size: int
    much: float
    sum: float
    norm: float
    why: str = _WHY

    @classmethod
    def of_rate(cls, name: str, rate: float) -> _Digest:
        return cls(name, 0, _MUCH, rate, abs(rate), _WHY_RATES)

    @classmethod
    def of(cls, name: str, values: torch.Tensor) -> _Digest:
        """Both are `_UNKNOWN` for what torch cannot add up, or has no memory for."""
        values = values.detach()
        much = max(_MUCH, 10 * torch.finfo(values.dtype).eps) if values.is_floating_point() else _MUCH
        try:
            parts = split_for_sum(torch.view_as_real(values) if values.is_complex() else values)
            sum_ = torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum().item()
            norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
            norm = torch.linalg.vector_norm(torch.stack(norms)).item()
        except (RuntimeError, NotImplementedError, TypeError):
            sum_ = norm = _UNKNOWN
        return cls(name, values.numel(), much, sum_, norm)

    def no_more_than_rounding(self) -> _Digest:
        """The same for values that have learnt nothing yet."""
        return self._replace(much=self.much * _ROUNDING)

    def is_far_from(self, sum_: float, norm: float) -> bool:
        if _UNKNOWN in (self.norm, norm):
            return False
        if not (math.isfinite(self.sum) and math.isfinite(sum_)):
            return math.isfinite(self.sum) != math.isfinite(sum_)
        scale = max(self.norm, norm, _SMALL * math.sqrt(self.size))
        return abs(self.sum - sum_) > self.much * scale or abs(self.norm - norm) > self.much * scale
