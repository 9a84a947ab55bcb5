"""Interface of the training strategies, and the creation of the strategy chosen at launch.

To add a strategy, write a module with a subclass of `TrainingStrategy` and register it in `distrib.strategy.STRATEGIES`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.strategy import STRATEGIES, Strategy
from distrib.training.model_parameters import move_optimizer_state
from distrib.training.rendezvous import collective_timeout
from distrib.training.world import World

T = TypeVar("T")

torch.serialization.add_safe_globals([nullcontext])  # pickled models contain it as their no_sync


class TrainingStrategy:
    """Interface of the training strategies, and the strategy of a single rank.

    `Job.prepare` calls `prepare_model` and `prepare_optimizer` in the same order on every rank. Methods marked "collective" may
    communicate. Other methods must not wait for another rank, because a script may call them on one rank only.
    """

    averages_gradients = False
    """True if gradients are the mean over all ranks when a step is taken."""
    exclusive_parameters = False
    """True if a parameter must not be in two optimizers, even if replicas stay equal."""
    gradients_are_revocable = True
    """False if the NaN check must end before a step is taken, as a gradient that reached a server cannot be revoked."""
    averages_in_backward = False
    """True if the model's backward pass averages gradients, also for an optimizer that was not prepared."""

    def __init__(self, settings: Strategy, world: World, device: torch.device) -> None:
        """Create the strategy of this rank.

        Args:
            settings: The strategy chosen at launch.
            world: The ranks of the job.
            device: The device of this rank.
        """
        self.settings, self.world, self.device = settings, world, device

    @property
    def waited_seconds(self) -> float | None:
        """Seconds that this rank has waited for other ranks; None if it waits only between backward and the optimizer."""
        return None

    @property
    def is_steady(self) -> bool:
        """False while step times are not typical, as during bucket trials or exact warm-up steps."""
        return True

    @property
    def replicas_differ(self) -> bool:
        """True if ranks may have different parameters now, which a later synchronization makes equal."""
        return False

    @functools.cached_property
    def step_count_group(self) -> dist.ProcessGroup:
        """The Gloo group for step counts, separate from gradients. Collective at the first access."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=collective_timeout())
        return group

    @property
    def averaged_ranks(self) -> int:
        """Number of ranks over whose gradients a step takes the unweighted mean."""
        return self.world.size if self.averages_gradients else 1

    @property
    def ranks_per_step(self) -> int:
        """Number of ranks whose batches make one step of the optimizer."""
        return self.world.size if self.settings.in_step else 1

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        """Move a model to the device and give it rank 0's parameters. Collective.

        Args:
            model: The script's module.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods that run as forward passes.

        Returns:
            The model, or a wrapper that `unwrap_model` removes.
        """
        model.to(self.device)
        if not hasattr(model, "no_sync"):
            model.no_sync = nullcontext  # type: ignore[assignment]  # scripts written for DDP call it
        return model

    def adopt_ddp_model(self, model: DistributedDataParallel) -> None:
        """Register a model that the script wrapped in DistributedDataParallel itself. Collective.

        Args:
            model: The script's wrapper.

        Raises:
            TrainingError: The strategy does not average gradients with DistributedDataParallel.
        """
        if self.world.size > 1:
            raise TrainingError(
                f"{type(model.module).__name__} is wrapped in DistributedDataParallel, which averages gradients in every step",
                hint="pass the model itself to job.prepare",
            )

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Register an optimizer before its first step. Collective.

        Args:
            optimizer: The script's optimizer.
        """
        move_optimizer_state(optimizer)

    def release_optimizer(self, optimizer: Optimizer) -> None:
        """Drop the state of an optimizer that takes no more steps. Collective.

        Args:
            optimizer: A prepared optimizer.
        """

    def release_model(self, model: nn.Module) -> None:
        """Drop the state of a model that no prepared optimizer trains any more. Collective.

        Args:
            model: A prepared model.
        """

    def pair_models(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Record the prepared models that an optimizer trains; called again after each change.

        Args:
            optimizer: A prepared optimizer.
            models: All models of which it has parameters.
        """

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        """Switch the averaging of gradients for the next backward passes.

        Args:
            optimizer: A prepared optimizer.
            models: The models that it trains.
            on: False while gradients accumulate on this rank.
        """

    def check_gradients(self, models: Sequence[nn.Module]) -> None:
        """Verify before a step that every gradient was averaged.

        Args:
            models: The models that the optimizer trains.

        Raises:
            TrainingError: A gradient was not averaged, or a parameter has no gradient that other ranks wait for.
        """

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """Take one step of an optimizer. Collective.

        Args:
            optimizer: A prepared optimizer.
            update: The optimizer's own step.

        Returns:
            The result of `update`.
        """
        return update()

    def on_step_skipped(self, optimizer: Optimizer) -> None:
        """Handle a step that this rank skips because of NaN or Inf gradients.

        Args:
            optimizer: A prepared optimizer.
        """

    def on_gradients_unscaled(self, optimizer: Optimizer) -> None:
        """Handle a GradScaler that divided gradients between backward and step.

        Args:
            optimizer: A prepared optimizer.
        """

    def on_scaled_step(self, models: Sequence[nn.Module], scaler: torch.amp.GradScaler) -> None:
        """Record the scale of the gradients before a step that a GradScaler takes.

        Args:
            models: The models whose gradients are multiplied by the present scale.
            scaler: The script's GradScaler.
        """

    def after_step(self, models: Sequence[nn.Module]) -> None:
        """Synchronize buffers after a step, also after a skipped one. Collective.

        Args:
            models: The models that the optimizer trains.
        """

    def synchronize(self) -> None:
        """Make the models identical on all ranks, at the end of an epoch and before the job closes. Collective."""

    def finish_rounds(self) -> None:
        """Make trained parameters identical on all ranks, before some of them are restored. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs beside models and optimizers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the strategy's state from a checkpoint, after the models' parameters.

        Args:
            state: The result of `state_dict` on rank 0.
        """

    def close(self) -> None:
        """Stop threads and connections of the strategy. Collective, unless the job has failed."""


class ElasticStrategy(TrainingStrategy):
    """Strategy whose ranks may leave and join. Its servers carry the job's collectives."""

    @property
    def is_main(self) -> bool:
        """True if this rank prints and saves. Waits until the servers confirm it."""
        raise NotImplementedError

    @property
    def seems_main(self) -> bool:
        """True if this rank is the main rank according to its latest information. Does not wait."""
        raise NotImplementedError

    def from_main(self, work: Callable[[], T]) -> T:
        """Call a function on the main rank and distribute its result. Collective.

        Args:
            work: A function whose result can be pickled.

        Returns:
            The result of `work` on the main rank. Its exception, if any, is raised on every rank.
        """
        raise NotImplementedError

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce a tensor over the present ranks. Collective.

        Args:
            tensor: A tensor of the same shape and type on every rank.
            op: `mean`, `sum`, `max` or `min`.

        Returns:
            A new tensor.
        """
        raise NotImplementedError

    def gather(self, own: bytes) -> dict[int, bytes]:
        """Gather the bytes of the present ranks. Collective.

        Args:
            own: This rank's bytes.

        Returns:
            The bytes by rank.
        """
        raise NotImplementedError

    def view(self, epoch: int, training: bool) -> tuple[int, int]:
        """Choose the share of an epoch that this rank reads.

        Args:
            epoch: Number of the epoch.
            training: True if every rank must take the same number of steps.

        Returns:
            The number of this rank's share, and the number of shares.
        """
        raise NotImplementedError

    def staleness(self) -> dict[str, float]:
        """Return mean, median, p95 and max of the staleness of updates; empty before the first."""
        raise NotImplementedError


def create_strategy(settings: Strategy, world: World, device: torch.device) -> TrainingStrategy:
    """Create the training strategy that was chosen at launch.

    Args:
        settings: The strategy chosen at launch.
        world: The ranks of the job.
        device: The device of this rank.

    Returns:
        An instance of the registered class; `TrainingStrategy` itself for a single rank without servers.

    Raises:
        TrainingError: This machine does not support the strategy.
    """
    if world.size == 1 and settings.mode != "async":
        return TrainingStrategy(settings, world, device)
    name = settings.mode if settings.backend == "torch" else settings.backend
    module, _, kind = STRATEGIES[name].partition(":")
    strategy: TrainingStrategy = getattr(importlib.import_module(module), kind)(settings, world, device)
    return strategy
