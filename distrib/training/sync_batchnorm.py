"""Batch normalization over the samples of all ranks, on GPUs."""

from __future__ import annotations

from torch import nn

from distrib.errors import TrainingError


def convert_batchnorm(model: nn.Module) -> nn.Module:
    """Replace batch normalization layers by torch's SyncBatchNorm, which works on GPUs only.

    Args:
        model: The script's model.

    Returns:
        The converted model.

    Raises:
        TrainingError: A layer does more than normalize, such as timm's BatchNormAct2d.
    """
    batchnorm = nn.modules.batchnorm._BatchNorm
    for name, module in model.named_modules():
        is_converted = isinstance(module, nn.SyncBatchNorm)
        if isinstance(module, batchnorm) and not is_converted and type(module).forward is not batchnorm.forward:
            raise TrainingError(
                f"sync_batchnorm: {name or 'the model'} is a {type(module).__name__}, which does more than normalize",
                hint="convert the model before job.prepare with its library's function, such as timm's "
                "timm.layers.convert_sync_batchnorm, and leave sync_batchnorm out",
            )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]
