"""Plot of a probe: heat map of the links, time against message size, and bus bandwidth of all-reduce."""

from __future__ import annotations

import os
import statistics
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from distrib.cluster.measurements import Measurements
from distrib.probe.probe_report import (
    bus_bandwidth,
    describe_ranks,
    rate_matrix,
    rate_unit,
    scale_maximum,
    three_digits,
)
from distrib.units import duration_text, format_size
from distrib.utils import plotting


def draw_probe(path: str | os.PathLike[str], measured: Measurements, transport: str) -> None:
    """Draw the measurements into a file.

    Args:
        path: The file, which `check_plot_path` accepted; its suffix selects the format.
        measured: The measurements.
        transport: The transport by which links are judged.

    Raises:
        ConfigError: The file is not writable.
    """
    name = os.fspath(path)
    curves = any(pair.transport == "mpi" and pair.curve for pair in measured.pairs)
    panels = 1 + curves + bool(measured.collectives)
    figure = Figure(figsize=(6.4 * panels, 5.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_heat_map(figure, axes[0], measured, transport)
    if curves:
        _draw_curves(axes[1], measured)
    if measured.collectives:
        _draw_collectives(axes[-1], measured)
    figure.suptitle(f"{len(measured.hosts)} hosts, probed {measured.when}", fontsize=11)
    plotting.save_figure(figure, name)


def _draw_heat_map(figure: Any, axes: Any, measured: Measurements, transport: str) -> None:
    rates = rate_matrix(measured, transport)
    hosts = list(measured.hosts)
    top, exceeded = scale_maximum(rates.values()) if rates else (1.0, False)
    unit, name = rate_unit(top)
    cells = [[rates[a, b] * 8 / unit if (a, b) in rates else float("nan") for b in hosts] for a in hosts]
    highest = top * 8 / unit
    image = axes.imshow(cells, cmap=colormaps["viridis"].with_extremes(bad="0.9"), vmin=0, vmax=highest)
    figure.colorbar(image, ax=axes, shrink=0.8, label=name, extend="max" if exceeded else "neither")
    axes.set_title(f"bandwidth over {transport}")
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    size, every = 9 if len(hosts) <= 16 else 6, -(-len(hosts) // 40)  # at most 40 names
    axes.set_xticks(range(0, len(hosts), every), hosts[::every], rotation=90, fontsize=size)
    axes.set_yticks(range(0, len(hosts), every), hosts[::every], fontsize=size)
    for row, source in enumerate(hosts if len(hosts) <= 12 else ()):  # numbers fit into the cells
        for column, target in enumerate(hosts):
            if (source, target) in rates:
                value = cells[row][column]
                color = "black" if value > 0.6 * highest else "white"
                axes.text(column, row, three_digits(value), ha="center", va="center", color=color, fontsize=8)


def _draw_curves(axes: Any, measured: Measurements) -> None:
    """Draw the median of all links over a band from the fastest to the slowest."""
    kinds = (("alone", False, "alone"), ("together", False, "together"), ("together", True, "together, both ways"))
    for load, both, label in kinds:
        by_size: dict[int, list[float]] = {}
        for pair in measured.pairs:
            if pair.transport == "mpi" and pair.load == load and pair.both_ways == both:
                for point in pair.curve:
                    by_size.setdefault(point.size_bytes, []).append(point.seconds)
        if by_size:
            sizes = sorted(by_size)
            (line,) = axes.plot(sizes, [statistics.median(by_size[s]) for s in sizes], marker=".", label=label)
            low, high = [min(by_size[s]) for s in sizes], [max(by_size[s]) for s in sizes]
            axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda seconds, _: duration_text(seconds))  # matplotlib's default writes formulas
    axes.minorticks_off()
    axes.set_ylabel("time")
    axes.set_title("a message over MPI: median link, fastest to slowest")
    _finish_axes(axes)


def _draw_collectives(axes: Any, measured: Measurements) -> None:
    for collective in measured.collectives:
        sizes = [point.size_bytes for point in collective.curve]
        rates = [bus_bandwidth(p.size_bytes, p.seconds, collective.ranks) * 8 / 1e9 for p in collective.curve]
        axes.plot(sizes, rates, marker=".", label=describe_ranks(collective))
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bus bandwidth, Gb/s")
    axes.set_title(f"all-reduce over {measured.collectives[0].backend}")
    _finish_axes(axes)


def _finish_axes(axes: Any) -> None:
    axes.xaxis.set_major_formatter(lambda size, _: format_size(int(size), digits=3, binary=True))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("size")
    axes.grid(alpha=0.3)
    axes.legend()
