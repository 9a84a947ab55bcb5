"""Choice of `--shard auto`: the fastest sharding that fits the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec

from distrib.bandwidth_model.prediction import Prediction
from distrib.strategy import Shard, Strategy

NAMES: dict[Shard, str] = {
    "none": "none (every rank has the whole model)",
    "grads": "grads (ZeRO-2: gradients and optimizer state over all ranks)",
    "host": "host (HSDP: everything, over the ranks of each host)",
    "all": "all (FSDP, ZeRO-3: everything, over all ranks)",
}


class ShardChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen prediction, and those of all shardings, the least sharded first."""

    chosen: Prediction
    candidates: tuple[Prediction, ...]


def choose_shard(predict: Callable[[Strategy], Prediction], strategy: Strategy) -> ShardChoice:
    """Predict every sharding and choose the fastest that fits; where none fits, the one with the smallest memory, `all`.

    Args:
        predict: Predicts the job with a strategy.
        strategy: The other settings of the job.
    """
    shards: tuple[Shard, ...] = get_args(Shard)
    found = tuple(predict(msgspec.structs.replace(strategy, shard=shard)) for shard in shards)
    fitting = [one for one in found if one.fits_memory is not False]
    chosen = max(fitting, key=lambda one: one.samples_per_second) if fitting else found[-1]
    return ShardChoice(chosen=chosen, candidates=found)


def explain_choices(choices: Sequence[ShardChoice]) -> tuple[str, ...]:
    """Describe choices: `--shard auto: host (HSDP: ...) on 2 to 16 hosts, the fastest that fits; none and grads do not fit`.

    Args:
        choices: One for each number of hosts, fewest first.

    Returns:
        A line for each run of numbers of hosts with the same choice.
    """
    lines = []
    runs = itertools.groupby(choices, key=lambda one: (one.chosen.strategy.shard, one.chosen.fits_memory))
    for (shard, fits), members in runs:
        run = list(members)
        first, last = run[0].chosen.hosts, run[-1].chosen.hosts
        hosts = f"{first} to {last} hosts" if last > first else f"{first} host{'' if first == 1 else 's'}"
        unfit = [each.strategy.shard for each in run[-1].candidates if each.fits_memory is False]
        named = " and ".join(filter(None, (", ".join(unfit[:-1]), *unfit[-1:])))
        if fits is False:
            lines.append(
                f"--shard auto: no sharding fits on {hosts}; shown is {NAMES[shard]}, which needs the least memory"
            )
            continue
        left = f"; {named} {'do' if len(unfit) > 1 else 'does'} not fit" if unfit else ""
        lines.append(f"--shard auto: {NAMES[shard]} on {hosts}, the fastest that fits{left}")
    return tuple(lines)
