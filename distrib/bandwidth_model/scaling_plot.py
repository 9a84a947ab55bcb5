"""Plots of `distrib-topo plan`: efficiency with its range, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distrib import units
from distrib.bandwidth_model.planner import PlanRequest, ScalingPlan
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import predict_step
from distrib.bandwidth_model.training_cost import TrainingEstimate
from distrib.utils import plotting
from distrib.utils.plotting import GREY, GROUPS, INK, LINE, PAPER

PHASES = {
    "loader": "#b45309",
    "forward": GROUPS[0],
    "backward": "#7aa6c2",
    "optimizer": GROUPS[2],
    "communication": GROUPS[1],
    "wait": LINE,
}


PALE_PHASES = ("backward", "wait")
"""Phases drawn in a light colour with dark text."""


def draw_plan(path: str, request: PlanRequest, plan: ScalingPlan) -> None:
    """Draw the scaling, or one step on the largest number of hosts if the file name contains `timeline`.

    Args:
        path: The file.
        request: The request of the plan.
        plan: The plan.

    Raises:
        ConfigError: The file cannot be written.
    """
    if "timeline" in Path(path).stem:
        step = predict_step(
            request.topology,
            request.workload,
            plan.predictions[-1].strategy,
            **request.job(request.largest),
            timeline=True,
        )
        hosts = f"{step.hosts} host{'' if step.hosts == 1 else 's'}"
        figure = _timeline_figure(step, f"One step of {plan.workload.name} on {hosts}, {step.ranks} ranks")
    else:
        figure = _scaling_figure(plan)
    plotting.save_figure(figure, path)


def _scaling_figure(plan: ScalingPlan) -> Any:
    """Plot the efficiency relative to one rank against the number of ranks, with the range of the predictions."""
    work = plan.workload
    curves = {each.network: each.estimates for each in plan.compared} or {plan.network or "predicted": plan.estimates}
    with plotting.plot_style():
        figure = plotting.new_figure(8, 4.8)
        axes = figure.add_subplot()
        ranks = _spaced([estimate.ranks for estimate in plan.estimates])
        axes.axhline(100, color=GREY, linestyle="--", linewidth=1)
        for number, (network, estimates) in enumerate(curves.items()):
            _curve(axes, network, estimates, GROUPS[number % len(GROUPS)], is_labelled=len(curves) == 1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [units.compact_text(count) for count in ranks])
        axes.minorticks_off()
        axes.margins(x=0.08)
        axes.set_ylim(0, 105)
        axes.set_yticks(range(0, 101, 20), [f"{percent}%" for percent in range(0, 101, 20)])
        axes.set_xlabel("ranks")
        axes.set_ylabel("efficiency relative to one rank")
        title = f"{work.name} on {work.device}, {work.batch} samples a rank"
        axes.set_title(title, loc="left", color=INK, size=12)
        axes.grid(color=LINE, linewidth=0.5)
        figure.legend(
            loc="outside lower left", ncols=3, frameon=False, title="network, 10th to 90th percentile", alignment="left"
        )
    return figure


def _curve(axes: Any, network: str, estimates: Sequence[TrainingEstimate], colour: str, *, is_labelled: bool) -> None:
    ranks = [estimate.ranks for estimate in estimates]
    found = [estimate.efficiency_of_one_rank for estimate in estimates]
    low, middle, high = ([100 * getattr(each, part) for each in found] for part in ("p10", "value", "p90"))
    axes.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(ranks, middle, color=colour, marker="o", markersize=4, label=network)
    for count in _spaced(ranks) if is_labelled else ():
        percent = middle[ranks.index(count)]
        side = -15 if percent > 12 else 7  # below the falling curve, above the axis
        axes.annotate(
            f"{percent:.0f}%",
            (count, percent),
            xytext=(0, side),
            textcoords="offset points",
            ha="center",
            color=INK,
            size=9,
        )


def _spaced(ranks: Sequence[int]) -> list[int]:
    """Select counts whose labels do not overlap on a logarithmic axis, the largest among them."""
    gap = (max(ranks) / min(ranks)) ** (1 / 16)  # 16 labels fit
    shown: list[int] = []
    for count in sorted(set(ranks), reverse=True):
        if not shown or shown[-1] / count >= gap:
            shown.append(count)
    return shown[::-1]


def _timeline_figure(prediction: Prediction, title: str) -> Any:
    """Plot the compute and network streams of a step."""
    with plotting.plot_style():
        figure = plotting.new_figure(10, 2.6)
        axes = figure.add_subplot()
        rows = {"compute": 1, "network": 0}
        for span in prediction.timeline:
            width = span.end_seconds - span.start_seconds
            axes.barh(
                rows[span.stream], width * 1e3, left=span.start_seconds * 1e3, height=0.62, color=PHASES[span.phase],
                edgecolor=PAPER, linewidth=0.6,
            )  # fmt: skip
            if width > 0.07 * prediction.step_seconds:
                middle = (span.start_seconds + width / 2) * 1e3
                colour = INK if span.phase in PALE_PHASES else "white"
                axes.text(middle, rows[span.stream], span.label, ha="center", va="center", size=8, color=colour)
        axes.set_yticks([0, 1], ["network", "compute"])
        axes.set_xlim(0, prediction.step_seconds * 1e3)
        axes.set_xlabel("milliseconds")
        what = f"{units.duration_text(prediction.step_seconds)}, {prediction.efficiency:.0%} efficiency"
        axes.set_title(f"{title}: {what}", loc="left", color=INK, size=11)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    return figure
