"""The script's optimizer, as servers make it anew for each of their chunks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from distrib.errors import TrainingError

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
"""Optimizers that treat every number of a tensor for itself, so that a tensor may be cut."""

FUSED = frozenset(["SGD", "Adam", "AdamW", "Adagrad"])
"""Those of which torch has a kernel for CPUs that passes over memory once."""

REFUSED = {
    "LBFGS": "it calls the model again within one step",
    "SparseAdam": "it is for sparse gradients",
}
PER_TENSOR = frozenset(["step", "mu_product", "mu", "eta"])
"""What these optimizers keep once for a tensor, not for each of its numbers."""

LINEAR = frozenset(["SGD", "ASGD"])
"""Those whose steps are as long as their gradients are; the others divide by what they have seen of them."""

MOMENTUM = "momentum_buffer"
WORKER = "worker"
"""Among the settings of an update: by whose own momentum it is made."""

_LOCAL = frozenset(["params", "foreach", "fused", "capturable", "differentiable", "initial_lr"])


class Recipe(msgspec.Struct, frozen=True):
    """What optimizer it is, by its name in torch.optim."""

    name: str

    @property
    def whole(self) -> bool:
        """Whether it needs every tensor in one piece."""
        return self.name not in ELEMENTWISE


def recipe_of(optimizer: torch.optim.Optimizer) -> Recipe:
    """How servers make this optimizer. Raises TrainingError for one that they cannot."""
    kind = type(optimizer)
    name = kind.__name__
    if why := REFUSED.get(name):
        raise TrainingError(
            f"{name} cannot be the optimizer of mode async: {why}", hint="use --mode sync, or SGD or AdamW"
        )
    if getattr(torch.optim, name, None) is not kind:
        raise TrainingError(
            f"{kind.__module__}.{name} is not one of torch.optim's: the parameter servers cannot make it",
            hint="use --mode sync, or an optimizer of torch.optim",
        )
    return Recipe(name)


def share_of_rate(name: str, staleness: float) -> float:
    """What part of its learning rate an update has of this optimizer, when `staleness` others came since its parameters were read.

    In mode sync n ranks' gradients make one step, their mean. Here they make n, each with a staleness of about n - 1: with 1 / n of
    the rate each (Zhang et al. 2015, arXiv:1511.05950), the parameters go as far, and late gradients do no harm that they do not do
    there. Where steps do not grow with gradients it is 1 / sqrt(n), as for a batch of an n-th (Malladi et al. 2022, arXiv:2205.10287).
    """
    share = 1 / (1 + staleness)
    return float(share if name in LINEAR else share**0.5)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group as plain values; those that only concern speed are left out."""
    return {name: _plain(name, value) for name, value in group.items() if name not in _LOCAL}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # as classes made of these are none that can be sent
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    raise TrainingError(f"the optimizer's {name} is a {type(value).__name__}", hint="use numbers")


def by_own_momentum(recipe: Recipe, options: dict[str, Any], worker: int) -> dict[str, Any]:
    """Settings of an update of SGD that is made by its worker's own momentum.

    Each worker has a momentum of its own, and looks ahead as Nesterov's does: DANA-Slim (Hakimi et al. 2019, arXiv:1907.11612). A
    momentum that all share multiplies what delay does; n of their own, each decaying with its worker's steps, are that of mode
    sync's steps, and the look ahead is over what the others are about to do.
    """
    if recipe.name != "SGD" or not options.get("momentum"):
        return options
    return {**options, "nesterov": not options.get("dampening"), WORKER: worker}


class Updater:
    """One chunk's optimizer: `value` and its state, in place."""

    def __init__(self, recipe: Recipe, value: torch.Tensor, options: dict[str, Any]) -> None:
        self.value = torch.nn.Parameter(value, requires_grad=True)
        self._recipe, self._options = recipe, options
        self._optimizer = self._made()
        self._momenta: dict[int, torch.Tensor] = {}
        self._begun: torch.Tensor | None = None

    def _made(self) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self._recipe.name)
        fused = {"fused": True} if self._recipe.name in FUSED else {}
        try:
            made: torch.optim.Optimizer = kind([self.value], **fused, **_arguments(kind, self._options))
        except (TypeError, ValueError) as error:
            raise TrainingError(f"torch.optim.{self._recipe.name} refuses its settings: {error}") from None
        return made

    def apply(self, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        """One step with this gradient and these settings; with `WORKER` among them, by the momentum of that worker's own."""
        worker = options.get(WORKER)
        self._take_up(worker)
        self._optimizer.param_groups[0].update(_tuples({n: value for n, value in options.items() if n != WORKER}))
        self.value.grad = gradient
        self._optimizer.step()
        self.value.grad = None
        if worker is not None:
            self._momenta[worker] = self._optimizer.state[self.value][MOMENTUM]

    def _take_up(self, worker: int | None) -> None:
        """Puts the worker's own momentum into its place: all begin with what there was before; or the mean of all, without a worker."""
        state = self._optimizer.state[self.value]
        if worker is None:
            if self._momenta:
                state[MOMENTUM] = self._mean()
                self._momenta.clear()
            return
        if not self._momenta:
            self._begun = state.get(MOMENTUM)
        if worker not in self._momenta:
            state[MOMENTUM] = None if self._begun is None else self._begun.clone()
        else:
            state[MOMENTUM] = self._momenta[worker]

    def _mean(self) -> torch.Tensor:
        return torch.stack([*self._momenta.values()]).mean(0)

    def state(self) -> dict[str, Any]:
        """The optimizer's state of this chunk: tensors of its size, or single numbers."""
        own = dict(self._optimizer.state.get(self.value, {}))
        return own | {MOMENTUM: self._mean()} if self._momenta else own

    def parts(self) -> dict[str, Any]:
        """All that the next steps depend on, the workers' momenta one by one."""
        own = dict(self._optimizer.state.get(self.value, {}))
        return {"state": own, "momenta": dict(self._momenta), "begun": self._begun}

    def take_over(self, parts: dict[str, Any]) -> None:
        """Goes on from what `parts` gave."""
        self.restore(parts["state"])
        self._momenta, self._begun = dict(parts["momenta"]), parts["begun"]

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave; what it lacks is as in the beginning. Raises TrainingError for what is of another size."""
        fitting = {name: self._fitting(name, value) for name, value in state.items()}
        self._optimizer = self._made()
        self._momenta.clear()
        self._optimizer.state[self.value].update(fitting)

    def _fitting(self, name: str, value: Any) -> Any:
        """As the optimizer needs it, whose kernels look at no sizes: of the value's shape and format."""
        if not isinstance(value, torch.Tensor) or name in PER_TENSOR:
            return value
        if self._recipe.whole:
            if not broadcasts(value, self.value):
                raise TrainingError(
                    f"the optimizer's {name} is {list(value.shape)}, and the parameter {list(self.value.shape)}"
                )
        else:
            if value.numel() != self.value.numel():
                raise TrainingError(f"the optimizer's {name} has {value.numel()} elements, not {self.value.numel()}")
            value = value.reshape(self.value.shape)
        return value.to(self.value.dtype)


def broadcasts(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether what an optimizer keeps of a tensor as a whole may be that of `parameter`: of its size, or of 1, in each dimension."""
    fits = zip(state.shape, parameter.shape, strict=False)
    return not state.dim() or (state.dim() == parameter.dim() and all(mine in (1, its) for mine, its in fits))


def _arguments(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    import inspect

    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name: value for name, value in _tuples(options).items() if name in known}


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
