"""State that each rank has for itself in a checkpoint: random number generators, and what the script saves per rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from distrib import units
from distrib.training.checkpoint import checkpoint_format
from distrib.training.checkpoint.checkpoint_format import has_state
from distrib.training.collectives import JobCollectives, collect, discard, publish, to_bytes
from distrib.training.strategies.base import ElasticStrategy, TrainingStrategy
from distrib.utils.log import get_logger
from distrib.utils.ranges import ranges

log = get_logger("checkpoint")


@dataclass(frozen=True, kw_only=True)
class StateExchangeSettings:
    """Settings of the exchange of the ranks' states in a save."""

    wait_seconds: float = 10.0
    """Longest wait for other ranks: a part of the time that a stopped job has (`--grace`)."""
    short_wait_seconds: float = 0.5
    """The wait after one that was too short: the script saves on the main rank only."""
    kept_saves: int = 8
    """Saves of which the store holds the states: a rank may be some saves ahead of the main rank."""


SETTINGS = StateExchangeSettings()


class RankStates:
    """The ranks' own states: gathered where a checkpoint is written, and handed back by rank."""

    def __init__(self, strategy: TrainingStrategy, collectives: JobCollectives) -> None:
        """Begin with the first save.

        Args:
            strategy: The training strategy.
            collectives: The job's collectives.
        """
        self._world, self._device, self._collectives = strategy.world, strategy.device, collectives
        self._elastic = isinstance(strategy, ElasticStrategy)
        self._number, self._wait_seconds = 0, SETTINGS.wait_seconds

    def gather(
        self, objects: dict[str, Any], per_rank: dict[str, Any] | None, *, is_writer: bool
    ) -> list[torch.Tensor | None]:
        """Gather the states of all ranks for a checkpoint. Collective with `per_rank`; else other ranks do not wait.

        Args:
            objects: The objects and values of the checkpoint.
            per_rank: Objects and values of this rank; None for none.
            is_writer: True if this rank writes a checkpoint.

        Returns:
            The serialized states by rank [bytes]; None for ranks that do not save. Empty if this rank writes none, or if the checkpoint
            has only weights and values.
        """
        if per_rank is None and not resumes_training(objects):
            return []
        own = to_bytes(checkpoint_format.pack(per_rank or {}, _random_state(objects, self._device)))
        states: list[bytes | None]
        if per_rank is not None:
            states = self._collectives.gather(own)
        elif self._elastic or self._world.size == 1:
            states = [own if rank == self._world.rank else None for rank in range(self._world.size)]
        else:
            states = self._exchange(own, is_writer=is_writer)
        return [state and torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]  # type: ignore[misc]

    def restore(
        self,
        states: Sequence[torch.Tensor | None],
        objects: dict[str, Any],
        per_rank: dict[str, Any] | None,
        *,
        source: str,
    ) -> dict[str, Any]:
        """Restore this rank's state, if as many ranks have saved theirs.

        Args:
            states: The result of `gather` when the checkpoint was written.
            objects: The objects that are restored.
            per_rank: Objects to load and defaults of this rank; None for none.
            source: The file, for messages.

        Returns:
            The plain values of this rank, by name.
        """
        rank, size = self._world.rank, self._world.size
        own = states[rank] if len(states) == size else None
        if own is None:
            if per_rank and len(states) not in (0, size) and rank == 0:
                log.warning(
                    f"{source} is of {units.count_text(len(states), 'rank')}, this job has {size}: per_rank keeps what the script gave\n"
                    "  restore it on as many ranks, or save what all ranks need without per_rank"
                )
            return plain_values(per_rank or {})
        name = f"{source}, rank {rank}"
        values, generators = checkpoint_format.read(own.numpy().data, per_rank or {}, self._device, source=name)
        if resumes_training(objects) and all(state is not None for state in states):
            _restore_random_state(generators, objects, self._device)
        return values

    def _exchange(self, own: bytes, *, is_writer: bool) -> list[bytes | None]:
        """Publish the state of this rank, and read those of all ranks where a checkpoint is written."""
        self._number += 1
        publish(f"save/{self._number}", self._world.rank, own)
        discard(f"save/{self._number - SETTINGS.kept_saves}", self._world.rank)
        if not is_writer:
            return []
        states = collect(f"save/{self._number}", range(self._world.size), self._wait_seconds)
        missing = [rank for rank, state in enumerate(states) if state is None]
        if missing and self._world.rank == 0 and self._wait_seconds == SETTINGS.wait_seconds:
            log.warning(
                f"the checkpoint has no random state of rank{'s' * (len(missing) > 1)} {ranges(missing)}, which did not call job.save "
                f"within {SETTINGS.wait_seconds:g} s\n  call job.save on every rank: only the main rank writes"
            )
        self._wait_seconds = SETTINGS.short_wait_seconds if missing else SETTINGS.wait_seconds
        return states


def resumes_training(objects: dict[str, Any]) -> bool:
    """Test if a training resumes from these objects: not only from weights and values.

    Args:
        objects: Objects and values by name.

    Returns:
        True if there is an optimizer, a loader or another object with a state that is not a module.
    """
    return any(has_state(thing) and not isinstance(thing, nn.Module) for thing in objects.values())


def plain_values(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the objects that have a state.

    Args:
        objects: Objects and values by name.
    """
    return {name: thing for name, thing in objects.items() if not has_state(thing)}


def _random_state(objects: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's random number generators: torch's, its GPU's, NumPy's, Python's, and loaders' own ones."""
    numpy: Any = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = [numpy[0], torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return {**state, "loaders": {name: generator.get_state() for name, generator in _generators(objects).items()}}


def _restore_random_state(state: dict[str, Any], objects: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    for name, generator in _generators(objects).items():
        if name in state["loaders"]:
            generator.set_state(state["loaders"][name])


def _generators(objects: dict[str, Any]) -> dict[str, torch.Generator]:
    owned = {name: getattr(thing, "generator", None) for name, thing in objects.items()}
    return {name: generator for name, generator in owned.items() if isinstance(generator, torch.Generator)}
