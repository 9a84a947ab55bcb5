"""How the ranks train together, one class for each way: what becomes of a model, and what a step of an optimizer is.

`backend_for` is the one place where the strategy that was chosen at launch becomes code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.checks.cross_rank import IS_MEAN, several
from distrib.training.flat import broadcast
from distrib.training.gradients.comm_hook import hook_of
from distrib.training.parameters import learning_of
from distrib.training.rendezvous import timeout_of_job
from distrib.training.strategies.buffers import Buffers
from distrib.training.strategies.ddp_module import Wrapped, frozen_later
from distrib.training.strategies.synchronous import follow_parameters, synchronous, unwrapped, without
from distrib.training.world import World

torch.serialization.add_safe_globals([nullcontext])  # in files of whole models, which have it as their no_sync


class Backend:
    """One rank alone, which has nobody to agree with; what the others are made from.

    A job calls `model` and `optimizer` from `prepare`, in the same order on every rank, and the rest while it trains. What says
    "every rank" may communicate; the others must not wait for anybody, as a script may do them on one rank only.
    """

    together = False
    """Whether gradients, when a step is taken, are the mean over all ranks."""
    one_each = False
    """Whether a parameter can be one optimizer's only, also where no other rank would part from this one."""
    averages_backward = False
    """Whether a model's backward pass averages them, also for an optimizer that was not prepared."""

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        self.strategy, self.world, self.device = strategy, world, device

    @property
    def waited_seconds(self) -> float | None:
        """How long this rank has waited for others so far; None where it waits between backward and the optimizer alone."""
        return None

    @property
    def is_steady(self) -> bool:
        """Whether steps go as they will go on; not while ways to exchange are tried."""
        return True

    @property
    def is_apart(self) -> bool:
        """Whether ranks may have models of their own now, of which one is made later."""
        return False

    @functools.cached_property
    def counting_group(self) -> dist.ProcessGroup:
        """Where counts go: what ranks that have parted tell each other must not meet gradients. Every rank, the first time."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout_of_job())
        return group

    @property
    def averaged(self) -> int:
        """Of how many ranks' gradients a step takes the mean, each weighted alike."""
        return self.world.size if self.together else 1

    @property
    def ranks_in_step(self) -> int:
        """How many ranks' batches make one step of the optimizer."""
        return self.world.size if self.strategy.in_step else 1

    def model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        """`model` on the device, with rank 0's parameters: itself, or in a wrapper that `unwrapped` sees through. Every rank."""
        model.to(self.device)
        if not hasattr(model, "no_sync"):
            model.no_sync = nullcontext  # type: ignore[assignment]  # what scripts for DDP call
        return model

    def adopt(self, model: DistributedDataParallel) -> None:
        """Sees a model that the script has put into DistributedDataParallel itself. Every rank."""
        if self.world.size > 1:
            raise TrainingError(
                f"{type(model.module).__name__} is in DistributedDataParallel already, which averages in each step",
                hint="give job.prepare the model itself",
            )

    def optimizer(self, optimizer: Optimizer) -> None:
        """Sees an optimizer before its first step. Every rank."""
        follow_parameters(optimizer)

    def retire(self, optimizer: Optimizer) -> None:
        """`optimizer` takes no more steps. Every rank."""

    def release(self, model: nn.Module) -> None:
        """`model` is trained no more, and none of the optimizers that may take a step has its parameters. Every rank."""

    def pair(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Learns which of the prepared models `optimizer` trains; again whenever there is another."""

    def exchange(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        """Whether `optimizer`, which trains `models`, wants gradients of the next backward that all ranks share, or its own."""

    def check_used(self, models: Sequence[nn.Module]) -> None:
        """Comes before each step. Raises TrainingError where gradients are missing that other ranks wait for."""

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """One step of `optimizer`, whose own is `update`; what that returns. Every rank."""
        return update()

    def left_out(self, optimizer: Optimizer) -> None:
        """Comes in place of this rank's step when it is left out, as gradients are no numbers."""

    def rescaled(self, optimizer: Optimizer) -> None:
        """A GradScaler divides the optimizer's gradients between backward and step, which leaves no trace on them."""

    def scaled(self, models: Sequence[nn.Module], scaler: torch.amp.GradScaler) -> None:
        """Comes before each step that `scaler` takes with gradients of `models`, which are times its present scale."""

    def stepped(self, models: Sequence[nn.Module]) -> None:
        """Comes after each step of the optimizer that trains `models`, also after one that was left out. Every rank."""

    def settle(self) -> None:
        """Makes the models the same on all ranks, where they have drifted apart: at the end of an epoch of training,
        and before the job is closed. Every rank."""

    def end_rounds(self) -> None:
        """Makes what optimizers train the same on all ranks, before some of it is restored. Every rank."""

    def state_dict(self) -> dict[str, Any]:
        """What must be in a checkpoint beside models and optimizers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from the state that `state_dict` gave on rank 0, with the parameters that the models have now."""

    def close(self) -> None:
        """Ends what the backend has running. Every rank, unless the job has failed."""


class Together(Backend):
    """Every rank holds the whole model, and gradients are averaged in each step.

    Buffers are rank 0's after each step: not before each forward, as with DistributedDataParallel, since one rank may
    evaluate by itself, and what was computed forward must not be changed before it is computed backward.
    """

    together = True
    to_unfreeze = "unfreeze it before job.prepare"

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        super().__init__(strategy, world, device)
        self._models: list[nn.Module] = []
        self._buffers: dict[nn.Module, Buffers] = {}
        self._averaged: set[torch.Tensor] = set()
        """The parameters whose gradients are averaged: those that learnt when they were prepared."""

    def model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        self._models = [*without(self._models, model), model]
        self._buffers = {one: self._buffers.get(one) or Buffers(one) for one in self._models}
        return model

    def release(self, model: nn.Module) -> None:
        self._models = without(self._models, model)
        self._buffers = {one: self._buffers[one] for one in self._models}

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        for parameter in learning_of(optimizer):
            if parameter.grad is not None and parameter not in self._averaged:
                if name := name_in(self._models, parameter):
                    raise TrainingError(
                        f"{name} learns only since job.prepare, and is not averaged: every rank would have its own",
                        hint=self.to_unfreeze,
                    )
                raise of_no_model(parameter)
        return update()

    def stepped(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            broadcast(self._buffers[model].present())

    def settle(self) -> None:
        self.stepped(self._models)  # there may have been batches since the last step


class Synchronous(Together):
    """Gradients are averaged by torch's DistributedDataParallel."""

    averages_backward = True
    to_unfreeze = "unfreeze it before job.prepare, or prepare the model again: model = job.prepare(job.unwrap(model))"

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        super().__init__(strategy, world, device)
        self._awaited: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """Of each unwrapped model, the parameters whose gradients DistributedDataParallel waits for."""
        self._wishes: dict[Optimizer, tuple[list[nn.Module], bool]] = {}
        """The models that an optimizer trains, and whether it wants their gradients exchanged."""

    def model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        model = synchronous(
            model,
            self.device,
            self.world.size,
            find_unused_parameters=find_unused_parameters,
            strategy=self.strategy,
        )
        self._await(model)
        return super().model(model, find_unused_parameters=find_unused_parameters)

    @property
    def is_steady(self) -> bool:
        return all(hook.is_steady for hook in map(hook_of, self._models) if hook)

    def adopt(self, model: DistributedDataParallel) -> None:
        self._await(model)
        super().model(model, find_unused_parameters=model.find_unused_parameters)

    def _await(self, model: nn.Module) -> None:
        inner = unwrapped(model)
        self._awaited[inner] = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self._see_averaged()

    def _see_averaged(self) -> None:
        self._averaged = {parameter for named in self._awaited.values() for parameter in named.values()}

    def release(self, model: nn.Module) -> None:
        super().release(model)
        self._awaited.pop(unwrapped(model), None)
        self._see_averaged()

    def retire(self, optimizer: Optimizer) -> None:
        self._wishes.pop(optimizer, None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for hook in filter(None, map(hook_of, self._models)):
            hook.forget()  # what diverged is to leave nothing behind

    def scaled(self, models: Sequence[nn.Module], scaler: torch.amp.GradScaler) -> None:
        for model in models:
            if hook := hook_of(model):
                hook.units.follow(scaler)

    def pair(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.broadcast_buffers = False  # `stepped` does it, at a time at which every rank is there

    def check_used(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            if not isinstance(model, DistributedDataParallel):
                continue
            inner = unwrapped(model)
            own = [p.grad for p in self._averaged_by(model) if p.grad is not None]
            if own and not _was_called(model) and not any(hasattr(gradient, IS_MEAN) for gradient in own):
                raise TrainingError(
                    f"{type(inner).__name__} has gradients, but what job.prepare made of it was never called to train: nobody averages them",
                    hint="model = job.prepare(model), and call model(...) or its methods: neither what it was before nor "
                    "job.unwrap(model), nor a part of it by itself, such as model.encoder(...), and backward where they return; "
                    "a gradient that the script sets itself: p.grad = job.all_reduce(gradient)",
                )
            if isinstance(model, Wrapped) and not model.static_graph and not all(hasattr(g, IS_MEAN) for g in own):
                model.check_once()
            if model.find_unused_parameters or model.static_graph:
                continue
            if all(p.grad is None for p in model.parameters()) or (missing := _without_gradient(model)) is None:
                continue
            # Those that torch names; those without a gradient where it names none, as the script has set some to zero.
            unused = {
                name: p
                for name, p in self._awaited[inner].items()
                if name in missing or (p.grad is None and not missing)
            }
            if frozen := [name for name, p in unused.items() if not p.requires_grad]:
                raise frozen_later(frozen, type(inner).__name__)
            raise TrainingError(
                f"rank {self.world.rank}: {several(list(unused))} "
                f"got no gradient in this step of {type(inner).__name__}, and is waited for",
                hint="job.prepare(..., find_unused_parameters=True), or, if no rank uses it, freeze it with "
                "requires_grad_(False) before job.prepare",
            )

    def _averaged_by(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that no other model averages, in which they are, too."""
        others = (unwrapped(one) for one in self._models if one is not model and _was_called(one))
        elsewhere = {parameter for inner in others for parameter in self._awaited[inner].values()}
        return {*self._awaited[unwrapped(model)].values()} - elsewhere

    def exchange(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        self._wishes[optimizer] = list(models), on
        for model in models:
            if isinstance(model, DistributedDataParallel):
                # What DDP's no_sync() sets. An exchange too many is harmless; one too few, where optimizers share a model, is not.
                model.require_backward_grad_sync = any(
                    wanted and any(one is model for one in trained) for trained, wanted in self._wishes.values()
                )


def _was_called(model: nn.Module) -> bool:
    """Whether a model of DistributedDataParallel has computed anything to train: torch sets itself up in any first forward."""
    return model._averages if isinstance(model, Wrapped) else getattr(model, "_lazy_init_ran", True)


def _without_gradient(model: DistributedDataParallel) -> list[str] | None:
    """The names of parameters to which the latest backward gave no gradient, and which are waited for, where torch tells them; None
    where it gave all. The script may have cleared some since."""
    if isinstance(model, Wrapped):
        return model.without_gradient()
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return []
    return None


def name_in(models: Sequence[nn.Module], parameter: torch.Tensor) -> str | None:
    """What `parameter` is called in the one of `models` that has it."""
    names = (pair for model in models for pair in unwrapped(model).named_parameters())
    return next((str(name) for name, one in names if one is parameter), None)


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank has parts of its parameters only, as with FSDP or tensor parallelism."""
    kinds = {type(thing).__name__ for things in (model.modules(), model.parameters()) for thing in things}
    return not kinds.isdisjoint(("DTensor", "FullyShardedDataParallel"))  # by name, as importing either takes long


def of_no_model(parameter: torch.Tensor) -> TrainingError:
    """What is said of a parameter that an optimizer has been given since, from elsewhere."""
    return TrainingError(
        f"a parameter {list(parameter.shape)} of the optimizer is of no prepared model: every rank would have its own",
        hint="prepare its model too",
    )


def backend_for(strategy: Strategy, world: World, device: torch.device) -> Backend:
    """The backend that carries out `strategy`. Raises TrainingError where this machine cannot."""
    if strategy.mode in ("sync", "local") and world.size == 1:
        return Backend(strategy, world, device)
    if strategy.mode == "sync" and strategy.backend == "torch":
        return Synchronous(strategy, world, device)
    if strategy.mode == "sync":
        from distrib.training.strategies.horovod import Horovod

        return Horovod(strategy, world, device)
    if strategy.mode == "local":
        from distrib.training.strategies.local_sgd import Local

        return Local(strategy, world, device)
    from distrib.training.strategies.parameter_server import Asynchronous

    return Asynchronous(strategy, world, device)
