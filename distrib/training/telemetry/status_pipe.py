"""What a rank tells the launcher while it trains: JSON lines on the status pipe (see docs/contracts.md)."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from distrib.environment import DISTRIB_STATUS_FD
from distrib.errors import TrainingError
from distrib.training.step_observer import StepObserver

LONGEST_LINE_BYTES = 4096
SHORTEST_INTERVAL_SECONDS = 0.1
LATE_SECONDS = 0.5
"""A step that was not said at once is said after so long: it may have been the last before the rank stood still."""


class StatusPipe(StepObserver):
    """The way to the launcher. It never blocks the script: a full or a closed pipe loses the line."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._step = self._said = 0
        self._next_step_time = 0.0
        self._late: threading.Timer | None = None

    @classmethod
    def from_environment(cls) -> StatusPipe:
        """The pipe that DISTRIB_STATUS_FD names; without one every line is lost, as is right for a rank alone."""
        text = os.environ.get(DISTRIB_STATUS_FD, "")
        return cls(int(text) if text.isdecimal() else None)

    def step(self, number: int) -> None:
        """Says that step `number` is done, at most ten times a second: of faster ones some are left out, never the last."""
        self._step = max(self._step, number)
        if self._descriptor is None:
            return
        now = time.monotonic()
        if now >= self._next_step_time:
            self._next_step_time = now + SHORTEST_INTERVAL_SECONDS
            self._say_step()
        elif self._late is None:
            self._late = threading.Timer(LATE_SECONDS, self._say_late)
            self._late.daemon = True
            self._late.start()

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        if step:
            self.step(step)

    def prepared(self) -> None:
        """Says that the script has prepared a model that learns: what was asked for at launch has a meaning."""
        self._write({"prepared": True})

    def closing(self) -> None:
        """Says that the script is at its end and waits for the others there."""
        self._write({"closing": True})

    def metrics(self, values: dict[str, Any], *, is_main: bool) -> None:
        """Says what the script measured, whose log the main rank's is. Raises TrainingError for values that fit no line of 4096 bytes."""
        self._write({"metrics": {name: _plain(name, value) for name, value in values.items()}, "main": is_main})

    @property
    def is_read(self) -> bool:
        """Whether there is a launcher."""
        return self._descriptor is not None

    def measured(self, values: dict[str, Any]) -> None:
        """Says how long the last steps took; see `distrib.training.telemetry.step_timer`. What fits no line is not said."""
        try:
            self._write({"measured": values})
        except TrainingError:  # a rank that talks to hundreds of hosts
            self._write({"measured": {**values, "sent_bytes_per_second": {}, "sent_bytes_per_step": {}}})

    def _say_step(self) -> None:
        self._said = self._step
        self._write({"step": self._said})

    def _say_late(self) -> None:
        self._late = None
        if self._said < self._step:
            self._say_step()

    def _write(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        if len(line) > LONGEST_LINE_BYTES:
            raise TrainingError(
                f"metrics of {len(line)} bytes do not fit into the {LONGEST_LINE_BYTES} of a status line",
                hint="log fewer or shorter values",
            )
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line)
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            self._descriptor = None


def _plain(name: str, value: Any) -> Any:
    """`value` as JSON has it: a tensor of one element as its number; nan and inf, unknown to JSON, as strings."""
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):  # and the scalars of numpy
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise TrainingError(f"metric {name!r} has more than one element", hint="log its mean, or a list") from error
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(name, item) for key, item in value.items()}
    raise TrainingError(f"metric {name!r} is a {type(value).__name__}", hint="log numbers, strings, or lists of them")
