"""Which ranks share a host, and which of them speak for it on the wire."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from distrib.bandwidth_model.bucketing import AllReduceCost, even_bounds
from distrib.training.collectives import gather_objects
from distrib.training.gradients.compression import Way
from distrib.training.gradients.hierarchical_allreduce import COUNTERS, Engine, Lane, Piece
from distrib.training.gradients.host_shared_memory import Doorway, Neighbours, this_host
from distrib.training.rendezvous import timeout_of_job

MEETING_SECONDS = 60.0
TRIAL_BYTES = 4 << 20
"""What the wires are measured with: in a few pieces and in many, of which the difference is what a piece costs."""
FEW, MANY = 2, 16
COPIES = 2
"""Of every byte on either side of the wire: DDP's into its bucket and ours out of it, a sum and DDP's into the gradient."""
LEAST_OVERHEAD_SECONDS = 20e-6


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
        rank = dist.get_rank()
        doorway = Doorway()
        cards = gather_objects((rank if flat else hosts[rank] if hosts else this_host(), doorway.name))
        members = hosts_of([card[0] for card in cards])
        mine = next(host for host in members if rank in host)
        lanes = lanes_of(members)
        self._size_bytes = size_bytes
        self.hosts, self.local_size = len(members), len(mine)
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
        self.groups: list[dist.ProcessGroup] = []
        """Those of this rank's lane, to be destroyed when nothing is averaged any more."""
        for number, ranks in enumerate(lanes):
            stages = range(way.stages if self.hosts > 1 else 0)
            groups = [dist.new_group(ranks, backend="gloo", timeout=timeout_of_job()) for _ in stages]
            if rank in ranks:
                self.groups = groups
                lane = Lane(number=number, count=len(lanes), hosts=self.hosts, groups=groups)
        self.engine = Engine(self._neighbours, parts, result, lane, len(lanes), way)

    def result(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """The averages of these bytes of the stream."""
        return self._neighbours.shared(self._result_start + start, self._result_start + end, dtype)

    def measure(self) -> AllReduceCost:
        """What averaging costs on these wires now, with everything that a piece passes; the same answer on every rank.

        Called between steps: what lies in the memory of the gradients is of no use any more.
        """
        self.own_input.zero_()
        self._trial(FEW)  # to warm up
        source, copy = (torch.zeros(TRIAL_BYTES // 4, device="cpu") for _ in range(2))
        begun = time.perf_counter()
        for _ in range(COPIES):
            copy.copy_(source)
        inside = time.perf_counter() - begun
        times = torch.tensor([self._trial(FEW), self._trial(MANY), inside], dtype=torch.float64, device="cpu")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        few, many, inside = times.tolist()
        return AllReduceCost(
            overhead_seconds=max(LEAST_OVERHEAD_SECONDS, (many - few) / (MANY - FEW)),
            seconds_per_byte=max(few, 1e-9) / min(TRIAL_BYTES, self._size_bytes),
            inside_seconds_per_byte=inside / TRIAL_BYTES,
        )

    def _trial(self, pieces: int) -> float:
        """How long it takes to average so many pieces of a trial, in seconds."""
        ends = even_bounds(min(TRIAL_BYTES, self._size_bytes), -(-min(TRIAL_BYTES, self._size_bytes) // pieces))
        begun = time.perf_counter()
        for key, (start, end) in enumerate(itertools.pairwise((0, *ends))):
            self.engine.copied(Piece(key=key, start=start, end=end, dtype=torch.float32))
        self.engine.promise(self.engine.pieces, self.result(0, 4, torch.float32)).wait()
        return time.perf_counter() - begun
