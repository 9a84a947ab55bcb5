"""Gradients that are no numbers: found before they reach the parameters, with the rank and the parameter they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distrib.errors import TrainingError

OnNan = Literal["raise", "skip", "ignore"]
WITNESSES = 16
"""Small parameters whose own gradients are kept until the step, to tell whose the nan was when the mean has one."""
SMALL = 4096
"""Elements of a parameter that is small."""


class Finite:
    """The watch over one optimizer's gradients.

    `raise` ends the job; `skip` leaves the step out, on every rank, as all have the same mean; `ignore` looks at nothing.
    `together`: the gradients are means over the ranks. On a GPU `raise` learns of a nan one step late: to be in
    time the script would have to wait for the GPU in each step, as it does with `skip`.
    """

    def __init__(self, optimizer: Optimizer, on_nan: OnNan, *, together: bool) -> None:
        if on_nan not in get_args(OnNan):
            raise TrainingError(f"on_nan={on_nan!r}", hint=f"give {', '.join(get_args(OnNan))}")
        self._optimizer, self._on_nan, self._together = optimizer, on_nan, together
        self._names: Mapping[torch.Tensor, str] = {}
        self._witnesses: list[tuple[str, torch.Tensor]] = []
        self._handles: list[RemovableHandle] = []
        self._late: tuple[int, torch.Tensor, list[str], list[tuple[str, torch.Tensor]]] | None = None

    def name(self, names: Mapping[torch.Tensor, str]) -> None:
        """`names` are those of the parameters in their models."""
        self._names = names
        for handle in self._handles:
            handle.remove()
        small = [p for p in self._parameters() if p.requires_grad and p.numel() <= SMALL]
        if not self._together or self._on_nan == "ignore":
            small = []
        chosen = small[:: max(-(-len(small) // WITNESSES), 1)]
        self._handles = [p.register_hook(self._keep(self._name(p))) for p in chosen]  # type: ignore[no-untyped-call]

    def _keep(self, name: str) -> Any:
        def keep(gradient: torch.Tensor) -> None:
            self._witnesses.append((name, gradient))  # itself: a detached one would be averaged with it

        return keep

    def after(self, step: int) -> bool:
        """Whether step number `step` may be taken. Raises TrainingError where it may not, naming rank and parameter."""
        if self._on_nan == "ignore":
            return True
        parameters = [p for p in self._parameters() if p.grad is not None and p.grad.is_floating_point()]
        gradients = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None
        ]
        witnesses, self._witnesses = self._witnesses, []
        if not gradients:
            return True
        norms = torch.stack([norm.to(gradients[0].device) for norm in torch._foreach_norm(gradients)])
        names = [self._name(p) for p in parameters]
        if norms.is_cuda and self._on_nan == "raise":
            late, self._late = self._late, (step, norms, names, witnesses)
            if late is None:
                return True
            step, norms, names, witnesses = late
        if bool(norms.isfinite().all()):
            return True
        bad = [name for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):  # large numbers, the norm of which is none
            return True
        if self._on_nan == "skip":
            return False
        raise TrainingError(
            f"step {step}: the gradient of {_several(bad)} is nan or infinite{self._whose(witnesses)}",
            hint="look at that batch, at the learning rate and the loss; prepare(..., on_nan='skip') leaves such steps out",
        )

    def _whose(self, witnesses: list[tuple[str, torch.Tensor]]) -> str:
        """Every rank is here: their gradients are the same."""
        if not self._together:
            return f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
        mine = sorted({name for name, gradient in witnesses if not bool(gradient.isfinite().all())})
        all_: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(all_, mine)
        ranks = [str(rank) for rank, names in enumerate(all_) if names]
        if not ranks:
            return ", on a rank that cannot be told" if witnesses else ""
        return f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {', '.join(ranks)}"

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _name(self, parameter: torch.Tensor) -> str:
        if name := self._names.get(parameter):
            return name.removeprefix("module.")
        return f"a parameter {list(parameter.shape)}"


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and of {len(names) - 1} more)"
