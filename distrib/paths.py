"""What there is at a path that people name, asked as they mean it: where one may not look, or a name is too long for any file, there is nothing.

pathlib's own questions raise there, on most versions of Python.
"""

from __future__ import annotations

import os


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything that can be seen."""
    return os.path.exists(path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, be it one that may not be read."""
    return os.path.isfile(path)


def is_dir(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)
