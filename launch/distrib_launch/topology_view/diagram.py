"""The picture of `distrib-topo show --plot`: what a host of each kind is made of, and how the hosts are joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrib.utils import plotting
from distrib.utils.plotting import GREY, GROUPS, INK, PAPER
from distrib_launch.topology_view.network_diagram import Network
from distrib_launch.topology_view.node_diagram import Card

if TYPE_CHECKING:
    from distrib_launch.topology_view.model import View

MAX_CARDS = 6


def plot(view: View, path: str) -> None:
    """Draw the view into a file. Raises ConfigError where it is of no kind of picture, or cannot be written."""
    plotting.check_plot_path(path)
    from matplotlib.figure import Figure

    described = [group for group in view.groups if group.described]
    groups = described[:MAX_CARDS]
    cards = [Card(group, GROUPS[number % len(GROUPS)]) for number, group in enumerate(groups)]
    colours = {name: GROUPS[number % len(GROUPS)] for number, group in enumerate(groups) for name in group.names}
    network = Network(view, colours)
    rows = _rows(cards)
    heights = [max(card.height for card in row) for row in rows]
    width = max([*(sum(card.width + 0.3 for card in row) for row in rows), network.width, 6.0]) + 0.4
    height = 0.75 + sum(heights) + 0.3 * len(heights) + network.height + 0.2
    with plotting.plot_style():
        figure = Figure(figsize=(width, height), facecolor=PAPER)
        axes: Any = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(0, height))
        axes.axis("off")
        top = height - 0.3
        axes.text(0.3, top, view.name or "Cluster", size=17, weight="bold", color=INK, va="center")
        counts = f"{view.hosts} host{'' if view.hosts == 1 else 's'}" + (
            f", {view.gpus} GPU{'' if view.gpus == 1 else 's'}" if view.gpus else ""
        )
        if len(described) > len(groups):
            counts += f" ({len(described) - len(groups)} more kinds of hosts than drawn)"
        when = f"measured {view.measured_when}" if view.measured_when else "rates by data sheet, nothing measured"
        axes.text(width - 0.3, top, f"{counts} · {when}", size=10, color=GREY, va="center", ha="right")
        top -= 0.4
        for row, tallest in zip(rows, heights, strict=True):
            left = 0.3
            for card in row:
                card.draw(axes, left, top)
                left += card.width + 0.3
            top -= tallest + 0.3
        network.draw(axes, 0.3, top, width - 0.6)
        plotting.save_figure(figure, path)


def _rows(cards: list[Card]) -> list[list[Card]]:
    """Cards side by side, as many as fit on a page."""
    rows: list[list[Card]] = []
    for card in cards:
        if rows and sum(other.width + 0.3 for other in rows[-1]) + card.width <= 15:
            rows[-1].append(card)
        else:
            rows.append([card])
    return rows
