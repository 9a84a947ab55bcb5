"""Measures steps while a job trains: how long they take, how much of that is waiting for gradients, what the wires carry.

It looks at some steps after the first ones, and again every `PAUSE_SECONDS`; between these windows it does nothing. In a window a
hook on each parameter notes when its gradient is ready; from the last one to the optimizer the rank waits for the others. In modes
where it waits elsewhere, and not in each step, the backend counts that, and each step is told to have its share.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distrib.training.model_parameters import exclude_model
from distrib.training.telemetry import tcp_stats
from distrib.training.telemetry.device_timer import DeviceTimer, typical_seconds

WARMUP_STEPS = 5
WINDOW_STEPS = 20
FEWEST_STEPS = 5
WINDOW_SECONDS = 10.0
"""A window ends after so many steps, or after this time if there were a few by then."""
PAUSE_SECONDS = 10.0


class Meter:
    """Measures the steps of the first optimizer that it is shown, and tells `report` of each window: seconds, medians.

    `waited` tells how long the rank has waited so far, where that is not between backward and optimizer; else None. No window
    opens before `steady` says that steps go as they will go on. `by_tcp`: gradients go through TCP connections in any case; else
    what these carry is told only where it is all that is sent.
    """

    def __init__(
        self,
        device: torch.device,
        report: Callable[[dict[str, Any]], None],
        waited: Callable[[], float | None] = lambda: None,
        steady: Callable[[], bool] = lambda: True,
        *,
        by_tcp: bool = False,
    ) -> None:
        self._is_counted = by_tcp or tcp_stats.are_all(device)
        self._clock = DeviceTimer(device)
        self._report = report
        self._waited = waited
        self._steady = steady
        self._waits: list[float] = []  # as counted by the backend, at the end of each step of a window
        self._since: tuple[int, float] | None = None  # steps and waiting when it was looked at first
        self._models: list[nn.Module] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._until = WARMUP_STEPS
        self._open_at = 0.0
        self._hooks: list[Any] = []
        self._marks: list[tuple[Any, Any, Any, Any]] = []  # begin, last gradient, optimizer's begin, end
        self._begin: Any = None
        self._ready: Any = None
        self._called: Any = None
        self._step_hooks: list[RemovableHandle] = []
        self._opened = 0.0
        self._sent: dict[str, tcp_stats.Sent] = {}
        self._steps = 0

    def watch(self, thing: Any) -> None:
        """Measure a model or an optimizer that is prepared."""
        if isinstance(thing, nn.Module):
            # In place of what it was before it was prepared again.
            self._models = [*exclude_model(self._models, thing), thing]
        elif isinstance(thing, torch.optim.Optimizer) and self._optimizer is None:
            self._optimizer = thing
            self._step_hooks = [
                thing.register_step_pre_hook(lambda *_: self._optimizer_begins()),
                thing.register_step_post_hook(lambda *_: self._step_ends()),
            ]

    def release(self, thing: Any) -> None:
        """It is trained no more. The next optimizer that is shown is measured then."""
        if isinstance(thing, nn.Module):
            self._models = exclude_model(self._models, thing)
        elif thing is self._optimizer:
            for hook in (*self._hooks, *self._step_hooks):
                hook.remove()
            self._hooks.clear()
            self._marks.clear()
            self._optimizer = self._begin = self._ready = self._called = None

    @property
    def _is_open(self) -> bool:
        return self._begin is not None

    def _open(self) -> None:
        def ready(_: torch.Tensor) -> None:
            self._ready = self._clock.mark()  # none in a CUDA graph, of which nothing is reported

        for model in self._models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
        self._sent = tcp_stats.sent()
        self._opened = time.monotonic()
        waited = self._waited()
        if waited is not None:
            self._waits = [waited]
            self._since = self._since or (self._steps, waited)
        self._begin = self._clock.mark()

    def _optimizer_begins(self) -> None:
        if self._is_open:
            self._called = self._clock.mark()

    def _step_ends(self) -> None:
        self._steps += 1
        if not self._is_open:
            if self._steps >= self._until and time.monotonic() >= self._open_at and self._steady():
                self._open()
            return
        end = self._clock.mark()
        if self._ready is not None and self._called is not None:
            self._marks.append((self._begin, self._ready, self._called, end))
            waited = self._waited()
            if waited is not None:
                self._waits.append(waited)
        self._begin, self._ready, self._called = end, None, None
        count = len(self._marks)
        late = time.monotonic() - self._opened > WINDOW_SECONDS
        if count >= WINDOW_STEPS or (late and count >= FEWEST_STEPS):
            self._close()

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._begin = None
        self._open_at = time.monotonic() + PAUSE_SECONDS
        self._clock.synchronize()
        seconds = self._clock.seconds
        steps = [seconds(begin, end) for begin, _, _, end in self._marks]
        in_bursts = bool(multiprocessing.active_children())  # as what loads would be
        if self._since is None:
            waits = [max(0.0, seconds(ready, called)) for _, ready, called, _ in self._marks]
            step, wait = typical_seconds(steps, in_bursts=in_bursts), statistics.median(waits)
        else:  # in some steps it waits long, in most of them not at all
            waits = [after - before for before, after in itertools.pairwise(self._waits)]
            begun, before = self._since
            wait = (self._waits[-1] - before) / (self._steps - begun)
            step = statistics.median(a - b for a, b in zip(steps, waits, strict=True)) + wait
        computes = [a - b for a, b in zip(steps, waits, strict=True)]
        self._marks.clear()
        sent = tcp_stats.sent()
        sizes = tcp_stats.sizes(self._sent, sent) if self._is_counted else {}
        self._report(
            {
                "steps": len(steps),
                "step_seconds": step,
                "exposed_seconds": wait,
                "compute_seconds": max(0.0, typical_seconds(computes, in_bursts=in_bursts)),
                "sent_bytes_per_second": tcp_stats.rates(self._sent, sent),
                "sent_bytes_per_step": {address: size / len(steps) for address, size in sizes.items()},
            }
        )
