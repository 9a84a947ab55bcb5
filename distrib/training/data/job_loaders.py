"""Loaders of a job: prepared with a common seed, and compared across ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from distrib.errors import TrainingError
from distrib.training.checks.cross_rank import SEED_HINT, subset_digest
from distrib.training.checks.usage import UsageChecks
from distrib.training.collectives import JobCollectives, find_differing, gather_objects
from distrib.training.data.epoch import LoaderPass, StepClock
from distrib.training.data.load_balancing import LoadBalancer
from distrib.training.data.sharded_loader import LoaderContext, ShardedLoader
from distrib.training.model_parameters import unwrap_model
from distrib.training.step_observer import StepObserver
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.training_state import TrainingState
from distrib.utils.log import get_logger

log = get_logger("data")


class JobLoaders(StepObserver):
    """Loaders of a job: prepares them, and compares the read epochs and orders across ranks."""

    def __init__(self, state: TrainingState, collectives: JobCollectives, usage: UsageChecks) -> None:
        """Begin without loaders.

        Args:
            state: State of the training. It receives the size of every batch.
            collectives: The job's collectives.
            usage: Checks that warn if no prepared loader is read.
        """
        self._state, self._collectives, self._usage = state, collectives, usage
        strategy = state.strategy
        self._elastic = strategy if isinstance(strategy, ElasticStrategy) else None
        self._context = LoaderContext(
            rank=strategy.world.rank,
            ranks=strategy.world.size,
            device=strategy.device,
            clock=StepClock(lambda: state.step_calls),
            is_training=self._is_training,
            set_batch_samples=state.set_batch,
            on_read=self._on_read,
            on_epoch_end=self._on_epoch_end,
            choose_share=self._elastic.view if self._elastic else None,
        )
        self.prepared = 0
        """Number of loaders."""
        self.has_stepped = False
        """True once the first step was taken."""
        self._ended_epoch: int | None = None
        """Epoch whose loader was exhausted before the step of its last batch, because the script reads ahead."""
        self._is_read = False
        self._is_checked = False
        self._generator_uses: dict[torch.Generator, int] = {}
        self._seed = torch.initial_seed()
        self._compared: list[ShardedLoader] = []
        """Loaders prepared before the first step, at which their first samples are compared."""

    def prepare(self, loader: DataLoader[Any]) -> ShardedLoader:
        """Share a loader among the ranks. Collective.

        Args:
            loader: The script's loader.

        Returns:
            This rank's share.
        """
        number, generator = self.prepared, loader.generator  # ranks may seed it differently
        self.prepared += 1
        own = subset_digest(loader.dataset) if self._elastic else ""  # other modes compare at the first step
        if generator:  # another order for each loader of one generator: a script may make a loader in each epoch
            number = self._generator_uses[generator] = self._generator_uses.get(generator, -1) + 1
        seed, of_main = self._collectives.from_main(
            lambda: ((generator.initial_seed() if generator else torch.initial_seed()) + number, own)
        )
        if own != of_main:
            log.warning(f"rank {self._context.rank} chose other samples than the main rank in a Subset: {SEED_HINT}")
        balancer = None
        if self._state.strategy.settings.balance and self._context.ranks > 1:
            balancer = LoadBalancer(
                gather=gather_objects,
                parameters=lambda: [p for model in self._state.models for p in model.parameters()],
            )
        sharded = ShardedLoader(loader, self._context, seed=seed, balancer=balancer)
        if not self.has_stepped and not self._elastic:
            self._compared.append(sharded)
        return sharded

    def before_step(self) -> None:
        """Warn at the first step if ranks read different streams or orders from a shared source. Collective then."""
        if self.has_stepped:
            return
        self.has_stepped = True
        if self._context.ranks > 1 and not self._elastic:
            seeds = gather_objects([self._seed, torch.initial_seed()])
            # A script that seeds ranks differently makes its own samples. Without any seed, ranks differ from the start.
            self._is_checked |= any(first != last for first, last in seeds) and len({last for _, last in seeds}) > 1
            differing = find_differing([loader.first_read for loader in self._compared]) if self._compared else []
            if any(differing) and not self._context.rank:
                log.warning(
                    "a sampler or IterableDataset begins with different samples on different ranks: samples are read twice "
                    "or never\n  seed it equally on every rank; leave its loader out of job.prepare if it shards by rank itself"
                )
        self._compared.clear()

    def _is_training(self) -> bool | None:
        models = self._state.models
        return any(unwrap_model(model).training for model in models) if models else None

    def _on_read(self) -> None:
        self._is_read = True

    def _on_epoch_end(self, one: LoaderPass) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # a prefetching thread ends at another step on each rank
        clock, behind = self._context.clock, 0
        if (steps := clock.count_steps()) is not None:
            behind = one.batches + one.outstanding_steps - (steps - one.begin_steps)
        if 0 < behind <= 2:  # batches that were read ahead; more of them are accumulated gradients
            self._ended_epoch, clock.outstanding_steps = one.number, behind  # backward() needs the present parameters
        else:
            self._finish_epoch(one.number)

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        """Finish an epoch whose loader was exhausted before its last step. Collective then.

        Args:
            step: Number of the step; 0 if none was taken.
            updated: True if the step updated the parameters, or a function that returns it.
        """
        if step and not self._is_read and not self._is_checked and self._context.ranks > 1:
            self._is_checked = True
            self._usage.warn_no_loader(self.prepared)
        if self._ended_epoch is not None:
            number, self._ended_epoch, self._context.clock.outstanding_steps = self._ended_epoch, None, 0
            self._finish_epoch(number)

    def _finish_epoch(self, number: int) -> None:
        self._state.end_epoch()
        if self._context.ranks == 1 or self._elastic or self._context.clock.count_steps() is None:
            return
        if (newest := int(self._collectives.all_reduce(float(number), "max"))) != number:
            raise TrainingError(
                f"rank {self._context.rank} has read epoch {number} of a DataLoader, another rank epoch {newest}: samples were read "
                "twice or never",
                hint="begin each training pass on every rank, or call loader.set_epoch(epoch) on every rank before it",
                code="epochs-differ",
            )
