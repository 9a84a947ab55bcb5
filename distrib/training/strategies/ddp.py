"""Synchronous training with DistributedDataParallel, with communication hooks where they are faster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distrib.bandwidth_model.bucketing import (
    MAX_HOOK_BUCKETS,
    MIN_HOOK_BUCKET_BYTES,
    ddp_bucket_bytes,
    is_averaged_by_ddp,
)
from distrib.errors import TrainingError
from distrib.strategy import FORMATS, Gradients, Strategy
from distrib.training.checks.cross_rank import several
from distrib.training.collectives import IS_AVERAGED, broadcast_tensors, gather_objects
from distrib.training.gradients.comm_hook import (
    GpuCompressionHook,
    GpuWholeBucketHook,
    HierarchicalHook,
    attach_hook,
    average_sparse,
    find_hook,
)
from distrib.training.gradients.compression import create_compressor
from distrib.training.gradients.host_shared_memory import kernel_identity
from distrib.training.model_parameters import unwrap_model
from distrib.training.strategies.all_reduce import AllReduceStrategy
from distrib.training.strategies.ddp_module import Wrapped, frozen_later, hidden
from distrib.training.world import World

MIB = 1 << 20


class DdpStrategy(AllReduceStrategy):
    """Gradients are averaged by torch's DistributedDataParallel."""

    averages_in_backward = True
    unfreeze_hint = "unfreeze it before job.prepare, or prepare the model again: model = job.prepare(job.unwrap(model))"

    def __init__(self, strategy: Strategy, world: World, device: torch.device) -> None:
        super().__init__(strategy, world, device)
        self._awaited: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """Of each unwrapped model, the parameters whose gradients DistributedDataParallel waits for."""
        self._wishes: dict[Optimizer, tuple[list[nn.Module], bool]] = {}
        """The models that an optimizer trains, and whether it wants their gradients exchanged."""

    def prepare_model(self, model: nn.Module, *, find_unused_parameters: bool) -> nn.Module:
        model = wrap_model(
            model,
            self.device,
            self.world.size,
            find_unused_parameters=find_unused_parameters,
            strategy=self.settings,
        )
        self._await(model)
        return super().prepare_model(model, find_unused_parameters=find_unused_parameters)

    @property
    def is_steady(self) -> bool:
        return all(hook.is_steady for hook in map(find_hook, self._models) if hook)

    def adopt_ddp_model(self, model: DistributedDataParallel) -> None:
        self._await(model)
        super().prepare_model(model, find_unused_parameters=model.find_unused_parameters)

    def _await(self, model: nn.Module) -> None:
        inner = unwrap_model(model)
        self._awaited[inner] = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self._see_averaged()

    def _see_averaged(self) -> None:
        self._averaged = {parameter for named in self._awaited.values() for parameter in named.values()}

    def release_model(self, model: nn.Module) -> None:
        super().release_model(model)
        self._awaited.pop(unwrap_model(model), None)
        self._see_averaged()

    def release_optimizer(self, optimizer: Optimizer) -> None:
        self._wishes.pop(optimizer, None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for hook in filter(None, map(find_hook, self._models)):
            hook.reset()  # what diverged is to leave nothing behind

    def on_scaled_step(self, models: Sequence[nn.Module], scaler: torch.amp.GradScaler) -> None:
        for model in models:
            if hook := find_hook(model):
                hook.scale.track(scaler)

    def pair_models(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.broadcast_buffers = False  # `stepped` does it, at a time at which every rank is there

    def check_gradients(self, models: Sequence[nn.Module]) -> None:
        for model in models:
            if not isinstance(model, DistributedDataParallel):
                continue
            inner = unwrap_model(model)
            own = [p.grad for p in self._averaged_by(model) if p.grad is not None]
            if own and not _was_called(model) and not any(hasattr(gradient, IS_AVERAGED) for gradient in own):
                raise TrainingError(
                    f"{type(inner).__name__} has gradients, but what job.prepare made of it was never called to train: nobody averages them",
                    hint="model = job.prepare(model), and call model(...) or its methods: neither what it was before nor "
                    "job.unwrap(model), nor a part of it by itself, such as model.encoder(...), and backward where they return; "
                    "a gradient that the script sets itself: p.grad = job.all_reduce(gradient)",
                )
            if isinstance(model, Wrapped) and not model.static_graph and not all(hasattr(g, IS_AVERAGED) for g in own):
                model.check_once()
            if model.find_unused_parameters or model.static_graph:
                continue
            if all(p.grad is None for p in model.parameters()) or (missing := _without_gradient(model)) is None:
                continue
            # Those that torch names; those without a gradient where it names none, as the script has set some to zero.
            unused = {
                name: p
                for name, p in self._awaited[inner].items()
                if name in missing or (p.grad is None and not missing)
            }
            if frozen := [name for name, p in unused.items() if not p.requires_grad]:
                raise frozen_later(frozen, type(inner).__name__)
            raise TrainingError(
                f"rank {self.world.rank}: {several(list(unused))} "
                f"got no gradient in this step of {type(inner).__name__}, and is waited for",
                hint="job.prepare(..., find_unused_parameters=True), or, if no rank uses it, freeze it with "
                "requires_grad_(False) before job.prepare",
            )

    def _averaged_by(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that no other model averages, in which they are, too."""
        others = (unwrap_model(one) for one in self._models if one is not model and _was_called(one))
        elsewhere = {parameter for inner in others for parameter in self._awaited[inner].values()}
        return {*self._awaited[unwrap_model(model)].values()} - elsewhere

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        self._wishes[optimizer] = list(models), on
        for model in models:
            if isinstance(model, DistributedDataParallel):
                # What DDP's no_sync() sets. An exchange too many is harmless; one too few, where optimizers share a model, is not.
                model.require_backward_grad_sync = any(
                    wanted and any(one is model for one in trained) for trained, wanted in self._wishes.values()
                )


def wrap_model(
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
        broadcast_tensors([*model.parameters(), *model.buffers()])
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
                plain.register_comm_hook(None, lambda _, bucket: average_sparse(None, bucket))
            return plain
    if device.type == "cuda":
        return _on_gpu(model, device, strategy, find_unused_parameters)
    size = sum(parameter.nbytes for parameter in learning)
    if is_averaged_by_ddp(size, strategy, one_rank_per_host=_each_on_a_host_of_its_own()):
        return _plain(model, find_unused_parameters, ddp_bucket_bytes(size))
    hook = HierarchicalHook(learning, strategy)
    wrapped = _wrapped(
        model,
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=_cap_mib(learning, strategy),
    )
    attach_hook(wrapped, hook)
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
    names = gather_objects(kernel_identity())
    return len(set(names)) == len(names)


def _cap_mib(learning: list[nn.Parameter], strategy: Strategy) -> float | None:
    """How large DDP makes its buckets, in MiB; None is its own default."""
    if strategy.bucket_bytes:
        return strategy.bucket_bytes / MIB
    if FORMATS[strategy.gradients.format].whole_buckets:
        return None
    return max(MIN_HOOK_BUCKET_BYTES, sum(parameter.nbytes for parameter in learning) // MAX_HOOK_BUCKETS) / MIB


def _on_gpu(
    model: nn.Module, device: torch.device, strategy: Strategy, find_unused_parameters: bool
) -> DistributedDataParallel:
    gradients = strategy.gradients
    if FORMATS[gradients.format].whole_buckets and strategy.balance:
        raise TrainingError(
            f"{gradients.format} waits on GPUs for the other ranks inside of backward: --balance could not tell who is slow",
            hint="use other --gradients, or leave out --balance",
        )
    cap = strategy.bucket_bytes / MIB if strategy.bucket_bytes else None
    wrapped = _wrapped(
        model,
        device_ids=[device.index],
        find_unused_parameters=find_unused_parameters,
        bucket_cap_mb=cap,
    )
    compressor = create_compressor(gradients)
    if compressor.torch_hook:
        wrapped.register_comm_hook(None, compressor.torch_hook)
    elif compressor.needs_whole_buckets:
        attach_hook(wrapped, GpuWholeBucketHook(compressor))
    elif not gradients.exact:
        attach_hook(wrapped, GpuCompressionHook(device, compressor))
    return wrapped


def _was_called(model: nn.Module) -> bool:
    """Whether a model of DistributedDataParallel has computed anything to train: torch sets itself up in any first forward."""
    return model._averages if isinstance(model, Wrapped) else getattr(model, "_lazy_init_ran", True)


def _without_gradient(model: DistributedDataParallel) -> list[str] | None:
    """The names of parameters to which the latest backward gave no gradient, and which are waited for, where torch tells them; None
    where it gave all. The script may have cleared some since."""
    if isinstance(model, Wrapped):
        return model.without_gradient()
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return []
    return None
