"""Steps of a prepared optimizer: gradients are accumulated, checked and averaged before the optimizer's own step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from distrib.errors import TrainingError
from distrib.training.checks.step_counts import StepCountCheck
from distrib.training.collectives import IS_AVERAGED
from distrib.training.gradient_accumulation import BatchSamples, GradientAccumulator, clear_gradient
from distrib.training.model_parameters import optimizer_parameters, unwrap_model
from distrib.training.nan_guard import NanGuard, OnNan
from distrib.training.step_observer import StepObserver
from distrib.training.strategies.base import TrainingStrategy
from distrib.training.strategies.ddp_module import is_in_join
from distrib.utils.log import PLAIN, get_logger

log = get_logger("training")

_STEPPER = "_distrib_stepper"
"""The attribute of an optimizer that holds its OptimizerStepper."""


class OptimizerStepper:
    """Steps of one optimizer: accumulation, gradient checks, update and observers.

    `optimizer.step` is replaced. The optimizer stays the object that schedulers reference.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: TrainingStrategy,
        batch: BatchSamples,
        observers: Sequence[StepObserver],
        *,
        on_nan: OnNan,
    ) -> None:
        """Replace `optimizer.step`.

        Args:
            optimizer: The script's optimizer.
            strategy: The strategy of the job.
            batch: Sizes of the present batch.
            observers: Notified of every step; the list may grow.
            on_nan: Reaction to NaN or infinite gradients: `raise`, `skip` or `ignore`.
        """
        self.optimizer, self._name = optimizer, type(optimizer).__name__
        self.accumulator = GradientAccumulator(optimizer, batch, ranks=strategy.averaged_ranks)
        self.calls = 0
        """Calls of `step()`, also after batches that are only accumulated."""
        self.taken = 0
        """Steps so far, skipped ones included."""
        self.skipped = 0
        """Steps that `on_nan="skip"` skipped."""
        self.taking = False
        """True while the optimizer's own step runs."""
        self._strategy, self._observers = strategy, observers
        self.models: list[nn.Module] = []
        """The prepared models that have parameters of the optimizer."""
        self._refusal: TrainingError | None = None
        averaged = strategy.averages_gradients and strategy.world.size > 1
        late = None if strategy.gradients_are_revocable else False
        self._nan_guard = NanGuard(optimizer, on_nan, averaged=averaged, late=late)
        self._step_counts = StepCountCheck(self._name)
        self._scaled = False
        self._own_step: Callable[..., Any] = optimizer.step
        self._is_replaced = False
        """True if the optimizer was prepared again: its new stepper calls the optimizer's own step through this one."""
        before = vars(optimizer).get(_STEPPER)
        if before and before.optimizer is optimizer:
            before._is_replaced = True
        setattr(optimizer, _STEPPER, self)
        self._fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        _replace_step(optimizer, self._step)

    @property
    def is_retired(self) -> bool:
        """True if the optimizer takes no more steps."""
        return self._refusal is not None

    @property
    def must_count(self) -> bool:
        """True if replicas diverge when the optimizer takes a step that is not counted here."""
        return self.accumulator.batches > 1 or (self._strategy.world.size > 1 and not self._strategy.averages_gradients)

    def retire(self, why: str, *, hint: str) -> None:
        """Refuse all further steps. Collective.

        Args:
            why: The error message of a further step.
            hint: The hint of that error.

        Raises:
            TrainingError: The optimizer has accumulated only some batches of a step.
        """
        if self.is_retired:
            return
        if self.accumulator.is_begun:
            raise TrainingError(
                f"{self._name} is replaced or released between the batches of one step", hint="do so after a step"
            )
        self.finalize()
        self._refusal = TrainingError(why, hint=hint)
        self.models = []
        self._nan_guard.close()
        self.accumulator.close()
        self._strategy.release_optimizer(self.optimizer)

    def accumulate(self, batches: int) -> None:
        """Set the number of batches in a step. Collective.

        Args:
            batches: At least 1.

        Raises:
            TrainingError: The optimizer has accumulated only some batches of a step.
        """
        if self.is_retired:
            return
        if self.accumulator.is_begun:
            raise TrainingError("accumulate() between the batches of one step", hint="call it before the first batch")
        self.accumulator.batches = batches
        self.accumulator.update_hooks()
        self.pair(self.models)
        if self._compares_counts:
            _ = self._strategy.step_count_group  # created here, where every rank is

    def pair(self, models: Iterable[nn.Module]) -> None:
        """Find the models that the optimizer trains.

        Args:
            models: All prepared models.
        """
        if self.is_retired:
            return
        own = set(map(id, optimizer_parameters(self.optimizer)))
        self.models = [model for model in models if any(id(parameter) in own for parameter in model.parameters())]
        self._nan_guard.watch(_parameter_names(self.models))
        self.accumulator.models = {p: number for number, model in enumerate(self.models) for p in model.parameters()}
        self._strategy.pair_models(self.optimizer, self.models)
        self._strategy.set_gradient_sync(self.optimizer, self.models, self.accumulator.is_last)
        supports_scaling = self._fused or (self.must_count and not self._scaled)
        self.optimizer._step_supports_amp_scaling = supports_scaling  # type: ignore[attr-defined]

    def use_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Prepare for a step that a GradScaler takes.

        Args:
            scaler: The script's GradScaler, which scales the gradients and may skip the step.
        """
        if not self._scaled:
            self._scaled = True
            self._strategy.on_gradients_unscaled(self.optimizer)
            self.pair(self.models)
        self._strategy.on_scaled_step(self.models, scaler)

    def check_last_step(self, *, alone: bool = False) -> None:
        """Check the gradients of a step that was not waited for. Collective, unless `alone`.

        Args:
            alone: True if other ranks may not be here: the rank with the NaN is not searched.

        Raises:
            TrainingError: A gradient was NaN or infinite.
        """
        self._nan_guard.check_pending(alone=alone)

    def finalize(self) -> None:
        """Check gradients and step counts at the end of an epoch or of the job. Collective.

        Raises:
            TrainingError: A gradient was NaN or infinite, or ranks are in different batches.
        """
        self.check_last_step()
        self._step_counts.verify()
        self._send_counts()
        self._step_counts.verify()

    def close(self) -> None:
        """Report skipped steps at the end of the job."""
        if self.skipped:
            self._report_skipped()

    def take(self, update: Callable[[], Any] | None, *, by_closure: bool = False) -> Any:
        """Take a step if the present batch is the last of its group.

        Args:
            update: The optimizer's own step; None skips it.
            by_closure: True if `update` computes the gradients itself and checks them.

        Returns:
            The result of `update`; None if there was no step.
        """
        if any(map(is_in_join, self.models)):
            _refuse_join(self.models, compares_counts=self._compares_counts)
        if self.accumulator.batches > 1:
            _refuse_averaged_gradients(self.optimizer)
        result = None
        self.calls += 1
        is_last = self.accumulator.is_last
        if is_last:
            self._step_counts.verify()
            result = self._take_last(update, by_closure)
        else:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn without it
            self._notify(False)
        self.accumulator.next_batch()
        if is_last != self.accumulator.is_last:
            self._strategy.set_gradient_sync(self.optimizer, self.models, self.accumulator.is_last)
            if self.accumulator.is_last:
                self._send_counts()
        return result

    def _step(self, *arguments: Any, **options: Any) -> Any:
        if self._is_replaced:
            return self._own_step(*arguments, **options)
        if self._refusal is not None:
            raise self._refusal
        if hasattr(self.optimizer, "found_inf") and self.must_count and not self._scaled:
            raise TrainingError(
                "a GradScaler leaves out steps that the job must count", hint="scaler = job.prepare(scaler)"
            )
        closure = arguments[0] if arguments else options.get("closure")
        if closure is None:
            return self.take(lambda: self._own_step(*arguments, **options))
        if self.accumulator.batches > 1:
            raise TrainingError(
                "a closure computes its own gradients: they cannot be accumulated", hint="leave out accumulate"
            )
        options["closure"] = functools.partial(self._run_closure, closure)
        return self.take(lambda: self._own_step(*arguments[1:], **options), by_closure=True)

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        """Run a closure and check its gradients; return the mean loss of all ranks, as LBFGS searches by it."""
        loss = closure()
        self._strategy.check_gradients(self.models)
        if not self._nan_guard.check(self.taken + 1):
            raise _SkipStep
        if loss is None or not self._strategy.averages_gradients or self._strategy.world.size == 1:
            return loss
        is_number = not isinstance(loss, torch.Tensor)
        dtype = torch.float64 if is_number else None
        mean = torch.as_tensor(loss, dtype=dtype, device=self._strategy.device).detach() * self.accumulator.share
        dist.all_reduce(mean)
        return float(mean) if is_number else mean

    def _take_last(self, update: Callable[[], Any] | None, by_closure: bool) -> Any:
        if not self.taken and self._strategy.world.size > 1:
            _check_owned(self.optimizer, self.models)
        if not by_closure:
            self.accumulator.before_step()
            self._strategy.check_gradients(self.models)
        for observer in self._observers:
            observer.before_step()
        found_inf = getattr(self.optimizer, "found_inf", None)  # then the optimizer itself skips the step
        is_bad = False
        if found_inf is not None or update is None:
            self._nan_guard.forget()
        elif not by_closure and (is_bad := not self._nan_guard.check(self.taken + 1)):
            update = None
        for observer in self._observers:
            observer.on_gradients_ready(self.optimizer)

        def attempt() -> Any:
            nonlocal update, is_bad
            try:
                return update() if update else None
            except _SkipStep:
                update, is_bad = None, True

        self.taking = True
        try:
            result = self._strategy.step(self.optimizer, attempt)
        finally:
            self.taking = False
        if update is None:
            self._strategy.on_step_skipped(self.optimizer)
        self._strategy.after_step(self.models)
        self.taken += 1
        if found_inf is not None:
            self._notify(functools.partial(self._was_updated, found_inf == 0))
        else:
            self._notify(update is not None)
            if update is None:
                _clear_gradients(self.optimizer)
        self.skipped += is_bad
        if is_bad and self.skipped == 10:  # the others at the end of the job
            self._report_skipped()
        return result

    def _notify(self, updated: bool | Callable[[], bool]) -> None:
        for observer in self._observers:
            observer.after_step(self.taken, updated)

    def _was_updated(self, is_finite: torch.Tensor) -> bool:
        updated = bool(is_finite)
        if not updated:
            _clear_gradients(self.optimizer)
        return updated

    @property
    def is_reporter(self) -> bool:
        """True if this rank logs messages: rank 0 if all ranks see the same gradients, every rank otherwise."""
        return not self._strategy.averages_gradients or not self._strategy.world.rank

    def _report_skipped(self) -> None:
        if self.is_reporter:
            world = self._strategy.world
            where = "" if self._strategy.averages_gradients or world.size == 1 else f" on rank {world.rank}"
            problem = f"{self.skipped} of {self.taken} steps of {self._name} were skipped{where}"
            log.info(f"{problem}: gradients were nan or infinite", extra=PLAIN)

    @property
    def _compares_counts(self) -> bool:
        strategy = self._strategy
        return self.accumulator.batches > 1 and strategy.averages_gradients and strategy.world.size > 1

    def _send_counts(self) -> None:
        if self._compares_counts:
            self._step_counts.send(self.accumulator.passes, self.calls, self._strategy.step_count_group)


class _SkipStep(Exception):
    """A closure's gradients are NaN or infinite, and the step is skipped."""


def _refuse_join(models: Sequence[nn.Module], *, compares_counts: bool) -> None:
    """Refuse collectives that a rank in `join()` does not answer after its last batch."""
    problem = "the ranks compare their batches" if compares_counts else ""
    if any(buffer.numel() for model in models for buffer in model.buffers()):
        problem = "rank 0 sends the model's buffers to all after each step"
    if problem:
        raise TrainingError(
            f"join(): {problem}, but ranks that have read their last batch do not answer",
            hint="leave join() out and prepare the DataLoader, which gives all ranks as many batches",
            code="step-counts-differ",
        )


def _refuse_averaged_gradients(optimizer: Optimizer) -> None:
    """Refuse to accumulate gradients that the script averaged itself."""
    if any(hasattr(parameter.grad, IS_AVERAGED) for parameter in optimizer_parameters(optimizer)):
        raise TrainingError(
            "a gradient that the script sets itself (p.grad = job.all_reduce(...)) cannot be accumulated",
            hint="leave out accumulate, or add up the batches' gradients in the script, too",
        )


def _check_owned(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Refuse parameters of no prepared model: their gradients are not averaged."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad and id(parameter) not in known:
                raise TrainingError(
                    f"parameter {index} of group {number} of the {type(optimizer).__name__}, {list(parameter.shape)}, belongs to no "
                    "prepared model: replicas would diverge",
                    hint="prepare its model, and create the optimizer with the model's present parameters",
                    code="model-not-prepared",
                )


def _clear_gradients(optimizer: Optimizer) -> None:
    """Clear NaN gradients after a skipped step: a script may clear them only after real steps."""
    for parameter in optimizer_parameters(optimizer):
        clear_gradient(parameter)


def _replace_step(optimizer: Optimizer, take: Callable[..., Any]) -> None:
    """Make `optimizer.step()` call `take`."""

    @functools.wraps(optimizer.step)
    def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
        return take(*arguments, **options)

    for mark in [name for name in vars(step) if name.startswith("_torchdynamo")]:
        delattr(step, mark)  # a compiled step: torch would trace into it past this function
    # A bound method, because schedulers replace `step` by their own function. Never compiled, because it communicates.
    optimizer.step = MethodType(_disable_dynamo(step), optimizer)  # type: ignore[method-assign]


def _parameter_names(models: Sequence[nn.Module]) -> dict[torch.Tensor, str]:
    """Name all parameters, with their model's name in front if there are several models."""
    kinds = [type(unwrap_model(model)).__name__ for model in models]
    names: dict[torch.Tensor, str] = {}
    for number, (model, kind) in enumerate(zip(models, kinds, strict=True)):
        prefix = f"{kind} {kinds[:number].count(kind) + 1}" if kinds.count(kind) > 1 else kind
        for name, parameter in unwrap_model(model).named_parameters():
            names[parameter] = f"{prefix}.{name}" if len(models) > 1 else name
    return names
