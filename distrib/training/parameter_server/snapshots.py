"""Snapshots of a server's part on its host's disk: what a server that is started again goes on from, if it has no replica.

A snapshot is of one moment: nothing is applied while its tensors are copied, and it is written while the workers go on. What
the main worker has read for all never changes, and has files of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from distrib.environment import DISTRIB_RUN_DIR
from distrib.training.parameter_server.server_table import Description, Table, raw
from distrib.training.parameter_server.shard_service import Part

EVERY_SECONDS = 10.0
PART_OF_TIME = 0.2
"""For no more of the time is one being written: on a file system that hosts share it takes long, and takes others' time."""
REMOVE_SECONDS = 2.0
"""How long it is tried to remove files: on NFS they stay until their writer closes them."""


class Snapshots:
    """The last snapshot of server `number` of this job, in a folder of the server's own."""

    def __init__(self, number: int) -> None:
        run = Path(os.environ.get(DISTRIB_RUN_DIR) or "/nowhere")
        name = f"server-{os.environ.get('DISTRIB_JOB', os.getpid())}-{number}"
        self.folder = (
            run / name if run.is_dir() and os.access(run, os.W_OK) else Path(tempfile.gettempdir()) / f"distrib-{name}"
        )
        self.path = self.folder / "snapshot.pt"
        with contextlib.suppress(OSError):  # a full disk, or it is there from this server's life before
            self.folder.mkdir(mode=0o700)
        self._writer: threading.Thread | None = None
        self._next = time.monotonic() + EVERY_SECONDS
        self._seen: list[int] = []
        self._keeper: threading.Thread | None = None
        self._keep_at = 0.0
        self._kept: set[int] = set()

    @property
    def usable(self) -> bool:
        """Whether nobody else can have written there: where temporary files lie, anybody may make a folder of that name."""
        try:
            there = self.folder.lstat()
        except OSError:
            return False
        own = (there.st_uid, there.st_mode & 0o777) == (os.geteuid(), 0o700)
        return stat.S_ISDIR(there.st_mode) and (own or self.folder.parent != Path(tempfile.gettempdir()))

    def keep(self, part: Part, now: float) -> None:
        """Writes what main has read for all since."""
        new = {number: pieces for number, pieces in part.kept.items() if number not in self._kept}
        if new and now >= self._keep_at and self.usable and not (self._keeper and self._keeper.is_alive()):
            self._keeper = threading.Thread(target=self._write_kept, args=(new,), daemon=True)
            self._keeper.start()

    def _write_kept(self, new: dict[int, list[Any]]) -> None:
        for number, pieces in new.items():
            lengths = msgspec.json.encode([memoryview(piece).nbytes for piece in pieces])
            if self._write(f"kept-{number}", functools.partial(_write_all, [lengths + b"\n", *pieces])):
                self._kept.add(number)
            else:
                self._keep_at = time.monotonic() + EVERY_SECONDS

    def take(self, part: Part, now: float) -> None:
        """Takes one, when it is time and anything was updated since the last."""
        entries = [table.shard.index for table in part.tables.values()]
        if now < self._next or entries == self._seen or (self._writer and self._writer.is_alive()) or not self.usable:
            return
        self._next, self._seen = now + EVERY_SECONDS, entries
        tables = [_saved(table) for table in part.tables.values() if table.is_set]
        content = {"time": time.time(), "tables": tables, "over": sorted(part.over)}
        self._writer = threading.Thread(target=self._write_parts, args=(content,), daemon=True)
        self._writer.start()

    def _write_parts(self, content: dict[str, Any]) -> None:
        begun = time.monotonic()
        self._write(self.path.name, functools.partial(torch.save, content))
        self._next = max(self._next, begun + (time.monotonic() - begun) / PART_OF_TIME)

    def _write(self, name: str, fill: Callable[[IO[bytes]], object]) -> bool:
        partial = self.folder / f"{name}.partial"
        try:
            with partial.open("wb") as file:
                fill(file)
            partial.replace(self.folder / name)
        except (OSError, RuntimeError):  # the disk is full, as torch says by a RuntimeError; or the folder is gone
            with contextlib.suppress(OSError):
                partial.unlink()  # or the disk would stay full
            return False  # the one before still counts
        return True

    def restore(self, part: Part) -> float | None:
        """Gives `part` what the last snapshot holds, and says how many seconds old it is; None where there is none."""
        if not self.usable:
            return None
        self.restore_kept(part)
        try:
            snapshot = torch.load(self.path, weights_only=True)
        except FileNotFoundError:
            return None
        for saved in snapshot["tables"]:
            description = msgspec.json.decode(saved["description"], type=Description)
            table = Table(saved["number"], description, part.shard, part.members, part.strategy, part.pool)
            for chunk, (value, state) in saved["chunks"].items():
                table.set(chunk, raw(value), replace=True)
                table.updaters[chunk].restore(state)
            table.shard.restore(saved["shard"])
            table.shard.members = set(part.members)
            part.tables[table.number] = table
        part.over.update(snapshot["over"])
        taken: float = snapshot["time"]
        return max(0.0, time.time() - taken)

    def restore_kept(self, part: Part) -> None:
        """Gives `part` what the main worker had read for all."""
        for file in self.folder.glob("kept-*[0-9]") if self.usable else ():
            number = int(file.name.removeprefix("kept-"))
            with file.open("rb") as content:
                part.kept[number] = [content.read(length) for length in msgspec.json.decode(content.readline())]
            self._kept.add(number)

    def remove(self) -> None:
        """The job is over. What is being written has no name any more, and is gone when its writer ends."""
        give_up = time.monotonic() + REMOVE_SECONDS
        while self.usable and time.monotonic() < give_up:  # more than once where a file was begun meanwhile
            shutil.rmtree(self.folder, ignore_errors=True)


def _saved(table: Table) -> dict[str, Any]:
    chunks = {
        chunk: (
            table.value(chunk).clone(),
            {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in updater.state().items()},
        )
        for chunk, updater in table.updaters.items()
    }
    description = msgspec.json.encode(table.description)
    return {"number": table.number, "description": description, "shard": table.shard.state(), "chunks": chunks}


def _write_all(content: Sequence[Any], file: IO[bytes]) -> None:
    for piece in content:
        file.write(piece)
