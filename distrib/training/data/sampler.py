"""Division of a loader's samples among the ranks: the arithmetic, and the sampler that applies it.

A step of the job is one *global batch* of ranks x batch_size samples, in the order of a single process. Each rank reads a
contiguous share of equal size. So all ranks take the same number of steps, and no sample is read twice. The global batches equal
the batches of one process with the larger batch size. The end of an epoch has these rules:

- The last global batch may be short. Its shares differ by at most one sample.
- A last global batch with fewer than two samples per rank is merged with the one before, and the sum is halved. So every rank has
  a batch, and with batch_size 4 or more batch normalization never gets a single sample.
- Batches of one sample cannot be merged this way. In training, the epoch then continues with its first samples, so that all
  ranks take part in the last step. In an evaluation, some ranks get one batch less.
- drop_last drops the short global batch.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from distrib.errors import TrainingError
from distrib.training.checksums import sequence_digest


class _Edges(Sequence[int]):
    """Sequence of batch boundaries that is computed on access, because a sampler may have billions of samples."""

    def __init__(self, regular: range, last: tuple[int, ...] = ()) -> None:
        """Create the sequence: boundaries at equal distances, and others after them."""
        self._regular, self._last = regular, last

    def __len__(self) -> int:
        return len(self._regular) + len(self._last)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        return self._regular[index] if index < len(self._regular) else self._last[index - len(self._regular)]


def _global_batches(samples: int, ranks: int, batch_size: int, *, drop_last: bool, wrap: bool) -> _Edges:
    """Compute the start of each global batch of an epoch, and the end of the last one.

    `samples` are batches if the script's sampler makes batches. With `wrap`, the last global batch may continue with the first samples,
    so its end may exceed `samples`. Raises TrainingError if a rank would have no batch.
    """
    whole = ranks * batch_size
    if samples < (whole if drop_last else ranks):
        what = f"{samples} sample(s)" if batch_size > 1 else f"{samples} sample(s) or batch(es)"
        raise TrainingError(
            f"{what} are too few for {ranks} ranks" + (f" x {batch_size} with drop_last" if drop_last else ""),
            hint="use fewer ranks"
            + (", smaller batches or no drop_last" if drop_last else " or more data")
            + "; a loader for evaluation may be left out of job.prepare, and every rank read all of it",
            code="dataset-too-small",
        )
    if drop_last:
        return _Edges(range(0, samples + 1, whole))
    begins = range(0, samples, whole)
    rest = samples - begins[-1]
    if rest < min(2 * ranks, whole) and len(begins) > 1:
        if whole + rest >= 2 * ranks:
            return _Edges(begins[:-1], (samples - (whole + rest) // 2, samples))
        if wrap:
            return _Edges(begins, (begins[-1] + ranks,))
    return _Edges(begins, (samples,))


def share(start: int, stop: int, rank: int, ranks: int, speeds: Sequence[float] = ()) -> range:
    """Compute the part of a global batch that one rank reads.

    Args:
        start: First sample of the global batch.
        stop: Sample after its last one.
        rank: The rank.
        ranks: Number of ranks.
        speeds: Speed of each rank; empty for even parts.

    Returns:
        The samples. Sizes of even parts differ by at most one. Parts are even if there are fewer samples than ranks.
    """
    if len(speeds) == ranks <= stop - start:
        sizes = proportional(stop - start, speeds)
        begin = start + sum(sizes[:rank])
        return range(begin, begin + sizes[rank])
    size, longer = divmod(stop - start, ranks)
    begin = start + rank * size + min(rank, longer)
    return range(begin, begin + size + (rank < longer))


def proportional(samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide samples in proportion to speeds, by the largest-remainder method.

    Args:
        samples: Number of samples, at least the number of ranks.
        speeds: Speed of each rank.

    Returns:
        Samples of each rank: at least two, which batch normalization needs, or one if there are too few samples.
    """
    least = 2 if samples >= 2 * len(speeds) else 1
    spare = samples - least * len(speeds)
    whole = sum(speeds)
    wishes = [max(samples * speed / whole - least, 0.0) for speed in speeds]
    scale = spare / sum(wishes) if any(wishes) else 0.0
    exact = [wish * scale for wish in wishes]
    sizes = [int(wish) for wish in exact]
    order = sorted(range(len(speeds)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in order[: spare - sum(sizes)]:
        sizes[rank] += 1
    return [size + least for size in sizes]


class ShardSampler(Sampler[Any]):
    """Sampler that yields this rank's share of another sampler's samples.

    With a batch size it yields lists of indices. With `batch_size` None it yields items of `source` unchanged.

    `source` must yield the same on every rank. For samplers that draw from torch's, NumPy's or Python's global random numbers, or
    from their `generator`, this class ensures it: it seeds all of these with `seed` + epoch while it reads `source`.
    """

    def __init__(
        self,
        source: Any,
        *,
        rank: int,
        ranks: int,
        batch_size: int | None,
        drop_last: bool,
        seed: int,
        wrap: Callable[[], bool],
        speeds: Callable[[int], Sequence[float]],
        on_read: Callable[[], None],
    ) -> None:
        """Create the sampler of one rank.

        Args:
            source: The script's sampler or batch sampler.
            rank: This rank.
            ranks: Number of ranks.
            batch_size: Samples of one rank in a batch; None if `source` yields batches or single items.
            drop_last: True to drop a short last global batch.
            seed: Seed of the order, the same on every rank.
            wrap: Returns True if the last step may continue with the first samples. Called at the start of each epoch.
            speeds: Maps a step of the epoch to the speed of each rank; an empty result divides evenly.
            on_read: Called each time that `source` was read.
        """
        self.source = source
        self.sizes: deque[tuple[int, int]] | None = None
        """Samples of this rank and of all ranks in each drawn batch of the present epoch; None before its start."""
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed = seed
        self.epoch = 0
        self.first_order = ""
        """Digest of the first order of `source`; empty if it is the same on every rank by construction."""
        self._wrap = wrap
        self._speeds = speeds
        self._on_read = on_read

    def __len__(self) -> int:
        edges = self._edges(len(self.source))
        in_last = share(edges[-2], edges[-1], self.rank, self.ranks)  # all ranks have a part in the other batches
        return len(edges) - 1 if in_last else len(edges) - 2

    @property
    def is_uneven(self) -> bool:
        """True if some ranks get one batch less than others."""
        edges = self._edges(len(self.source))
        return bool(edges[-1] - edges[-2] < self.ranks)

    def __iter__(self) -> Iterator[Any]:
        self.sizes = deque()
        return self._drawn(self.sizes, self.epoch)  # the present epoch: the next one may begin before the first draw

    def _drawn(self, sizes: deque[tuple[int, int]], epoch: int) -> Iterator[Any]:
        order = self._order(epoch)
        for step, (start, stop) in enumerate(pairwise(self._edges(len(order)))):
            speeds = self._speeds(step) if self.batch_size is not None else ()
            part = share(start, stop, self.rank, self.ranks, speeds)
            if not part:
                continue
            items = [order[index % len(order)] for index in part]
            if self.batch_size is None:
                every = [_samples(order[index % len(order)]) for index in range(start, stop)]
                sizes.extend((_samples(item), sum(every)) for item in items)
                yield from items
            else:
                sizes.append((len(items), stop - start))
                yield items

    def _edges(self, samples: int) -> _Edges:
        return _global_batches(samples, self.ranks, self.batch_size or 1, drop_last=self.drop_last, wrap=self._wrap())

    def _order(self, epoch: int) -> Sequence[Any]:
        if isinstance(self.source, SequentialSampler):
            return range(len(self.source))
        if type(self.source) is RandomSampler and self.source.replacement:
            return _Drawn(len(self.source), len(self.source.data_source), self.seed + epoch)
        for sampler in (self.source, getattr(self.source, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with _seeded(self.seed + epoch, self.source):
            most = (1 << 20) + 16 * len(self.source)  # a sampler that yields more is endless, and would fill the memory
            order = list(islice(self.source, most))
        if len(order) == most:
            raise TrainingError(
                f"the loader's {type(self.source).__name__} has a length of {len(self.source)}, and yields {most} items and more: an "
                "epoch of it cannot be shared out",
                hint="let it end, or make the dataset an IterableDataset",
                code="loader-unsupported",
            )
        self._on_read()
        self.first_order = self.first_order or sequence_digest(order)
        return order


class _Drawn(Sequence[int]):
    """Sequence of `draws` random numbers below `below`, computed in blocks. Only the latest block is stored."""

    block_size = 4096

    def __init__(self, draws: int, below: int, seed: int) -> None:
        self._draws, self._below, self._seed = draws, below, seed
        self._number, self._block = -1, [0]

    def __len__(self) -> int:
        return self._draws

    def __getitem__(self, index: Any) -> Any:
        number, place = divmod(range(self._draws)[index], self.block_size)
        if number != self._number:
            generator = torch.Generator().manual_seed(hash((self._seed, number)) % 2**63)
            self._block = torch.randint(self._below, (self.block_size,), generator=generator, device="cpu").tolist()
            self._number = number
        return self._block[place]


def _samples(item: Any) -> int:
    """Count the samples of an item that a sampler yielded: the length of a list, array, tensor or range of indices, else 1."""
    try:
        return 1 if isinstance(item, (str, bytes)) else len(item)
    except TypeError:  # an index, or a tensor without dimensions
        return 1


@contextmanager
def _seeded(seed: int, source: Any) -> Iterator[None]:
    """Seed all random number generators while `source` is read, and restore their states afterwards."""
    generators = [
        generator
        for owner in (source, getattr(source, "sampler", None))
        if isinstance(generator := getattr(owner, "generator", None), torch.Generator)
    ]
    states = [generator.get_state() for generator in generators]
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    python_state = random.getstate()
    try:
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        # A sampler that draws from the CPU's generator cannot make tensors on the device of torch.set_default_device.
        on_cpu = torch.device("cpu") if not generators else nullcontext()
        with torch.random.fork_rng(devices=gpus), on_cpu:
            # Not torch.manual_seed: it would change the GPUs' generators too, and dropout would be the same on all ranks.
            torch.default_generator.manual_seed(seed)
            if gpus:
                torch.cuda.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed % 2**32)
            for generator in generators:
                generator.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
