"""Hostfiles: a registry of dialects, reading and writing.

Open MPI, MPICH, DeepSpeed and Horovod write one host per line and differ in the settings after it. Lists of hosts, Slurm's ranges and
distrib's own settings may stand wherever a host may:

    node1 slots=8 max_slots=16          # Open MPI; DeepSpeed and Horovod without max_slots
    node2:8 user=bob binding=rr         # MPICH
    node3:8,node4:8                     # Horovod
    gpu[01-16] slots=8                  # a range, as in Slurm
    node5 slots=8 port=2222 python=/opt/venv/bin/python role=server

A new dialect is one `HostfileDialect` and one line in `DIALECTS`. A dialect with a grammar of its own sets `recognizes` and `parse`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from distrib.cluster.host_expression import MAX_SLOTS, Expression, check_user, parse_host_list, parse_number
from distrib.cluster.hostfile_grammar import HostfileLine, parse_lines
from distrib.cluster.hosts import Host, HostList, Notes, SourcePlace, merge_mentions, shown
from distrib.cluster.slurm import slurm_hosts
from distrib.utils.files import UnreadableFileError, read_text

__all__ = ["Host", "HostList", "format_hostfile", "parse_host_list", "parse_hostfile", "read_hostfile", "slurm_hosts"]

Mentions = Iterator[tuple[Host, SourcePlace]]


@dataclass(frozen=True)
class HostfileDialect:
    """A hostfile dialect. `is_certain` and `is_possible` tell from a line; a possible dialect counts if none is certain."""

    name: str
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Spellings of settings, with `_` for `-`, and their canonical names."""
    is_certain: Callable[[HostfileLine], bool] = lambda line: False
    is_possible: Callable[[HostfileLine], bool] = lambda line: False
    recognizes: Callable[[str], bool] | None = None
    """True for a file in a grammar of the dialect's own, which `parse` reads instead of the line grammar."""
    parse: Callable[[str, str, Notes], Mentions] | None = None
    """Arguments: the text, the name of the source, and the notes to add to."""


def _has_count(line: HostfileLine) -> bool:
    return any(expression.slots is not None for expression, _ in line.expressions)


DIALECTS: list[HostfileDialect] = [
    HostfileDialect(
        "openmpi",
        spellings={
            **dict.fromkeys(("slots", "cpu", "count"), "slots"),
            **dict.fromkeys(("max_slots", "slots_max", "max_cpu", "cpu_max", "max_count", "count_max"), "max_slots"),
            **dict.fromkeys(("user", "username", "user_name"), "user"),
        },
        is_certain=lambda line: line.has_c_comment or not {"slots", "max_slots"}.isdisjoint(line.settings),
    ),
    HostfileDialect(
        "mpich",
        spellings={"user": "user", "binding": "binding"},
        is_certain=lambda line: "binding" in line.settings or (_has_count(line) and len(line.expressions) == 1),
        is_possible=lambda line: "user" in line.settings,
    ),
    HostfileDialect("horovod", is_certain=lambda line: _has_count(line) and len(line.expressions) > 1),
    HostfileDialect(
        "slurm",
        is_possible=lambda line: (
            len(line.expressions) > 1 or any(expression.ranged for expression, _ in line.expressions)
        ),
    ),
    HostfileDialect("plain", spellings={"port": "port", "python": "python", "role": "role"}),
]


def read_hostfile(path: str | os.PathLike[str]) -> HostList:
    """Read a hostfile.

    Args:
        path: The file.

    Raises:
        HostfileError: The file cannot be read, or is invalid.
    """
    source = os.fspath(path)
    try:
        hint = "check the path, or list the hosts: -H HOST:SLOTS,HOST:SLOTS"
        text = read_text(path, "hostfile", hint, max_bytes=16 << 20)
    except UnreadableFileError as problem:
        raise SourcePlace(source, problem.line).error(problem.what, problem.hint, code="hostfile-unreadable") from None
    if any(line.rstrip() == "nodes:" for line in text.splitlines()):
        raise SourcePlace(source).error(
            "this is a topology file", "give it with --topology, and the hosts with -H", code="hostfile-is-topology"
        )
    return parse_hostfile(text, source)


def parse_hostfile(text: str, source: str) -> HostList:
    """Parse a hostfile.

    Args:
        text: The file.
        source: Its name in errors and notes.

    Returns:
        Its hosts, each once, in order.

    Raises:
        HostfileError: The text is invalid; with line and column.
    """
    text = text.removeprefix("\ufeff")  # a byte order mark of Windows editors
    nul = text.find("\0")
    if nul >= 0:
        raise SourcePlace(source, text.count("\n", 0, nul) + 1).error(
            "contains NUL bytes", "name a text file, one host a line", code="hostfile-unreadable"
        )
    notes = Notes()
    for dialect in DIALECTS:
        if dialect.recognizes and dialect.parse and dialect.recognizes(text):
            names = [dialect.name]
            hosts = merge_mentions(dialect.parse(text, source, notes), notes)
            break
    else:
        certain: set[str] = set()
        possible: list[str] = []
        hosts = merge_mentions(_line_mentions(text, source, notes, certain, possible), notes)
        names = sorted(certain) or possible[:1] or ["plain"]
    if not hosts:
        raise SourcePlace(source).error(
            "no hosts in the file", "write one host a line, such as: node1 slots=8", code="hostfile-empty"
        )
    return HostList(hosts=hosts, source=source, dialect=names[0] if len(names) == 1 else "mixed", notes=notes.lines())


def format_hostfile(hosts: Iterable[Host]) -> str:
    """Format hosts as a hostfile, one per line.

    Args:
        hosts: The hosts.

    Returns:
        Text that `parse_hostfile` reads as the same hosts.
    """
    return "".join(_format_host(host) + "\n" for host in hosts)


def _format_host(host: Host) -> str:
    words = [f"[{host.name}]" if ":" in host.name else host.name]
    for key in ("slots", "max_slots", "user", "port"):
        value = getattr(host, key)
        if value is not None:
            words.append(f"{key}={value}")
    if host.python is not None:
        is_bare = re.fullmatch(r"/(?!/)[\w./+-]*", host.python)
        words.append(f"python={host.python}" if is_bare else f'python="{host.python}"')
    if host.role != "worker":
        words.append(f"role={host.role}")
    return " ".join(words)


def _line_mentions(text: str, source: str, notes: Notes, certain: set[str], possible: list[str]) -> Mentions:
    """Yield every host of a file in the line grammar, as often as it is named; add the dialects of its lines."""
    spellings = {spelling: name for dialect in DIALECTS for spelling, name in dialect.spellings.items()}
    named: set[str] = set()
    for line in parse_lines(text, source, spellings):
        certain |= {dialect.name for dialect in DIALECTS if dialect.is_certain(line)}
        possible += [dialect.name for dialect in DIALECTS if dialect.is_possible(line)]
        settings = _host_settings(line)
        if "binding" in line.settings:
            value = shown(line.settings["binding"][0])
            notes.add("binding", f"{line.place}: binding={value} is MPICH's and is ignored; use --bind")
        for expression, at in line.expressions:
            host = _combine(settings, expression, at)
            for name in expression.names:
                if name.lower() in named:  # one slot per line, as in Open MPI
                    possible.append("openmpi")
                named.add(name.lower())
                yield msgspec.structs.replace(host, name=name), at


def _combine(settings: Host, expression: Expression, place: SourcePlace) -> Host:
    """Combine the settings of a line with `user@` and `:slots` of one host."""
    if expression.slots is not None and settings.slots is not None:
        raise place.error(
            f"slots are given twice: :{expression.slots} and slots={settings.slots}",
            "drop one of them",
            code="hostfile-duplicate-setting",
        )
    if expression.user is not None and settings.user is not None:
        raise place.error(
            f"the user is given twice: {expression.user}@ and user={settings.user}",
            "drop one of them",
            code="hostfile-duplicate-setting",
        )
    slots = settings.slots if expression.slots is None else expression.slots
    if slots is not None and settings.max_slots is not None and settings.max_slots < slots:
        raise place.error(
            f"max_slots={settings.max_slots} is less than the {slots} slots",
            "raise it or drop it",
            code="hostfile-value",
        )
    return msgspec.structs.replace(
        settings, slots=slots, user=settings.user if expression.user is None else expression.user
    )


def _host_settings(line: HostfileLine) -> Host:
    """Convert the settings of a line to a host without a name."""
    settings = line.settings

    def number(setting: str, most: int) -> int | None:
        return parse_number(*settings[setting], setting, most) if setting in settings else None

    if "user" in settings:
        check_user(*settings["user"])
    if "python" in settings:
        _check_python(*settings["python"])
    role, role_place = settings.get("role", ("worker", line.place))
    if role not in ("worker", "server"):
        raise role_place.error(f"role must be worker or server, not {shown(role)}", code="hostfile-value")
    return Host(
        name="",
        slots=number("slots", MAX_SLOTS),
        max_slots=number("max_slots", MAX_SLOTS),
        user=settings["user"][0] if "user" in settings else None,
        port=number("port", 65_535),
        python=settings["python"][0] if "python" in settings else None,
        role="server" if role == "server" else "worker",
        line=line.place.line,
    )


def _check_python(path: str, place: SourcePlace) -> None:
    if not path.startswith("/"):
        raise place.error(
            f"python must be an absolute path, not {shown(path)}",
            "write such as python=/usr/bin/python3",
            code="hostfile-value",
        )
    if not path.isprintable() or '"' in path:
        raise place.error(
            f"{shown(path)} holds characters that no path to an interpreter should", code="hostfile-value"
        )
