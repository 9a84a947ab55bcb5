"""What there is at a path that people name, asked as they mean it: where one may not look, or a name is too long for any file, there is nothing.

pathlib's own questions raise there, on most versions of Python.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from distrib.errors import ConfigError


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything that can be seen."""
    return os.path.exists(path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file, be it one that may not be read."""
    return os.path.isfile(path)


def is_dir(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)


def why_not_written(path: str | os.PathLike[str]) -> str:
    """Why no file can be written there; empty where it can."""
    folder = Path(path).parent
    if is_dir(path):
        return "this is a directory"
    if not is_dir(folder):
        return f"there is no folder {folder}"
    return "" if os.access(path if exists(path) else folder, os.W_OK) else why_refused(folder)


def why_refused(folder: str | os.PathLike[str]) -> str:
    """Why nothing may be written in a folder: os.access does not tell."""
    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return "cannot write it: the file system is read-only"
    return "cannot write it: no permission"


def working_directory() -> Path:
    """Where commands run, and what relative paths begin at, as the shell calls it. Raises ConfigError where somebody has removed it.

    Where a link leads to it (/home to /export/home on the file server), other hosts may know it by that name alone.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone", hint="cd to one that is there") from None
    called = os.environ.get("PWD", "")
    with contextlib.suppress(OSError, ValueError):
        if os.path.isabs(called) and os.path.samefile(called, here):
            return Path(called)
    return here


def absolute(path: str | os.PathLike[str]) -> Path:
    """The whole path of what was named from the working directory."""
    return working_directory() / path
