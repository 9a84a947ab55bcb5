"""`report.html` of a run: outcome, predicted and measured performance, and every rank, on one page without external files."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from distrib import units
from distrib.cluster.node import name_hosts
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.results import Result
from distrib_launch.supervisor.rank_exit import signal_name

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem 1rem .15rem 0; border-bottom: 1px solid #e3e7ec; }
th { font-weight: 600; } td.n, th.n { text-align: right; } pre { background: #f5f7fa; padding: .7rem; overflow-x: auto; }
.succeeded { color: #15803d; } .failed, .stopped { color: #b5523b; } .warning { border-left: 4px solid #b45309; padding-left: .7rem; }
figure { margin: 0; } svg { max-width: 100%; height: auto; } .grey { color: #697586; }
"""

MAX_RANKS = 512
"""Ranks that the page lists."""


def write_report(plan: LaunchPlan, result: Result, run_dir: Path, started: float) -> None:
    """Write the page.

    Args:
        plan: Plan of the last start.
        result: Result of the run.
        run_dir: Run directory.
        started: Unix time of the first start.

    Raises:
        OSError: It cannot be written.
    """
    parts = [
        f"<h1>{escape(Path(_script(plan)).name)}</h1>",
        f'<p class="grey">{time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))}, {units.count_text(result.world_size, "rank")} on '
        f"{units.count_text(len(result.hosts), 'host')}, engine {escape(plan.engine)}, mode {escape(plan.mode)}</p>",
        f'<p><strong class="{result.status}">{result.status}</strong> after {result.seconds:.1f} s, exit code {result.exit_code}</p>',
        *_failure(result),
        *_attempts(result),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in result.warnings),
        *_speed(plan, result),
        *_metrics(run_dir / "metrics.jsonl"),
        *_ranks(result),
        "<h2>Command</h2>",
        f"<pre>{escape(shlex.join(plan.rank_command))}</pre>",
        *(f'<p class="grey">{escape(note)}</p>' for note in plan.notes),
    ]
    title = escape(f"{Path(_script(plan)).name}: {result.status}")
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )
    partial = run_dir / "report.partial"
    partial.write_text(page, encoding="utf-8", errors="backslashreplace")
    partial.replace(run_dir / "report.html")


def _script(plan: LaunchPlan) -> str:
    first = plan.script[1]
    return plan.script[2] if first == "-m" else first


def _failure(result: Result) -> list[str]:
    failure = result.first_failure
    if failure is None:
        return []
    who = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host
    parts = ["<h2>First failure</h2>", f"<p>{escape(who)}: {escape(failure.message)}</p>"]
    return parts + ([f"<pre>{escape(failure.traceback)}</pre>"] if failure.traceback else [])


def _attempts(result: Result) -> list[str]:
    rows = []
    for attempt in result.attempts:
        failure = attempt.first_failure
        why = f"{failure.host}: {failure.headline}" if failure else ""
        rows.append(
            (attempt.folder, str(attempt.world_size), name_hosts(attempt.hosts), f"{attempt.seconds:.1f} s", why)
        )
    return ["<h2>Failed starts</h2>", _table(("", "ranks", "hosts", "after", "failed"), rows)] if rows else []


def _speed(plan: LaunchPlan, result: Result) -> list[str]:
    predicted, measured = result.predicted, result.measured
    if predicted is None and measured is None:
        return []

    def cells(name: str, field: str, show: Any) -> tuple[str, ...]:
        return name, *(show(getattr(side, field)) if side else "-" for side in (predicted, measured))

    rows = [
        cells("a step", "step_seconds", units.duration_text),
        cells("computing", "compute_seconds", units.duration_text),
        cells("waiting for data", "loader_seconds", lambda value: "-" if value is None else units.duration_text(value)),
        cells("waiting for ranks", "exposed_seconds", units.duration_text),
        cells("efficiency", "efficiency", lambda value: f"{value:.1%}"),
    ]
    parts = ["<h2>Speed</h2>", _table(("", "predicted", "measured"), rows, numbers=(1, 2))]
    if measured and measured.prediction_error is not None and plan.forecast:
        parts.append(
            f"<p>A step took {measured.prediction_error:+.1%} against what was predicted of {escape(plan.forecast.workload)} "
            f"({escape(plan.forecast.source)}; error to expect {plan.forecast.expected_error:.0%}).</p>"
        )
    if predicted and predicted.cap:
        parts.append(f"<p>Capped by {escape(predicted.cap.link)}, {predicted.cap.bandwidth}.</p>")
    if measured and measured.links:
        links = [
            (f"{link.source} to {link.target}", units.bit_rate_text(link.bytes_per_second),
             units.bit_rate_text(link.expected_bytes_per_second) if link.expected_bytes_per_second else "-")
            for link in sorted(measured.links, key=lambda link: link.bytes_per_second)[:32]
        ]  # fmt: skip
        parts += ["<h2>Links, slowest first</h2>", _table(("", "carried", "expected"), links, numbers=(1, 2))]
    return parts


def _metrics(path: Path) -> list[str]:
    """Draw a curve for each number that the script logged."""
    curves: dict[str, list[float]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(
                    AttributeError, KeyError, OverflowError, RecursionError, TypeError
                ):  # a script may write anything
                    for name, value in json.loads(line)["metrics"].items():
                        if isinstance(value, (int, float)) and not isinstance(value, bool):
                            curves.setdefault(name, []).append(float(value))
    except (OSError, ValueError):
        return []
    drawn = {name: values for name, values in curves.items() if len(values) > 1}
    if not drawn:
        return []
    return ["<h2>Metrics</h2>", *(_curve(name, drawn[name]) for name in list(drawn)[:6])]


def _curve(name: str, values: Sequence[float]) -> str:
    width, height = 640, 120
    low, high = min(values), max(values)
    step = max(1, len(values) // 1000)
    shown = values[::step]
    points = " ".join(
        f"{index * width / max(1, len(shown) - 1):.1f},{height - 4 - (value - low) * (height - 8) / ((high - low) or 1):.1f}"
        for index, value in enumerate(shown)
    )
    return (
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f'<polyline points="{points}" fill="none" stroke="#33658a" stroke-width="1.5"/></svg>'
        f'<figcaption class="grey">{escape(name)}: {values[0]:.4g} to {values[-1]:.4g}, {len(values)} values</figcaption></figure>'
    )


def _ranks(result: Result) -> list[str]:
    rows = []
    guilty = result.first_failure.rank if result.first_failure else None
    # The first failure on top, then the other ranks that failed by themselves.
    ranks = sorted(
        result.ranks, key=lambda one: (one.rank != guilty, one.exit_code == 0 or bool(one.stopped_by), one.rank)
    )
    for rank in ranks[:MAX_RANKS]:
        ended = (
            signal_name(rank.signal)
            if rank.signal
            else "lost"
            if rank.exit_code is None
            else f"exit code {rank.exit_code}"
        )
        by = f", stopped by {rank.stopped_by}" if rank.stopped_by else ""
        rows.append((str(rank.rank), rank.host, rank.role, rank.device, rank.cpus or "", ended + by))
    parts = ["<h2>Ranks</h2>", _table(("rank", "host", "role", "device", "CPUs", "ended"), rows)]
    left = len(result.ranks) - MAX_RANKS
    return parts + ([f"<p>and {left} more; result.json has them all</p>"] if left > 0 else [])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=n' if column in numbers else ''}>{escape(cell)}</{kind}>"
            for column, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"
