"""What the pictures share: colours, sizes in inches, boxes."""

from __future__ import annotations

from typing import Any

INK, GREY, LINE, PAPER, PANEL = "#1f2933", "#697586", "#c5ccd6", "#ffffff", "#f5f7fa"
GROUPS = ("#33658a", "#b5523b", "#4f7a4c", "#7a5ea8", "#a0741a", "#3f7f86")
NETWORKS = {"InfiniBand": "#1d7874", "RoCE": "#6a4c93", "Ethernet": "#7d8597"}
NVLINK, AMBER, GREEN = "#6f9f2f", "#b45309", "#15803d"
CELL, GAP, PAD = 0.66, 0.12, 0.22  # inches, as all here


def fit(text: str, width: float, size: float) -> float:
    """The font size at which `text` fits into `width` inches."""
    return max(4.5, min(size, size * (width - 0.1) / (0.0088 * size * max(len(text), 1))))


def short(text: str, width: float) -> str:
    room = int(width / 0.075)
    return text if len(text) <= room else text[: room - 1] + "…"


def box(
    axes: Any, x: float, y: float, width: float, height: float, face: str, edge: str, *, radius: float = 0.08
) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, lw=1.0))
