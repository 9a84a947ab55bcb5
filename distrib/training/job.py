"""`Job`: what a training script has of the ranks that it is one of."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from distrib.bandwidth.workload import Workload, write_workload
from distrib.errors import DistribError, TrainingError
from distrib.strategy import Strategy, from_environment
from distrib.training import checkpoint, leaving
from distrib.training.batches import ShardedLoader, moved
from distrib.training.meter import Meter
from distrib.training.profiling import STEPS, WARMUP_STEPS, Profiler, Wish, answer, wish_from
from distrib.training.rendezvous import join
from distrib.training.synchronous import follow_parameters, synchronous, unwrapped
from distrib.training.telemetry import StatusPipe
from distrib.training.world import World, find_device, find_world

T = TypeVar("T")
Operation = Literal["mean", "sum", "max", "min"]
_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_job: Job | None = None


def init(*, timeout_seconds: float = 1800.0) -> Job:
    """Joins the other ranks of this job and returns it; alone (`python script.py`) it is a job of one rank.

    The ranks are those that `distrib-launch`, `mpirun` or `torchrun` started. `timeout_seconds` is how long
    one rank waits for the others in the rendezvous and in a collective before it raises.
    A second call returns the same job. Raises TrainingError when the ranks cannot be as planned, this rank has no device,
    or the job was closed already.
    """
    global _job
    if _job is None:
        strategy = from_environment(os.environ)
        if strategy.mode != "sync":
            raise TrainingError(f"mode {strategy.mode} cannot be trained in yet", hint="use --mode sync")
        world = find_world()
        device = find_device(world.local_rank)
        join(world, device, timedelta(seconds=timeout_seconds))
        _job = Job(world, device, strategy)
        if wish := wish_from(os.environ):
            _job._profile_for_launcher(wish)
    elif _job.closed:
        raise TrainingError("the job is closed", hint="a process joins its job once: call distrib.init() only once")
    return _job


class Job:
    """The ranks that train together, seen from one of them. Made by `distrib.init()`.

    As a context manager it is closed at the end of the block; otherwise when the script ends. Either way, a rank that
    fails leaves at once, and one that succeeds waits for the others.
    """

    rank: int
    """This process among all, from 0."""
    world_size: int
    """The number of processes."""
    local_rank: int
    """This process among those of its host, from 0."""
    local_world_size: int
    """The number of processes on this host."""
    device: torch.device
    """Where this rank computes."""

    def __init__(self, world: World, device: torch.device, strategy: Strategy) -> None:
        self.rank, self.world_size = world.rank, world.size
        self.local_rank, self.local_world_size = world.local_rank, world.local_size
        self.device = device
        self.closed = False
        self._strategy = strategy
        self._comm = world.comm
        self._status = StatusPipe.from_environment()
        self._models: list[nn.Module] = []
        self._loaders = 0
        self._profiler: Profiler | None = None
        self._meter = Meter(device, self._status.measured) if self._status.is_read and world.size > 1 else None
        others = self.world_size > 1 or self._comm is not None
        self._watch = leaving.ExitWatch(self._at_exit) if others else None

    def __repr__(self) -> str:
        return f"<distrib.Job rank {self.rank} of {self.world_size} on {self.device}>"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    # Training

    @overload
    def prepare(self, thing: DataLoader[Any], /) -> ShardedLoader: ...
    @overload
    def prepare(self, thing: T, /, *, find_unused_parameters: bool = ...) -> T: ...
    @overload
    def prepare(self, *things: Any, find_unused_parameters: bool = ...) -> tuple[Any, ...]: ...
    def prepare(self, *things: Any, find_unused_parameters: bool = False) -> Any:
        """Makes models, optimizers and loaders those of the job, and returns them in the order given.

        - a module: on `device`, with rank 0's parameters, its gradients averaged over the ranks. What it is
          wrapped in is DistributedDataParallel, or nothing when there is one rank; `unwrap` gives the module itself.
        - an optimizer: the same object, which reports its steps to the launcher.
        - a DataLoader: a `ShardedLoader` of this rank's batches, already on `device`.
        - a learning rate scheduler: the same object.

        Every rank must prepare the same things in the same order. `find_unused_parameters` is for models that do
        not use all their parameters in each step. Raises TrainingError for anything else, and for too few samples.
        """
        self._check_open()
        prepared = [self._prepare(thing, find_unused_parameters) for thing in things]
        for observer in (self._profiler, self._meter):
            if observer:
                for thing in prepared:
                    observer.watch(thing)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare(self, thing: Any, find_unused_parameters: bool) -> Any:
        if isinstance(thing, ShardedLoader) or thing is not unwrapped(thing):
            return thing
        if isinstance(thing, nn.Module):
            # The one place where the mode of training is chosen; asynchronous and local come here.
            model = synchronous(
                thing,
                self.device,
                self.world_size,
                find_unused_parameters=find_unused_parameters,
                strategy=self._strategy,
            )
            if any(parameter.requires_grad for parameter in model.parameters()):
                self._models.append(model)
            return model
        if isinstance(thing, torch.optim.Optimizer):
            follow_parameters(thing)
            thing.register_step_post_hook(self._step_counter())
            return thing
        if isinstance(thing, DataLoader):
            self._loaders += 1
            seed = self._from_main(torch.initial_seed) + self._loaders - 1
            return ShardedLoader(
                thing,
                rank=self.rank,
                ranks=self.world_size,
                device=self.device,
                seed=seed,
                training=self._training,
            )
        if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            return thing
        raise TrainingError(
            f"cannot prepare a {type(thing).__name__}", hint="prepare modules, optimizers, schedulers and DataLoaders"
        )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module as it was before `prepare`, for its own attributes and methods."""
        inner: nn.Module = unwrapped(model)
        return inner

    def scale_lr(self, lr: float) -> float:
        """`lr`, chosen for one rank, for all of them: the batch is `world_size` times as large, and so is the step.

        The linear scaling rule of Goyal et al. 2017 (arXiv:1706.02677), which needs a warm-up; see `warmup`.
        It is meant for SGD.
        """
        return lr * self.world_size

    def warmup(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LinearLR:
        """A scheduler that takes a learning rate of `scale_lr` from that of one rank to its whole in `steps` steps.

        Call its `step()` after each `optimizer.step()`. With one rank it changes nothing.
        """
        return torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1 / self.world_size, end_factor=1.0, total_iters=steps
        )

    def _training(self) -> bool | None:
        return any(model.training for model in self._models) if self._models else None

    def _step_counter(self) -> Callable[..., None]:
        steps = 0

        def count(*_: Any) -> None:
            nonlocal steps
            steps += 1
            self._status.step(steps)

        return count

    # Between the ranks

    def barrier(self) -> None:
        """Waits until every rank is here. The work that a GPU was given may still be going on."""
        self.all_reduce(0.0, "sum")

    @overload
    def all_reduce(self, value: float, op: Operation = ...) -> float: ...
    @overload
    def all_reduce(self, value: torch.Tensor, op: Operation = ...) -> torch.Tensor: ...
    def all_reduce(self, value: float | torch.Tensor, op: Operation = "mean") -> float | torch.Tensor:
        """The mean, sum, max or min of `value` over all ranks, on every rank; every rank must call it.

        A number gives a float (calculated in float64); a tensor a new one of its shape, on its device and without gradient,
        of its type except that the mean of whole numbers is float. Raises TrainingError for another `op`.
        """
        self._check_open()
        if op not in _OPERATIONS:
            raise TrainingError(f"all_reduce has no op {op!r}", hint=f"use {', '.join(_OPERATIONS)}")
        if not isinstance(value, torch.Tensor):
            return float(self.all_reduce(torch.tensor(float(value), dtype=torch.float64), op))
        result = value.detach().clone(memory_format=torch.contiguous_format)
        if self.world_size > 1:
            dist.all_reduce(result, op=_OPERATIONS[op])
        return result / self.world_size if op == "mean" else result

    def _from_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, where alone it is called; what it raises is raised on every rank."""
        if self.world_size == 1:
            return work()
        answer: list[Any] = [None, None]
        problem: Exception | None = None
        if self.is_main:
            try:
                answer = [work(), None]
            except (OSError, DistribError) as error:
                problem, answer = error, [None, str(error)]
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise problem or TrainingError(f"on rank 0: {answer[1]}")
        result: T = answer[0]
        return result

    # What is kept and told

    def save(self, path: str | os.PathLike[str], /, **objects: Any) -> None:
        """Writes a checkpoint: the state of each object that has one, and plain values, under their names.

            job.save("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)

        Rank 0 writes, and `path` never holds half a file; the other ranks go on at once. Models are
        saved without their wrapper, so that any number of ranks can restore them. Raises TrainingError for values
        that could not be opened without running code (see torch.load, weights_only).
        """
        self._check_open()
        if self.is_main:
            checkpoint.write(path, objects)

    def restore(self, path: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
        """Gives each object the state that `save` wrote under its name, and returns the plain values.

            epoch = job.restore("last.pt", model=model, optimizer=optimizer, epoch=0)["epoch"]

        Values passed in are what is returned where the file does not hold them, or where there is no file: then
        nothing is restored. Rank 0 reads the file and hands it to the others, which need not see the
        file system; so every rank must call it. Tensors among the values come on `device`.
        Raises TrainingError when the file is no checkpoint or does not fit.
        """
        self._check_open()
        data = self._from_main(lambda: checkpoint.content(path))
        if data is None:
            return {name: thing for name, thing in objects.items() if not checkpoint.has_state(thing)}
        values: dict[str, Any] = moved(checkpoint.read(data, objects, source=os.fspath(path)), self.device)
        return values

    def log(self, /, **metrics: Any) -> None:
        """Tells the launcher what this rank measured: numbers, strings, or lists and dicts of them.

        Never waits. Raises TrainingError for values of other kinds or beyond 4 KiB.
        """
        self._status.metrics(metrics)

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """`print` on rank 0 only, at once."""
        if self.is_main:
            print(*values, sep=sep, end=end, flush=True)

    # Profiles

    def profile(self, path: str | os.PathLike[str], /, *, warmup_steps: int = WARMUP_STEPS, steps: int = STEPS) -> None:
        """Measures the next steps of the script and writes what they take to `path`, for `distrib-topo plan`; the script goes on.

        Call it before `prepare`. The file holds a `distrib.bandwidth.workload.Workload` as JSON: gradients and when each is ready,
        forward, backward, optimizer and the wait for data, in seconds. Nothing is written when the script ends too early, and
        `close` says so. `distrib-launch --profile FILE` does the same to a script as it is. Raises TrainingError where there
        are other ranks, as the profile is of one alone.
        """
        self._check_open()
        if self._profiler and not self._profiler.finished:
            raise TrainingError("a profile is being measured already", hint="leave out job.profile() or --profile")
        if self._models or self._loaders:
            raise TrainingError("something is prepared already", hint="call job.profile() before job.prepare()")
        wish = Wish(name=Path(sys.argv[0] or "script").stem, warmup_steps=warmup_steps, steps=steps)
        self._start_profile(wish, lambda workload, _: write_workload(path, workload))

    def _profile_for_launcher(self, wish: Wish) -> None:
        """Measure for `distrib-launch --profile`, and end the script when enough is known."""

        def done(workload: Workload, steps: int) -> None:
            answer(workload, steps=steps)
            leaving.succeed_no_later_than(3.0)
            raise SystemExit(0)

        self._start_profile(wish, done)

    def _start_profile(self, wish: Wish, done: Callable[[Workload, int], None]) -> None:
        if self.world_size > 1:
            raise TrainingError("a profile is measured on one rank alone", hint="run the script without other ranks")
        self._profiler = Profiler(self.device, wish, done)
        atexit.register(self._profile_at_exit)

    def _end_profile(self) -> None:
        if self._profiler and not self._profiler.finished:
            try:
                self._profiler.close()
            except TrainingError as error:
                if not wish_from(os.environ):
                    raise
                answer(None, problem=error.what)
            except SystemExit:
                pass  # the script is at its end anyway

    def _profile_at_exit(self) -> None:
        try:
            self._end_profile()
        except TrainingError as error:
            print(f"distrib: {error}", file=sys.stderr, flush=True)

    # Leaving

    def close(self) -> None:
        """Waits for the other ranks and leaves them. A second call does nothing.

        Raises what torch raises when another rank has failed.
        """
        if self.closed:
            return
        self._end_profile()
        try:
            self.barrier()
        except BaseException:
            self._abandon()
            raise
        self.closed = True
        self._end_watch()
        if self.world_size > 1:
            dist.destroy_process_group()
            # Gloo's threads still drop the tensors of the last collectives, for which they take Python's lock; where a
            # model keeps the group alive, nothing waits for them, and one that asks for the lock when Python has begun
            # to end aborts the process (seen in one exit of four with torch 2.13; pytorch pull request 179291).
            time.sleep(0.1)
        if self._comm is not None:
            from mpi4py import MPI

            MPI.Finalize()

    def __enter__(self) -> Job:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if leaving.succeeded(error):
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Leaves without a word to the others: after a failure they may never answer, and MPI's Finalize may hang."""
        if not self.closed:
            self.closed = True
            self._end_watch()
            if self.world_size > 1:
                leaving.no_later_than()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.end()

    def _at_exit(self, failed: bool) -> None:
        if failed:
            self._abandon()
            return
        try:
            self.close()
        except Exception as error:  # the script itself is done; whoever failed says so
            print(f"distrib: rank {self.rank} could not wait for the other ranks: {error}", file=sys.stderr, flush=True)

    def _check_open(self) -> None:
        if self.closed:
            raise TrainingError("the job is closed", hint="use it inside its with block, and before close()")
