"""Copies of a checkpoint on the hosts of a job that may be started again: the next start may have its main rank elsewhere.

Where each host has files of its own, a checkpoint that the main rank alone had written would be lost with its host, and one that
lies on a host which comes back is older than those of the others. Every checkpoint says when in the run it was written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from distrib.environment import DISTRIB_JOB, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_RUN_ID


class Stamp(NamedTuple):
    """Which checkpoint it is: the name of its run, which of the run's starts, which save of its path in that start, and Unix time."""

    run: str
    start: int
    number: int
    time: float


NO_STAMP = Stamp("", 0, 0, 0.0)

SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "virtiofs", "gluster", "orangefs", "pvfs", "weka",
          "panfs", "ocfs2", "gfs2", "dvs", "fuse")  # fmt: skip
"""How kinds of file systems begin that several hosts have in common, as far as the kernel's name tells."""
OWN = ("fuseblk", "fuse.fuse-overlayfs", "fuse.bindfs")
"""Those that begin so and are one host's."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that this start of the job belongs to, as the launcher told it."""

    name: str = ""
    restarts: int = 0
    max_restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Run:
        if DISTRIB_JOB not in environ:
            return cls()
        return cls(
            name=environ.get(TORCHELASTIC_RUN_ID, ""),
            restarts=int(environ.get(TORCHELASTIC_RESTART_COUNT, "0")),
            max_restarts=int(environ.get(TORCHELASTIC_MAX_RESTARTS, "0")),
        )

    def stamp(self, number: int) -> Stamp:
        return Stamp(self.name, self.restarts, number, time.time())


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Whether the file system of `path`, which need not exist, is one that hosts have in common."""
    place = Path(path).resolve()
    kinds = {part.mountpoint: part.fstype.lower() for part in psutil.disk_partitions(all=True)}
    kind = next((kinds[str(folder)] for folder in (place, *place.parents) if str(folder) in kinds), "")
    return kind.startswith(SHARED) and kind not in OWN


def stamp_of(path: str | os.PathLike[str]) -> Stamp | None:
    """When the checkpoint was written, NO_STAMP where it does not tell; None where there is no checkpoint."""
    if not Path(path).is_file():
        return None
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        run, start, number, when = saved["stamp"]
        return Stamp(str(run), int(start), int(number), float(when))
    except Exception:  # torch raises a dozen kinds here; whoever reads the file says what is wrong with it
        return NO_STAMP


def newest(stamps: Sequence[Stamp | None], run: Run) -> int:
    """The rank whose checkpoint is the one to go on from, the first of several; 0 where there is none. `stamps` are by rank.

    It is the newest of this run; where there is none of it, the newest of the run that rank 0's is from, or where rank 0
    has none, of the run that wrote last.
    """
    there = {rank: stamp for rank, stamp in enumerate(stamps) if stamp is not None}
    if not there:
        return 0
    if any(stamp.run == run.name for stamp in there.values()):
        wanted = run.name
    else:
        wanted = (there.get(0) or max(there.values(), key=lambda stamp: stamp.time)).run
    return max(
        (rank for rank, stamp in there.items() if stamp.run == wanted),
        key=lambda rank: (there[rank].start, there[rank].number, -rank),
    )


def later(stamps: Sequence[Stamp | None], chosen: int) -> tuple[int, Stamp, Stamp] | None:
    """Where another run than that of the checkpoint of rank `chosen` has written one later: whose rank's it is, the stamp of the chosen
    one, and its own. Of several the last."""
    own = stamps[chosen]
    if own is None or own == NO_STAMP:
        return None
    others = [(rank, stamp) for rank, stamp in enumerate(stamps) if stamp and stamp.run != own.run]
    rank, newest_of_others = max(others, key=lambda one: one[1].time, default=(0, own))
    return (rank, own, newest_of_others) if newest_of_others.time > own.time else None
