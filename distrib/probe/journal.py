"""Journal of a probe: its records on disk, from which an interrupted probe is resumed.

A probe is resumed from records of the same hosts, in the same mode, over the same network and transport.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from distrib.errors import ConfigError
from distrib.probe.records import (
    PairMeasurement,
    ProbeEnded,
    ProbeStarted,
    Record,
    StageDone,
    decode_record,
    encode_record,
)
from distrib.probe.settings import Mode, Transport


def network_change(before: ProbeStarted, now: ProbeStarted) -> str:
    """Describe why earlier measurements are not comparable. Missing hosts are not compared.

    Args:
        before: Start of the earlier probe.
        now: Start of this probe.

    Returns:
        The difference; empty if there is none.
    """
    if (before.hosts, before.mode) != (now.hosts, now.mode):
        return "it had other hosts or another mode"
    if before.primary != now.primary:
        return f"its links were judged by {before.primary}, not {now.primary}"
    then = {facts.host: f"{facts.address} ({facts.interface})" for facts in before.facts}
    for facts in now.facts:
        place = f"{facts.address} ({facts.interface})"
        if then.get(facts.host, place) != place:
            return f"{facts.host} had the address {then[facts.host]}, now {place}"
    return ""


def _completed_stages(records: Iterable[Record], present: Collection[str] = ()) -> tuple[str, ...]:
    """Return the keys of stages that need not be repeated, as all hosts of `present` took part."""
    done = (record for record in records if isinstance(record, StageDone) and record.complete)
    return tuple(dict.fromkeys(record.stage for record in done if set(record.without).isdisjoint(present)))


class Journal:
    """A file that one probe writes, with the records of an interrupted one if they are of the same hosts, mode and transport.

    Args:
        path: The file.
        hosts: All hosts of the probe.
        mode: Mode of the probe.
        resume: True to require records to resume from, False to discard them, None to use recent ones.
        transport: The transport by which links are judged; None for any.

    Raises:
        ConfigError: The file is not writable, another probe writes it, or there is nothing to resume from.
    """

    def __init__(
        self, path: Path, hosts: tuple[str, ...], mode: Mode, resume: bool | None, transport: Transport | None = None
    ) -> None:
        self.path = path
        self.done_stages: tuple[str, ...] = ()
        self.problem = ""
        """Why records could not be written."""
        self._started = False
        try:
            # Networks change: after an hour, a probe is resumed with --resume only.
            recent = path.exists() and time.time() - path.stat().st_mtime < 3600
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}",
                hint="create its folder, or name another file",
                code="file-not-written",
            ) from None
        self._lock()
        old = path.read_bytes().splitlines() if resume is not False else []
        records = _latest_network(_decode_lines(old))
        start = next((record for record in records if isinstance(record, ProbeStarted)), None)
        ended = any(isinstance(record, ProbeEnded) for record in records)
        fits = start and (start.hosts, start.mode) == (hosts, mode) and transport in (None, start.primary)
        if fits and not ended and (recent or resume):
            self.done_stages = _completed_stages(records)
        elif resume:
            if not old:
                path.unlink()
            raise ConfigError(
                f"cannot resume: {path} has no probe of these hosts in this mode",
                hint="leave out --resume",
                code="probe-not-resumable",
            )
        if not self.done_stages:
            self._file.truncate(0)
        elif not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another probe is writing it",
                hint="wait until it ends, or name another file",
                code="file-in-use",
            ) from None
        except OSError:
            pass  # a file system without locks

    def write(self, line: str) -> str | None:
        """Append the line of a record.

        Args:
            line: The encoded record.

        Returns:
            A message for the user: that an interrupted probe is resumed, or why not.
        """
        message = None
        if line.startswith('{"type":"started"') and isinstance(now := decode_record(line), ProbeStarted):
            before = [record for record in self.read() if isinstance(record, ProbeStarted)]
            if why := next(filter(None, (network_change(start, now) for start in before)), None):
                message = f"distrib-topo: ignoring the probe of {before[0].when} in {self.path}: {why}; starting again"
            elif before and not self._started:
                message = (
                    f"distrib-topo: resuming the probe of {before[0].when} from {self.path} "
                    f"({len(self.done_stages)} stages are done); use --no-resume to start again"
                )
            self._started = True
        try:
            self._file.write(line.encode() + b"\n")
        except OSError as error:  # a full disk: reported when the ranks have exited
            self.problem = f"{self.path}: {error.strerror}"
        return message

    def read(self) -> list[Record]:
        """Return all records of the current network, those of the interrupted probe first."""
        return _latest_network(_decode_lines(self.path.read_bytes().splitlines()))

    def reload(self) -> None:
        """Resume from the records written so far."""
        self.done_stages = _completed_stages(self.read())

    def done_with(self, present: Sequence[str]) -> tuple[str, ...]:
        """List the keys of completed stages in which all of these hosts took part.

        Args:
            present: Names of hosts.
        """
        return _completed_stages(self.read(), present) if self.done_stages else ()

    def resume_input(self, present: Sequence[str]) -> bytes:
        """Encode the earlier records that rank 0 needs: starts, and links between these hosts without their curves.

        Args:
            present: Names of hosts.
        """
        kept: list[Record] = []
        for record in self.read():
            if isinstance(record, ProbeStarted):
                kept.append(record)
            if not isinstance(record, PairMeasurement) or record.failed:
                continue
            if {record.source, record.target} <= set(present):
                kept.append(msgspec.structs.replace(record, curve=()))
        return "".join(encode_record(record) + "\n" for record in kept).encode()

    def remove(self) -> None:
        """Close and delete the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _decode_lines(lines: Sequence[bytes]) -> list[Record]:
    return [record for line in lines if (record := decode_record(line))]


def _latest_network(records: Iterable[Record]) -> list[Record]:
    """Drop records over another network, after which the probe was started again."""
    kept: list[Record] = []
    for record in records:
        if isinstance(record, ProbeStarted):
            starts = (earlier for earlier in kept if isinstance(earlier, ProbeStarted))
            if any(network_change(start, record) for start in starts):
                kept = []
        kept.append(record)
    return kept
