"""`Job`: what a training script has of the ranks that it is one of."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from numbers import Integral
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from distrib.environment import DISTRIB_SERVERS, WORLD_SIZE
from distrib.errors import TrainingError
from distrib.strategy import strategy_from_environment
from distrib.training import compat, shutdown
from distrib.training import sync_batchnorm as normalization
from distrib.training.checkpoint import replicas, state_sync
from distrib.training.checkpoint.manager import Checkpoints
from distrib.training.checks.cross_rank import check_identical
from distrib.training.checks.divergence import CHECK_EVERY_STEPS, DivergenceCheck, check_initial_values
from distrib.training.checks.usage import UsageChecks
from distrib.training.collectives import JobCollectives, Operation
from distrib.training.data.loader_registry import Loaders
from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.gradient_accumulation import Samples
from distrib.training.model_parameters import (
    exclude_model,
    has_misplaced_state,
    has_sharded_parameters,
    move_optimizer_state,
    unwrap_model,
)
from distrib.training.nan_guard import OnNan
from distrib.training.optimizer_step import Steps, follow_scaler
from distrib.training.profile_file import Profiles
from distrib.training.profiler import STEPS, WARMUP_STEPS
from distrib.training.rendezvous import join, meet_at_end
from distrib.training.strategies.base import ElasticStrategy, TrainingStrategy, create_strategy
from distrib.training.telemetry.status_pipe import StatusPipe
from distrib.training.telemetry.step_timer import Meter
from distrib.training.world import find_device, find_world, planned_world
from distrib.utils.mpi_env import OMPI_SIZE

T = TypeVar("T")

GPU_SECONDS = 60.0
"""So long the GPU of a rank that has gone further than others is waited for at the end: it may have much to compute still."""


class _Count(NamedTuple):
    """Steps: how often they were asked for, and how many there were."""

    calls: int = 0
    taken: int = 0


class _Options(NamedTuple):
    """What `prepare` was told besides the things."""

    find_unused_parameters: bool
    methods: Sequence[str]
    sync_batchnorm: bool
    on_nan: OnNan


_job: Job | None = None


def init(*, timeout_seconds: float = 1800.0, divergence_check_steps: int = CHECK_EVERY_STEPS) -> Job:
    """Joins the other ranks of this job and returns it; alone (`python script.py`) it is a job of one rank.

    The ranks are those that `distrib-launch`, `mpirun` or `torchrun` started. `timeout_seconds` is how long
    one rank waits for the others in the rendezvous and in a collective before it raises.
    A second call returns the same job. Raises TrainingError when the ranks cannot be as planned, this rank has no device,
    or the job was closed already.
    """
    global _job
    if _job is None:
        strategy = strategy_from_environment(os.environ)
        # Asynchronous ranks may come and go, which neither MPI nor torch's process groups can bear: the servers join them.
        elastic = strategy.mode == "async"
        if elastic and not os.environ.get(DISTRIB_SERVERS):
            raise TrainingError(
                "mode async, but there is no parameter server", hint="distrib-launch --mode async starts them"
            )
        _refuse_readers()
        world = planned_world() if elastic else find_world(threads=strategy.backend == "horovod")
        device = find_device(world.local_rank)
        if not elastic:
            world = join(world, device, timedelta(seconds=timeout_seconds))
        backend = create_strategy(strategy, world, device)
        if world.size > 1:
            compat.make_safe()
        _job = Job(backend, divergence_check_steps)
    elif _job.closed:
        raise TrainingError("the job is closed", hint="a process joins its job once: call distrib.init() only once")
    return _job


def _refuse_readers() -> None:
    several = any(os.environ.get(size, "1") != "1" for size in (WORLD_SIZE, OMPI_SIZE))
    reads = getattr(multiprocessing.current_process(), "_inheriting", False)  # by which multiprocessing knows it itself
    if several and reads:
        raise TrainingError(
            "a process of a loader, or of multiprocessing, reads this script anew, and would join the job a second time",
            hint='put what the script does under `if __name__ == "__main__":`',
        )


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
    restarts: int
    """How often the launcher has started the whole job again (`--max-restarts`)."""

    def __init__(self, backend: TrainingStrategy, divergence_check_steps: int = CHECK_EVERY_STEPS) -> None:
        world, device = backend.world, backend.device
        self.rank, self.world_size = world.rank, world.size
        self.local_rank, self.local_world_size = world.local_rank, world.local_size
        self.device = device
        self.closed = False
        self._waits = False
        """Whether it waits for the others at its end, or has done so in vain."""
        self._backend = backend
        self._elastic = backend if isinstance(backend, ElasticStrategy) else None
        self._ends_mpi = world.ends_mpi
        run = replicas.Run.from_environment(os.environ)
        self.restarts = run.restarts
        self._exchange = JobCollectives(world, self._elastic)
        self._checkpoints = Checkpoints(run, backend, self._exchange, elastic=bool(self._elastic))
        self._status = StatusPipe.from_environment()
        self._models: list[nn.Module] = []
        self._steps: list[Steps] = []
        self._stepped: bool | Callable[[], bool] = False
        self._released = False
        self._before = _Count()
        """Of optimizers that were released."""
        self._samples = Samples(own=1, all=world.size)
        normalization.follow(self._samples)
        self._batches = backend.settings.accumulate
        self._usage = UsageChecks(backend, self._steps, lambda: self._models, lambda: self._batches > 1)
        self._divergence: DivergenceCheck | None = None
        if divergence_check_steps and not self._elastic and world.size > 1:
            self._divergence = DivergenceCheck(world, self._replicated, divergence_check_steps)
        self._loaders = Loaders(
            backend,
            self._exchange,
            self._usage,
            elastic=self._elastic,
            models=lambda: self._models,
            steps=self._calls,
            samples=self._next_batch,
            ended=self._settle,
        )
        self._meter: Meter | None = None
        if self._status.is_read and world.size > 1:
            self._meter = Meter(
                device, self._status.measured, lambda: backend.waited_seconds, lambda: backend.is_steady,
                by_tcp=bool(self._elastic),
            )  # fmt: skip
        others = self.world_size > 1 or world.comm is not None
        self._watch = shutdown.ExitWatch(self._at_exit) if others else None
        self._profiles = Profiles(device, os.environ, alone=world.size == 1)

    def __repr__(self) -> str:
        return f"<distrib.Job rank {self.rank} of {self.world_size} on {self.device}>"

    @property
    def is_main(self) -> bool:
        """Whether this is the main rank, which prints and saves: rank 0.

        In mode async, when rank 0 is lost, it is the lowest of the other ranks that are there, and stays it; so ask each time.
        A rank that is started again is never main. One that is main and is cut off waits here until it knows whether it still is.
        """
        return self._elastic.is_main if self._elastic else self.rank == 0

    @property
    def stepped(self) -> bool:
        """Whether the latest `optimizer.step()` changed the parameters: what an average of them or a schedule of steps asks.

        It is False after batches that are only accumulated, and where a step was left out as gradients were nan or infinite.
        """
        if callable(self._stepped):
            self._stepped = self._stepped()
        return self._stepped

    # Training

    @overload
    def prepare(self, thing: DataLoader[Any], /) -> ShardedLoader: ...
    @overload
    def prepare(
        self,
        thing: T,
        /,
        *,
        find_unused_parameters: bool = ...,
        methods: Sequence[str] = ...,
        sync_batchnorm: bool = ...,
        accumulate: int | None = ...,
        on_nan: OnNan = ...,
    ) -> T: ...
    @overload
    def prepare(
        self,
        *things: Any,
        find_unused_parameters: bool = ...,
        methods: Sequence[str] = ...,
        sync_batchnorm: bool = ...,
        accumulate: int | None = ...,
        on_nan: OnNan = ...,
    ) -> tuple[Any, ...]: ...
    def prepare(
        self,
        *things: Any,
        find_unused_parameters: bool = False,
        methods: Sequence[str] = (),
        sync_batchnorm: bool = False,
        accumulate: int | None = None,
        on_nan: OnNan = "raise",
    ) -> Any:
        """Makes models, optimizers and loaders those of the job, and returns them in the order given.

        - a module: on `device`, with rank 0's parameters. In mode sync its gradients are averaged over the ranks, and it is
          wrapped in DistributedDataParallel where there are others, which has its attributes and the names of its
          `state_dict`; `unwrap` gives the module itself. Which parameters
          learn is settled here: to freeze or unfreeze some later, prepare the module itself again. Layers of torch's
          SyncBatchNorm work on CPUs, too.
        - an optimizer: the same object, the steps of which are now the job's, with rank 0's state where it has one.
        - a DataLoader: a `ShardedLoader` of this rank's batches, already on `device`.
        - a GradScaler, a learning rate scheduler: the same object, with rank 0's state.

        Every rank must prepare the same things in the same order. `find_unused_parameters` is for models that do
        not use all their parameters in each step. `methods` names methods of a model that a script trains by, such as `model.loss(batch)`:
        they run as forward passes, so that their gradients are averaged. `sync_batchnorm` makes batch normalization that of all ranks' samples.
        `accumulate` is what the method of that name sets. `on_nan` says what becomes of a step whose gradients are nan or
        infinite: `raise` a TrainingError that names rank and parameter, `skip` it (on all ranks in mode sync), or `ignore` that.
        Raises TrainingError for anything else, for models that differ between ranks, and for too few samples.
        """
        self._check_open()
        if self._released and any(isinstance(thing, nn.Module) for thing in things):
            gc.collect()  # what was released before, and is in cycles
        for thing in things:
            if isinstance(thing, nn.Module) and any(map(is_lazy, thing.parameters())):
                raise TrainingError(
                    f"{type(thing).__name__} has lazy layers, whose parameters are not there yet",
                    hint="let it compute one batch before job.prepare",
                )
            if isinstance(thing, nn.Module) and has_sharded_parameters(thing):
                raise TrainingError(
                    f"the parameters of {type(thing).__name__} are shared out already, as by FSDP",
                    hint="FSDP sees to its gradients and its optimizer: prepare the DataLoader alone",
                )
        if self.world_size > 1 and not self._elastic:  # there the servers compare
            check_identical(
                things,
                self._models,
                on_nan=on_nan,
                accumulate=accumulate,
                find_unused_parameters=find_unused_parameters,
                methods=[*methods],
                sync_batchnorm=sync_batchnorm,
            )
        if sync_batchnorm and self._backend.settings.balance:
            raise TrainingError(
                "sync_batchnorm makes ranks wait for each other inside a step: --balance could not tell who is slow",
                hint="leave out one of them",
            )
        if sync_batchnorm and self._elastic:
            raise TrainingError(
                "sync_batchnorm makes ranks wait for each other inside a step, which they do not in mode async",
                hint="leave it out, or use --mode sync",
            )
        options = _Options(find_unused_parameters, methods, sync_batchnorm, on_nan)
        known = {id(steps.optimizer) for steps in self._steps}
        prepared = [self._prepare(thing, options) for thing in things]
        if self.world_size > 1:
            hand_out = state_sync.hand_out_settings if self._elastic else state_sync.hand_out
            hand_out([thing for thing in things if id(thing) not in known], self._exchange)
        for thing in prepared:
            self._profiles.watch(thing)
            if self._meter:
                self._meter.watch(thing)
        if accumulate is not None:
            self.accumulate(accumulate)
        for steps in self._steps:
            steps.pair(self._models)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def release(self, *things: Any) -> None:
        """Lets go of models and optimizers that are not trained any more, so that their memory is free once the script forgets them.

            job.release(model, optimizer)

        Without it a job keeps all that was prepared, as ranks do not forget at the same time: for scripts that train one model after the
        other, such as in cross validation or a search. Every rank must call it; a released optimizer takes no more steps, but it and a
        model can be prepared again. Loaders, schedules and GradScalers are never kept. Raises TrainingError for a model whose optimizer
        is not released, and between the batches of one step.
        """
        self._check_open()
        for thing in things:
            if isinstance(thing, torch.optim.Optimizer):
                for steps in [steps for steps in self._steps if steps.optimizer is thing]:
                    why = f"{type(thing).__name__} takes a step after job.release"
                    steps.retire(why, hint="prepare it, or another one, again")
                    steps.end()
                    self._steps.remove(steps)
                    self._before = _Count(self._before.calls + steps.calls, self._before.taken + steps.taken)
        for thing in things:
            if isinstance(thing, nn.Module):
                if any(steps.trains(thing.parameters()) and not steps.is_retired for steps in self._steps):
                    raise TrainingError(
                        f"{type(unwrap_model(thing)).__name__} is to be released, and an optimizer that is prepared trains it",
                        hint="job.release(model, optimizer)",
                    )
                self._models = exclude_model(self._models, thing)
                self._backend.release_model(thing)
        for thing in things:
            if self._meter:
                self._meter.release(thing)
        for steps in self._steps:
            steps.pair(self._models)
        self._released = True

    def _prepare(self, thing: Any, options: _Options) -> Any:
        if isinstance(thing, ShardedLoader):
            return thing
        if isinstance(thing, DistributedDataParallel):
            if all(model is not thing for model in self._models):
                self._backend.adopt_ddp_model(thing)
                self._add(thing)
            return thing
        if isinstance(thing, nn.Module):
            if options.sync_batchnorm:
                thing = normalization.with_synchronized_batches(thing, self.device)
            elif self.device.type == "cpu":
                normalization.bear_cpus(thing)
            model = self._backend.prepare_model(
                thing, find_unused_parameters=options.find_unused_parameters, methods=options.methods
            )
            for steps in self._steps:  # of optimizers that were prepared before their model moved
                if not steps.is_retired and has_misplaced_state(steps.optimizer):
                    move_optimizer_state(steps.optimizer)
            if any(parameter.requires_grad for parameter in model.parameters()):
                self._add(model)
            return model
        if isinstance(thing, torch.optim.Optimizer):
            if any(steps.optimizer is thing and not steps.is_retired for steps in self._steps):
                return thing  # as where its model is prepared again
            if self.world_size > 1 and not hasattr(thing, "_optimizer_step_pre_hooks"):
                raise TrainingError(
                    f"{type(thing).__name__} was made without torch's Optimizer.__init__, and cannot be watched",
                    hint="call super().__init__(params, defaults) in it, or prepare the optimizer that it works by",
                )
            for steps in self._steps:
                steps.give_way(thing)
            self._backend.prepare_optimizer(thing)
            steps = Steps(
                thing, self._backend, self._samples, on_nan=options.on_nan, told=self._told, begins=self._begins
            )
            self._steps.append(steps)
            steps.accumulate(self._batches)
            return thing
        if isinstance(thing, DataLoader):
            return self._loaders.prepare(thing)
        if isinstance(thing, torch.amp.GradScaler):
            follow_scaler(thing, self._steps)
            return thing
        if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            return thing
        raise TrainingError(
            f"cannot prepare a {type(thing).__name__}",
            hint="prepare modules, optimizers, schedulers, GradScalers and DataLoaders; leave other loaders out, and let them share "
            "samples out by job.rank (webdataset's split_by_node does)",
        )

    def _add(self, model: nn.Module) -> None:
        """Train `model`, in place of what it was before it was prepared again."""
        self._models = [*exclude_model(self._models, model), model]
        self._status.prepared()

    def _replicated(self) -> Sequence[nn.Module]:
        """Return the models whose parameters are identical on all ranks after every step."""
        return self._models if self._backend.averages_gradients else ()

    def _begins(self) -> None:
        """An optimizer takes its first step, on every rank: what they are sure to do together, before anything has learnt."""
        if not self._loaders.begun:
            if self.world_size > 1 and not self._elastic:
                check_initial_values(self._models)
            self._loaders.begin()

    def _told(self, step: int, stepped: bool | Callable[[], bool]) -> None:
        self._stepped = stepped
        if step:
            self._loaders.learn()
            self._status.step(step)
        if self._divergence:
            self._divergence.after_step(self._before.taken + sum(steps.taken for steps in self._steps))
        self._loaders.step()

    def _calls(self) -> int | None:
        """How often a step was asked for; None where nobody can know of steps to come."""
        if not self._steps and not self._released:
            return None
        return self._before.calls + sum(steps.calls for steps in self._steps)

    def _next_batch(self, own: int, every: int) -> tuple[int, int]:
        before = self._samples.own, self._samples.all
        self._samples.own, self._samples.all = own, every
        for steps in self._steps:
            steps.mean.follow()
        return before

    def accumulate(self, batches: int) -> None:
        """Makes one step of every `batches` batches: their gradients are averaged, and then once over the ranks.

        The script's loop stays what it is: `optimizer.step()` does nothing after the first `batches` - 1 of them, and gradients
        are not exchanged. Groups of batches go on from one epoch to the next. `--accumulate N` at launch goes before
        what the script says. Raises TrainingError between the batches of one step.
        """
        self._check_open()
        if not isinstance(batches, Integral) or batches < 1:
            raise TrainingError(f"accumulate({batches!r})", hint="give the number of batches, 1 or more")
        if self._backend.settings.accumulate > 1:
            return
        self._batches = batches
        for steps in self._steps:
            steps.accumulate(batches)

    def settle(self) -> None:
        """Makes the models the same on all ranks, now: every rank must call it.

        They are so in mode sync. In mode local they become so by themselves after `--inner-steps` steps, at the end of each epoch
        of a prepared loader on which a model trains (and that no thread of the script's reads), and when the job is closed; in mode async, where nobody else waits for
        anybody, when a prepared loader is read for an evaluation.
        """
        self._check_open()
        self._settle()
        if self._elastic:
            self.barrier()  # the others' steps count, too
            self._settle()

    def _settle(self) -> None:
        for steps in self._steps:
            steps.settle()
        self._backend.synchronize()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module as it was before `prepare`, for its own attributes and methods."""
        inner: nn.Module = unwrap_model(model)
        return inner

    def scale_lr(self, lr: float) -> float:
        """`lr`, chosen for one rank, for all of them: the batch is `world_size` times as large, and so is the step.

        The linear scaling rule of Goyal et al. 2017 (arXiv:1706.02677), which needs a warm-up; see `warmup`.
        It is meant for SGD. In asynchronous training it is the same; with `--no-stale-rate` each host's ranks make a step of their
        own, or each rank where what it pushes crosses no wire (on one host only, or beside all servers), and `lr` grows by as many. In mode local it stays
        that of one rank where an outer momentum takes the ranks on (DiLoCo); without (`--outer average`) it grows, which a few
        inner steps on a rank's own batches bear, and hundreds may not.
        """
        return lr * self._backend.ranks_per_step

    def warmup(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LinearLR:
        """A scheduler that takes a learning rate of `scale_lr` from that of one rank to its whole in `steps` steps.

        Call its `step()` after each `optimizer.step()` that was one (`stepped`). With one rank it changes nothing.
        """
        start = 1 / self._backend.ranks_per_step if steps else 1.0  # torch's would stay where it begins
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=start, end_factor=1.0, total_iters=steps)

    # Between the ranks

    def barrier(self) -> None:
        """Waits until every rank is here. The work that a GPU was given may still be going on."""
        self._check_open()
        self._exchange.all_reduce(0.0, "sum")

    @overload
    def all_reduce(self, value: float, op: Operation = ...) -> float: ...
    @overload
    def all_reduce(self, value: torch.Tensor, op: Operation = ...) -> torch.Tensor: ...
    def all_reduce(self, value: float | torch.Tensor, op: Operation = "mean") -> float | torch.Tensor:
        """The mean, sum, max or min of `value` over all ranks, on every rank; every rank must call it.

        A number gives a float (calculated in float64); a tensor a new one of its shape, on its device and without gradient,
        of its type except that the mean of whole numbers is float, and that truths are counted. Raises TrainingError for another `op`.
        """
        self._check_open()
        return self._exchange.all_reduce(value, op)

    # What is kept and told

    def save(self, path: str | os.PathLike[str], /, **objects: Any) -> None:
        """Writes a checkpoint: the state of each object that has one, and plain values, under their names.

            job.save("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)

        The main rank writes, and `path` never holds half a file; the other ranks go on at once, but that in a job which may be
        started again (`--max-restarts`) one of each host writes a copy where the host has files of its own. Models are
        saved without their wrapper, so that any number of ranks can restore them. Raises TrainingError for values
        that could not be opened without running code (see torch.load, weights_only), and where the last step's gradients were
        nan or infinite, unless `prepare` was told to look away.
        """
        self._check_open()
        for steps in self._steps:
            steps.look(alone=True)
        self._checkpoints.save(path, objects, is_main=self.is_main)

    def restore(self, path: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
        """Gives each object the state that `save` wrote under its name, and returns the plain values.

            epoch = job.restore("last.pt", model=model, optimizer=optimizer, epoch=0)["epoch"]

        Values passed in are what is returned where the file does not hold them, or where there is no file: then
        nothing is restored, and a note says so. Rank 0 reads the file and hands it to the others, which need not see the
        file system; so every rank must call it. In a job that may be started again (`--max-restarts`) that rank reads its
        file whose host has the newest. Tensors among the values that were on a GPU come on `device`, and those of the CPU, such as
        the states of random numbers, on the CPU.
        Raises TrainingError when the file is no checkpoint or does not fit, and OSError where it is there and cannot be read.
        """
        self._check_open()
        return self._checkpoints.restore(path, objects)

    def log(self, /, **metrics: Any) -> None:
        """Tells the launcher what this rank measured: numbers, strings, or lists and dicts of them.

        Never waits, but for the GPU where a value is a tensor there. Raises TrainingError for values of other kinds or beyond 4 KiB.
        """
        self._status.metrics(metrics, is_main=self._elastic.seems_main if self._elastic else self.rank == 0)

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = True) -> None:
        """`print` on the main rank only, at once; see `is_main`."""
        if self.is_main:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    # Profiles

    def profile(self, path: str | os.PathLike[str], /, *, warmup_steps: int = WARMUP_STEPS, steps: int = STEPS) -> None:
        """Measures the next steps of the script and writes what they take to `path`, for `distrib-topo plan`; the script goes on.

        Call it before `prepare`. The file holds a `distrib.bandwidth_model.workload.Workload` as JSON: gradients and when each is ready,
        forward, backward, optimizer and the wait for data, in seconds. Nothing is written when the script ends too early, and
        `close` says so. `distrib-launch --profile FILE` does the same to a script as it is. Raises TrainingError where there
        are other ranks, as the profile is of one alone; `prepare` does for a second optimizer.
        """
        self._check_open()
        if self._models or self._loaders.prepared:
            raise TrainingError("something is prepared already", hint="call job.profile() before job.prepare()")
        self._profiles.begin(path, warmup_steps=warmup_steps, steps=steps)

    # Leaving

    def close(self) -> None:
        """Waits for the other ranks and leaves them. A second call does nothing.

        Raises what torch raises when another rank has failed.
        """
        if self.closed:
            return
        self._profiles.end()
        self._status.closing()
        try:
            if self.world_size > 1 and not self._elastic and not dist.is_initialized():
                for steps in self._steps:
                    steps.look(alone=True)
                apart = ", and each rank keeps the parameters that it has" if self._backend.replicas_differ else ""
                self.print(
                    "distrib: note: the script has called torch.distributed.destroy_process_group() itself: what ranks tell each other "
                    f"at their ends is left out{apart}"
                )
            else:
                self._part()
            self._backend.close()
        except BaseException:
            self._abandon()
            raise
        self.closed = True
        self._usage.close()
        for steps in self._steps:
            steps.end()
        if self._watch is not None:
            self._watch.end()
        if dist.is_initialized():
            shutdown.let_go_of_tensors()
            dist.destroy_process_group()
        if self._ends_mpi:
            from mpi4py import MPI

            MPI.Finalize()

    def _part(self) -> None:
        """What ranks tell each other at their ends."""
        if self.device.type == "cuda" and not self._elastic:
            self._meet_before_gpu()
        for steps in self._steps:
            steps.settle()  # ranks that have parted learn it here
        if not self._elastic:
            with self._waiting():
                meet_at_end(self._backend.world, tell=not self._status.is_read)
        self._backend.synchronize()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # leaving NCCL may cut off what is still on its way
        if self._elastic:
            self._tell_staleness(self._elastic.staleness())
        else:
            with self._waiting():
                self.barrier()
                if self._divergence:
                    self._divergence.compare_at_close()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """What fails inside is that another rank is gone: this one has done its part."""
        self._waits = True
        yield
        self._waits = False

    def _meet_before_gpu(self) -> None:
        """Sees to it that a rank which has gone a step further than the others learns it, before it waits for its GPU.

        That runs on past a collective which the others never come to, and would wait with it until NCCL's time is up.
        """
        with self._waiting():
            meet_at_end(self._backend.world, tell=not self._status.is_read)
        if self._divergence is None:
            return
        with self._waiting():
            parted = self._divergence.compare_steps()
        if parted:
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record(torch.cuda.current_stream(self.device))
            deadline = time.monotonic() + GPU_SECONDS
            while not computed.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    raise TrainingError(
                        f"{parted}, and its GPU still waits for the others, who are at the end of their scripts",
                        hint="let all ranks leave their loops after as many steps: where a measurement decides (early stopping), "
                        "by that of all, such as job.all_reduce(loss)",
                    )
                time.sleep(0.01)

    def _tell_staleness(self, seen: dict[str, float]) -> None:
        """How late updates were, for the log of the run."""
        if self.is_main and seen and self.world_size > 1:
            self.log(staleness=seen)
            told = ", ".join(f"{name} {value:g}" for name, value in seen.items())
            self.print(f"distrib: staleness of the updates, in updates of others meanwhile: {told}")

    def __enter__(self) -> Job:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if shutdown.succeeded(error):
            self.close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Leaves without a word to the others: after a failure they may never answer, and MPI's Finalize may hang."""
        if not self.closed:
            self.closed = True
            self._usage.close()
            if self._watch is not None:
                self._watch.end(failed=self.world_size > 1)
            if self.world_size > 1:
                shutdown.let_go_of_tensors()

    def _at_exit(self, failed: bool) -> None:
        if failed:
            self._abandon()
            return
        try:
            self.close()
        except TrainingError as error:
            print(f"distrib: rank {self.rank}: {error}", file=sys.stderr, flush=True)
            shutdown.fail()
        except Exception as error:
            if not self._waits:
                traceback.print_exc()
                shutdown.fail()
            # The script itself is done; whoever failed says so.
            print(f"distrib: rank {self.rank} could not wait for the other ranks: {error}", file=sys.stderr, flush=True)

    def _check_open(self) -> None:
        if self.closed:
            raise TrainingError("the job is closed", hint="use it inside its with block, and before close()")
