"""The picture of the network: switches, the hosts on them, and the ways between hosts in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrib.cluster.node import shown_hosts
from distrib.units import format_rate
from distrib.utils.plotting import AMBER, GREEN, GREY, INK, LINE, NETWORKS, PANEL, PAPER, draw_box, truncated_label

if TYPE_CHECKING:
    from distrib_launch.topology_view.model import LinkView, SwitchView, View

MAX_RACKS = 8
MAX_HOSTS = 32


class Network:
    """The switches with the hosts on them, and the ways between hosts in words."""

    def __init__(self, view: View, colours: dict[str, str]) -> None:
        self.view, self.colours = view, colours
        self.by_name = {switch.name: switch for switch in view.switches}
        leaves = [switch for switch in view.switches if switch.names]
        named = {name for switch in leaves for name in switch.names}
        rest = [name for group in view.groups for name in group.names if name not in named]
        self.racks = [(switch.name, list(switch.names)) for switch in leaves[:MAX_RACKS]]
        self.more = len(leaves) - len(self.racks)
        if rest:
            self.racks.append(("network" if not leaves else "no switch named", rest))
        self.words = [_way_words(link) for link in view.between[:8]]
        if len(view.between) > 8:
            self.words.append((f"and {len(view.between) - 8} more kinds of ways", "catalogued"))
        self.columns = 8 if len(self.racks) < 5 else 4
        self.sizes = [self._rack_size(members) for _, members in self.racks]
        self.levels = max((self._depth(switch) for switch in view.switches if switch.top), default=1)
        rack_height = max((height for _, height in self.sizes), default=0.0)
        self.single = view.hosts == 1 and not view.switches
        self.width = (
            max(sum(w + 0.3 for w, _ in self.sizes), 0.085 * max((len(w) for w, _ in self.words), default=0)) + 0.6
        )
        self.height = (
            0.0 if self.single else 0.45 + 1.05 * (self.levels - 1) + rack_height + 0.3 + 0.24 * len(self.words)
        )

    def draw(self, axes: Any, left: float, top: float, width: float) -> None:
        if self.single:
            return
        axes.text(left, top - 0.12, "Network", size=12.5, weight="bold", color=INK, va="center")
        self._draw_legend(axes, left + width, top - 0.12)
        y = top - 0.4 - 1.05 * (self.levels - 1)
        x = left + (width - sum(w + 0.3 for w, _ in self.sizes) + 0.3) / 2
        centres: dict[str, tuple[float, float]] = {}
        for (name, members), (box_width, height) in zip(self.racks, self.sizes, strict=True):
            self._draw_rack(axes, name, members, x, y, box_width, height)
            centres[name] = (x + box_width / 2, y)
            x += box_width + 0.3
        for switch in self.view.switches:
            if switch.top:
                self._draw_above(axes, switch, centres, top - 0.4)
        if self.more:
            axes.text(left + width, y + 0.1, f"and {self.more} more racks", size=9, color=GREY, ha="right")
        y -= max((height for _, height in self.sizes), default=0.0) + 0.3
        for words, origin in self.words:
            axes.text(left, y, words, size=9.5, color=GREEN if origin == "measured" else INK, va="center")
            y -= 0.24

    def _draw_legend(self, axes: Any, right: float, y: float) -> None:
        nics = [nic for group in self.view.groups for nic in group.nics]
        entries = [(kind, NETWORKS[kind], True) for kind in NETWORKS if any(nic.kind == kind for nic in nics)]
        entries += [("filled: GPUDirect RDMA", GREY, False)] if any(nic.gpudirect for nic in nics) else []
        for text, colour, swatch in reversed(entries):
            axes.text(right, y, text, size=8.5, color=GREY, ha="right", va="center")
            right -= 0.068 * len(text) + 0.12
            if swatch:
                draw_box(axes, right - 0.12, y - 0.06, 0.14, 0.12, colour, colour, radius=0.02)
                right -= 0.3

    def _rack_size(self, members: list[str]) -> tuple[float, float]:
        shown = min(len(members), MAX_HOSTS)
        columns = min(shown, self.columns)
        lines = -(-shown // columns) if columns else 0
        return max(columns * 0.34 + 0.3, 1.9), 0.62 + 0.34 * lines + (0.2 if len(members) > MAX_HOSTS else 0.0)

    def _draw_rack(
        self,
        axes: Any,
        name: str,
        members: list[str],
        x: float,
        y: float,
        width: float,
        height: float,
    ) -> None:
        draw_box(axes, x, y - height, width, height, PANEL, LINE)
        axes.text(x + width / 2, y - 0.17, name, size=10, weight="bold", color=INK, ha="center", va="center")
        axes.text(
            x + width / 2,
            y - 0.39,
            truncated_label(shown_hosts(members), width),
            size=8,
            color=GREY,
            ha="center",
            va="center",
        )
        shown = members[:MAX_HOSTS]
        columns = min(len(shown), self.columns)
        begin = x + (width - columns * 0.34) / 2
        for number, host in enumerate(shown):
            column, line = number % columns, number // columns
            colour = self.colours.get(host, GREY)
            draw_box(
                axes, begin + column * 0.34 + 0.04, y - 0.82 - line * 0.34, 0.26, 0.26, colour, colour, radius=0.04
            )
        if len(members) > MAX_HOSTS:
            axes.text(
                x + width / 2,
                y - height + 0.12,
                f"and {len(members) - MAX_HOSTS} more",
                size=8,
                color=GREY,
                ha="center",
                va="center",
            )

    def _draw_above(
        self, axes: Any, switch: SwitchView, centres: dict[str, tuple[float, float]], y: float
    ) -> tuple[float, float] | None:
        """Draw a switch over those below it; returns the middle of its lower edge."""
        if switch.name in centres:
            return centres[switch.name]
        below = [
            (self.by_name[name], at)
            for name in switch.switches
            if (at := self._draw_above(axes, self.by_name[name], centres, y - 1.05))
        ]
        if not below:
            return None
        x = sum(at[0] for _, at in below) / len(below)
        for lower, (at_x, at_y) in below:
            narrow = lower.oversubscription > 1
            axes.plot([x, at_x], [y - 0.32, at_y], color=AMBER if narrow else GREY, lw=1.6 if narrow else 2.6, zorder=0)
            label = f"{lower.oversubscription:g}:1" if narrow else ""
            if lower.uplink_bytes_per_second:
                label = f"{format_rate(lower.uplink_bytes_per_second, digits=3)}\n{label}".strip()
            if label:
                # Nearer to the lower end, where the lines have room between them.
                axes.text(
                    x + (at_x - x) * 0.62, y - 0.32 + (at_y - y + 0.32) * 0.62, label, size=8.5, weight="bold",
                    color=AMBER if narrow else GREY, ha="center", va="center", linespacing=1.1,
                    bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.2},
                )  # fmt: skip
        width = max(1.6, 0.11 * len(switch.name) + 0.4)
        draw_box(axes, x - width / 2, y - 0.32, width, 0.32, INK, INK, radius=0.05)
        axes.text(x, y - 0.16, switch.name, size=10, weight="bold", color="#ffffff", ha="center", va="center")
        centres[switch.name] = (x, y)
        return centres[switch.name]

    def _depth(self, switch: SwitchView) -> int:
        return 1 + max((self._depth(self.by_name[name]) for name in switch.switches), default=0)


def _way_words(link: LinkView) -> tuple[str, str]:
    got = "measured" if link.origin == "measured" else "usable"
    words = f"{link.name}:  {link.text}  {format_rate(link.bandwidth_bytes_per_second, digits=3)} {got}"
    if link.oversubscription > 1 and link.shared_bytes_per_second:
        left = format_rate(link.shared_bytes_per_second, digits=3)
        words += f", {left} a host when all send ({link.oversubscription:g}:1)"
    if (
        link.slowest
        and link.slowest_bytes_per_second
        and link.slowest_bytes_per_second < 0.9 * link.bandwidth_bytes_per_second
    ):
        words += f", slowest {format_rate(link.slowest_bytes_per_second, digits=3)} ({link.slowest})"
    return words, link.origin
