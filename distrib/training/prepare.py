"""`Job.prepare` and `Job.release`: the handler of each type."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from distrib.errors import TrainingError
from distrib.training.checkpoint import state_sync
from distrib.training.checks.cross_rank import check_identical
from distrib.training.collectives import JobCollectives
from distrib.training.data.job_loaders import JobLoaders
from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.grad_scaler import ScalerSteps
from distrib.training.model_parameters import (
    exclude_model,
    has_misplaced_state,
    has_sharded_parameters,
    move_optimizer_state,
    optimizer_parameters,
    trainable_parameters,
    unwrap_model,
)
from distrib.training.nan_guard import OnNan
from distrib.training.optimizer_step import OptimizerStepper
from distrib.training.out_of_memory import MemoryChecks
from distrib.training.profiler import JobProfiler
from distrib.training.strategies.base import ElasticStrategy
from distrib.training.sync_batchnorm import convert_batchnorm
from distrib.training.telemetry.status_pipe import StatusPipe
from distrib.training.telemetry.step_timer import Meter
from distrib.training.training_state import TrainingState


class PrepareOptions(TypedDict, total=False):
    """The options of one call of `Job.prepare`."""

    find_unused_parameters: bool
    methods: Sequence[str]
    sync_batchnorm: bool
    accumulate: int | None
    on_nan: OnNan


class Preparer:
    """Preparation and release of a job's models, optimizers and loaders."""

    def __init__(
        self,
        state: TrainingState,
        collectives: JobCollectives,
        loaders: JobLoaders,
        status: StatusPipe,
        profiles: JobProfiler,
        meter: Meter | None,
        memory: MemoryChecks,
    ) -> None:
        """Create the preparer.

        Args:
            state: State of the training, which receives prepared models and optimizers.
            collectives: The job's collectives.
            loaders: Shards the DataLoaders.
            status: Reports to the launcher that a model was prepared.
            profiles: Measures the prepared objects, if a profile was requested.
            meter: Measures step times for the launcher; None without one.
            memory: Compares the prepared objects with the memory of the GPU.
        """
        self._state, self._strategy, self._world = state, state.strategy, state.strategy.world
        self._collectives, self._loaders, self._status = collectives, loaders, status
        self._profiles, self._meter, self._memory = profiles, meter, memory
        self._elastic = isinstance(state.strategy, ElasticStrategy)
        """True in mode async, in which the servers compare the prepared objects of all ranks."""
        self._handlers: list[tuple[type, Callable[[Any, PrepareOptions], Any]]] = [
            (ShardedLoader, _keep),
            (DistributedDataParallel, self._prepare_ddp),
            (nn.Module, self._prepare_model),
            (Optimizer, self._prepare_optimizer),
            (DataLoader, lambda loader, _: self._loaders.prepare(loader)),
            (torch.amp.GradScaler, self._prepare_scaler),
            (LRScheduler, _keep),
        ]
        """Handlers by type. The first type of which an object is an instance applies."""

    def prepare(self, things: Sequence[Any], options: PrepareOptions) -> list[Any]:
        """Prepare objects in their order. Collective.

        Args:
            things: Models, optimizers, DataLoaders, schedulers and GradScalers.
            options: The options of `Job.prepare`.

        Returns:
            The prepared objects, in the same order.

        Raises:
            TrainingError: An object cannot be prepared, or ranks prepare different objects.
        """
        models = [thing for thing in things if isinstance(thing, nn.Module)]
        if self._state.has_released and models:
            gc.collect()  # released objects may be in reference cycles
        for model in models:
            _check_model(model)
        self._check_options(options)
        if self._world.size > 1 and not self._elastic:
            check_identical(things, **options)
        known = {id(stepper.optimizer) for stepper in self._state.steppers}
        prepared = [self._prepare(thing, options) for thing in things]
        if self._world.size > 1:
            broadcast = state_sync.broadcast_settings if self._elastic else state_sync.broadcast_states
            broadcast([thing for thing in things if id(thing) not in known], self._collectives)
        for thing in prepared:
            self._profiles.watch(thing)
            if self._meter:
                self._meter.watch(thing)
        if (batches := options["accumulate"]) is not None:
            self._state.set_accumulation(batches)
        self._pair()
        self._memory.check_prepared()
        return prepared

    def check_nothing_prepared(self, caller: str) -> None:
        """Verify that the script has prepared nothing yet.

        Args:
            caller: The method that must come before `job.prepare`, for the message.

        Raises:
            TrainingError: A model or a loader was prepared.
        """
        if self._state.models or self._loaders.prepared:
            raise TrainingError("something was prepared already", hint=f"call {caller} before job.prepare()")

    def _pair(self) -> None:
        """Inform every optimizer's stepper of the models that it trains."""
        for stepper in self._state.steppers:
            stepper.pair(self._state.models)

    def release(self, things: Sequence[Any]) -> None:
        """Release models and optimizers. Collective.

        Args:
            things: Prepared models and optimizers; anything else is ignored.

        Raises:
            TrainingError: A prepared optimizer trains a model that is released.
        """
        state = self._state
        for thing in things:
            for stepper in [one for one in state.steppers if one.optimizer is thing]:
                stepper.retire(
                    f"{type(thing).__name__} takes a step after job.release", hint="prepare it, or another one, again"
                )
                stepper.close()
                state.steppers.remove(stepper)
                state.released_calls += stepper.calls
                state.released_steps += stepper.taken
        for model in [thing for thing in things if isinstance(thing, nn.Module)]:
            if any(_trains(one, model) and not one.is_retired for one in state.steppers):
                raise TrainingError(
                    f"{type(unwrap_model(model)).__name__} is to be released, and an optimizer that is prepared trains it",
                    hint="job.release(model, optimizer)",
                )
            state.models[:] = exclude_model(state.models, model)
            self._strategy.release_model(model)
        state.has_released = True
        self._pair()
        if self._meter:
            self._meter.release(things)

    def _prepare(self, thing: Any, options: PrepareOptions) -> Any:
        for kind, handler in self._handlers:
            if isinstance(thing, kind):
                return handler(thing, options)
        raise TrainingError(
            f"cannot prepare a {type(thing).__name__}",
            hint="prepare modules, optimizers, schedulers, GradScalers and DataLoaders; let other loaders shard by job.rank "
            "(webdataset's split_by_node does)",
        )

    def _prepare_ddp(self, model: DistributedDataParallel, _: PrepareOptions) -> nn.Module:
        if all(one is not model for one in self._state.models):
            self._strategy.adopt_ddp_model(model)
            self._add(model)
        return model

    def _prepare_model(self, model: nn.Module, options: PrepareOptions) -> nn.Module:
        if options["sync_batchnorm"] and self._strategy.device.type != "cpu":
            model = convert_batchnorm(model)
        prepared = self._strategy.prepare_model(
            model, find_unused_parameters=options["find_unused_parameters"], methods=options["methods"]
        )
        for stepper in self._state.steppers:  # prepared before the model moved to the device
            if not stepper.is_retired and has_misplaced_state(stepper.optimizer):
                move_optimizer_state(stepper.optimizer)
        if any(parameter.requires_grad for parameter in prepared.parameters()):
            self._add(prepared)
        return prepared

    def _prepare_optimizer(self, optimizer: Optimizer, options: PrepareOptions) -> Optimizer:
        state = self._state
        if any(stepper.optimizer is optimizer and not stepper.is_retired for stepper in state.steppers):
            return optimizer  # its model is prepared again
        if self._world.size > 1 and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TrainingError(
                f"{type(optimizer).__name__} has no step hooks: torch's Optimizer.__init__ was not called",
                hint="call super().__init__(params, defaults) in it, or prepare its inner optimizer",
            )
        for stepper in state.steppers:
            self._retire_if_shared(stepper, optimizer)
        self._strategy.prepare_optimizer(optimizer)
        stepper = OptimizerStepper(optimizer, self._strategy, state.batch, state.observers, on_nan=options["on_nan"])
        state.steppers.append(stepper)
        stepper.accumulate(state.accumulate)
        return optimizer

    def _retire_if_shared(self, stepper: OptimizerStepper, new: Optimizer) -> None:
        """Retire an optimizer if a new one has the same parameters, and only one may train them."""
        if stepper.is_retired or not (stepper.must_count or self._strategy.exclusive_parameters):
            return
        if {*trainable_parameters(new)}.isdisjoint(trainable_parameters(stepper.optimizer)):
            return
        if self._strategy.averages_gradients:
            reason = "with accumulate a gradient must belong to one optimizer"
        else:
            reason = f"in mode {self._strategy.settings.mode} replicas would diverge"
        stepper.retire(
            f"{type(stepper.optimizer).__name__} takes a step, and {type(new).__name__}, which was prepared after it, has its "
            f"parameters: {reason}",
            hint="use the optimizer that was prepared last, or give each parameter to one of them",
        )

    def _prepare_scaler(self, scaler: torch.amp.GradScaler, _: PrepareOptions) -> torch.amp.GradScaler:
        ScalerSteps(scaler, self._state.steppers)
        return scaler

    def _add(self, model: nn.Module) -> None:
        """Train a model, in place of its earlier wrapper if it is prepared again."""
        self._state.models[:] = [*exclude_model(self._state.models, model), model]
        self._status.prepared()

    def _check_options(self, options: PrepareOptions) -> None:
        if options["sync_batchnorm"] and self._strategy.settings.balance:
            raise TrainingError(
                "sync_batchnorm with --balance: ranks wait for each other inside a step, so their speeds cannot be measured",
                hint="leave out one of them",
                code="option-conflict",
            )
        if options["sync_batchnorm"] and self._elastic:
            raise TrainingError(
                "sync_batchnorm in mode async: ranks would have to wait for each other inside a step",
                hint="leave it out, or use --mode sync",
            )
        if options["sync_batchnorm"] and self._strategy.device.type == "cpu" and self._world.size > 1:
            raise TrainingError(
                "sync_batchnorm on CPUs, which torch's SyncBatchNorm does not support",
                hint="leave it out and use larger batches, or normalize by nn.GroupNorm",
            )


def _trains(stepper: OptimizerStepper, model: nn.Module) -> bool:
    own = set(map(id, optimizer_parameters(stepper.optimizer)))
    own.update(id(parameter) for one in stepper.models for parameter in one.parameters())
    return any(id(parameter) in own for parameter in model.parameters())


def _keep(thing: Any, _: PrepareOptions) -> Any:
    return thing


def _check_model(model: nn.Module) -> None:
    if any(map(is_lazy, model.parameters())):
        raise TrainingError(
            f"{type(model).__name__} has lazy layers without parameters",
            hint="run one batch through it before job.prepare",
        )
    if has_sharded_parameters(model):
        raise TrainingError(
            f"the parameters of {type(model).__name__} are sharded, as by FSDP",
            hint="FSDP averages its gradients itself: prepare the DataLoader only",
        )
