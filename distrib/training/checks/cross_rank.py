"""Check that all ranks prepare the same objects, before they wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, Subset

from distrib.errors import TrainingError
from distrib.training.checksums import sequence_digest
from distrib.training.collectives import gather_if_different

SEED_HINT = "call torch.manual_seed(SEED) before random_split on every rank, or pass it a seeded generator"
_OPTIONS = "the options of job.prepare"
_INDICES = "Subset.indices"


def check_identical(things: Sequence[Any], models: Sequence[nn.Module], **options: Any) -> None:
    """Compare types, numbers and options of the objects to prepare with those of rank 0. Collective.

    Args:
        things: The arguments of `job.prepare`.
        models: Models that were prepared before, whose parameters an optimizer may have.
        options: The options of `job.prepare`.

    Raises:
        TrainingError: On every rank, if one rank differs from rank 0.
    """
    every = [*models, *(thing for thing in things if isinstance(thing, nn.Module))]
    names: dict[torch.Tensor, str] = {
        parameter: name for model in every for name, parameter in model.named_parameters()
    }
    own = [*(_describe(thing, names) for thing in things), [_OPTIONS, *(f"{k}={v!r}" for k, v in options.items())]]
    described = gather_if_different(own)
    for rank, other in enumerate(described):
        if other != described[0]:
            difference = _first_difference(described[0], other)
            raise TrainingError(
                f"rank {rank} prepares something else than rank 0: {difference}",
                hint=SEED_HINT
                if _INDICES in difference
                else "create the same models and prepare the same things in the same order on every rank",
            )


def subset_digest(dataset: Any) -> str:
    """Digest the indices of a Subset, as made by `random_split`, and of Subsets in it.

    Args:
        dataset: Any dataset.

    Returns:
        The digests; empty if the dataset is not a Subset.
    """
    digests = []
    while isinstance(dataset, Subset):
        digests.append(sequence_digest(dataset.indices))
        dataset = dataset.dataset
    return " ".join(digests)


def list_names(names: Sequence[str]) -> str:
    """List the first three names for a message.

    Args:
        names: The names.

    Returns:
        A text such as "a, b, c and 2 more".
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _describe(thing: Any, names: Mapping[torch.Tensor, str]) -> list[str]:
    """Describe the properties that must be identical on all ranks: first the type, then each parameter, buffer or setting."""
    kind = type(thing).__name__
    if isinstance(thing, DataLoader) and not isinstance(thing.dataset, IterableDataset):
        counted: Any = thing.dataset if hasattr(thing.dataset, "__len__") else thing.sampler
        samples = ""
        with contextlib.suppress(TypeError):  # a batch sampler needs no length of the dataset
            samples = f" of {len(counted)} samples"
        chosen = subset_digest(thing.dataset)
        size = [f"batch_size={thing.batch_size}, drop_last={thing.drop_last}"]
        return [f"{kind}{samples}", *size, *([f"{_INDICES} {chosen}"] if chosen else [])]
    if isinstance(thing, Optimizer):
        return [
            kind,
            *(
                f"{names.get(parameter, '')} {list(parameter.shape)} of group {number}"
                for number, group in enumerate(thing.param_groups)
                for parameter in group["params"]
            ),
        ]
    if not isinstance(thing, nn.Module):
        return [kind]
    parameters = [
        f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in thing.named_parameters()
    ]
    return [kind, *parameters, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in thing.named_buffers())]


def _first_difference(first: list[list[str]], other: list[list[str]]) -> str:
    kinds, other_kinds = ([described[0] for described in every[:-1]] for every in (first, other))
    if kinds != other_kinds:
        return f"{_join(other_kinds)}, not {_join(kinds)}"
    for one, two in zip(first, other, strict=True):
        for a, b in zip(one, two, strict=False):
            if a != b:
                return f"in {one[0]}, {b.strip()}, not {a.strip()}"
        if len(one) != len(two):
            longer, verb = (two, "has") if len(two) > len(one) else (one, "lacks")
            return f"{one[0]} {verb} {longer[min(len(one), len(two))]}"
    return "objects without names"


def _join(kinds: Iterable[str]) -> str:
    return " and ".join(kinds) or "nothing"
