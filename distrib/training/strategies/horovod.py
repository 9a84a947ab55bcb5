"""Synchronous training with Horovod instead of torch's collectives (`--backend horovod`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.strategy import Strategy
from distrib.training.model_parameters import trainable_parameters
from distrib.training.strategies.all_reduce import AllReduceStrategy
from distrib.training.strategies.base import TrainingStrategy
from distrib.training.world import World


class HorovodStrategy(AllReduceStrategy):
    """Strategy that averages gradients with `hvd.DistributedOptimizer`, before `backward()` returns, so that a script can clip them."""

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        """Initialize Horovod with the communicator of MPI. Collective.

        Args:
            strategy: The strategy chosen at launch.
            world: The ranks of the job, which MPI started.
            device: The device of this rank.

        Raises:
            TrainingError: Horovod is not installed, or its ranks are not those of MPI.
        """
        super().__init__(strategy, world, device)
        try:
            import horovod.torch as hvd  # optional
        except ImportError as error:
            raise TrainingError(
                f"Horovod is not installed here: {error}",
                hint="scripts/build-horovod builds it; or leave out --backend horovod",
                code="tool-missing",
            ) from None
        self._hvd = hvd
        if world.comm is None:
            raise TrainingError(
                "Horovod needs ranks that MPI started",
                hint="use --engine mpirun, or --backend torch",
                code="mpi-mismatch",
            )
        hvd.init(comm=world.comm)
        if (hvd.rank(), hvd.size()) != (world.rank, world.size):
            raise TrainingError(
                f"Horovod says rank {hvd.rank()} of {hvd.size()}, MPI {world.rank} of {world.size}",
                hint="it was built with another MPI: scripts/build-horovod builds it again",
                code="mpi-mismatch",
            )
        self._reducers: dict[Optimizer, _Reducer] = {}
        self._made = 0  # number of reducers created so far, ended ones included
        self._pairs: dict[Optimizer, list[nn.Module]] = {}

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        """Move a model to the device and give it rank 0's parameters. Collective.

        Args:
            model: The script's module.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods that run as forward passes.

        Raises:
            TrainingError: The model has complex parameters.
        """
        model = TrainingStrategy.prepare_model(self, model, find_unused_parameters=find_unused_parameters)
        model.no_sync = _NoSync(self, model)  # type: ignore[assignment]
        for name, parameter in model.named_parameters():
            if parameter.is_complex():
                raise TrainingError(
                    f"{name} is complex, which Horovod does not average", hint="leave out --backend horovod"
                )
        if any(True for _ in model.parameters()):
            self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return super().prepare_model(model, find_unused_parameters=find_unused_parameters)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Create the reducer of an optimizer. Collective.

        Args:
            optimizer: The script's optimizer.
        """
        super().prepare_optimizer(optimizer)
        self._reducers[optimizer] = _Reducer(
            self._hvd, trainable_parameters(optimizer), self._made, self.settings.gradients.format
        )
        self._made += 1
        self._see_averaged()

    def _see_averaged(self) -> None:
        self._averaged = {parameter for reducer in self._reducers.values() for parameter in reducer.parameters}

    def release_optimizer(self, optimizer: Optimizer) -> None:
        """Stop averaging the gradients of an optimizer. Collective.

        Args:
            optimizer: A prepared optimizer.
        """
        self._reducers.pop(optimizer).end()
        self._pairs.pop(optimizer, None)
        self._see_averaged()

    def pair_models(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Record the models that an optimizer trains, for `no_sync`.

        Args:
            optimizer: A prepared optimizer.
            models: All models of which it has parameters.
        """
        self._pairs[optimizer] = list(models)

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        """Switch the averaging of gradients for the next backward passes.

        Args:
            optimizer: A prepared optimizer.
            models: The models that it trains.
            on: False while gradients accumulate on this rank.
        """
        self._reducers[optimizer].exchange(on)

    def step(self, optimizer: Optimizer, update: Callable[[], Any]) -> Any:
        """Wait for the averaged gradients, and take one step. Collective.

        Args:
            optimizer: A prepared optimizer.
            update: The optimizer's own step.
        """
        self._reducers[optimizer].finish()
        return super().step(optimizer, update)

    def close(self) -> None:
        self._hvd.shutdown()

    @contextmanager
    def _without_exchange(self, model: nn.Module) -> Iterator[None]:
        """Disable the averaging of gradients in the backward passes of a `with` block: `model.no_sync()`."""
        reducers = [reducer for reducer in self._reducers_of([model]) if reducer.on]
        for reducer in reducers:
            reducer.exchange(False)
        try:
            yield
        finally:
            for reducer in reducers:
                reducer.exchange(True)

    def _reducers_of(self, models: Sequence[nn.Module]) -> list[_Reducer]:
        wanted = {id(model) for model in models}
        return [self._reducers[o] for o, owned in self._pairs.items() if any(id(model) in wanted for model in owned)]


class _Reducer:
    """Gradient averaging for one optimizer, with a Horovod optimizer that never takes a step.

    The script's optimizer is not wrapped. Horovod waits for its all-reduces in `step`. This class waits at the end of backward, as
    DistributedDataParallel does, because a script may clip or unscale gradients before the step.
    """

    def __init__(self, hvd: Any, parameters: Sequence[torch.Tensor], number: int, format: str) -> None:
        """Create the Horovod optimizer. `number` is the same on all ranks and makes tensor names unique."""
        self.on = True
        self.parameters = parameters
        self._waiting = False
        self._hvd = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.0),
            named_parameters=[(f"{number}.{index}", parameter) for index, parameter in enumerate(parameters)],
            compression=hvd.Compression.fp16 if format == "fp16" else hvd.Compression.none,
        )
        self._handles = [parameter.register_hook(self._on_gradient) for parameter in parameters]  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop averaging gradients, permanently."""
        self.exchange(False)
        for handle in self._handles:
            handle.remove()

    def exchange(self, on: bool) -> None:
        """Switch the averaging of gradients for the next backward passes."""
        self.on = on
        self._hvd.set_backward_passes_per_step(1 if on else 1 << 30)  # Horovod counts passes until it exchanges

    def finish(self) -> None:
        """Wait for the all-reduces in flight."""
        if self._waiting:
            self._waiting = False
            frozen = [p for p in self.parameters if not p.requires_grad and p.grad is None]
            self._hvd.synchronize()
            for parameter in frozen:  # Horovod sets zeros, so weight decay would still apply
                parameter.grad = None

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if self.on and not self._waiting:
            self._waiting = True
            Variable._execution_engine.queue_callback(self.finish)


class _NoSync:
    """Value of `model.no_sync`. A copy of the model gets a function without effect instead."""

    def __init__(self, strategy: HorovodStrategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model

    def __call__(self) -> Any:
        return self._strategy._without_exchange(self._model)

    def __reduce__(self) -> Any:
        return _no_sync_of_copy, ()


def _no_sync_of_copy() -> Any:
    return nullcontext
