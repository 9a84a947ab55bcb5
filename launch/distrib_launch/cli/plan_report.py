"""Text output of `distrib-topo plan`."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from distrib.bandwidth_model.fabric import HYPOTHETICAL
from distrib.bandwidth_model.planner import NetworkComparison, PlanRequest, ScalingPlan
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.recommendations import faster_subset_text, include_option
from distrib.bandwidth_model.scaling import NEGLIGIBLE_FRACTION
from distrib.bandwidth_model.training_cost import Estimate
from distrib.units import compact_text, count_text, duration_text, number_text, size_text

MAX_ROWS = 4
"""Rows of the table of recommendations; `--json` has all."""


def lines(request: PlanRequest, plan: ScalingPlan) -> list[str]:
    """Format the plan in lines of at most 100 characters, or of the terminal's width; only tables may be wider.

    Args:
        request: Request of the plan.
        plan: Predictions and recommendations.
    """
    work = plan.workload
    hosts = count_text(request.largest, "host")
    tokens = f" of {request.workload.sample_tokens:,} tokens" if request.workload.sample_tokens else ""
    fits = plan.memory is None or plan.memory.fits is not False
    paragraphs = [
        f"{work.name} on {work.device}: {_ranks(request)} a host, {count_text(work.batch, 'sample')}{tokens} a rank",
        f"{_one_rank(plan)} takes {duration_text(plan.predictions[-1].compute_seconds)} a step and has "
        f"{size_text(work.gradient_bytes)} of gradients",
        *plan.assumptions,
        *([] if fits else _memory(plan)),
    ]
    report = [line for text in paragraphs for line in _wrapped(text)]
    report += ["", *_table_of_hosts(request, plan), ""]
    answers = *_efficiencies(plan, hosts), _needed(request, plan), *_training(request, plan, hosts)
    for text in (*answers, *(_memory(plan) if fits else []), _fewer(request, plan)):
        report += _wrapped(text)
    if plan.compared:
        report += ["", *_comparison(plan.compared, hosts)]
    report += [*(_advice(plan, hosts) if fits else []), ""]
    links = f"communication {plan.predictions[-1].expected_error:.0%}"
    report += _wrapped(
        f"in brackets: 10th to 90th percentile; expected errors: {links}, compute {work.expected_error:.0%}"
    )
    report += _wrapped(f"compute: {work.source}")
    return report + [line for note in plan.notes for line in _wrapped(f"note: {note}")]


def _one_rank(plan: ScalingPlan) -> str:
    """Name the rank that efficiency is relative to."""
    is_sharded = plan.predictions[-1].strategy.shard != "none"
    return "with its shard of the optimizer, one rank alone" if is_sharded else "one rank alone"


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 100


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _width(), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _ranks(request: PlanRequest) -> str:
    fewest, most = min(request.ranks), max(request.ranks)
    return f"{most} rank{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} ranks"


def _table_of_hosts(request: PlanRequest, plan: ScalingPlan) -> list[str]:
    """Format the predictions: throughput, and efficiency relative to one rank."""
    unit = "tokens/s" if plan.estimates[0].tokens_per_second else "samples/s"
    has_mfu = plan.estimates[0].model_flop_utilization is not None
    rows = []
    for prediction, estimate in zip(plan.predictions, plan.estimates, strict=True):
        row = [
            str(estimate.hosts),
            str(estimate.ranks),
            duration_text(prediction.step_seconds),
            _range_text(estimate.tokens_per_second or estimate.samples_per_second),
            _percent_range_text(estimate.efficiency_of_one_rank),
        ]
        if estimate.model_flop_utilization:
            row.append(f"{estimate.model_flop_utilization.value:.0%}")
        rows.append([*row, _without_invented_names(request, _limit(prediction))])
    return table(["hosts", "ranks", "step", unit, "efficiency", *["MFU"] * has_mfu, "limited by"], rows)


def _without_invented_names(request: PlanRequest, text: str) -> str:
    """Remove the names of hosts that the user did not name: `node1-node2, HDR` becomes `network HDR`."""
    if request.topology.name != HYPOTHETICAL:
        return text
    return re.sub(r"\S+ gpu\d+-gpu\d+, ", "", re.sub(r"(?:link )?node1-node\d+, ", "network ", text))


def _efficiencies(plan: ScalingPlan, hosts: str) -> tuple[str, str]:
    """Say what the efficiency of the table is, and give that relative to one host, and the batch."""
    last = plan.estimates[-1]
    against_host = ""
    if last.hosts > 1 and plan.predictions[-1].strategy.mode != "async":  # which one host's only server would slow down
        against_host = f"; relative to one host, {hosts} reach {_percent_range_text(last.efficiency_of_one_host)}"
    batch = f"global batch of {hosts}: {compact_text(last.global_batch_samples)} samples"
    if last.global_batch_tokens:
        batch += f", {compact_text(last.global_batch_tokens)} tokens"
    return f"efficiency is relative to one rank alone{against_host}", batch


def _range_text(estimate: Estimate) -> str:
    return f"{compact_text(estimate.value)} ({compact_text(estimate.p10)}-{compact_text(estimate.p90)})"


def _percent_range_text(estimate: Estimate) -> str:
    return f"{estimate.value:.0%} ({100 * estimate.p10:.0f}-{100 * estimate.p90:.0f})"


def _limit(prediction: Prediction) -> str:
    """Return the bottleneck: a link with its bandwidth, or the largest other loss."""
    cap, most = prediction.cap, next(iter(prediction.losses), None)
    if prediction.loader_seconds > max(most.seconds if most else 0.0, NEGLIGIBLE_FRACTION * prediction.step_seconds):
        return "loading data"
    if cap and (most is None or most.what == f"link {cap.link}"):
        return f"{cap.link}, {cap.bandwidth}"
    is_loss = most and most.seconds > NEGLIGIBLE_FRACTION * prediction.step_seconds
    return most.what.partition(", whose")[0].partition(":")[0] if most and is_loss else "compute"


def _training(request: PlanRequest, plan: ScalingPlan, hosts: str) -> list[str]:
    """Describe the time and cost of the training on the most hosts."""
    last = plan.estimates[-1]
    per_million = last.cost_per_million_tokens or last.cost_per_million_samples
    unit = "tokens" if last.cost_per_million_tokens else "samples"
    cost = f"{_range_text(per_million)} per million {unit}" if per_million else ""
    if last.training_seconds is None:
        return [f"{hosts} cost {cost}"] if cost else []
    goal = f"{compact_text(request.goal.tokens)} tokens" if request.goal.tokens else ""
    goal = goal or f"{compact_text(request.goal.samples or 0)} samples"
    texts = [f"{goal} on {hosts}: {_time_range_text(last.training_seconds)}"]
    if last.gpu_hours:
        texts.append(f"{_range_text(last.gpu_hours)} GPU-hours")
    if last.total_cost:
        texts.append(f"cost {_range_text(last.total_cost)}: {cost}")
    return [", ".join(texts)]


def _time_range_text(estimate: Estimate) -> str:
    unit, seconds = next(
        (unit for unit in (("days", 86400), ("hours", 3600), ("minutes", 60)) if estimate.value >= 2 * unit[1]),
        ("seconds", 1),
    )
    value, low, high = (number_text(each / seconds) for each in (estimate.value, estimate.p10, estimate.p90))
    return f"{value} ({low}-{high}) {unit}"


def _needed(request: PlanRequest, plan: ScalingPlan) -> str:
    last = plan.predictions[-1]
    wanted = f"{100 * plan.wanted_efficiency:.6g}%"
    where = f"{wanted} efficiency on {count_text(request.largest, 'host')}"
    if plan.limit:
        held = (
            f", limited by {_without_invented_names(request, plan.limit.losses[0].what)}" if plan.limit.losses else ""
        )
        return f"{where} is out of reach: the fastest network brings {plan.limit.efficiency:.0%}{held}"
    if plan.needed_network is None:
        held = ""
        if last.efficiency < plan.wanted_efficiency:
            most = _without_invented_names(request, last.losses[0].what) if last.losses else "compute"
            held = f", but it reaches {last.efficiency:.0%}: limited by {most}"
        return f"{where}: no network between hosts is needed{held}"
    has = ""
    if last.cap and not last.cap.is_inside:
        has = _without_invented_names(request, f"; {last.cap.link} has {last.cap.bandwidth}")
    reached = " (reached)" if last.efficiency >= plan.wanted_efficiency else ""
    return f"{where} needs {plan.needed_network.text}{has}{reached}"


def _fewer(request: PlanRequest, plan: ScalingPlan) -> str:
    if plan.fewer is None:
        return ""
    has_names = request.topology.name != HYPOTHETICAL
    option = f": distrib-launch {include_option(plan.fewer)}" if has_names else ""
    return faster_subset_text(plan.fewer, plan.predictions[-1], has_names=has_names) + option


def _memory(plan: ScalingPlan) -> list[str]:
    if plan.memory:
        texts = [f"memory of a rank: {plan.memory.verdict}"]
        if not plan.memory.fits:
            parts = ", ".join(f"{name} {size_text(size)}" for name, size in plan.memory.parts.items())
            texts += [f"  {parts}", f"  {_memory_advice(plan)}"]
        return [text for text in texts if text.strip()]
    fits = plan.predictions[-1].fits_memory
    memory = plan.workload.memory_bytes
    if fits is None or memory is None:
        return []
    held = f"memory: a rank holds {size_text(memory)} alone, and buckets of {size_text(plan.workload.gradient_bytes)} beside others"
    return [f"{held}; it fits" if fits else f"{held}: more than {plan.workload.device} has; take a smaller --batch"]


def _memory_advice(plan: ScalingPlan) -> str:
    strategy = plan.predictions[-1].strategy
    if plan.memory is None or plan.memory.changes:
        return plan.memory.advice if plan.memory else ""
    if strategy.shard == "none":
        return (
            "it would need to be sharded: --shard auto"
            if strategy.mode == "sync"
            else "only --mode sync with --shard can divide it"
        )
    return "take more hosts, GPUs with more memory, or shorter sequences"


def _comparison(compared: Sequence[NetworkComparison], hosts: str) -> list[str]:
    """Format the compared networks, lowest cost first."""
    first = compared[0].estimates[-1]
    unit = "tokens" if first.tokens_per_second else "samples"
    has_costs = any(each.estimates[-1].cost_per_million_samples for each in compared)
    has_prices = any(each.network_price for each in compared)
    head = [hosts + (", cheapest first" if has_costs else ""), "efficiency", f"{unit}/s"]
    head += ["price a host"] * has_prices + [f"cost per million {unit}"] * has_costs
    rows = []
    for each in compared:
        last = each.estimates[-1]
        row = [each.network, _percent_range_text(last.efficiency_of_one_rank)]
        row.append(_range_text(last.tokens_per_second or last.samples_per_second))
        if has_prices:
            price = each.network_price
            row.append(number_text(price.amount) + "/h" * price.is_hourly if price else "-")
        if has_costs:
            cost = last.cost_per_million_tokens or last.cost_per_million_samples
            row.append(_range_text(cost) if cost else "-")
        rows.append(row)
    found = table(head, rows, left=(0,))
    if has_prices and not has_costs:
        found += _wrapped("networks without the price of their hosts are not ranked: add --gpu-hour or --host-price")
    return found


def _advice(plan: ScalingPlan, hosts: str) -> list[str]:
    """Format the settings that are faster than the current ones: first the equivalent ones, then those that affect convergence."""
    strategy, advice = plan.predictions[-1].strategy, plan.advice
    current = plan.predictions[-1].samples_per_second
    # Less than 1 % is within the error.
    faster = [each for each in advice if current and each.prediction.samples_per_second > 1.01 * current]
    chosen = [each for each in faster if each.exact][:1]
    chosen += [each for each in faster if not each.exact][: MAX_ROWS - len(chosen)]
    if not chosen:
        return []
    rows = [
        (
            f"batches of {each.batch} in the script" if each.batch else " ".join(each.options) or "--mode sync",
            f"x {each.prediction.samples_per_second / current:.2f}",
            "none: the same result" if each.exact and strategy.exact else each.convergence,
        )
        for each in chosen
    ]
    more = f"; {len(faster) - len(chosen)} more with --json" if len(faster) > len(chosen) else ""
    return ["", *table((f"faster on {hosts}{more}", "speed", "effect on convergence"), rows)]


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
