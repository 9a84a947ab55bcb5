"""Copies of a checkpoint on the hosts of a job that may be started again: the next start may have its main rank elsewhere.

Where each host has files of its own, a checkpoint that the main rank alone had written would be lost with its host, and one that
lies on a host which comes back is older than those of the others. Every checkpoint says when in the run it was written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

Stamp = tuple[str, int, int]
"""The name of the run, which of its starts, and which checkpoint of that start."""

NO_STAMP: Stamp = ("", 0, 0)

SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "virtiofs", "gluster", "orangefs", "pvfs", "weka",
          "panfs", "fuse.")  # fmt: skip
"""How kinds of file systems begin that several hosts have in common, as far as the kernel's name tells."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run that this start of the job belongs to, as the launcher told it."""

    name: str = ""
    restarts: int = 0
    max_restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Run:
        if "DISTRIB_JOB" not in environ:
            return cls()
        return cls(
            name=environ.get("TORCHELASTIC_RUN_ID", ""),
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            max_restarts=int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
        )

    def stamp(self, number: int) -> Stamp:
        return self.name, self.restarts, number


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Whether the file system of `path`, which need not exist, is one that hosts have in common."""
    place = Path(path).absolute()
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next((str(folder) for folder in (place, *place.parents) if str(folder) in kinds), "")
    return kinds.get(mount, "").lower().startswith(SHARED)


def stamp_of(path: str | os.PathLike[str]) -> Stamp | None:
    """When the checkpoint was written, NO_STAMP where it does not tell; None where there is no checkpoint."""
    if not Path(path).is_file():
        return None
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        run, restarts, number = saved["stamp"]
        return str(run), int(restarts), int(number)
    except Exception:  # torch raises a dozen kinds here; whoever reads the file says what is wrong with it
        return NO_STAMP


def newest(stamps: Sequence[Stamp | None], run: Run) -> int:
    """The rank that has the newest checkpoint of this run, or the first one that has any; 0 where there is none.

    `stamps` are by rank.
    """

    def order(rank: int) -> tuple[bool, bool, int, int, int]:
        stamp = stamps[rank]
        if stamp is None:
            return (False, False, 0, 0, -rank)
        own = stamp[0] == run.name
        return (True, own, *(stamp[1:] if own else (0, 0)), -rank)

    return max(range(len(stamps)), key=order)
