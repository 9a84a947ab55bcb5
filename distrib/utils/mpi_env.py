"""Rank of a process, in the variables of the engine that started it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

OMPI_RANK, OMPI_SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
OMPI_LOCAL_RANK, OMPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
OPEN_MPI = (OMPI_RANK, OMPI_SIZE, OMPI_LOCAL_RANK, OMPI_LOCAL_SIZE)
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS")
"""Variables with rank, world size, local rank and local world size; for the last, Slurm lists the ranks of the host."""


class RankIdentity(NamedTuple):
    """Number of a process among those of its job and of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def rank_identity(environ: Mapping[str, str]) -> RankIdentity | None:
    """Return the rank that mpirun or srun gave this process, None if neither started it.

    Args:
        environ: Environment of the process.
    """
    for names in (OPEN_MPI, SLURM):
        if names[0] in environ:
            rank, world_size, local_rank = (int(environ.get(name, "1")) for name in names[:3])
            last = environ.get(names[3], "1")
            return RankIdentity(rank, world_size, local_rank, last.count(",") + 1 if names is SLURM else int(last))
    return None
