"""Broadcast of the states of optimizers, schedulers and GradScalers from rank 0 when they are prepared."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from distrib.training.checksums import bit_sum, content_digest
from distrib.training.collectives import JobCollectives, find_differing, to_bytes


def broadcast_states(things: Sequence[Any], collectives: JobCollectives) -> None:
    """Load rank 0's state on ranks where it differs: a script may read a checkpoint on one rank only. Collective.

    Args:
        things: Prepared objects. Objects without a state are ignored.
        collectives: The job's collectives.
    """
    stateful = [thing for thing in things if _has_common_state(thing)]
    if not stateful:
        return
    states = [thing.state_dict() for thing in stateful]
    for thing, state, differs in zip(
        stateful, states, find_differing([content_digest(_summarize(state)) for state in states]), strict=True
    ):
        if differs:
            received = collectives.from_main(functools.partial(to_bytes, state))
            thing.load_state_dict(torch.load(io.BytesIO(received), map_location="cpu", weights_only=False))


def broadcast_settings(things: Sequence[Any], collectives: JobCollectives) -> None:
    """Load the main rank's settings in mode async, in which the servers hold the optimizer's state. Collective.

    Args:
        things: Prepared objects. Objects without a state are ignored.
        collectives: The job's collectives.
    """
    stateful = [thing for thing in things if _has_common_state(thing)]
    if not stateful:
        return
    states = [_settings(thing) for thing in stateful]
    received = collectives.from_main(lambda: to_bytes([_serialized(state) for state in states]))
    of_main_rank = torch.load(io.BytesIO(received), weights_only=True)
    for thing, state, of_main in zip(stateful, states, of_main_rank, strict=True):
        if of_main is None:
            continue
        main = torch.load(io.BytesIO(of_main), map_location="cpu", weights_only=False)
        if content_digest(_summarize(state)) == content_digest(_summarize(main)):
            continue
        if isinstance(thing, Optimizer):
            for group, settings in zip(thing.param_groups, main, strict=True):
                group.update(settings)
        else:
            thing.load_state_dict(main)


def _serialized(state: Any) -> bytes | None:
    """Serialize a state. Returns None if it cannot be pickled, such as functions; each rank then keeps its own."""
    try:
        return to_bytes(state)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _settings(thing: Any) -> Any:
    """Return an optimizer's groups without parameters, or another object's state without functions."""
    if isinstance(thing, Optimizer):
        return [{name: value for name, value in group.items() if name != "params"} for group in thing.param_groups]
    return {name: value for name, value in thing.state_dict().items() if not callable(value)}


def _has_common_state(thing: Any) -> bool:
    """Test if all ranks must have the same state. False if each rank holds a part, as in ZeroRedundancyOptimizer."""
    kinds = Optimizer, LRScheduler, torch.amp.GradScaler
    return isinstance(thing, kinds) and not hasattr(thing, "consolidate_state_dict")


def _summarize(thing: Any) -> Any:
    """Replace each tensor by its type, shape and bit sum."""
    if isinstance(thing, torch.Tensor):
        return [str(thing.dtype), list(thing.shape), bit_sum(thing)]
    if isinstance(thing, dict):
        return {key: _summarize(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_summarize(item) for item in thing]
    return thing
