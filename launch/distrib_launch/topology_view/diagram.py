"""Diagram of `distrib-topo show --plot`: each kind of host with its GPUs and links, and the switches above the hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distrib.cluster.node import shown_hosts
from distrib.units import bit_rate_text, rate_text
from distrib.utils import plotting as style
from distrib_launch.topology_view.model import GroupView, LinkView, SwitchView, View

MAX_ITEMS = 8
"""Largest number of kinds of hosts, racks and links on the page, and half that of a host's GPUs; a text counts the others."""


def plot(view: View, path: str) -> None:
    """Draw the cluster.

    Args:
        view: The cluster.
        path: File to write; its suffix selects the format.

    Raises:
        ConfigError: The format is not supported, or the file cannot be written.
    """
    style.check_plot_path(path)
    groups = [group for group in view.groups if group.described]
    when = f"measured {view.measured_when}" if view.measured_when else "rates by data sheet, nothing measured"
    with style.plot_style():
        figure = style.new_figure(1, 1)
        figure.set_layout_engine(None)
        page = _Page(figure.add_axes((0, 0, 1, 1)))
        page.write(view.name or "Cluster", style.INK, 17)
        page.write(f"{view.hosts} host(s), {view.gpus} GPU(s) · {when}", style.GREY)
        for number, group in enumerate(groups[:MAX_ITEMS]):
            page.draw_group(group, style.GROUPS[number % len(style.GROUPS)])
        page.write_more(len(groups), "kinds of hosts")
        if view.hosts > 1 or view.switches:
            page.draw_network(view)
        figure.set_size_inches(page.width, style.PAD - page.y)
        page.axes.set(xlim=(0, page.width), ylim=(page.y - style.PAD, 0))
        page.axes.axis("off")
        style.save_figure(figure, path)


class _Page:
    """Page that grows downwards from y = 0; the unit of its axes is an inch."""

    def __init__(self, axes: Any) -> None:
        self.axes = axes
        self.y, self.width = -style.PAD, 6.0
        self.switches: dict[str, SwitchView] = {}
        self.upper_edges: dict[str, tuple[float, float]] = {}  # of drawn switches, their middle

    def write(self, text: str, colour: str, size: float = 9.5) -> None:
        """Write a line of text; `size` in points."""
        self.axes.text(style.PAD, self.y, text, size=size, weight="bold" if size > 10 else None, color=colour, va="top")
        self.y -= 0.026 * size
        self.width = max(self.width, 0.009 * size * len(text) + 2 * style.PAD)

    def write_more(self, count: int, what: str) -> None:
        if count > MAX_ITEMS:
            self.write(f"and {count - MAX_ITEMS} more {what}", style.GREY)

    def draw_group(self, group: GroupView, colour: str) -> None:
        """Draw a kind of host: its GPUs as boxes; hardware, NICs, links and failed hardware checks as text."""
        self.y -= style.PAD
        top, cell = self.y, style.CELL + style.GAP
        self.write(group.hosts + (f"   {len(group.names)} hosts" if len(group.names) > 1 else ""), colour, 12.5)
        gpus = min(group.gpus or 0, 2 * MAX_ITEMS)
        for gpu in range(gpus):
            self._box(style.PAD + gpu * cell, self.y, style.CELL, style.CELL, f"GPU\n{gpu}", colour, style.PAPER)
        self.y -= cell * bool(gpus)
        self.width = max(self.width, gpus * cell + 2 * style.PAD)
        slots = [f"{group.slots} slot(s)"] if group.slots else []
        self.write(" · ".join([*group.host_words, group.gpu_words if group.gpus else "no GPU", *slots]), style.INK)
        for nic in group.nics:
            rate = f"{nic.count} x {nic.text}" if nic.count > 1 else nic.text
            self.write(f"{nic.names}: {rate} {nic.kind}{', GPUDirect RDMA' if nic.gpudirect else ''}", style.INK)
        if group.nvswitch or group.nvlink_pairs:
            self.write(f"GPUs connected {'by NVSwitch' if group.nvswitch else 'in pairs by NVLink'}", style.NVLINK)
        for link in group.inside:
            self.write(*_link_line(link, rate_text))
        for rule in group.rules:
            if not rule.kept:
                self.write(rule.text.partition(";")[0], style.AMBER)
        self.axes.plot([style.PAD / 2] * 2, [top, self.y], color=colour, lw=3)

    def draw_network(self, view: View) -> None:
        """Draw racks with the switches above them, and write the links between hosts."""
        self.y -= style.PAD
        self.write("Network", style.INK, 12.5)
        self.switches = {switch.name: switch for switch in view.switches}
        leaves = [(switch.name, switch.names) for switch in view.switches if switch.names]
        named = {name for _, names in leaves for name in names}
        rest = tuple(name for group in view.groups for name in group.names if name not in named)
        racks = leaves[:MAX_ITEMS] + [("no switch described" if leaves else "network", rest)] * bool(rest)
        tops = [switch for switch in view.switches if switch.top]
        top, width = self.y, 2.2
        self.y -= 1.05 * (max(map(self._depth, tops), default=1) - 1)
        for number, (name, hosts) in enumerate(racks):
            words = [style.truncated_label(text, width) for text in (name, f"{len(hosts)}: {shown_hosts(hosts)}")]
            x = style.PAD + number * width
            edge = self._box(x, self.y, width - style.GAP, 0.6, "\n".join(words), style.PANEL, style.INK)
            self.upper_edges[name] = edge
        for switch in tops:
            self._draw_switch(switch, top)
        self.y -= 0.6 + style.PAD
        self.width = max(self.width, len(racks) * width + style.PAD)
        self.write_more(len(leaves), "racks")
        for link in view.between[:MAX_ITEMS]:
            self.write(*_link_line(link, bit_rate_text))

    def _depth(self, switch: SwitchView) -> int:
        return 1 + max((self._depth(self.switches[name]) for name in switch.switches), default=0)

    def _draw_switch(self, switch: SwitchView, y: float) -> None:
        """Draw a switch above those below it, unless none of them is drawn."""
        for name in switch.switches:
            self._draw_switch(self.switches[name], y - 1.05)
        below = [self.switches[name] for name in switch.switches if name in self.upper_edges]
        if not below or switch.name in self.upper_edges:
            return
        x = sum(self.upper_edges[lower.name][0] for lower in below) / len(below)
        for lower in below:
            to_x, to_y = self.upper_edges[lower.name]
            colour = style.AMBER if lower.oversubscription > 1 else style.GREY
            self.axes.plot([x, to_x], [y - 0.32, to_y], color=colour, lw=2, zorder=0)
            rate = bit_rate_text(lower.uplink_bytes_per_second) if lower.uplink_bytes_per_second else ""
            label = f"{rate}\n{lower.oversubscription:g}:1" if lower.oversubscription > 1 else rate
            self._text(x + (to_x - x) * 0.62, y - 0.32 + (to_y - y + 0.32) * 0.62, label.strip(), colour, style.PAPER)
        name = style.truncated_label(switch.name, 1.6)
        self.upper_edges[switch.name] = self._box(x - 0.8, y, 1.6, 0.32, name, style.INK, style.PAPER)

    def _box(
        self, x: float, top: float, width: float, height: float, text: str, face: str, ink: str
    ) -> tuple[float, float]:
        """Draw a box with a text in its middle; return the middle of its upper edge."""
        style.draw_box(self.axes, x, top - height, width, height, face, style.LINE)
        self._text(x + width / 2, top - height / 2, text, ink, face)
        return x + width / 2, top

    def _text(self, x: float, y: float, text: str, ink: str, face: str) -> None:
        """Write a text with its middle at a point; its background hides the line behind it."""
        box = {"facecolor": face, "edgecolor": "none", "pad": 1.0}
        self.axes.text(x, y, text, size=8.5, weight="bold", color=ink, ha="center", va="center", bbox=box)


def _link_line(link: LinkView, text_of: Callable[[float], str]) -> tuple[str, str]:
    """Describe a class of links; return the text and its colour."""
    rate = text_of(link.bandwidth_bytes_per_second)
    text = f"{link.name}:  {link.text}  {rate} {'measured' if link.origin == 'measured' else 'usable'}"
    if link.oversubscription > 1 and link.shared_bytes_per_second:
        shared = text_of(link.shared_bytes_per_second)
        text += f", {shared} a host when all send ({link.oversubscription:g}:1)"
    return text, style.GREEN if link.origin == "measured" else style.INK
