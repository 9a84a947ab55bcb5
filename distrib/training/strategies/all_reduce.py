"""Training with identical replicas: gradients are averaged in every step, and buffers are broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.collectives import broadcast_tensors
from distrib.training.model_parameters import exclude_model, find_parameter_name, trainable_parameters, unwrap_model
from distrib.training.strategies.base import TrainingStrategy
from distrib.training.world import World


class SynchronizedBuffers:
    """Buffers of a model that have the same shapes and types on every rank.

    They are the buffers at the time of `prepare`, without those that DistributedDataParallel ignores. A rank may replace a buffer by
    one of another shape, such as a growing mask. The new buffer stays local, and the former value is sent.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record the buffers of a model.

        Args:
            model: The model, wrapped or not.
        """
        self._model = unwrap_model(model)
        ignored = set(getattr(self._model, "_ddp_params_and_buffers_to_ignore", ()))
        self._recorded = {name: buffer for name, buffer in self._model.named_buffers() if name not in ignored}

    def current(self) -> list[torch.Tensor]:
        """Return the buffers in the same order, shapes and types on every rank at any time."""
        now = dict(self._model.named_buffers())
        for name, recorded in self._recorded.items():
            buffer = now.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (recorded.shape, recorded.dtype):
                if buffer.is_inference() and not torch.is_inference_mode_enabled():
                    buffer = buffer.clone()  # torch forbids writing to an inference tensor
                    path, _, last = name.rpartition(".")
                    self._model.get_submodule(path)._buffers[last] = buffer
                self._recorded[name] = buffer
        return [*self._recorded.values()]


class AllReduceStrategy(TrainingStrategy):
    """Base class of strategies in which every rank holds the whole model and gradients are averaged in every step.

    Buffers are broadcast from rank 0 after each step. DistributedDataParallel does so before each forward pass, but one rank may
    evaluate alone, and buffers must not change between forward and backward.
    """

    averages_gradients = True
    unfreeze_hint = "unfreeze it before job.prepare"

    def __init__(self, settings: Strategy, world: World, device: torch.device) -> None:
        super().__init__(settings, world, device)
        self._models: list[nn.Module] = []
        self._buffers: dict[nn.Module, SynchronizedBuffers] = {}
        self._averaged: set[torch.Tensor] = set()
        """Parameters whose gradients are averaged: those that were trainable when they were prepared."""

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        """Record a model and its buffers.

        Args:
            model: The script's module.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods that run as forward passes.
        """
        self._models = [*exclude_model(self._models, model), model]
        self._buffers = {one: self._buffers.get(one) or SynchronizedBuffers(one) for one in self._models}
        return model

    def release_model(self, model: nn.Module) -> None:
        """Stop broadcasting the buffers of a model.

        Args:
            model: A prepared model.
        """
        self._models = exclude_model(self._models, model)
        self._buffers = {one: self._buffers[one] for one in self._models}

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """Take one step, after a check that all gradients were averaged.

        Args:
            optimizer: A prepared optimizer.
            update: The optimizer's own step.

        Raises:
            TrainingError: A parameter was unfrozen after `prepare`, or belongs to no prepared model.
        """
        for parameter in trainable_parameters(optimizer):
            if parameter.grad is not None and parameter not in self._averaged:
                if name := find_parameter_name(self._models, parameter):
                    raise TrainingError(
                        f"{name} was unfrozen after job.prepare: its gradient is not averaged and replicas would diverge",
                        hint=self.unfreeze_hint,
                        code="gradient-not-reduced",
                    )
                raise unprepared_parameter(parameter)
        return update()

    def after_step(self, models: Sequence[nn.Module]) -> None:
        """Broadcast rank 0's buffers. Collective.

        Args:
            models: The models that the optimizer trains.
        """
        for model in models:
            broadcast_tensors(self._buffers[model].current())

    def synchronize(self) -> None:
        self.after_step(self._models)  # there may have been batches since the last step


def unprepared_parameter(parameter: torch.Tensor) -> TrainingError:
    """Make the error for a parameter that was added to an optimizer from a model that was not prepared.

    Args:
        parameter: The parameter that the optimizer trains.

    Returns:
        The error to raise.
    """
    return TrainingError(
        f"a parameter {list(parameter.shape)} of the optimizer belongs to no prepared model: replicas would diverge",
        hint="prepare its model too",
        code="model-not-prepared",
    )
