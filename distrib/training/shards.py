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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Sampler, SequentialSampler

from distrib.errors import TrainingError


def global_batches(samples: int, ranks: int, batch_size: int, *, drop_last: bool, wrap: bool) -> list[int]:
    """Where the global batches of `samples` samples begin, and last of all where they end.

    The end is beyond `samples` where the last batch begins again with the first samples (`wrap`).
    Raises TrainingError when some rank would have no batch at all.
    """
    whole = ranks * batch_size
    if samples < (whole if drop_last else ranks):
        what = f"{samples} sample(s)" if batch_size > 1 else f"{samples} sample(s) or batch(es)"
        raise TrainingError(
            f"{what} are too few for {ranks} ranks" + (f" x {batch_size} with drop_last" if drop_last else ""),
            hint="use fewer ranks" + (", smaller batches or no drop_last" if drop_last else " or more data"),
        )
    if drop_last:
        return list(range(0, samples + 1, whole))
    edges = [*range(0, samples, whole), samples]
    rest = edges[-1] - edges[-2]
    if rest < min(2 * ranks, whole) and len(edges) > 2:
        if whole + rest >= 2 * ranks:
            edges[-2] = samples - (whole + rest) // 2
        elif wrap:
            edges[-1] = edges[-2] + ranks
    return edges


def share(start: int, stop: int, rank: int, ranks: int) -> range:
    """The part of the samples `start` to `stop` that is this rank's; the parts' sizes differ by at most one."""
    size, longer = divmod(stop - start, ranks)
    begin = start + rank * size + min(rank, longer)
    return range(begin, begin + size + (rank < longer))


class ShardSampler(Sampler[Any]):
    """This rank's share of what another sampler yields.

    Yields lists of indices, a batch each; or, with `batch_size` None, the items of `source` one by one as they are.
    `source` must yield the same on every rank. That is seen to for samplers that draw from torch's, numpy's or
    Python's global random numbers or have a `generator`: all of these are seeded with `seed` + epoch meanwhile.
    `wrap` is asked at the beginning of each epoch whether the last step may begin again with the first samples.
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
    ) -> None:
        self.source = source
        self.rank, self.ranks = rank, ranks
        self.batch_size, self.drop_last = batch_size, drop_last
        self.seed = seed
        self.epoch = 0
        self._wrap = wrap

    def __len__(self) -> int:
        return len(self._shares(len(self.source)))

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        for part in self._shares(len(order)):
            items = [order[index % len(order)] for index in part]
            if self.batch_size is None:
                yield from items
            else:
                yield items

    def _shares(self, samples: int) -> list[range]:
        edges = global_batches(samples, self.ranks, self.batch_size or 1, drop_last=self.drop_last, wrap=self._wrap())
        shares = [share(start, stop, self.rank, self.ranks) for start, stop in pairwise(edges)]
        return [part for part in shares if part]

    def _order(self) -> Sequence[Any]:
        if isinstance(self.source, SequentialSampler):
            return range(len(self.source))
        for sampler in (self.source, getattr(self.source, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        with _seeded(self.seed + self.epoch, self.source):
            return list(self.source)


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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
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
