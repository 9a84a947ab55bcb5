"""The files of `--plot`: which they may be, and how a figure is written into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distrib.errors import ConfigError
from distrib.utils import files

SUFFIXES = (".svg", ".png", ".pdf")
DOTS_PER_INCH = 150


def check_name(path: str) -> None:
    """Raises ConfigError for a file that is of no kind of picture, or that cannot be written."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: no kind of picture", hint=f"name a file that ends in {', '.join(SUFFIXES)}")
    if why := files.why_not_written(path):
        raise ConfigError(f"--plot {path}: {why}", hint="name another file")


def style() -> Any:
    """The context in which figures are made and saved: alike on all machines, letters as letters."""
    from matplotlib import rc_context

    return rc_context(
        {"font.family": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": "distrib", "text.parse_math": False}
    )


def save(figure: Any, path: str) -> None:
    """Write a figure of matplotlib's, the same bytes for the same figure. Raises ConfigError where it cannot be written."""
    try:
        with style():
            is_svg = path.lower().endswith(".svg")
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Date": None} if is_svg else None)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot write it: {error.strerror}", hint="name another file") from None
