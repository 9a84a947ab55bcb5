"""Writer of the `measured:` section of a topology file."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from distrib.cluster.measurements import Measurements
from distrib.cluster.measurements_io import encode_measured, split_measured
from distrib.cluster.node import fold_hosts
from distrib.cluster.topology import parse_topology
from distrib.cluster.yaml_loader import parse_yaml, read_topology_text
from distrib.errors import TopologyError
from distrib.utils import files


def write_measured(path: str | os.PathLike[str], measured: Measurements, description: str = "") -> None:
    """Insert or replace the `measured` section of a topology file, atomically; the other text is kept byte for byte.

    Args:
        path: The file, new or existing.
        measured: The measurements.
        description: The text of a new file. Empty: the names of the hosts.

    Raises:
        TopologyError: The file is invalid, describes other hosts, or cannot be written.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))  # a link stays a link
    _replace(target, _with_measured(target, measured, os.fspath(path), description), os.fspath(path))


def check_accepts_measurements(path: str | os.PathLike[str], hosts: Iterable[str]) -> None:
    """Check that `write_measured` can insert measurements of these hosts.

    Args:
        path: The file, new or existing.
        hosts: Host names.

    Raises:
        TopologyError: The file is invalid, or describes other hosts.
    """
    _with_measured(Path(path), Measurements(when="", software={}, hosts=tuple(hosts)), os.fspath(path))


def _with_measured(target: Path, measured: Measurements, source: str, description: str = "") -> str:
    """Insert the section into the text of the file."""
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
        is_kept = read_back.measured == measured and msgspec.structs.replace(read_back, measured=None) == plain
    except TopologyError:
        if _is_yaml(new, source):
            raise
        is_kept = False
    if not is_kept:
        raise TopologyError(
            "the `measured` section cannot be inserted",
            source=source,
            hint="write `nodes:` in block style, at the left margin",
        )
    return new


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that `write_measured` can write a file.

    Args:
        path: The file, new or existing.

    Raises:
        TopologyError: The file or its folder cannot be written.
    """
    target, source = Path(os.path.realpath(path)), os.fspath(path)
    why = files.write_problem(target)
    if not why and files.exists(target) and not files.is_file(target):
        why = "this is not a regular file"
    if not why and not os.access(target.parent, os.W_OK):  # the file is replaced
        why = files.refusal_reason(target.parent)
    if why:
        raise TopologyError(why, source=source, hint="name another file with -o")


def _is_yaml(text: str, source: str) -> bool:
    try:
        parse_yaml(text, source)
    except TopologyError:
        return False
    return True


def _has_content(text: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _minimal(hosts: Iterable[str]) -> str:
    return (
        "# Written by distrib-topo probe. Describe GPUs, links, NICs and switches here; hostfiles/ has commented examples.\n"
        "# Only the section `measured` is replaced by the next probe.\n"
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
            f"cannot write it: {error.strerror}",
            source=source,
            hint="name another file with -o",
            code="file-not-written",
        ) from None


def _umask() -> int:
    """Return the umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
