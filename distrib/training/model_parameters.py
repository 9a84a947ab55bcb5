"""Parameters of models and optimizers, without the wrappers of DistributedDataParallel and torch.compile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """List the parameters of all groups, frozen ones too.

    Args:
        optimizer: Any optimizer. torch allows that a parameter is in it twice.

    Returns:
        Each parameter once, in the order of the groups.
    """
    # By identity, as a tensor's hash is a slow Python function.
    return [*{id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}.values()]


def trainable_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """List the parameters that are not frozen now.

    Args:
        optimizer: Any optimizer.

    Returns:
        Each parameter with `requires_grad` once, in the order of the groups.
    """
    return [parameter for parameter in optimizer_parameters(optimizer) if parameter.requires_grad]


def move_optimizer_state(optimizer: Optimizer) -> None:
    """Move the optimizer's state to the devices of its parameters.

    Args:
        optimizer: Unchanged if it has no state yet.
    """
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def has_misplaced_state(optimizer: Optimizer) -> bool:
    """Detect state that lies on another device than its parameter.

    Args:
        optimizer: An optimizer, perhaps created before its model was moved.

    Returns:
        True if a tensor of a parameter's shape is on another device than the parameter.
    """
    return any(
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.dim()
        and value.device != parameter.device
        for parameter, state in optimizer.state.items()
        if isinstance(parameter, torch.Tensor) and isinstance(state, dict)
        for value in state.values()
    )


def unwrap_model(model: Any) -> Any:
    """Return the module inside DistributedDataParallel and torch.compile.

    Args:
        model: A module. Any other object is returned as it is.

    Returns:
        The innermost module that is not a wrapper.
    """
    while isinstance(model, nn.Module):
        compiled = model._modules.get("_orig_mod")  # importing torch.compile's own class takes most of a second
        inner = model.module if isinstance(model, DistributedDataParallel) else compiled
        if inner is None:
            break
        model = inner
    return model


def exclude_model(models: Iterable[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Remove a model from a list, even if it has other wrappers there.

    Args:
        models: Prepared models.
        model: The model to remove, wrapped or not.

    Returns:
        All models with another unwrapped module.
    """
    return [one for one in models if unwrap_model(one) is not unwrap_model(model)]


def find_parameter_name(models: Sequence[nn.Module], parameter: torch.Tensor) -> str | None:
    """Find the name of a parameter.

    Args:
        models: Prepared models.
        parameter: The parameter to look for.

    Returns:
        Its name in the first of the models that has it, None if no model has it.
    """
    names = (pair for model in models for pair in unwrap_model(model).named_parameters())
    return next((str(name) for name, one in names if one is parameter), None)


def has_sharded_parameters(model: nn.Module) -> bool:
    """Detect FSDP and tensor parallelism, where a rank holds only parts of the parameters.

    Args:
        model: A module that was not prepared yet.

    Returns:
        True if a module or parameter is of FSDP's or DTensor's class.
    """
    kinds = {type(thing).__name__ for things in (model.modules(), model.parameters()) for thing in things}
    return not kinds.isdisjoint(("DTensor", "FullyShardedDataParallel"))  # by name, as importing either takes long
