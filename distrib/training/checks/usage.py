"""Detect misuse of `job.prepare`: raise where replicas would diverge, otherwise warn."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distrib.errors import TrainingError
from distrib.training.model_parameters import optimizer_parameters
from distrib.training.training_state import TrainingState
from distrib.utils.log import get_logger

log = get_logger("checks")


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Names of the classes in which scripts wrap models to average gradients themselves. Importing FSDP takes long."""


class UsageChecks:
    """Checks of every optimizer step in this process, whether the optimizer was prepared or not."""

    def __init__(self, state: TrainingState) -> None:
        """Begin to check.

        Args:
            state: The models and optimizers of the job.
        """
        self._state, self._strategy = state, state.strategy
        self._reported: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks = [
            register_optimizer_step_pre_hook(self._check_step),
            register_module_module_registration_hook(self._record_wrapper),
        ]

    def close(self) -> None:
        """Stop checking."""
        for hook in self._hooks:
            hook.remove()

    def warn_no_loader(self, prepared: int) -> None:
        """Warn on rank 0 that training began without a batch of a prepared loader.

        Args:
            prepared: Number of prepared loaders, none of which was read.
        """
        problem = "no prepared DataLoader was read" if prepared else "no DataLoader was passed to job.prepare"
        self._warn(
            f"{problem}: every rank may train on the same samples\n"
            "  read the loader that job.prepare returns, or call torch.manual_seed(SEED + job.rank) after job.prepare"
        )

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._check_outside_backward(optimizer)
        if any(one.taking for one in self._state.steppers):  # an inner optimizer of a prepared one, as in Lookahead
            return
        own = set(map(id, optimizer_parameters(optimizer)))
        for one in self._state.steppers:
            if own.isdisjoint(map(id, optimizer_parameters(one.optimizer))):
                continue
            if one.must_count:
                raise TrainingError(
                    f"{type(optimizer).__name__} updated parameters of the prepared {type(one.optimizer).__name__} without "
                    "calling its step()",
                    hint="prepare the optimizer whose step() is called, such as job.prepare(optimizer.base_optimizer)",
                    code="optimizer-not-prepared",
                )
            return
        if optimizer not in self._reported and (self._strategy.world.size > 1 or self._accumulates):
            self._reported.add(optimizer)
            self._report_unprepared(optimizer)

    def _check_outside_backward(self, optimizer: Optimizer) -> None:
        if torch._C._current_graph_task_id() == -1 or not self._strategy.averages_in_backward:
            return
        if self._strategy.world.size > 1 and self._trains_prepared_model(optimizer):
            raise TrainingError(
                f"{type(optimizer).__name__} took a step within backward, before gradients are averaged: replicas would diverge",
                hint="take the step after backward, or use --mode local",
                code="step-in-backward",
            )

    def _report_unprepared(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if not self._trains_prepared_model(optimizer):
            if self._strategy.world.size > 1 and not self._is_wrapped(optimizer):
                self._warn(
                    f"neither {name} nor its model was passed to job.prepare: every rank trains its own copy\n"
                    "  call model, optimizer = job.prepare(model, optimizer)"
                )
            return
        problem = f"{name} was not passed to job.prepare, but the model that it trains was"
        effect = "its batches are not accumulated" if self._accumulates else "replicas would diverge"
        if self._accumulates or not self._strategy.averages_in_backward:
            raise TrainingError(
                f"{problem}: {effect}",
                hint="model, optimizer = job.prepare(model, optimizer)",
                code="optimizer-not-prepared",
            )
        self._warn(
            f"{problem}: unequal batches are not weighted, NaN gradients not detected, steps not counted\n"
            "  call model, optimizer = job.prepare(model, optimizer)"
        )

    @property
    def _accumulates(self) -> bool:
        return self._state.accumulate > 1

    def _trains_prepared_model(self, optimizer: Optimizer) -> bool:
        own = set(map(id, optimizer_parameters(optimizer)))
        return any(id(parameter) in own for model in self._state.models for parameter in model.parameters())

    def _record_wrapper(self, module: nn.Module, *_: Any) -> None:
        if not _WRAPPERS.isdisjoint(kind.__name__ for kind in type(module).__mro__):
            self._wrapped.add(module)

    def _is_wrapped(self, optimizer: Optimizer) -> bool:
        """Detect parameters of a model that the script wrapped in DistributedDataParallel or FSDP itself."""
        parameters = optimizer_parameters(optimizer)
        own = set(map(id, parameters))
        return any(type(parameter).__name__ == "DTensor" for parameter in parameters) or any(
            id(parameter) in own for model in self._wrapped for parameter in model.parameters()
        )

    def _warn(self, text: str) -> None:
        if self._strategy.world.rank == 0:
            log.warning(f"{text}")
