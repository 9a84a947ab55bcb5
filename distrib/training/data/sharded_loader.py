"""The loader that a rank reads: its share of a DataLoader's batches, on its device."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any, ClassVar

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler
from torch.utils.hooks import RemovableHandle

from distrib.errors import TrainingError
from distrib.training.checksums import content_digest
from distrib.training.data.epoch import Epochs, Lessons, Pass
from distrib.training.data.load_balancing import Balance
from distrib.training.data.sampler import ShardSampler
from distrib.training.to_device import moved

_COPIED = (
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

REPEATED = 3
"""After how many passes that begin with the same batches, of which nothing was learnt, this is told."""


def _evenly(step: int) -> tuple[float, ...]:
    return ()


def _shares_out(sampler: Any) -> bool:
    """Whether it yields a rank's share by itself."""
    ranks = getattr(sampler, "num_replicas", None)
    return isinstance(sampler, DistributedSampler) or (isinstance(ranks, int) and ranks > 1)


def _makes_batches(loader: DataLoader[Any]) -> bool:
    """Whether it iterates in a way of its own: not one that only keeps an iterator for the next epoch, as timm's MultiEpochsDataLoader."""
    own = any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return own and not any(isinstance(value, Iterator) for name, value in vars(loader).items() if name != "_iterator")


class ShardedLoader(Iterable[Any]):
    """This rank's share of a DataLoader, its batches on this rank's device.

    `batch_size` counts the samples of one rank, so a step of the job reads `world_size` times as many. All ranks
    take the same number of steps and no sample is read twice (`distrib.training.data.sampler` says how, and names the
    one corner, batches of a single sample, where training repeats some samples and evaluation may have one batch
    less on some ranks). Where shares differ, at the end or as `balance` wants it, each sample still counts the same.

    Each iteration is a new epoch if a step was taken in the one before (`distrib.training.data.epoch`): a shuffled loader has a new
    order, the same on every rank, that follows from the initial seed of rank 0's generator of it, or else of rank 0's torch, and
    the epoch. Worker processes are seeded from it and the rank, so that random augmentation differs between ranks.

    Other kinds of loaders:
    - Another sampler is read on every rank, and its indices are shared out. It must yield the same on every rank.
    - A batch sampler likewise, batch by batch.
    - A DistributedSampler, also one in a batch sampler, stays as it is: the samples are shared out already. Its epoch is set for you.
      So does every other sampler that has a `num_replicas`, such as timm's.
    - An IterableDataset is read whole on every rank, which must see the same stream, and each rank keeps every
      `world_size`-th batch. While a model trains, an incomplete last round of batches is left out. How many samples
      a batch has nobody knows here: all count the same, as with a DistributedSampler.

    A model trains that is in training mode as the epoch begins; or one for which gradients are computed from the epoch's batches,
    as where a model is trained in evaluation mode so that its normalization stays as it is.

    What else the DataLoader has (`dataset`, `num_workers`, what the script or a class of its own gave it) is had by this one too.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        ranks: int,
        device: torch.device,
        seed: int,
        training: Callable[[], bool | None],
        samples: Callable[[int, int], tuple[int, int]],
        parameters: Callable[[], Sequence[torch.Tensor]],
        read: Callable[[bool | None], None],
        lessons: Lessons,
        balance: Balance | None = None,
        view: Callable[[int, bool], tuple[int, int]] | None = None,
    ) -> None:
        """`training` says whether the job's models are in training mode, None while the job has none; `parameters` are what they learn.

        While they train, `samples` is told before each batch how many samples it has and all ranks' together, and gives back what
        it was told before. `read` hears None of the first batch of any epoch, False of one in which nothing is learnt, True of
        that one's end. `lessons` are those of all the job's loaders, and hear of the end of an epoch. `balance` decides
        how the ranks share a batch. `view`, given an epoch and whether all ranks must take the same number of steps in it, says
        which share of how many this rank reads then, where ranks may come and go.
        """
        self._view = view
        self._given = loader
        self.batch_size = loader.batch_size
        self.drop_last = loader.drop_last
        self._rank, self._ranks, self._device = rank, ranks, device
        self._training, self._parameters = training, parameters
        self._samples, self._balance = samples, balance
        self._was_read = read
        self._epochs = Epochs(lessons)
        self.meter: Callable[[Iterator[Any]], Iterator[Any]] | None = None
        """Through which the batches of later iterations go, to see how long they are waited for."""
        self._generator = torch.Generator()
        self._shard: ShardSampler | None = None
        self._first_batch = ""
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self._shuffled = not self.is_stream and not isinstance(loader.sampler, SequentialSampler)
        # Also that of a batch sampler which the script has made.
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
        sharing: Any = next(filter(_shares_out, (loader.batch_sampler, inner)), None)
        counting = next(
            (one for one in (loader.batch_sampler, inner) if hasattr(one, "set_epoch") and hasattr(one, "epoch")), None
        )
        self._sampler: Any = counting if sharing is None else sharing
        self._note_epoch()
        if isinstance(self._epoch_set, int) and self._epoch_set > 0:
            self._epochs.next = self._epoch_set
        if self.is_stream:
            self._loader = loader
        elif sharing is not None:
            if sharing.num_replicas != ranks:
                raise TrainingError(
                    f"the loader's {type(sharing).__name__} shares with {sharing.num_replicas} rank(s), the job has {ranks}",
                    hint="leave the sampler out: prepare() shards the loader",
                )
            self._loader = loader
        else:
            self._loader = self._rebuilt(loader, seed)
            len(self)  # too few samples are told now, not in the middle of the epoch

    def _rebuilt(self, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
        seed %= 2**62  # leaves room for the epoch
        batched = loader.batch_size is not None
        source = loader.sampler if batched or loader.batch_sampler is None else loader.batch_sampler
        if not hasattr(source, "__len__"):
            raise TrainingError(
                f"the loader's {type(source).__name__} has no length: an epoch of it cannot be shared out",
                hint="give it a __len__, or make the dataset an IterableDataset",
            )
        self._shard = ShardSampler(
            source,
            rank=self._rank,
            ranks=self._ranks,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            seed=seed,
            wrap=self._evenly,
            speeds=self._balance.speeds if self._balance else _evenly,
            read=self._note_epoch,
        )
        if self._balance:
            self._balance.draws_ahead(loader.num_workers * (loader.prefetch_factor or 0))
        known = inspect.signature(DataLoader.__init__).parameters
        options = {name: getattr(loader, name) for name in _COPIED if name in known and hasattr(loader, name)}
        options["generator"] = self._generator
        warnings.filterwarnings("ignore", "This DataLoader will create")  # the script's own loader has said it
        if _makes_batches(loader):
            twin = copy.copy(loader)
            # As torch lets nobody set these later, they are put where it keeps them.
            place = "batch_sampler" if batched or loader.batch_sampler is not None else "sampler"
            vars(twin).update({place: self._shard, "generator": self._generator, "_iterator": None, "in_order": True})
            return twin
        if batched or loader.batch_sampler is not None:
            return DataLoader(loader.dataset, batch_sampler=self._shard, **options)
        return DataLoader(loader.dataset, batch_size=None, sampler=self._shard, **options)

    def _note_epoch(self) -> None:
        """Keeps the sampler's epoch: when it is another one later, the script has set it."""
        self._epoch_set: Any = getattr(self._sampler, "epoch", None)

    def _evenly(self) -> bool:
        """Whether every rank must take the same number of steps: while training, as gradients are exchanged."""
        training = self._training()
        return self._shuffled if training is None else training

    @property
    def sampler(self) -> Any:
        """The script's own, of which `set_epoch` may be called; it is anyway."""
        return self._given.sampler

    @property
    def batch_sampler(self) -> Any:
        """The script's own, where it has made one."""
        return (self._loader if self._given.batch_size is not None else self._given).batch_sampler

    @property
    def first_read(self) -> str:
        """A word for what was read first of all, where every rank reads all of it to keep its share: the first batch of a stream in the
        first epoch in which a model trained, or the order of a sampler of the script's."""
        return self._first_batch or (self._shard.first_order if self._shard else "")

    def __len__(self) -> int:
        """The number of batches of this rank, of the same size on all of them while a model trains."""
        if self.is_stream:
            batches, left = divmod(len(self._loader), self._ranks)
            return batches + (self._rank < left and not self._evenly())
        return len(self._loader if self._shard is None else self._shard)

    def __iter__(self) -> Iterator[Any]:
        if self._epoch_set is not None and getattr(self._sampler, "epoch", None) != self._epoch_set:
            self._epochs.next = self._sampler.epoch  # the script has set it
        passed = self._epochs.begin()
        epoch = passed.number
        rank, ranks = self._view(epoch, self._evenly()) if self._view else (self._rank, self._ranks)
        if self._shard is not None:
            self._shard.epoch, self._shard.rank, self._shard.ranks, self._shard.sizes = epoch, rank, ranks, None
            self._generator.manual_seed(self._shard.seed + epoch * self._ranks + self._rank)
        elif hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
            self._note_epoch()
        if self._balance:
            self._balance.epoch()
        watch = _Watch(self._evenly(), self._training, self._parameters)
        with torch.device("cpu") if self._shard else contextlib.nullcontext():  # where its generator is
            batches: Iterator[Any] = iter(self._loader)
        if self.is_stream:
            if watch.trains and ranks > 1 and not self._view and not self._first_batch:
                batches = self._noting_the_first(batches)
            batches = every_nth(batches, rank, ranks, whole_rounds=lambda: watch.trains)
        here = passed.of(self._read(batches, self._shard.sizes if self._shard else deque(), watch, passed))
        return self.meter(here) if self.meter else here

    def _noting_the_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in islice(batches, 1):
            self._first_batch = content_digest(batch)
            return chain((batch,), batches)  # and keeps none of them
        return batches

    def _read(
        self, batches: Iterator[Any], sizes: deque[tuple[int, int]] | None, watch: _Watch, passed: Pass
    ) -> Iterator[Any]:
        before: tuple[int, int] | None = None
        evaluated: bool | None = None
        try:
            with watch:
                for step in count():
                    balance = self._balance if watch.trains and self._shard else None
                    if balance:
                        balance.begin()
                    try:
                        batch = moved(next(batches), self._device)
                    except StopIteration:
                        evaluated = True
                        break
                    if step == 0:
                        self._was_read(None if watch.trains else False)
                        evaluated = False
                    if sizes is None and self._shard:  # a loader whose own iteration begins with its first batch
                        sizes = self._shard.sizes
                    own, every = sizes.popleft() if sizes else (1, self._ranks)
                    if watch.may_train:
                        watch.handed_out()
                        latest = self._samples(own, every)
                        before = before or latest
                    passed.hand_out()
                    yield batch
                    passed.look()
                    if watch.surprised():
                        self._check_even()
                    if balance:
                        balance.end(step, own, learnt=passed.has_learnt and self._epochs.lessons.are_here)
        finally:
            # An evaluation may come between a batch of another loader and its gradients.
            if before and not watch.trains:
                self._samples(*before)
            passed.end(whole=bool(evaluated))
            if self._epochs.repeated == REPEATED and watch.trains:
                self._epochs.repeated += 1
                print(
                    "distrib: note: a DataLoader given to job.prepare is begun again and again with no step between: each time "
                    "with the same batches, as other ranks may not have begun it; take different ones from one iterator",
                    file=sys.stderr,
                    flush=True,
                )
            if evaluated is not None and not (
                passed.has_learnt if self._epochs.lessons.steps() is not None else watch.trains
            ):
                self._was_read(evaluated)
        if watch.trains:
            self._samples(1, self._ranks)
            self._epochs.lessons.end(passed)

    def _check_even(self) -> None:
        if self._shard and self._shard.uneven:
            raise TrainingError(
                "some ranks have a batch less than others in this epoch, but gradients are computed, for which all are waited for",
                hint="call model.train() before the epoch, and eval() of its parts that shall stay as they are",
            )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration epoch number `epoch`, counted from 0; the ones after it count on from there."""
        self._epochs.next = epoch

    def state_dict(self) -> dict[str, int]:
        """The number of the next epoch, for `job.save`."""
        return {"epoch": self._epochs.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on with the epoch that `state_dict` gave."""
        self.set_epoch(state["epoch"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle, which ask before there is a _loader, from recursion
            raise AttributeError(name)
        return getattr(self._loader if hasattr(self._loader, name) else self._given, name)


class _Watch:
    """Whether a model trains on the batches of one epoch.

    One in training mode does (`trains`, as the epoch begins). In evaluation mode it does once gradients reach its parameters
    between two of the epoch's batches, and no model is in training mode, or was when the latest batch of all was handed out.
    """

    latest: ClassVar[_Watch | None] = None
    """Of whose batches the latest is one; a script may put its model into training mode with the batch in its hands."""

    def __init__(
        self, trains: bool, training: Callable[[], bool | None], parameters: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self.trains = trains
        self._surprised = False
        self._training, self._parameters = training, parameters
        self._handle: RemovableHandle | None = None

    @property
    def may_train(self) -> bool:
        """Whether gradients of a batch that is handed out now may come."""
        return self.trains or torch.is_grad_enabled()

    def surprised(self) -> bool:
        """Whether it has turned out since the last call that a model trains."""
        surprised, self._surprised = self._surprised, False
        return surprised

    def __enter__(self) -> None:
        if self.may_train and not self.trains and (parameters := self._parameters()):
            self._handle = register_multi_grad_hook(parameters, self._gradient, mode="any")

    def __exit__(self, *_: object) -> None:
        if self._handle:
            self._handle.remove()
        if _Watch.latest is self:
            _Watch.latest = None

    def handed_out(self) -> None:
        """Comes before each batch for which gradients may come."""
        _Watch.latest = self

    def _gradient(self, _: torch.Tensor) -> None:
        if _Watch.latest is self or not self._training():
            self.trains = self._surprised = True


def every_nth(batches: Iterator[Any], rank: int, ranks: int, *, whole_rounds: Callable[[], bool]) -> Iterator[Any]:
    """Batch number `rank` of each `ranks` batches; of an incomplete last round only without `whole_rounds`."""
    while True:
        own, read = None, 0
        for batch in islice(batches, ranks):  # not kept: those of all ranks may be more than there is memory for
            own, read = batch if read == rank else own, read + 1
        if not read:
            return
        del batch
        if rank < read and (read == ranks or not whole_rounds()):
            yield own
