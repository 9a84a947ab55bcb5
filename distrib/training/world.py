"""The rank of this process and the size of the job, from MPI, from torchrun's variables, or alone."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
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
from distrib.utils.log import get_logger
from distrib.utils.mpi_env import OMPI_LOCAL_RANK, OMPI_LOCAL_SIZE, OMPI_SIZE
from distrib.utils.ranges import is_whole_number

log = get_logger("training")


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among the ranks of the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this host; 0 if unknown, until `rendezvous.join` counts them."""
    comm: Any = None
    """MPI.COMM_WORLD if MPI started the process."""
    finalize_mpi: Callable[[], None] | None = None
    """MPI.Finalize if this library initialized MPI; None otherwise."""

    @property
    def on_one_host(self) -> bool:
        """True if all ranks are on this host."""
        return self.local_size == self.size


def find_world(environ: Mapping[str, str] = os.environ, *, threads: bool = False) -> World:
    """Find the world of this process: from MPI if an MPI runtime started it, else from torchrun's variables, else a single rank.

    Args:
        environ: Environment variables.
        threads: True if another library calls MPI from its own threads.

    Returns:
        The world.

    Raises:
        TrainingError: MPI started another number of ranks than planned, or a variable is not valid.
    """
    planned = RANK in environ and WORLD_SIZE in environ
    if planned and TORCHELASTIC_RUN_ID in environ and DISTRIB_JOB not in environ:
        return planned_world(environ)  # torchrun may run under MPI or Slurm, whose variables are still set
    if OMPI_SIZE in environ or "PMIX_RANK" in environ:
        try:
            mpi, is_started = _start_mpi(threads)
        except (ImportError, RuntimeError) as error:
            if not planned:
                raise TrainingError(
                    f"MPI started this process, but mpi4py cannot use MPI: {error}",
                    hint="install mpi4py for the MPI that is used, or start the script with distrib-launch",
                    code="mpi-mismatch",
                ) from error
        else:
            return _from_mpi(mpi, environ, is_started)
    if planned:
        return planned_world(environ)
    _warn_of_separate_jobs(environ)
    return World(rank=0, size=1, local_rank=0, local_size=1)


def refuse_worker_process() -> None:
    """Refuse to join from a worker process, which imports the script again if it is spawned.

    Raises:
        TrainingError: This is a worker process of a DataLoader or of multiprocessing, and the job has several ranks.
    """
    several = any(os.environ.get(size, "1") != "1" for size in (WORLD_SIZE, OMPI_SIZE))
    imports_again = getattr(multiprocessing.current_process(), "_inheriting", False)  # set by multiprocessing itself
    if several and imports_again:
        raise TrainingError(
            "a worker process of a DataLoader or of multiprocessing imports this script, and would join the job a second time",
            hint='put the script\'s work under `if __name__ == "__main__":`',
            code="script-without-main-guard",
        )


def _warn_of_separate_jobs(environ: Mapping[str, str]) -> None:
    """Warn if a launcher started several processes without connecting them."""
    for by, size, rank in (("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("mpirun", "PMI_SIZE", "PMI_RANK")):
        count = environ.get(size, "")
        if is_whole_number(count) and int(count) > 1 and environ.get(rank) == "0":
            log.warning(
                f"{by} started {count} processes, but each is a job of its own with one rank\n"
                "  for one job use distrib-launch, srun --mpi=pmix, or the mpirun of Open MPI"
            )
            return


def planned_world(environ: Mapping[str, str] = os.environ) -> World:
    """Read the world from the variables that torchrun and `distrib-launch` set.

    Args:
        environ: Environment variables.

    Returns:
        The world.

    Raises:
        TrainingError: A variable is missing, or they contradict each other.
    """
    rank, size = _integer(environ, RANK), _integer(environ, WORLD_SIZE)
    local_rank, local_size = _integer(environ, LOCAL_RANK, 0), _integer(environ, LOCAL_WORLD_SIZE, 0)
    if not (0 <= rank < size and 0 <= local_rank < (local_size or size) <= size):
        local = f" LOCAL_WORLD_SIZE={local_size}" if LOCAL_WORLD_SIZE in environ else ""
        raise TrainingError(
            f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank}{local} contradict each other",
            hint="start the script with distrib-launch or torchrun",
            code="environment-invalid",
        )
    return World(rank=rank, size=size, local_rank=local_rank, local_size=1 if size == 1 else local_size)


def find_device(local_rank: int, environ: Mapping[str, str] = os.environ) -> torch.device:
    """Find the device of this rank: DISTRIB_DEVICE if it is set, else GPU number `local_rank`, else the CPU.

    Args:
        local_rank: This rank among those of its host.
        environ: Environment variables.

    Returns:
        The device. A GPU becomes torch's current one.

    Raises:
        TrainingError: The device does not exist.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = environ.get(DISTRIB_DEVICE) or (f"cuda:{local_rank}" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(
            f"DISTRIB_DEVICE={name} names no device", hint="use cpu or cuda:N", code="environment-invalid"
        ) from error
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if not gpus and (why := _why_no_cuda()):
            raise TrainingError(
                f"local rank {local_rank} was given GPU {device.index}, but torch cannot use GPUs here: {why}",
                hint="compare the CUDA version of nvidia-smi with torch.version.cuda, for which this torch was built",
                code="gpu-unavailable",
            )
        if device.index >= gpus:
            raise TrainingError(
                f"local rank {local_rank} was given GPU {device.index}, but torch sees {gpus} GPU(s) on this host",
                hint="start at most one rank for each GPU, or none: distrib-launch -x CUDA_VISIBLE_DEVICES= trains on CPUs, and "
                "distrib-launch --share-gpus lets ranks share GPUs; "
                "if each rank sees only its own GPU, set DISTRIB_DEVICE=cuda:0",
                code="gpu-unavailable",
            )
        torch.cuda.set_device(device)
    return device


def _why_no_cuda() -> str:
    """Return torch's reason for not using CUDA; empty if the GPUs are only hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # raises the reason, which is_available() hides
    except (RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _start_mpi(threads: bool) -> tuple[Any, bool]:
    """Return mpi4py's module MPI, and True if MPI was initialized here: only then must this library finalize it."""
    import mpi4py  # optional

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI  # reads mpi4py.rc

    starts = not MPI.Is_initialized()
    if starts:
        MPI.Init_thread(MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SERIALIZED)
    return MPI, starts


def _from_mpi(mpi: Any, environ: Mapping[str, str], is_started: bool) -> World:
    comm = mpi.COMM_WORLD
    # With another MPI than mpirun's, each process would have a world of size 1.
    planned_size = _first_integer(environ, WORLD_SIZE, OMPI_SIZE, default=comm.size)
    if planned_size != comm.size:
        name = WORLD_SIZE if WORLD_SIZE in environ else OMPI_SIZE
        raise TrainingError(
            f"MPI started {comm.size} rank(s), but {planned_size} were planned ({name})",
            hint="the MPI of mpi4py must be the one whose mpirun started the job",
            code="mpi-mismatch",
        )
    planned_rank = _integer(environ, RANK, comm.rank)
    if planned_rank != comm.rank:
        raise TrainingError(
            f"MPI started this process as rank {comm.rank}, but RANK={planned_rank} was planned",
            hint="do not set RANK; the program that starts the ranks sets it",
            code="mpi-mismatch",
        )
    local_rank = _first_integer(environ, LOCAL_RANK, OMPI_LOCAL_RANK, default=-1)
    local_size = _first_integer(environ, LOCAL_WORLD_SIZE, OMPI_LOCAL_SIZE, default=-1)
    if local_rank < 0 or local_size < 0:  # a launcher without these variables, such as srun
        here = comm.Split_type(mpi.COMM_TYPE_SHARED)
        place, count = here.rank, here.size
        here.Free()
        local_rank = place if local_rank < 0 else local_rank
        local_size = count if local_size < 0 else local_size
    return World(
        rank=comm.rank, size=comm.size, local_rank=local_rank, local_size=local_size, comm=comm,
        finalize_mpi=mpi.Finalize if is_started else None,
    )  # fmt: skip


def _first_integer(environ: Mapping[str, str], *names: str, default: int) -> int:
    return next((_integer(environ, name) for name in names if name in environ), default)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise TrainingError(
            f"{name}={text!r} in the environment is not a whole number", code="environment-invalid"
        ) from error
