"""Steps of an optimizer as the job takes them: after several batches, with gradients that are numbers, by the backend."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.training.collectives import IS_AVERAGED
from distrib.training.gradient_accumulation import Mean, Samples
from distrib.training.model_parameters import optimizer_parameters, trainable_parameters, unwrap_model
from distrib.training.nan_guard import Finite, OnNan
from distrib.training.strategies.base import TrainingStrategy
from distrib.training.strategies.ddp_module import is_in_join

_STEPS = "_distrib_steps"
"""Where an optimizer has its Steps."""


class Steps:
    """The steps of one optimizer.

    `optimizer.step` becomes a step of the job; the optimizer stays the object that schedulers know. `told` is called after
    each with the number of steps so far, and whether this was one: it is none while batches are accumulated or where it was left out.
    What says so may be a function, as only a GPU may know it yet. `begins` is called before the first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        backend: TrainingStrategy,
        samples: Samples,
        *,
        on_nan: OnNan,
        told: Callable[[int, bool | Callable[[], bool]], None],
        begins: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self.mean = Mean(optimizer, samples, ranks=backend.averaged_ranks)
        self.taken = 0
        """Steps, with those that were left out because of a gradient that was no number."""
        self.left_out = 0
        """Those that `on_nan="skip"` left out."""
        self.taking = False
        """Whether the optimizer's own step is under way."""
        self._backend, self._told, self._begins = backend, told, begins
        self._models: list[nn.Module] = []
        self._refusal: tuple[str, str] | None = None
        """What is said of a step where it is to take no more, and what to do."""
        # What has left for a server stays there: no looking back.
        late = False if backend.exclusive_parameters else None
        self._finite = Finite(
            optimizer, on_nan, together=backend.averages_gradients and backend.world.size > 1, late=late
        )
        self._scaled = False
        self._overflows = 0
        self.calls = 0
        """Batches after which a step was asked for, also such as are accumulated."""
        self._counts: list[torch.Tensor] = []  # of all ranks, once the work is done
        self._comparing: dist.Work | None = None
        self._own: Callable[..., Any] = optimizer.step
        self._passes = False
        """Whether others take its steps, and call the optimizer's own through this."""
        before = vars(optimizer).get(_STEPS)
        if before and before.optimizer is optimizer:  # its step calls these still, where it is prepared again
            before._passes = True
        setattr(optimizer, _STEPS, self)
        self._fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

        @functools.wraps(self._own)
        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            return self._step(*arguments, **options)

        for mark in [name for name in vars(step) if name.startswith("_torchdynamo")]:
            delattr(step, mark)  # of one that is compiled: torch would look through ours
        # A scheduler may have put its own function in place of `step`, or do so later; it wants to find a bound method.
        # Where a script compiles what calls it, what ranks tell each other is no part of that.
        optimizer.step = MethodType(_disable_dynamo(step), optimizer)  # type: ignore[method-assign]

    @property
    def is_retired(self) -> bool:
        """Whether it takes no more steps."""
        return self._refusal is not None

    def give_way(self, other: Optimizer) -> None:
        """`other` is prepared: where only one optimizer may train a parameter that both have, this one takes no more steps. Every rank."""
        if self.is_retired or not (self.counting or self._backend.exclusive_parameters):
            return
        if {*trainable_parameters(other)}.isdisjoint(trainable_parameters(self.optimizer)):
            return
        self.retire(
            f"{type(self.optimizer).__name__} takes a step, and {type(other).__name__}, which was prepared after it, has its "
            f"parameters: {self._alone}",
            hint="use the one that was prepared last, or give each parameter to one of them",
        )

    def retire(self, why: str, *, hint: str) -> None:
        """No more steps are taken; whoever asks for one is told why. Every rank. Raises TrainingError between the batches of one step."""
        if self.is_retired:
            return
        if self.mean.begun:
            raise TrainingError(
                f"{type(self.optimizer).__name__} is replaced or released between the batches of one step",
                hint="do so after a step",
            )
        self.settle()
        self._refusal = why, hint
        self._models = []
        self._finite.end()
        self.mean.end()
        self._backend.release_optimizer(self.optimizer)

    def accumulate(self, batches: int) -> None:
        """A step after each `batches` batches from now on."""
        if self.is_retired:
            return
        if self.mean.begun:
            raise TrainingError("accumulate() between the batches of one step", hint="call it before the first batch")
        self.mean.batches = batches
        self.mean.follow()
        self.pair(self._models)
        if self._compares:
            _ = self._backend.step_count_group  # every rank is here to make it

    def pair(self, models: Iterable[nn.Module]) -> None:
        """Finds those of `models` that the optimizer trains."""
        if self.is_retired:
            return
        own = set(map(id, optimizer_parameters(self.optimizer)))
        self._models = [model for model in models if any(id(parameter) in own for parameter in model.parameters())]
        self._finite.name(_names(self._models))
        self.mean.models = {p: number for number, model in enumerate(self._models) for p in model.parameters()}
        self._backend.pair_models(self.optimizer, self._models)
        self._backend.set_gradient_sync(self.optimizer, self._models, self.mean.last)
        self.optimizer._step_supports_amp_scaling = self._fused or (self.counting and not self._scaled)  # type: ignore[attr-defined]

    @property
    def _alone(self) -> str:
        """Why a parameter may learn from one optimizer only."""
        if not self._backend.averages_gradients:
            return f"in mode {self._backend.settings.mode} each would take them to other values"
        return "whose batches of one step a gradient belongs to cannot be told with accumulate"

    @property
    def counting(self) -> bool:
        """Whether the ranks part where one of them takes a step that is not counted."""
        return self.mean.batches > 1 or (self._backend.world.size > 1 and not self._backend.averages_gradients)

    def trains(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether some of `parameters` are this optimizer's or of its models."""
        own = set(map(id, optimizer_parameters(self.optimizer)))
        own.update(id(parameter) for model in self._models for parameter in model.parameters())
        return any(id(parameter) in own for parameter in parameters)

    def look(self, *, alone: bool = False) -> None:
        """Raises TrainingError where a step was taken with a gradient that is no number. Every rank, or this one `alone`."""
        self._finite.flush(alone=alone)

    def settle(self) -> None:
        """The epoch or the job ends. Raises TrainingError where ranks have come to different batches. Every rank."""
        self.look()
        self._judge()
        self._compare()
        self._judge()

    def end(self) -> None:
        """Says what nobody would know otherwise."""
        if self.left_out:
            self._tell_left_out()

    def _step(self, *arguments: Any, **options: Any) -> Any:
        if self._passes:
            return self._own(*arguments, **options)
        if self._refusal is not None:
            why, hint = self._refusal
            raise TrainingError(why, hint=hint)
        if hasattr(self.optimizer, "found_inf") and self.counting and not self._scaled:
            raise TrainingError(
                "a GradScaler leaves out steps that the job must count", hint="scaler = job.prepare(scaler)"
            )
        closure = arguments[0] if arguments else options.get("closure")
        if closure is None:
            return self.take(lambda: self._own(*arguments, **options))
        if self.mean.batches > 1:
            raise TrainingError(
                "a closure computes its own gradients: they cannot be accumulated", hint="leave out accumulate"
            )
        options["closure"] = self._watched(closure)
        return self.take(lambda: self._own(*arguments[1:], **options), by_closure=True)

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, whose gradients are looked at when it has computed them, and whose loss is the same on every rank.

        An optimizer that looks for its way by the loss, as LBFGS does, would otherwise call the closure more often on some ranks.
        """

        def watched() -> Any:
            loss = closure()
            self._backend.check_gradients(self._models)
            if not self._finite.after(self.taken + 1):
                raise _LeftOut
            if loss is None or not self._backend.averages_gradients or self._backend.world.size == 1:
                return loss
            is_number = not isinstance(loss, torch.Tensor)
            wide = torch.float64 if is_number else None
            mean = torch.as_tensor(loss, dtype=wide, device=self._backend.device).detach() * self.mean.share
            dist.all_reduce(mean)
            return float(mean) if is_number else mean

        return watched

    def take(self, update: Callable[[], Any] | None, *, by_closure: bool = False) -> Any:
        """Takes a step, if the present batch is the last of its group; None if it is not. Without `update` it is left out.

        `by_closure`: `update` itself computes the gradients, and sees to what must be seen to between them and the step.
        """
        if any(map(is_in_join, self._models)):
            self._check_join()
        if self.mean.batches > 1:
            self._check_set()
        result = None
        self.calls += 1
        last = self.mean.last
        if last:
            self._judge()
            result = self._take(update, by_closure)
        else:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers, which step after each batch
            self._told(self.taken, False)
        self.mean.next()
        if last != self.mean.last:
            self._backend.set_gradient_sync(self.optimizer, self._models, self.mean.last)
            if self.mean.last:
                self._compare()
        return result

    def _take(self, update: Callable[[], Any] | None, by_closure: bool) -> Any:
        if not self.taken:
            self._check_owned()
        if not by_closure:
            self.mean.before_step()
            self._backend.check_gradients(self._models)
        if not self.taken:
            self._begins()
        found_inf = getattr(self.optimizer, "found_inf", None)  # the optimizer itself leaves the step out then
        bad = False
        if found_inf is not None or update is None:
            self._finite.forget()
        elif not by_closure and (bad := not self._finite.after(self.taken + 1)):
            update = None

        def attempt() -> Any:
            nonlocal update, bad
            try:
                return update() if update else None
            except _LeftOut:
                update, bad = None, True

        self.taking = True
        try:
            result = self._backend.step(self.optimizer, attempt)
        finally:
            self.taking = False
        if update is None:
            self._backend.on_step_skipped(self.optimizer)
        self._backend.after_step(self._models)
        self.taken += 1
        if found_inf is not None:
            self._told(self.taken, functools.partial(self._was_taken, found_inf == 0))
        else:
            self._told(self.taken, update is not None)
            if update is None:
                self._empty()
        self.left_out += bad
        if bad and self.left_out in _OFTEN:
            self._tell_left_out()
        return result

    def _was_taken(self, is_finite: torch.Tensor) -> bool:
        """Whether the optimizer itself has taken a step, which is asked before the next batch."""
        taken = bool(is_finite)
        if not taken:
            self._empty()
        return taken

    def _empty(self) -> None:
        """After a step that was left out: who clears gradients after real steps alone would add to what is no number."""
        for parameter in optimizer_parameters(self.optimizer):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach().zero_()

    def _tell_left_out(self) -> None:
        world = self._backend.world
        if self._backend.averages_gradients and world.rank:
            return
        where = "" if self._backend.averages_gradients or world.size == 1 else f" on rank {world.rank}"
        told = f"{self.left_out} of {self.taken} steps of {type(self.optimizer).__name__} were left out{where}"
        print(f"distrib: {told}, as gradients were nan or infinite", file=sys.stderr, flush=True)

    # A script may judge on each rank by itself whether it calls `step`. While batches are accumulated nobody waits for anybody,
    # so that ranks would go on with different batches in their groups. They tell each other before the batch that is exchanged,
    # and listen after it, when all have told.

    @property
    def _compares(self) -> bool:
        return self.mean.batches > 1 and self._backend.averages_gradients and self._backend.world.size > 1

    def _compare(self) -> None:
        """Tells the others how many batches this rank has come to."""
        if self._compares:
            own = torch.tensor([self.mean.passes, self.calls], device="cpu")
            self._counts = [torch.empty_like(own) for _ in range(self._backend.world.size)]
            self._comparing = dist.all_gather(self._counts, own, group=self._backend.step_count_group, async_op=True)

    def _judge(self) -> None:
        """Raises TrainingError where the others have come to other batches than this rank."""
        if self._comparing is None:
            return
        self._comparing.wait()
        self._comparing = None
        counts = [tuple(count.tolist()) for count in self._counts]
        if len(set(counts)) == 1:
            return
        left_out = [(passes - calls, passes) for passes, calls in counts]  # or one has come further than another
        most, least = (left_out.index(pick(left_out)) for pick in (max, min))
        told = [f"rank {rank} {counts[rank][1]} times in {counts[rank][0]} backward passes" for rank in (least, most)]
        raise TrainingError(
            f"step() of {type(self.optimizer).__name__} was called by {', by '.join(told)}: they are in different batches "
            "of what should become one step",
            hint="with accumulate every rank must take as many batches, and call step() after each; on_nan='skip' leaves bad steps out on all",
        )

    def _check_join(self) -> None:
        """Raises TrainingError where a rank in join() that has come to its end would be waited for: it answers DDP's exchanges alone."""
        what = "the ranks compare their batches" if self._compares else ""
        if any(buffer.numel() for model in self._models for buffer in model.buffers()):
            what = "rank 0 sends the model's buffers to all after each step"
        if what:
            raise TrainingError(
                f"join(): {what}, and those that have come to their end would be waited for",
                hint="leave join() out and prepare the DataLoader, which gives all ranks as many batches",
            )

    def _check_set(self) -> None:
        """Raises TrainingError where the script itself has set gradients: those of all batches but the last would be lost."""
        if any(hasattr(parameter.grad, IS_AVERAGED) for parameter in optimizer_parameters(self.optimizer)):
            raise TrainingError(
                "a gradient that the script sets itself (p.grad = job.all_reduce(...)) cannot be accumulated: only what backward gives is",
                hint="leave out accumulate, or add up the batches' gradients in the script, too",
            )

    def _check_owned(self) -> None:
        """Raises TrainingError where the optimizer has parameters that no model of the job has: nobody would average them."""
        if self._backend.world.size == 1:
            return
        known = {id(parameter) for model in self._models for parameter in model.parameters()}
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in known:
                    raise TrainingError(
                        f"parameter {index} of group {number} of the {type(self.optimizer).__name__}, "
                        f"{list(parameter.shape)}, is of no prepared model: every rank would have its own",
                        hint="prepare its model too, and make the optimizer of the model's present parameters; put a parameter that "
                        "stands alone into a module, and let its forward return it",
                    )

    def scaled_by(self, scaler: torch.amp.GradScaler, own: Callable[..., Any], arguments: Any, options: Any) -> Any:
        """`scaler.step(optimizer)`, counted also where the scaler leaves it out."""
        if not self._scaled:
            self._scaled = True
            self._backend.on_gradients_unscaled(self.optimizer)
            self.pair(self._models)
        self._backend.on_scaled_step(self._models, scaler)
        if not self.mean.last:
            return self.take(None)
        taken = self.taken
        result = own(self.optimizer, *arguments, **options)
        if self.taken == taken:
            self.take(None)
            self._overflows += 1
            if self._overflows == OVERFLOWS_IN_A_ROW:
                self._tell_overflows()
        else:
            self._overflows = 0
        return result

    def _tell_overflows(self) -> None:
        if not self._backend.averages_gradients or not self._backend.world.rank:
            told = f"the GradScaler has left out {self._overflows} steps of {type(self.optimizer).__name__} in a row"
            print(
                f"distrib: warning: {told}: gradients are nan or infinite whatever the scale is; look at the loss and the batches",
                file=sys.stderr,
                flush=True,
            )


OVERFLOWS_IN_A_ROW = 40
"""A scale that was halved so often makes gradients 1e12 times smaller: it is not what is too large."""

_OFTEN = {10**power for power in range(1, 10)}
"""After so many steps that were left out something is said."""


def _names(models: Sequence[nn.Module]) -> dict[torch.Tensor, str]:
    """The names of all parameters, with their model's before them where there are several."""
    kinds = [type(unwrap_model(model)).__name__ for model in models]
    names: dict[torch.Tensor, str] = {}
    for number, (model, kind) in enumerate(zip(models, kinds, strict=True)):
        place = f"{kind} {kinds[:number].count(kind) + 1}" if kinds.count(kind) > 1 else kind
        for name, parameter in unwrap_model(model).named_parameters():
            names[parameter] = f"{place}.{name}" if len(models) > 1 else name
    return names


class _LeftOut(Exception):
    """A closure's gradients are no numbers, and the step is left out."""


def follow_scaler(scaler: torch.amp.GradScaler, steps: Sequence[Steps]) -> None:
    """Makes a GradScaler scale the batches of one step alike, and count the steps that it leaves out.

    `steps` are all of the job's, those of optimizers that are prepared later too.
    """
    own_step, own_update = scaler.step, scaler.update
    scaled: weakref.WeakSet[Steps] = weakref.WeakSet()

    def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        for one in steps:
            if one.optimizer is optimizer and not one.is_retired:
                scaled.add(one)
                return one.scaled_by(scaler, own_step, arguments, options)
        return own_step(optimizer, *arguments, **options)

    def update(new_scale: float | torch.Tensor | None = None) -> None:
        if new_scale is None and scaler.is_enabled() and any(one.mean.begun for one in scaled):
            present = scaler._get_scale_async()  # as it is, on the GPU: nobody need wait for it
            here = present is not None and present.device.type == scaler._device
            new_scale = present if here else scaler.get_scale()
        own_update(new_scale)

    scaler.step, scaler.update = step, update  # type: ignore[method-assign]
