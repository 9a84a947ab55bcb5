"""What one rank does in a step, measured by a profile or taken from the catalogue."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from distrib.errors import ConfigError

SHORTEST_STEP_SECONDS, LONGEST_STEP_SECONDS = 1e-9, 1e6
MOST_GRADIENT_BYTES = 1 << 38
"""256 GiB: as much as the largest devices hold, of which gradients are a part."""

ELEMENT_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Of the types that gradients have, by torch's names."""


class Gradient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One parameter's gradient, and when it is ready: seconds since backward began."""

    name: str
    elements: int
    dtype: str = "float32"
    size_bytes: int
    ready_seconds: float


class Workload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
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
    loading_processor_seconds: float = 0.0
    """What the processes that load a step's data take of the host's processors meanwhile, all of them together."""
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


MOST_VARIATION = 10.0
"""Of a machine that stood still for a quarter of the steps; it says no more than that."""

_MOST = {
    **dict.fromkeys(
        ("forward_seconds", "backward_seconds", "optimizer_seconds", "loader_seconds"), LONGEST_STEP_SECONDS
    ),
    "loading_processor_seconds": LONGEST_STEP_SECONDS,
    "variation": MOST_VARIATION,
    "processor_share": 1.0,
    "processors": 1e6,
    "expected_error": 1.0,
    "batch": 1e12,
    "memory_bytes": 1e15,
    "parameter_bytes": 1e15,
}
"""What the fields are at most; a larger number is a slip of a unit or of a finger. None of them is less than zero."""


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
    for field, most in _MOST.items():
        value = getattr(workload, field)
        if value is not None and not 0 <= value < math.inf:
            yield f"$.{field}", f"{value} cannot be; it must be zero or more, and finite"
        elif value is not None and value > most:
            yield f"$.{field}", f"{value:g} cannot be; it is {most:g} at most"
    for field in ("name", "device"):
        if not (text := getattr(workload, field)).strip() or not text.isprintable():
            yield f"$.{field}", f"{text[:60]!r} cannot be; it is a name"
    if workload.device.lower() == "cpu" and workload.device != "cpu":
        yield "$.device", f"{workload.device!r} is not known; write 'cpu'"
    if workload.batch < 1:
        yield "$.batch", f"{workload.batch} samples; a batch has at least one"
    if workload.compute_seconds + workload.loader_seconds < SHORTEST_STEP_SECONDS:
        yield "$.forward_seconds", "a step that takes no time at all cannot be"
    if workload.processors < 1:
        yield "$.processors", f"{workload.processors}; a rank computes with one at least"
    if workload.parameter_bytes <= 0:
        yield "$.parameter_bytes", f"{workload.parameter_bytes} bytes; a model that is trained has some"
    if not workload.gradients:
        yield "$.gradients", "there are none: nothing is trained, and nothing crosses a wire"
    total = 0
    for number, gradient in enumerate(workload.gradients):
        total += gradient.size_bytes
        for field, what in _wrong_in_gradient(gradient, workload.backward_seconds):
            yield f"$.gradients[{number}].{field}", what
        if total > MOST_GRADIENT_BYTES:
            what = f"with this there are {total:,} bytes of gradients; no rank holds more than {MOST_GRADIENT_BYTES:,}"
            yield f"$.gradients[{number}].size_bytes", what


def _wrong_in_gradient(gradient: Gradient, backward_seconds: float) -> Iterator[tuple[str, str]]:
    if not gradient.name.isprintable():
        yield "name", f"{gradient.name[:60]!r} cannot be; it is a name"
    if gradient.dtype not in ELEMENT_BYTES:
        yield "dtype", f"{gradient.dtype[:60]!r} is not known; there are {', '.join(ELEMENT_BYTES)}"
    elif gradient.size_bytes <= 0 or gradient.elements <= 0:
        yield "size_bytes", f"{gradient.elements} elements in {gradient.size_bytes} bytes are no gradient"
    elif gradient.size_bytes != gradient.elements * ELEMENT_BYTES[gradient.dtype]:
        yield "size_bytes", f"{gradient.size_bytes} bytes are not {gradient.elements} elements of {gradient.dtype}"
    if not 0 <= gradient.ready_seconds < math.inf:
        yield "ready_seconds", f"{gradient.ready_seconds} cannot be; it must be zero or more, and finite"
    elif gradient.ready_seconds > 2 * backward_seconds:  # medians of different steps may differ
        yield "ready_seconds", f"{gradient.ready_seconds:g} is long after backward, which takes {backward_seconds:g}"
