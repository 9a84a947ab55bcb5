"""All-reduce over the hosts, with the backend that training uses: NCCL on GPUs, Gloo on CPU hosts.

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md): size / seconds x 2 (n - 1) / n; what is kept are the seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distrib.cluster.measurements import Collective, Point
from distrib.environment import LOCAL_RANK, LOCAL_WORLD_SIZE
from distrib.errors import TrainingError
from distrib.probe.bench import statistics
from distrib.probe.bench.polling import wait
from distrib.probe.protocol import AllReduce, first_line
from distrib.training import rendezvous
from distrib.training.world import World, find_device

REPETITIONS = 20
FEW = 2
ENOUGH_SECONDS = 0.1
"""Repetitions of a size may take this long; at least `FEW` are made."""

SHORT_SECONDS, BURST = 1e-3, 10
WHOLE_SHARE, SHORTEST_SECONDS = 0.8, 0.5


class Ranks:
    """torch's process group of all ranks of the probe."""

    def __init__(self, comm: Any, host: str, patience_seconds: float) -> None:
        self.world = World(
            rank=comm.rank, size=comm.size, local_rank=int(os.environ.get(LOCAL_RANK, 0)),
            local_size=int(os.environ.get(LOCAL_WORLD_SIZE, 1)), comm=comm,
        )  # fmt: skip
        self._timeout = timedelta(seconds=patience_seconds)
        problem = ""
        try:
            self.device = find_device(self.world.local_rank)
        except Exception as error:
            problem = f"{host}, rank {comm.rank}: {first_line(error)}"
        # One that has died, or hangs while it loads torch or finds its GPU: a collective of MPI would wait for it for good.
        deadline = time.monotonic() + patience_seconds / 2
        wait(comm.Ibarrier().Test, deadline, "not every rank has come to the all-reduce", idle=True)
        _raise_first(comm.allgather(problem))
        try:
            rendezvous.join(self.world, self.device, self._timeout)
        except TrainingError as error:
            raise RuntimeError(str(error)) from error
        self.backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
        self.hosts: list[str] = [""] * comm.size
        dist.all_gather_object(self.hosts, host)

    def measure(self, task: AllReduce) -> tuple[Collective, ...]:
        """All-reduces over the first hosts, for each count of them; rank 0 knows the results, the others return nothing."""
        data = self._memory(max(task.sizes))
        found: list[Collective] = []
        names = list(dict.fromkeys(self.hosts))
        left = task.seconds
        # The whole cluster first, and with most of the time: that is what jobs run on.
        for position, count in enumerate(sorted(task.counts, reverse=True)):
            hosts = tuple(names[:count])
            members = [rank for rank, host in enumerate(self.hosts) if host in hosts]
            group = dist.new_group(members, timeout=self._timeout)  # or it would be torch's 10 to 30 minutes
            if self.world.rank in members:
                share = WHOLE_SHARE * left if not position else left / (len(task.counts) - position)
                points = self._points(data, task.sizes, group, max(SHORTEST_SECONDS, share))
                left -= sum(spent for _, spent in points)
                if self.world.rank == 0:
                    found.append(
                        Collective(
                            name="all_reduce", backend=self.backend, hosts=hosts, ranks=len(members),  # type: ignore[arg-type]
                            gpudirect=task.gpudirect if self.backend == "nccl" else None, curve=tuple(point for point, _ in points),
                        )
                    )  # fmt: skip
            dist.barrier()
        return tuple(reversed(found))

    def _memory(self, size_bytes: int) -> Any:
        """What is added up. Where one rank has no room for it, all say so: they would wait for that one in vain."""
        data, problem = None, ""
        try:
            data = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device).view(torch.float32)
        except RuntimeError as error:
            problem = f"{self.hosts[self.world.rank]}, rank {self.world.rank}: {first_line(error)}"
        problems: list[str] = [""] * self.world.size
        dist.all_gather_object(problems, problem)
        _raise_first(problems)
        return data

    def _points(self, data: Any, sizes: tuple[int, ...], group: Any, seconds: float) -> list[tuple[Point, float]]:
        """A point for each size, and how long it took to get it, until `seconds` will not do for the next."""
        found: list[tuple[Point, float]] = []
        left = seconds
        last = 0.0
        for position, size in enumerate(sizes):
            expected = last * size / sizes[max(0, position - 1)]
            wanted = repetitions_of(expected, left, [larger / size for larger in sizes[position + 1 :]])
            # A GPU is given several short ones at once, as in training (and by nccl-tests): it takes as long to tell it of one.
            burst = BURST if self.device.type == "cuda" and expected < SHORT_SECONDS else 1
            order = torch.tensor([wanted, burst], device=self.device)
            dist.broadcast(order, 0, group=group)
            repetitions, burst = order.tolist()
            if not repetitions:
                break
            part = data[: size // data.element_size()]
            begun = time.perf_counter()
            taken = []
            warm = 1 if repetitions > 1 else 0
            for repetition in range(repetitions + warm):
                started = time.perf_counter()
                for _ in range(burst):
                    dist.all_reduce(part, group=group)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                if repetition >= warm:
                    taken.append((time.perf_counter() - started) / burst)
            summary = statistics.summarise(taken)
            last = summary.median
            spent = time.perf_counter() - begun
            left -= spent
            found.append((Point(size, summary.median, summary.variation), spent))
        return found


def _raise_first(problems: Sequence[str]) -> None:
    """Raises RuntimeError of the first of all ranks' problems, on every rank: the others would wait for that one in vain."""
    for problem in filter(None, problems):
        raise RuntimeError(problem)


def repetitions_of(expected_seconds: float, left_seconds: float, larger: Sequence[float]) -> int:
    """How often a size that is expected to take so long is measured; 0 where there is no time for it.

    `larger` are the sizes still to come, as multiples of this one: each that can be reached is to be measured once.
    """
    wanted = max(FEW, min(REPETITIONS, int(ENOUGH_SECONDS / max(expected_seconds, 1e-6))))
    kept = 0.0
    for times in larger:
        if expected_seconds * (1 + kept + times) > left_seconds:
            break
        kept += times
    if expected_seconds * (1 + wanted + kept) <= left_seconds:
        return wanted
    return 1 if expected_seconds <= left_seconds else 0
