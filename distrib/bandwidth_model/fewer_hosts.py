"""Whether some of the hosts would train faster than all of them: where a link is narrow, or one kind of host slow."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import predict_step
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.strategy import Strategy

FASTER = 1.1
"""So many times as many samples per second are worth telling of."""


class Fewer(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a job's hosts, in its order, and what they would reach by themselves."""

    hosts: tuple[str, ...]
    prediction: Prediction


def fewer_hosts(
    topology: Topology,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str],
    ranks_per_host: int | Sequence[int] = 1,
    than: Prediction,
) -> Fewer | None:
    """Of the first 1, 2, 4, ... hosts, and of each kind one and all, those that train clearly more samples per second `than` all
    were predicted to; None where none do. The other arguments are those of `predict_step`.
    """
    each = [ranks_per_host] * len(hosts) if isinstance(ranks_per_host, int) else list(ranks_per_host)
    kinds: dict[tuple[int, int], list[int]] = {}
    for place, host in enumerate(hosts):
        kinds.setdefault((id(topology.group_of(host)), each[place]), []).append(place)
    firsts = [range(1 << power) for power in range(len(hosts).bit_length())]
    chosen = {tuple(places) for members in kinds.values() for places in (members[:1], members)} | set(
        map(tuple, firsts)
    )
    found = []
    for places in sorted(
        (places for places in chosen if len(places) < than.hosts), key=lambda places: (len(places), places)
    ):
        names = tuple(hosts[place] for place in places)
        try:
            prediction = predict_step(
                topology, workload, strategy, hosts=names, ranks_per_host=[each[place] for place in places]
            )
        except ConfigError:  # nothing is known of a link that these would use, and all together do not
            continue
        found.append(Fewer(hosts=names, prediction=prediction))
    best = max(found, key=lambda few: few.prediction.samples_per_second, default=None)
    return best if best and best.prediction.samples_per_second > FASTER * than.samples_per_second else None
