"""Text files that people write: read whole, or refused with what is wrong, where, and what to do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_SAID: dict[tuple[int, int], bytes] = {}
"""What pipes have said, as in `-H <(...)`: they say it once, and a file may be read again, as where a job is started again."""


class Unreadable(Exception):
    """Why a file is no text: `what` is wrong, in `line` where it is in one, and what to do about it, the `hint`."""

    def __init__(self, what: str, hint: str, line: int = 0) -> None:
        super().__init__(what)
        self.what, self.hint, self.line = what, hint, line


def read_text(path: str | os.PathLike[str], kind: str, hint: str, most_bytes: int) -> str:
    """The text of a file, its line ends as they are. `kind` is what it should be, `hint` what to do where there is none.

    Raises Unreadable.
    """
    try:
        status = Path(path).stat()
        place = status.st_dev, status.st_ino
        if place in _SAID:  # before it is opened, which waits for somebody who writes
            data = _SAID[place]
        else:
            with Path(path).open("rb") as file:
                data = file.read(most_bytes + 1)  # never all of it: it may be /dev/zero
            if stat.S_ISFIFO(status.st_mode):
                _SAID[place] = data
    except FileNotFoundError:
        raise Unreadable(f"no such {kind}", hint) from None
    except IsADirectoryError:
        raise Unreadable("this is a directory", f"name a {kind} in it") from None
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise Unreadable(f"cannot read it: {why}", "check its mode and owner with ls -l") from None
    if len(data) > most_bytes:
        raise Unreadable(f"larger than {most_bytes >> 20} MiB", f"name a {kind}")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Unreadable("is in UTF-16", "save it as UTF-8")
    nul = data.find(b"\0")
    if nul >= 0:
        raise Unreadable("holds NUL bytes and is no text", f"name a {kind}", data.count(b"\n", 0, nul) + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what, line = f"byte 0x{data[error.start]:02x} is not UTF-8", data.count(b"\n", 0, error.start) + 1
        raise Unreadable(what, f"name a {kind}, and save it as UTF-8", line) from None
