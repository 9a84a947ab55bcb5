"""The lines of a probe on the disk, as they come; an interrupted probe goes on from them."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.errors import ConfigError

if TYPE_CHECKING:
    from distrib.probe.records import Record
    from distrib.probe.settings import Mode

FRESH_SECONDS = 3600.0
"""An interrupted probe is gone on with only within this time, unless --resume says otherwise: networks change."""


class Journal:
    """The file `path`, held by this probe alone; what an interrupted one has left in it is taken over if it fits."""

    def __init__(self, path: Path, hosts: tuple[str, ...], mode: Mode, resume: bool | None) -> None:
        from distrib.probe.records import Ended, Started, StepDone, decode

        self.path = path
        self.done_steps: tuple[str, ...] = ()
        try:
            fresh = path.exists() and time.time() - path.stat().st_mtime < FRESH_SECONDS
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}", hint="make its folder, or name another"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path}: another probe is writing it", hint="wait for its end, or name another file"
            ) from None
        except OSError:
            pass  # a file system without locks
        old = path.read_bytes().splitlines() if resume is not False else []
        records = [record for line in old if (record := decode(line))]
        start = next((record for record in records if isinstance(record, Started)), None)
        ended = any(isinstance(record, Ended) for record in records)
        if start and (start.hosts, start.mode) == (hosts, mode) and not ended and (fresh or resume):
            self.done_steps = tuple(dict.fromkeys(r.step for r in records if isinstance(r, StepDone) and r.whole))
        elif resume:
            if not old:
                path.unlink()
            raise ConfigError(f"{path}: no probe of these hosts to go on with", hint="leave out --resume")
        if not self.done_steps:
            self._file.truncate(0)
        elif not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")

    def read(self) -> list[Record]:
        """All records so far, those of the interrupted probe first."""
        from distrib.probe.records import decode

        return [record for line in self.path.read_bytes().splitlines() if (record := decode(line))]

    def take_over(self) -> None:
        """Go on from what is written so far."""
        from distrib.probe.records import StepDone

        self.done_steps = tuple(dict.fromkeys(r.step for r in self.read() if isinstance(r, StepDone) and r.whole))

    def seen(self, present: Sequence[str]) -> bytes:
        """The links between those hosts that are measured already, a line each, without their curves."""
        from distrib.probe.records import PairSeen, encode

        pairs = [record for record in self.read() if isinstance(record, PairSeen) and not record.failed]
        kept = [msgspec.structs.replace(r, curve=()) for r in pairs if r.source in present and r.target in present]
        return "".join(encode(record) + "\n" for record in kept).encode()

    def done(self) -> None:
        """Nothing in it is needed any more: it is kept elsewhere, or there is nothing."""
        self._file.close()
        self.path.unlink(missing_ok=True)
