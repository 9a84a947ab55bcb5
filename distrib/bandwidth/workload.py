"""What one rank does in a step, measured by a profile or taken from the catalogue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from distrib.errors import ConfigError


class Gradient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter's gradient, and when it is ready: seconds since backward began."""

    name: str
    elements: int
    dtype: str = "float32"
    size_bytes: int
    ready_seconds: float


class Workload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of one rank without any communication: seconds are medians, sizes bytes, `batch` samples.

    `gradients` stand in the order in which they get ready. `variation` is the coefficient of variation of the step.
    """

    name: str
    origin: Literal["measured", "catalogued"]
    device: str
    """Such as `cpu` or `H100 SXM`."""
    batch: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    loader_seconds: float = 0.0
    """That the step waited for its data."""
    gradients: tuple[Gradient, ...]
    parameter_bytes: int
    memory_bytes: int | None = None
    """The most that the device held."""
    variation: float = 0.0
    expected_error: float = 0.0
    """The relative error to expect of the seconds where they were not measured."""
    software: dict[str, str] = {}

    @property
    def gradient_bytes(self) -> int:
        """What a rank has to tell the others in a step."""
        return sum(gradient.size_bytes for gradient in self.gradients)

    @property
    def compute_seconds(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


def write_workload(path: str | os.PathLike[str], workload: Workload) -> None:
    """Write a workload as JSON, whole or not at all. Raises ConfigError where it cannot be written."""
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(workload), indent=1) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {os.fspath(path)}: {error.strerror}") from None
