"""Synchronous training with DistributedDataParallel, and with communication hooks if they are faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distrib.bandwidth_model.bucketing import (
    BUCKETS,
    ddp_bucket_bytes,
    hook_bucket_bytes,
    is_averaged_by_ddp,
)
from distrib.errors import TrainingError
from distrib.strategy import FORMATS, Gradients, Strategy
from distrib.training.checks.cross_rank import list_names
from distrib.training.collectives import IS_AVERAGED, TYPES_OF_BACKENDS, broadcast_tensors, gather_objects
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
from distrib.training.strategies.ddp_module import DdpModule, frozen_after_prepare, hidden_attributes
from distrib.training.world import World
from distrib.utils.log import get_logger

log = get_logger("training")


class DdpStrategy(AllReduceStrategy):
    """Strategy of mode sync: DistributedDataParallel averages the gradients."""

    averages_in_backward = True
    unfreeze_hint = "unfreeze it before job.prepare, or prepare the model again: model = job.prepare(job.unwrap(model))"

    def __init__(self, settings: Strategy, world: World, device: torch.device) -> None:
        super().__init__(settings, world, device)
        self._trainable: dict[nn.Module, dict[str, nn.Parameter]] = {}
        """Parameters of each unwrapped model whose gradients DistributedDataParallel averages."""
        self._syncs: dict[Optimizer, tuple[list[nn.Module], bool]] = {}
        """The models of each optimizer, and True if the next backward pass averages their gradients."""

    def prepare_model(
        self, model: nn.Module, *, find_unused_parameters: bool, methods: Sequence[str] = ()
    ) -> nn.Module:
        """Wrap a model in DistributedDataParallel; see `wrap_model`. Collective.

        Args:
            model: The script's module.
            find_unused_parameters: True if a step may leave parameters without a gradient.
            methods: Names of methods that run as forward passes.

        Raises:
            TrainingError: The device or the strategy cannot average the model's gradients.
        """
        model = wrap_model(
            model,
            self.device,
            self.world.size,
            find_unused_parameters=find_unused_parameters,
            settings=self.settings,
            methods=methods,
        )
        self._record_trainable(model)
        return super().prepare_model(model, find_unused_parameters=find_unused_parameters)

    @property
    def is_steady(self) -> bool:
        return all(hook.is_steady for hook in map(find_hook, self._models) if hook)

    def adopt_ddp_model(self, model: DistributedDataParallel) -> None:
        """Register a model that the script wrapped in DistributedDataParallel itself. Collective.

        Args:
            model: The script's wrapper, which is used unchanged.
        """
        self._record_trainable(model)
        super().prepare_model(model, find_unused_parameters=model.find_unused_parameters)

    def _record_trainable(self, model: nn.Module) -> None:
        inner = unwrap_model(model)
        self._trainable[inner] = {name: p for name, p in inner.named_parameters() if p.requires_grad}
        self._update_averaged()

    def _update_averaged(self) -> None:
        self._averaged = {parameter for named in self._trainable.values() for parameter in named.values()}

    def release_model(self, model: nn.Module) -> None:
        """Drop the state of a model that no prepared optimizer trains any more.

        Args:
            model: A prepared model.
        """
        super().release_model(model)
        self._trainable.pop(unwrap_model(model), None)
        self._update_averaged()

    def release_optimizer(self, optimizer: Optimizer) -> None:
        """Drop the state of an optimizer that takes no more steps.

        Args:
            optimizer: A prepared optimizer.
        """
        self._syncs.pop(optimizer, None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reset error feedback: a checkpoint may be restored because training diverged.

        Args:
            state: Not used.
        """
        for hook in filter(None, map(find_hook, self._models)):
            hook.reset()

    def on_scaled_step(self, models: Sequence[nn.Module], scaler: torch.amp.GradScaler) -> None:
        """Record the scale of the gradients, by which error feedback is scaled too.

        Args:
            models: The models whose gradients are multiplied by the present scale.
            scaler: The script's GradScaler.
        """
        for model in models:
            if hook := find_hook(model):
                hook.scale.track(scaler)

    def pair_models(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """Disable DistributedDataParallel's broadcast of buffers: `after_step` broadcasts them.

        Args:
            optimizer: A prepared optimizer.
            models: All models of which it has parameters.
        """
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.broadcast_buffers = False  # `after_step` does so, once every rank is there

    def check_gradients(self, models: Sequence[nn.Module]) -> None:
        """Verify before a step that every gradient was averaged.

        Args:
            models: The models that the optimizer trains.

        Raises:
            TrainingError: Gradients were not averaged, or a parameter has no gradient that other ranks wait for.
        """
        for model in models:
            if not isinstance(model, DistributedDataParallel):
                continue
            inner = unwrap_model(model)
            own = [p.grad for p in self._averaged_by(model) if p.grad is not None]
            is_averaged = [hasattr(gradient, IS_AVERAGED) for gradient in own]
            repeated = isinstance(model, DdpModule) and not model.static_graph and model.has_local_gradients()
            if own and ((repeated and not all(is_averaged)) or (not _was_called(model) and not any(is_averaged))):
                raise TrainingError(
                    f"{type(inner).__name__} has gradients that were not all-reduced: no forward pass of the prepared model came before "
                    "their backward pass",
                    hint="call model(...) of model = job.prepare(model) before each backward(), declare methods that you train by "
                    "(job.prepare(model, methods=['loss'])), or average gradients set by hand: p.grad = job.all_reduce(gradient)",
                    code="gradient-not-reduced",
                )
            if model.find_unused_parameters or model.static_graph:
                continue
            if all(p.grad is None for p in model.parameters()) or (missing := _missing_gradients(model)) is None:
                continue
            # Parameters that torch's message names. If it names none, those without a gradient, as the script may have cleared some.
            unused = {
                name: p
                for name, p in self._trainable[inner].items()
                if name in missing or (p.grad is None and not missing)
            }
            if frozen := [name for name, p in unused.items() if not p.requires_grad]:
                raise frozen_after_prepare(frozen, type(inner).__name__)
            raise TrainingError(
                f"rank {self.world.rank}: {list_names(list(unused))} got no gradient in this step of {type(inner).__name__}, and other "
                "ranks wait for it",
                hint="job.prepare(..., find_unused_parameters=True), or, if no rank uses it, freeze it with "
                "requires_grad_(False) before job.prepare",
                code="gradient-missing",
            )

    def _averaged_by(self, model: nn.Module) -> set[nn.Parameter]:
        """Find the parameters of a model that no other model averages."""
        others = (unwrap_model(one) for one in self._models if one is not model and _was_called(one))
        elsewhere = {parameter for inner in others for parameter in self._trainable[inner].values()}
        return {*self._trainable[unwrap_model(model)].values()} - elsewhere

    def set_gradient_sync(self, optimizer: Optimizer, models: Sequence[nn.Module], on: bool) -> None:
        """Switch the averaging of gradients for the next backward passes.

        Args:
            optimizer: A prepared optimizer.
            models: The models that it trains.
            on: False while gradients accumulate on this rank.
        """
        self._syncs[optimizer] = list(models), on
        for model in models:
            if isinstance(model, DistributedDataParallel):
                # As DDP's no_sync() sets it. If optimizers share a model, one too many is harmless.
                model.require_backward_grad_sync = any(
                    wanted and any(one is model for one in trained) for trained, wanted in self._syncs.values()
                )


def wrap_model(
    model: nn.Module,
    device: torch.device,
    ranks: int,
    *,
    find_unused_parameters: bool,
    settings: Strategy,
    methods: Sequence[str] = (),
) -> nn.Module:
    """Wrap a model in DistributedDataParallel, with rank 0's parameters. Collective.

    Args:
        model: The script's module.
        device: The device of this rank.
        ranks: Number of ranks. With 1, the model itself is returned.
        find_unused_parameters: True if a step may leave parameters without a gradient.
        settings: The strategy, which selects a communication hook.
        methods: Names of methods that run as forward passes.

    Returns:
        A `DdpModule`; the model itself if nothing in it is trainable.

    Raises:
        TrainingError: The device or the strategy cannot average the model's gradients.
    """
    if device.type == "cuda" and settings.balance and FORMATS[settings.gradients.format].whole_buckets:
        raise TrainingError(
            f"{settings.gradients.format} waits for other ranks inside backward on GPUs, so --balance cannot measure the speed of a rank",
            hint="use other --gradients, or leave out --balance",
        )
    model = model.to(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if ranks == 1:
        return model
    if not trainable:
        broadcast_tensors([*model.parameters(), *model.buffers()])
        return model
    options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters, "methods": methods}
    is_sparse = _has_sparse_gradients(model)
    if device.type == "cuda" and is_sparse:
        raise TrainingError(
            f"{type(model).__name__} has sparse gradients, which NCCL does not average",
            hint="make its nn.Embedding or nn.EmbeddingBag with sparse=False",
        )
    by_ddp_only = is_sparse or not all(parameter.dtype.is_floating_point for parameter in trainable)
    if by_ddp_only:
        if not settings.gradients.exact:
            _note(f"{type(model).__name__} has sparse or complex gradients, all of it travels uncompressed, "
                  f"not as {settings.gradients}")  # fmt: skip
        settings = msgspec.structs.replace(settings, gradients=Gradients())
    if device.type == "cuda":
        return _wrap_on_gpu(model, device, settings, options)
    size = sum(parameter.nbytes for parameter in trainable)
    if by_ddp_only:
        wrapped = _wrap(model, settings.bucket_bytes, options)
        if is_sparse:
            wrapped.register_comm_hook(None, lambda _, bucket: average_sparse(None, bucket))
        return wrapped
    hosts = gather_objects(kernel_identity())
    if is_averaged_by_ddp(size, settings, one_rank_per_host=len(set(hosts)) == len(hosts)):
        wrapped = _wrap(model, ddp_bucket_bytes(size), options)  # takes less CPU time than a hook
        if (
            size <= BUCKETS.min_ddp_bytes
        ):  # one bucket, in the first step as later: a resumed training sums in the same order
            wrapped.reducer._push_all_rebuilt_params()
            wrapped.reducer._rebuild_buckets()
        return wrapped
    hook = HierarchicalHook(trainable, settings)
    bucket_bytes = settings.bucket_bytes
    if bucket_bytes is None and not FORMATS[settings.gradients.format].whole_buckets:
        bucket_bytes = hook_bucket_bytes(size)
    wrapped = _wrap(model, bucket_bytes, options)
    attach_hook(wrapped, hook)
    return wrapped


def _wrap_on_gpu(model: nn.Module, device: torch.device, settings: Strategy, options: dict[str, Any]) -> DdpModule:
    wrapped = _wrap(model, settings.bucket_bytes, {**options, "device_ids": [device.index]})
    compressor = create_compressor(settings.gradients)
    if compressor.torch_hook:
        wrapped.register_comm_hook(None, compressor.torch_hook)
    elif compressor.needs_whole_buckets:
        attach_hook(wrapped, GpuWholeBucketHook(compressor))
    elif not settings.gradients.exact:
        attach_hook(wrapped, GpuCompressionHook(device, compressor))
    return wrapped


def _wrap(model: nn.Module, bucket_bytes: int | None, options: dict[str, Any]) -> DdpModule:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    others = {name: t for name, t in tensors if not (t.requires_grad or t.is_complex() or t.dtype in TYPES_OF_BACKENDS)}
    if others:
        broadcast_tensors([*others.values()])
        ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *others}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    wrapped = DdpModule(model, bucket_cap_mb=bucket_bytes / 2**20 if bucket_bytes else None, **options)
    if names := hidden_attributes(wrapped):
        _note(
            f"{', '.join(names)} of the prepared {type(model).__name__} is DistributedDataParallel's; the model's own "
            f"is job.unwrap(model).{names[0]}"
        )
    return wrapped


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(
        module.sparse and module.weight.requires_grad
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    )


def _note(text: str) -> None:
    if dist.get_rank() == 0:
        log.info(f"{text}")


def _was_called(model: nn.Module) -> bool:
    """Test for a forward pass with gradients. For a script's own DistributedDataParallel, any first forward pass counts."""
    return model.was_called if isinstance(model, DdpModule) else getattr(model, "_lazy_init_ran", True)


def _missing_gradients(model: DistributedDataParallel) -> list[str] | None:
    """List the parameters without a gradient in the last backward pass: names as far as torch gives them, None if none is missing."""
    if isinstance(model, DdpModule):
        return model.missing_gradients()
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return []
    return None
