"""Tables of hostfiles, host lists and Slurm variables, valid and invalid, from tests/data/hostfiles.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from distrib.cluster.hostfile import Host

TABLES: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "data" / "hostfiles.yaml").read_text("utf-8"))


def h(name: str, slots: int | None = None, line: int = 1, **settings: Any) -> Host:
    return Host(name=name, slots=slots, line=line, **settings)


def hosts_of(entries: list[str | dict[str, Any]], line: int) -> list[Host]:
    """Return the hosts of a table's entries: names or fields; `line` is that of entries without one."""
    fields = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    return [h(**{"line": line, **entry}) for entry in fields]
