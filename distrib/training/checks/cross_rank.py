"""Whether the ranks do the same thing, to the same things: asked before they wait for each other over it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from distrib.errors import TrainingError

T = TypeVar("T")

IS_MEAN = "distrib_is_mean"
"""The attribute of a tensor that is a mean over the ranks: a gradient that has it need not be averaged."""


def gathered(own: T) -> list[T]:
    """What every rank has given, in the order of ranks. Every rank."""
    all_: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_, own)
    return all_


def gathered_if_other(own: T) -> list[T]:
    """What every rank has given, where one has given something else than another by its `repr`; else nothing. Every rank.

    Digests travel first, as it is much and mostly alike.
    """
    digests = gathered(hashlib.sha256(repr(own).encode()).hexdigest())
    return gathered(own) if len(set(digests)) > 1 else []


def check_alike(things: Sequence[Any], models: Sequence[nn.Module], **options: Any) -> None:
    """Raises TrainingError, on every rank, where one prepares other things than rank 0, or another model, or with other `options`.

    Every rank. `models` are those that were prepared before, of which optimizers may have parameters.
    """
    every = [*models, *(thing for thing in things if isinstance(thing, nn.Module))]
    names: dict[torch.Tensor, str] = {
        parameter: name for model in every for name, parameter in model.named_parameters()
    }
    said = [f"{name}={value!r}" for name, value in options.items()]
    all_ = gathered_if_other([*(_described(thing, names) for thing in things), [_OPTIONS, *said]])
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


def differ(own: Sequence[str]) -> list[bool]:
    """Of each word, whether two ranks have different ones; those that have none do not count. Every rank."""
    return [len(set(filter(None, words))) > 1 for words in zip(*gathered(list(own)), strict=True)]


def total(parameter: torch.Tensor) -> torch.Tensor:
    """What its elements add up to: another number where one has changed, but by a rare accident."""
    return parameter.detach().sum(dtype=torch.complex128 if parameter.is_complex() else torch.float64)


def digest_of(batch: Any) -> str:
    """A word for the numbers and strings in a batch, in tuples, lists and dicts: equal batches have equal ones. Empty where
    it has tensors that cannot be read so."""
    digest = hashlib.sha256()
    try:
        _feed(digest, batch)
    except (RuntimeError, NotImplementedError, TypeError):
        return ""
    return digest.hexdigest()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART_ELEMENTS = 1 << 22


def in_parts(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`values` in views along the longest dimension, small enough to be copied to 8 bytes an element each."""
    if not values.dim():
        return (values,)
    longest = max(range(values.dim()), key=values.size)
    rows = _PART_ELEMENTS * values.size(longest) // max(1, values.numel())
    return torch.split(values, max(1, rows), longest)


def sum_of_bits(values: torch.Tensor) -> int:
    """Of all values, as whole numbers; 0 for what has no bits to be read in the common way."""
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    try:
        bits = values.view(_INTEGERS[values.element_size()])
        return sum(int(part.sum(dtype=torch.int64)) for part in in_parts(bits))
    except (KeyError, RuntimeError, NotImplementedError, TypeError):
        return 0


def _feed(digest: hashlib._Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            digest.update(repr((value.dtype, value.shape)).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(digest, item)


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
