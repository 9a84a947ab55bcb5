"""The files of `--plot`: which they may be, and how a figure is written into one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distrib.errors import ConfigError

SUFFIXES = (".svg", ".png", ".pdf")
DOTS_PER_INCH = 150


def check_name(path: str) -> None:
    """Raises ConfigError for a file that is of no kind of picture, or that cannot be written."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: no kind of picture", hint=f"name a file that ends in {', '.join(SUFFIXES)}")
    folder = target.absolute().parent
    if target.is_dir() or not folder.is_dir():
        why = "this is a directory" if target.is_dir() else f"there is no folder {target.parent}"
        raise ConfigError(f"--plot {path}: {why}", hint="make it, or name another")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise ConfigError(f"--plot {path}: cannot write it: no permission", hint="name another file")


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
