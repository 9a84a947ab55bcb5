"""Text output of `distrib-topo plan`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from distrib.bandwidth_model.fabric import HYPOTHETICAL
from distrib.bandwidth_model.planner import NetworkComparison, PlanRequest, ScalingPlan
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.recommendations import Recommendation, faster_subset_text, include_option
from distrib.bandwidth_model.scaling import NEGLIGIBLE_FRACTION
from distrib.units import bit_rate_text, duration_text, number_text, size_text

MAX_ROWS = 6
"""Rows of a table of recommendations: those that are worth a trial."""


def lines(request: PlanRequest, plan: ScalingPlan) -> list[str]:
    """Format the plan in lines of at most 100 characters, or of the terminal's width; only tables may be wider.

    Args:
        request: Request of the plan.
        plan: Predictions and recommendations.
    """
    work = plan.workload
    report = [
        *_wrapped(
            f"{work.name} on {work.device}, {work.batch} samples a rank ({work.origin}): "
            f"{duration_text(work.compute_seconds + work.loader_seconds)} a step alone, {size_text(work.gradient_bytes)} of gradients; "
            f"{_ranks(request)} a host"
        ),
        "",
        *table(
            (
                "hosts",
                "ranks",
                "step",
                "tokens/s" if plan.predictions[-1].tokens_per_second else "samples/s",
                "efficiency",
                "exposed",
                "capped by",
            ),
            [_row(prediction) for prediction in plan.predictions],
        ),
        "",
        *_wrapped(_needed(request, plan)),
        *(line for text in _memory(plan) for line in _wrapped(text)),
        *_wrapped(_fewer(request, plan)),
    ]
    if plan.compared:
        report += ["", *_comparison(plan.compared)]
    report += _advice(plan.advice, f"{request.largest} host{'' if request.largest == 1 else 's'}")
    report += [""]
    links = plan.predictions[-1].expected_error
    report += _wrapped(
        f"expected error of a step: {plan.expected_error:.0%} (communication {links:.0%}, compute {work.expected_error:.0%}: {work.source})"
    )
    return report + [line for note in plan.notes for line in _wrapped(f"note: {note}")]


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 100


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _ranks(request: PlanRequest) -> str:
    fewest, most = min(request.ranks), max(request.ranks)
    return f"{most} rank{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} ranks"


def _row(prediction: Prediction) -> tuple[str, ...]:
    return (
        str(prediction.hosts),
        str(prediction.ranks),
        duration_text(prediction.step_seconds),
        number_text(prediction.tokens_per_second or prediction.samples_per_second),
        f"{prediction.efficiency:.1%}",
        duration_text(prediction.exposed_seconds) if prediction.exposed_seconds else "-",
        _held_by(prediction),
    )


def _held_by(prediction: Prediction) -> str:
    """Return the bottleneck: a link with its bandwidth, or the largest other loss."""
    cap, most = prediction.cap, next(iter(prediction.losses), None)
    if prediction.loader_seconds > max(most.seconds if most else 0.0, NEGLIGIBLE_FRACTION * prediction.step_seconds):
        return "loading data"
    if cap and (most is None or most.what == f"link {cap.link}"):
        return f"{cap.link}, {cap.bandwidth}"
    return most.what if most and most.seconds > NEGLIGIBLE_FRACTION * prediction.step_seconds else "compute"


def _needed(request: PlanRequest, plan: ScalingPlan) -> str:
    last = plan.predictions[-1]
    wanted = f"{100 * plan.wanted_efficiency:.6g}%"
    where = f"{wanted} on {request.largest} host{'' if request.largest == 1 else 's'}"
    if plan.limit:
        held = f", limited by {plan.limit.losses[0].what}" if plan.limit.losses else ""
        return f"{where}: no network reaches that; the fastest would bring {plan.limit.efficiency:.0%}{held}"
    if plan.needed_bytes_per_second is None:
        held = ""
        if last.efficiency < plan.wanted_efficiency:
            most = last.losses[0].what if last.losses else "compute"
            held = f", but it reaches {last.efficiency:.0%}: limited by {most}"
        return f"{where}: no network between hosts is needed{held}"
    has = ""
    if last.cap and not last.cap.is_inside:
        has = f"; {last.cap.link} has {last.cap.bandwidth}"
    reached = " (reached)" if last.efficiency >= plan.wanted_efficiency else ""
    return f"{where} needs {bit_rate_text(plan.needed_bytes_per_second)} a host{has}{reached}"


def _fewer(request: PlanRequest, plan: ScalingPlan) -> str:
    if plan.fewer is None:
        return ""
    option = "" if request.topology.name == HYPOTHETICAL else f": distrib-launch {include_option(plan.fewer)}"
    return faster_subset_text(plan.fewer, plan.predictions[-1]) + option


def _memory(plan: ScalingPlan) -> list[str]:
    if plan.memory:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in plan.memory.parts.items())
        texts = [f"memory of a rank: {plan.memory.verdict}", f"  {parts}", f"  {plan.memory.advice}"]
        return [text for text in texts if text.strip()]
    fits = plan.predictions[-1].fits_memory
    memory = plan.workload.memory_bytes
    if fits is None or memory is None:
        return []
    held = f"memory: a rank holds {size_text(memory)} alone, and buckets of {size_text(plan.workload.gradient_bytes)} beside others"
    return [f"{held}; it fits" if fits else f"{held}: more than {plan.workload.device} has; take a smaller --batch"]


def _comparison(compared: Sequence[NetworkComparison]) -> list[str]:
    counts = [prediction.hosts for prediction in compared[0].predictions]
    priced = any(each.price is not None for each in compared)
    head = ["efficiency with", *(f"{count} host{'' if count == 1 else 's'}" for count in counts), "samples/s"]
    rows = []
    for each in compared:
        row = [each.network, *(f"{prediction.efficiency:.1%}" for prediction in each.predictions)]
        row.append(number_text(each.predictions[-1].samples_per_second))
        if priced:
            row += (
                ["-", "-"]
                if each.price is None
                else [number_text(each.price), number_text(each.price_per_efficiency_percent or 0)]
            )
        rows.append(row)
    return table([*head, "price", "per % of efficiency"] if priced else head, rows)


def _advice(advice: Sequence[Recommendation], hosts: str) -> list[str]:
    """Format the settings that are faster than the current ones: first the equivalent ones, then those that affect convergence."""
    current = next((each.prediction.samples_per_second for each in advice if not each.options and not each.batch), 0.0)
    # Less than 1 % is within the error.
    faster = [each for each in advice if current and each.prediction.samples_per_second > 1.01 * current]
    lines = []
    for is_exact, result, last in (
        (True, "same result", "efficiency"),
        (False, "other convergence (compare the loss)", "effect"),
    ):
        chosen = [each for each in faster if each.exact == is_exact]
        rows = [
            (
                f"batches of {each.batch} in the script" if each.batch else " ".join(each.options),
                f"x {each.prediction.samples_per_second / current:.2f}",
                f"{each.prediction.efficiency:.1%}" if is_exact else each.convergence,
            )
            for each in chosen[:MAX_ROWS]
        ]
        if rows:
            lines += [
                "",
                f"faster on {hosts}, {result}:",
                *table(("options", "speed", last), rows, left=(0,) if is_exact else None),
            ]
        if len(chosen) > MAX_ROWS:
            lines.append(f"{len(chosen) - MAX_ROWS} more with --json")
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] | None = None) -> list[str]:
    """Format a table with aligned columns. A left-aligned last column is wrapped at the terminal's width.

    Args:
        head: Titles of the columns.
        rows: Cells of each row.
        left: Indices of left-aligned columns; None: the first and last. Others are right-aligned.
    """
    aligned = set(left) if left is not None else {0, len(head) - 1}
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    indent = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = max(15, _width() - indent) if sys.stdout.isatty() and len(head) - 1 in aligned else widths[-1]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column in aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        *others, last = padded
        wrapped = textwrap.wrap(last.rstrip(), room, break_on_hyphens=False)
        return "  ".join([*others, f"\n{' ' * indent}".join(wrapped)]).rstrip()

    return [line(head), *map(line, rows)]
