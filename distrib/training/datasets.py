"""Whether the ranks have the same samples under the same numbers, by what their datasets tell without reading a sample.

A loader's samples are shared out by number. Where a dataset was split at random on each rank by itself, or lists its files in no
order, some samples are read twice, others never, and what was put aside for validation is trained on: on one GPU all was well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from distrib.errors import TrainingError
from distrib.training.alike import digest_of

_LOOKED_AT = 32
"""Samples that are compared, spread over the dataset."""
_DEPTH = 4
_CHOSEN = "Subset.indices"


def check_same_data(things: Sequence[Any]) -> str:
    """What differs between the datasets of the ranks' loaders among `things`, in words; empty where nothing does. Every rank.

    Raises TrainingError, on every rank, where they have chosen other samples of a dataset (torch's Subset, random_split).
    """
    loaders = [one for one in things if isinstance(one, DataLoader) and not isinstance(one.dataset, IterableDataset)]
    if not loaders:
        return ""
    own = [_words(loader.dataset) for loader in loaders]
    all_: list[list[dict[str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_, own)
    found = ""
    for rank, others in enumerate(all_):
        for number, (first, other) in enumerate(zip(all_[0], others, strict=True)):
            place = next((place for place in first if place in other and first[place] != other[place]), "")
            which = f"DataLoader {number + 1} of {len(loaders)}" if len(loaders) > 1 else "the DataLoader"
            if place.endswith(_CHOSEN):
                raise TrainingError(
                    f"rank {rank} has chosen other samples than rank 0 for {which} given to job.prepare: {place} differ",
                    hint="choose the same on every rank, with torch.manual_seed(SEED) before random_split or a generator given to it; "
                    "job.prepare shares them out, or leave the loader out of it",
                )
            if place and not found:
                found = f"{which} given to job.prepare has other samples, or others first, on rank {rank} than on rank 0 ({place})"
    return found


def order_of(numbers: Sequence[Any]) -> str:
    """A word for the order of what a sampler yields: another where it is another."""
    return f"{len(numbers)} {digest_of(_spread(numbers))}"


def _spread(values: Any) -> list[Any]:
    length = len(values)
    return (
        [_plain(values[length * number // _LOOKED_AT]) for number in range(min(_LOOKED_AT, length))] if length else []
    )


def _words(dataset: Any) -> dict[str, str]:
    try:
        return dict(_told(dataset))
    except Exception:  # whatever a class of the script's raises where its insides are looked at
        return {}


def _told(dataset: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """Places in a dataset that have something of each sample, and a word for what that is."""
    place = name or type(dataset).__name__
    if isinstance(dataset, Subset):
        yield f"{name}{'.' * bool(name)}{_CHOSEN}", order_of(dataset.indices)
        if depth:
            yield from _told(dataset.dataset, f"{place}.dataset", depth - 1)
        return
    if isinstance(dataset, (list, tuple)):
        yield place, order_of(dataset)
        return
    try:
        samples = len(dataset)
        attributes = vars(dataset)
    except (TypeError, NotImplementedError):
        return
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else ()
    for number, part in enumerate(parts):
        if depth:
            yield from _told(part, f"{place}.datasets[{number}]", depth - 1)
    for key, value in attributes.items():
        inner = f"{place}.{key}"
        if isinstance(value, Dataset) and depth:
            yield from _told(value, inner, depth - 1)
            continue
        # What torch's TensorDataset has is a tuple of tensors.
        columns = value if isinstance(value, (list, tuple)) and len(value) != samples and len(value) <= 8 else (value,)
        for column in columns:
            if word := _column(column, samples):
                yield inner, word


def _column(value: Any, samples: int) -> str:
    """A word for what has one entry for each sample, in their order; empty for anything else."""
    if not samples:
        return ""
    if hasattr(value, "iloc") and hasattr(value, "index"):  # pandas
        return order_of(_Rows(value)) if len(value) == samples else ""
    if (
        hasattr(value, "column") and getattr(value, "num_rows", None) == samples
    ):  # the chosen rows of Hugging Face's datasets
        return order_of(_Cells(value.column(0)))
    if (isinstance(value, (list, tuple)) or getattr(value, "ndim", None)) and len(value) == samples:
        return order_of(value)
    return ""


class _Rows(Sequence[Any]):
    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: Any) -> Any:
        row = self._table.iloc[number]
        return row.tolist() if hasattr(row, "tolist") else row


class _Cells(_Rows):
    def __getitem__(self, number: Any) -> Any:
        return self._table[number].as_py()


def _plain(value: Any) -> Any:
    """`value` without what may differ between hosts: folders of files, and how numbers were rounded."""
    if isinstance(value, (str, PurePath)):
        return PurePath(value).name
    if isinstance(value, (bool, int, bytes, type(None))):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return f"{value:.1e}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # of torch or numpy
        try:
            values = torch.as_tensor(value)
            if values.is_floating_point() or values.is_complex():
                return f"{float(values.abs().double().sum()):.1e}"
            return values
        except (TypeError, RuntimeError, NotImplementedError):
            return str(value) if not getattr(value, "shape", None) else None
    return None
