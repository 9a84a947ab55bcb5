"""What a script did not give to `job.prepare`, or should not have: an error where ranks would part by it, else a note."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distrib.errors import TrainingError
from distrib.training.checks.datasets import CHOOSE_ALIKE
from distrib.training.collectives import collect_if_complete, publish
from distrib.training.model_parameters import optimizer_parameters
from distrib.training.optimizer_step import Steps
from distrib.training.strategies.base import TrainingStrategy
from distrib.units import format_size

_TOTALS = "T_max", "total_steps", "total_iters"
"""Where torch's schedules keep for how many steps they are."""
_PARTIAL_TOTAL = "num_training_steps"
"""And Hugging Face's, of which the functions are partial ones."""
_READ = {None: "-", False: "b", True: "e"}
"""How a rank writes of a loader that it took nothing of it, took a batch, read it to its end."""

_ADDED_UP = {False: "-", True: "+"}
"""And before that, whether it has asked for a sum or a mean over the ranks."""
_INSTALLED = re.compile(r"/(site-packages|dist-packages)/|/lib/python3\.\d+/")
_OTHER_WAYS = re.compile(r"distributed|mpi4py|horovod|torchmetrics|accelerate")
"""Words of a script that may add up over ranks by itself."""


@functools.cache  # there may be ten million objects, of few kinds
def _wraps(kind: type) -> bool:
    return any(one.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") for one in kind.__mro__)


def _sees_to_it(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether one of these is of a model that the script has wrapped itself, in DistributedDataParallel or FSDP."""
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        return True
    own = {id(parameter) for parameter in parameters}
    wrapped = [thing for thing in gc.get_objects() if _wraps(type(thing))]  # type: ignore[arg-type]
    return any(id(parameter) in own for model in wrapped for parameter in model.parameters())


def _meets_by_itself() -> bool:
    """Whether the script, or what it has imported that is not installed, may talk to the other ranks in another way than by the job."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if name.partition(".")[0] == "distrib" or not file.endswith(".py") or _INSTALLED.search(file):
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if _OTHER_WAYS.search(Path(file).read_text()):
                return True
    return False


def _steps_of(schedule: LRScheduler) -> int:
    """For how many steps it was made; 0 where it does not tell."""
    if isinstance(schedule, SequentialLR):  # a warm-up, and then the rest
        rest = _steps_of(schedule._schedulers[-1])
        return schedule._milestones[-1] + rest if rest else 0
    told = [vars(schedule)[name] for name in _TOTALS if name in vars(schedule)]
    for function in vars(schedule).get("lr_lambdas", ()):
        told.append(getattr(function, "keywords", {}).get(_PARTIAL_TOTAL))
    return next((steps for steps in told if isinstance(steps, int)), 0)


def is_scheduled(thing: Any) -> bool:
    """Whether it is an optimizer for which a schedule of torch's was made."""
    return isinstance(thing, Optimizer) and hasattr(thing.step, "_wrapped_by_lr_sched")


class Forgotten:
    """Watches the steps of all optimizers, those of the job and others.

    `steps` are those of the optimizers that were prepared so far, `models` tells the models, `accumulates` whether several
    batches make a step.
    """

    def __init__(
        self,
        backend: TrainingStrategy,
        steps: Sequence[Steps],
        models: Callable[[], Sequence[nn.Module]],
        accumulates: Callable[[], bool],
    ) -> None:
        self._backend, self._steps, self._models, self._accumulates = backend, steps, models, accumulates
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._told_apart = False
        self._hook = register_optimizer_step_pre_hook(self._before)

    def end(self) -> None:
        """Stops watching."""
        self._hook.remove()

    def no_loader(self, prepared: int) -> None:
        """The job learns, and no DataLoader was prepared, or no batch was taken of those that were."""
        what = (
            "the DataLoader that job.prepare returned was not read"
            if prepared
            else "no DataLoader was given to job.prepare"
        )
        self._note(
            f"{what}: every rank trains on the same samples, unless the script shares them out; ranks with one seed take the "
            "same random numbers, too, up to torch.manual_seed(SEED + job.rank) after job.prepare"
        )

    def kept(self, models: Sequence[nn.Module]) -> None:
        """Models come one after the other, and the job keeps them all."""
        held = sum(values.nbytes for model in models for values in (*model.parameters(), *model.buffers()))
        self._note(
            f"the job keeps {len(models)} models that were prepared, of {format_size(held, binary=False, digits=2)}, with gradients and "
            "optimizers: job.release(model, optimizer) on every rank lets go of those that are trained no more"
        )

    def other_stream(self) -> None:
        """A first step was taken, and the ranks read different streams, of which each keeps a part."""
        self._note(
            f"an IterableDataset did not begin with the same batch on every rank, and each keeps one of {self._backend.world.size} "
            f"batches that it reads: if the dataset shares itself out by rank, leave its loader out of job.prepare; else "
            f"give it the same order on every rank. If only augmentation differs, all is well"
        )

    def other_order(self) -> None:
        """A first step was taken, and a sampler yielded another order on each rank, of which each keeps a part."""
        self._note(
            f"a sampler given to job.prepare with its DataLoader yields other samples on every rank, and each keeps one of "
            f"{self._backend.world.size} of its own: if it shares samples out by rank, let it have a num_replicas, or leave its loader "
            "out of job.prepare; else seed it alike on every rank"
        )

    def other_data(self, what: str) -> None:
        """Loaders were prepared whose datasets have other samples under the same numbers."""
        self._note(
            f"{what}: samples are shared out by their numbers, so that some are read twice and others never; sort what is listed "
            "(os.listdir, glob and sets have no order), seed what is drawn alike on every rank, and leave sharing out to job.prepare"
        )

    def other_than_main(self, place: str) -> None:
        """This rank has prepared a loader whose dataset has other samples under the same numbers than that of the main rank."""
        what = f"rank {self._backend.world.rank} has other samples, or others first, than the main rank in a DataLoader given to job.prepare"
        print(
            f"distrib: warning: {what} ({place}): {CHOOSE_ALIKE}, and sort what is listed", file=sys.stderr, flush=True
        )

    def look_at_schedules(self, optimizers: Sequence[Optimizer], before: int, batches: int) -> None:
        """A loader was prepared that had `before` batches, and has `batches` on this rank: were schedules made for the former?"""
        known = {id(optimizer) for optimizer in optimizers}
        things = gc.get_objects() if batches < before else []
        schedules = [thing for thing in things if issubclass(type(thing), LRScheduler)]
        parts = {id(part) for whole in schedules if isinstance(whole, SequentialLR) for part in whole._schedulers}
        for schedule in schedules:
            if id(getattr(schedule, "optimizer", None)) not in known or id(schedule) in parts:
                continue
            steps = _steps_of(schedule)
            if steps and steps % before == 0:
                self._note(
                    f"{type(schedule).__name__} was made for {steps} steps, {steps // before} x the {before} batches of a loader before "
                    f"job.prepare, of which a rank reads {batches}: if it steps after each batch, make it after job.prepare, "
                    "with the len() of the loader that returned"
                )

    def hand_made(self, model: str) -> None:
        """A model's parameters change, and no prepared optimizer has them. Raises TrainingError where ranks part by it."""
        what = f"{model} learns, and no prepared optimizer has its parameters"
        if self._backend.world.size > 1 and not self._backend.averages_in_backward:
            strategy = self._backend.settings
            how = f"--backend {strategy.backend}" if self._backend.averages_gradients else f"--mode {strategy.mode}"
            raise TrainingError(
                f"{what}: with {how} every rank has its own",
                hint="let an optimizer make the update, and prepare it too",
            )
        options = [
            name
            for name, on in (("accumulate", self._accumulates()), ("balance", self._backend.settings.balance))
            if on
        ]
        if options:
            self._note(
                f"{what}: {' and '.join(options)} cannot reach updates that a script makes by itself; let an optimizer make them, and "
                "prepare it too"
            )

    def evaluates_apart(self) -> None:
        """A loader is read without training while ranks have models of their own."""
        if not self._told_apart:
            self._told_apart = True
            self._note(
                "an evaluation in the middle of a round of --mode local is of a model that every rank has of its own: job.settle(), called "
                "by every rank before it, makes them one; at the end of an epoch they are, unless a thread of the script's reads the loader"
            )

    def tell_what_was_read(self, read: Mapping[int, bool | None], loaders: int, *, added_up: bool) -> None:
        """The job ends. Of this rank's `loaders` it took batches without a step of those in `read`, and to its end where that says so.

        `added_up`: it has asked for the sum or mean of something over all ranks. To be called before the last barrier, and
        `hear_what_was_read` after it. It is no exchange of its own: ranks of which one has had another exchange more would then
        wait for each other, where they find each other gone.
        """
        world = self._backend.world
        if world.size == 1:
            return
        states = "".join(_READ[read.get(number)] for number in range(loaders))
        publish("read", world.rank, _ADDED_UP[added_up] + states)

    def hear_what_was_read(self) -> None:
        """Says what came of loaders that ranks read without a step, each to the end of its share.

        Some ranks took nothing while others did; or all have done so, and nobody added up what they found.
        """
        world = self._backend.world
        if world.rank or world.size == 1:
            return
        left = collect_if_complete("read", range(world.size))
        of_loaders = [*zip(*(text[1:] for text in left), strict=False)]
        told = {
            tuple(r for r, state in enumerate(states) if state == _READ[True])
            for states in of_loaders
            if _READ[None] in states
        }
        for ranks in sorted(filter(None, told)):
            self._note(
                f"rank {', '.join(map(str, ranks))} alone read a DataLoader to its end that was given to job.prepare, "
                f"and saw its share of the samples only, one of {world.size}: let every rank read it, and add up with "
                f"job.all_reduce, or leave it out of job.prepare"
            )
        # Where no optimizer was prepared, a step of the script's own may have learnt from it.
        evaluated = bool(self._steps) and any(set(states) == {_READ[True]} for states in of_loaders)
        if evaluated and not any(text.startswith(_ADDED_UP[True]) for text in left) and not _meets_by_itself():
            self._note(
                f"every rank read its share of a DataLoader that was given to job.prepare, without a step, and nothing was added up: "
                f"what a rank measured there is of its share only, one of {world.size}; add up with job.all_reduce"
            )

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        inside = (
            self._backend.averages_in_backward
            and self._backend.world.size > 1
            and torch._C._current_graph_task_id() != -1
        )
        if inside and self._is_of_a_model(parameters):
            raise TrainingError(
                f"a step of {type(optimizer).__name__} within backward: gradients are averaged as it ends, and each rank would take a "
                "step with its own",
                hint="take the step after backward; --mode local has parameters that are each rank's own between its rounds",
            )
        if any(one.taking for one in self._steps):  # an optimizer that works by another one, as Lookahead does
            return
        own = {id(parameter) for parameter in parameters}
        for one in self._steps:
            if any(id(parameter) in own for parameter in optimizer_parameters(one.optimizer)):
                if one.counting:
                    raise TrainingError(
                        f"a step of {type(optimizer).__name__} on what {type(one.optimizer).__name__} trains, "
                        f"which was prepared, does not go through its step(): the job cannot count it",
                        hint="prepare the optimizer whose step() takes it, such as job.prepare(optimizer.base_optimizer)",
                    )
                return
        if optimizer not in self._known and (self._backend.world.size > 1 or self._accumulates()):
            self._known.add(optimizer)
            self._never_prepared(type(optimizer).__name__, parameters)

    def _is_of_a_model(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether one of them is a prepared model's."""
        own = {id(parameter) for parameter in parameters}
        return any(id(parameter) in own for model in self._models() for parameter in model.parameters())

    def _never_prepared(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        models = self._models()
        if not self._is_of_a_model(parameters):
            world = self._backend.world
            if world.size > 1 and not world.rank and not _sees_to_it(parameters):
                what = "and its parameters are of no model given to" if models else "and no model was given to"
                self._note(
                    f"{name} takes a step, {what} job.prepare: every rank trains one of its own, unless the script averages their "
                    "gradients"
                )
            return
        what = f"{name} was not given to job.prepare, but the model that it trains was"
        lost = "its batches are not accumulated" if self._accumulates() else "every rank would have its own"
        if self._accumulates() or not self._backend.averages_in_backward:
            raise TrainingError(f"{what}: {lost}", hint="model, optimizer = job.prepare(model, optimizer)")
        self._note(f"{what}: batches of unequal size and gradients that are nan are not seen to, and steps not counted")

    def _note(self, note: str) -> None:
        if self._backend.world.rank == 0:
            print(f"distrib: note: {note}", file=sys.stderr, flush=True)
