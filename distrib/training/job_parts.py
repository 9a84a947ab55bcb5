"""The parts of a job, to which the methods of `Job` delegate."""

from __future__ import annotations

import math
import os
from typing import Any

from distrib.environment import DISTRIB_PROFILE
from distrib.errors import TrainingError
from distrib.training import shutdown
from distrib.training.checkpoint.manager import Checkpoints
from distrib.training.checkpoint.replicas import Run
from distrib.training.checks.divergence import DivergenceCheck
from distrib.training.checks.usage import UsageChecks
from distrib.training.collectives import JobCollectives
from distrib.training.data.job_loaders import JobLoaders
from distrib.training.gradient_accumulation import BatchSamples
from distrib.training.out_of_memory import MemoryChecks
from distrib.training.prepare import Preparer
from distrib.training.profiler import JobProfiler
from distrib.training.step_observer import LastStep
from distrib.training.strategies.base import ElasticStrategy, TrainingStrategy
from distrib.training.telemetry.status_pipe import StatusPipe
from distrib.training.telemetry.step_timer import Meter
from distrib.training.training_state import TrainingState


class JobParts:
    """The parts of one job, connected with each other."""

    def __init__(self, strategy: TrainingStrategy, divergence_check_steps: int) -> None:
        """Create and connect the parts.

        Args:
            strategy: The strategy that was chosen at launch.
            divergence_check_steps: Steps between two comparisons of the parameters; 0 disables them.
        """
        world = strategy.world
        self.strategy = strategy
        self.elastic = strategy if isinstance(strategy, ElasticStrategy) else None
        self.run = Run.from_environment(os.environ)
        self.collectives = JobCollectives(world, self.elastic)
        self.status = StatusPipe.from_environment()
        self.profiles = JobProfiler(strategy.device, os.environ, alone=world.size == 1)
        self.last_step = LastStep()
        batch = BatchSamples(own=1, all=world.size)
        state = self.state = TrainingState(strategy=strategy, batch=batch, accumulate=strategy.settings.accumulate)
        state.samples = 1, world.size
        self.checkpoints = Checkpoints(self.run, state, self.collectives)
        usage = UsageChecks(state)
        loaders = JobLoaders(state, self.collectives, usage)
        divergence = None
        if world.size > 1 and not self.elastic:
            divergence = DivergenceCheck(state, divergence_check_steps)
            state.observers.append(divergence)
        state.observers += [self.last_step, self.status, loaders]
        meter = None
        if self.status.is_read and DISTRIB_PROFILE not in os.environ:
            meter = Meter(
                strategy.device, self.status.measured, lambda: strategy.waited_seconds, lambda: strategy.is_steady,
                lambda: state.samples_per_step, by_tcp=bool(self.elastic),
                local_ranks=max(1, world.local_size),
            )  # fmt: skip
        self.shutdown = shutdown.JobShutdown(state, self.collectives, self.status, usage, divergence)
        memory = MemoryChecks(state)  # its hook of exceptions is the outermost, and the first to be removed
        state.observers.append(memory)
        self.preparer = Preparer(state, self.collectives, loaders, self.status, self.profiles, meter, memory)

    @property
    def is_main(self) -> bool:
        """True on the main rank. In mode async, waits until the servers confirm it."""
        return self.elastic.is_main if self.elastic else self.strategy.world.rank == 0

    def weigh(self, amount: float) -> None:
        """Set the weight of this rank's batch; see `Job.weigh`.

        Args:
            amount: Terms of this rank's loss.

        Raises:
            TrainingError: The weight is negative or not finite, or the weights of all ranks are 0.
        """
        if not 0 <= amount < math.inf:
            raise TrainingError(f"weigh({amount!r})", hint="give the number of terms of this rank's loss, 0 or more")
        averages = self.strategy.averaged_ranks > 1
        every = float(self.collectives.all_reduce(float(amount), "sum")) if averages else amount
        if not every:
            raise TrainingError("weigh: the weights of all ranks are 0", hint="leave such a batch out on every rank")
        self.state.weigh_batch(amount, every)

    def settle(self) -> None:
        """Make the models identical on all ranks. Collective."""
        self.state.synchronize()
        if self.elastic:
            self.collectives.all_reduce(0.0, "sum")  # includes the steps of all other ranks
            self.state.synchronize()

    def save(
        self, path: str | os.PathLike[str], objects: dict[str, Any], per_rank: dict[str, Any] | None, *, keep: int
    ) -> None:
        """Check the last gradients, and write a checkpoint; see `Job.save`.

        Args:
            path: The file.
            objects: Objects with a `state_dict`, and plain values, by name.
            per_rank: The same of this rank alone.
            keep: Number of checkpoints to keep, with this one.
        """
        for stepper in self.state.steppers:
            stepper.check_last_step(alone=True)
        self.checkpoints.save(path, objects, per_rank, keep=keep, is_main=self.is_main)

    def log(self, metrics: dict[str, Any]) -> None:
        """Send metrics to the launcher; see `Job.log`.

        Args:
            metrics: Metrics by name.
        """
        is_main = self.elastic.seems_main if self.elastic else self.strategy.world.rank == 0
        self.status.metrics(metrics, is_main=is_main)
