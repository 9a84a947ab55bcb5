"""Whether the ranks have the same samples under the same numbers, by what their datasets keep in memory of each sample.

A loader's samples are shared out by number. Where a dataset was split at random on each rank by itself, or lists its files in no
order, some samples are read twice, others never, and what was put aside for validation is trained on: on one GPU all was well.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from distrib.errors import TrainingError
from distrib.training.checksums import content_digest
from distrib.training.collectives import gather_if_different

_LOOKED_AT = 32
"""Samples that are compared, spread over the dataset; and parts of one that is put together, and numbers of a sample."""
_PLACES = 256
_DEPTH = 4
_CHOSEN = "Subset.indices"
CHOOSE_ALIKE = (
    "choose the same on every rank, with torch.manual_seed(SEED) before random_split or a generator given to it"
)


def check_same_data(things: Sequence[Any]) -> str:
    """What differs between the datasets of the ranks' loaders among `things`, in words; empty where nothing does. Every rank.

    Raises TrainingError, on every rank, where they have chosen other samples of a dataset (torch's Subset, random_split).
    """
    loaders = [one for one in things if isinstance(one, DataLoader) and not isinstance(one.dataset, IterableDataset)]
    if not loaders:
        return ""
    all_ = gather_if_different([words_of(loader.dataset) for loader in loaders])
    differing = [
        (not place.endswith(_CHOSEN), rank, number, place)
        for rank, others in enumerate(all_)
        for number, (first, other) in enumerate(zip(all_[0], others, strict=True))
        if (place := difference(first, other))
    ]
    if not differing:
        return ""
    guessed, rank, number, place = min(differing)
    which = f"DataLoader {number + 1} of {len(loaders)}" if len(loaders) > 1 else "the DataLoader"
    if guessed:
        return (
            f"{which} given to job.prepare has other samples, or others first, on rank {rank} than on rank 0 ({place})"
        )
    raise TrainingError(
        f"rank {rank} has chosen other samples than rank 0 for {which} given to job.prepare: {place} differ",
        hint=f"{CHOOSE_ALIKE}; job.prepare shares them out, or leave the loader out of it",
    )


def difference(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The place where two ranks' `words_of` a dataset differ, first of all in what was chosen of another one; empty where they do not."""
    places = [place for place in first if place in other and first[place] != other[place]]
    return min(places, key=lambda place: not place.endswith(_CHOSEN), default="")


def order_of(numbers: Sequence[Any]) -> str:
    """A word for the order of what a sampler yields: another where it is another."""
    return _word(_spread(numbers), len(numbers))


def _word(entries: Sequence[Any], length: int) -> str:
    return f"{length} {content_digest([_plain(entry) for entry in entries])}"


def _spread(values: Any) -> list[Any]:
    return [values[number] for number in _numbers(len(values))]


def _numbers(samples: int) -> list[int]:
    """Those that are looked at."""
    return [samples * part // _LOOKED_AT for part in range(_LOOKED_AT)] if samples else []


def words_of(dataset: Any) -> dict[str, str]:
    """By places in a dataset that have something of each sample, a word for what that is."""
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):  # whatever a class of the script's raises where its insides are looked at
        for place, word in islice(_told(dataset), _PLACES):
            found[place] = word
    return found


def _told(dataset: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """Places in a dataset that have something of each sample, and a word for what that is."""
    place = name or type(dataset).__name__
    if isinstance(dataset, Subset):
        yield f"{name}{'.' * bool(name)}{_CHOSEN}", order_of(dataset.indices)
        if depth:
            yield from _told(dataset.dataset, f"{place}.dataset", depth - 1)
        return
    if isinstance(dataset, (list, tuple)):
        yield from _column(place, dataset, len(dataset))
        return
    samples, attributes = len(dataset), vars(dataset)
    for number, part in enumerate(_few(dataset.datasets) if isinstance(dataset, ConcatDataset) else ()):
        if depth:
            yield from _told(part, f"{place}.datasets[{number}]", depth - 1)
    for key, value in attributes.items():
        inner = f"{place}.{key}"
        if isinstance(value, Dataset):
            if depth:
                yield from _told(value, inner, depth - 1)
        elif key == "_indices" and getattr(value, "num_rows", None) == samples:
            rows = value.column(0)  # those that one of Hugging Face's datasets has chosen
            yield inner, _word([rows[number].as_py() for number in _numbers(samples)], samples)
        elif isinstance(value, (list, tuple)) and len(value) != samples:  # as the tensors of a TensorDataset
            for number, column in enumerate(_few(value)):
                yield from _column(f"{inner}[{number}]", column, samples)
        else:
            yield from _column(inner, value, samples)


def _few(parts: Sequence[Any]) -> Sequence[Any]:
    return parts if len(parts) <= _LOOKED_AT else _spread(parts)


def _column(place: str, value: Any, samples: int) -> Iterator[tuple[str, str]]:
    """A word for what has an entry for each sample; none for anything else, nor for what is read from elsewhere or filled by and by."""
    with contextlib.suppress(Exception):  # see `words_of`: this one shall not hide the others
        if hasattr(value, "iloc") and len(value) == samples:  # pandas
            rows = [value.iloc[number] for number in _numbers(samples)]
            yield place, _word([row.tolist() if hasattr(row, "tolist") else row for row in rows], samples)
        elif _is_in_memory(value) and len(value) == samples:
            entries = _spread(value)
            if not any(entry is None for entry in entries):
                yield place, _word(entries, samples)


def _is_in_memory(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.device.type == "cpu"
    if type(value) is np.ndarray:
        base: Any = value
        while isinstance(base, np.ndarray):
            base = base.base
        return value.ndim > 0 and not isinstance(base, mmap.mmap)
    return isinstance(value, (list, tuple))


def _plain(value: Any) -> Any:
    """`value` without what may differ between hosts: folders of files, and how numbers were rounded."""
    if isinstance(value, (str, PurePath)):
        return PurePath(value).name
    if isinstance(value, (bool, int, bytes)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value[:_LOOKED_AT]]
    if isinstance(value, float):
        return f"{value:.1e}"
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, (torch.Tensor, np.ndarray)):
        while value.ndim > 1:
            value = value[len(value) // 2]
        numbers = value[:_LOOKED_AT].tolist() if value.ndim else [value.item()]
        if any(isinstance(number, (float, complex)) for number in numbers):
            return f"{sum(map(abs, numbers)):.1e}"
        return [_plain(number) for number in numbers]
    return None
