"""Snapshots of a server's part on its host's disk: what a server that is started again goes on from, if it has no replica.

A snapshot is of one moment: nothing is applied while its tensors are copied, and it is written while the workers go on.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from distrib.training.parameter_server.part import Part
from distrib.training.parameter_server.tables import Description, Table, raw

EVERY_SECONDS = 10.0


class Snapshots:
    """The last snapshot of server `number` of this job."""

    def __init__(self, number: int) -> None:
        run = Path(os.environ.get("DISTRIB_RUN_DIR") or "/nowhere")
        name = f"server-{os.environ.get('DISTRIB_JOB', os.getpid())}-{number}.pt"
        self.path = run / name if run.is_dir() else Path(tempfile.gettempdir()) / f"distrib-{name}"
        self._writer: threading.Thread | None = None
        self._next = time.monotonic() + EVERY_SECONDS
        self._seen: list[int] = []

    def take(self, part: Part, now: float) -> None:
        """Takes one, when it is time and anything was updated since the last."""
        entries = [table.shard.index for table in part.tables.values()]
        if now < self._next or entries == self._seen or (self._writer and self._writer.is_alive()):
            return
        self._next, self._seen = now + EVERY_SECONDS, entries
        content = {"time": time.time(), "tables": [_saved(table) for table in part.tables.values() if table.is_set]}
        self._writer = threading.Thread(target=self._write, args=(content,), daemon=True)
        self._writer.start()

    def _write(self, content: dict[str, Any]) -> None:
        partial = self.path.with_suffix(".partial")
        try:
            torch.save(content, partial)
            partial.replace(self.path)
        except OSError:  # a full disk: the one before still counts
            partial.unlink(missing_ok=True)

    def restore(self, part: Part) -> float | None:
        """Gives `part` what the last snapshot holds, and says how many seconds old it is; None where there is none."""
        try:
            content = torch.load(self.path, weights_only=True)
        except FileNotFoundError:
            return None
        for saved in content["tables"]:
            description = msgspec.json.decode(saved["description"], type=Description)
            table = Table(saved["number"], description, part.shard, part.members, part.strategy, part.pool)
            for chunk, (value, state) in saved["chunks"].items():
                table.set(chunk, raw(value), replace=True)
                table.updaters[chunk].restore(state)
            table.shard.restore(saved["shard"])
            table.shard.members = set(part.members)
            part.tables[table.number] = table
        taken: float = content["time"]
        return max(0.0, time.time() - taken)

    def remove(self) -> None:
        """The job is over."""
        self.path.unlink(missing_ok=True)


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
