"""Print the time at which the first all-reduce of this job was done, seen by rank 0.

`first_all_reduce.py mpi|env|distrib` selects the rendezvous: mpi4py, the environment, or `distrib.init()`.
"""

import os
import socket
import sys
import time


def through_distrib() -> None:
    import distrib

    with distrib.init() as job:
        job.all_reduce(1.0)
        if job.is_main:
            print("first all-reduce at", time.time(), flush=True)


def meet_by_mpi() -> None:
    """Set torch's rendezvous variables from MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = None
    if world.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = (socket.gethostbyname(socket.gethostname()), free.getsockname()[1])
    host, port = world.bcast(address)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), RANK=str(world.rank), WORLD_SIZE=str(world.size))


def through_torch() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print("first all-reduce at", time.time(), flush=True)
    dist.destroy_process_group()


if sys.argv[1] == "distrib":
    through_distrib()
else:
    if sys.argv[1] == "mpi":
        meet_by_mpi()
    through_torch()
