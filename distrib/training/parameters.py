"""The parameters of an optimizer, of all its groups in their order, each once: torch allows that one is named twice."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All of them, also those that are frozen now."""
    return [*dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])]


def learning_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Those that are not frozen now."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
