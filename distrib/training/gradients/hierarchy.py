"""Which ranks share a host, and which of them speak for it on the wire."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distrib.bandwidth.buckets import Wire
from distrib.training.gradients.compression import Way
from distrib.training.gradients.engine import COUNTERS, Engine, Lane
from distrib.training.gradients.neighbours import Doorway, Neighbours, this_host

MEETING_SECONDS = 60.0
TRIES = 5
TRIAL_BYTES = 2 << 20


def hosts_of(names: Sequence[Hashable]) -> list[list[int]]:
    """The ranks of each host, in order; `names` has every rank's host."""
    hosts: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def lanes_of(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each lane, one of every host: as many lanes as the smallest host has ranks."""
    return [[host[number] for host in hosts] for number in range(min(map(len, hosts)))]


class Hierarchy:
    """The ranks of the job as hosts and lanes, for one model of `size_bytes` of gradients.

    `hosts` names every rank's host (default: found out). Every rank must make it at the same time.
    """

    def __init__(self, size_bytes: int, way: Way, *, flat: bool, hosts: Sequence[Hashable] | None = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        doorway = Doorway()
        cards: list[Any] = [None] * world
        dist.all_gather_object(cards, (rank if flat else hosts[rank] if hosts else this_host(), doorway.name))
        members = hosts_of([card[0] for card in cards])
        mine = next(host for host in members if rank in host)
        lanes = lanes_of(members)
        self.hosts, self.local_size = len(members), len(mine)
        self.lanes = len(lanes)
        peers = doorway.meet([cards[other][1] for other in mine], mine.index(rank), MEETING_SECONDS)
        alone = self.local_size == 1
        self._neighbours = Neighbours(
            peers, mine.index(rank), COUNTERS, size_bytes if alone else size_bytes * (self.local_size + 1)
        )
        # The input of each rank of the host, then the result; a rank alone on its host sums in place.
        self._result_start = 0 if alone else size_bytes * self.local_size
        parts = [
            self._neighbours.shared(size_bytes * i, size_bytes * (i + 1), torch.uint8) for i in range(self.local_size)
        ]
        result = self._neighbours.shared(self._result_start, self._result_start + size_bytes, torch.uint8)
        self.own_input = parts[mine.index(rank)]
        lane = None
        for number, ranks in enumerate(lanes):
            groups = [dist.new_group(ranks, backend="gloo") for _ in range(way.stages)] if self.hosts > 1 else []
            if rank in ranks:
                lane = Lane(number=number, count=len(lanes), hosts=self.hosts, groups=groups)
        self.lane = lane
        self.engine = Engine(self._neighbours, parts, result, lane, len(lanes), way)

    def result(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The averages of these bytes of the stream."""
        return self._neighbours.shared(self._result_start + start, self._result_start + end, dtype)

    def measure(self) -> Wire:
        """What averaging costs on these wires now, all lanes at once; the same answer on every rank."""
        times = torch.zeros(2, dtype=torch.float64)
        if self.lane is not None and self.lane.groups:
            group = self.lane.groups[0]
            small, large = torch.zeros(16), torch.zeros(TRIAL_BYTES // 4 // self.lane.count)
            dist.all_reduce(small, group=group)
            for place, tensor, tries in ((0, small, TRIES), (1, large, 1)):
                begun = time.perf_counter()
                for _ in range(tries):
                    dist.all_reduce(tensor, group=group)
                times[place] = (time.perf_counter() - begun) / tries
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        small_seconds, large_seconds = times.tolist()
        return Wire(
            overhead_seconds=small_seconds,
            seconds_per_byte=max(large_seconds - small_seconds, 0.1 * large_seconds) / TRIAL_BYTES,
        )
