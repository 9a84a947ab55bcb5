"""The preflight's table, hosts by checks, as text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from distrib.cluster.node import fold_hosts
from distrib_launch.preflight.check_result import columns

if TYPE_CHECKING:
    from distrib_launch.preflight.preflight import Report

WORDS = {"ok": "ok", "warning": "[yellow]warn[/]", "error": "[bold red]ERROR[/]", "unknown": "[dim]-[/]"}
WORST = ("error", "warning", "unknown", "ok")


def table_text(report: Report, *, colour: bool = False) -> str:
    """A row for each host; hosts whose rows are alike share one, named as a range."""
    from rich.console import Console
    from rich.table import Table

    status: dict[str, dict[str, str]] = {host: {} for host in report.hosts}
    for check in report.checks:
        seen = status[check.host].get(check.check, "ok")
        status[check.host][check.check] = min(seen, check.status, key=WORST.index)
    names = columns(report.by)
    rows: dict[tuple[str, ...], list[str]] = {}
    for host in report.hosts:
        rows.setdefault(tuple(status[host][name] for name in names), []).append(host)
    table = Table(box=None, pad_edge=False, header_style="bold" if colour else "")
    table.add_column("host", no_wrap=True)
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="center", no_wrap=True)
    for cells, hosts in rows.items():
        folded = ",".join(hosts) if len(hosts) < 3 else fold_hosts(hosts)
        table.add_row(folded, *(WORDS[cell] for cell in cells))
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=colour, color_system="standard" if colour else None)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
