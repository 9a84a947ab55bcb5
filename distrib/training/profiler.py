"""Profiler: measures the steps of a script on a single rank and writes a workload for `distrib-topo plan`.

A step lasts from the end of one `optimizer.step()` to the end of the next. It has four phases: waits for the loader; backward, from
the call of `backward()` to its return; optimizer, after backward; forward, the rest. If a step calls `backward()` several times,
only the last call counts as backward, because gradients are averaged in it. The samples of all calls are counted.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from distrib._version import __version__
from distrib.bandwidth_model.workload import MAX_VALUES, Gradient, Workload, write_workload
from distrib.cluster.hardware_catalog import find_gpu
from distrib.environment import DISTRIB_PROFILE, DISTRIB_RESULT_FD
from distrib.errors import TrainingError
from distrib.training.telemetry.device_timer import DeviceTimer, typical_seconds
from distrib.training.telemetry.loader_waits import processor_seconds_of_children
from distrib.utils.json_text import decode_json, encode_json
from distrib.utils.log import PLAIN, get_logger

log = get_logger("training")


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a profile: the name of the workload, and the numbers of steps."""

    name: str
    warmup_steps: int = 5
    """Steps that are not measured."""
    steps: int = 20
    """Steps that are measured."""
    min_steps: int = 5
    """Measured steps that a profile needs at least, if the script ends early."""


class _Step:
    """Marks of one step."""

    def __init__(self, begin: Any, children_seconds: float) -> None:
        self.begin = begin
        self.processor_seconds = -time.process_time()
        self.loading_seconds = -children_seconds
        self.begins_epoch = False
        self.fetches: list[tuple[Any, Any]] = []
        self.backward: tuple[Any, Any] | None = None
        self.ready: dict[str, Any] = {}
        self.samples = 0
        self.end: Any = None


class Profiler:
    """Measurement of a workload: the steps of one optimizer, its models and their loaders."""

    def __init__(
        self,
        device: torch.device,
        request: ProfileRequest,
        done: Callable[[Workload, int], None],
        *,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Begin to measure.

        Args:
            device: The device of this rank.
            request: Name of the workload, and numbers of steps.
            done: Called with the workload and the number of measured steps, after the last step.
            on_failure: Called with a message once no profile is possible. None raises TrainingError instead.
        """
        self._device = device
        self._request = request
        self._done = done
        self._clock = DeviceTimer(device)
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._gradients: dict[str, tuple[int, str, int]] = {}
        self._shown = 0
        """Largest batch of the model or the loader since the last call of `backward()`, in samples."""
        self._step: _Step | None = None
        self._steps: list[_Step] = []
        self._taken = 0
        self._depth = 0
        self._handles: list[Any] = []
        self._backward = torch.autograd.backward
        self.finished = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        torch.autograd.backward = self._timed(torch.autograd.backward)
        self._on_failure = on_failure
        self._unprepared = 0
        if on_failure:
            self._handles.append(register_optimizer_step_post_hook(lambda *_: self._some_step_ends()))

    def watch(self, thing: Any) -> None:
        """Measure a prepared object.

        Args:
            thing: A model, an optimizer or a loader.

        Raises:
            TrainingError: A second optimizer was prepared, and there is no `on_failure`.
        """
        if self.finished:
            return
        if isinstance(thing, nn.Module):
            self._watch_model(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            self._optimizers.append(thing)
            if len(self._optimizers) > 1:
                self._give_up()
            else:
                self._handles.append(thing.register_step_post_hook(lambda *_: self._step_ends()))
        elif hasattr(thing, "measure_waits"):
            thing.measure_waits = self._fetches

    @property
    def problem(self) -> str:
        """Reason why there is no profile yet, as a message."""
        if not self._optimizers:
            return "no optimizer was prepared; hand model, optimizer and loader to job.prepare()"
        if len(self._optimizers) > 1:
            return (
                f"{len(self._optimizers)} optimizers were prepared, and a profile knows one; hand only that of the largest model "
                "to job.prepare() to profile this"
            )
        if not self._models:
            return "no model was prepared; hand it to job.prepare() as well"
        if self._taken and not self._gradients:
            return f"no gradient of the model was computed by backward() in {self._taken} step(s)"
        needed = self._request.warmup_steps + self._request.min_steps
        return (
            f"the script took {self._taken} step(s); a profile needs {needed} ({self._request.warmup_steps} to warm up and "
            f"{self._request.min_steps} measured, better {self._request.steps})"
        )

    def close(self) -> None:
        """Finish with the steps measured so far, at the end of the script.

        Raises:
            TrainingError: There are fewer than `min_steps`, or no gradients.
        """
        if self.finished:
            return
        problem = self.problem if len(self._steps) < self._request.min_steps else ""
        if problem or not self._gradients:
            self._end()
            raise TrainingError(f"no profile: {problem or self.problem}", code="profile-failed")
        self._finish()

    def _watch_model(self, model: nn.Module) -> None:
        prefix = f"{len(self._models)}." if self._models else ""
        self._models.append(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(self._gradient_ready, prefix + name)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        self._handles.append(model.register_forward_pre_hook(self._forward_begins, with_kwargs=True))

    def _forward_begins(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._shows((arguments, named))

    def _shows(self, batch: Any) -> None:
        if torch.is_grad_enabled():
            self._shown = max(self._shown, _samples_of(batch))

    def _fetches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and record the wait for each."""
        if self._step:
            self._step.begins_epoch = True
        while True:
            begin = self._clock.mark() if self._step else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._step and begin is not None:
                self._step.fetches.append((begin, self._clock.mark()))
            self._shows(batch)
            yield batch

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*arguments: Any, **named: Any) -> Any:
            step = self._step
            if step is None or self._depth:  # checkpointing calls backward inside of backward
                return original(*arguments, **named)
            step.samples += self._shown
            self._shown = 0
            self._depth += 1
            step.ready.clear()
            begin = self._clock.mark()
            try:
                return original(*arguments, **named)
            finally:
                self._depth -= 1
                if begin is not None:
                    step.backward = (begin, self._clock.mark())

        return backward

    def _gradient_ready(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        size = gradient.numel() * gradient.element_size()
        self._gradients[name] = (gradient.numel(), str(gradient.dtype).removeprefix("torch."), size)
        if self._step and (mark := self._clock.mark()) is not None:
            self._step.ready[name] = mark

    def _step_ends(self) -> None:
        now, children_seconds = self._clock.mark(), processor_seconds_of_children()
        self._taken += 1
        step = self._step
        if step and step.backward and self._taken > self._request.warmup_steps:
            step.end = now
            step.processor_seconds += time.process_time()
            step.loading_seconds += children_seconds
            self._steps.append(step)
        self._step = _Step(now, children_seconds)
        if len(self._steps) >= self._request.steps:
            self._finish()

    def _some_step_ends(self) -> None:
        """Count steps of optimizers that were not prepared, and give up after too many of them."""
        self._unprepared += not self._optimizers
        if self._unprepared >= self._request.warmup_steps + self._request.steps:
            self._give_up()

    def _give_up(self) -> None:
        self._end()
        what = f"no profile: {self.problem}"
        if self._on_failure is None:
            raise TrainingError(what, code="profile-failed")
        self._on_failure(what)

    def _end(self) -> None:
        self.finished = True
        torch.autograd.backward = self._backward
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _finish(self) -> None:
        self._end()
        self._clock.synchronize()
        self._done(self._workload(), len(self._steps))

    def _workload(self) -> Workload:
        seconds = self._clock.seconds
        waits, forwards, backwards, optimizers, totals = [], [], [], [], []
        ready: dict[str, list[float]] = {}
        for step in self._steps:
            assert step.backward
            wait = sum(seconds(begin, end) for begin, end in step.fetches)
            waits.append(wait)
            forwards.append(seconds(step.begin, step.backward[0]) - wait)
            backwards.append(seconds(*step.backward))
            optimizers.append(seconds(step.backward[1], step.end))
            totals.append(seconds(step.begin, step.end))
            for name, mark in step.ready.items():
                ready.setdefault(name, []).append(seconds(step.backward[0], mark))
        gradients = [
            Gradient(
                name=name, elements=self._gradients[name][0], dtype=self._gradients[name][1],
                size_bytes=self._gradients[name][2], ready_seconds=max(0.0, statistics.median(times)),
            )
            for name, times in ready.items()
        ]  # fmt: skip
        used = sum(step.processor_seconds for step in self._steps) / sum(totals) / torch.get_num_threads()
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        return Workload(
            name=self._request.name,
            origin="measured",
            device=self._device_name(),
            batch=max(1, statistics.median_high(step.samples for step in self._steps)),
            forward_seconds=max(0.0, statistics.median(forwards)),
            backward_seconds=statistics.median(backwards),
            optimizer_seconds=max(0.0, statistics.median(optimizers)),
            loader_seconds=self._waiting_seconds(waits),
            loading_processor_seconds=self._loading_seconds(),
            gradients=tuple(sorted(gradients, key=lambda gradient: gradient.ready_seconds)),
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            memory_bytes=self._memory_bytes(),
            processor_share=min(1.0, used),
            processors=torch.get_num_threads(),
            variation=quartile_variation([total - wait for total, wait in zip(totals, waits, strict=True)]),
            software={"distrib": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        )

    def _waiting_seconds(self, waits: Sequence[float]) -> float:
        """Compute the typical wait for data in a step. First steps of epochs do not count, because worker processes may start there."""
        inside = [wait for step, wait in zip(self._steps, waits, strict=True) if not step.begins_epoch] or waits
        return typical_seconds(inside, in_bursts=bool(multiprocessing.active_children()))  # loader processes

    def _loading_seconds(self) -> float:
        """Compute the mean CPU seconds of loader processes per step. A mean, because they prefetch batches of other steps."""
        inside = [step for step in self._steps if not step.begins_epoch] or self._steps
        return max(0.0, statistics.fmean(step.loading_seconds for step in inside))

    def _device_name(self) -> str:
        if self._device.type == "cpu":
            return "cpu"
        name = torch.cuda.get_device_name(self._device)
        known = find_gpu(name)
        return known.name if known else name

    def _memory_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quartile_variation(seconds: Sequence[float]) -> float:
    """Compute the coefficient of variation from the quartiles, assuming normal errors. A single outlier does not count.

    Args:
        seconds: Two measurements or more.
    """
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return min(MAX_VALUES["variation"], (high - low) / (2 * statistics.NormalDist().inv_cdf(0.75)) / median)


def _samples_of(batch: Any) -> int:
    """Count the samples in a batch: the length of the first tensor in it, 0 without one."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 0
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((samples for item in batch if (samples := _samples_of(item))), 0)
    return 0


class ProfileReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to the launcher through `DISTRIB_RESULT_FD`: the workload and the measured steps, or the problem."""

    workload: Workload | None = None
    steps: int = 0
    problem: str = ""

    def send(self) -> None:
        """Write the reply."""
        data = encode_json(self)
        while data:
            data = data[os.write(int(os.environ[DISTRIB_RESULT_FD]), data) :]


class JobProfiler:
    """The profiles of a job, one at a time, on a single rank: for the launcher (`--profile`) or `Job.profile`."""

    def __init__(self, device: torch.device, environ: Mapping[str, str], *, alone: bool) -> None:
        """Begin a profile if the launcher requests one.

        Args:
            device: The device of this rank.
            environ: The environment of this rank.
            alone: True if the job has one rank.
        """
        self._device, self._alone = device, alone
        self._profiler: Profiler | None = None
        text = environ.get(DISTRIB_PROFILE)
        self._for_launcher = bool(text)
        if text:
            request = decode_json(text, ProfileRequest)
            self._begin(
                request,
                lambda workload, steps: self._leave(ProfileReply(workload=workload, steps=steps)),
                lambda problem: self._leave(ProfileReply(problem=problem)),
            )

    def begin(self, path: str | os.PathLike[str], *, warmup_steps: int, steps: int) -> None:
        """Begin a profile for the script.

        Args:
            path: The file to write.
            warmup_steps: Steps before the measurement.
            steps: Steps to measure.

        Raises:
            TrainingError: A profile is measured already, or the job has several ranks.
        """
        if self._profiler and not self._profiler.finished:
            raise TrainingError(
                "a profile is being measured already",
                hint="leave out job.profile() or --profile",
                code="profile-failed",
            )
        request = ProfileRequest(name=Path(sys.argv[0] or "script").stem, warmup_steps=warmup_steps, steps=steps)
        self._begin(request, lambda workload, _: write_workload(path, workload))

    def watch(self, thing: Any) -> None:
        """Measure a prepared object.

        Args:
            thing: A model, an optimizer or a loader.
        """
        if self._profiler:
            self._profiler.watch(thing)

    def end(self) -> None:
        """Finish the profile with the steps so far, at the end of the script.

        Raises:
            TrainingError: There are too few steps, and the launcher did not request the profile.
        """
        if not self._profiler or self._profiler.finished:
            return
        try:
            self._profiler.close()
        except TrainingError as error:
            if not self._for_launcher:
                raise
            ProfileReply(problem=error.what).send()
        except SystemExit:
            pass  # the script is at its end anyway

    def _begin(
        self,
        request: ProfileRequest,
        done: Callable[[Workload, int], None],
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        if not self._alone:
            raise TrainingError(
                "a profile is measured on one rank alone",
                hint="run the script without other ranks",
                code="profile-failed",
            )
        self._profiler = Profiler(self._device, request, done, on_failure=on_failure)
        atexit.register(self._at_exit)

    def _leave(self, reply: ProfileReply) -> None:
        """Send the reply and end the script."""
        reply.send()
        timer = threading.Timer(3.0, os._exit, (0,))  # a thread of the script may never end
        timer.daemon = True
        timer.start()
        raise SystemExit(0)

    def _at_exit(self) -> None:
        try:
            self.end()
        except TrainingError as error:
            log.info(f"{error}", extra=PLAIN)
