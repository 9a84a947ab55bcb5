"""API of a training script: `init` joins the ranks of a job and returns a `Job`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from distrib.environment import DISTRIB_SERVERS
from distrib.errors import TrainingError
from distrib.strategy import strategy_from_environment
from distrib.training import compat, shutdown
from distrib.training.checks.divergence import CHECK_EVERY_STEPS
from distrib.training.collectives import Operation
from distrib.training.data.sharded_loader import ShardedLoader
from distrib.training.job_parts import JobParts
from distrib.training.model_parameters import unwrap_model
from distrib.training.nan_guard import OnNan
from distrib.training.prepare import PrepareOptions
from distrib.training.rank_output import RankOutput
from distrib.training.rendezvous import join
from distrib.training.strategies.base import TrainingStrategy, create_strategy
from distrib.training.world import find_device, find_world, planned_world, refuse_worker_process

if TYPE_CHECKING:
    from typing_extensions import Unpack

FilePath: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")

current_job: Job | None = None


def init(*, timeout_seconds: float = 1800.0, divergence_check_steps: int = CHECK_EVERY_STEPS) -> Job:
    """Join the other ranks of this job. A second call returns the same job.

    The ranks are those that `distrib-launch`, `mpirun` or `torchrun` started. Started without one of them (`python script.py`), the job
    has one rank.

    Args:
        timeout_seconds: Longest wait for other ranks, at start and in each collective, before an error is raised.
        divergence_check_steps: Interval in steps at which parameters are compared between ranks, also when the job closes. With 0, only before
            the first step.

    Returns:
        The job.

    Raises:
        TrainingError: The ranks are not those that the launcher planned, this rank has no device, or the job was closed.

    Example:
        with distrib.init() as job:
            model, optimizer, loader = job.prepare(model, optimizer, loader)
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()
    """
    global current_job
    if current_job is None:
        settings = strategy_from_environment(os.environ)
        # Ranks of mode async may leave and join. MPI and torch's process groups do not support it, so the servers connect them.
        elastic = settings.mode == "async"
        if elastic and not os.environ.get(DISTRIB_SERVERS):
            raise TrainingError(
                "mode async, but there is no parameter server",
                hint="start it with distrib-launch --mode async",
                code="no-parameter-server",
            )
        refuse_worker_process()
        world = planned_world() if elastic else find_world(threads=settings.backend == "horovod")
        device = find_device(world.local_rank)
        if not elastic:
            world = join(world, device, timedelta(seconds=timeout_seconds))
        strategy = create_strategy(settings, world, device)
        if world.size > 1:
            compat.make_fork_safe()
        current_job = Job(strategy, divergence_check_steps)
    elif current_job.closed:
        raise TrainingError("the job is closed", hint="call distrib.init() once in a process", code="job-closed")
    return current_job


class Job(RankOutput):
    """Handle of one rank to the job: the ranks that train together. Created by `distrib.init()`.

    Use it as a context manager, or call `close`; otherwise it closes when the script ends, and then waits for the other ranks.
    """

    rank: int
    """Number of this rank, from 0."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Number of this rank among the ranks of its host, from 0."""
    local_world_size: int
    """Number of ranks on this host."""
    device: torch.device
    """The device of this rank."""
    restarts: int
    """Number of times the launcher has restarted the whole job (`--max-restarts`)."""

    def __init__(self, strategy: TrainingStrategy, divergence_check_steps: int = CHECK_EVERY_STEPS) -> None:
        """Create the job of this rank. Scripts call `distrib.init()`.

        Args:
            strategy: The strategy that was chosen at launch.
            divergence_check_steps: See `init`.
        """
        world, self.device = strategy.world, strategy.device
        self.rank, self.world_size = world.rank, world.size
        self.local_rank, self.local_world_size = world.local_rank, world.local_size
        self._parts = JobParts(strategy, divergence_check_steps)
        self.restarts = self._parts.run.restarts

    def __repr__(self) -> str:
        return f"<distrib.Job rank {self.rank} of {self.world_size} on {self.device}>"

    @property
    def closed(self) -> bool:
        """True after the job was closed or has failed."""
        return self._parts.shutdown.closed

    @property
    def stepped(self) -> bool:
        """True if the last `optimizer.step()` updated the parameters.

        False while gradients accumulate, and after a step skipped because of NaN or Inf. Use it to guard EMA updates and schedulers.
        """
        return self._parts.last_step.updated

    @overload
    def prepare(self, thing: DataLoader[Any], /) -> ShardedLoader: ...
    @overload
    def prepare(self, thing: T, /, **options: Unpack[PrepareOptions]) -> T: ...
    @overload
    def prepare(self, *things: Any, **options: Unpack[PrepareOptions]) -> tuple[Any, ...]: ...
    def prepare(
        self,
        *things: Any,
        find_unused_parameters: bool = False,
        methods: Sequence[str] = (),
        sync_batchnorm: bool = False,
        accumulate: int | None = None,
        on_nan: OnNan = "raise",
    ) -> Any:
        """Prepare models, optimizers and loaders for training in this job. Collective: the same objects in the same order on every rank.

        - A module is moved to `device` and gets rank 0's parameters. In mode sync it is wrapped in DistributedDataParallel, with its own
          attributes and `state_dict` names; `unwrap` returns it. To freeze or unfreeze parameters later, prepare the module again.
        - An optimizer, GradScaler or scheduler stays the same object, with rank 0's state. `optimizer.step()` becomes a step of the job.
        - A DataLoader becomes a `ShardedLoader`, which yields this rank's batches on `device`.

        Args:
            things: Modules, optimizers, DataLoaders, schedulers and GradScalers.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods besides `forward` whose results the script calls backward on, such as `["loss"]`.
            sync_batchnorm: True for batch normalization over the samples of all ranks. On GPUs only.
            accumulate: Batches in a step, as `Job.accumulate` sets it; None leaves the present number.
            on_nan: Reaction to NaN or infinite gradients: `raise` an error with rank and parameter, `skip` the step, or `ignore` them.

        Returns:
            The prepared object; a tuple in the order of `things` if there are several.

        Raises:
            TrainingError: An object cannot be prepared, ranks prepare different objects, or there are too few samples.

        Example:
            model, optimizer, loader = job.prepare(model, optimizer, loader)
        """
        options = PrepareOptions(
            find_unused_parameters=find_unused_parameters, methods=[*methods], sync_batchnorm=sync_batchnorm,
            accumulate=accumulate, on_nan=on_nan,
        )  # fmt: skip
        prepared = self._open().preparer.prepare(things, options)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def release(self, *things: Any) -> None:
        """Free the memory of models and optimizers that are not trained any more. Collective.

        Use it in scripts that train several models in turn, such as cross validation. A released optimizer takes no more steps until it
        is prepared again. Loaders, schedulers and GradScalers need no release.

        Args:
            things: Prepared models and optimizers.

        Raises:
            TrainingError: A prepared optimizer still trains the model, or only some batches of a step were accumulated.
        """
        self._open().preparer.release(things)

    def accumulate(self, batches: int) -> None:
        """Accumulate gradients over several batches per step, then average them once over the ranks. Collective.

        `optimizer.step()` then updates parameters only after the last batch of a step. A step may continue in the next epoch.
        `--accumulate N` at launch has priority.

        Args:
            batches: Batches in a step, at least 1.

        Raises:
            TrainingError: `batches` is not a positive integer, or only some batches of a step were accumulated.
        """
        self._open().state.set_accumulation(batches)

    def weigh(self, amount: float) -> None:
        """Set how much this rank's batch counts in the mean gradient, in place of its samples. Call it before backward.

        The loss must be a mean over `amount` terms, such as tokens. Collective in mode sync. The next batch counts by its samples again.
        Give 1 on every rank if the loss has been divided by the mean of all ranks already.

        Args:
            amount: Terms of this rank's loss, 0 or more.

        Raises:
            TrainingError: `amount` is negative or not finite, or 0 on every rank.

        Example:
            job.weigh((targets != -100).sum())
            loss = cross_entropy(model(tokens), targets, ignore_index=-100)
        """
        self._open().weigh(float(amount))

    def settle(self) -> None:
        """Make the models identical on all ranks now. Collective.

        In mode sync they always are. In mode local they are synchronized every `--inner-steps` steps, at the end of each epoch of a
        prepared loader, and when the job closes. In mode async they are synchronized when a prepared loader is read for an evaluation.
        """
        self._open().settle()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module inside a prepared model, for example to call its methods or to export it.

        Args:
            model: A prepared model, in DistributedDataParallel or torch.compile, or any module.
        """
        return unwrap_model(model)  # type: ignore[no-any-return]

    def scale_lr(self, lr: float) -> float:
        """Scale a learning rate to the global batch size, by the linear scaling rule (arXiv:1706.02677).

        The rule is meant for SGD and needs a warm-up; see `warmup`. The factor is the number of ranks whose batches make one step: 1 in
        mode local with outer momentum (DiLoCo), and with `--no-stale-rate` the ranks that push together.

        Args:
            lr: A learning rate for the batch size of one rank.
        """
        return lr * self._parts.strategy.ranks_per_step

    def warmup(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LinearLR:
        """Create a scheduler that raises a rate from `scale_lr` linearly, starting at the rate of one rank.

        Args:
            optimizer: An optimizer with the scaled learning rate.
            steps: Steps until the full rate is reached; 0 for no warm-up.

        Returns:
            The scheduler. Call its `step()` after each `optimizer.step()` that updated the parameters; see `stepped`.
        """
        start = 1 / self._parts.strategy.ranks_per_step if steps else 1.0  # with 0 steps, LinearLR stays at its start
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=start, end_factor=1.0, total_iters=steps)

    def barrier(self) -> None:
        """Wait until every rank has called this method. Collective. GPU work that was queued before may still run."""
        self._open().collectives.all_reduce(0.0, "sum")

    @overload
    def all_reduce(self, value: float, op: Operation = ...) -> float: ...
    @overload
    def all_reduce(self, value: torch.Tensor, op: Operation = ...) -> torch.Tensor: ...
    def all_reduce(self, value: float | torch.Tensor, op: Operation = "mean") -> float | torch.Tensor:
        """Reduce a number or a tensor over all ranks. Collective.

        Args:
            value: A number, or a tensor of the same shape and type on every rank.
            op: `mean`, `sum`, `max` or `min`.

        Returns:
            A float for a number, computed in float64. For a tensor, a new tensor of its shape and type on its device, without gradient.
            The mean of integers is float. The sum of booleans is the number of True values.

        Raises:
            TrainingError: `op` is unknown, or `value` is neither a number nor a tensor.

        Example:
            accuracy = job.all_reduce(correct, "sum") / job.all_reduce(seen, "sum")
        """
        return self._open().collectives.all_reduce(value, op)

    def save(self, path: FilePath, /, *, keep: int = 1, per_rank: dict[str, Any] | None = None, **objects: Any) -> None:
        """Write a checkpoint on the main rank. Other ranks continue without waiting. Call it on every rank.

        With an optimizer, loader or schedule, the checkpoint also has the states of every rank's random number generators: torch's, its
        GPU's, NumPy's and Python's. In mode async it has them of a single rank only.

        The file is replaced atomically. With `--max-restarts`, one rank of each host with its own file system writes a copy. Models are
        saved without their wrapper, so any number of ranks can restore them.

        Args:
            path: The file. Missing folders are created.
            keep: Number of checkpoints to keep, with this one. Older ones are named `path`.1, `path`.2 and so on.
            per_rank: Objects and values that differ between ranks, by name. Collective if it is given.
            objects: Objects with a `state_dict`, and plain values, by name.

        Raises:
            TrainingError: `weights_only=True` could not load a value, `keep` is less than 1, or the last gradients were NaN or infinite.

        Example:
            job.save("last.pt", model=model, optimizer=optimizer, loader=loader, epoch=epoch)
        """
        self._open().save(path, objects, per_rank, keep=keep)

    def restore(self, path: FilePath, /, *, per_rank: dict[str, Any] | None = None, **objects: Any) -> dict[str, Any]:
        """Load a checkpoint that `save` wrote. Collective.

        Rank 0 reads the file and broadcasts it. With `--max-restarts`, a rank of the host with the newest file reads it. If it is
        damaged, a warning names it, and the next older one or the copy of another host is restored.

        On as many ranks as saved it, each rank gets its own `per_rank` back. With an optimizer, loader or schedule, its random number
        generators continue, too.

        Args:
            path: The file. If it does not exist, rank 0 logs that and nothing is restored.
            per_rank: Objects to load and defaults of this rank alone, by name.
            objects: Objects to load, and defaults of plain values, by the names given to `save`.

        Returns:
            The plain values by name; those of this rank under `per_rank`. Tensors that were on a GPU are on `device`, others on the CPU.

        Raises:
            TrainingError: No file is a valid checkpoint, or the newest one does not match the objects.
            OSError: The only file cannot be read.

        Example:
            epoch = job.restore("last.pt", model=model, optimizer=optimizer, epoch=0)["epoch"]
        """
        return self._open().checkpoints.restore(path, objects, per_rank)

    def profile(self, path: FilePath, /, *, warmup_steps: int = 5, steps: int = 20) -> None:
        """Measure the next steps and write a workload for `distrib-topo plan`. Call it before `prepare`, in a job of one rank.

        Args:
            path: The JSON file: gradients, and seconds of forward, backward, optimizer and data loading.
            warmup_steps: Steps that are not measured.
            steps: Steps that are measured.

        Raises:
            TrainingError: The job has several ranks, or something was prepared.
        """
        parts = self._open()
        parts.preparer.check_nothing_prepared("job.profile()")
        parts.profiles.begin(path, warmup_steps=warmup_steps, steps=steps)

    def close(self) -> None:
        """Wait for the other ranks and disconnect. A second call does nothing.

        Raises:
            RuntimeError: Another rank failed. The error is torch's.
        """
        if not self.closed:
            self._parts.profiles.end()
            self._parts.shutdown.close()

    def __enter__(self) -> Job:
        self._open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> None:
        if shutdown.succeeded(error):
            self.close()
        else:
            self._parts.shutdown.abandon()

    def _open(self) -> JobParts:
        """Return the parts of the job, which must not be closed."""
        if self.closed:
            raise TrainingError("the job is closed", hint="use it before its close()", code="job-closed")
        return self._parts
