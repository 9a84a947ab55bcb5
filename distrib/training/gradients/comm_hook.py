"""The communication hook of DDP that cuts the stream of gradients into pieces and hands them to the engine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from distrib.bandwidth_model.bucketing import DEFAULT_BUCKET_BYTES, candidate_bounds, even_bounds
from distrib.strategy import Strategy
from distrib.training import shutdown
from distrib.training.gradients.bucket_autotuner import Contest, Cut
from distrib.training.gradients.compression import Exact, Origin, PowerSgd, Units, way_of
from distrib.training.gradients.hierarchical_allreduce import Engine, Piece
from distrib.training.gradients.process_groups import Hierarchy

SETTLED_STEPS = 3
"""After so many steps DDP has put its buckets into the order of arrival, and what was slow at first is no more. Before, nothing is
left out of pieces: it would come with others."""
ALIGNMENT_BYTES = 16


class Hook:
    """What a model of DDP holds to have its gradients averaged. A copy of the model has none, and is averaged by DDP itself."""

    def __init__(self) -> None:
        self.units = Units()

    @property
    def is_steady(self) -> bool:
        """Whether steps go as they will go on."""
        return True

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls when a bucket is full, in the order of the buckets."""
        raise NotImplementedError

    def forget(self) -> None:
        """What was put aside of gradients is of no use any more. Every rank, between steps."""

    def __reduce__(self) -> Any:
        return type(None), ()


class Averaging(Hook):
    """Averages the gradients of one model on CPU hosts. Every rank must make it at the same time.

    `hosts` names every rank's host (default: found out).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], strategy: Strategy, hosts: Sequence[Hashable] | None = None
    ) -> None:
        super().__init__()
        self._way = way_of(strategy.gradients)
        self._even_bytes = strategy.bucket_bytes
        size = sum(parameter.nbytes for parameter in parameters)
        self._mixed = len({parameter.dtype for parameter in parameters}) > 1
        if self._mixed:  # every change of type on the way may cost some bytes
            size += ALIGNMENT_BYTES * len(parameters)
        flat = strategy.all_reduce == "flat"
        self._hierarchy = Hierarchy(-(-size // 4096) * 4096, self._way, flat=flat, hosts=hosts)
        self._engine = self._hierarchy.engine
        if self._way.keeps_errors:
            self._engine.way = Exact()
        self._scale = 1 / dist.get_world_size()
        self._steps = 0
        self._ends: Cut = ()
        self._contest: Contest | None = None
        self._judged = 0
        self._seen: list[tuple[torch.dtype, int]] = []
        self._times: list[float] = []
        self._layout: list[tuple[torch.dtype, int]] = []  # of the buckets in the latest step
        self._ready: list[float] = []
        self._filled = self._sent = self._keys = 0
        self._begun = 0.0
        self._rearranged = False
        weakref.finalize(self, self._engine.stop)
        # Not at exit, where groups may have work that never ends.
        weakref.finalize(self, _let_go, self._engine, self._hierarchy.groups, os.getpid()).atexit = False

    @property
    def is_steady(self) -> bool:
        return self._contest is None and self._steps >= self._way.exact_steps

    def forget(self) -> None:
        self._rearranged = True  # the thread that averages has what was put aside

    @property
    def hierarchical(self) -> bool:
        """Whether this rank shares memory with others of its host."""
        return self._hierarchy.local_size > 1

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self._hierarchy.hosts

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent over the wire since the beginning."""
        return self._engine.sent_bytes

    @property
    def ends(self) -> Cut:
        """Where the pieces of a step end, in bytes; empty as long as buckets are cut evenly."""
        return self._ends

    def plan(self) -> None:
        """Cuts the stream anew, once it is known when gradients get ready. Called between steps, by every rank."""
        self._settle()
        if self._contest:
            self._go_on(self._contest)
            return
        even = self._even_bytes or self._way.whole or self._mixed or self._hierarchy.hosts == 1
        if self._steps == SETTLED_STEPS and not self._ends and not even:
            cuts = self._cuts()
            if self._way.keeps_errors:  # which another cut would put to other gradients
                cuts = cuts[:2][-1:]  # the coarser
            cuts = list(dict.fromkeys(cuts))
            self._contest = Contest(cuts) if len(cuts) > 1 else None
            self._use(cuts[0])

    def _settle(self) -> None:
        if self._steps >= SETTLED_STEPS:
            self._engine.way = self._way

    def _cuts(self) -> list[Cut]:
        times = torch.tensor(self._ready, dtype=torch.float64, device="cpu")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        sizes = [dtype.itemsize * elements for dtype, elements in self._layout]
        return candidate_bounds(sizes, times.tolist(), self._hierarchy.measure())

    def _go_on(self, contest: Contest) -> None:
        if not self._ends:  # there are other gradients than before
            self._contest = None
        elif self._steps > self._judged:
            contest.step_ended(time.perf_counter())
            if not contest.over:
                self._use(contest.cut)
                return
            seconds = torch.tensor(contest.seconds(), dtype=torch.float64, device="cpu")
            dist.all_reduce(seconds)
            self._use(contest.cuts[int(seconds.argmin())])
            self._contest = None

    def _use(self, ends: Cut) -> None:
        self._judged = self._steps
        if ends != self._ends:
            self._ends = ends
            self._engine.forget()

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begin_step()
        buffer = bucket.buffer()
        dtype, width = buffer.dtype, buffer.element_size()
        if self._seen and self._seen[-1][0] != dtype:
            self._filled = self._sent = -(-self._filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._seen.append((dtype, buffer.numel()))
        self._times.append(time.perf_counter() - self._begun)
        begin, end = self._filled, self._filled + buffer.nbytes
        for stop in (*self._stops(begin, end), end):
            if stop == self._filled:
                continue
            part = buffer[(self._filled - begin) // width : (stop - begin) // width]
            torch.mul(part, self._scale, out=self._hierarchy.own_input[self._filled : stop].view(dtype))
            self._filled = stop
            if stop != end or not self._ends or stop in self._ends:
                self._send(stop, bucket)
        # A piece that begins in this bucket and ends in a later one is still to come.
        pieces = self._engine.pieces + (self._sent < end)
        future = self._engine.promise(pieces, self._hierarchy.result(begin, end, dtype))
        if bucket.is_last():
            self._end_step()
        return future

    def _stops(self, begin: int, end: int) -> Iterator[int]:
        """Where pieces end between two places of the stream."""
        if self._ends:
            yield from (stop for stop in self._ends if begin < stop <= end)
        elif not self._way.whole:
            yield from (begin + stop for stop in even_bounds(end - begin, self._even_bytes or DEFAULT_BUCKET_BYTES))

    def _send(self, stop: int, bucket: GradBucket) -> None:
        origin = None
        if self._way.whole:
            shapes = tuple(gradient.shape for gradient in bucket.gradients())
            origin = Origin(index=bucket.index(), shapes=shapes, step=self._steps)
        dtype = bucket.buffer().dtype
        self._engine.copied(Piece(key=self._keys, start=self._sent, end=stop, dtype=dtype, origin=origin))
        self._keys += 1
        self._sent = stop

    def _begin_step(self) -> None:
        self._begun = time.perf_counter()
        self._seen, self._times = [], []
        self._settle()
        if self._rearranged:
            self._engine.forget()
            self._rearranged = False
        self._filled = self._sent = self._keys = 0
        if (growth := self.units.growth()) is not None:
            self._engine.rescale(growth)

    def _end_step(self) -> None:
        if self._seen != self._layout:
            self._layout, self._ends = self._seen, ()
            self._rearranged = True
        self._ready = self._times
        self._steps += 1


def _let_go(engine: Engine, groups: Sequence[dist.ProcessGroup], process: int) -> None:
    """Nothing is averaged any more: threads end and sockets are closed, if this is not a process that was forked."""
    if os.getpid() != process:
        return
    engine.stop()
    if groups and dist.is_initialized():
        shutdown.let_go_of_tensors()
        for group in groups:
            dist.destroy_process_group(group)


class GpuAveraging(Hook):
    """Averages the gradients of one model on GPUs in a form for which torch has no hook, on a stream of its own."""

    def __init__(self, device: torch.device, strategy: Strategy) -> None:
        super().__init__()
        self._way = way_of(strategy.gradients)
        # In the order of all else that NCCL carries: communicators at work at once may wait for each other, and each takes memory.
        world = dist.group.WORLD
        assert world is not None
        self._groups = [world] * self._way.stages
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scale = 1 / dist.get_world_size()
        self._errors: dict[tuple[int, int, int], torch.Tensor] = {}
        self._used: set[tuple[int, int, int]] = set()
        """Keys of `_errors` in this step."""
        self._steps = 0
        self.sent_bytes = 0

    def forget(self) -> None:
        self._errors.clear()

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        elements, width = buffer.numel(), buffer.element_size()

        def errors(stage: int, own: int) -> torch.Tensor:
            key = bucket.index(), own, stage
            self._used.add(key)
            if key not in self._errors:
                self._errors[key] = torch.zeros(own, dtype=torch.float32, device=buffer.device)
            return self._errors[key]

        way = self._way if self._steps >= SETTLED_STEPS else Exact()
        self.sent_bytes += way.sent_bytes(elements, width, self._groups[0].size(), None)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            if bucket.index() == 0 and (growth := self.units.growth()) is not None:
                for kept in self._errors.values():
                    kept *= growth
            buffer.mul_(self._scale)
            for waiting in way.sum(buffer, self._groups, errors, None):
                waiting.wait()  # makes the stream wait, not this thread
            buffer.record_stream(self._stream)
            if bucket.is_last():  # DDP makes other buckets after the first step
                self._errors = {key: kept for key, kept in self._errors.items() if key in self._used}
                self._used.clear()
                self._steps += 1
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
            future.set_result(buffer)
        return future


class GpuLowRank(Hook):
    """PowerSGD of the gradients of one model on GPUs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._hook = PowerSgd(rank, dist.group.WORLD)

    @property
    def is_steady(self) -> bool:
        return not self._hook.is_exact

    def forget(self) -> None:
        self._hook.forget()

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0 and (growth := self.units.growth()) is not None:
            self._hook.rescale(growth)
        return self._hook.average(bucket)


def attach(model: DistributedDataParallel, hook: Hook) -> None:
    """Lets `hook` average the gradients of `model`."""
    model.register_comm_hook(hook, lambda state, bucket: state.average(bucket))  # torch cannot read annotations
    if not isinstance(hook, Averaging):
        return
    own, averaging = weakref.ref(model), hook

    def before_forward(module: nn.Module, _: object) -> None:
        if module is own() and module.training and torch.is_grad_enabled():  # not a copy, which has taken this along
            averaging.plan()

    model.register_forward_pre_hook(before_forward)


def hook_of(model: nn.Module) -> Hook | None:
    """What averages the gradients of `model`, where that is not DDP itself."""
    held = model._comm_hooks if isinstance(model, DistributedDataParallel) else []
    return next((state for _, state in held if isinstance(state, Hook)), None)
