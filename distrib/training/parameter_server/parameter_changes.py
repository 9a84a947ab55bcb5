"""Detection of changes that a script makes itself: of gradients before a step, and of parameters between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from distrib.utils.log import get_logger

log = get_logger("parameter_server")


FACTOR_TOLERANCE = 1e-5
"""Relative difference of sums and norms in single precision up to which gradients were multiplied by the same factor."""


class _PushedGradient(NamedTuple):
    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int
    """torch's count of writes to the gradient."""
    fingerprint: torch.Tensor

    def is_same_tensor(self) -> bool:
        return self.parameter.grad is self.gradient


class PushedGradients:
    """Fingerprints of gradients that were pushed in the backward pass, before the optimizer steps."""

    def __init__(self) -> None:
        self._pushed: dict[int, _PushedGradient] = {}  # by identity: a tensor's hash is a slow Python function

    def record(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the gradients of a chunk as it is pushed. A parameter in several chunks is recorded with the first of them.

        Args:
            parameters: Parameters with a gradient.
        """
        new = {id(parameter): parameter for parameter in parameters if id(parameter) not in self._pushed}
        gradients = [parameter.grad for parameter in new.values() if parameter.grad is not None]
        for parameter, gradient, fingerprint in zip(new.values(), gradients, _fingerprints(gradients), strict=True):
            self._pushed[id(parameter)] = _PushedGradient(parameter, gradient, gradient._version, fingerprint)

    def clear(self) -> None:
        """Drop all recorded gradients."""
        self._pushed.clear()

    def common_factor(self) -> float | None:
        """Return the factor by which all gradients were multiplied since their push; None if they changed in another way.

        Clipping the norm and unscaling multiply all gradients alike. Fingerprints, sum and norm, are then multiplied as well.
        """
        recorded = list(self._pushed.values())
        if not recorded or not all(one.is_same_tensor() for one in recorded):
            return None
        before, now = _before_and_now(recorded)
        norm = float(torch.linalg.vector_norm(before[:, 1]))
        factor = float(torch.linalg.vector_norm(now[:, 1])) / norm if norm else 1.0
        tolerance = FACTOR_TOLERANCE * factor * before.abs().amax(1, keepdim=True)
        return factor if bool(((now - factor * before).abs() <= tolerance).all()) else None

    def unchanged(self) -> set[int]:
        """Return the identities of parameters whose gradient has not changed since its push.

        Fingerprints also detect writes through `.data`.
        """
        same = [one for one in self._pushed.values() if one.is_same_tensor() and one.gradient._version == one.version]
        if not same:
            return set()
        before, now = _before_and_now(same)
        changed = ((before != now) & ~(before.isnan() & now.isnan())).any(1).tolist()
        return {id(one.parameter) for one, differs in zip(same, changed, strict=True) if not differs}


class ParameterChangeCheck:
    """Check for parameters that the script changes itself: warns once, because the servers' values overwrite such changes."""

    def __init__(self, parameters: Sequence[torch.Tensor], name: Callable[[torch.Tensor], str]) -> None:
        self._parameters, self._name = parameters, name
        # A script that swaps in averaged parameters for an evaluation changes all of them, so one small one shows it.
        sizes = [(parameter.numel(), number) for number, parameter in enumerate(parameters)]
        self._sample = [number for size, number in sorted(sizes) if 0 < size <= 4096][-1:]
        self._fingerprints: dict[int, torch.Tensor] = {}  # by number of the parameter
        self._steps = 0
        self._has_warned = False

    def on_step(self, *, first: bool = False) -> None:
        """Record the parameters after a step.

        Args:
            first: True before the first step.
        """
        self._steps += not first
        if not self._has_warned:
            # A check reads all parameters once, so it includes all of them seldom.
            checks_all = first or self._steps in (1, 2, 10, 100, 1000)
            checked = range(len(self._parameters)) if checks_all else self._sample
            found = _fingerprints([self._parameters[number].detach() for number in checked])
            self._fingerprints = dict(zip(checked, found, strict=True))

    def check(self, numbers: Iterable[int] | None = None) -> None:
        """Warn if recorded parameters have changed, before the servers' values overwrite them.

        Args:
            numbers: Numbers of the parameters that are overwritten; None for all.
        """
        if not self._fingerprints:
            return
        affected = [*self._fingerprints] if numbers is None else numbers
        recorded = [(self._parameters[n], self._fingerprints.pop(n)) for n in affected if n in self._fingerprints]
        changed = [parameter for parameter, before in recorded if _differs(before, parameter.detach())]
        if changed and not self._has_warned:
            self._has_warned = True
            self._fingerprints.clear()
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            log.warning(
                f"the script changed {self._name(changed[0])}{more}: in mode async the servers overwrite such changes\n"
                "  set values before job.prepare or with load_state_dict, or use --mode sync"
            )

    def clear(self) -> None:
        """Drop all recorded parameters, because values were loaded."""
        self._fingerprints.clear()


def _before_and_now(recorded: Sequence[_PushedGradient]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fingerprints of gradients at their push and now, as rows of tensors in host memory."""
    return _stacked([one.fingerprint for one in recorded]), _stacked(_fingerprints([one.gradient for one in recorded]))


def _stacked(fingerprints: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return fingerprints as the rows of a tensor in host memory."""
    rows = torch.empty(len(fingerprints), 2, dtype=torch.float64, device="cpu")
    for numbers in _alike(fingerprints):
        rows[numbers] = torch.stack([fingerprints[number] for number in numbers]).to("cpu", torch.float64)
    return rows


def _fingerprints(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return sum and norm of each tensor, in few kernels. Tensors of 16 bits are summed in 32 bits."""
    found: dict[int, torch.Tensor] = {}
    for numbers in _alike(tensors):
        alike = [tensors[number] for number in numbers]
        wide = None if alike[0].dtype in (torch.float32, torch.float64) else torch.float32
        sums = torch.stack([values.sum(dtype=wide) for values in alike])
        norms = torch.stack(list(torch._foreach_norm(alike, 2, dtype=wide)))
        found |= dict(zip(numbers, torch.stack((sums, norms), 1).unbind(), strict=True))
    return [found[number] for number in range(len(tensors))]


def _alike(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """Group tensors by device and dtype. Returns the indices of each group."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, values in enumerate(tensors):
        groups.setdefault((values.device, values.dtype), []).append(number)
    return groups.values()


def _differs(before: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if values have changed, not only the order of summation, as a new memory layout does."""
    before, now = before.double().cpu(), _fingerprints([values])[0].double().cpu()
    tolerance = max(1e-4, 1e-6 * values.numel() ** 0.5) * max(float(before[1]), float(now[1]))
    return bool(((before - now).abs() > tolerance).any())
