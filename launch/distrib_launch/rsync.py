"""`--sync DIR`: bring a folder to the same path on every host, only what changed, with rsync over the launcher's ssh."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from distrib.errors import ConfigError, PreflightError
from distrib.utils import files as paths
from distrib.utils.netif import is_here
from distrib_launch.preflight.check_result import fold_by_host

EXCLUDED = (".git", "__pycache__", ".venv*", "distrib-runs")
AT_ONCE = 16
SILENCE_SECONDS = 60
LOOK_SECONDS = 0.2
LOST_CONNECTION = (10, 12, 30, 35, 255)  # of rsync(1), EXIT VALUES, and ssh's own
ABOUT_THE_CONNECTION = "io timeout|unexpectedly closed|Broken pipe|reset by peer|write error|read error"


class Synced(msgspec.Struct, frozen=True, kw_only=True):
    """What was brought, over all hosts together."""

    directory: str
    hosts: tuple[str, ...]
    files: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.hosts:
            return f"--sync {self.directory}: no other host to bring it to"
        return (
            f"--sync {self.directory}: {self.files} file(s), {self.bytes:,} bytes, to {len(self.hosts)} host(s) "
            f"in {self.seconds:.1f} s"
        )


class _Refused(Exception):
    """Why one host could not be given the folder."""


def check_folder(given: str) -> Path:
    """The absolute path of a folder that can be brought; `ConfigError` where it is none."""
    folder = paths.absolute_path(given)
    if not paths.is_dir(folder):
        raise ConfigError(
            f"--sync {given}: {'is no folder' if paths.exists(folder) else 'no such folder'}",
            hint="name the folder of the script, as --sync .",
        )
    if folder == Path(folder.anchor):
        raise ConfigError(f"--sync {given}: is the whole file system", hint="name the folder of the script")
    return folder


def sync(
    folder: Path, hosts: Sequence[str], ssh: Sequence[str], *, leave_out: Sequence[Path] = (), keep_newer: bool = False
) -> Synced:
    """Bring `folder` to each of `hosts` but this one. Nothing is deleted there.

    `leave_out` are further paths that stay here, such as the run directory. With `keep_newer` files that are newer on a host
    stay as they are there. Raises `ConfigError` without rsync here, and
    `PreflightError` that names each host which could not be given the folder, and why.
    """
    began = time.monotonic()
    others = [host for host in dict.fromkeys(hosts) if not is_here(host)]
    if others and shutil.which("rsync") is None:
        raise ConfigError("--sync needs rsync, which is not here", hint="install rsync, here and on every host")
    words = ["--update"] if keep_newer else []
    words += [f"--exclude={pattern}" for pattern in EXCLUDED]
    for path in leave_out:
        if folder in path.parents:
            words.append(f"--exclude=/{_literal(str(path.relative_to(folder)))}")

    interrupted = threading.Event()

    def bring(host: str) -> tuple[int, int] | _Refused:
        try:
            return _bring(folder, host, ssh, words, interrupted)
        except _Refused as why:
            return why

    pool = ThreadPoolExecutor(max_workers=AT_ONCE)
    try:
        told = list(pool.map(bring, others))
    except BaseException:  # those that still run would be waited for
        interrupted.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    if problems := {
        host: str(answer) for host, answer in zip(others, told, strict=True) if isinstance(answer, _Refused)
    }:
        raise PreflightError("\n".join(fold_by_host(problems.items())), hosts=problems)
    counts = [answer for answer in told if isinstance(answer, tuple)]
    return Synced(
        directory=str(folder),
        hosts=tuple(others),
        files=sum(files for files, _ in counts),
        bytes=sum(size for _, size in counts),
        seconds=time.monotonic() - began,
    )


def _bring(
    folder: Path, host: str, ssh: Sequence[str], words: Sequence[str], interrupted: threading.Event
) -> tuple[int, int]:
    """Files and bytes that one host was sent. Raises InterruptedError soon after `interrupted` is set."""
    path = f"{folder}/"
    target = f"[{host}]:{path}" if ":" in host else f"{host}:{path}"
    command = [
        "rsync", "--archive", "--compress", "--stats", "--protect-args", f"--timeout={SILENCE_SECONDS}", *words,
        f"--rsh={_rsh(ssh)}", f"--rsync-path=mkdir -p {shlex.quote(str(folder))} && rsync", "--", path, target,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    ) as process:  # fmt: skip
        while True:
            try:
                out, err = process.communicate(timeout=LOOK_SECONDS)
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
    """The line that tells why rsync failed, and what to do.

    Lines are looked at before the exit code, which is rsync's own (12) in place of ssh's or the shell's where those had not
    ended yet when rsync found its connection closed.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith("rsync error")] or lines
    if not said:
        return f"rsync ended with exit code {code} and no word", f"try: {shlex.join([*ssh, host, 'true'])}"
    install = f"install rsync on {host}, or keep the folder on a file system that every host shares"
    told = {
        r"(?i)rsync: (command |applet )?not found|(command not found|unknown command):? '?rsync": install,
        "No space left": f"make room on {host}",
        r"^rsync: (\[sender\] (?!Failed to exec)|send_files |opendir |link_stat |readlink_stat).*Permission denied \(13\)$": (
            "make it readable to your user, or take it out of the folder"
        ),
        r"^rsync: (?!.*Failed to exec).*(Permission denied|Read-only file system) \(\d+\)$|^mkdir: ": (
            f"choose a folder that your user may write to on {host}"
        ),
    }
    for pattern, hint in told.items():
        for line in said:
            if re.search(pattern, line):
                return line, hint
    others = [line for line in said if not line.startswith("rsync:")]  # banners and warnings, then what matters
    if code == 127:
        return (others or said)[-1], install
    own = [line for line in said if line.startswith("rsync:") and not re.search(ABOUT_THE_CONNECTION, line)]
    if own:
        return own[0], f"rsync's exit code is {code}"
    if code in LOST_CONNECTION:
        return (others or said)[-1], f"try: {shlex.join([*ssh, host, 'true'])}"
    return said[-1], f"rsync's exit code is {code}"


def _stat(what: str, text: str) -> int:
    found = re.search(rf"{what}: ([\d,]+)", text)
    return int(found[1].replace(",", "")) if found else 0


def _rsh(words: Sequence[str]) -> str:
    """The words as rsync splits them: at blanks outside quotes, with a doubled quote for one inside."""
    return " ".join("'" + word.replace("'", "''") + "'" if re.search(r"[\s'\"]", word) else word for word in words)


def _literal(path: str) -> str:
    """A path in which rsync's pattern takes nothing for a wildcard."""
    return re.sub(r"([*?\[\\])", r"\\\1", path) if re.search(r"[*?\[]", path) else path
