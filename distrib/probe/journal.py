"""The lines of a probe on the disk, as they come; an interrupted probe goes on from them."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distrib.errors import ConfigError
from distrib.probe.records import PairMeasurement, ProbeEnded, ProbeStarted, Record, decode, encode
from distrib.probe.resume import current, done_steps, other_network, starts
from distrib.probe.settings import Mode, Transport

FRESH_SECONDS = 3600.0
"""An interrupted probe is gone on with only within this time, unless --resume says otherwise: networks change."""


class Journal:
    """The file `path`, held by this probe alone; what an interrupted one has left in it is taken over if it fits.

    Hosts, mode and way must be the same. Whether the network is, too, shows when the hosts are there: see `write`.
    """

    def __init__(
        self, path: Path, hosts: tuple[str, ...], mode: Mode, resume: bool | None, transport: Transport | None = None
    ) -> None:
        self.path = path
        self.done_steps: tuple[str, ...] = ()
        self._started = False
        self.problem = ""
        """Why what was measured could not be kept."""
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
        records = current(_decoded(old))
        start = next(iter(starts(records)), None)
        ended = any(isinstance(record, ProbeEnded) for record in records)
        fits = start and (start.hosts, start.mode) == (hosts, mode) and transport in (None, start.primary)
        if fits and not ended and (fresh or resume):
            self.done_steps = done_steps(records)
        elif resume:
            if not old:
                path.unlink()
            raise ConfigError(f"{path}: no probe of these hosts in this mode to go on with", hint="leave out --resume")
        if not self.done_steps:
            self._file.truncate(0)
        elif not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def write(self, line: str) -> str | None:
        """Keep the line of a record. Returns what people must be told: that an interrupted probe is gone on with, or why not."""
        said = None
        if line.startswith('{"type":"started"') and isinstance(now := decode(line), ProbeStarted):
            before = starts(self.read())
            if why := next(filter(None, (other_network(start, now) for start in before)), None):
                said = f"distrib-topo: what {self.path} has of {before[0].when} does not count: {why}; beginning anew"
            elif before and not self._started:
                said = (
                    f"distrib-topo: going on with the probe of {before[0].when} from {self.path} "
                    f"({len(self.done_steps)} steps are done); --no-resume begins anew"
                )
            self._started = True
        try:
            self._file.write(line.encode() + b"\n")
        except OSError as error:  # a full disk: it is told at the end, when all who measure have ended
            self.problem = f"{self.path}: {error.strerror}"
        return said

    def read(self) -> list[Record]:
        """All records so far, those of the interrupted probe first."""
        return current(_decoded(self.path.read_bytes().splitlines()))

    def take_over(self) -> None:
        """Go on from what is written so far."""
        self.done_steps = done_steps(self.read())

    def done_for(self, present: Sequence[str]) -> tuple[str, ...]:
        """The steps in which all of these hosts took part."""
        return done_steps(self.read(), present) if self.done_steps else ()

    def seen(self, present: Sequence[str]) -> bytes:
        """What rank 0 must know of what is done: how the probe began, and the links between those hosts, without their curves."""
        kept: list[Record] = []
        for record in self.read():
            if isinstance(record, ProbeStarted):
                kept.append(record)
            elif (
                isinstance(record, PairMeasurement)
                and not record.failed
                and {record.source, record.target} <= set(present)
            ):
                kept.append(msgspec.structs.replace(record, curve=()))
        return "".join(encode(record) + "\n" for record in kept).encode()

    def done(self) -> None:
        """Nothing in it is needed any more: it is kept elsewhere, or there is nothing."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _decoded(lines: Sequence[bytes]) -> list[Record]:
    return [record for line in lines if (record := decode(line))]
