"""Snapshots of a shard on the disk of its server's host, from which a restarted server without a replica continues.

A snapshot shows one moment: no update is applied while its tensors are copied. It is written while the workers continue. Stored
results of the main rank never change, and have files of their own.
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
from distrib.training.parameter_server.server_table import ServerTable, TableDescription, as_memoryview
from distrib.training.parameter_server.shard_service import ShardService


class Snapshots:
    """The last snapshot of a server, and stored results, in a folder of the server's own.

    Args:
        interval_seconds: Least time between two snapshots.
        max_writing_fraction: Fraction of the time that is spent writing: a shared file system is slow, and other hosts use it, too.
    """

    def __init__(self, number: int, *, interval_seconds: float = 10.0, max_writing_fraction: float = 0.2) -> None:
        self._interval_seconds, self._max_writing_fraction = interval_seconds, max_writing_fraction
        run = Path(os.environ.get(DISTRIB_RUN_DIR) or "/nowhere")
        name = f"server-{os.environ.get('DISTRIB_JOB', os.getpid())}-{number}"
        self.folder = (
            run / name if run.is_dir() and os.access(run, os.W_OK) else Path(tempfile.gettempdir()) / f"distrib-{name}"
        )
        self.path = self.folder / "snapshot.pt"
        with contextlib.suppress(OSError):  # a full disk, or it exists from an earlier process of this server
            self.folder.mkdir(mode=0o700)
        self.writer: threading.Thread | None = None
        self.next_seconds = time.monotonic() + self._interval_seconds
        self.written_updates: list[int] = []
        self.result_writer: threading.Thread | None = None
        self._next_result = 0.0
        self._written_results: set[int] = set()

    @property
    def usable(self) -> bool:
        """True if no other user can have written there: in the temporary folder, any user may create a folder of that name."""
        try:
            there = self.folder.lstat()
        except OSError:
            return False
        own = (there.st_uid, there.st_mode & 0o777) == (os.geteuid(), 0o700)
        return stat.S_ISDIR(there.st_mode) and (own or self.folder.parent != Path(tempfile.gettempdir()))

    def write_results(self, service: ShardService, now: float) -> None:
        """Write stored results that are new, in a thread.

        Args:
            service: The service of the shard.
            now: Seconds of the monotonic clock.
        """
        new = {
            number: pieces for number, pieces in service.results.pieces.items() if number not in self._written_results
        }
        if (
            new
            and now >= self._next_result
            and self.usable
            and not (self.result_writer and self.result_writer.is_alive())
        ):
            self.result_writer = threading.Thread(target=self._write_new_results, args=(new,), daemon=True)
            self.result_writer.start()

    def _write_new_results(self, new: dict[int, list[Any]]) -> None:
        for number, pieces in new.items():
            lengths = msgspec.json.encode([memoryview(piece).nbytes for piece in pieces])
            if self.write_file(f"result-{number}", functools.partial(_write_all, [lengths + b"\n", *pieces])):
                self._written_results.add(number)
            else:
                self._next_result = time.monotonic() + self._interval_seconds

    def write(self, service: ShardService, now: float) -> None:
        """Write a snapshot in a thread if it is due and the shard has changed.

        Args:
            service: The service of the shard.
            now: Seconds of the monotonic clock.
        """
        entries = [table.controller.index for table in service.tables.values()]
        if (
            now < self.next_seconds
            or entries == self.written_updates
            or (self.writer and self.writer.is_alive())
            or not self.usable
        ):
            return
        self.next_seconds, self.written_updates = now + self._interval_seconds, entries
        tables = [_table_content(table) for table in service.tables.values() if table.is_set]
        content = {"time": time.time(), "tables": tables, "retired": sorted(service.retired)}
        self.writer = threading.Thread(target=self._write_snapshot, args=(content,), daemon=True)
        self.writer.start()

    def _write_snapshot(self, content: dict[str, Any]) -> None:
        begun = time.monotonic()
        self.write_file(self.path.name, functools.partial(torch.save, content))
        self.next_seconds = max(self.next_seconds, begun + (time.monotonic() - begun) / self._max_writing_fraction)

    def write_file(self, name: str, fill: Callable[[IO[bytes]], object]) -> bool:
        """Replace a file of the folder when its content is complete. Returns False if it cannot be written.

        Args:
            name: Name of the file.
            fill: Writes the content.
        """
        partial = self.folder / f"{name}.partial"
        try:
            with partial.open("wb") as file:
                fill(file)
            partial.replace(self.folder / name)
        except (OSError, RuntimeError):  # torch raises RuntimeError if the disk is full
            with contextlib.suppress(OSError):
                partial.unlink()  # or the disk would stay full
            return False  # the last file is still valid
        return True

    def restore(self, service: ShardService) -> float | None:
        """Restore a shard from the last snapshot.

        Args:
            service: The service of the shard, without tables.

        Returns:
            Age of the snapshot in seconds; None if there is none.
        """
        if not self.usable:
            return None
        self.restore_results(service)
        try:
            snapshot = torch.load(self.path, weights_only=True)
        except FileNotFoundError:
            return None
        members = service.membership.members
        for content in snapshot["tables"]:
            description = msgspec.json.decode(content["description"], type=TableDescription)
            table = ServerTable(content["number"], description, service.shard, members, service.strategy, service.pool)
            for chunk, (value, state) in content["chunks"].items():
                table.set_value(chunk, as_memoryview(value), replace=True)
                table.optimizers[chunk].restore(state)
            table.controller.restore(content["controller"])
            table.controller.members = set(members)
            service.tables[table.number] = table
        service.retired.update(snapshot["retired"])
        taken: float = snapshot["time"]
        return max(0.0, time.time() - taken)

    def restore_results(self, service: ShardService) -> None:
        """Restore the stored results of the main rank.

        Args:
            service: The service of the shard.
        """
        for file in self.folder.glob("result-*[0-9]") if self.usable else ():
            number = int(file.name.removeprefix("result-"))
            with file.open("rb") as content:
                lengths = msgspec.json.decode(content.readline())
                service.results.pieces[number] = [content.read(length) for length in lengths]
            self._written_results.add(number)

    def remove(self) -> None:
        """Remove all files at the end of the job."""
        deadline = time.monotonic() + 2.0  # on NFS, files stay until their writer closes them
        while self.usable and time.monotonic() < deadline:  # repeated if a writer creates a file meanwhile
            shutil.rmtree(self.folder, ignore_errors=True)


def _table_content(table: ServerTable) -> dict[str, Any]:
    chunks = {
        chunk: (
            table.value(chunk).clone(),
            {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in optimizer.state().items()},
        )
        for chunk, optimizer in table.optimizers.items()
    }
    description = msgspec.json.encode(table.description)
    controller = table.controller.state()
    return {"number": table.number, "description": description, "controller": controller, "chunks": chunks}


def _write_all(content: Sequence[Any], file: IO[bytes]) -> None:
    for piece in content:
        file.write(piece)
