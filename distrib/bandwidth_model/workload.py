"""Workloads: one step of one rank, from a profile or from the catalogue."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from distrib.errors import ConfigError
from distrib.utils import files
from distrib.utils.json_text import encode_json

ELEMENT_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element by torch's names of the types."""


class Gradient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The gradient of a parameter, ready in seconds since backward began."""

    name: str
    elements: int
    dtype: str = "float32"
    size_bytes: int
    ready_seconds: float


class Workload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step of one rank without communication: medians in seconds, sizes in bytes.

    `gradients` are in the order in which they get ready. `variation`: coefficient of variation of the step, by its quartiles.
    `batch`: samples of all calls of `backward()` in a step.
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
    """Wait for data in the step."""
    loading_processor_seconds: float = 0.0
    """CPU time of the loader processes for the data of a step."""
    gradients: tuple[Gradient, ...]
    parameter_bytes: int
    memory_bytes: int | None = None
    """Peak memory of the device."""
    variation: float = 0.0
    overlaps: bool = True
    """False if gradients are averaged after backward, not beside it."""
    processor_share: float = 0.0
    """Utilization of the rank's CPUs, 0 to 1; the rest is free for the network."""
    processors: int = 1
    """CPUs of the rank."""
    expected_error: float = 0.0
    """Expected relative error of the seconds, 0 for a measurement."""
    software: dict[str, str] = {}
    sample_tokens: int = 0
    """Tokens of a sample; 0 if samples are not sequences."""
    sample_flop: int = 0
    """Operations of forward and backward of a sample, without those that checkpointing repeats; 0 if unknown."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of a step."""
        return sum(gradient.size_bytes for gradient in self.gradients)

    @property
    def has_network(self) -> bool:
        """True if the parts of its memory are known from the network of the catalogue."""
        return self.origin == "catalogued" and "network" in self.software

    @property
    def compute_seconds(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


MAX_VALUES = {
    **dict.fromkeys(("forward_seconds", "backward_seconds", "optimizer_seconds", "loader_seconds"), 1e6),
    "loading_processor_seconds": 1e6,
    "variation": 10.0,  # the machine hung for a quarter of the steps
    "processor_share": 1.0,
    "processors": 1e6,
    "expected_error": 1.0,
    "batch": 1e12,
    "memory_bytes": 1e15,
    "parameter_bytes": 1e15,
    "sample_tokens": 1e9,
    "sample_flop": 1e21,
}
"""Largest values of fields; larger ones are errors of units or typing. All are 0 or more."""


def missing_fields(document: object) -> list[str]:
    """List the required fields that a profile lacks, by their paths.

    Args:
        document: The content of the file.
    """
    if not isinstance(document, dict):
        return []
    missing = [f"$.{name}" for name in _required(Workload) if name not in document]
    gradients = document.get("gradients")
    for number, gradient in enumerate(gradients if isinstance(gradients, list) else ()):
        if isinstance(gradient, dict):
            missing += [f"$.gradients[{number}].{name}" for name in _required(Gradient) if name not in gradient]
    return missing


def _required(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind) if field.required]


def write_workload(path: str | os.PathLike[str], workload: Workload) -> None:
    """Write a workload as JSON, atomically.

    Args:
        path: The file.
        workload: The workload.

    Raises:
        ConfigError: The file cannot be written.
    """
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        partial.write_bytes(encode_json(workload, indent=1) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {os.fspath(path)}: {error.strerror}", code="file-not-written") from None


def read_workload(path: str | os.PathLike[str]) -> Workload:
    """Read a profile that `distrib-launch --profile` wrote.

    Args:
        path: The file.

    Raises:
        ConfigError: The file is not a valid profile; with the path inside.
    """
    shown = os.fspath(path)
    again = "write one with distrib-launch --profile FILE SCRIPT"
    try:
        # json reads NaN and infinities, which are then reported by field. An integer beyond the range of floats is read as infinity.
        document = json.loads(
            Path(path).read_bytes(), parse_int=lambda text: int(text) if len(text) < 309 else float(text)
        )
        if missing := missing_fields(document):
            shown_fields = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise ConfigError(f"{shown}: missing: {shown_fields}", hint=again, code="workload-invalid")
        found = msgspec.convert(document, Workload)
    except OSError as error:
        raise ConfigError(f"cannot read {shown}: {error.strerror}", hint=again, code="file-unreadable") from None
    except msgspec.ValidationError as error:
        unknown = re.match(r"Object contains unknown field `(.*?)`", str(error))
        fields = [field.name for kind in (Workload, Gradient) for field in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(unknown[1], fields, n=1) if unknown else []
        raise ConfigError(
            f"{shown}: {error}", hint=f"did you mean {near[0]}?" if near else again, code="workload-invalid"
        ) from None
    except json.JSONDecodeError as error:
        what = f"{shown}:{error.lineno}: is not valid JSON: {error.msg}"
        raise ConfigError(what, hint=again, code="workload-invalid") from None
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else "is not UTF-8 JSON"
        raise ConfigError(f"{shown}: {what}", hint=again, code="workload-invalid") from None
    check_profile(validate_workload(found, shown), shown)
    return found


def is_workload_file(given: str) -> bool:
    """Test if `--workload` names a file, not a catalogued network.

    Args:
        given: The value of the option.
    """
    return files.is_file(given) or "/" in given or given.endswith(".json")


def validate_workload(workload: Workload, source: str = "workload") -> Workload:
    """Validate the numbers of a workload.

    Args:
        workload: The workload.
        source: The file, for errors.

    Raises:
        ConfigError: A number is impossible, or there are no gradients; with the path in the file.
    """
    for path, what in _workload_errors(workload):
        raise ConfigError(
            f"{source}: {path}: {what}", hint="measure it again, or correct the file", code="workload-invalid"
        )
    return workload


def check_profile(workload: Workload, source: str) -> None:
    """Check that the fields of a profile do not contradict each other.

    Args:
        workload: The valid workload.
        source: The file, for errors.

    Raises:
        ConfigError: Two fields contradict each other; it names both.
    """
    size, elements = workload.parameter_bytes, sum(gradient.elements for gradient in workload.gradients)
    contradiction = ""
    if size < elements:
        contradiction = f"$.parameter_bytes: {size:,} bytes contradict $.gradients, which have {elements:,} elements"
    elif workload.memory_bytes is not None and workload.memory_bytes < size:
        contradiction = f"$.memory_bytes: {workload.memory_bytes:,} bytes contradict $.parameter_bytes, {size:,} bytes"
    if contradiction:
        raise ConfigError(
            f"{source}: {contradiction}", hint="measure it again, or correct the file", code="workload-invalid"
        )


def _workload_errors(workload: Workload) -> Iterator[tuple[str, str]]:
    for field, most in MAX_VALUES.items():
        value = getattr(workload, field)
        if value is not None and not 0 <= value < math.inf:
            yield f"$.{field}", f"{value}, expected a finite number of 0 or more"
        elif value is not None and value > most:
            shown = value if value <= sys.float_info.max else math.inf  # integers have no upper bound
            yield f"$.{field}", f"{shown:g}, expected {most:g} at most"
    for field in ("name", "device"):
        if not (text := getattr(workload, field)).strip() or not text.isprintable():
            yield f"$.{field}", f"{text[:60]!r}, expected a printable name"
    if workload.device.lower() == "cpu" and workload.device != "cpu":
        yield "$.device", f"{workload.device!r} is unknown; write 'cpu'"
    if workload.batch < 1:
        yield "$.batch", f"{workload.batch} samples, expected 1 or more"
    if workload.compute_seconds + workload.loader_seconds < 1e-9:
        yield "$.forward_seconds", "the step takes no time"
    if workload.processors < 1:
        yield "$.processors", f"{workload.processors} CPUs, expected 1 or more"
    if workload.parameter_bytes <= 0:
        yield "$.parameter_bytes", f"{workload.parameter_bytes} bytes, expected 1 or more"
    if not workload.gradients:
        yield "$.gradients", "no gradients: nothing is trained"
    for number, gradient in enumerate(workload.gradients):
        for field, what in _gradient_errors(gradient, workload.backward_seconds):
            yield f"$.gradients[{number}].{field}", what


def _gradient_errors(gradient: Gradient, backward_seconds: float) -> Iterator[tuple[str, str]]:
    if not gradient.name.isprintable():
        yield "name", f"{gradient.name[:60]!r}, expected a printable name"
    if gradient.dtype not in ELEMENT_BYTES:
        yield "dtype", f"{gradient.dtype[:60]!r} is unknown; known are {', '.join(ELEMENT_BYTES)}"
    elif gradient.size_bytes <= 0 or gradient.elements <= 0:
        yield "size_bytes", f"{gradient.elements} elements in {gradient.size_bytes} bytes, expected 1 or more of both"
    elif gradient.size_bytes != gradient.elements * ELEMENT_BYTES[gradient.dtype]:
        yield "size_bytes", f"{gradient.size_bytes} bytes are not {gradient.elements} elements of {gradient.dtype}"
    elif gradient.size_bytes > 1 << 38:
        yield (
            "size_bytes",
            f"{gradient.size_bytes:,} bytes, expected at most 256 GiB, the memory of the largest devices",
        )
    if not 0 <= gradient.ready_seconds < math.inf:
        yield "ready_seconds", f"{gradient.ready_seconds}, expected a finite number of 0 or more"
    elif gradient.ready_seconds > 2 * backward_seconds:  # medians of different steps may differ
        yield "ready_seconds", f"{gradient.ready_seconds:g} is after the end of backward, {backward_seconds:g}"
