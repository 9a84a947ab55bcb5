"""The loaders of a job: whether all ranks see the same samples under the same numbers, and what each has read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from distrib.training.checks.cross_rank import SEED_HINT, subset_digest
from distrib.training.checks.usage import UsageChecks
from distrib.training.collectives import JobCollectives, find_differing, gather_objects
from distrib.training.data.epoch import Lessons
from distrib.training.data.load_balancing import Balance
from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.model_parameters import unwrap_model
from distrib.training.strategies.base import ElasticStrategy, TrainingStrategy


class Loaders:
    """Makes loaders those of the job, of which `models` tells the models that learn. `elastic`: ranks may come and go.

    `samples` is told before each batch how many samples this rank has of it and all have together, and says what it was told before;
    `ended` is called at the end of an epoch of training; `steps` says how many calls of `step()` there were, None while there is no
    optimizer.
    """

    def __init__(
        self,
        backend: TrainingStrategy,
        exchange: JobCollectives,
        usage: UsageChecks,
        *,
        elastic: ElasticStrategy | None,
        models: Callable[[], Sequence[nn.Module]],
        steps: Callable[[], int | None],
        samples: Callable[[int, int], tuple[int, int]],
        ended: Callable[[], None],
    ) -> None:
        self._backend, self._world, self._exchange, self._usage = backend, backend.world, exchange, usage
        self._elastic, self._models, self._samples = elastic, models, samples
        self._lessons = Lessons(steps, ended)
        self.prepared = 0
        """How many there are."""
        self.read = False
        """True once this rank took a batch of one of them."""
        self.begun = False
        """Whether a first step was taken."""
        self._noted = False
        self._made_of: dict[torch.Generator, int] = {}
        """Of how many loaders before a generator was."""
        self._seed = torch.initial_seed()
        self._compared: list[ShardedLoader] = []
        """Those that were prepared before the first step: what they read first is compared at it."""

    def prepare(self, loader: DataLoader[Any]) -> ShardedLoader:
        """This rank's share of `loader`. Every rank."""
        self.prepared += 1
        number, generator = self.prepared - 1, loader.generator  # which scripts may seed by rank; the order must be one
        own = subset_digest(loader.dataset) if self._elastic else ""  # in other modes all ranks compare at once
        turn = number
        if generator:  # one of which several loaders are made, as of each epoch, gives each another order
            turn = self._made_of[generator] = self._made_of.get(generator, -1) + 1
        seed, of_main = self._exchange.from_main(
            lambda: ((generator.initial_seed() if generator else torch.initial_seed()) + turn, own)
        )
        if own != of_main:
            print(
                f"distrib: warning: rank {self._world.rank} chose other samples than the main rank in a Subset: {SEED_HINT}",
                file=sys.stderr,
                flush=True,
            )
        balance = None
        if self._backend.settings.balance and self._world.size > 1:
            balance = Balance(
                gather=gather_objects, parameters=lambda: [p for model in self._models() for p in model.parameters()]
            )
        sharded = ShardedLoader(
            loader,
            rank=self._world.rank,
            ranks=self._world.size,
            device=self._backend.device,
            seed=seed,
            training=self._training,
            samples=self._samples,
            parameters=lambda: [p for model in self._models() for p in model.parameters() if p.requires_grad],
            read=self._was_read,
            lessons=self._lessons,
            balance=balance,
            view=self._elastic.view if self._elastic else None,
        )
        if not self.begun and not self._elastic:
            self._compared.append(sharded)
        return sharded

    def learn(self) -> None:
        """Warn if a step was taken before a batch of a prepared loader was read."""
        if not self.read and not self._noted and self._world.size > 1:
            self._noted = True
            self._usage.warn_no_loader(self.prepared)

    def step(self) -> None:
        """`step()` was called, by every rank."""
        self._lessons.step()

    def begin(self) -> None:
        """The first step is taken: says where ranks that share a stream or an order out have not the same one. Every rank."""
        self.begun = True
        if self._world.size > 1 and not self._elastic:
            seeds = gather_objects([self._seed, torch.initial_seed()])
            # Ranks that the script has given seeds of their own draw samples of their own. Without any they differ from the start.
            self._noted |= any(first != last for first, last in seeds) and len({last for _, last in seeds}) > 1
            if self._compared and any(find_differing([loader.first_read for loader in self._compared])):
                self._warn_order()
        self._compared.clear()

    def _training(self) -> bool | None:
        models = self._models()
        return any(unwrap_model(model).training for model in models) if models else None

    def _was_read(self, _: bool | None) -> None:
        self.read = True

    def _warn_order(self) -> None:
        if self._world.rank == 0:
            print(
                "distrib: warning: a sampler or an IterableDataset given to job.prepare does not begin with the same samples on every "
                f"rank, and each rank keeps one of {self._world.size} batches: samples are read twice or never. Seed it alike on every "
                "rank; if it shards by rank itself, leave its loader out of job.prepare",
                file=sys.stderr,
                flush=True,
            )
