"""Detection of NaN and infinite gradients before they reach the parameters, with rank and parameter."""

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


class _CheckedStep(NamedTuple):
    """The norms of one step's gradients, perhaps still being computed by a GPU."""

    step: int
    norms: torch.Tensor
    parameters: list[torch.Tensor]
    witnesses: list[torch.Tensor]
    all_finite: torch.Tensor
    """True if all norms are finite. In a late check, a GPU may still copy it into host memory."""
    arrived: Any

    def is_finite(self) -> bool:
        if self.arrived is not None:
            self.arrived.synchronize()  # waits for this step only, not for later GPU work
        return bool(self.all_finite)


class NanGuard:
    """Check of one optimizer's gradients for NaN and Inf.

    On a GPU, `raise` reports a NaN one step late. To report it in time, the script would have to wait for the GPU in each step, as it
    does with `skip`.
    """

    def __init__(self, optimizer: Optimizer, on_nan: OnNan, *, averaged: bool, late: bool | None = None) -> None:
        """Create the guard.

        Args:
            optimizer: The prepared optimizer.
            on_nan: `raise` an error, `skip` the step or `ignore` NaN.
            averaged: True if gradients are means over ranks.
            late: True if a check may be one step late; None: on GPUs only.

        Raises:
            TrainingError: `on_nan` is none of these.
        """
        if on_nan not in get_args(OnNan):
            raise TrainingError(f"on_nan={on_nan!r}", hint=f"give {', '.join(get_args(OnNan))}")
        self._optimizer, self._on_nan, self._averaged, self._late = optimizer, on_nan, averaged, late
        self._names: Mapping[torch.Tensor, str] = {}
        self._witnesses: dict[torch.Tensor, torch.Tensor] = {}
        """Local gradients of some parameters in the present step."""
        self._handles: list[RemovableHandle] = []
        self._pending: _CheckedStep | None = None

    def watch(self, names: Mapping[torch.Tensor, str], *, max_parameters: int = 16, max_elements: int = 4096) -> None:
        """Hook some parameters whose local gradients are kept until the step, to find the rank of a NaN in the mean.

        Args:
            names: The names of the parameters in their models, for messages.
            max_parameters: Number of hooked parameters.
            max_elements: Largest of them.
        """
        self._names = names
        self.close()
        small = [p for p in trainable_parameters(self._optimizer) if p.numel() <= max_elements]
        if not self._averaged or self._on_nan == "ignore":
            small = []
        chosen = small[:: max(-(-len(small) // max_parameters), 1)]
        self._handles = [p.register_hook(self._keep(p)) for p in chosen]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, parameter: torch.Tensor) -> Any:
        def keep(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # an output that the loss does not use
                return
            # On a CPU the gradient itself: a detached tensor would be averaged with it. On a GPU a copy, because CUDA graphs
            # overwrite it. A sum of several gradients is NaN if one of them is.
            before, own = self._witnesses.get(parameter), gradient.detach().clone() if gradient.is_cuda else gradient
            self._witnesses[parameter] = own if before is None else before + own

        return keep

    @torch.no_grad()
    def check(self, step: int) -> bool:
        """Check the gradients of a step.

        Args:
            step: Number of the step, from 1.

        Returns:
            False if the step must be skipped.

        Raises:
            TrainingError: A gradient is NaN or infinite, and `on_nan` is `raise`.
        """
        if self._on_nan == "ignore":
            return True
        witnesses = self.forget()
        pairs = [
            (parameter, values)
            for parameter in optimizer_parameters(self._optimizer)
            if (gradient := parameter.grad) is not None
            and (gradient.is_floating_point() or gradient.is_complex())
            and (values := _real_values(gradient)).numel()
        ]
        parameters, gradients = [parameter for parameter, _ in pairs], [values for _, values in pairs]
        if not gradients:
            return True
        may_be_late = gradients[0].is_cuda if self._late is None else self._late
        late = self._on_nan == "raise" and may_be_late
        # In a late check the gradients are overwritten, so it uses the maximum, which is finite exactly if all elements are.
        # Otherwise the 2-norm, ten times as fast on a CPU. It may overflow for finite elements, which are then checked one by one.
        norms = _norms(gradients, float("inf") if late else 2)
        seen = _CheckedStep(step, norms, parameters, witnesses, *_all_finite(norms, late=late))
        if late:
            self.check_pending()
            self._pending = seen
            return True
        if seen.is_finite() or all(bool(gradient.isfinite().all()) for gradient in gradients):
            return True
        if self._on_nan == "skip":
            return False
        raise self._error(seen)

    def check_pending(self, *, alone: bool = False) -> None:
        """Check the step that was not waited for. Collective, unless `alone`.

        Args:
            alone: True if other ranks may not be here.

        Raises:
            TrainingError: A gradient was NaN or infinite.
        """
        seen, self._pending = self._pending, None
        if seen and not seen.is_finite():
            if alone:
                self._pending = seen  # kept for a collective check, which names the rank
            raise self._error(seen, alone=alone)

    def forget(self) -> list[torch.Tensor]:
        """Return and drop the local gradients that were kept for this step."""
        witnesses, self._witnesses = self._witnesses, {}
        return [*witnesses.values()]

    def _error(self, seen: _CheckedStep, *, alone: bool = False) -> TrainingError:
        norms = zip(seen.parameters, seen.norms.tolist(), strict=True)
        first, *others = [parameter for parameter, norm in norms if not math.isfinite(norm)]
        name = self._names.get(first) or f"a parameter {list(first.shape)}"
        more = f" (and of {len(others)} more)" if others else ""
        ranks, is_elsewhere = self._find_ranks(seen.witnesses, alone=alone)
        error = TrainingError(
            f"step {seen.step}: the gradient of {name}{more} is nan or infinite{ranks}",
            hint="look at that batch, at the learning rate and the loss; prepare(..., on_nan='skip') leaves such steps out",
            code="gradient-not-finite",
        )
        error.secondary = is_elsewhere
        return error

    def _find_ranks(self, witnesses: Sequence[torch.Tensor], *, alone: bool) -> tuple[str, bool]:
        """Name the ranks whose local gradients are not finite; True if they are others. Collective, unless `alone`."""
        mine = not all(bool(_real_values(gradient).isfinite().all()) for gradient in witnesses)
        if alone or not self._averaged:
            is_known = dist.is_initialized() and (mine or not self._averaged)
            return f" on rank {dist.get_rank()}" if is_known else "", False
        ranks = [str(rank) for rank, has_some in enumerate(gather_objects(mine)) if has_some]
        if not ranks:
            return ", on an unknown rank" if witnesses else "", False
        return f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {', '.join(ranks)}", not mine


def _real_values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real values of a gradient; of a sparse gradient only the stored values."""
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _norms(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    """Compute the norm of each tensor, in few kernels."""
    norms = list(torch._foreach_norm(tensors, order))
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(norms[0].device, torch.float64) for norm in norms]
    return torch.stack(norms)


def _all_finite(norms: torch.Tensor, *, late: bool) -> tuple[torch.Tensor, Any]:
    """Test if all norms are finite. Returns the result, and the event after which it can be read; None if reading waits."""
    all_finite = norms.isfinite().all()
    if not (late and norms.is_cuda):
        return all_finite, None
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(all_finite, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(norms.device))
    return host, arrived
