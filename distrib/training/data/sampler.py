"""Which samples each rank reads: pure arithmetic, and the sampler made of it.

A step of the job is one *global batch* of ranks x batch_size samples, in the order in which a single process would
read them; each rank takes an even, contiguous share of it. So every rank takes the same number of steps, no sample
is read twice, and the batches of the job are those of one process with the larger batch size. What is left at the end:

- The last global batch may be short. Its shares differ by at most one sample.
- With fewer than two samples a rank it is levelled with the one before it: the two share their samples evenly, so that
  no rank is without a batch (and batch normalization is not given a single sample, batch_size 4 and up).
- Only batches of one sample cannot be levelled. Then training begins again with the first samples, so that
  all ranks take part in the last step (a rank without a batch would leave the others waiting for its gradients);
  evaluation does not, and some ranks get one batch less, which there waits for nobody.
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

ENDLESS, ENDLESS_TIMES = 1 << 20, 16
"""A sampler that yields so many items, and so many times its length, is taken to have no end: what it yields in an epoch is kept."""


class Edges(Sequence[int]):
    """Numbers that are not kept: a sampler may promise ten thousand million samples, which nobody waits for."""

    def __init__(self, regular: range, last: tuple[int, ...] = ()) -> None:
        self._regular, self._last = regular, last

    def __len__(self) -> int:
        return len(self._regular) + len(self._last)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        return self._regular[index] if index < len(self._regular) else self._last[index - len(self._regular)]


def global_batches(samples: int, ranks: int, batch_size: int, *, drop_last: bool, wrap: bool) -> Edges:
    """Where the global batches of `samples` samples begin, and last of all where they end.

    The end is beyond `samples` where the last batch begins again with the first samples (`wrap`).
    Raises TrainingError when some rank would have no batch at all.
    """
    whole = ranks * batch_size
    if samples < (whole if drop_last else ranks):
        what = f"{samples} sample(s)" if batch_size > 1 else f"{samples} sample(s) or batch(es)"
        raise TrainingError(
            f"{what} are too few for {ranks} ranks" + (f" x {batch_size} with drop_last" if drop_last else ""),
            hint="use fewer ranks"
            + (", smaller batches or no drop_last" if drop_last else " or more data")
            + "; a loader for evaluation may be left out of job.prepare, and every rank read all of it",
        )
    if drop_last:
        return Edges(range(0, samples + 1, whole))
    begins = range(0, samples, whole)
    rest = samples - begins[-1]
    if rest < min(2 * ranks, whole) and len(begins) > 1:
        if whole + rest >= 2 * ranks:
            return Edges(begins[:-1], (samples - (whole + rest) // 2, samples))
        if wrap:
            return Edges(begins, (begins[-1] + ranks,))
    return Edges(begins, (samples,))


def share(start: int, stop: int, rank: int, ranks: int, speeds: Sequence[float] = ()) -> range:
    """The part of the samples `start` to `stop` that is this rank's.

    The parts' sizes differ by at most one; or are in proportion to `speeds`, where there are some and a sample for each rank.
    """
    if len(speeds) == ranks <= stop - start:
        sizes = proportional(stop - start, speeds)
        begin = start + sum(sizes[:rank])
        return range(begin, begin + sizes[rank])
    size, longer = divmod(stop - start, ranks)
    begin = start + rank * size + min(rank, longer)
    return range(begin, begin + size + (rank < longer))


def proportional(samples: int, speeds: Sequence[float]) -> list[int]:
    """`samples` in parts as near to the proportion of `speeds` as whole numbers are (largest remainders).

    Each has two at least, which batch normalization needs, or one where there are too few for that.
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
    """This rank's share of what another sampler yields.

    Yields lists of indices, a batch each; or, with `batch_size` None, the items of `source` one by one as they are.
    `source` must yield the same on every rank. That is seen to for samplers that draw from torch's, numpy's or
    Python's global random numbers or have a `generator`: all of these are seeded with `seed` + epoch meanwhile.
    `wrap` is asked at the beginning of each epoch whether the last step may begin again with the first samples.
    `speeds` is asked, as step number n of the epoch is drawn, in what proportion the ranks share it; with nothing, evenly.
    `read` is called each time that `source` was read.
    `sizes` has, of each batch that was drawn in the present epoch, how many samples it has and all ranks' together; None while
    it has not begun.
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
        self.source = source
        self.sizes: deque[tuple[int, int]] | None = None
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed = seed
        self.epoch = 0
        self.first_order = ""
        """A word for what `source` yielded first, where that is not known to be the same on every rank."""
        self._wrap = wrap
        self._speeds = speeds
        self._on_read = on_read

    def __len__(self) -> int:
        edges = self._edges(len(self.source))
        in_last = share(edges[-2], edges[-1], self.rank, self.ranks)  # all are in the others
        return len(edges) - 1 if in_last else len(edges) - 2

    @property
    def is_uneven(self) -> bool:
        """Whether some ranks get a batch less than others."""
        edges = self._edges(len(self.source))
        return bool(edges[-1] - edges[-2] < self.ranks)

    def __iter__(self) -> Iterator[Any]:
        self.sizes = deque()
        return self._drawn(self.sizes, self.epoch)  # as it is now: the next may begin before anything is drawn

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

    def _edges(self, samples: int) -> Edges:
        return global_batches(samples, self.ranks, self.batch_size or 1, drop_last=self.drop_last, wrap=self._wrap())

    def _order(self, epoch: int) -> Sequence[Any]:
        if isinstance(self.source, SequentialSampler):
            return range(len(self.source))
        if type(self.source) is RandomSampler and self.source.replacement:
            return _Drawn(len(self.source), len(self.source.data_source), self.seed + epoch)
        for sampler in (self.source, getattr(self.source, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with _seeded(self.seed + epoch, self.source):
            order = list(islice(self.source, most := ENDLESS + ENDLESS_TIMES * len(self.source)))
        if len(order) == most:
            raise TrainingError(
                f"the loader's {type(self.source).__name__} has a length of {len(self.source)}, and yields {most} items and more: an "
                "epoch of it cannot be shared out",
                hint="let it end, or make the dataset an IterableDataset",
            )
        self._on_read()
        self.first_order = self.first_order or sequence_digest(order)
        return order


class _Drawn(Sequence[int]):
    """`draws` numbers below `below`, each drawn by itself: in blocks, of which the latest is kept."""

    def __init__(self, draws: int, below: int, seed: int) -> None:
        self._draws, self._below, self._seed = draws, below, seed
        self._number, self._block = -1, [0]

    def __len__(self) -> int:
        return self._draws

    def __getitem__(self, index: Any) -> Any:
        number, place = divmod(range(self._draws)[index], _BLOCK)
        if number != self._number:
            generator = torch.Generator().manual_seed(hash((self._seed, number)) % 2**63)
            self._block = torch.randint(self._below, (_BLOCK,), generator=generator, device="cpu").tolist()
            self._number = number
        return self._block[place]


_BLOCK = 4096


def _samples(item: Any) -> int:
    """How many samples an item is that a sampler yielded: those of a batch, or itself."""
    return len(item) if isinstance(item, (list, tuple)) else 1


@contextmanager
def _seeded(seed: int, source: Any) -> Iterator[None]:
    """Random numbers that follow from `seed` alone while `source` is read; as they were before, afterwards."""
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
        # What draws from the CPU's numbers cannot make tensors on the device of torch.set_default_device.
        on_cpu = torch.device("cpu") if not generators else nullcontext()
        with torch.random.fork_rng(devices=gpus), on_cpu:
            # Not torch.manual_seed: that of GPUs would stay changed, and dropout there be the same on all ranks.
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
