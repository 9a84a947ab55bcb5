"""Gradients that are no numbers: found before they reach the parameters, with the rank and the parameter they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from distrib.errors import TrainingError
from distrib.training.collectives import gather_objects
from distrib.training.model_parameters import optimizer_parameters, trainable_parameters

OnNan = Literal["raise", "skip", "ignore"]
WITNESSES = 16
"""Small parameters whose own gradients are kept until the step, to tell whose the nan was when the mean has one."""
SMALL = 4096
"""Elements of a parameter that is small."""


class _Seen(NamedTuple):
    """What is known of the gradients of one step, perhaps only later, as a GPU computes it."""

    step: int
    norms: torch.Tensor
    parameters: list[torch.Tensor]
    witnesses: list[torch.Tensor]
    verdict: torch.Tensor
    """Whether all norms are finite: of a GPU that is not waited for, on its way into the host's memory."""
    arrived: Any

    def is_finite(self) -> bool:
        if self.arrived is not None:
            self.arrived.synchronize()  # with this step, not with what the GPU was given since
        return bool(self.verdict)


class Finite:
    """The watch over one optimizer's gradients.

    `raise` ends the job; `skip` leaves the step out, on every rank where all have the same mean; `ignore` looks at nothing.
    `together`: the gradients are means over the ranks. On a GPU `raise` learns of a nan one step late: to be in
    time the script would have to wait for the GPU in each step, as it does with `skip`. `late` says for all devices whether it may be.
    """

    def __init__(self, optimizer: Optimizer, on_nan: OnNan, *, together: bool, late: bool | None = None) -> None:
        if on_nan not in get_args(OnNan):
            raise TrainingError(f"on_nan={on_nan!r}", hint=f"give {', '.join(get_args(OnNan))}")
        self._optimizer, self._on_nan, self._together, self._late = optimizer, on_nan, together, late
        self._names: Mapping[torch.Tensor, str] = {}
        self._witnesses: dict[torch.Tensor, torch.Tensor] = {}
        """What the step's backward passes have computed for some parameters."""
        self._handles: list[RemovableHandle] = []
        self._waiting: _Seen | None = None

    def name(self, names: Mapping[torch.Tensor, str]) -> None:
        """`names` are those of the parameters in their models."""
        self._names = names
        self.end()
        small = [p for p in trainable_parameters(self._optimizer) if p.numel() <= SMALL]
        if not self._together or self._on_nan == "ignore":
            small = []
        chosen = small[:: max(-(-len(small) // WITNESSES), 1)]
        self._handles = [p.register_hook(self._keep(p)) for p in chosen]  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Watches no backward pass any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, parameter: torch.Tensor) -> Any:
        def keep(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # of an output that the loss does not use
                return
            # On a CPU itself: a detached one would be averaged with it. On a GPU a copy: CUDA graphs write the next gradient
            # over this one. The sum of several is no number if one of them is none.
            before, own = self._witnesses.get(parameter), gradient.detach().clone() if gradient.is_cuda else gradient
            self._witnesses[parameter] = own if before is None else before + own

        return keep

    @torch.no_grad()
    def after(self, step: int) -> bool:
        """Whether step number `step` may be taken. Raises TrainingError where it may not, naming rank and parameter."""
        if self._on_nan == "ignore":
            return True
        parameters = [p for p in optimizer_parameters(self._optimizer) if p.grad is not None]
        parameters = [p for p in parameters if p.grad.is_floating_point() or p.grad.is_complex()]  # type: ignore[union-attr]
        gradients = [_reals(p.grad) for p in parameters if p.grad is not None]
        witnesses = self.forget()
        filled = [number for number, gradient in enumerate(gradients) if gradient.numel()]
        gradients, parameters = [gradients[n] for n in filled], [parameters[n] for n in filled]
        if not gradients:
            return True
        may_be_late = gradients[0].is_cuda if self._late is None else self._late
        late = self._on_nan == "raise" and may_be_late
        # Late, the gradients will be gone when the answer is there: the largest element is finite where all are. The usual
        # norm, which a CPU computes ten times as fast, may be too large of finite ones, which are looked at again then.
        norms = _norms(gradients, float("inf") if late else 2)
        seen = _Seen(step, norms, parameters, witnesses, *_verdict(norms, late=late))
        if late:
            self.flush()
            self._waiting = seen
            return True
        if seen.is_finite() or all(bool(gradient.isfinite().all()) for gradient in gradients):
            return True
        if self._on_nan == "skip":
            return False
        raise self._error(seen)

    def flush(self, *, alone: bool = False) -> None:
        """Looks at the step that was not waited for. Raises TrainingError as `after` does. Every rank, or this one `alone`."""
        seen, self._waiting = self._waiting, None
        if seen and not seen.is_finite():
            if alone:
                self._waiting = seen  # for the others, who name the rank when they come to it
            raise self._error(seen, alone=alone)

    def forget(self) -> list[torch.Tensor]:
        """The witnesses of a step, which is over."""
        witnesses, self._witnesses = self._witnesses, {}
        return [*witnesses.values()]

    def _error(self, seen: _Seen, *, alone: bool = False) -> TrainingError:
        norms = zip(seen.parameters, seen.norms.tolist(), strict=True)
        bad = [self._name(parameter) for parameter, norm in norms if not math.isfinite(norm)]
        return TrainingError(
            f"step {seen.step}: the gradient of {_several(bad)} is nan or infinite{self._whose(seen.witnesses, alone=alone)}",
            hint="look at that batch, at the learning rate and the loss; prepare(..., on_nan='skip') leaves such steps out",
        )

    def _whose(self, witnesses: Sequence[torch.Tensor], *, alone: bool) -> str:
        """Every rank is here, as their gradients are the same, unless this one is `alone`."""
        mine = not all(bool(_reals(gradient).isfinite().all()) for gradient in witnesses)
        if alone or not self._together:
            return f" on rank {dist.get_rank()}" if dist.is_initialized() and (mine or not self._together) else ""
        ranks = [str(rank) for rank, has_some in enumerate(gather_objects(mine)) if has_some]
        if not ranks:
            return ", on a rank that cannot be told" if witnesses else ""
        return f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {', '.join(ranks)}"

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(parameter) or f"a parameter {list(parameter.shape)}"


def _reals(gradient: torch.Tensor) -> torch.Tensor:
    """Its real numbers: of a sparse one those that it has."""
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _norms(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of each. Tensors of several types in one call would be gone through one by one."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    if len(alike) == 1:
        return torch.stack(torch._foreach_norm(tensors, order))
    found: dict[int, torch.Tensor] = {}
    for numbers in alike.values():
        found.update(zip(numbers, torch._foreach_norm([tensors[n] for n in numbers], order), strict=True))
    return torch.stack([found[number].to(tensors[0].device) for number in range(len(tensors))])


def _verdict(norms: torch.Tensor, *, late: bool) -> tuple[torch.Tensor, Any]:
    """Whether all are finite, and the event after which that can be read; None where reading it waits by itself."""
    verdict = norms.isfinite().all()
    if not (late and norms.is_cuda):
        return verdict, None
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(verdict, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(norms.device))
    return host, arrived


def _several(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and of {len(names) - 1} more)"
