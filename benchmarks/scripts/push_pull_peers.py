"""Time the steps of `push_pull.py` on MPI or RPC: `push_pull_peers.py mpi|rpc WORKERS SERVERS MEGABYTES SECONDS`.

`mpi` is plain MPI messages, `rpc` torch.distributed.rpc. The first WORKERS ranks are workers, the next SERVERS ranks
servers. With SERVERS 0 every rank is both. Workers send the same chunks as distrib, all at once. A server adds each
gradient to its values and returns them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy
import torch

from distrib.training.parameter_server.partitioning import ParameterSpec, partition

RATE = 1e-3


def measure(step: Any, done: Any, seconds: float) -> None:
    """Take steps for `seconds` and print the time of a step; all workers agree on `done(flag)`."""
    steps, times = 0, []
    while True:
        now = time.perf_counter()
        step()
        times.append(time.perf_counter() - now)
        steps += 1
        if steps > 4 and steps % 2 == 0 and done(sum(times[2:]) > seconds):
            break
    print(json.dumps({"step_seconds": sum(times[2:]) / (steps - 2), "steps": steps - 2}), flush=True)


def by_mpi(workers: int, servers: int, sizes: list[list[int]], seconds: float) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    places = list(range(workers, workers + servers)) or list(range(workers))
    is_worker, own = world.rank < workers, places.index(world.rank) if world.rank in places else None
    gradients = [[numpy.ones(n, numpy.float32) for n in part] for part in sizes]
    fresh = [[numpy.empty(n, numpy.float32) for n in part] for part in sizes]
    values = [numpy.zeros(n, numpy.float32) for n in sizes[own]] if own is not None else []
    heard = [[numpy.empty_like(value) for value in values] for _ in range(workers)]

    def step() -> None:
        waits, about = [], []
        if own is not None:
            for worker in range(workers):
                for chunk, memory in enumerate(heard[worker]):
                    waits.append(world.Irecv(memory, worker, chunk))
                    about.append((worker, chunk))
        serving = len(waits)
        if is_worker:
            for server, place in enumerate(places):
                for chunk, memory in enumerate(fresh[server]):
                    waits.append(world.Irecv(memory, place, 1000 + chunk))
                    waits.append(world.Isend(gradients[server][chunk], place, chunk))
        left = serving
        answers = []
        while left:
            for index in MPI.Request.Waitsome(waits) or []:
                if index < serving:
                    worker, chunk = about[index]
                    values[chunk] -= RATE * heard[worker][chunk]
                    answers.append(world.Isend(values[chunk].copy(), worker, 1000 + chunk))
                    left -= 1
        MPI.Request.Waitall(waits + answers)

    measure(step, lambda flag: world.allreduce(int(flag), MPI.MAX), seconds)


VALUES: list[torch.Tensor] = []


def add(chunk: int, gradient: torch.Tensor) -> torch.Tensor:
    VALUES[chunk].add_(gradient, alpha=-RATE)
    return VALUES[chunk].clone()


def by_rpc(workers: int, servers: int, sizes: list[list[int]], seconds: float) -> None:
    import torch.distributed as dist
    from torch.distributed import rpc

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    places = list(range(workers, workers + servers)) or list(range(workers))
    if rank in places:
        VALUES.extend(torch.zeros(n) for n in sizes[places.index(rank)])
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    os.environ.setdefault("TP_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    # All virtual hosts are one machine. TensorPipe would detect that and bypass the network.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{_port(store, rank)}",
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(f"r{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    gradients = [[torch.ones(n) for n in part] for part in sizes]
    among = dist.new_group(list(range(workers)))

    def step() -> None:
        calls = [
            rpc.rpc_async(f"r{place}", add, (chunk, gradient))
            for server, place in enumerate(places)
            for chunk, gradient in enumerate(gradients[server])
        ]
        for call in calls:
            call.wait()

    def done(flag: bool) -> bool:
        told = torch.tensor(float(flag))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=among)
        return bool(told.item())

    if rank < workers:
        measure(step, done, seconds)
    rpc.shutdown()
    dist.destroy_process_group()


def _port(store: Any, rank: int) -> str:
    """Broadcast a free port of rank 0."""
    import socket

    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            store.set("rpc port", str(free.getsockname()[1]))
    told: bytes = store.get("rpc port")
    return told.decode()


def main() -> None:
    way, workers, servers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    elements = int(float(sys.argv[4]) * 1e6) // 4
    chunks = partition([ParameterSpec("all", (elements,))], servers or workers)
    sizes = [[c.elements for c in chunks if c.server == server] for server in range(servers or workers)]
    (by_mpi if way == "mpi" else by_rpc)(workers, servers, sizes, float(sys.argv[5]))


if __name__ == "__main__":
    main()
