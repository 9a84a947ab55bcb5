"""Diagram of `distrib-topo show --plot`: a card for each kind of host, and the switches with their hosts. Lengths in inches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrib.cluster.node import shown_hosts
from distrib.units import format_rate
from distrib.utils import plotting
from distrib.utils.plotting import (
    AMBER,
    CELL,
    GAP,
    GREEN,
    GREY,
    GROUPS,
    INK,
    LINE,
    NETWORKS,
    NVLINK,
    PAD,
    PANEL,
    PAPER,
    draw_box,
    fitted_font_size,
    truncated_label,
)

if TYPE_CHECKING:
    from distrib_launch.topology_view.model import GroupView, LinkView, SwitchView, View

MAX_CARDS, MAX_GPUS, MAX_RACKS, MAX_LINKS = 6, 16, 8, 8
"""Limits of one page; a text gives the number of items that are not drawn."""
PAGE_WIDTH, LINE_HEIGHT, RACK_WIDTH, LEVEL_HEIGHT = 15.0, 0.24, 2.2, 1.05

Line = tuple[str, str]
"""A line of text and its colour."""


def plot(view: View, path: str) -> None:
    """Draw the cluster.

    Args:
        view: The cluster.
        path: File to write; its suffix selects the format.

    Raises:
        ConfigError: The format is not supported, or the file cannot be written.
    """
    plotting.check_plot_path(path)
    from matplotlib.figure import Figure  # it takes a second to load

    groups = [group for group in view.groups if group.described]
    cards = [_Card(group, GROUPS[number % len(GROUPS)]) for number, group in enumerate(groups[:MAX_CARDS])]
    rows: list[list[_Card]] = []
    for card in cards:
        if rows and sum(other.width + 0.3 for other in rows[-1]) + card.width <= PAGE_WIDTH:
            rows[-1].append(card)
        else:
            rows.append([card])
    network = _Network(view)
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
        counts = f"{view.hosts} host(s), {view.gpus} GPU(s)"
        if len(groups) > len(cards):
            counts += f" ({len(groups) - len(cards)} more kinds of hosts than drawn)"
        when = f"measured {view.measured_when}" if view.measured_when else "rates by data sheet, nothing measured"
        axes.text(width - 0.3, top, f"{counts} · {when}", size=10, color=GREY, va="center", ha="right")
        top -= 0.4
        for row, tallest in zip(rows, heights, strict=True):
            left = 0.3
            for card in row:
                card.draw(axes, left, top)
                left += card.width + 0.3
            top -= tallest + 0.3
        network.draw(axes, 0.3, top)
        plotting.save_figure(figure, path)


class _Card:
    """Card of one kind of host: its GPUs, NICs, links and warnings."""

    def __init__(self, group: GroupView, colour: str) -> None:
        self.group, self.colour = group, colour
        self.gpus = min(group.gpus or 0, MAX_GPUS)
        self.title = group.hosts + (f"   {len(group.names)} hosts" if len(group.names) > 1 else "")
        hardware = [*group.host_words, group.gpu_words if group.gpus else "no GPU"]
        if group.slots:
            hardware.append(f"{group.slots} slot(s)")
        self.lines: list[Line] = [(" · ".join(hardware), INK)]
        if group.nvswitch or group.nvlink_pairs:
            self.lines.append(
                ("GPUs joined by NVSwitch" if group.nvswitch else "GPUs joined in pairs by NVLink", NVLINK)
            )
        self.lines += [_link_line(link) for link in group.inside]
        self.lines += [(rule.text.partition(";")[0], AMBER) for rule in group.rules if not rule.kept]
        self.width = max(
            self.gpus * (CELL + GAP) + 2 * PAD, len(group.nics) * 1.1 + 2 * PAD, 0.115 * len(self.title) + 0.6, 3.6,
            0.079 * max(len(text) for text, _ in self.lines) + 2 * PAD,
        )  # fmt: skip
        self.height = (
            0.6 + (CELL + GAP) * bool(self.gpus) + 0.65 * bool(group.nics) + LINE_HEIGHT * len(self.lines) + 0.1
        )

    def draw(self, axes: Any, left: float, top: float) -> None:
        draw_box(axes, left, top - self.height, self.width, self.height, PANEL, LINE)
        x, y = left + PAD, top - 0.3
        axes.text(x, y, self.title, size=12.5, weight="bold", color=self.colour, va="center")
        y -= 0.25
        for gpu in range(self.gpus):
            at = x + gpu * (CELL + GAP)
            draw_box(axes, at, y - CELL, CELL, CELL, self.colour, self.colour, radius=0.06)
            _centre(axes, at + CELL / 2, y - CELL / 2, f"GPU\n{gpu}", 9, PAPER)
        y -= (CELL + GAP) * bool(self.gpus)
        for number, nic in enumerate(self.group.nics):
            colour = NETWORKS.get(nic.kind, GREY)
            rate = f"{nic.count} x {nic.text}" if nic.count > 1 else nic.text
            draw_box(axes, x + 1.1 * number, y - 0.5, 1.0, 0.5, colour if nic.gpudirect else PAPER, colour, radius=0.05)
            size = fitted_font_size(max(nic.names, rate, key=len), 1.0, 8.5)
            _centre(
                axes, x + 1.1 * number + 0.5, y - 0.25, f"{nic.names}\n{rate}", size, PAPER if nic.gpudirect else colour
            )
        y -= 0.65 * bool(self.group.nics)
        _draw_lines(axes, self.lines, x, y - 0.1)


class _Network:
    """Drawing of the switches with their hosts, and the links between hosts as text."""

    def __init__(self, view: View) -> None:
        self.by_name = {switch.name: switch for switch in view.switches}
        self.tops = [switch for switch in view.switches if switch.top]
        leaves = [switch for switch in view.switches if switch.names]
        self.racks = [(switch.name, switch.names) for switch in leaves[:MAX_RACKS]]
        named = {name for switch in leaves for name in switch.names}
        rest = tuple(name for group in view.groups for name in group.names if name not in named)
        if rest:
            self.racks.append(("no switch described" if leaves else "network", rest))
        self.lines = [_link_line(link) for link in view.between[:MAX_LINKS]]
        if len(leaves) > MAX_RACKS:
            self.lines.insert(0, (f"and {len(leaves) - MAX_RACKS} more racks", GREY))
        self.is_drawn = view.hosts > 1 or bool(view.switches)
        levels = max((self._depth(switch) for switch in self.tops), default=1)
        self.rise = LEVEL_HEIGHT * (levels - 1)
        longest = max((len(text) for text, _ in self.lines), default=0)
        self.width = max(len(self.racks) * RACK_WIDTH, 0.085 * longest) + 0.6
        self.height = (0.4 + self.rise + 0.9 + LINE_HEIGHT * len(self.lines)) if self.is_drawn else 0.0

    def draw(self, axes: Any, left: float, top: float) -> None:
        if not self.is_drawn:
            return
        axes.text(left, top - 0.12, "Network", size=12.5, weight="bold", color=INK, va="center")
        y = top - 0.4 - self.rise
        places: dict[str, tuple[float, float]] = {}
        for number, (name, hosts) in enumerate(self.racks):
            centre = left + RACK_WIDTH * (number + 0.5)
            draw_box(axes, centre - RACK_WIDTH / 2 + 0.1, y - 0.6, RACK_WIDTH - 0.2, 0.6, PANEL, LINE)
            _centre(axes, centre, y - 0.18, truncated_label(name, RACK_WIDTH - 0.2), 10, INK)
            label = truncated_label(f"{len(hosts)}: {shown_hosts(hosts)}", RACK_WIDTH - 0.2)
            _centre(axes, centre, y - 0.42, label, 8, GREY)
            places[name] = (centre, y)
        for switch in self.tops:
            self._draw_switch(axes, switch, places, top - 0.4)
        _draw_lines(axes, self.lines, left, y - 0.8)

    def _draw_switch(
        self, axes: Any, switch: SwitchView, places: dict[str, tuple[float, float]], y: float
    ) -> tuple[float, float] | None:
        """Draw a switch above those below it; return the middle of its upper edge, None if nothing below is drawn."""
        if switch.name in places:
            return places[switch.name]
        lower = [
            (self.by_name[name], self._draw_switch(axes, self.by_name[name], places, y - LEVEL_HEIGHT))
            for name in switch.switches
        ]
        drawn = [(each, at) for each, at in lower if at]
        if not drawn:
            return None
        x = sum(at[0] for _, at in drawn) / len(drawn)
        for each, (at_x, at_y) in drawn:
            colour = AMBER if each.oversubscription > 1 else GREY
            axes.plot([x, at_x], [y - 0.32, at_y], color=colour, lw=2, zorder=0)
            uplink = format_rate(each.uplink_bytes_per_second, digits=3) if each.uplink_bytes_per_second else ""
            ratio = f"{each.oversubscription:g}:1" if each.oversubscription > 1 else ""
            _centre(
                axes,
                x + (at_x - x) * 0.62,
                y - 0.32 + (at_y - y + 0.32) * 0.62,
                f"{uplink}\n{ratio}".strip(),
                8.5,
                colour,
                background=True,
            )
        draw_box(axes, x - 0.8, y - 0.32, 1.6, 0.32, INK, INK, radius=0.05)
        _centre(axes, x, y - 0.16, truncated_label(switch.name, 1.6), 10, PAPER)
        places[switch.name] = (x, y)
        return places[switch.name]

    def _depth(self, switch: SwitchView) -> int:
        return 1 + max((self._depth(self.by_name[name]) for name in switch.switches), default=0)


def _centre(axes: Any, x: float, y: float, text: str, size: float, colour: str, *, background: bool = False) -> None:
    # The background hides the line behind a label.
    box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2} if background else None
    axes.text(x, y, text, size=size, weight="bold", color=colour, ha="center", va="center", linespacing=1.2, bbox=box)


def _draw_lines(axes: Any, lines: list[Line], x: float, y: float) -> None:
    for number, (text, colour) in enumerate(lines):
        axes.text(x, y - LINE_HEIGHT * number, text, size=9.5, color=colour, va="center")


def _link_line(link: LinkView) -> Line:
    rate = format_rate(link.bandwidth_bytes_per_second, digits=3)
    text = f"{link.name}:  {link.text}  {rate} {'measured' if link.origin == 'measured' else 'usable'}"
    if link.oversubscription > 1 and link.shared_bytes_per_second:
        shared = format_rate(link.shared_bytes_per_second, digits=3)
        text += f", {shared} a host when all send ({link.oversubscription:g}:1)"
    return text, GREEN if link.origin == "measured" else INK
