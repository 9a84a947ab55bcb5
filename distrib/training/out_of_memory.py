"""Memory of a rank's GPU: a warning in `job.prepare` if a step cannot fit, and a table in torch's out-of-memory error."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from distrib.bandwidth_model.memory_estimate import memory_table
from distrib.training.model_parameters import trainable_parameters, unwrap_model
from distrib.training.step_observer import StepObserver
from distrib.training.training_state import TrainingState
from distrib.units import size_text
from distrib.utils.log import get_logger

log = get_logger("training")


class MemoryChecks(StepObserver):
    """Comparison of prepared models and optimizers with the memory of this rank's GPU."""

    def __init__(self, state: TrainingState) -> None:
        """Add a table to out-of-memory errors that end the script.

        Args:
            state: State of the training, with the prepared models and optimizers.
        """
        self._state, self._device = state, state.strategy.device
        self._hook, self._own_hook = sys.excepthook, self._on_exception  # a bound method is a new object each time
        sys.excepthook = self._own_hook

    def on_close(self) -> None:
        """Leave out-of-memory errors after the job as they are."""
        if sys.excepthook == self._own_hook:
            sys.excepthook = self._hook

    def check_prepared(self) -> None:
        """Warn if the GPU certainly has too little free memory for gradients and optimizer state; activations come on top."""
        if self._device.type != "cuda":
            return
        reserved = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free = torch.cuda.mem_get_info(self._device)[0] + reserved
        missing = missing_bytes(self._state.models, [stepper.optimizer for stepper in self._state.steppers])
        if missing > free:
            log.warning(
                f"rank {self._state.strategy.world.rank}: {self._device} has {size_text(free)} free, gradients and optimizer state take "
                f"{size_text(missing)} more: the first step will run out of memory; shard the model, as FSDP and DeepSpeed do"
            )

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            with contextlib.suppress(Exception):  # the traceback must be printed in any case
                error.args = (f"{error}\n{self.table()}",)
        self._hook(kind, error, traceback)

    def table(self) -> str:
        """Format the memory of this rank as a table. The peak counts as present."""
        models = [unwrap_model(model) for model in self._state.models]
        tensors = [[*model.parameters(), *model.buffers()] for model in models]
        gradients = [
            parameter.grad for model in models for parameter in model.parameters() if parameter.grad is not None
        ]
        is_averaged_by_ddp = [one is not inner for one, inner in zip(self._state.models, models, strict=True)]
        parts = {
            "parameters": sum(tensor.nbytes for each in tensors for tensor in each),
            "gradients": sum(gradient.nbytes for gradient in gradients),
            "optimizer state": sum(state_bytes(stepper.optimizer) for stepper in self._state.steppers),
            "buckets": sum(
                parameter.nbytes
                for model, has_buckets in zip(models, is_averaged_by_ddp, strict=True)
                for parameter in model.parameters()
                if has_buckets and parameter.requires_grad
            ),
        }
        verdict = ""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            parts["activations"] = max(0, peak - sum(parts.values()))
            total = torch.cuda.get_device_properties(self._device).total_memory
            verdict = (
                f"{size_text(peak)} at the peak, of {size_text(total)} ({torch.cuda.get_device_name(self._device)})"
            )
        advice = (
            "smaller batches with --accumulate, torch.autocast or torch.utils.checkpoint lower the activations; "
            "distrib.estimate_memory() computes their effect"
        )
        return memory_table(parts, verdict, advice)


def state_bytes(optimizer: Optimizer) -> int:
    """Count the bytes of an optimizer's state, without scalars.

    Args:
        optimizer: Any optimizer.
    """
    states = (state.values() for state in optimizer.state.values() if isinstance(state, dict))
    return sum(value.nbytes for values in states for value in values if isinstance(value, torch.Tensor) and value.dim())


def missing_bytes(models: list[nn.Module], optimizers: list[Optimizer]) -> int:
    """Count the bytes that gradients and optimizer state certainly still need.

    Args:
        models: Prepared models.
        optimizers: Their optimizers. The state of other classes than torch's SGD, Adam and AdamW counts as nothing.
    """
    parameters = {parameter for model in models for parameter in model.parameters() if parameter.requires_grad}
    missing = sum(parameter.nbytes for parameter in parameters if parameter.grad is None)
    for optimizer in optimizers:
        moments = 2 if isinstance(optimizer, (Adam, AdamW)) else 0
        if isinstance(optimizer, SGD):
            moments = int(any(group["momentum"] for group in optimizer.param_groups))
        if not optimizer.state:
            missing += moments * sum(parameter.nbytes for parameter in trainable_parameters(optimizer))
    return missing
