"""Optimizers, schedules and GradScalers begin with what rank 0's have learnt or loaded, as models do with its parameters."""

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


def hand_out(things: Sequence[Any], exchange: JobCollectives) -> None:
    """Gives each of `things` that has a state besides parameters that of rank 0, where another rank has another. Every rank.

    A script may have read a checkpoint on one rank only.
    """
    stateful = [thing for thing in things if _has_one_state(thing)]
    if not stateful:
        return
    states = [thing.state_dict() for thing in stateful]
    for thing, state, differs in zip(
        stateful, states, find_differing([content_digest(_in_short(state)) for state in states]), strict=True
    ):
        if differs:
            told = exchange.from_main(functools.partial(to_bytes, state))
            thing.load_state_dict(torch.load(io.BytesIO(told), map_location="cpu", weights_only=False))


def hand_out_settings(things: Sequence[Any], exchange: JobCollectives) -> None:
    """The same in mode async, where what an optimizer has learnt goes to the servers: its settings do not. Every rank."""
    stateful = [thing for thing in things if _has_one_state(thing)]
    if not stateful:
        return
    states = [_settings(thing) for thing in stateful]
    told = exchange.from_main(lambda: to_bytes([_travelling(state) for state in states]))
    for thing, state, of_main in zip(stateful, states, torch.load(io.BytesIO(told), weights_only=True), strict=True):
        if of_main is None:
            continue
        main = torch.load(io.BytesIO(of_main), map_location="cpu", weights_only=False)
        if content_digest(_in_short(state)) == content_digest(_in_short(main)):
            continue
        if isinstance(thing, Optimizer):
            for group, settings in zip(thing.param_groups, main, strict=True):
                group.update(settings)
        else:
            thing.load_state_dict(main)


def _travelling(state: Any) -> bytes | None:
    """None for what cannot travel, such as functions within lists: each rank keeps its own."""
    try:
        return to_bytes(state)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _settings(thing: Any) -> Any:
    """Of an optimizer's groups all but the parameters; of others the state, without functions, which cannot travel."""
    if isinstance(thing, Optimizer):
        return [{name: value for name, value in group.items() if name != "params"} for group in thing.param_groups]
    return {name: value for name, value in thing.state_dict().items() if not callable(value)}


def _has_one_state(thing: Any) -> bool:
    """Whether all ranks are to have the same; not where each has a share of it, as in ZeroRedundancyOptimizer."""
    kinds = Optimizer, LRScheduler, torch.amp.GradScaler
    return isinstance(thing, kinds) and not hasattr(thing, "consolidate_state_dict")


def _in_short(thing: Any) -> Any:
    """`thing` with a few numbers in place of each tensor."""
    if isinstance(thing, torch.Tensor):
        return [str(thing.dtype), list(thing.shape), bit_sum(thing)]
    if isinstance(thing, dict):
        return {key: _in_short(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_in_short(item) for item in thing]
    return thing
