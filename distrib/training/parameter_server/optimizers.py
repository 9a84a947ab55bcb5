"""The script's optimizer, as servers make it anew for each of their chunks."""

from __future__ import annotations

from typing import Any

import msgspec
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


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group as plain values; those that only concern speed are left out."""
    return {name: _plain(name, value) for name, value in group.items() if name not in _LOCAL}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    raise TrainingError(f"the optimizer's {name} is a {type(value).__name__}", hint="use numbers")


class Updater:
    """One chunk's optimizer: `value` and its state, in place."""

    def __init__(self, recipe: Recipe, value: torch.Tensor, options: dict[str, Any]) -> None:
        self.value = torch.nn.Parameter(value, requires_grad=True)
        self._fused = recipe.name in FUSED
        kind = getattr(torch.optim, recipe.name)
        try:
            self._optimizer = kind(
                [self.value], **({"fused": True} if self._fused else {}), **_arguments(kind, options)
            )
        except (TypeError, ValueError) as error:
            raise TrainingError(f"torch.optim.{recipe.name} refuses its settings: {error}") from None

    def apply(self, gradient: torch.Tensor, options: dict[str, Any]) -> None:
        """One step with this gradient and these settings."""
        self._optimizer.param_groups[0].update(_tuples(options))
        self.value.grad = gradient
        self._optimizer.step()
        self.value.grad = None

    def state(self) -> dict[str, Any]:
        """The optimizer's state of this chunk: tensors of its size, or single numbers."""
        return dict(self._optimizer.state.get(self.value, {}))

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        kept = self._optimizer.state[self.value]
        kept.clear()
        for name, value in state.items():
            kept[name] = value.reshape(self.value.shape) if _is_elementwise(value, self.value) else value


def _is_elementwise(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == like.numel() and value.dim() > 0


def _arguments(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    import inspect

    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {name: value for name, value in _tuples(options).items() if name in known}


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
