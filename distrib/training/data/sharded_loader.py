"""Loader of one rank: its share of a DataLoader's batches, on its device."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from distrib.errors import TrainingError
from distrib.training.checksums import content_digest
from distrib.training.data.epoch import EpochCounter, LoaderPass, StepClock
from distrib.training.data.load_balancing import LoadBalancer
from distrib.training.data.sampler import ShardSampler
from distrib.training.to_device import move_to_device

_COPIED_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """Context of the loaders of a job: ranks, device, and the callbacks between loader and job."""

    rank: int
    ranks: int
    device: torch.device
    clock: StepClock
    is_training: Callable[[], bool | None]
    """Returns True if a prepared model is in training mode, None without prepared models."""
    set_batch_samples: Callable[[int, int], tuple[int, int]]
    """Records the samples of this rank's batch and of the global batch; returns the values before."""
    on_read: Callable[[], None] = lambda: None
    """Called at the first batch of each pass."""
    on_epoch_end: Callable[[LoaderPass], None] = lambda one: None
    """Called at the end of an epoch in which a model trained. Collective."""
    choose_share: Callable[[int, bool], tuple[int, int]] | None = None
    """Elastic jobs: maps an epoch, and True while training, to this rank's share and the number of shares."""


def _is_sharding(sampler: Any) -> bool:
    """Test if a sampler yields a rank's share already."""
    ranks = getattr(sampler, "num_replicas", None)
    return isinstance(sampler, DistributedSampler) or (isinstance(ranks, int) and ranks > 1)


def _has_own_iteration(loader: DataLoader[Any]) -> bool:
    """Test for a subclass that makes batches itself; not for one that only reuses its iterator, as timm's MultiEpochsDataLoader."""
    own = any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return own and not any(isinstance(value, Iterator) for name, value in vars(loader).items() if name != "_iterator")


class ShardedLoader(Iterable[Any]):
    """This rank's share of a DataLoader, its batches on this rank's device.

    `batch_size` counts the samples of one rank, so a step of the job reads `world_size` times as many. All ranks take the same
    number of steps, and no sample is read twice (exceptions: `distrib.training.data.sampler`). Where shares differ, each sample
    still counts the same.

    A pass with a step is an epoch (`distrib.training.data.epoch`). A shuffled loader has a new order in each epoch, the same on every
    rank. It follows from the epoch and the initial seed of rank 0's generator, or of rank 0's torch. Worker processes are seeded
    from it and the rank, so that random augmentation differs between ranks.

    - Any other sampler or batch sampler is read on every rank, and its indices or batches are shared. It must yield the same there.
    - A DistributedSampler, or another one with `num_replicas`, stays as it is. Its epoch is set.
    - An IterableDataset is read whole on every rank, and each keeps every `world_size`-th batch. While a model trains, an incomplete
      last round of batches is left out, and all batches count the same.

    Attributes of the DataLoader are attributes of this one.
    """

    def __init__(
        self, loader: DataLoader[Any], context: LoaderContext, *, seed: int, balancer: LoadBalancer | None = None
    ) -> None:
        """Share a DataLoader.

        Args:
            loader: The script's loader.
            context: The job.
            seed: Seed of the order, the same on every rank.
            balancer: Chooses the ranks' shares of a batch; None for even ones.

        Raises:
            TrainingError: The loader has too few samples, no length, or is sharded for another number of ranks.
        """
        self._context, self._balancer = context, balancer
        self._given = loader
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self._epochs = EpochCounter(context.clock)
        self.measure_waits: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        """Wraps the batches of later passes, to measure the wait for each of them."""
        self.fetch: Callable[[Iterator[Any], bool], Any] = lambda batches, is_first: next(batches)
        """Returns the next batch, given True for the first one of a pass; replaced to measure the wait for it."""
        self._generator = torch.Generator()
        self._shard: ShardSampler | None = None
        self._first_batch = ""
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self._is_shuffled = not self.is_stream and not isinstance(loader.sampler, SequentialSampler)
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)  # also of the script's own batch sampler
        sharding: Any = next(filter(_is_sharding, (loader.batch_sampler, inner)), None)
        counting = next(
            (one for one in (loader.batch_sampler, inner) if hasattr(one, "set_epoch") and hasattr(one, "epoch")), None
        )
        self._sampler: Any = counting if sharding is None else sharding
        self._record_epoch()
        if isinstance(self._sampler_epoch, int) and self._sampler_epoch > 0:
            self._epochs.set(self._sampler_epoch)
        if self.is_stream:
            self._loader = loader
        elif sharding is not None:
            if sharding.num_replicas != context.ranks:
                raise TrainingError(
                    f"the loader's {type(sharding).__name__} shards for {sharding.num_replicas} rank(s), expected {context.ranks}",
                    hint="leave the sampler out: prepare() shards the loader",
                    code="loader-unsupported",
                )
            self._loader = loader
        else:
            self._loader = self._rebuild(loader, seed)
            len(self)  # raises for too few samples now, not at the end of the epoch

    def _rebuild(self, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
        seed %= 2**62  # leaves room for the epoch
        batched = loader.batch_size is not None
        source = loader.sampler if batched or loader.batch_sampler is None else loader.batch_sampler
        if not hasattr(source, "__len__"):
            raise TrainingError(
                f"the loader's {type(source).__name__} has no length: an epoch of it cannot be shared",
                hint="give it a __len__, or make the dataset an IterableDataset",
                code="loader-unsupported",
            )
        self._shard = ShardSampler(
            source,
            rank=self._context.rank,
            ranks=self._context.ranks,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            seed=seed,
            wrap=self._must_be_even,
            speeds=self._balancer.speeds if self._balancer else lambda step: (),
            on_read=self._record_epoch,
        )
        if self._balancer:
            self._balancer.set_prefetch(loader.num_workers * (loader.prefetch_factor or 0))
        known = inspect.signature(DataLoader.__init__).parameters
        options = {name: getattr(loader, name) for name in _COPIED_OPTIONS if name in known and hasattr(loader, name)}
        options["generator"] = self._generator
        warnings.filterwarnings("ignore", "This DataLoader will create")  # the script's own loader has warned
        if _has_own_iteration(loader):
            twin = copy.copy(loader)
            # torch refuses to set these later, so they are put where it stores them.
            attribute = "batch_sampler" if batched or loader.batch_sampler is not None else "sampler"
            vars(twin).update(
                {attribute: self._shard, "generator": self._generator, "_iterator": None, "in_order": True}
            )
            return twin
        if batched or loader.batch_sampler is not None:
            return DataLoader(loader.dataset, batch_sampler=self._shard, **options)
        return DataLoader(loader.dataset, batch_size=None, sampler=self._shard, **options)

    def _record_epoch(self) -> None:
        """Record the sampler's epoch: if it is another one later, the script has set it."""
        self._sampler_epoch: Any = getattr(self._sampler, "epoch", None)

    def _must_be_even(self) -> bool:
        """Test if every rank must take the same number of steps: while training, as gradients are averaged."""
        if not torch.is_grad_enabled():
            return False
        training = self._context.is_training()
        return self._is_shuffled if training is None else training

    @property
    def sampler(self) -> Any:
        """The script's own sampler, for `set_epoch`."""
        return self._given.sampler

    @property
    def batch_sampler(self) -> Any:
        """The script's own batch sampler, if it made one."""
        return (self._loader if self._given.batch_size is not None else self._given).batch_sampler

    @property
    def first_read(self) -> str:
        """A digest of the first samples that every rank reads: a stream's first batch in training, or a sampler's first order."""
        return self._first_batch or (self._shard.first_order if self._shard else "")

    def __len__(self) -> int:
        """The number of batches of this rank, the same on all ranks while a model trains."""
        if self.is_stream:
            batches, left = divmod(len(self._loader), self._context.ranks)
            return batches + (self._context.rank < left and not self._must_be_even())
        return len(self._loader if self._shard is None else self._shard)

    def __iter__(self) -> Iterator[Any]:
        if self._sampler_epoch is not None and getattr(self._sampler, "epoch", None) != self._sampler_epoch:
            self._epochs.set(self._sampler.epoch)  # the script has set it
        begun = self._epochs.begin()
        context, epoch, trains = self._context, begun.number, self._must_be_even()
        rank, ranks = context.choose_share(epoch, trains) if context.choose_share else (context.rank, context.ranks)
        if self._shard is not None:
            self._shard.epoch, self._shard.rank, self._shard.ranks, self._shard.sizes = epoch, rank, ranks, None
            self._generator.manual_seed(self._shard.seed + epoch * context.ranks + context.rank)
        elif hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
            self._record_epoch()
        if self._balancer:
            self._balancer.begin_epoch()
        with torch.device("cpu") if self._shard else contextlib.nullcontext():  # the device of its generator
            batches: Iterator[Any] = iter(self._loader)
        begun.trains = trains
        if self.is_stream:
            if trains and ranks > 1 and not context.choose_share and not self._first_batch:
                batches = self._record_first(batches)
            batches = _every_nth(batches, rank, ranks, whole_rounds=lambda: begun.trains)
        read = self._read(batches, self._shard.sizes if self._shard else deque(), begun)
        return self.measure_waits(read) if self.measure_waits else read

    def _record_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in islice(batches, 1):
            self._first_batch = content_digest(batch)
            return chain((batch,), batches)  # stores none of them
        return batches

    def _read(self, batches: Iterator[Any], sizes: deque[tuple[int, int]] | None, begun: LoaderPass) -> Iterator[Any]:
        context = self._context
        before: tuple[int, int] | None = None
        is_complete = False
        try:
            for step in count():
                balancer = self._balancer if begun.trains and self._shard else None
                if balancer:
                    balancer.begin_batch()
                try:
                    batch = move_to_device(self.fetch(batches, step == 0), context.device)
                except StopIteration:
                    is_complete = True
                    break
                if step == 0:
                    context.on_read()
                if sizes is None and self._shard:  # a loader whose own iteration begins with its first batch
                    sizes = self._shard.sizes
                own, every = sizes.popleft() if sizes else (1, context.ranks)
                if begun.trains or torch.is_grad_enabled():
                    latest = context.set_batch_samples(own, every)
                    before = before or latest
                self._epochs.on_batch(begun)
                yield batch
                has_step = self._epochs.has_step(begun)
                is_training = torch.is_grad_enabled() and context.is_training()
                if not begun.trains and (is_training or (has_step and context.clock.count_steps() is not None)):
                    begun.trains = True
                    self._check_even()
                if balancer:
                    balancer.end_batch(step, own, has_step=has_step)
        finally:
            # An evaluation may come between a batch of another loader and its gradients.
            if before and not begun.trains:
                context.set_batch_samples(*before)
            self._epochs.end(begun)
        if begun.trains:
            context.set_batch_samples(1, context.ranks)
            if is_complete and self._epochs.has_step(begun):
                context.on_epoch_end(begun)

    def _check_even(self) -> None:
        if self._shard and self._shard.is_uneven:
            raise TrainingError(
                "some ranks have a batch less than others in this epoch, but a model trains, and its gradients are waited for",
                hint="call model.train() before the epoch, and eval() on its parts that shall not change",
                code="step-counts-differ",
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as DistributedSampler does.

        Args:
            epoch: Number of the epoch, from 0. Later epochs count from it.
        """
        self._epochs.set(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next epoch and the seed of the order, for `job.save`."""
        return {"epoch": self._epochs.next, **({"seed": self._shard.seed} if self._shard else {})}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the epoch and the order of a checkpoint.

        Args:
            state: The result of `state_dict`.
        """
        self.set_epoch(state["epoch"])
        if self._shard:
            self._shard.seed = state.get("seed", self._shard.seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask before there is a _loader
            raise AttributeError(name)
        return getattr(self._loader if hasattr(self._loader, name) else self._given, name)


def _every_nth(batches: Iterator[Any], rank: int, ranks: int, *, whole_rounds: Callable[[], bool]) -> Iterator[Any]:
    """Yield batch `rank` of each round of `ranks` batches. If `whole_rounds()`, an incomplete last round is left out."""
    while True:
        own, read = None, 0
        for batch in islice(batches, ranks):  # not stored: a round may exceed the memory
            own, read = batch if read == rank else own, read + 1
        if not read:
            return
        del batch
        if rank < read and (read == ranks or not whole_rounds()):
            yield own
