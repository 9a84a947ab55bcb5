"""Results of the preflight checks: one cell for each host and check, and the table of all cells."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from distrib.cluster.node import fold_hosts, name_hosts
from distrib_launch.engines.remote_shell import Transport

Status = Literal["ok", "warning", "error", "unknown"]
BY_SEVERITY: tuple[Status, ...] = ("error", "warning", "unknown", "ok")
CELL_TEXT = {"ok": "ok", "warning": "[yellow]warn[/]", "error": "[bold red]ERROR[/]", "unknown": "[dim]-[/]"}

COLUMNS = (
    "python", "distrib", "mpi", "torch", "cuda", "script", "gpus", "gpu memory",
    "cores", "memory", "shm", "disk", "limits", "clock", "network",
)  # fmt: skip
"""Columns of the table after the first one, which is the transport."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check on one host."""

    host: str
    check: str
    status: Status
    reason: str = ""
    """Observation; empty for a result without a problem."""
    fix: str = ""
    """Hint in the imperative; empty: none."""

    def __str__(self) -> str:
        return f"{self.host}: {self.check}: {self.reason}" + (f"; {self.fix}" if self.fix else "")


class HostRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of the job on one host."""

    ranks: int
    devices: tuple[str, ...] = ()
    """Devices of its ranks as planned: `cpu`, `cuda:N` or `auto`."""
    gpu_indices: tuple[int, ...] | None = None
    """GPUs that its ranks will use; None: the first ones."""
    share_gpus: bool = False
    """True if ranks may share GPUs."""
    visible_gpus: str | None = None
    """Value of CUDA_VISIBLE_DEVICES for its ranks."""


def error(host: str, check: str, reason: str, fix: str = "") -> CheckResult:
    """Return a result that stops the launch.

    Args:
        host: Name of the host.
        check: Name of the check.
        reason: Observation.
        fix: Hint in the imperative.
    """
    return CheckResult(host=host, check=check, status="error", reason=reason, fix=fix)


def warning(host: str, check: str, reason: str, fix: str = "") -> CheckResult:
    """Return a result that is shown and does not stop the launch.

    Args:
        host: Name of the host.
        check: Name of the check.
        reason: Observation.
        fix: Hint in the imperative.
    """
    return CheckResult(host=host, check=check, status="warning", reason=reason, fix=fix)


def fold_by_host(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Join lines that differ in the host only, naming all hosts.

    Args:
        lines: Host and line; the line begins with the host.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for host, line in lines:
        groups.setdefault(re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "", line), []).append((host, line))
    folded = []
    for members in groups.values():
        first, line = members[0]
        folded.append(name_hosts(host for host, _ in members) + line.removeprefix(first))
    return folded


def complete_results(
    hosts: Sequence[str], found: Sequence[CheckResult], silent: Sequence[str], transport: Transport
) -> tuple[CheckResult, ...]:
    """Add results for the checks that found nothing.

    Args:
        hosts: All hosts.
        found: Results with errors and warnings.
        silent: Hosts that did not reply; their other results are unknown.
        transport: Program that reached the hosts.

    Raises:
        ValueError: A result belongs to no column of the table.
    """
    if unknown := {check.check for check in found} - {transport, *COLUMNS}:
        raise ValueError(f"checks without a column: {', '.join(sorted(unknown))}; add them to COLUMNS")
    cells: dict[tuple[str, str], list[CheckResult]] = {}
    for check in found:
        cells.setdefault((check.host, check.check), []).append(check)
    table: list[CheckResult] = []
    for host in hosts:
        rest: Status = "unknown" if host in silent else "ok"
        logged_in = any(check.host == host and check.check == "python" for check in found)
        for name in (transport, *COLUMNS):
            status: Status = "ok" if name == transport and logged_in else rest
            table += cells.get((host, name)) or [CheckResult(host=host, check=name, status=status)]
    return tuple(table)


def table_text(
    hosts: Sequence[str],
    results: Sequence[CheckResult],
    transport: Transport,
    *,
    every_column: bool = False,
    colour: bool = False,
) -> str:
    """Format the table: a row for each host; hosts with equal rows share one. Columns beyond the terminal's width continue below.

    Empty if no column is shown.

    Args:
        hosts: All hosts.
        results: Result of `complete_results`.
        transport: Program that reached the hosts.
        every_column: Show all checks, not only those with an error or a warning.
        colour: Use colours of terminals.
    """
    from rich import console, table  # not at the top: 20 ms, and most launches show no table

    bad = {check.check for check in results if check.status in ("error", "warning")}
    names = [name for name in (transport, *COLUMNS) if every_column or name in bad]
    if not names:
        return ""
    status: dict[str, dict[str, Status]] = {host: {} for host in hosts}
    for check in results:
        seen = status[check.host].get(check.check, "ok")
        status[check.host][check.check] = min(seen, check.status, key=BY_SEVERITY.index)
    rows: dict[tuple[str, ...], list[str]] = {}
    for host in hosts:
        rows.setdefault(tuple(status[host][name] for name in names), []).append(host)
    labels = [",".join(members) if len(members) < 3 else fold_hosts(members) for members in rows.values()]
    room = shutil.get_terminal_size((400, 24)).columns - max(map(len, ("host", *labels)))
    blocks: list[list[int]] = [[]]
    for column in range(len(names)):
        if blocks[-1] and sum(max(len(names[each]), 5) + 2 for each in (*blocks[-1], column)) > room:
            blocks.append([])
        blocks[-1].append(column)
    out = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    screen = console.Console(file=out, width=400, force_terminal=colour, color_system=system)
    for block in blocks:
        grid = table.Table(box=None, pad_edge=False, header_style="bold" if colour else "")
        grid.add_column("host", no_wrap=True)
        for column in block:
            grid.add_column(names[column], justify="center", no_wrap=True)
        for label, cells in zip(labels, rows, strict=True):
            grid.add_row(label, *(CELL_TEXT[cells[column]] for column in block))
        screen.print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
