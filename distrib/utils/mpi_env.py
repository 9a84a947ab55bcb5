"""Which rank a process is, as the engine that started it says. Standard library only."""

from __future__ import annotations

BY_MPIRUN = "OMPI_COMM_WORLD_RANK"

IDENTITIES = (
    (BY_MPIRUN, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_GTIDS"),
)
"""How each engine tells a process its rank, world size, local rank and local world size.

Slurm does not tell the last; it lists the ranks of the host.
"""


def identity(environ: dict[str, str]) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size that the engine gave this process."""
    for names in IDENTITIES:
        if names[0] in environ:
            rank, world_size, local_rank = (int(environ.get(name, "1")) for name in names[:3])
            told = environ.get(names[3], "1")
            return rank, world_size, local_rank, told.count(",") + 1 if names[3] == "SLURM_GTIDS" else int(told)
    raise SystemExit(
        "distrib: this process was not started by an engine that distrib knows (no rank in its environment)"
    )
