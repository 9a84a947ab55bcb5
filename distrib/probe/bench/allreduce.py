"""All-reduce benchmark with the backend of training: NCCL on GPUs, Gloo on CPU hosts.

Results are in seconds. Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): size / seconds x 2 (n - 1) / n.
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
from distrib.probe.protocol import AllReduceTask, first_line
from distrib.training import rendezvous
from distrib.training.world import World, find_device


class AllReduceBenchmark:
    """All-reduce benchmark: a torch process group over ranks of the probe.

    Args:
        comm: MPI communicator of these ranks.
        host: Name of this host.
        timeout_seconds: Timeout of the process group and its collectives.

    Raises:
        RuntimeError: A rank cannot use its GPU, or the process group did not form.
        ProbeTimeout: A rank did not join in time.
    """

    def __init__(self, comm: Any, host: str, timeout_seconds: float) -> None:
        self.world = World(
            rank=comm.rank, size=comm.size, local_rank=int(os.environ.get(LOCAL_RANK, 0)),
            local_size=int(os.environ.get(LOCAL_WORLD_SIZE, 1)), comm=comm,
        )  # fmt: skip
        self._timeout = timedelta(seconds=timeout_seconds)
        problem = ""
        try:
            self.device = find_device(self.world.local_rank)
        except Exception as error:
            problem = f"{host}, rank {comm.rank}: {first_line(error)}"
        # A rank may have died, or hang while it loads torch: a blocking collective would wait for it forever.
        deadline = time.monotonic() + timeout_seconds / 2
        wait(comm.Ibarrier().Test, deadline, "not every rank came to the all-reduce", idle=True)
        _raise_first_problem(comm.allgather(problem))
        try:
            rendezvous.join(self.world, self.device, self._timeout)
        except TrainingError as error:
            raise RuntimeError(str(error)) from error
        self.backend = "nccl" if self.device.type == "cuda" and dist.is_nccl_available() else "gloo"
        self.hosts: list[str] = [""] * comm.size
        dist.all_gather_object(self.hosts, host)

    def measure(self, task: AllReduceTask) -> tuple[Collective, ...]:
        """Measure all-reduces over the first hosts, for each count.

        Args:
            task: Counts of hosts, sizes and duration.

        Returns:
            The results on rank 0, nothing on other ranks.
        """
        data = self.allocate_data(max(task.sizes))
        found: list[Collective] = []
        names = list(dict.fromkeys(self.hosts))
        left = task.seconds
        # All hosts first, with most of the time, as jobs run on them. Each count of hosts gets at least half a second.
        for position, count in enumerate(sorted(task.host_counts, reverse=True)):
            hosts = tuple(names[:count])
            members = [rank for rank, host in enumerate(self.hosts) if host in hosts]
            group = dist.new_group(members, timeout=self._timeout)  # torch's default: 10 to 30 minutes
            if self.world.rank in members:
                share = 0.8 * left if not position else left / (len(task.host_counts) - position)
                points = self._measure_sizes(data, task.sizes, group, max(0.5, share))
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

    def allocate_data(self, size_bytes: int) -> Any:
        """Allocate the tensor to reduce.

        Args:
            size_bytes: Its size.

        Raises:
            RuntimeError: A rank has too little memory; raised on all ranks.
        """
        data, problem = None, ""
        try:
            data = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device).view(torch.float32)
        except RuntimeError as error:
            problem = f"{self.hosts[self.world.rank]}, rank {self.world.rank}: {first_line(error)}"
        problems: list[str] = [""] * self.world.size
        dist.all_gather_object(problems, problem)
        _raise_first_problem(problems)
        return data

    def _measure_sizes(
        self, data: Any, sizes: tuple[int, ...], group: Any, seconds: float
    ) -> list[tuple[Point, float]]:
        """Return a point for each size and the duration of its measurement, until too little of `seconds` is left."""
        found: list[tuple[Point, float]] = []
        left = seconds
        last = 0.0
        for position, size in enumerate(sizes):
            expected = last * size / sizes[max(0, position - 1)]
            wanted = plan_repetitions(expected, left, [larger / size for larger in sizes[position + 1 :]])
            # Waiting for a short all-reduce on a GPU takes as long as it does: ten at once, as in training and nccl-tests.
            burst = 10 if self.device.type == "cuda" and expected < 1e-3 else 1
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
            summary = statistics.summarize(taken)
            last = summary.median
            spent = time.perf_counter() - begun
            left -= spent
            found.append((Point(size, summary.median, summary.variation), spent))
        return found


def _raise_first_problem(problems: Sequence[str]) -> None:
    """Raise RuntimeError on every rank with the first rank's problem. Otherwise, other ranks would wait forever for the failed one."""
    for problem in filter(None, problems):
        raise RuntimeError(problem)


def plan_repetitions(expected_seconds: float, left_seconds: float, larger: Sequence[float]) -> int:
    """Compute the number of repetitions of a size: 0.1 s, 2 to 20 of them; 1 or 0 if the time left is too short.

    Args:
        expected_seconds: Expected duration of one repetition.
        left_seconds: Time left for this and larger sizes.
        larger: The larger sizes as multiples of this one. Time for one repetition of each is reserved.
    """
    wanted = max(2, min(20, int(0.1 / max(expected_seconds, 1e-6))))
    kept = 0.0
    for times in larger:
        if expected_seconds * (1 + kept + times) > left_seconds:
            break
        kept += times
    if expected_seconds * (1 + wanted + kept) <= left_seconds:
        return wanted
    return 1 if expected_seconds <= left_seconds else 0
