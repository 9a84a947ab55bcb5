"""Synchronous training: every rank holds the whole model, and gradients are averaged in each step."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from distrib.bandwidth_model.bucket_bounds import FINE_BYTES, FINE_PARTS, left_to_ddp
from distrib.bandwidth_model.bucketing import plain_bytes
from distrib.errors import TrainingError
from distrib.strategy import Gradients, Strategy
from distrib.training.checks.cross_rank import gathered
from distrib.training.flat import broadcast
from distrib.training.gradients import sparse
from distrib.training.gradients.comm_hook import Averaging, GpuAveraging, GpuLowRank, attach
from distrib.training.gradients.host_shared_memory import this_host
from distrib.training.strategies.ddp_module import Wrapped, hidden

MIB = 1 << 20


def synchronous(
    model: nn.Module,
    device: torch.device,
    ranks: int,
    *,
    find_unused_parameters: bool,
    strategy: Strategy,
) -> nn.Module:
    """`model` on `device`, in torch's DistributedDataParallel where there are other ranks to agree with.

    Every rank begins with the parameters of rank 0, also of a model that learns nothing. How gradients are averaged
    is the strategy's: on GPUs NCCL does it alone unless fewer bytes are asked for.
    """
    model = model.to(device)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if ranks == 1:
        return model
    if not learning:
        broadcast([*model.parameters(), *model.buffers()])
        return model
    if device.type == "cuda" and _has_sparse_gradients(model):
        raise TrainingError(
            f"{type(model).__name__} has sparse gradients, which NCCL does not average",
            hint="make its nn.Embedding or nn.EmbeddingBag with sparse=False",
        )
    if _only_ddp_can(model, learning):
        if not strategy.gradients.exact:
            _note(f"{type(model).__name__} has sparse or complex gradients, all of it travels uncompressed, "
                  f"not as {strategy.gradients}")  # fmt: skip
        strategy = msgspec.structs.replace(strategy, gradients=Gradients())
        if device.type == "cpu":
            plain = _plain(model, find_unused_parameters, strategy.bucket_bytes)
            if _has_sparse_gradients(model):
                plain.register_comm_hook(None, lambda _, bucket: sparse.averaged(bucket))
            return plain
    if device.type == "cuda":
        return _on_gpu(model, device, strategy, find_unused_parameters)
    size = sum(parameter.nbytes for parameter in learning)
    if left_to_ddp(size, strategy, alone=_each_on_a_host_of_its_own()):
        return _plain(model, find_unused_parameters, plain_bytes(size))
    averaging = Averaging(learning, strategy)
    wrapped = _wrapped(
        model,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=_cap_mib(learning, strategy),
    )
    attach(wrapped, averaging)
    return wrapped


def _wrapped(model: nn.Module, **options: Any) -> Wrapped:
    wrapped = Wrapped(model, **options)
    if names := hidden(wrapped):
        _note(
            f"{', '.join(names)} of what job.prepare made of a {type(model).__name__} is DistributedDataParallel's; the model's own "
            f"is job.unwrap(model).{names[0]}"
        )
    return wrapped


def _only_ddp_can(model: nn.Module, learning: list[nn.Parameter]) -> bool:
    return _has_sparse_gradients(model) or not all(parameter.dtype.is_floating_point for parameter in learning)


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(
        module.sparse and module.weight.requires_grad
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    )


def _note(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"distrib: note: {text}", file=sys.stderr, flush=True)


def _plain(model: nn.Module, find_unused_parameters: bool, bucket_bytes: int | None) -> DistributedDataParallel:
    """DDP itself. With one rank per host it needs but the right buckets, and costs busy processors less than a hook."""
    cap = bucket_bytes / MIB if bucket_bytes else None
    return _wrapped(model, find_unused_parameters=find_unused_parameters, bucket_cap_mb=cap)


def _each_on_a_host_of_its_own() -> bool:
    """Asked by all ranks at once."""
    names = gathered(this_host())
    return len(set(names)) == len(names)


def _cap_mib(learning: list[nn.Parameter], strategy: Strategy) -> float | None:
    """How large DDP makes its buckets, in MiB; None is its own default."""
    if strategy.bucket_bytes:
        return strategy.bucket_bytes / MIB
    if strategy.gradients.format == "powersgd":
        return None
    return max(FINE_BYTES, sum(parameter.nbytes for parameter in learning) // FINE_PARTS) / MIB


def _on_gpu(
    model: nn.Module, device: torch.device, strategy: Strategy, find_unused_parameters: bool
) -> DistributedDataParallel:
    gradients = strategy.gradients
    if gradients.format == "powersgd" and strategy.balance:
        raise TrainingError(
            "powersgd waits on GPUs for the other ranks inside of backward: --balance could not tell who is slow",
            hint="use other --gradients, or leave out --balance",
        )
    cap = strategy.bucket_bytes / MIB if strategy.bucket_bytes else None
    wrapped = _wrapped(
        model,
        device_ids=[device.index],
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=cap,
    )
    if gradients.format == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif gradients.format == "bf16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif gradients.format == "powersgd":
        attach(wrapped, GpuLowRank(gradients.rank or 1))
    elif not gradients.exact:
        attach(wrapped, GpuAveraging(device, strategy))
    return wrapped


def unwrapped(thing: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile's wrapper; anything else as it is."""
    while isinstance(thing, nn.Module):
        compiled = thing._modules.get("_orig_mod")  # to import torch.compile's own class takes most of a second
        inner = thing.module if isinstance(thing, DistributedDataParallel) else compiled
        if inner is None:
            break
        thing = inner
    return thing


def without(models: Iterable[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Those of `models` that are not `model`, in whatever it was wrapped before or since."""
    return [one for one in models if unwrapped(one) is not unwrapped(model)]


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Moves the optimizer's state, where it has some already, to the devices of its parameters."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def is_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what the optimizer keeps of a parameter's numbers lies on another device than the parameter."""
    kept = [
        (key, state)
        for key, state in optimizer.state.items()
        if isinstance(key, torch.Tensor) and isinstance(state, dict)
    ]
    return any(
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.dim()
        and value.device != parameter.device
        for parameter, state in kept
        for value in state.values()
    )
