"""Check that all ranks prepare the same objects, before they wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, Subset

from distrib.errors import TrainingError
from distrib.training.checksums import sequence_digest
from distrib.training.collectives import gather_objects

SEED_HINT = "call torch.manual_seed(SEED) before random_split on every rank, or pass it a seeded generator"
_INDICES = "Subset.indices"


def check_identical(things: Sequence[Any], **options: Any) -> None:
    """Compare types, counts and options of the objects to prepare with those of rank 0. Collective.

    Args:
        things: The arguments of `job.prepare`.
        options: The options of `job.prepare`.

    Raises:
        TrainingError: On every rank, if one rank differs from rank 0.
    """
    own = [*map(_describe, things), ("the options of job.prepare", *(f"{k}={v!r}" for k, v in options.items()))]
    described = gather_objects(own)
    for rank, other in enumerate(described):
        if other != described[0]:
            difference = _first_difference(described[0], other)
            raise TrainingError(
                f"rank {rank} prepares something else than rank 0: {difference}",
                hint=SEED_HINT
                if _INDICES in difference
                else "create the same models and prepare the same things in the same order on every rank",
                code="ranks-differ",
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


def _describe(thing: Any) -> tuple[str, ...]:
    """Describe the properties that must be identical on all ranks: first the type, then counts. DDP compares shapes."""
    kind = type(thing).__name__
    if isinstance(thing, DataLoader) and not isinstance(thing.dataset, IterableDataset):
        counted: Any = thing.dataset if hasattr(thing.dataset, "__len__") else thing.sampler
        samples = ""
        with contextlib.suppress(TypeError):  # a batch sampler needs no length of the dataset
            samples = f" of {len(counted)} samples"
        size = f"batch_size={thing.batch_size}, drop_last={thing.drop_last}"
        return f"{kind}{samples}", size, f"{_INDICES} {subset_digest(thing.dataset)}"
    if isinstance(thing, Optimizer):
        counts = [len(group["params"]) for group in thing.param_groups]
        return kind, f"groups of {counts} parameters"
    if isinstance(thing, nn.Module):
        parameters, buffers = [*thing.parameters()], [*thing.buffers()]
        trainable = sum(parameter.requires_grad for parameter in parameters)
        described = f"{len(parameters)} parameters of {sum(p.nbytes for p in parameters)} bytes, {trainable} trainable"
        return kind, described, f"{len(buffers)} buffers of {sum(b.nbytes for b in buffers)} bytes"
    return (kind,)


def _first_difference(first: Sequence[tuple[str, ...]], other: Sequence[tuple[str, ...]]) -> str:
    kinds, other_kinds = (" and ".join(kind for kind, *_ in every[:-1]) for every in (first, other))
    if kinds != other_kinds:
        return f"{other_kinds or 'nothing'}, not {kinds or 'nothing'}"
    differences = (
        f"in {one[0]}, {b.strip()}, not {a.strip()}"
        for one, two in zip(first, other, strict=False)
        for a, b in zip(one, two, strict=False)
        if a != b
    )
    return next(differences, "another kind of dataset")
