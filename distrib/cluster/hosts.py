"""Hosts of a job: the common result of hostfiles, host lists and Slurm allocations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from distrib.errors import HostfileError

MAX_HOSTS = 50_000
"""More hosts are a typing error such as `n[1-999999999]`."""

Role = Literal["worker", "server"]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A host as the user named it, IPv6 addresses without brackets; `slots` is None where not given."""

    name: str
    slots: int | None
    max_slots: int | None = None
    user: str | None = None
    port: int | None = None
    """The ssh port."""
    python: str | None = None
    """Absolute path of the Python interpreter on the host."""
    role: Role = "worker"
    line: int = 0
    """The line that first names the host, from 1; 0 outside files."""


class HostList(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts in the given order, and their source."""

    hosts: tuple[Host, ...]
    source: str
    """A file's path, `-H` or `Slurm`."""
    dialect: str
    """openmpi, mpich, horovod, slurm, inline, plain (host names only) or mixed.

    `host slots=N` means the same to Open MPI, DeepSpeed and Horovod and is called openmpi.
    """
    notes: tuple[str, ...] = ()
    """Ambiguities and their resolution, one line each."""


class SourcePlace(NamedTuple):
    """A position in a source; line and column from 1, 0 if there is none."""

    source: str
    line: int = 0
    column: int = 0

    def right(self, characters: int) -> SourcePlace:
        """Move to the right.

        Args:
            characters: Columns.
        """
        return self._replace(column=self.column + characters)

    def error(self, what: str, hint: str = "", code: str = "") -> HostfileError:
        """Build an error at this position.

        Args:
            what: The problem.
            hint: The advice.
            code: Kind of the error; empty: `hostfile-syntax`.
        """
        return HostfileError(what, source=self.source, line=self.line, column=self.column, hint=hint, code=code)

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Notes:
    """Notes by kind, of which only the first is shown in full: a thousand similar lines make one note."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        """Add a note.

        Args:
            kind: The kind, by which notes are folded.
            text: One line.
        """
        self._kinds.setdefault(kind, []).append(text)

    def lines(self) -> tuple[str, ...]:
        """Return one line per kind of note."""
        return tuple(
            texts[0] + (f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else "")
            for texts in self._kinds.values()
        )


def shown(text: str) -> str:
    """Quote user input for a one-line error, escaped and at most 60 characters.

    Args:
        text: Any text.
    """
    return repr(text if len(text) <= 60 else text[:57] + "...")


def merge_mentions(mentions: Iterable[tuple[Host, SourcePlace]], notes: Notes) -> tuple[Host, ...]:
    """Merge repeated mentions of a host.

    A host named n times without a count has n slots, as in Open MPI. Any other repetition is an error, as launchers disagree on it.

    Args:
        mentions: Hosts and their places, in order.
        notes: Receives a note on repeated hosts.

    Returns:
        Each host once, in order.

    Raises:
        HostfileError: A host is repeated with a count or with other settings, or there are too many hosts.
    """
    seen: dict[str, tuple[Host, SourcePlace, int]] = {}
    for number, (host, place) in enumerate(mentions, 1):
        if number > MAX_HOSTS:
            raise place.error(
                f"more than {MAX_HOSTS:,} hosts", "look for a range with too many digits", code="hostfile-too-large"
            )
        key = host.name.lower()  # host names do not distinguish case
        if key not in seen:
            seen[key] = host, place, 1
            continue
        first, first_place, times = seen[key]
        before = f"already on line {first.line}" if first.line else "already named"
        if host.slots is not None or first.slots is not None:
            raise place.error(
                f"{host.name} is {before}", "name it once, with all its slots", code="hostfile-duplicate-host"
            )
        if msgspec.structs.replace(host, name=first.name, line=first.line) != first:
            raise place.error(
                f"{host.name} is {before} with other settings",
                "give each host one set of settings",
                code="hostfile-duplicate-host",
            )
        seen[key] = first, first_place, times + 1
    return tuple(_with_slots_of_repeats(*entry, notes) for entry in seen.values())


def _with_slots_of_repeats(host: Host, place: SourcePlace, times: int, notes: Notes) -> Host:
    if times == 1:
        return host
    if host.max_slots is not None and times > host.max_slots:
        raise place.error(
            f"{host.name} is named {times} times but has max_slots={host.max_slots}", code="hostfile-value"
        )
    notes.add(
        "repeat", f"{place}: {host.name} is named {times} times: taken as {times} slots, one each, as in Open MPI"
    )
    return msgspec.structs.replace(host, slots=times)
