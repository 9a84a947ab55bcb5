"""The loaders of a job: whether all ranks see the same samples under the same numbers, and what each has read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from distrib.training.checks.cross_rank import SEED_HINT, subset_digest
from distrib.training.checks.usage import UsageChecks
from distrib.training.collectives import JobCollectives, find_differing, gather_objects
from distrib.training.data.epoch import Lessons
from distrib.training.data.load_balancing import Balance
from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.model_parameters import unwrap_model
from distrib.training.step_observer import StepObserver
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.training_state import TrainingState


class Loaders(StepObserver):
    """Prepares the DataLoaders of a job, and checks that ranks share out the same samples."""

    def __init__(self, state: TrainingState, collectives: JobCollectives, usage: UsageChecks) -> None:
        """Create the registry.

        Args:
            state: What the job trains; it is told the size of every batch.
            collectives: Those of the job.
            usage: Warns if no loader is read.
        """
        self._state, self._strategy, self._world = state, state.strategy, state.strategy.world
        self._collectives, self._usage = collectives, usage
        self._elastic = state.strategy if isinstance(state.strategy, ElasticStrategy) else None
        self._lessons = Lessons(lambda: state.step_calls, state.end_epoch)
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
        seed, of_main = self._collectives.from_main(
            lambda: ((generator.initial_seed() if generator else torch.initial_seed()) + turn, own)
        )
        if own != of_main:
            print(
                f"distrib: warning: rank {self._world.rank} chose other samples than the main rank in a Subset: {SEED_HINT}",
                file=sys.stderr,
                flush=True,
            )
        balance = None
        if self._strategy.settings.balance and self._world.size > 1:
            balance = Balance(
                gather=gather_objects,
                parameters=lambda: [p for model in self._state.models for p in model.parameters()],
            )
        sharded = ShardedLoader(
            loader,
            rank=self._world.rank,
            ranks=self._world.size,
            device=self._strategy.device,
            seed=seed,
            training=self._training,
            samples=self._state.set_batch,
            parameters=lambda: [p for model in self._state.models for p in model.parameters() if p.requires_grad],
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

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        if step:
            self.learn()
        self._lessons.step()

    def before_step(self) -> None:
        """Warn at the first step if ranks share out different streams or sampler orders. Collective at the first step."""
        if self.begun:
            return
        self.begun = True
        if self._world.size > 1 and not self._elastic:
            seeds = gather_objects([self._seed, torch.initial_seed()])
            # Ranks that the script has given seeds of their own draw samples of their own. Without any they differ from the start.
            self._noted |= any(first != last for first, last in seeds) and len({last for _, last in seeds}) > 1
            if self._compared and any(find_differing([loader.first_read for loader in self._compared])):
                self._warn_order()
        self._compared.clear()

    def _training(self) -> bool | None:
        models = self._state.models
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
