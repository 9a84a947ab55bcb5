"""Waits of a rank for its loaders, and the CPU time that loading takes, in a window of steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.telemetry.device_timer import DeviceTimer
from distrib.training.telemetry.scheduler_stats import scheduled_seconds
from distrib.utils.cpus import cpu_quota, usable_cores


class _Source(NamedTuple):
    """A watched loader: its number, its worker processes, and True for an IterableDataset."""

    number: int
    workers: int
    is_stream: bool


class _Fetch(NamedTuple):
    """One wait for a batch: marks of the device, and seconds by the clock; with loader processes, only the blocked seconds."""

    source: _Source
    begin: Any
    end: Any
    seconds: float


class LoaderWaits:
    """Measurement of the waits for data. Steps that begin a pass do not count, because worker processes may start in them.

    On a GPU, only the time in which the GPU has no work is a wait. With loader processes, the wait excludes the time that this rank
    runs or queues for a CPU: more processes would not shorten it.
    """

    def __init__(self, clock: DeviceTimer, local_ranks: int) -> None:
        """Begin without loaders.

        Args:
            clock: Timer of this rank's device.
            local_ranks: Ranks on this host.
        """
        self._clock, self._local_ranks = clock, local_ranks
        self._sources = 0
        self.most_workers = 0
        """Worker processes of the loader with most of them: their batches come in bursts of as many."""
        self._is_open = False
        self._begins_pass = False
        self._fetches: list[_Fetch] = []
        self._steps: list[tuple[Any, Any, list[_Fetch]]] = []
        self._counted = 0
        self._own_seconds = self._loading_seconds = 0.0
        self._queued: dict[int, tuple[float, float]] = {}
        """First and latest seconds in the queue for a CPU, by process: those of an epoch end with it."""

    def watch(self, loader: ShardedLoader) -> None:
        """Measure the waits for a loader's batches.

        Args:
            loader: A prepared loader.
        """
        source = _Source(self._sources, loader.num_workers, loader.is_stream)
        self._sources += 1
        self.most_workers = max(self.most_workers, source.workers)
        loader.fetch = lambda batches, is_first: self._fetch(source, batches, is_first)

    def open(self) -> None:
        """Begin a window."""
        self._is_open = True
        self._begins_pass, self._fetches, self._steps, self._counted = False, [], [], 0
        self._own_seconds, self._loading_seconds = -time.process_time(), -processor_seconds_of_children()
        self._queued.clear()
        self._sample_queues()

    def end_step(self, begin: Any, end: Any) -> None:
        """Record the end of a step.

        Args:
            begin: Mark of its begin.
            end: Mark of its end.
        """
        if not self._is_open:
            return
        self._counted += 1
        self._sample_queues()
        if self._fetches and not self._begins_pass:
            self._steps.append((begin, end, self._fetches))
        self._begins_pass, self._fetches = False, []

    def discard(self) -> None:
        """End the window without a result."""
        self._is_open = False
        self._fetches, self._steps = [], []

    def close(self) -> dict[str, Any]:
        """End the window, after the device has reached its marks.

        Returns:
            Means per step of the loader that was waited for longest, by name; empty without a loader.
        """
        steps = self._steps
        self.discard()
        if not steps:
            return {}
        own = self._own_seconds + time.process_time()
        loading = max(0.0, self._loading_seconds + processor_seconds_of_children())
        queued = sum(latest - first for first, latest in self._queued.values())
        waits: dict[_Source, list[float]] = {}
        for place, (_, _, fetches) in enumerate(steps):
            for one in fetches:
                by_step = waits.setdefault(one.source, [0.0] * len(steps))
                by_step[place] += min(one.seconds, self._clock.seconds(one.begin, one.end))
        source, longest = max(waits.items(), key=lambda item: sum(item[1]))
        mean = statistics.fmean(longest)
        step = statistics.fmean(self._clock.seconds(begin, end) for begin, end, _ in steps)
        batch = source.workers * step  # workers that are waited for are always busy
        if not source.workers:
            batch = sum(one.seconds for _, _, fetches in steps for one in fetches if one.source == source) / len(steps)
        # Workers that start together finish together: one step in `workers` waits for all of them.
        is_regular = sum(wait >= mean / 2 for wait in longest) * 2 * max(1, source.workers) >= len(steps)
        return {
            "steps": len(steps),
            "step_seconds": step,
            "loader_seconds": mean,
            "batch_seconds": batch,
            "loading_processor_seconds": loading / self._counted,
            "processor_seconds": own / self._counted,
            "queued_seconds": queued / self._counted,
            "cores": self._cores(),
            "workers": source.workers,
            "is_stream": source.is_stream,
            "is_regular": is_regular,
        }

    def _fetch(self, source: _Source, batches: Iterator[Any], is_first: bool) -> Any:
        self._begins_pass |= is_first
        waits_beside = threading.current_thread() is not threading.main_thread()
        if not self._is_open or waits_beside:
            return next(batches)
        processor, scheduled = time.process_time(), sum(scheduled_seconds("thread-self"))
        since, begin = time.perf_counter(), self._clock.mark()
        batch = next(batches)
        end, seconds = self._clock.mark(), time.perf_counter() - since
        if source.workers:
            seconds = max(0.0, seconds - (sum(scheduled_seconds("thread-self")) - scheduled))
        else:  # loading uses this process
            processor -= time.process_time()
            self._own_seconds += processor
            self._loading_seconds -= processor
        if begin is not None and end is not None:
            self._fetches.append(_Fetch(source, begin, end, seconds))
        return batch

    def _sample_queues(self) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                seconds = scheduled_seconds(str(child.pid))[1]
                first, latest = self._queued.get(child.pid, (seconds, seconds))
                self._queued[child.pid] = first, max(latest, seconds)

    def _cores(self) -> float:
        """Return the cores of this rank: all of its own share, or its part of those that the ranks of the host share."""
        cores = min(len(usable_cores()), cpu_quota() or float("inf"))
        is_shared = len(os.sched_getaffinity(0)) * self._local_ranks > (os.cpu_count() or 1)
        return cores / self._local_ranks if is_shared else cores


def processor_seconds_of_children() -> float:
    """Return the CPU seconds of all child processes so far, such as loader workers."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # psutil reads more files, which takes several steps' time
            stat = Path(f"/proc/{child.pid}/stat").read_text()
            total += sum(map(int, stat.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime
    return total
