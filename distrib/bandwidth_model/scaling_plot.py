"""Plots of `distrib-topo plan`: scaling against the ideal, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distrib import units
from distrib.bandwidth_model.planner import PlanRequest, ScalingPlan
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import predict_step
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
    """Plot samples per second against the number of ranks, with ideal scaling for comparison."""
    work = plan.workload
    with plotting.plot_style():
        figure = plotting.new_figure(8, 4.8)
        axes = figure.add_subplot()
        ranks = [prediction.ranks for prediction in plan.predictions]
        ideal = [prediction.ranks * work.batch / prediction.compute_seconds for prediction in plan.predictions]
        axes.plot(ranks, ideal, color=GREY, linestyle="--", linewidth=1, label="ideal")
        if plan.compared:
            for number, each in enumerate(plan.compared):
                _curve(axes, ranks, each.predictions, GROUPS[number % len(GROUPS)], each.network)
        else:
            _curve(axes, ranks, plan.predictions, GROUPS[0], "predicted")
            for count, prediction in zip(ranks, plan.predictions, strict=True):
                axes.annotate(
                    f"{prediction.efficiency:.0%}", (count, prediction.samples_per_second), xytext=(0, -14),
                    textcoords="offset points", ha="center", color=INK, size=9,
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter(lambda value, _: units.number_text(value))
        axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        axes.set_ylabel("samples a second")
        axes.set_title(f"{work.name} on {work.device}, {work.batch} samples a rank", loc="left", color=INK, size=12)
        axes.grid(color=LINE, linewidth=0.5)
        axes.legend(frameon=False)
    return figure


def _curve(axes: Any, ranks: Sequence[int], predictions: Sequence[Prediction], colour: str, label: str) -> None:
    rates = [prediction.samples_per_second for prediction in predictions]
    axes.plot(ranks, rates, color=colour, marker="o", markersize=4, label=label)


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
