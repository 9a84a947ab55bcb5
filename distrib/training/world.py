"""Which rank of how many this process is: asked of MPI, of torchrun's variables, or it is alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from distrib.environment import (
    DISTRIB_DEVICE,
    DISTRIB_JOB,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    RANK,
    TORCHELASTIC_RUN_ID,
    WORLD_SIZE,
)
from distrib.errors import TrainingError
from distrib.utils.mpi_env import OMPI_LOCAL_RANK, OMPI_LOCAL_SIZE, OMPI_SIZE


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all of the job's. `local_size` is 0 where nobody has told it: `join` counts.

    `comm` is MPI's world where MPI started it, else None; `ends_mpi`: leaving MPI is this library's to do.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    comm: Any = None
    ends_mpi: bool = False

    @property
    def on_one_host(self) -> bool:
        return self.local_size == self.size


def find_world(environ: Mapping[str, str] | None = None, *, threads: bool = False) -> World:
    """The world as whoever started this process made it. `threads`: others than this library talk to MPI too, at any time.

    MPI is asked first, where an MPI runtime started the process; then the variables that torchrun and
    `distrib-launch` set (under `srun` there may be nothing else); a process with neither is alone.
    Raises TrainingError when MPI started another number of ranks than was planned, or the variables are broken.
    """
    environ = os.environ if environ is None else environ
    planned = RANK in environ and WORLD_SIZE in environ
    if planned and TORCHELASTIC_RUN_ID in environ and DISTRIB_JOB not in environ:
        return planned_world(environ)  # torchrun's, which MPI or Slurm may have started: its variables are still there
    if OMPI_SIZE in environ or "PMIX_RANK" in environ:
        try:
            comm, started = _start_mpi(threads)
        except (ImportError, RuntimeError) as error:
            if not planned:
                raise TrainingError(
                    f"MPI started this process, but mpi4py cannot use MPI: {error}",
                    hint="install mpi4py for the MPI that is used, or start the script with distrib-launch",
                ) from error
        else:
            return _from_mpi(comm, environ, started)
    if planned:
        return planned_world(environ)
    _note_others(environ)
    return World(rank=0, size=1, local_rank=0, local_size=1)


def _note_others(environ: Mapping[str, str]) -> None:
    """Says so where a launcher has started several of these and told none of the others: they may be meant to train apart."""
    for by, size, rank in (("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("mpirun", "PMI_SIZE", "PMI_RANK")):
        count = environ.get(size, "")
        if count.isdecimal() and int(count) > 1 and environ.get(rank) == "0":
            print(
                f"distrib: note: {by} started {count} processes, and each is a job of its own, of one rank: for one job of them "
                "use distrib-launch, srun --mpi=pmix, or the mpirun of Open MPI",
                file=sys.stderr,
                flush=True,
            )
            return


def planned_world(environ: Mapping[str, str] | None = None) -> World:
    """The world as the variables that torchrun and `distrib-launch` set tell it. Raises TrainingError when they are broken."""
    environ = os.environ if environ is None else environ
    rank, size = _integer(environ, RANK), _integer(environ, WORLD_SIZE)
    local_rank, local_size = _integer(environ, LOCAL_RANK, 0), _integer(environ, LOCAL_WORLD_SIZE, 0)
    if not (0 <= rank < size and 0 <= local_rank < (local_size or size) <= size):
        told = f" LOCAL_WORLD_SIZE={local_size}" if LOCAL_WORLD_SIZE in environ else ""
        raise TrainingError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank}{told} cannot all be true",
            hint="start the script with distrib-launch or torchrun",
        )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=1 if size == 1 else local_size)


def find_device(local_rank: int, environ: Mapping[str, str] | None = None) -> torch.device:
    """The device of this rank: DISTRIB_DEVICE where it is set, else GPU number `local_rank`, else the CPU.

    Makes a GPU the current one of torch. Raises TrainingError when there is no such GPU.
    """
    environ = os.environ if environ is None else environ
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = environ.get(DISTRIB_DEVICE) or (f"cuda:{local_rank}" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"DISTRIB_DEVICE={name} names no device", hint="use cpu or cuda:N") from error
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if not gpus and (why := _why_no_cuda()):
            raise TrainingError(
                f"local rank {local_rank} was given GPU {device.index}, but torch cannot use GPUs here: {why}",
                hint="nvidia-smi says which CUDA the driver bears, torch.version.cuda which this torch was built for",
            )
        if device.index >= gpus:
            raise TrainingError(
                f"local rank {local_rank} was given GPU {device.index}, but torch sees {gpus} GPU(s) on this host",
                hint="start at most one rank for each GPU, or none: distrib-launch -x CUDA_VISIBLE_DEVICES= trains on CPUs; "
                "where each rank is shown one GPU of its own, set DISTRIB_DEVICE=cuda:0",
            )
        torch.cuda.set_device(device)
    return device


def _why_no_cuda() -> str:
    """What torch says of a driver that it cannot use, or of a build without CUDA; nothing where there are just no GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # says why, where is_available() says no
    except (RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _start_mpi(threads: bool) -> tuple[Any, bool]:
    """MPI's world, and whether MPI was started here. Then leaving it is ours to do: after a failure its Finalize can hang."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    starts = not MPI.Is_initialized()
    if starts:
        MPI.Init_thread(MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SERIALIZED)
    return MPI.COMM_WORLD, starts


def _from_mpi(comm: Any, environ: Mapping[str, str], started: bool) -> World:
    # Of another MPI than that of mpirun, each process would be a world of its own.
    planned_size = _first_integer(environ, WORLD_SIZE, OMPI_SIZE, default=comm.size)
    if planned_size != comm.size:
        name = WORLD_SIZE if WORLD_SIZE in environ else OMPI_SIZE
        raise TrainingError(
            f"MPI started {comm.size} rank(s), but {planned_size} were planned ({name})",
            hint="the MPI of mpi4py must be the one whose mpirun started the job",
        )
    planned_rank = _integer(environ, RANK, comm.rank)
    if planned_rank != comm.rank:
        raise TrainingError(
            f"MPI says that this is rank {comm.rank}, the plan says {planned_rank} (RANK)",
            hint="leave RANK to whoever starts the ranks",
        )
    local_rank = _first_integer(environ, LOCAL_RANK, OMPI_LOCAL_RANK, default=-1)
    local_size = _first_integer(environ, LOCAL_WORLD_SIZE, OMPI_LOCAL_SIZE, default=-1)
    if local_rank < 0 or local_size < 0:  # started by nobody who tells, such as srun itself
        place, count = _place_on_host(comm)
        local_rank = place if local_rank < 0 else local_rank
        local_size = count if local_size < 0 else local_size
    return World(
        rank=comm.rank, size=comm.size, local_rank=local_rank, local_size=local_size, comm=comm, ends_mpi=started,
    )  # fmt: skip


def _place_on_host(comm: Any) -> tuple[int, int]:
    """Which of its host's ranks this is, and how many there are. Every rank."""
    if comm.size == 1:
        return 0, 1
    from mpi4py import MPI

    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = here.rank, here.size
    here.Free()
    return place


def _first_integer(environ: Mapping[str, str], *names: str, default: int) -> int:
    return next((_integer(environ, name) for name in names if name in environ), default)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise TrainingError(f"{name}={text!r} in the environment is not a whole number") from error
