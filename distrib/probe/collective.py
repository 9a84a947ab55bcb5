"""All-reduce over the hosts, with the backend that training uses: NCCL on GPUs, Gloo on CPU hosts.

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md): size / seconds x 2 (n - 1) / n; what is kept are the seconds.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distrib.cluster.measured import Collective, Point
from distrib.errors import TrainingError
from distrib.probe import samples
from distrib.probe.messages import AllReduce
from distrib.training import rendezvous
from distrib.training.world import World, find_device

REPETITIONS = 20
FEW = 2
ENOUGH_SECONDS = 0.1
"""Repetitions of a size may take this long; at least `FEW` are made."""


class Ranks:
    """torch's process group of all ranks of the probe, one to a host."""

    def __init__(self, comm: Any, patience_seconds: float) -> None:
        self.world = World(
            rank=comm.rank, size=comm.size, local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), source="mpi", comm=comm,
        )  # fmt: skip
        try:
            self.device = find_device(self.world.local_rank)
            rendezvous.join(self.world, self.device, timedelta(seconds=patience_seconds))
        except TrainingError as error:
            raise RuntimeError(str(error)) from error
        self.backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
        self.hosts: list[str] = [""] * comm.size
        dist.all_gather_object(self.hosts, os.environ.get("DISTRIB_PROBE_HOST", socket.gethostname()))

    def measure(self, task: AllReduce) -> tuple[Collective, ...]:
        """All-reduces over each count of hosts; rank 0 knows the results, the others return nothing."""
        data = torch.zeros(max(task.sizes), dtype=torch.uint8, device=self.device).view(torch.float32)
        found = []
        # What all sizes take grows with the count of hosts; the largest ones matter most, so each gets a fair part.
        for position, count in enumerate(task.counts):
            group = dist.new_group(list(range(count)))
            if self.world.rank < count:
                points = self._points(data, task.sizes, group, task.seconds / (len(task.counts) - position + 0.5))
                if self.world.rank == 0:
                    task = _spent(task, points)
                    found.append(
                        Collective(
                            name="all_reduce", backend=self.backend, hosts=tuple(self.hosts[:count]), ranks=count,  # type: ignore[arg-type]
                            curve=tuple(point for point, _ in points),
                        )
                    )  # fmt: skip
            dist.barrier()
        return tuple(found)

    def _points(self, data: Any, sizes: tuple[int, ...], group: Any, seconds: float) -> list[tuple[Point, float]]:
        """A point for each size, and how long it took to get it, until `seconds` will not do for the next."""
        found: list[tuple[Point, float]] = []
        left = seconds
        last = 0.0
        for size in sizes:
            expected = last * size / sizes[max(0, sizes.index(size) - 1)]
            wanted = max(FEW, min(REPETITIONS, int(ENOUGH_SECONDS / max(expected, 1e-6))))
            if found and expected * (wanted + 1) > left:
                wanted = 1 if expected < left else 0  # the largest sizes once, if there is time
            order = torch.tensor([wanted], device=self.device)
            dist.broadcast(order, 0, group=group)
            repetitions = int(order.item())
            if not repetitions:
                break
            part = data[: size // data.element_size()]
            begun = time.perf_counter()
            taken = []
            warm = 1 if repetitions > 1 else 0
            for repetition in range(repetitions + warm):
                started = time.perf_counter()
                dist.all_reduce(part, group=group)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                if repetition >= warm:
                    taken.append(time.perf_counter() - started)
            summary = samples.summarise(taken)
            last = summary.median
            spent = time.perf_counter() - begun
            left -= spent
            found.append((Point(size, summary.median, summary.variation), spent))
        return found


def _spent(task: AllReduce, points: list[tuple[Point, float]]) -> AllReduce:
    left = max(0.5, task.seconds - sum(spent for _, spent in points))
    return AllReduce(
        number=task.number, step=task.step, counts=task.counts, sizes=task.sizes, seconds=left,
        patience_seconds=task.patience_seconds,
    )  # fmt: skip
