"""Batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from distrib.errors import TrainingError
from distrib.training.gradient_accumulation import BatchSamples

_present = BatchSamples()


def use_batch_samples(samples: BatchSamples) -> None:
    """Use the job's batch sizes as the weight of this rank's loss, independent of the shape of a layer's input.

    Args:
        samples: Sizes of the present batch.
    """
    global _present
    _present = samples


def convert_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace batch normalization layers by layers that normalize over the samples of all ranks.

    Args:
        model: The script's model.
        device: The device of this rank: torch's SyncBatchNorm on GPUs, `SyncBatchNorm` of this module on CPUs.

    Returns:
        The model, changed in place or converted.

    Raises:
        TrainingError: A layer does more than normalize, such as timm's BatchNormAct2d.
    """
    for name, module in model.named_modules():
        is_normalization = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_normalization and not isinstance(module, nn.SyncBatchNorm) and type(module).forward not in _PLAIN:
            raise TrainingError(
                f"sync_batchnorm: {name or 'the model'} is a {type(module).__name__}, which does more than normalize",
                hint="convert the model before job.prepare by what its library has for that, such as timm's "
                "timm.layers.convert_sync_batchnorm, and leave sync_batchnorm out",
            )
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, SyncBatchNorm):
            module.__class__ = SyncBatchNorm
    return model


def replace_on_cpu(model: nn.Module) -> None:
    """Replace torch's SyncBatchNorm layers, which raise on CPUs.

    Args:
        model: The script's model, changed in place.
    """
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm and module.process_group is None:
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization over the samples of all ranks, on CPUs. Collective in training mode.

    Inputs are [samples, channels, ...]; ranks may have different numbers of samples.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch.

        Args:
            input: [samples, channels, ...].

        Returns:
            A tensor of the same shape and type.
        """
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = _Moments.apply(input)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean.detach(), variance.detach(), float(count))
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            scale = scale * self.weight
        output: torch.Tensor = (input - mean.view(shape)) * scale.view(shape)
        return (output + self.bias.view(shape) if self.affine else output).to(input.dtype)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / float(self.num_batches_tracked)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum or 0.0)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum or 0.0)


_PLAIN = (nn.modules.batchnorm._BatchNorm.forward, SyncBatchNorm.forward)


class _Moments(torch.autograd.Function):
    """Mean, variance and number of elements of each channel over all ranks."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        others = [0, *range(2, input.dim())]
        wide = input.double()
        count = torch.tensor([input.numel() / input.shape[1]], dtype=torch.float64, device=input.device)
        sums = torch.cat([wide.sum(others), wide.square().sum(others), count])
        dist.all_reduce(sums)
        channels = input.shape[1]
        total = sums[-1]
        mean = sums[:channels] / total
        variance = (sums[channels:-1] / total - mean.square()).clamp_(min=0)
        ctx.save_for_backward(input, mean, total)
        ctx.mark_non_differentiable(total)
        dtype = torch.promote_types(input.dtype, torch.float32)  # a 16-bit mean would be inaccurate
        return mean.to(dtype), variance.to(dtype), total

    @staticmethod
    @once_differentiable  # the communication in backward has no gradient
    def backward(ctx: Any, mean_gradient: Any, variance_gradient: Any, _: Any) -> torch.Tensor:
        # Every rank's loss depends on the common moments, so their gradients are added. Each loss is weighted by its samples, as in
        # `distrib.training.gradient_accumulation`, which multiplies by this rank's afterwards.
        input, mean, total = ctx.saved_tensors
        gradients = torch.cat([mean_gradient, variance_gradient]).double() * _present.own
        dist.all_reduce(gradients)
        gradients /= _present.own
        channels = input.shape[1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        of_mean = (gradients[:channels] / total).view(shape)
        of_variance = (2 * gradients[channels:] / total).view(shape)
        gradient: torch.Tensor = (of_mean + of_variance * (input - mean.view(shape))).to(input.dtype)
        return gradient
