"""Hooks of a script's optimizer: its step becomes a push to the servers, and its state is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distrib.training.parameter_server.model_synchronizer import ModelSynchronizer
from distrib.training.parameter_server.worker_table import WorkerTable


class OptimizerHooks:
    """Hooks of one optimizer and of its parameters' gradients, from construction until `remove`."""

    def __init__(self, table: WorkerTable, models: ModelSynchronizer, is_main: Callable[[], bool]) -> None:
        self._table, self._models = table, models
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # gradients during the optimizer's own step
        optimizer = table.optimizer
        self._handles: list[RemovableHandle] = [
            *(p.register_post_accumulate_grad_hook(table.on_gradient_ready) for p in table.chunks_of),  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(lambda _, state: self._add_state(state)),
            optimizer.register_load_state_dict_post_hook(lambda _: table.give_optimizer_state(is_main=is_main())),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        args, kwargs = _call_closure(args, kwargs)
        self._table.check()
        if hasattr(optimizer, "found_inf"):
            self._table.expect_unscaling()
        self._models.take_step(self._table, skip=not _unscale_gradients(optimizer))
        self._hidden = [(parameter, parameter.grad) for parameter in self._table.parameters]
        for parameter in self._table.parameters:
            parameter.grad = None  # so that the optimizer's own step changes nothing
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _add_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of the optimizer with the servers' state."""
        order = [p for group in self._table.optimizer.param_groups for p in group["params"]]
        found = self._table.optimizer_state()
        return {**state, "state": {number: found[p] for number, p in enumerate(order) if found.get(p)}}


def _call_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure of a step early, because its gradients are pushed. Returns arguments with a closure that returns the loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0],), {**{k: v for k, v in kwargs.items() if k != "closure"}, "closure": lambda: loss}


def _unscale_gradients(optimizer: Optimizer) -> bool:
    """Remove the scale that a GradScaler leaves to fused optimizers. Returns False if the step must be skipped."""
    found_inf = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf.item()):
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
    return True
