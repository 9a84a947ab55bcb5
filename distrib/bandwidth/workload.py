"""What one rank does in a step, measured by a profile or taken from the catalogue."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
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
    """One step of one rank without any communication: seconds are medians, sizes bytes.

    `gradients` stand in the order in which they get ready. `variation` is the coefficient of variation of the
    step, by its quartiles. `batch` are the samples of all calls of `backward()` in a step.
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
    processor_share: float = 0.0
    """How busy the step keeps the processors that the rank computes with, 0 to 1; on a CPU, what is left is free for the wire."""
    processors: int = 1
    """How many these are."""
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


def checked(workload: Workload, source: str = "workload") -> Workload:
    """`workload` itself. Raises ConfigError, with the path in `source`, for numbers that cannot be and where there are no gradients."""
    for path, what in _wrong_in(workload):
        raise ConfigError(f"{source}: {path}: {what}", hint="measure it again, or correct the file")
    return workload


def _wrong_in(workload: Workload) -> Iterator[tuple[str, str]]:
    for field in (
        "forward_seconds",
        "backward_seconds",
        "optimizer_seconds",
        "loader_seconds",
        "variation",
        "processor_share",
        "expected_error",
    ):
        if not 0 <= (value := getattr(workload, field)) < math.inf:
            yield f"$.{field}", f"{value} cannot be; it must be zero or more, and finite"
    if workload.batch < 1:
        yield "$.batch", f"{workload.batch} samples; a batch has at least one"
    if workload.compute_seconds + workload.loader_seconds <= 0:
        yield "$.forward_seconds", "a step that takes no time at all cannot be"
    if workload.processors < 1:
        yield "$.processors", f"{workload.processors}; a rank computes with one at least"
    if workload.parameter_bytes <= 0:
        yield "$.parameter_bytes", f"{workload.parameter_bytes} bytes; a model that is trained has some"
    if not workload.gradients:
        yield "$.gradients", "there are none: nothing is trained, and nothing crosses a wire"
    for number, gradient in enumerate(workload.gradients):
        if gradient.size_bytes <= 0 or gradient.elements <= 0:
            what = f"{gradient.elements} elements in {gradient.size_bytes} bytes are no gradient"
            yield f"$.gradients[{number}].size_bytes", what
        if not 0 <= gradient.ready_seconds < math.inf:
            yield (
                f"$.gradients[{number}].ready_seconds",
                f"{gradient.ready_seconds} cannot be; it must be zero or more, and finite",
            )
