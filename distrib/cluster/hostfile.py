"""Hostfiles of every dialect: text to hosts, and back.

Open MPI, MPICH, DeepSpeed and Horovod write one host a line and differ in what follows it; lists of hosts, Slurm's
ranges and our own settings may stand wherever a host may:

    node1 slots=8 max_slots=16          # Open MPI; DeepSpeed and Horovod without max_slots
    node2:8 user=bob binding=rr         # MPICH
    node3:8,node4:8                     # Horovod
    gpu[01-16] slots=8                  # a range, as in Slurm
    node5 slots=8 port=2222 python=/opt/venv/bin/python role=server
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from distrib.cluster.host_expression import (
    MAX_SLOTS,
    Expression,
    check_user,
    parse_expression,
    parse_host_list,
    parse_number,
    split_list,
)
from distrib.cluster.hosts import Host, HostList, Notes, Place, each_once, shown
from distrib.cluster.slurm import slurm_hosts
from distrib.utils.files import UnreadableFileError, read_text

__all__ = ["Host", "HostList", "format_hostfile", "parse_host_list", "parse_hostfile", "read_hostfile", "slurm_hosts"]

MAX_BYTES = 16 * 2**20

_OF_ANSIBLE = re.compile(r"^\[[A-Za-z][\w.-]*(?::(?:vars|children))?\][ \t]*$|[ \t]ansible_\w+=", re.MULTILINE)

# Every spelling that Open MPI and MPICH know, with `_` for `-`, and the setting that it means.
_SETTINGS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(("max_slots", "slots_max", "max_cpu", "cpu_max", "max_count", "count_max"), "max_slots"),
    **dict.fromkeys(("user", "username", "user_name"), "user"),
    "port": "port",
    "python": "python",
    "role": "role",
    "binding": "binding",
}
_OFTEN_MEANT = {"gpu": "slots", "gpus": "slots", "np": "slots", "ppn": "slots", "ntasks": "slots"}

# `//` begins a comment, except inside a path, which ends at a blank only.
_TOKEN = re.compile(
    r"""
      (?P<newline> \r\n? | \n )
    | (?P<blank>   [^\S\r\n]+ )
    | (?P<block>   /\* (?s:.*?) \*/ )
    | (?P<open>    /\* )
    | (?P<comment> \# [^\r\n]* )
    | (?P<slashes> // [^\r\n]* )
    | (?P<equals>  = )
    | (?P<quoted>  " [^"\r\n]* " )
    | (?P<path>    / \S* )
    | (?P<word>    (?: [^\s=\#"/] | / (?![/*]) )+ )
    | (?P<quote>   " )
    """,
    re.VERBOSE,
)
_NEWLINE = re.compile(r"\r\n?|\n")


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    """Offset in the whole text."""
    place: Place


class _Dialects:
    """Which dialects a file shows. Weak signs count only where there is no other: several dialects share them."""

    def __init__(self) -> None:
        self.sure: set[str] = set()
        self.weak = "plain"

    def suppose(self, dialect: str) -> None:
        if self.weak == "plain":
            self.weak = dialect

    def verdict(self) -> str:
        if len(self.sure) > 1:
            return "mixed"
        return next(iter(self.sure), self.weak)


def read_hostfile(path: str | os.PathLike[str]) -> HostList:
    """The hosts in the file at `path`.

    Raises HostfileError: no such file, not text in UTF-8, or what `parse_hostfile` refuses.
    """
    source = os.fspath(path)
    try:
        text = read_text(path, "hostfile", "check the path, or list the hosts: -H HOST:SLOTS,HOST:SLOTS", MAX_BYTES)
    except UnreadableFileError as problem:
        raise Place(source, problem.line).error(problem.what, problem.hint) from None
    if re.search(r"^nodes:\s*(#.*)?$", text, re.MULTILINE):
        raise Place(source).error(
            "this is a topology file, no hostfile", "give it with --topology, and the hosts with -H"
        )
    return parse_hostfile(text, source)


def parse_hostfile(text: str, source: str) -> HostList:
    """The hosts in a hostfile's `text`; `source` is its name in errors and notes.

    Raises HostfileError with line and column.
    """
    # Some editors of Windows put a byte order mark first. It is no part of the first host's name.
    text = text.removeprefix("\ufeff")
    nul = text.find("\0")
    if nul >= 0:
        raise Place(source, text.count("\n", 0, nul) + 1).error(
            "the file holds NUL bytes and is not text", "name a hostfile: text, one host a line"
        )
    if inventory := _OF_ANSIBLE.search(text):
        raise Place(source, text.count("\n", 0, inventory.start()) + 1).error(
            "this is an inventory of Ansible's, no hostfile",
            "write one host a line, such as: node1 slots=8; ansible GROUP --list-hosts names them",
        )
    notes, dialects = Notes(), _Dialects()
    hosts = each_once(_mentions(text, source, notes, dialects), notes)
    if not hosts:
        raise Place(source).error("no hosts in the file", "write one host a line, such as: node1 slots=8")
    return HostList(hosts=hosts, source=source, dialect=dialects.verdict(), notes=notes.lines())


def format_hostfile(hosts: Iterable[Host]) -> str:
    """A hostfile that `parse_hostfile` reads as these hosts again, one a line."""
    return "".join(_format_host(host) + "\n" for host in hosts)


def _format_host(host: Host) -> str:
    words = [f"[{host.name}]" if ":" in host.name else host.name]
    for key in ("slots", "max_slots", "user", "port"):
        value = getattr(host, key)
        if value is not None:
            words.append(f"{key}={value}")
    if host.python is not None:
        bare = re.fullmatch(r"/(?!/)[\w./+-]*", host.python)
        words.append(f"python={host.python}" if bare else f'python="{host.python}"')
    if host.role != "worker":
        words.append(f"role={host.role}")
    return " ".join(words)


def _mentions(text: str, source: str, notes: Notes, dialects: _Dialects) -> Iterator[tuple[Host, Place]]:
    """Every host that the file names, as often as it names it."""
    named: set[str] = set()
    for tokens in _lines(text, source, dialects):
        head, pairs = _head_and_pairs(tokens)
        listed = text[head[0].start : head[-1].start + len(head[-1].text)]
        items = [(parse_expression(item, at, notes), at) for item, at in split_list(listed, head[0].place)]
        settings = _settings(pairs, head[0].place, notes, dialects)
        for expression, at in items:
            if expression.slots is not None:
                dialects.sure.add("horovod" if len(items) > 1 else "mpich")
            elif len(items) > 1 or expression.ranged:
                dialects.suppose("slurm")
            host = _with_expression(settings, expression, at)
            for name in expression.names:
                if name.lower() in named:
                    dialects.suppose("openmpi")
                named.add(name.lower())
                yield msgspec.structs.replace(host, name=name), at


def _with_expression(settings: Host, expression: Expression, place: Place) -> Host:
    """The settings of a line together with what stands at the host itself, `user@` and `:slots`."""
    if expression.slots is not None and settings.slots is not None:
        raise place.error(f"slots are given twice: :{expression.slots} and slots={settings.slots}", "drop one of them")
    if expression.user is not None and settings.user is not None:
        raise place.error(f"the user is given twice: {expression.user}@ and user={settings.user}", "drop one of them")
    host = msgspec.structs.replace(
        settings,
        slots=settings.slots if expression.slots is None else expression.slots,
        user=settings.user if expression.user is None else expression.user,
    )
    if host.slots is not None and host.max_slots is not None and host.max_slots < host.slots:
        raise place.error(f"max_slots={host.max_slots} is less than the {host.slots} slots", "raise it or drop it")
    return host


def _lines(text: str, source: str, dialects: _Dialects) -> Iterator[list[_Token]]:
    """The tokens of each line that holds any, without blanks and comments."""
    line, line_start = 1, 0
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        place = Place(source, line, match.start() - line_start + 1)
        if kind == "open":
            raise place.error("this comment is never closed", "close it with */")
        if kind == "quote":
            raise place.error("this quotation mark is never closed", 'close it with "')
        if kind in ("block", "slashes"):
            dialects.sure.add("openmpi")
        elif kind in ("equals", "quoted", "path", "word"):
            tokens.append(_Token(kind, match[0], match.start(), place))
        # A line ends with a newline, be it inside a comment.
        if kind in ("newline", "block") and (ends := list(_NEWLINE.finditer(text, match.start(), match.end()))):
            line, line_start = line + len(ends), ends[-1].end()
            if tokens:
                yield tokens
            tokens = []
    if tokens:
        yield tokens


def _head_and_pairs(tokens: list[_Token]) -> tuple[list[_Token], list[tuple[_Token, _Token]]]:
    """The host expressions that a line begins with, and the settings after them as keys with values."""
    equals = [token.kind == "equals" for token in tokens] + [False, False]
    if True not in equals:
        return tokens, []
    start = equals.index(True) - 1
    if start < 1:
        raise tokens[0].place.error(f"no host before {shown(tokens[0].text)}=", "write such as: node1 slots=8")
    pairs = []
    for at in range(start, len(tokens), 3):
        key = tokens[at]
        if not equals[at + 1]:
            raise key.place.error(f"did not expect {shown(key.text)} here", "settings are key=value, such as slots=8")
        if at + 2 >= len(tokens) or equals[at + 2] or equals[at + 3]:
            raise tokens[at + 1].place.error(f"{shown(key.text)} has no value", f"write such as: {key.text[:60]}=8")
        pairs.append((key, tokens[at + 2]))
    return tokens[:start], pairs


def _settings(pairs: list[tuple[_Token, _Token]], line: Place, notes: Notes, dialects: _Dialects) -> Host:
    """A host without a name that has the settings of one line."""
    values: dict[str, tuple[str, Place]] = {}
    for key, value in pairs:
        setting = _SETTINGS.get(key.text.replace("-", "_"))
        if setting is None:
            raise key.place.error(f"unknown setting {shown(key.text)}", _did_you_mean(key.text))
        if setting in ("slots", "max_slots", "port") and "," in value.text:
            raise value.place.error(f"did not expect a comma in {shown(value.text)}", "write one host a line")
        if setting in values:
            raise key.place.error(f"{setting} is given twice for this host", "drop one of them")
        values[setting] = value.text.strip('"') if value.kind == "quoted" else value.text, value.place
        if setting in ("slots", "max_slots"):
            dialects.sure.add("openmpi")
        elif setting == "user":
            dialects.suppose("mpich")
        elif setting == "binding":
            dialects.sure.add("mpich")
            notes.add("binding", f"{line}: binding={shown(value.text)} is MPICH's and is ignored; use --bind")

    def number(setting: str, most: int) -> int | None:
        return parse_number(*values[setting], setting, most) if setting in values else None

    if "user" in values:
        check_user(*values["user"])
    if "python" in values:
        _check_python(*values["python"])
    role, role_place = values.get("role", ("worker", line))
    if role not in ("worker", "server"):
        raise role_place.error(f"role must be worker or server, not {shown(role)}")
    return Host(
        name="",
        slots=number("slots", MAX_SLOTS),
        max_slots=number("max_slots", MAX_SLOTS),
        user=values["user"][0] if "user" in values else None,
        port=number("port", 65_535),
        python=values["python"][0] if "python" in values else None,
        role="server" if role == "server" else "worker",
        line=line.line,
    )


def _check_python(path: str, place: Place) -> None:
    if not path.startswith("/"):
        raise place.error(
            f"python must be an absolute path, not {shown(path)}", "write such as python=/usr/bin/python3"
        )
    if not path.isprintable() or '"' in path:
        raise place.error(f"{shown(path)} holds characters that no path to an interpreter should")


def _did_you_mean(key: str) -> str:
    wanted = key.lower().replace("-", "_")
    near = _OFTEN_MEANT.get(wanted)
    if near is None:
        import difflib  # here, as most hostfiles are right

        near = next(iter(difflib.get_close_matches(wanted[:60], _SETTINGS, n=1)), None)
    return f"did you mean {near}?" if near else f"known are {', '.join(dict.fromkeys(_SETTINGS.values()))}"
