"""Status messages of a rank to the launcher, as JSON lines on a pipe (`DISTRIB_STATUS_FD`)."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from distrib.environment import DISTRIB_STATUS_FD
from distrib.errors import TrainingError
from distrib.training.step_observer import StepObserver
from distrib.utils.log import get_logger

MAX_WARNING_LENGTH = 1000
"""Characters of a warning: a line of the pipe is at most `select.PIPE_BUF` bytes."""


class _WarningRecorder(logging.Handler):
    """Send the library's warnings to the launcher, which repeats them at the end of the job."""

    def __init__(self, pipe: StatusPipe) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.warning(record.getMessage())


class StatusPipe(StepObserver):
    """Pipe to the launcher. It never blocks the script: a line is lost if the pipe is full or closed."""

    def __init__(self, descriptor: int | None) -> None:
        """Create the sender.

        Args:
            descriptor: File descriptor of the pipe; None without a launcher.
        """
        self._descriptor = descriptor
        self._step = self._said = 0
        self._next_step_time = 0.0
        self._late: threading.Timer | None = None

    @classmethod
    def from_environment(cls) -> StatusPipe:
        """Open the pipe that DISTRIB_STATUS_FD names. Without it, all messages are dropped."""
        text = os.environ.get(DISTRIB_STATUS_FD, "")
        pipe = cls(int(text) if text.isdecimal() else None)
        if pipe.is_read:
            get_logger("training").parent.addHandler(_WarningRecorder(pipe))  # type: ignore[union-attr]
        return pipe

    def after_step(self, step: int, updated: bool | Callable[[], bool]) -> None:
        """Report a step, at most ten times per second. The last step is always reported, perhaps half a second later.

        Args:
            step: Steps that this optimizer has taken; 0 reports nothing.
            updated: Not used.
        """
        self._step = max(self._step, step)
        if not step or self._descriptor is None:
            return
        now = time.monotonic()
        if now >= self._next_step_time:
            self._next_step_time = now + 0.1
            self._say_step()
        elif self._late is None:
            self._late = threading.Timer(0.5, self._say_late)  # may be the last step before the rank hangs
            self._late.daemon = True
            self._late.start()

    def prepared(self) -> None:
        """Report that the script has prepared a trainable model, so that the strategy options of the launch apply."""
        self._write({"prepared": True})

    def closing(self) -> None:
        """Report that the script has ended and waits for the other ranks."""
        self._write({"closing": True})

    def warning(self, text: str) -> None:
        """Report a warning.

        Args:
            text: The warning.
        """
        self._write({"warning": text[:MAX_WARNING_LENGTH]})

    def metrics(self, values: dict[str, Any], *, is_main: bool) -> None:
        """Report metrics of the script.

        Args:
            values: Metrics by name.
            is_main: True if this rank is the main rank, whose metrics the launcher logs.

        Raises:
            TrainingError: A value has another type than JSON allows, or the line exceeds `select.PIPE_BUF`.
        """
        self._write({"metrics": {name: _plain(name, value) for name, value in values.items()}, "main": is_main})

    @property
    def is_read(self) -> bool:
        """True if a launcher reads the pipe."""
        return self._descriptor is not None

    def measured(self, values: dict[str, Any]) -> None:
        """Report the step times of a window; see `distrib.training.telemetry.step_timer`.

        Args:
            values: Measured values by name. Values per host are dropped if the line is too long.
        """
        try:
            self._write({"measured": values})
        except TrainingError:  # a rank with connections to hundreds of hosts
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
        if len(line) > select.PIPE_BUF:
            raise TrainingError(
                f"metrics of {len(line)} bytes do not fit into the {select.PIPE_BUF} of a status line",
                hint="log fewer or shorter values",
                code="metric-invalid",
            )
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, line)
        except BlockingIOError:
            pass
        except OSError:  # the launcher has closed the pipe
            self._descriptor = None


def _plain(name: str, value: Any) -> Any:
    """Convert a value to JSON types: a tensor of one element to its number, NaN and infinity to strings."""
    if isinstance(value, torch.Tensor) or hasattr(value, "item"):  # also scalars of NumPy
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise TrainingError(
                f"metric {name!r} has more than one element", hint="log its mean, or a list", code="metric-invalid"
            ) from error
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(name, item) for key, item in value.items()}
    raise TrainingError(
        f"metric {name!r} is a {type(value).__name__}",
        hint="log numbers, strings, or lists of them",
        code="metric-invalid",
    )
