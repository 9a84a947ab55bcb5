"""`--sync DIR`: copy a folder to the same path on every host with rsync over the launcher's ssh; unchanged files are skipped."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from distrib.errors import ConfigError, PreflightError
from distrib.utils import files as paths
from distrib.utils.netif import is_here
from distrib.utils.threads import map_in_threads
from distrib_launch.preflight.check_result import fold_by_host

EXCLUDED = (".git", "__pycache__", ".venv*", "distrib-runs")
"""Patterns of files and folders that are not copied."""
ABOUT_THE_CONNECTION = "io timeout|unexpectedly closed|Broken pipe|reset by peer|write error|read error"
"""Pattern of rsync's messages about a broken connection."""


class Synced(msgspec.Struct, frozen=True, kw_only=True):
    """Files that were copied, over all hosts together."""

    directory: str
    hosts: tuple[str, ...]
    files: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.hosts:
            return f"--sync {self.directory}: there is no other host"
        return (
            f"--sync {self.directory}: {self.files} file(s), {self.bytes:,} bytes, to {len(self.hosts)} host(s) "
            f"in {self.seconds:.1f} s"
        )


class _Refused(Exception):
    """Reason why the folder could not be copied to one host."""


def check_folder(given: str) -> Path:
    """Return the absolute path of a folder to copy.

    Args:
        given: Value of `--sync`.

    Raises:
        ConfigError: The path is not a folder, or is the root of the file system.
    """
    folder = paths.absolute_path(given)
    if not paths.is_dir(folder):
        raise ConfigError(
            f"--sync {given}: {'not a folder' if paths.exists(folder) else 'no such folder'}",
            hint="name the folder of the script, as --sync .",
        )
    if folder == Path(folder.anchor):
        raise ConfigError(f"--sync {given}: it is the root of the file system", hint="name the folder of the script")
    return folder


def sync(
    folder: Path, hosts: Sequence[str], ssh: Sequence[str], *, leave_out: Sequence[Path] = (), keep_newer: bool = False
) -> Synced:
    """Copy a folder to each host except this machine. Files that exist only on a host stay there.

    Args:
        folder: Folder to copy.
        hosts: Names of the hosts.
        ssh: ssh command that reaches them.
        leave_out: Paths that are not copied, such as the run directory.
        keep_newer: True to keep files that are newer on a host.

    Returns:
        The hosts, files and bytes.

    Raises:
        ConfigError: There is no rsync on this machine.
        PreflightError: The copy to some hosts failed; names each with its reason.
    """
    began = time.monotonic()
    others = [host for host in dict.fromkeys(hosts) if not is_here(host)]
    if others and shutil.which("rsync") is None:
        raise ConfigError(
            "--sync: rsync is not installed here", hint="install rsync, here and on every host", code="tool-missing"
        )
    words = ["--update"] if keep_newer else []
    words += [f"--exclude={pattern}" for pattern in EXCLUDED]
    for path in leave_out:
        if folder in path.parents:
            words.append(f"--exclude=/{_literal(str(path.relative_to(folder)))}")

    interrupted = threading.Event()

    def copy(host: str) -> tuple[int, int] | _Refused:
        try:
            return _copy(folder, host, ssh, words, interrupted)
        except _Refused as why:
            return why

    outcomes = map_in_threads(copy, others, at_once=16, interrupt=interrupted.set)
    if problems := {
        host: str(outcome) for host, outcome in zip(others, outcomes, strict=True) if isinstance(outcome, _Refused)
    }:
        raise PreflightError("\n".join(fold_by_host(problems.items())), hosts=problems, code="sync-failed")
    counts = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    return Synced(
        directory=str(folder),
        hosts=tuple(others),
        files=sum(files for files, _ in counts),
        bytes=sum(size for _, size in counts),
        seconds=time.monotonic() - began,
    )


def _copy(
    folder: Path, host: str, ssh: Sequence[str], words: Sequence[str], interrupted: threading.Event
) -> tuple[int, int]:
    """Copy the folder to one host; return the number of files and bytes. Raises InterruptedError soon after `interrupted` is set."""
    path = f"{folder}/"
    target = f"[{host}]:{path}" if ":" in host else f"{host}:{path}"
    command = [
        "rsync", "--archive", "--compress", "--stats", "--protect-args", "--timeout=60", *words,
        f"--rsh={_rsh(ssh)}", f"--rsync-path=mkdir -p {shlex.quote(str(folder))} && rsync", "--", path, target,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    ) as process:  # fmt: skip
        while True:
            try:
                out, err = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if interrupted.is_set():
                    process.terminate()
                    raise InterruptedError from None
    if process.returncode == 0:
        return _stat(r"regular files transferred", out), _stat(r"Total transferred file size", out)
    why, hint = _why(process.returncode, err, host, ssh)
    raise _Refused(f"{host}: --sync {folder} failed: {why}; {hint}")


def _why(code: int, stderr: str, host: str, ssh: Sequence[str]) -> tuple[str, str]:
    """Return the line of output with the cause of rsync's failure, and a hint.

    The output is examined before the exit code: rsync reports its own code (12) if ssh or the shell had not ended yet when
    rsync found its connection closed.
    """
    connect = f"try: {shlex.join([*ssh, host, 'true'])}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("rsync error")] or lines
    if not lines:
        return f"rsync exited with code {code} and no message", connect
    missing = [line for line in lines if "rsync" in line and re.search(r"(?i)not found|unknown command", line)]
    remote = [line for line in lines if not line.startswith("rsync:")]  # banners and warnings, then the error
    if missing or code == 127:
        line = (missing or remote or lines)[-1]
        return line, f"install rsync on {host}, or keep the folder on a file system that every host shares"
    for line in lines:
        if line.startswith("mkdir:"):
            return line, f"choose a folder that your user may write to on {host}"
        if line.startswith("rsync:") and not re.search(ABOUT_THE_CONNECTION, line):
            return line, f"rsync's exit code is {code}"
    is_lost = code in (10, 12, 30, 35, 255)  # rsync(1), EXIT VALUES, and ssh's 255
    return (remote or lines)[-1], connect if is_lost else f"rsync's exit code is {code}"


def _stat(what: str, text: str) -> int:
    found = re.search(rf"{what}: ([\d,]+)", text)
    return int(found[1].replace(",", "")) if found else 0


def _rsh(words: Sequence[str]) -> str:
    """Join words for `--rsh`: rsync splits them at blanks outside quotes and reads a doubled quote as one."""
    return " ".join("'" + word.replace("'", "''") + "'" if re.search(r"[\s'\"]", word) else word for word in words)


def _literal(path: str) -> str:
    """Escape the wildcards of rsync's patterns in a path."""
    return re.sub(r"([*?\[\\])", r"\\\1", path) if re.search(r"[*?\[]", path) else path
