"""Whether the ranks do the same thing, to the same things: asked before they wait for each other over it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from distrib.errors import TrainingError
from distrib.training.collectives import gather_if_different

T = TypeVar("T")


def check_alike(things: Sequence[Any], models: Sequence[nn.Module], **options: Any) -> None:
    """Raises TrainingError, on every rank, where one prepares other things than rank 0, or another model, or with other `options`.

    Every rank. `models` are those that were prepared before, of which optimizers may have parameters.
    """
    every = [*models, *(thing for thing in things if isinstance(thing, nn.Module))]
    names: dict[torch.Tensor, str] = {
        parameter: name for model in every for name, parameter in model.named_parameters()
    }
    said = [f"{name}={value!r}" for name, value in options.items()]
    all_ = gather_if_different([*(_described(thing, names) for thing in things), [_OPTIONS, *said]])
    if not all_:
        return
    other = next(rank for rank, found in enumerate(all_) if found != all_[0])
    raise TrainingError(
        f"rank {other} prepares something else than rank 0: {_difference(all_[0], all_[other])}",
        hint="every rank must make the same model and prepare the same things in the same order",
    )


def common(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a prepared model that all ranks must have alike, and their names."""
    inner = model
    if isinstance(model, DistributedDataParallel):
        if model.process_group.size() < dist.get_world_size():  # the script's own
            return []
        inner = model.module
    own = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
    for name, module in inner.named_modules():
        if getattr(module, "max_norm", None) is not None:  # an embedding that writes into its rows as it reads them
            own.update(f"{name}.{parameter}".lstrip(".") for parameter, _ in module.named_parameters(recurse=False))
    return [(name, values) for name, values in inner.named_parameters() if name not in own]


_OPTIONS = "the options of job.prepare"


def _described(thing: Any, names: Mapping[torch.Tensor, str]) -> list[str]:
    """What must be the same on all ranks, in words: the kind, then each parameter and buffer, which have these names."""
    kind = type(thing).__name__
    if isinstance(thing, DataLoader) and not isinstance(thing.dataset, IterableDataset):
        # Of other lengths some ranks would wait for a last batch that others do not have.
        size = f" in batches of {thing.batch_size}" if thing.batch_size else ""
        rest = ", without an incomplete last one" if thing.drop_last else ""
        counted: Any = thing.dataset if hasattr(thing.dataset, "__len__") else thing.sampler
        samples = ""
        with contextlib.suppress(TypeError):  # batches of a sampler of the script's need no length
            samples = f" of {len(counted)} samples"
        return [f"{kind}{samples}{size}{rest}"]
    if isinstance(thing, Optimizer):  # all get the main rank's settings, group by group
        groups = enumerate(thing.param_groups)
        return [
            kind,
            *(
                f"{names.get(p, '')} {list(p.shape)} of group {number}"
                for number, group in groups
                for p in group["params"]
            ),
        ]
    if not isinstance(thing, nn.Module):
        return [kind]
    parameters = [
        f"{name} {list(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in thing.named_parameters()
    ]
    return [kind, *parameters, *(f"{name} {list(b.shape)} {b.dtype}" for name, b in thing.named_buffers())]


def _difference(first: list[list[str]], other: list[list[str]]) -> str:
    if [thing[0] for thing in first] != [thing[0] for thing in other]:
        return f"{_listed([thing[0] for thing in other[:-1]])}, not {_listed([thing[0] for thing in first[:-1]])}"
    for one, two in zip(first, other, strict=True):
        for a, b in zip(one, two, strict=False):
            if a != b:
                return (
                    f"in {one[0]}, {'' if one[0] == _OPTIONS else 'parameter or buffer '}{b.strip()}, not {a.strip()}"
                )
        if len(one) != len(two):
            longer, word = (two, "has") if len(two) > len(one) else (one, "lacks")
            return f"{one[0]} {word} the parameter or buffer {longer[min(len(one), len(two))]}"
    return "nothing that has a name"


def several(names: Sequence[str]) -> str:
    """The first few of them, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(words) or "nothing"
