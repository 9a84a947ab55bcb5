"""Detect diverged replicas: compare a checksum of every parameter across ranks, without making ranks wait."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distrib.errors import TrainingError
from distrib.training.checksums import split_for_sum
from distrib.training.collectives import collect_if_complete, gather_objects, publish
from distrib.training.step_observer import StepObserver
from distrib.training.strategies.ddp_module import is_in_join
from distrib.training.training_state import TrainingState
from distrib.utils.log import get_logger

log = get_logger("checks")


CHECK_EVERY_STEPS = 100
"""Steps between two comparisons: one costs about as much as reading the parameters once."""
_CAUSES = (
    "replicas diverge\n  compute losses with the prepared model, change parameters and learning rates equally on every rank, "
    "call step() equally often"
)


@dataclass(frozen=True, kw_only=True)
class DivergenceTolerance:
    """Differences of sums and norms that count as rounding."""

    relative: float = 1e-3
    """Difference relative to the norm. Rounding differs by 1e-7 per step between devices; missing averages by about the learning rate."""
    initial_fraction: float = 1e-2
    """Fraction of the tolerance that is allowed before the first step."""
    min_rms: float = 1e-3
    """Least root mean square for the tolerance. Parameters near zero would otherwise differ by rounding alone."""


TOLERANCE = DivergenceTolerance()


class _Checksum(NamedTuple):
    """Sum and norm of a parameter; -1 as the norm if torch cannot add it up."""

    name: str
    elements: int
    tolerance: float
    sum: float
    norm: float

    def differs(self, other: Sequence[float], fraction: float = 1.0) -> bool:
        """Compare with the sum and norm of another rank; `fraction` is the part of the tolerance that is allowed."""
        if -1.0 in (self.norm, other[1]):
            return False
        if not all(map(math.isfinite, (self.sum, *other))):
            return math.isfinite(self.sum) != math.isfinite(other[0])
        scale = fraction * self.tolerance * max(self.norm, other[1], TOLERANCE.min_rms * math.sqrt(self.elements))
        return abs(self.sum - other[0]) > scale or abs(self.norm - other[1]) > scale


def compute_checksums(models: Sequence[nn.Module]) -> list[_Checksum]:
    """Compute the checksum of every parameter that must be identical on all ranks.

    Args:
        models: Prepared models.

    Returns:
        One checksum per parameter, in the order of the models.
    """
    return [parameter_checksum(name, values) for model in models for name, values in _replicated_parameters(model)]


def _check_initial_values(models: Sequence[nn.Module]) -> None:
    """Verify before the first step that parameters are those of rank 0. Collective. Raises on every rank."""
    own = compute_checksums(models)
    every = gather_objects([(one.sum, one.norm) for one in own]) if own else []
    for rank, other in enumerate(every):
        for first, values, checksum in zip(every[0], other, own, strict=False):
            if checksum._replace(sum=first[0], norm=first[1]).differs(values, TOLERANCE.initial_fraction):
                raise TrainingError(
                    f"training begins with other values in {checksum.name} on rank {rank} than on rank 0",
                    hint="load weights before job.prepare, which broadcasts rank 0's, or on every rank, as job.restore does",
                    code="weights-differ",
                )


class DivergenceCheck(StepObserver):
    """Comparison of parameters between ranks every N steps and when the job closes, which names the rank that differs.

    Ranks publish their checksums in the rendezvous store, and rank 0 reads them once all are there: a collective would hang if
    ranks take different numbers of steps.
    """

    def __init__(self, state: TrainingState, every_steps: int) -> None:
        """Create the check of this rank.

        Args:
            state: The models of the job.
            every_steps: Steps between two comparisons; 0 compares steps only, and the parameters before the first one.
        """
        self._state, self._world, self._every = state, state.strategy.world, every_steps
        self._steps = 0
        self._pending: dict[int, list[_Checksum]] = {}
        """On rank 0: its checksums that were not compared yet, by number of steps."""
        self._has_begun = self._reported = False

    def before_step(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            _check_initial_values(self._state.models)

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        """Publish this rank's checksums every N steps, and compare those that are complete.

        Args:
            step: Not used.
            updated: Not used.
        """
        before, self._steps = self._steps, self._state.steps
        if self._every and self._steps != before and self._steps % self._every == 0 and not self._reported:
            own = compute_checksums(self._state.replicated_models)
            if self._world.rank:
                publish(f"checksums/{self._steps}", self._world.rank, " ".join(f"{one.sum} {one.norm}" for one in own))
            else:
                self._pending[self._steps] = own
        self._compare_published()

    def compare_steps(self) -> str:
        """Compare the numbers of steps of all ranks, and warn on rank 0. Collective.

        Returns:
            The ranks with most and fewest steps; empty if all have taken as many, or a model is in DDP's `join()`.
        """
        steps = gather_objects(self._steps)
        most, least = steps.index(max(steps)), steps.index(min(steps))
        if most == least or self._in_join:
            return ""
        unequal = f"rank {most} has taken {steps[most]} steps, rank {least} {steps[least]}"
        self._warn(unequal)
        return unequal

    def on_close(self) -> None:
        self._compare_published()
        self.compare_steps()
        if self._every and not self._in_join:
            own = compute_checksums(self._state.replicated_models)
            for rank, values in enumerate(gather_objects([(one.sum, one.norm) for one in own])):
                self._compare(own, rank, values)

    @property
    def _in_join(self) -> bool:
        """True if ranks may take different numbers of steps."""
        return any(map(is_in_join, self._state.models))

    def _compare_published(self) -> None:
        ranks = range(1, self._world.size)
        for steps, own in [*self._pending.items()]:
            for rank, text in zip(ranks, collect_if_complete(f"checksums/{steps}", ranks), strict=False):
                self._pending.pop(steps, None)
                numbers = [float(number) for number in text.split()]
                self._compare(own, rank, [*zip(numbers[::2], numbers[1::2], strict=True)], f"after {steps} steps ")

    def _compare(self, own: list[_Checksum], rank: int, values: Sequence[Sequence[float]], when: str = "") -> None:
        for checksum, other in zip(own, values, strict=False):
            if checksum.differs(other):
                self._warn(f"{when}{checksum.name} differs on rank {rank} from rank 0")

    def _warn(self, what: str) -> None:
        if not self._reported and self._world.rank == 0:
            log.warning(f"{what}: {_CAUSES}")
        self._reported = True


def parameter_checksum(name: str, values: torch.Tensor) -> _Checksum:
    """Compute the sum and the norm of a parameter.

    Args:
        name: Its name in reports.
        values: Its values, of any type and layout.
    """
    precision = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    tolerance = max(TOLERANCE.relative, 10 * precision)
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    total, norm = 0.0, -1.0
    with contextlib.suppress(RuntimeError, TypeError):  # integers, sparse tensors, or too little memory
        parts = split_for_sum(values)
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        total = torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum().item()
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()
    return _Checksum(name, values.numel(), tolerance, total, norm)


def _replicated_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the parameters that must be identical on all ranks."""
    inner = model
    if isinstance(model, DistributedDataParallel):
        if model.process_group.size() < dist.get_world_size():  # the script's own groups
            return []
        inner = model.module
    own = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
    for name, module in inner.named_modules():
        if getattr(module, "max_norm", None) is not None:  # an embedding that writes into the rows that it reads
            own.update(f"{name}.{parameter}".lstrip(".") for parameter, _ in module.named_parameters(recurse=False))
    return [(name, values) for name, values in inner.named_parameters() if name not in own]
