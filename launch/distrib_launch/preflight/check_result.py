"""What was asked of a host, and how it came out: the cells of the preflight's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from distrib.cluster.node import name_hosts

Status = Literal["ok", "warning", "error", "unknown"]

CHECKS = (
    "ssh", "python", "distrib", "mpi", "torch", "cuda", "script", "gpus", "gpu memory",
    "cores", "memory", "shm", "disk", "limits", "clock", "network",
)  # fmt: skip
"""Columns of the table, in the order in which they matter. Of hosts that Slurm reached the first is another."""

Way = Literal["ssh", "srun"]
"""How hosts are reached, and the name of the cell that says how that went."""


def columns(by: Way) -> tuple[str, ...]:
    """The columns where hosts were reached in that way."""
    return by, *CHECKS[1:]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. `reason` says what is wrong and `fix` what to do about it; both are empty where nothing is."""

    host: str
    check: str
    status: Status
    reason: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.host}: {self.check}: {self.reason}" + (f"; {self.fix}" if self.fix else "")


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What the job wants of one host. `devices` are its ranks' as planned; `gpu_indices` the GPUs they will use, None
    where that is the first ones."""

    ranks: int
    devices: tuple[str, ...] = ()
    gpu_indices: tuple[int, ...] | None = None
    visible_gpus: str | None = None
    """What CUDA_VISIBLE_DEVICES is for its ranks."""


def error(host: str, check: str, reason: str, fix: str = "") -> Check:
    """A cell that stops the launch."""
    return Check(host=host, check=check, status="error", reason=reason, fix=fix)


def warning(host: str, check: str, reason: str, fix: str = "") -> Check:
    """A cell that does not."""
    return Check(host=host, check=check, status="warning", reason=reason, fix=fix)


def folded(told: Iterable[tuple[str, str]]) -> list[str]:
    """Lines, each with the host that it begins with; of hosts of which the same is said the first one's stands for all."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for host, line in told:
        groups.setdefault(re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "", line), []).append((host, line))
    lines = []
    for alike in groups.values():
        first, line = alike[0]
        lines.append(name_hosts(host for host, _ in alike) + line.removeprefix(first))
    return lines


def full_table(hosts: Sequence[str], found: Sequence[Check], silent: Sequence[str], by: Way) -> tuple[Check, ...]:
    """Every cell of every host: what was found, ok where nothing was, unknown for hosts that gave no answer."""
    cells: dict[tuple[str, str], list[Check]] = {}
    for check in found:
        cells.setdefault((check.host, check.check), []).append(check)
    table: list[Check] = []
    for host in hosts:
        rest: Status = "unknown" if host in silent else "ok"
        for name in columns(by):
            status: Status = "ok" if name == by and any(c.host == host and c.check == "python" for c in found) else rest
            table += cells.get((host, name)) or [Check(host=host, check=name, status=status)]
    return tuple(table)
