"""DDP communication hooks: hierarchical all-reduce on CPU hosts, compression on GPUs, and sparse gradients over Gloo."""

from __future__ import annotations

import os
import statistics
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from distrib.bandwidth_model.bucketing import BUCKETS, candidate_bounds, even_bounds
from distrib.strategy import Gradients, Strategy
from distrib.training import compat
from distrib.training.gradients.compression import BucketInfo, Compressor, NoCompression, create_compressor
from distrib.training.gradients.hierarchical_allreduce import AllReduceThread, CommBucket, HierarchicalAllReduce

REBUILD_STEPS = 3
"""Steps after which DDP has rebuilt its buckets in the order of arrival. Error feedback starts then: before, buckets change contents."""
ALIGNMENT_BYTES = 16
"""Alignment of gradients whose type differs from that of the bucket before."""

BucketBounds = tuple[int, ...]
"""End of each bucket, in bytes from the start of a step's gradients."""


class _GradientScale:
    """Scale of a GradScaler, by which error feedback must be multiplied."""

    def __init__(self) -> None:
        self._scaler: torch.amp.GradScaler | None = None
        self._scale = torch.ones((), device="cpu")

    def track(self, scaler: torch.amp.GradScaler) -> None:
        """Record the scaler of this step's gradients."""
        if scaler is self._scaler or not scaler.is_enabled():
            return
        scale = scaler._get_scale_async()  # without waiting for the GPU
        if scale is not None:
            self._scaler, self._scale = scaler, scale.clone()

    def take_factor(self) -> torch.Tensor | None:
        """Return the ratio of the present scale to that of the last call; None if it has not changed."""
        scale = self._scaler._get_scale_async() if self._scaler else None
        if scale is None or (scale.device.type == "cpu" and bool(scale == self._scale)):
            return None
        factor = scale / self._scale
        self._scale = scale.clone()
        return factor


class GradientHook:
    """Base class of the DDP communication hooks. A copy of the model has no hook, so DDP averages its gradients itself."""

    def __init__(self) -> None:
        self.scale = _GradientScale()

    @property
    def is_steady(self) -> bool:
        """False while step times are not typical, as during bucket trials or exact warm-up steps."""
        return True

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a full bucket. DDP calls it in the order of the buckets.

        Args:
            bucket: DDP's bucket.

        Returns:
            A future of the averaged buffer.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Drop error feedback between steps. Collective."""

    def __reduce__(self) -> Any:
        return type(None), ()


def compare_bounds(
    candidates: Sequence[BucketBounds], *, turns: int = 2, turn_steps: int = 3
) -> Iterator[BucketBounds]:
    """Compare bucket boundaries in real steps, because a network model does not know the load of the CPUs.

    On slow networks it gains 4 to 6 % (2 hosts of 4 ranks at 200 Mb/s, benchmarks/synchronous.py).

    Args:
        candidates: Bounds to compare, the same on every rank.
        turns: Turns of each candidate.
        turn_steps: Steps of a turn. The first one is not measured: the candidate before affects it.

    Yields:
        The bounds of each step, at last those with the least median step time. Collective then.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    for bounds, measured in [*zip(candidates, seconds, strict=True)] * turns:
        yield bounds
        for _ in range(turn_steps - 1):
            begun = time.perf_counter()
            yield bounds
            measured.append(time.perf_counter() - begun)
    medians = torch.tensor([*map(statistics.median, seconds)], dtype=torch.float64, device="cpu")
    dist.all_reduce(medians)
    yield candidates[int(medians.argmin())]


class HierarchicalHook(GradientHook):
    """Hook for CPU hosts: averages gradients with a hierarchical all-reduce."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], settings: Strategy, hosts: Sequence[Hashable] | None = None
    ) -> None:
        """Connect the ranks. Collective.

        Args:
            parameters: The trainable parameters of the model.
            settings: The strategy chosen at launch.
            hosts: The host of each rank (default: detected).
        """
        super().__init__()
        self._compressor = create_compressor(settings.gradients)
        self._even_bytes = settings.bucket_bytes
        size = sum(parameter.nbytes for parameter in parameters)
        self._is_mixed = len({parameter.dtype for parameter in parameters}) > 1
        if self._is_mixed:  # padding at each change of type
            size += ALIGNMENT_BYTES * len(parameters)
        flat = settings.all_reduce == "flat"
        self.reduction = HierarchicalAllReduce(-(-size // 4096) * 4096, self._compressor, flat=flat, hosts=hosts)
        self._thread = self.reduction.thread
        if self._compressor.has_error_feedback:
            self._thread.compressor = NoCompression(Gradients())
        self._scale_factor = 1 / dist.get_world_size()
        self._steps = 0
        self.bounds: BucketBounds = ()
        self._trial: Iterator[BucketBounds] | None = None
        self._last_trial_step = 0
        self._sizes: list[tuple[torch.dtype, int]] = []  # type and elements of DDP's buckets in this step
        self._times: list[float] = []
        self._last_sizes: list[tuple[torch.dtype, int]] = []  # in the last complete step
        self._last_times: list[float] = []
        self._filled = self._sent = self._count = 0
        self._begun = 0.0
        self._must_reset = False
        weakref.finalize(self, self._thread.stop)
        # Not at exit: a group may have a collective that never ends.
        weakref.finalize(self, _release, self._thread, self.reduction.process_groups, os.getpid()).atexit = False

    @property
    def is_steady(self) -> bool:
        return self._trial is None and self._steps >= self._compressor.warmup_steps

    def reset(self) -> None:
        self._must_reset = True  # the thread uses the error feedback

    def plan(self) -> None:
        """Choose bucket boundaries between steps, once the ready times of gradients are known. Collective."""
        self._begin_compression()
        if self._trial:
            self._continue_trial(self._trial)
            return
        if self._steps != REBUILD_STEPS or self.bounds:
            return
        if self._even_bytes or self._compressor.needs_whole_buckets or self._is_mixed or self.reduction.hosts == 1:
            return
        candidates = self._candidates()
        if self._compressor.has_error_feedback:  # it is stored by bucket, so no trial of other boundaries
            candidates = candidates[:2][-1:]  # few buckets
        candidates = list(dict.fromkeys(candidates))
        self._trial = compare_bounds(candidates) if len(candidates) > 1 else None
        self._use(next(self._trial) if self._trial else candidates[0])

    def _begin_compression(self) -> None:
        if self._steps >= REBUILD_STEPS:
            self._thread.compressor = self._compressor

    def _candidates(self) -> list[BucketBounds]:
        times = torch.tensor(self._last_times, dtype=torch.float64, device="cpu")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        sizes = [dtype.itemsize * elements for dtype, elements in self._last_sizes]
        return candidate_bounds(sizes, times.tolist(), self.reduction.measure())

    def _continue_trial(self, trial: Iterator[BucketBounds]) -> None:
        if not self.bounds:  # the sequence of gradients has changed
            self._trial = None
        elif self._steps > self._last_trial_step:
            if bounds := next(trial, None):
                self._use(bounds)
            else:
                self._trial = None

    def _use(self, bounds: BucketBounds) -> None:
        self._last_trial_step = self._steps
        if bounds != self.bounds:
            self.bounds = bounds
            self._thread.reset()

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Copy a bucket into shared memory and start the all-reduce of its parts.

        Args:
            bucket: DDP's bucket.
        """
        if bucket.index() == 0:
            self._begin_step()
            _call_after_backward(self._thread.check)
        buffer = bucket.buffer()
        dtype, width = buffer.dtype, buffer.element_size()
        if self._sizes and self._sizes[-1][0] != dtype:
            self._filled = self._sent = -(-self._filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._sizes.append((dtype, buffer.numel()))
        self._times.append(time.perf_counter() - self._begun)
        begin, end = self._filled, self._filled + buffer.nbytes
        for stop in (*self._stops(begin, end), end):
            if stop == self._filled:
                continue
            part = buffer[(self._filled - begin) // width : (stop - begin) // width]
            torch.mul(part, self._scale_factor, out=self.reduction.own_input[self._filled : stop].view(dtype))
            self._filled = stop
            if stop != end or not self.bounds or stop in self.bounds:
                self._send(stop, bucket)
        # One more if a bucket of this class begins in this DDP bucket and ends in a later one.
        needed = self._thread.added + (self._sent < end)
        future = self._thread.result_after(needed, self.reduction.result(begin, end, dtype))
        if bucket.is_last():
            self._end_step()
        return future

    def _stops(self, begin: int, end: int) -> Iterator[int]:
        """Yield the bucket ends between two byte offsets of the gradients."""
        if self.bounds:
            yield from (stop for stop in self.bounds if begin < stop <= end)
        elif not self._compressor.needs_whole_buckets:
            yield from (begin + stop for stop in even_bounds(end - begin, self._even_bytes or BUCKETS.default_bytes))

    def _send(self, stop: int, bucket: GradBucket) -> None:
        info = None
        if self._compressor.needs_whole_buckets:
            shapes = tuple(gradient.shape for gradient in bucket.gradients())
            info = BucketInfo(index=bucket.index(), shapes=shapes, step=self._steps)
        dtype = bucket.buffer().dtype
        self._thread.add(CommBucket(number=self._count, start=self._sent, end=stop, dtype=dtype, info=info))
        self._count += 1
        self._sent = stop

    def _begin_step(self) -> None:
        self._begun = time.perf_counter()
        self._sizes, self._times = [], []
        self._begin_compression()
        if self._must_reset:
            self._thread.reset()
            self._must_reset = False
        self._filled = self._sent = self._count = 0
        if (factor := self.scale.take_factor()) is not None:
            self._thread.rescale(factor)

    def _end_step(self) -> None:
        if self._sizes != self._last_sizes:
            self._last_sizes, self.bounds = self._sizes, ()
            self._must_reset = True
        self._last_times = self._times
        self._steps += 1


def _call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the present backward pass, after DDP has waited for all buckets."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))  # DDP queues its own callback in between


def _release(thread: AllReduceThread, groups: Sequence[dist.ProcessGroup], process: int) -> None:
    """Stop the thread and close its groups, except in a forked process."""
    if os.getpid() != process:
        return
    thread.stop()
    if groups and dist.is_initialized():
        compat.wait_for_gloo_callbacks()
        for group in groups:
            dist.destroy_process_group(group)


class GpuCompressionHook(GradientHook):
    """Hook for GPUs: averages compressed gradients in a separate CUDA stream."""

    def __init__(self, device: torch.device, compressor: Compressor) -> None:
        """Create the hook of one model.

        Args:
            device: The GPU of this rank.
            compressor: A compressor that does not need whole buckets.
        """
        super().__init__()
        self._compressor = compressor
        # NCCL's default group only: concurrent communicators may deadlock, and each takes GPU memory.
        world = dist.group.WORLD
        assert world is not None
        self._groups = [world] * compressor.stages
        self._exact = NoCompression(Gradients())
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scale_factor = 1 / dist.get_world_size()
        self._errors: dict[tuple[int, int, int], torch.Tensor] = {}
        self._used: set[tuple[int, int, int]] = set()
        """Keys of `_errors` that this step used."""
        self._steps = 0

    def reset(self) -> None:
        self._errors.clear()

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum a compressed bucket in the hook's CUDA stream.

        Args:
            bucket: DDP's bucket.
        """
        buffer = bucket.buffer()

        def errors(stage: int, own: int) -> torch.Tensor:
            key = bucket.index(), own, stage
            self._used.add(key)
            if key not in self._errors:
                self._errors[key] = torch.zeros(own, dtype=torch.float32, device=buffer.device)
            return self._errors[key]

        compressor = self._compressor if self._steps >= REBUILD_STEPS else self._exact
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            if bucket.index() == 0 and (factor := self.scale.take_factor()) is not None:
                for recorded in self._errors.values():
                    recorded *= factor
            buffer.mul_(self._scale_factor)
            for pending in compressor.all_reduce(buffer, self._groups, errors, None):
                pending.wait()  # the stream waits, not this thread
            buffer.record_stream(self._stream)
            if bucket.is_last():  # DDP rebuilds its buckets after the first step
                self._errors = {key: recorded for key, recorded in self._errors.items() if key in self._used}
                self._used.clear()
                self._steps += 1
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
            future.set_result(buffer)
        return future


class GpuWholeBucketHook(GradientHook):
    """Hook for GPUs with a compressor that needs whole buckets, such as PowerSGD."""

    def __init__(self, compressor: Compressor) -> None:
        """Create the hook of one model.

        Args:
            compressor: A compressor with `average_bucket`.
        """
        super().__init__()
        self._compressor = compressor
        self._steps = 0

    @property
    def is_steady(self) -> bool:
        return self._steps >= self._compressor.warmup_steps

    def reset(self) -> None:
        self._compressor.reset()

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a whole bucket with the compressor.

        Args:
            bucket: DDP's bucket.
        """
        if bucket.index() == 0 and (factor := self.scale.take_factor()) is not None:
            self._compressor.rescale(factor)
        self._steps += bucket.is_last()
        return self._compressor.average_bucket(bucket)


def average_sparse(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average dense and sparse gradients on CPU hosts, as a DDP communication hook.

    Gloo's own sparse all-reduce corrupts the heap: plain DDP crashed in 3 of 6 jobs within 6,400 steps (torch 2.13), this hook in none.

    Args:
        bucket: DDP's bucket. A sparse gradient has a bucket of its own.

    Returns:
        A future of the mean over all ranks.
    """
    gradient = bucket.buffer()
    if not gradient.is_sparse:
        work = dist.all_reduce(gradient.div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
    own = gradient.coalesce()
    counts = _all_gather(torch.tensor([own.values().shape[0]], device="cpu"))
    max_count = int(max(counts))

    def concatenated(rows: torch.Tensor) -> torch.Tensor:
        padded = rows.new_zeros(max_count, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        return torch.cat([part[: int(count)] for part, count in zip(_all_gather(padded), counts, strict=True)])

    indices = concatenated(own.indices().t().contiguous()).t()
    values = concatenated(own.values()) / len(counts)
    mean = torch.sparse_coo_tensor(indices, values, own.shape, device=values.device, check_invariants=False)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(mean.coalesce())
    return done


def _all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def attach_hook(model: DistributedDataParallel, hook: GradientHook) -> None:
    """Register a hook that averages the gradients of a model.

    Args:
        model: A model in DistributedDataParallel.
        hook: The hook, used for this model only.
    """
    model.register_comm_hook(hook, lambda state, bucket: state.average(bucket))  # torch cannot read annotations
    if not isinstance(hook, HierarchicalHook):
        return
    own, planning = weakref.ref(model), hook

    def before_forward(module: nn.Module, _: object) -> None:
        if module is own() and module.training and torch.is_grad_enabled():  # not a copy, which has this hook too
            planning.plan()

    model.register_forward_pre_hook(before_forward)


def find_hook(model: nn.Module) -> GradientHook | None:
    """Find the hook of a model.

    Args:
        model: A prepared model.

    Returns:
        The hook, None if DDP averages the gradients itself.
    """
    recorded = model._comm_hooks if isinstance(model, DistributedDataParallel) else []
    return next((state for _, state in recorded if isinstance(state, GradientHook)), None)
