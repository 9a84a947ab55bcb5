"""Style and output of all plots: colours, boxes, allowed file types, reproducible files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from distrib.errors import ConfigError
from distrib.utils import files

PLOT_SUFFIXES = (".svg", ".png", ".pdf")

INK, GREY, LINE, PAPER, PANEL = "#1f2933", "#697586", "#c5ccd6", "#ffffff", "#f5f7fa"
GROUPS = ("#33658a", "#b5523b", "#4f7a4c", "#7a5ea8", "#a0741a", "#3f7f86")
NVLINK, AMBER, GREEN = "#6f9f2f", "#b45309", "#15803d"
CELL, GAP, PAD = 0.66, 0.12, 0.22
"""Inches, as all lengths here."""


def check_plot_path(path: str) -> None:
    """Check the file name of `--plot` before work begins.

    Args:
        path: The file to write.

    Raises:
        ConfigError: The suffix is not supported, the file cannot be written, or matplotlib is not installed.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise ConfigError(
            "--plot: matplotlib is not installed", hint="pip install 'distrib[plot]'", code="tool-missing"
        )
    target = Path(path)
    if target.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(
            f"--plot {path}: unsupported file type {target.suffix or 'without suffix'}",
            hint=f"name a file that ends in {', '.join(PLOT_SUFFIXES)}",
        )
    if problem := files.write_problem(path):
        raise ConfigError(f"--plot {path}: {problem}", hint="name another file", code="file-not-written")


def plot_style() -> Any:
    """Return the matplotlib context for making and saving figures: the same output on all machines, text as text."""
    from matplotlib import rc_context  # matplotlib takes a second to import

    return rc_context(
        {"font.family": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": "distrib", "text.parse_math": False}
    )


def new_figure(width: float, height: float) -> Any:
    """Create a matplotlib figure; call it in `plot_style`.

    Args:
        width: Inches.
        height: Inches.
    """
    from matplotlib.figure import Figure  # matplotlib takes a second to import

    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def save_figure(figure: Any, path: str) -> None:
    """Write a figure. The same figure gives the same bytes.

    Args:
        figure: A matplotlib figure.
        path: The file, whose suffix selects the format.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with plot_style():
            is_svg = path.lower().endswith(".svg")
            figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: cannot write it: {error.strerror}", hint="name another file", code="file-not-written"
        ) from None


def truncated_label(text: str, width: float) -> str:
    """Shorten a label to the characters that fit, with an ellipsis.

    Args:
        text: One line.
        width: Inches.
    """
    characters = int(width / 0.075)
    return text if len(text) <= characters else text[: characters - 1] + "…"


def draw_box(
    axes: Any, x: float, y: float, width: float, height: float, face: str, edge: str, *, radius: float = 0.08
) -> None:
    """Draw a box with rounded corners.

    Args:
        axes: Matplotlib axes whose unit is one inch.
        x: Left side, inches.
        y: Lower side, inches.
        width: Inches.
        height: Inches.
        face: Colour of the area.
        edge: Colour of the border.
        radius: Radius of the corners, inches.
    """
    from matplotlib.patches import FancyBboxPatch  # matplotlib takes a second to import

    style = f"round,pad=0,rounding_size={radius}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=edge, lw=1.0))
