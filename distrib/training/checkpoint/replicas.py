"""Replicas of a checkpoint on the hosts of a restartable job, and the choice of the newest.

If each host has its own file system, a checkpoint of the main rank alone is lost with its host. A replacement host may have an
older one. So every checkpoint has a stamp with its run, start and number. `job.save(keep=N)` leaves older ones in the same folder.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from distrib.environment import DISTRIB_JOB, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_RUN_ID


class Stamp(NamedTuple):
    """The identity of a checkpoint: name of the run, number of its start, number of the save in that start, Unix time."""

    run: str
    start: int
    number: int
    time: float


NO_STAMP = Stamp("", 0, 0, 0.0)

SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "9p", "virtiofs", "gluster", "orangefs", "pvfs", "weka",
          "panfs", "ocfs2", "gfs2", "dvs", "fuse")  # fmt: skip
"""Prefixes of the kernel's names of file systems that hosts share."""
OWN = ("fuseblk", "fuse.fuse-overlayfs", "fuse.bindfs")
"""Names with such a prefix that are local to a host."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run of this start of the job, from the launcher's environment."""

    name: str = ""
    restarts: int = 0
    max_restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Run:
        """Read the run from the launcher's environment variables.

        Args:
            environ: The environment of this rank.

        Returns:
            The run; without name if no launcher started this rank.
        """
        if DISTRIB_JOB not in environ:
            return cls()
        return cls(
            name=environ.get(TORCHELASTIC_RUN_ID, ""),
            restarts=int(environ.get(TORCHELASTIC_RESTART_COUNT, "0")),
            max_restarts=int(environ.get(TORCHELASTIC_MAX_RESTARTS, "0")),
        )

    def stamp(self, number: int) -> Stamp:
        """Make the stamp of a checkpoint that is written now.

        Args:
            number: Number of the save in this start.

        Returns:
            The stamp.
        """
        return Stamp(self.name, self.restarts, number, time.time())


def is_shared(path: str | os.PathLike[str]) -> bool:
    """Test if hosts share the file system of a path.

    Args:
        path: A path that need not exist.

    Returns:
        True for network file systems.
    """
    place = Path(path).resolve()
    kinds = {part.mountpoint: part.fstype.lower() for part in psutil.disk_partitions(all=True)}
    kind = next((kinds[str(folder)] for folder in (place, *place.parents) if str(folder) in kinds), "")
    return kind.startswith(SHARED) and kind not in OWN


def load_mapped(path: str | os.PathLike[str]) -> Any:
    """Load a checkpoint without reading its tensors, which are mapped.

    Args:
        path: The file. It is opened here, as torch refuses names that are not UTF-8.

    Returns:
        The content.
    """
    with Path(path).open("rb") as file:
        return torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu", mmap=True, weights_only=True)


def stamp_of(path: str | os.PathLike[str]) -> Stamp | None:
    """Read the stamp of a checkpoint.

    Args:
        path: The file.

    Returns:
        The stamp; NO_STAMP if the file has none, None if the file does not exist.
    """
    try:
        run, start, number, when = load_mapped(path)["stamp"]
        return Stamp(str(run), int(start), int(number), float(when))
    except FileNotFoundError:
        return None
    except Exception:  # torch raises a dozen types here; the error message comes when the file is restored
        return NO_STAMP


class Copy(NamedTuple):
    """A checkpoint that a rank can read. Copies with equal `identity` (inode, size, time) are one file, seen by several ranks."""

    path: str
    stamp: Stamp
    identity: tuple[int, int, int]


def copies_of(path: Path) -> list[Copy]:
    """Find a checkpoint and the older ones that `job.save(keep=N)` left.

    Args:
        path: The newest file.

    Returns:
        The existing ones by age, the newest first.
    """
    numbers: list[int] = []
    with contextlib.suppress(OSError):
        prefix = f"{path.name}."
        ends = (name.removeprefix(prefix) for name in os.listdir(path.parent) if name.startswith(prefix))
        numbers = sorted(int(end) for end in ends if end.isascii() and end.isdecimal())
    copies = []
    for file in [path, *(older_name(path, number) for number in numbers)]:
        identity = 0, 0, 0
        with contextlib.suppress(OSError):  # reading the file raises it again
            status = file.stat()
            identity = status.st_ino, status.st_size, status.st_mtime_ns
        if stamp := stamp_of(file):
            copies.append(Copy(str(file), stamp, identity))
    return copies


def older_name(path: Path, number: int) -> Path:
    """Name an older checkpoint.

    Args:
        path: The newest one.
        number: Number of saves since then, from 1.

    Returns:
        The file.
    """
    return path.with_name(f"{path.name}.{number}")


def newest(stamps: Sequence[Stamp | None], run: Run) -> int:
    """Choose the checkpoint to restore: the newest of this run, else of rank 0's run, else of the run that wrote last.

    Args:
        stamps: Stamps by rank; None for a rank without checkpoint.
        run: The present run.

    Returns:
        The first rank that has it; 0 if no rank has one.
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
    """Find a later checkpoint of another run than the chosen one's.

    Args:
        stamps: Stamps by rank.
        chosen: The rank whose checkpoint is restored.

    Returns:
        The rank with the latest one, the chosen stamp and its stamp; None if there is none.
    """
    own = stamps[chosen]
    if own is None or own == NO_STAMP:
        return None
    others = [(rank, stamp) for rank, stamp in enumerate(stamps) if stamp and stamp.run != own.run]
    rank, newest_of_others = max(others, key=lambda one: one[1].time, default=(0, own))
    return (rank, own, newest_of_others) if newest_of_others.time > own.time else None
