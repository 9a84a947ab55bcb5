"""Detection of changes that a script makes itself: of gradients before a step, and of parameters between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from distrib.utils.log import get_logger

log = get_logger("parameter_server")


FACTOR_TOLERANCE = 1e-5
"""Relative difference of sums and norms in single precision up to which gradients were multiplied by the same factor."""


class PushedGradients:
    """Fingerprints of gradients that were pushed in the backward pass, before the optimizer steps."""

    def __init__(self) -> None:
        self._pushed: dict[torch.Tensor, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._pushed

    def record(self, parameter: torch.Tensor) -> None:
        """Record the gradient of a parameter as it is pushed.

        Args:
            parameter: The parameter, with a gradient.
        """
        assert parameter.grad is not None
        self._pushed[parameter] = parameter.grad, parameter.grad._version, _fingerprint(parameter.grad)

    def clear(self) -> None:
        """Drop all recorded gradients."""
        self._pushed.clear()

    def common_factor(self) -> float | None:
        """Return the factor by which all gradients were multiplied since their push; None if they changed in another way.

        Clipping the norm and unscaling multiply all gradients alike. Fingerprints, sum and norm, are then multiplied as well.
        """
        if not self._pushed or any(parameter.grad is not pushed[0] for parameter, pushed in self._pushed.items()):
            return None
        before = _stacked(fingerprint for _, _, fingerprint in self._pushed.values())
        now = _stacked(_fingerprint(gradient) for gradient, _, _ in self._pushed.values())
        norm = float(torch.linalg.vector_norm(before[:, 1]))
        factor = float(torch.linalg.vector_norm(now[:, 1])) / norm if norm else 1.0
        tolerance = FACTOR_TOLERANCE * factor * before.abs().amax(1, keepdim=True)
        return factor if bool(((now - factor * before).abs() <= tolerance).all()) else None

    def unchanged(self) -> set[torch.Tensor]:
        """Return the parameters whose gradient has not changed since its push. Fingerprints also detect writes through `.data`."""
        same = [
            (parameter, before)
            for parameter, (gradient, version, before) in self._pushed.items()
            if parameter.grad is gradient and gradient._version == version
        ]
        unchanged = set()
        for device in {before.device for _, before in same}:
            here = [(parameter, before) for parameter, before in same if before.device == device]
            before = torch.stack([fingerprint for _, fingerprint in here])
            now = torch.stack([_fingerprint(parameter.grad) for parameter, _ in here])
            changed = ((before != now) & ~(before.isnan() & now.isnan())).any(1).tolist()
            unchanged |= {parameter for (parameter, _), differs in zip(here, changed, strict=True) if not differs}
        return unchanged


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
            self._fingerprints = {number: _fingerprint(self._parameters[number].detach()) for number in checked}

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


def _stacked(fingerprints: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return fingerprints as the rows of a tensor in host memory."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for fingerprint in fingerprints:
        by_device.setdefault(fingerprint.device, []).append(fingerprint)
    return torch.cat([torch.stack(rows).to("cpu", torch.float64) for rows in by_device.values()])


def _fingerprint(values: torch.Tensor | None) -> torch.Tensor:
    """Return sum and norm in the tensor's own dtype if it is wide enough, of which torch needs no copy."""
    assert values is not None
    wide = None if values.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.stack((values.sum(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)))


def _differs(before: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if values have changed, not only the order of summation, as a new memory layout does."""
    before, now = before.double().cpu(), _fingerprint(values).double().cpu()
    tolerance = max(1e-4, 1e-6 * values.numel() ** 0.5) * max(float(before[1]), float(now[1]))
    return bool(((before - now).abs() > tolerance).any())
