"""How the ranks train together, one class for each way: what becomes of a model, and what a step of an optimizer is.

`backend_for` is the one place where the strategy that was chosen at launch becomes code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.flat import broadcast
from distrib.training.synchronous import follow_parameters, synchronous
from distrib.training.world import World


class Backend:
    """One rank alone, which has nobody to agree with; what the others are made from.

    A job calls `model` and `optimizer` from `prepare`, in the same order on every rank, and the rest while it trains. What says
    "every rank" may communicate; the others must not wait for anybody, as a script may do them on one rank only.
    """

    together = False
    """Whether gradients, when a step is taken, are the mean over all ranks."""

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        self.strategy, self.world, self.device = strategy, world, device

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

    def optimizer(self, optimizer: Optimizer) -> None:
        """Sees an optimizer before its first step. Every rank."""
        follow_parameters(optimizer)

    def pair(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Learns which of the prepared models `optimizer` trains; again whenever there is another."""

    def exchange(self, models: Sequence[nn.Module], on: bool) -> None:
        """Whether the next backward of `models` ends with gradients that all ranks share, or leaves each its own."""

    def check_used(self, models: Sequence[nn.Module]) -> None:
        """Comes before each step. Raises TrainingError where gradients are missing that other ranks wait for."""

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """One step of `optimizer`, whose own is `update`; what that returns. Every rank."""
        return update()

    def left_out(self, optimizer: Optimizer) -> None:
        """Comes in place of this rank's step when it is left out, as gradients are no numbers."""

    def rescaled(self, optimizer: Optimizer) -> None:
        """A GradScaler divides the optimizer's gradients between backward and step, which leaves no trace on them."""

    def stepped(self, models: Sequence[nn.Module]) -> None:
        """Comes after each step of the optimizer that trains `models`, also after one that was left out. Every rank."""

    def settle(self) -> None:
        """Makes the models the same on all ranks, where they have drifted apart: at the end of an epoch of training,
        and before the job is closed. Every rank."""

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

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        super().__init__(strategy, world, device)
        self._models: list[nn.Module] = []

    def model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        self._models.append(model)
        return model

    def stepped(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            broadcast(list(model.buffers()))

    def settle(self) -> None:
        self.stepped(self._models)  # there may have been batches since the last step


class Synchronous(Together):
    """Gradients are averaged by torch's DistributedDataParallel."""

    def model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        model = synchronous(
            model,
            self.device,
            self.world.size,
            find_unused_parameters=find_unused_parameters,
            strategy=self.strategy,
        )
        return super().model(model, find_unused_parameters=find_unused_parameters)

    def pair(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.broadcast_buffers = False  # `stepped` does it, at a time at which every rank is there

    def check_used(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
                continue
            unused = [n for n, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
            if unused and any(p.grad is not None for p in model.parameters()):
                raise TrainingError(
                    f"rank {self.world.rank}: {', '.join(unused[:3])}{f' and {len(unused) - 3} more' * (len(unused) > 3)} "
                    f"got no gradient in this step of {type(model.module).__name__}, and the other ranks wait for it",
                    hint="job.prepare(..., find_unused_parameters=True), or freeze what is not used with requires_grad_(False)",
                )

    def exchange(self, models: Sequence[nn.Module], on: bool) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = on  # what DDP's no_sync() sets


def backend_for(strategy: Strategy, world: World, device: torch.device) -> Backend:
    """The backend that carries out `strategy`. Raises TrainingError where this machine cannot."""
    if strategy.mode in ("sync", "local") and world.size == 1:
        return Backend(strategy, world, device)
    if strategy.mode == "sync" and strategy.backend == "torch":
        return Synchronous(strategy, world, device)
    if strategy.mode == "sync":
        from distrib.training.horovod import Horovod

        return Horovod(strategy, world, device)
    if strategy.mode == "local":
        from distrib.training.local import Local

        return Local(strategy, world, device)
    from distrib.training.parameter_server.worker import Asynchronous

    return Asynchronous(strategy, world, device)
