"""The `measured:` part of a topology file: put there by probe, beside what people wrote, which stays byte for byte.

It is written with one link on a line, each as JSON, which is YAML too. That keeps the file readable and its differences small,
and lets it be read back without a YAML parser: a probe of 32 hosts has half a million numbers.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from distrib.cluster.measurements import Measurements
from distrib.errors import TopologyError
from distrib.utils import files

MARK = "measured:  # by distrib-topo probe, which replaces this part as a whole"

_KEY = re.compile(r"^(measured|'measured'|\"measured\")[ \t]*:(?=[ \t\r\n]|\Z)", re.MULTILINE)
_LISTS = ("machines", "pairs", "inside", "collectives")


def split_measured(text: str) -> tuple[str, str, str]:
    """The text before the key `measured`, its part, and what comes after it; without one, all of it and two empty ones.

    Blank lines and comments at the left margin after the part belong to what follows.
    """
    match = _KEY.search(text)
    if not match:
        return text, "", ""
    end = position = match.start()
    for number, line in enumerate(text[match.start() :].splitlines(keepends=True)):
        if number and line[:1] not in (" ", "\t", "\r", "\n", "#"):
            break
        position += len(line)
        if not number or (line[:1] in (" ", "\t") and line.strip()):
            end = position
    return text[: match.start()], text[match.start() : end], text[end:]


def encode_measured(measured: Measurements, newline: str = "\n") -> str:
    """The part as it stands in a file."""
    lines = [MARK]
    built = msgspec.to_builtins(measured)
    for key, value in built.items():
        if key in _LISTS:
            lines.append(f"  {key}:")
            lines += [f"    - {_json(item)}" for item in value]
        else:
            lines.append(f"  {key}: {_json(value)}")
    return newline.join(lines) + newline


def decode_measured(part: str) -> Measurements | None:
    """The reverse of `encode_measured`; None for a part that was not written so, or has been edited since."""
    lines = part.splitlines()
    if not lines or lines[0] != MARK:
        return None
    values: dict[str, str] = {}
    items: dict[str, list[str]] = {}
    key = ""
    for line in lines[1:]:
        if key in items and line.startswith("    - "):
            items[key].append(line[6:])
            continue
        match = re.fullmatch(r"  ([a-z_]+):(?: (.+))?", line)
        if not match or match[1] in values or match[1] in items:
            return None
        key = match[1]
        if match[2]:
            values[key] = match[2]
        else:
            items[key] = []
    values |= {key: f"[{','.join(lines)}]" for key, lines in items.items()}
    document = "{" + ",".join(f'"{key}":{value}' for key, value in values.items()) + "}"
    try:
        return msgspec.json.decode(document, type=Measurements)
    except msgspec.DecodeError:
        return None


def write_measured(path: str | os.PathLike[str], measured: Measurements, description: str = "") -> None:
    """Put the measured part into a topology file, or replace the one that is there; everything else stays as it is.

    Without a file, one is made of `description`, the text of a topology file, or of the hosts' names and nothing more. The file changes in one step or not at all.
    Raises TopologyError: the file is no topology, knows other hosts, or cannot be written.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    _replace(target, _with_measured(target, measured, os.fspath(path), description), os.fspath(path))


def check_takes(path: str | os.PathLike[str], hosts: Iterable[str]) -> None:
    """Raises TopologyError where the file is such that `write_measured` could not put in what is measured of these hosts."""
    _with_measured(Path(path), Measurements(when="", software={}, hosts=tuple(hosts)), os.fspath(path))


def _with_measured(target: Path, measured: Measurements, source: str, description: str = "") -> str:
    """The file's text with the measured part in it."""
    from distrib.cluster.topology import parse_topology
    from distrib.cluster.yaml_loader import read_topology_text

    description = description or _minimal(measured.hosts)
    old = read_topology_text(target) if files.exists(target) else description
    before, _, after = split_measured(old)
    if not _has_content(before + after):
        before += ("" if not before or before.endswith("\n") else "\n") + description
    newline = "\r\n" if "\r\n" in old else "\n"
    if before and not before.endswith(("\n", "\r")):
        before += newline
    new = before + encode_measured(measured, newline) + after
    plain = parse_topology(before + after, source)
    try:
        read_back = parse_topology(new, source)
        fits = read_back.measured == measured and msgspec.structs.replace(read_back, measured=None) == plain
    except TopologyError:
        if _is_yaml(new, source):
            raise
        fits = False
    if not fits:
        raise TopologyError(
            "cannot take a measured part", source=source, hint="write `nodes:` in block style, at the left margin"
        )
    return new


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises TopologyError where `write_measured` could not write: a folder, a file that may not be changed, no place for one."""
    target, source = Path(os.path.realpath(path)), os.fspath(path)
    why = ""
    if files.is_dir(target):
        why = "this is a directory"
    elif files.exists(target) and not files.is_file(target):
        why = "this is no file"
    elif not files.is_dir(target.parent):
        why = f"there is no folder {target.parent}"
    elif not (
        os.access(target if files.exists(target) else target.parent, os.W_OK) and os.access(target.parent, os.W_OK)
    ):
        why = files.refusal_reason(target.parent)
    if why:
        raise TopologyError(why, source=source, hint="name another file with -o")


def _is_yaml(text: str, source: str) -> bool:
    from distrib.cluster.yaml_loader import parse_yaml

    try:
        parse_yaml(text, source)
    except TopologyError:
        return False
    return True


def _has_content(text: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _minimal(hosts: Iterable[str]) -> str:
    from distrib.cluster.node import fold_hosts

    return (
        "# Written by distrib-topo probe. Say here what the hosts are made of: GPUs, links, NICs, switches;\n"
        "# hostfiles/ has commented examples. The part `measured` is probe's, the rest is yours.\n"
        f"nodes:\n  - hosts: {json.dumps(fold_hosts(list(hosts)))}\n\n"
    )


def _replace(target: Path, text: str, source: str) -> None:
    temporary = None
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise TopologyError(
            f"cannot write it: {error.strerror}", source=source, hint="name another file with -o"
        ) from None


def _umask() -> int:
    """What new files must not be; there is no way to ask without setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _json(value: Any) -> str:
    """JSON that is also YAML, of 1.1 too: PyYAML would take 1e-05 for text, as it has no point."""
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(str(key))}: {_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_json, value)) + "]"
    if isinstance(value, str):
        # YAML knows no escapes of two surrogates, so what can be shown is written as it is.
        return json.dumps(value, ensure_ascii=not value.isprintable())
    return json.dumps(value)
