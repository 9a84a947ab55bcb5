"""A probe as a picture: heat map of the links, times against size, and bus bandwidth of all-reduce."""

from __future__ import annotations

import os
import statistics
from typing import Any

from distrib.cluster.measurements import Measurements
from distrib.probe.probe_report import bus_bandwidth, digits, matrix, ranks_text, unit_of, usual_most
from distrib.units import format_duration, format_size
from distrib.utils import plotting

LABELS_UP_TO = 40


def draw_probe(path: str | os.PathLike[str], measured: Measurements, way: str) -> None:
    """Draw `measured` into a file whose ending tells its kind. Raises ConfigError where that cannot be written."""
    name = os.fspath(path)
    plotting.check_plot_path(name)
    from matplotlib.figure import Figure

    curves = [pair for pair in measured.pairs if pair.transport == "mpi" and pair.curve]
    panels = 1 + bool(curves) + bool(measured.collectives)
    figure = Figure(figsize=(6.4 * panels, 5.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _heat_map(figure, axes[0], measured, way)
    if curves:
        _curves(axes[1], measured)
    if measured.collectives:
        _collectives(axes[-1], measured)
    figure.suptitle(f"{len(measured.hosts)} hosts, probed {measured.when}", fontsize=11)
    plotting.save_figure(figure, name)


def _heat_map(figure: Any, axes: Any, measured: Measurements, way: str) -> None:
    rates = matrix(measured, way)
    hosts = list(measured.hosts)
    top, exceeded = usual_most(rates.values()) if rates else (1.0, False)
    unit, name = unit_of(top)
    nothing = float("nan")
    cells = [[rates[a, b] * 8 / unit if (a, b) in rates else nothing for b in hosts] for a in hosts]
    from matplotlib import colormaps

    colours = colormaps["viridis"].with_extremes(bad="0.9")
    highest = top * 8 / unit
    image = axes.imshow(cells, cmap=colours, vmin=0, vmax=highest)
    figure.colorbar(image, ax=axes, shrink=0.8, label=name, extend="max" if exceeded else "neither")
    axes.set_title(f"bandwidth over {way}")
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    size, every = 9 if len(hosts) <= 16 else 6, -(-len(hosts) // LABELS_UP_TO)
    axes.set_xticks(range(0, len(hosts), every), hosts[::every], rotation=90, fontsize=size)
    axes.set_yticks(range(0, len(hosts), every), hosts[::every], fontsize=size)
    if len(hosts) <= 12:
        for row, source in enumerate(hosts):
            for column, target in enumerate(hosts):
                if (source, target) in rates:
                    value = cells[row][column]
                    colour = "black" if value > 0.6 * highest else "white"
                    axes.text(column, row, digits(value), ha="center", va="center", color=colour, fontsize=8)


def _curves(axes: Any, measured: Measurements) -> None:
    """Median of all links over a band from the fastest to the slowest."""
    from matplotlib.ticker import LogLocator

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
            axes.fill_between(
                sizes,
                [min(by_size[s]) for s in sizes],
                [max(by_size[s]) for s in sizes],
                color=line.get_color(),
                alpha=0.2,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(
        lambda seconds, _: format_duration(seconds, digits=3)
    )  # matplotlib's own writes formulas
    axes.minorticks_off()
    _sizes(axes)
    axes.set_ylabel("time")
    axes.set_title("a message over MPI: median link, fastest to slowest")
    axes.grid(alpha=0.3)
    axes.legend()


def _collectives(axes: Any, measured: Measurements) -> None:
    for collective in measured.collectives:
        sizes = [point.size_bytes for point in collective.curve]
        rates = [bus_bandwidth(p.size_bytes, p.seconds, collective.ranks) * 8 / 1e9 for p in collective.curve]
        axes.plot(sizes, rates, marker=".", label=ranks_text(collective))
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    _sizes(axes)
    axes.set_ylabel("bus bandwidth, Gb/s")
    axes.set_title(f"all-reduce over {measured.collectives[0].backend}")
    axes.grid(alpha=0.3)
    axes.legend()


def _sizes(axes: Any) -> None:
    axes.xaxis.set_major_formatter(lambda size, _: format_size(int(size), digits=3, binary=True))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("size")
