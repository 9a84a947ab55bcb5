"""Choice of `--shard auto`: the fastest sharding that fits the memory."""

from __future__ import annotations

from collections.abc import Callable
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

    @property
    def reason(self) -> str:
        """The choice in words: `--shard auto: host (HSDP: ...) on 4 hosts, the fastest that fits; none does not fit`."""
        unfit = [one.strategy.shard for one in self.candidates if one.fits_memory is False]
        shard = self.chosen.strategy.shard
        why = "the fastest that fits" if self.chosen.fits_memory is not False else "the smallest, but none of them fits"
        others = [name for name in unfit if name != shard]
        left = f"; {' and '.join(others)} {'do' if len(others) > 1 else 'does'} not fit" if others else ""
        hosts = f"{self.chosen.hosts} host{'' if self.chosen.hosts == 1 else 's'}"
        return f"--shard auto: {NAMES[shard]} on {hosts}, {why}{left if self.chosen.fits_memory is not False else ''}"


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
