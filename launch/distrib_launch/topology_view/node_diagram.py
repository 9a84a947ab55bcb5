"""The picture of one kind of host: GPUs, the links between them, NUMA nodes, NICs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrib.units import format_rate, format_size
from distrib.utils.plotting import (
    AMBER,
    CELL,
    GAP,
    GREEN,
    GREY,
    INK,
    LINE,
    NETWORKS,
    NVLINK,
    PAD,
    PANEL,
    draw_box,
    fitted_font_size,
)
from distrib_launch.topology_view.model import nvlink_name

if TYPE_CHECKING:
    from distrib_launch.topology_view.model import GroupView, LinkView, NicView

MAX_GPUS = 16


class _Block:
    """A NUMA node, or the whole host where nobody told of any: its GPUs and NICs."""

    def __init__(self, label: str, gpus: list[int], nics: list[NicView]) -> None:
        self.label, self.gpus, self.nics = label, gpus, nics
        columns = max(len(gpus), 1)
        self.width = max(columns * (CELL + GAP) - GAP, len(nics) * 0.98, 1.3) + 2 * 0.12


class Card:
    """One kind of host."""

    def __init__(self, group: GroupView, colour: str) -> None:
        self.group, self.colour = group, colour
        self.blocks = _blocks(group)
        self.warnings = [rule.text.partition(";")[0] for rule in group.rules if not rule.kept]
        self.title = f"{group.hosts}" + (f"   {len(group.names)} hosts" if len(group.names) > 1 else "")
        self.lines = [line for line in (_host_words(group), _gpu_words(group)) if line]
        self.links = [(_link_words(link), link) for link in group.inside]
        self.mesh = 0.0 if not group.gpus else 0.5 if group.nvswitch else 0.95 if group.nvlink_pairs else 0.0
        texts = [*self.lines, *(words for words, _ in self.links), *self.warnings]
        self.width = max(
            sum(block.width for block in self.blocks) + GAP * (len(self.blocks) - 1) + 2 * PAD,
            0.115 * len(self.title) + 0.6, 0.079 * max(map(len, texts), default=0) + 2 * PAD, 3.6,
        )  # fmt: skip
        self.nic_height = 0.62 if any(block.nics for block in self.blocks) else 0.0
        gpus = (CELL + 0.12) if group.gpus else 0.0
        self.head = 0.5 + 0.24 * len(self.lines) + 0.1
        self.body = self.mesh + gpus + 0.3 + self.nic_height
        self.height = self.head + self.body + 0.25 + 0.22 * (len(self.links) + len(self.warnings))

    def draw(self, axes: Any, left: float, top: float) -> None:
        stack = min(len(self.group.names) - 1, 2)
        for behind in range(stack, 0, -1):
            draw_box(
                axes, left + 0.07 * behind, top - self.height + 0.07 * behind, self.width, self.height, "#ffffff", LINE
            )
        draw_box(axes, left, top - self.height, self.width, self.height, PANEL, LINE)
        x, y = left + PAD, top - 0.3
        axes.text(x, y, self.title, size=12.5, weight="bold", color=self.colour, va="center")
        for number, line in enumerate(self.lines):
            y -= 0.28 if not number else 0.24
            axes.text(x, y, line, size=9.5, color=INK, va="center")
        self._draw_body(axes, left, top - self.head)
        y = top - self.head - self.body - 0.2
        for words, link in self.links:
            axes.text(x, y, words, size=9, color=GREEN if link.origin == "measured" else INK, va="center")
            y -= 0.22
        for warning in self.warnings:
            axes.text(x, y, warning, size=9, color=AMBER, va="center")
            y -= 0.22

    def _draw_body(self, axes: Any, left: float, top: float) -> None:
        inner = sum(block.width for block in self.blocks) + GAP * (len(self.blocks) - 1)
        x = left + (self.width - inner) / 2
        below = top - self.mesh
        gpu_height = (CELL + 0.12) if self.group.gpus else 0.0
        centres: dict[int, float] = {}
        for block in self.blocks:
            height = gpu_height + 0.3 + self.nic_height
            draw_box(axes, x, below - height, block.width, height, "#ffffff", LINE)
            axes.text(
                x + block.width / 2,
                below - gpu_height - 0.15,
                block.label,
                size=8,
                color=GREY,
                ha="center",
                va="center",
            )
            used = len(block.gpus) * (CELL + GAP) - GAP
            for place, gpu in enumerate(block.gpus):
                at = x + (block.width - used) / 2 + place * (CELL + GAP)
                centres[gpu] = at + CELL / 2
                draw_box(axes, at, below - 0.1 - CELL, CELL, CELL, self.colour, self.colour, radius=0.06)
                axes.text(
                    at + CELL / 2,
                    below - 0.1 - CELL / 2,
                    f"GPU\n{gpu}",
                    size=9,
                    weight="bold",
                    color="#ffffff",
                    ha="center",
                    va="center",
                )
            self._draw_nics(axes, block, x, below - gpu_height - 0.3)
            x += block.width + GAP
        if self.group.gpus and self.group.gpus > MAX_GPUS:
            axes.text(
                left + self.width - PAD,
                top + 0.02,
                f"{MAX_GPUS} of {self.group.gpus} shown",
                size=8,
                color=GREY,
                ha="right",
            )
        self._draw_nvlink(axes, centres, below)

    def _draw_nics(self, axes: Any, block: _Block, x: float, top: float) -> None:
        if not block.nics:
            return
        each = (block.width - 0.16) / len(block.nics)
        for number, nic in enumerate(block.nics):
            at = x + 0.08 + number * each
            colour = NETWORKS.get(nic.kind, GREY)
            solid = bool(nic.gpudirect)
            draw_box(axes, at + 0.03, top - 0.54, each - 0.06, 0.5, colour if solid else "#ffffff", colour, radius=0.05)
            rate = f"{nic.count} x {nic.text}" if nic.count > 1 else nic.text
            rate = f"RoCE {rate}" if nic.kind == "RoCE" else rate
            axes.text(
                at + each / 2, top - 0.29, f"{nic.names}\n{rate}", size=fitted_font_size(max(nic.names, rate, key=len), each, 8.5),
                color="#ffffff" if solid else colour, ha="center", va="center", linespacing=1.25,
            )  # fmt: skip

    def _draw_nvlink(self, axes: Any, centres: dict[int, float], top: float) -> None:
        if self.group.nvswitch and centres:
            first, last = min(centres.values()) - CELL / 2, max(centres.values()) + CELL / 2
            draw_box(axes, first, top + 0.14, last - first, 0.28, NVLINK, NVLINK, radius=0.05)
            name = next((link.text for link in self.group.inside if link.text.startswith("NVLink")), "NVLink")
            axes.text(
                (first + last) / 2,
                top + 0.28,
                f"NVSwitch, {name} to each GPU",
                size=9,
                weight="bold",
                color="#ffffff",
                ha="center",
                va="center",
            )
            for centre in centres.values():
                axes.plot([centre, centre], [top - 0.1, top + 0.14], color=NVLINK, lw=2.5, solid_capstyle="butt")
            return
        pairs = [(tuple(map(int, pair.split("-"))), links) for pair, links in self.group.nvlink_pairs.items()]
        drawn = [(centres[a], centres[b], links) for (a, b), links in pairs if a in centres and b in centres]
        widest = max((b - a for a, b, _ in drawn), default=1.0)
        from matplotlib.patches import Arc

        for a, b, links in drawn:
            rise = 0.25 + 0.55 * (b - a) / widest
            arc = Arc(
                ((a + b) / 2, top - 0.1),
                b - a,
                2 * rise,
                theta1=0,
                theta2=180,
                color=NVLINK,
                lw=1.1 + 0.9 * (links - 1),
                alpha=0.9,
            )
            axes.add_patch(arc)
        if drawn:
            most = max(links for _, _, links in drawn)
            legend = f"{nvlink_name(self.group)}: thin 1 link, thick {most}" if most > 1 else nvlink_name(self.group)
            axes.text(
                max(centres.values()) + CELL / 2, top + 0.82, legend, size=8, color=NVLINK, ha="right", va="center"
            )


def _blocks(group: GroupView) -> list[_Block]:
    every = list(range(min(group.gpus or 0, MAX_GPUS)))
    blocks = []
    for numa in group.numa:
        gpus = [gpu for gpu in numa.gpus if gpu in every]
        nics = [nic for nic in group.nics if nic.numa == numa.index]
        if gpus or nics:
            label = f"NUMA {numa.index}" + (f", CPUs {numa.cpus}" if numa.cpus else "")
            blocks.append(_Block(label, gpus, nics))
    blocks.sort(key=lambda block: block.gpus[0] if block.gpus else MAX_GPUS)
    placed = {gpu for block in blocks for gpu in block.gpus}
    gpus = [gpu for gpu in every if gpu not in placed]
    nics = [nic for nic in group.nics if nic.numa is None or nic.numa >= len(group.numa)]
    if gpus or nics or not blocks:
        blocks.append(_Block("host" if not blocks else "NUMA node not said", gpus, nics))
    return blocks


def _host_words(group: GroupView) -> str:
    slots = [f"{group.slots} slot{'' if group.slots == 1 else 's'}"] if group.slots else []
    return " · ".join([*group.host_words, *slots])


def _gpu_words(group: GroupView) -> str:
    if not group.gpus:
        return "no GPU"
    memory = f" · {format_size(group.gpu_memory_bytes, digits=4)} each" if group.gpu_memory_bytes else ""
    return f"{group.gpu_words}{memory}"


def _link_words(link: LinkView) -> str:
    name = "" if link.text == "memory" else f"  {link.text}"
    got = "measured" if link.origin == "measured" else "usable"
    return f"{link.name}:{name}  {format_rate(link.bandwidth_bytes_per_second, digits=3)} {got}"
