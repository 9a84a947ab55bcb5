"""The script's optimizer on a server, one instance per chunk."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import numpy as np
import torch

from distrib.errors import TrainingError

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
"""Optimizers that treat every element by itself, so that a tensor may be divided into chunks."""

FUSED = frozenset(["SGD", "Adam", "AdamW", "Adagrad"])
"""Optimizers with a fused CPU kernel in torch, which reads memory once."""

REFUSED = {
    "LBFGS": "it calls the model again within one step",
    "SparseAdam": "it is for sparse gradients",
}
PER_TENSOR = frozenset(["step", "mu_product", "mu", "eta"])
"""State that optimizers keep once per tensor, not per element."""

LINEAR = frozenset(["SGD", "ASGD"])
"""Optimizers whose steps grow with the gradient; the others normalize it."""

MOMENTUM = "momentum_buffer"
WORKER = "worker"
"""Key in the settings of an update: the worker whose own momentum is used."""

_LOCAL = frozenset(["params", "foreach", "fused", "capturable", "differentiable", "initial_lr"])


class OptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer of torch.optim, by name."""

    name: str

    @property
    def whole(self) -> bool:
        """True if it needs every tensor whole."""
        return self.name not in ELEMENTWISE

    @property
    def state_tensors(self) -> int:
        """Number of tensors of a parameter's size that it keeps at most."""
        return {"SGD": 1, "RMSprop": 1, "Adagrad": 1, "Adafactor": 0}.get(self.name, 2)


def optimizer_spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the specification from which servers create an optimizer.

    Args:
        optimizer: The script's optimizer.

    Raises:
        TrainingError: Servers cannot create it.
    """
    kind = type(optimizer)
    name = kind.__name__
    if why := REFUSED.get(name):
        raise TrainingError(f"{name} is not supported in mode async: {why}", hint="use --mode sync, or SGD or AdamW")
    if getattr(torch.optim, name, None) is not kind:
        raise TrainingError(
            f"{kind.__module__}.{name} is not supported in mode async: it is not in torch.optim",
            hint="use --mode sync, or an optimizer of torch.optim",
        )
    return OptimizerSpec(name)


def rate_share(name: str, staleness: float) -> float:
    """Return the fraction of the learning rate that a stale update gets.

    In mode sync the gradients of n ranks make one step, their mean. Here they make n steps with a staleness of about n - 1. With 1/n
    of the rate each (Zhang et al. 2015, arXiv:1511.05950) the parameters move as far. For optimizers that normalize gradients the
    fraction is 1/sqrt(n), as for a batch of an n-th (Malladi et al. 2022, arXiv:2205.10287).

    Args:
        name: Name of the optimizer in torch.optim.
        staleness: Number of updates since the parameters were read.
    """
    share = 1 / (1 + staleness)
    return float(share if name in LINEAR else share**0.5)


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group as plain values, without those that only concern speed.

    Args:
        group: A parameter group of the script's optimizer.

    Raises:
        TrainingError: A setting is not a number, text or a list of these.
    """
    return {name: _plain(name, value) for name, value in group.items() if name not in _LOCAL}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # a subclass may not be encodable
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    raise TrainingError(
        f"optimizer setting {name} is a {type(value).__name__}, expected a number", hint="use plain numbers"
    )


def with_own_momentum(optimizer: OptimizerSpec, options: dict[str, Any], worker: int) -> dict[str, Any]:
    """Return the settings of an SGD update that uses its worker's own Nesterov momentum.

    DANA-Slim (Hakimi et al. 2019, arXiv:1907.11612): a momentum that all workers share amplifies the effect of staleness. One per
    worker, which decays with that worker's steps, behaves as in mode sync, and looks ahead over the other workers' updates.

    Args:
        optimizer: The optimizer; other than SGD it is left alone.
        options: Settings of the parameter group.
        worker: The worker or push id.
    """
    if optimizer.name != "SGD" or not options.get("momentum"):
        return options
    return {**options, "nesterov": not options.get("dampening"), WORKER: worker}


class ChunkOptimizer:
    """Value and optimizer of one chunk; updates are in place."""

    def __init__(self, spec: OptimizerSpec, value: torch.Tensor, options: dict[str, Any]) -> None:
        self.value = torch.nn.Parameter(value, requires_grad=False)
        self.flat_value = value.view(-1)
        """The same memory as `value`, without its shape."""
        self._spec, self.options = spec, options
        self._optimizer = self._create()
        # Without torch's hooks and profiler, which take longer than the update of a small chunk.
        self._step = inspect.unwrap(type(self._optimizer).step)
        self._momenta: dict[int, torch.Tensor] = {}
        self._common_momentum: torch.Tensor | None = None

    def _create(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self._spec.name)
        fused = {"fused": True} if self._spec.name in FUSED else {}
        try:
            created: torch.optim.Optimizer = kind([self.value], **fused, **_arguments(kind, self.options))
        except (TypeError, ValueError) as error:
            raise TrainingError(f"torch.optim.{self._spec.name} rejects its settings: {error}") from None
        return created

    def use_memory(self, memory: torch.Tensor) -> None:
        """Move the value to memory that holds a copy of it.

        Args:
            memory: The bytes of the value.
        """
        self.value.data = memory.view(self.value.dtype).view(self.value.shape)
        self.flat_value = self.value.data.view(-1)

    def apply(self, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        """Take one step.

        Args:
            gradient: The gradient, of the value's shape.
            options: Optimizer settings; with the key `WORKER` for that worker's own momentum.
        """
        worker = options.get(WORKER)
        self._select_momentum(worker)
        self._optimizer.param_groups[0].update(_tuples({n: value for n, value in options.items() if n != WORKER}))
        self.value.grad = gradient
        self._step(self._optimizer)
        self.value.grad = None
        if worker is not None:
            self._momenta[worker] = self._optimizer.state[self.value][MOMENTUM]

    def _select_momentum(self, worker: int | None) -> None:
        """Use the worker's own momentum, which begins with the common one; without a worker, the mean of all."""
        state = self._optimizer.state[self.value]
        if worker is None:
            if self._momenta:
                state[MOMENTUM] = self._mean_momentum()
                self._momenta.clear()
            return
        if not self._momenta:
            self._common_momentum = state.get(MOMENTUM)
        if worker not in self._momenta:
            state[MOMENTUM] = None if self._common_momentum is None else self._common_momentum.clone()
        else:
            state[MOMENTUM] = self._momenta[worker]

    def _mean_momentum(self) -> torch.Tensor:
        return torch.stack([*self._momenta.values()]).mean(0)

    def state(self) -> dict[str, Any]:
        """Return the optimizer state: tensors of the chunk's size, or numbers."""
        own = dict(self._optimizer.state.get(self.value, {}))
        return own | {MOMENTUM: self._mean_momentum()} if self._momenta else own

    def full_state(self) -> dict[str, Any]:
        """Return all state that the next steps depend on, with each worker's momentum."""
        own = dict(self._optimizer.state.get(self.value, {}))
        return {"state": own, "momenta": dict(self._momenta), "common_momentum": self._common_momentum}

    def restore_full_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `full_state`.

        Args:
            state: The state.
        """
        self.restore(state["state"])
        self._momenta, self._common_momentum = dict(state["momenta"]), state["common_momentum"]

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`. Missing entries are reset.

        Args:
            state: The state.

        Raises:
            TrainingError: A tensor has another size.
        """
        converted = {name: self._convert(name, value) for name, value in state.items()}
        self._optimizer = self._create()
        self._momenta.clear()
        self._optimizer.state[self.value].update(converted)

    def _convert(self, name: str, value: Any) -> Any:
        """Convert to the value's shape and dtype, which the optimizer's kernels do not check."""
        if not isinstance(value, torch.Tensor) or name in PER_TENSOR:
            return value
        if self._spec.whole:
            if not is_broadcastable(value, self.value):
                raise TrainingError(
                    f"optimizer state {name} has shape {list(value.shape)}, expected {list(self.value.shape)}",
                    code="checkpoint-mismatch",
                )
        else:
            if value.numel() != self.value.numel():
                raise TrainingError(
                    f"optimizer state {name} has {value.numel()} elements, expected {self.value.numel()}",
                    code="checkpoint-mismatch",
                )
            value = value.reshape(self.value.shape)
        return value.to(self.value.dtype)


def is_broadcastable(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if optimizer state of a whole tensor matches a parameter: its size or 1 in each dimension.

    Args:
        state: The state.
        parameter: The parameter.
    """
    fits = zip(state.shape, parameter.shape, strict=False)
    return not state.dim() or (state.dim() == parameter.dim() and all(mine in (1, its) for mine, its in fits))


def _arguments(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name: value for name, value in _tuples(options).items() if name in known}


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
