"""Memory of a training step, counted before the first step on tensors without data.

torch's FakeTensorMode runs the script's own step: operations compute shapes and types, and use neither memory nor a GPU. A dispatch
mode counts the tensors that are present. The fake tensors are on the CPU, so that every machine computes the same estimate, and
`_GpuOperations` replaces the operations that keep other tensors on CPUs than on GPUs.
torch's private MemTracker counts the same way, but torch without CUDA has no fake tensors of GPUs.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from distrib.bandwidth_model.memory_estimate import MemoryChange, MemoryEstimate, changes_that_fit
from distrib.cluster.hardware_catalog import find_gpu, gpu_hint
from distrib.errors import TrainingError

HALF_TYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
SINGLE_PRECISION = frozenset({
    F.layer_norm, F.group_norm, F.cross_entropy, F.nll_loss, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.kl_div, F.softmax, F.log_softmax, F.softplus, torch.softmax, torch.log_softmax, torch.Tensor.softmax,
    torch.Tensor.log_softmax, torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.pow, torch.Tensor.pow, torch.sum,
    torch.Tensor.sum, torch.cumsum, torch.norm, torch.cdist,
})  # fmt: skip
"""Operations that autocast of GPUs computes in 32 bits, and autocast of CPUs does not (torch's "Autocast Op Reference")."""


class _StepMemory(NamedTuple):
    """Bytes of one simulated step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


def estimate_memory(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor],
    *,
    optimizer: Optimizer | None = None,
    precision: Literal["fp32", "fp16", "bf16"] = "fp32",
    ranks: int = 1,
    gpu: str | None = None,
) -> MemoryEstimate:
    """Estimate the GPU memory of a training step before `job.prepare`. It needs no GPU and computes no values.

    Workspaces of cuDNN and cuBLAS, the CUDA context and fragmentation come on top. In modes local and async, copies of the parameters do.

    Args:
        model: The model on any device, also `meta`.
        batch: The batch of one rank: a tensor, or a tuple or dictionary with tensors.
        loss: Computes the loss by calling `model`, as the training loop does. It gets the items of the batch as arguments.
        optimizer: The optimizer of the model; None counts no state.
        precision: `fp16` or `bf16` if the loop uses autocast.
        ranks: Ranks of the job. With more than one, DistributedDataParallel's buckets are counted.
        gpu: GPU of the catalogue, such as `A100`. None: this rank's GPU, if it has one.

    Returns:
        The bytes of each part, the peak, and changes with which the step fits. `print` shows them as a table.

    Raises:
        TrainingError: The model was prepared, or an operation needs the values of tensors.

    Example:
        estimate = distrib.estimate_memory(
            model, (images, labels), lambda images, labels: cross_entropy(model(images), labels), optimizer=optimizer, gpu="A100"
        )
    """
    if isinstance(model, DistributedDataParallel):
        raise TrainingError(
            f"{type(model).__name__} was prepared", hint="estimate its memory before job.prepare, with the model itself"
        )
    half = HALF_TYPES[precision]
    samples = _samples(batch)

    def simulated(change: MemoryChange) -> MemoryEstimate:
        chosen = half or (torch.bfloat16 if change.half else None)
        smaller = _take(batch, samples, change.batch)
        found = _simulate(model, smaller, loss, optimizer, chosen)
        buckets = found.gradients if ranks > 1 else 0
        return MemoryEstimate(
            parameter_bytes=found.parameters, gradient_bytes=found.gradients, optimizer_bytes=found.optimizer,
            bucket_bytes=buckets, activation_bytes=found.activations, peak_bytes=found.peak + buckets,
        )  # fmt: skip

    estimate = simulated(MemoryChange(batch=samples))
    device, device_bytes = _device(gpu)
    estimate = msgspec.structs.replace(estimate, device=device, device_bytes=device_bytes)
    if device_bytes is None or estimate.fits:
        return estimate

    def changed_peak(change: MemoryChange) -> float:
        try:
            return simulated(change).peak_bytes
        except Exception:  # the script's own: its batch is fixed, or a BatchNorm has one value
            return math.inf

    changes = changes_that_fit(
        changed_peak,
        device_bytes,
        batch=samples,
        can_halve=half is None,
        can_checkpoint=False,
    )
    return msgspec.structs.replace(estimate, changes=changes)


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of all storages that are present."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.present = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = _allocated(storage)
            weakref.finalize(storage, self._free, key)
            self.present += self._sizes[key]
            self.peak = max(self.peak, self.present)

    def _free(self, key: int) -> None:
        self.present -= self._sizes.pop(key)


class _GpuOperations(TorchFunctionMode):
    """Operations on CPU tensors that keep the same tensors for backward as on a GPU."""

    def __init__(self, half: torch.dtype | None) -> None:
        super().__init__()
        self._half = half

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:  # GPUs keep a mask of bytes, CPUs one of numbers
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            tensor, probability, training, _ = given.arguments.values()
            return torch.ops.aten.native_dropout(tensor, probability, True)[0] if training and probability else tensor
        if (
            func is F.scaled_dot_product_attention
        ):  # the fused kernels of CPUs have no dropout, those of GPUs keep its seed only
            args, kwargs = (
                args[:4],
                {**dict(zip(("dropout_p", "is_causal"), args[4:], strict=False)), **kwargs, "dropout_p": 0.0},
            )
        if self._half and func in SINGLE_PRECISION:
            args, kwargs = tree_map(_single, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _FakeStep(nn.Module):
    """Forward and backward as a module, so that `functional_call` replaces the parameters in both."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., torch.Tensor], half: torch.dtype | None, fixed: set[int]
    ) -> None:
        super().__init__()
        self.model = model
        self._loss, self._half, self._fixed = loss, half, fixed
        self.kept: dict[int, int] = {}
        """Bytes of the storages that autograd keeps, without parameters."""

    def forward(self, *items: Any, **named: Any) -> None:
        for tensor in _tensors((items, named)):
            self._keep(tensor)
        with (
            torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor),
            torch.autocast("cpu", dtype=self._half or torch.bfloat16, enabled=self._half is not None),
        ):
            loss = self._loss(*items, **named)
        torch.autograd.backward(loss)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._fixed:
            self.kept[storage._cdata] = _allocated(storage)
        return tensor


def _simulate(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor],
    optimizer: Optimizer | None,
    half: torch.dtype | None,
) -> _StepMemory:
    """Run one step on fake tensors, with the optimizer's state of a step before."""
    named = {f"model.{name}": tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tracker = _StorageTracker()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), tracker, _GpuOperations(half):
            fakes = {name: _fake(tensor) for name, tensor in named.items()}
            parameter_bytes = tracker.present
            trained = [tensor for tensor in fakes.values() if tensor.requires_grad]
            stepper = _fake_optimizer(optimizer, {id(named[name]): fake for name, fake in fakes.items()})
            peak = 0
            if stepper:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
                type(stepper).step(stepper)
                peak = tracker.peak
            for parameter in trained:
                parameter.grad = None
            optimizer_bytes = tracker.present - parameter_bytes
            inputs = tree_map(lambda item: _fake(item) if isinstance(item, torch.Tensor) else item, batch)
            tracker.peak = tracker.present
            step = _FakeStep(model, loss, half, {tensor.untyped_storage()._cdata for tensor in fakes.values()})
            arguments, keywords = _arguments(inputs)
            torch.func.functional_call(step, fakes, arguments, keywords)
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            gradient_bytes = sum(_allocated(gradient.untyped_storage()) for gradient in gradients)
    except RuntimeError as error:  # torch's errors of fake tensors are of many kinds, all below RuntimeError
        raise TrainingError(
            f"the memory of {type(model).__name__} cannot be estimated: {str(error).partition(chr(10))[0]}",
            hint="call it before the model is moved to a GPU, with a loss that reads no values, such as by .item()",
        ) from error
    return _StepMemory(
        parameter_bytes, gradient_bytes, optimizer_bytes, sum(step.kept.values()), max(peak, tracker.peak)
    )


def _fake_optimizer(optimizer: Optimizer | None, fakes: Mapping[int, torch.Tensor]) -> Optimizer | None:
    """Copy an optimizer without state and hooks, for other parameters, with the implementation that is torch's default on GPUs."""
    if optimizer is None:
        return None
    stepper = copy.copy(optimizer)
    stepper.state = defaultdict(dict)
    stepper.param_groups = [
        {**group, "params": [fakes[id(parameter)] for parameter in group["params"] if id(parameter) in fakes]}
        for group in optimizer.param_groups
    ]
    for group in stepper.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(stepper, hooks, {})
    return stepper


def _device(gpu: str | None) -> tuple[str, int | None]:
    """Return name and bytes of a GPU of the catalogue, or of this process's GPU."""
    if gpu is not None:
        spec = find_gpu(gpu)
        if spec is None:
            raise TrainingError(f"GPU {gpu!r} is not in the catalogue", hint=gpu_hint(gpu), code="gpu-unknown")
        return spec.name, int(spec.memory_bytes.value)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return properties.name, properties.total_memory
    return "", None


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def _samples(batch: Any) -> int:
    """Count the samples of a batch: the length of its first tensor, 1 without one."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), 1)


def _take(batch: Any, samples: int, count: int) -> Any:
    """Take the first samples of a batch."""

    def part(item: Any) -> Any:
        is_batched = isinstance(item, torch.Tensor) and item.dim() and len(item) == samples
        return item[:count] if is_batched else item

    return batch if samples == count else tree_map(part, batch)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _single(item: Any) -> Any:
    return item.float() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def _allocated(storage: torch.UntypedStorage) -> int:
    """Round to the 512 bytes of a block of torch's CUDA allocator (kMinBlockSize)."""
    return -(-storage.nbytes() // 512) * 512
