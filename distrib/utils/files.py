"""Files and folders that users name: existence tests that do not raise, text with clear errors, absolute paths.

pathlib's own tests raise PermissionError or OSError in most versions of Python where a folder may not be searched.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from distrib.errors import ConfigError

_PIPE_CONTENTS: dict[tuple[int, int], bytes] = {}
"""Contents of pipes that were read, as of `-H <(...)`. A pipe delivers them once, and a restarted job reads its hostfile again."""


class UnreadableFileError(Exception):
    """A file that is not valid text: `what` is wrong, in `line` (from 1, 0 if unknown), and a `hint`."""

    def __init__(self, what: str, hint: str, line: int = 0) -> None:
        super().__init__(what)
        self.what, self.hint, self.line = what, hint, line


def read_text(path: str | os.PathLike[str], kind: str, hint: str, max_bytes: int) -> str:
    """Read a UTF-8 text file without changing its line ends.

    Args:
        path: A file or a named pipe.
        kind: The expected kind of file, for messages, such as `hostfile`.
        hint: The advice if the file does not exist.
        max_bytes: The largest accepted size.

    Raises:
        UnreadableFileError: The file is missing, too large, or not UTF-8 text.
    """
    try:
        status = Path(path).stat()
        inode = status.st_dev, status.st_ino
        if inode in _PIPE_CONTENTS:  # opening a pipe would block until a process writes
            data = _PIPE_CONTENTS[inode]
        else:
            with Path(path).open("rb") as file:
                data = file.read(max_bytes + 1)  # bounded: the path may be /dev/zero
            if stat.S_ISFIFO(status.st_mode):
                _PIPE_CONTENTS[inode] = data
    except FileNotFoundError:
        raise UnreadableFileError(f"no such {kind}", hint) from None
    except IsADirectoryError:
        raise UnreadableFileError("this is a directory", f"name a {kind} in it") from None
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UnreadableFileError(f"cannot read it: {why}", "check its mode and owner with ls -l") from None
    if len(data) > max_bytes:
        raise UnreadableFileError(f"larger than {max_bytes >> 20} MiB", f"name a {kind}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableFileError("is in UTF-16", "save it as UTF-8")
    nul = data.find(b"\0")
    if nul >= 0:
        raise UnreadableFileError("contains NUL bytes", f"name a {kind}", data.count(b"\n", 0, nul) + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what, line = f"byte 0x{data[error.start]:02x} is not UTF-8", data.count(b"\n", 0, error.start) + 1
        raise UnreadableFileError(what, f"name a {kind}, and save it as UTF-8", line) from None


exists, is_file, is_dir = os.path.exists, os.path.isfile, os.path.isdir
"""Tests for any text. They return False where a folder may not be searched or the text is too long for a path."""


def write_problem(path: str | os.PathLike[str]) -> str:
    """Find the reason why a file cannot be written.

    Args:
        path: The file, new or existing.

    Returns:
        The reason, or an empty string if it can be written.
    """
    folder = Path(path).parent
    if is_dir(path):
        return "this is a directory"
    if not is_dir(folder):
        return f"there is no folder {folder}"
    return "" if os.access(path if exists(path) else folder, os.W_OK) else refusal_reason(folder)


def refusal_reason(folder: str | os.PathLike[str]) -> str:
    """Distinguish a read-only file system from missing permission: os.access does not.

    Args:
        folder: A folder in which writing was refused.
    """
    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return "cannot write it: the file system is read-only"
    return "cannot write it: no permission"


def working_directory() -> Path:
    """Return the working directory, by the name that the shell uses (`$PWD`) if it is the same folder.

    Other hosts may know the folder by that name only, as where a link leads from /home to a file server.

    Raises:
        ConfigError: The directory was removed.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the working directory does not exist any more", hint="cd to an existing one") from None
    shell_path = os.environ.get("PWD", "")
    with contextlib.suppress(OSError, ValueError):
        if os.path.isabs(shell_path) and os.path.samefile(shell_path, here):
            return Path(shell_path)
    return here


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Resolve a path against the working directory.

    Args:
        path: A relative or absolute path.

    Returns:
        The absolute path. Links in it are kept.

    Raises:
        ConfigError: The working directory was removed.
    """
    return working_directory() / path
