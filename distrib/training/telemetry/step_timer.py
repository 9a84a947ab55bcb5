"""Step times during training: duration of a step, its waits for gradients and data, and the traffic to other hosts.

Steps are measured in windows: one after the first steps, then one every `pause_seconds`. Between windows nothing is measured. In a
window, a hook on each parameter marks the time of its gradient. The time from the last gradient to the optimizer is the wait for
other ranks. Strategies that wait elsewhere, and not in every step, count their waits. Each step then has the mean wait.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.model_parameters import exclude_model
from distrib.training.telemetry import scheduler_stats, tcp_stats
from distrib.training.telemetry.device_timer import DeviceTimer, typical_seconds
from distrib.training.telemetry.loader_waits import LoaderWaits


@dataclass(frozen=True, kw_only=True)
class MeterSettings:
    """When step times are measured. A window of 20 steps gives a stable median, and windows cost time only every 10 s."""

    warmup_steps: int = 5
    """Steps before the first window: DDP rebuilds its buckets in the first three."""
    window_steps: int = 20
    window_bursts: int = 4
    """Least batches of each loader process in a window: loader processes that start together yield their batches together."""
    min_steps: int = 5
    """Least number of steps in a window."""
    window_seconds: float = 10.0
    """Time after which a window with `min_steps` ends."""
    pause_seconds: float = 10.0
    """Time between two windows."""


SETTINGS = MeterSettings()


class Meter:
    """Measurement of the steps of one optimizer: the first that is prepared, until it is released."""

    def __init__(
        self,
        device: torch.device,
        report: Callable[[dict[str, Any]], None],
        waited: Callable[[], float | None] = lambda: None,
        steady: Callable[[], bool] = lambda: True,
        samples: Callable[[], int] = lambda: 0,
        *,
        by_tcp: bool = False,
        local_ranks: int = 1,
    ) -> None:
        """Begin without an optimizer.

        Args:
            device: The device of this rank.
            report: Called after each window with medians in seconds and traffic in bytes, by name.
            waited: Returns the seconds waited so far; None if the rank waits only between backward and optimizer.
            steady: Returns False while step times are not typical. No window begins then.
            samples: Returns this rank's samples in the present step; 0 if they are not known.
            by_tcp: True if all gradients travel over TCP. Otherwise, traffic is reported only if TCP carries all collectives.
            local_ranks: Ranks on this host, which share its CPUs.
        """
        self._is_counted = by_tcp or tcp_stats.are_all(device)
        self._clock = DeviceTimer(device)
        self._loading = LoaderWaits(self._clock, local_ranks)
        self._report = report
        self._waited = waited
        self._steady, self._samples = steady, samples
        self._waits: list[float] = []  # seconds counted by the strategy, at the end of each step of a window
        self._since: tuple[int, float] | None = None  # steps and seconds waited at the start of the first window
        self._models: list[nn.Module] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._until = SETTINGS.warmup_steps
        self._open_at = 0.0
        self._hooks: list[Any] = []
        self._marks: list[tuple[Any, Any, Any, Any]] = []  # begin, last gradient, optimizer's begin, end
        self._begin: Any = None
        self._ready: Any = None
        self._called: Any = None
        self._step_hooks: list[RemovableHandle] = []
        self._opened = 0.0
        self._sent: dict[str, tcp_stats.Sent] = {}
        self._queued: dict[str, float] = {}
        self._steps = 0

    def watch(self, thing: Any) -> None:
        """Measure a prepared object.

        Args:
            thing: A prepared model, optimizer or loader. Other objects are ignored.
        """
        if isinstance(thing, nn.Module):
            # A model that is prepared again replaces its former wrapper.
            self._models = [*exclude_model(self._models, thing), thing]
        elif isinstance(thing, ShardedLoader):
            self._loading.watch(thing)
        elif isinstance(thing, torch.optim.Optimizer) and self._optimizer is None:
            self._optimizer = thing
            self._step_hooks = [
                thing.register_step_pre_hook(lambda *_: self._optimizer_begins()),
                thing.register_step_post_hook(lambda *_: self._step_ends()),
            ]

    def release(self, things: Sequence[Any]) -> None:
        """Stop measuring objects. The next optimizer that is prepared is measured instead.

        Args:
            things: Released models and optimizers.
        """
        for model in [thing for thing in things if isinstance(thing, nn.Module)]:
            self._models = exclude_model(self._models, model)
        if any(thing is self._optimizer for thing in things):
            for hook in (*self._hooks, *self._step_hooks):
                hook.remove()
            self._hooks.clear()
            self._marks.clear()
            self._loading.discard()
            self._optimizer = self._begin = self._ready = self._called = None

    @property
    def _is_open(self) -> bool:
        return self._begin is not None

    def _open(self) -> None:
        def ready(_: torch.Tensor) -> None:
            self._ready = self._clock.mark()  # None in a CUDA graph: its steps are not reported

        for model in self._models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
        self._sent = tcp_stats.sent()
        self._queued = scheduler_stats.queued_by_thread()
        self._opened = time.monotonic()
        waited = self._waited()
        if waited is not None:
            self._waits = [waited]
            self._since = self._since or (self._steps, waited)
        self._loading.open()
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
        if end is None:  # in a CUDA graph
            self._loading.discard()
        else:
            self._loading.end_step(self._begin, end)
        if self._ready is not None and self._called is not None:
            self._marks.append((self._begin, self._ready, self._called, end))
            waited = self._waited()
            if waited is not None:
                self._waits.append(waited)
        self._begin, self._ready, self._called = end, None, None
        count = len(self._marks)
        late = time.monotonic() - self._opened > SETTINGS.window_seconds
        if count >= max(SETTINGS.window_steps, SETTINGS.window_bursts * self._loading.most_workers) or (
            late and count >= SETTINGS.min_steps
        ):
            self._close()

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._begin = None
        self._open_at = time.monotonic() + SETTINGS.pause_seconds
        self._clock.synchronize()
        loading = self._loading.close()
        seconds = self._clock.seconds
        steps = [seconds(begin, end) for begin, _, _, end in self._marks]
        in_bursts = bool(multiprocessing.active_children())  # loader processes
        if self._since is None:
            waits = [max(0.0, seconds(ready, called)) for _, ready, called, _ in self._marks]
            step, wait = typical_seconds(steps, in_bursts=in_bursts), statistics.median(waits)
        else:  # few steps have a long wait, and most have none
            waits = [after - before for before, after in itertools.pairwise(self._waits)]
            begun, before = self._since
            wait = (self._waits[-1] - before) / (self._steps - begun)
            step = statistics.median(a - b for a, b in zip(steps, waits, strict=True)) + wait
        computes = [a - b for a, b in zip(steps, waits, strict=True)]
        self._marks.clear()
        sent = tcp_stats.sent()
        queued = scheduler_stats.longest_queue_seconds(self._queued, scheduler_stats.queued_by_thread())
        sizes = tcp_stats.sizes(self._sent, sent) if self._is_counted else {}
        self._report(
            {
                "steps": len(steps),
                "step_seconds": step,
                "samples": self._samples(),
                "exposed_seconds": wait,
                "compute_seconds": max(0.0, typical_seconds(computes, in_bursts=in_bursts)),
                "queued_seconds": queued / len(steps),
                "sent_bytes_per_second": tcp_stats.rates(self._sent, sent),
                "sent_bytes_per_step": {address: size / len(steps) for address, size in sizes.items()},
                "loading": loading or None,
            }
        )
