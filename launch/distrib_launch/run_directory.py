"""Run directory of a job: `plan.json`, `result.json`, `ranks/<rank>.out|.err`, and `attempt<N>/` for starts that failed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from distrib.errors import ConfigError
from distrib.utils import files
from distrib.utils.json_text import decode_json, encode_json
from distrib_launch.results import Attempt, Result

ENGINE_LOG = "engine.log"
FIRST_ENGINE_LOG = "engine.first.log"
"""Log of an engine that failed to start and was retried."""

RESULT = "result.json"
PREFLIGHT = "preflight.json"
ATTEMPT = "attempt"
"""Prefix of the folders of starts that failed."""


def choose_run_dir(wanted: str | None, script: str) -> Path:
    """Return the run directory.

    Args:
        wanted: Value of `--run-dir`; None: `distrib-runs/<time>-<script>` in the working directory.
        script: Path or module of the script.
    """
    if wanted:
        return files.absolute_path(wanted)
    # File names have 255 characters at most.
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script.removesuffix(".py")).name)[:100] or "script"
    base = files.absolute_path("distrib-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
    return next(path for n in range(10_000) if not files.exists(path := Path(f"{base}-{n}" if n else base)))


@contextlib.contextmanager
def claimed_run_dir(wanted: str | None, script: str) -> Iterator[Path]:
    """Choose the run directory, create it if its name was chosen here, and remove it again if the block raises.

    Args:
        wanted: Value of `--run-dir`, None for none.
        script: Path or module of the script.

    Raises:
        ConfigError: It cannot be created.
    """
    if wanted:
        yield files.absolute_path(wanted)
        return
    while True:
        path = choose_run_dir(None, script)
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:  # taken meanwhile
            continue
        except OSError as error:
            raise _cannot_make(path, error) from None
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
            path.parent.rmdir()
        raise


@contextlib.contextmanager
def locked_run_dir(path: Path) -> Iterator[None]:
    """Create a run directory if necessary, and lock it against other launches.

    Args:
        path: The run directory.

    Raises:
        ConfigError: Another job runs in it, another user may have put links there, or it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _cannot_make(path, error) from None
    try:
        owner = os.fstat(descriptor)
        if owner.st_uid not in (0, os.geteuid()) and owner.st_mode & stat.S_IWOTH:  # with links in place of our files
            raise ConfigError(
                f"unsafe run directory {path}: user {owner.st_uid} owns it and all users may write there",
                hint="name another with --run-dir",
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another job is running in {path}",
                hint="name another place with --run-dir, or wait for its end",
                code="file-in-use",
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for forked processes that inherited it
        os.close(descriptor)


def prepare_run_dir(path: Path) -> bool:
    """Create the run directory with its `ranks/`, and remove the files of an earlier run.

    Args:
        path: The run directory.

    Returns:
        True if there were any.

    Raises:
        ConfigError: It holds files with these names that are of no run, or cannot be created.
    """
    try:
        attempts = [*path.glob(f"{ATTEMPT}[0-9]*/")]
        names = (path / name for name in (RESULT, "report.html", "metrics.jsonl", PREFLIGHT))
        present = [old for old in (*names, *_files_of_start(path)) if os.path.lexists(old)]
        of_attempts = (old for folder in attempts for old in (folder / RESULT, *_files_of_start(folder)))
        earlier = [*present, *filter(os.path.lexists, of_attempts)]
        if earlier and not any(map(_is_run_dir, (path, *attempts))):
            raise ConfigError(
                f"{path} holds {earlier[0].relative_to(path)}, which is of no run",
                hint="remove it, or name another folder with --run-dir",
                code="file-not-written",
            )
        (path / "ranks").mkdir(parents=True, exist_ok=True)
        for old in present:
            old.unlink()
        for folder in attempts:
            _remove(folder)
    except OSError as error:
        raise _cannot_make(path, error) from None
    return bool(earlier)


_FIELDS = (("plan.json", "job", str), (RESULT, "world_size", int), (PREFLIGHT, "inventories", dict))
"""A field and its type by which a file of a run is recognized."""


def _is_run_dir(path: Path) -> bool:
    """Return True if a run used this folder, even one that was killed."""
    for name, key, kind in _FIELDS:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError):
            if isinstance(decode_json((path / name).read_bytes(), dict[str, object])[key], kind):
                return True
    return False


def _files_of_start(path: Path) -> Iterator[Path]:
    """Yield the files that each start of a job leaves in its folder."""
    for name in ("plan.json", ENGINE_LOG, FIRST_ENGINE_LOG):
        yield path / name
    for kind in ("out", "err", "value"):
        yield from (path / "ranks").glob(f"*.{kind}")


def clear_start(path: Path) -> None:
    """Remove the files of a start.

    Args:
        path: Its folder.

    Raises:
        OSError: A file cannot be removed.
    """
    for old in _files_of_start(path):
        old.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove the folder of an earlier start, but not files of the user. Raises OSError."""
    (folder / RESULT).unlink(missing_ok=True)
    clear_start(folder)
    for empty in (folder / "ranks", folder):
        with contextlib.suppress(OSError):
            empty.rmdir()


def _move(source: Path, target: Path) -> None:
    for old in _files_of_start(source):
        with contextlib.suppress(FileNotFoundError):
            old.rename(target / old.relative_to(source))


def set_aside(path: Path, number: int, result: Result) -> Attempt:
    """Move the files of a failed start to a folder of their own.

    Args:
        path: The run directory.
        number: Number of the start.
        result: Its result, written there, too.

    Raises:
        OSError: A file cannot be moved.
    """
    folder = path / f"{ATTEMPT}{number}"
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    _move(path, folder)
    failure = result.first_failure
    if failure and Path(failure.log).is_relative_to(path):
        failure = msgspec.structs.replace(failure, log=str(folder / Path(failure.log).relative_to(path)))
    write_json(folder / RESULT, msgspec.structs.replace(result, first_failure=failure))
    return Attempt(
        world_size=result.world_size,
        hosts=result.hosts,
        seconds=result.seconds,
        first_failure=failure,
        folder=folder.name,
    )


def restore_start(path: Path, attempt: Attempt) -> None:
    """Undo `set_aside` if the next start failed before its ranks ran; its engine log stays.

    Args:
        path: The run directory.
        attempt: The start that was set aside.
    """
    folder = path / attempt.folder
    with contextlib.suppress(OSError):
        for new in list(_files_of_start(path)):
            if new.name != ENGINE_LOG:
                new.unlink(missing_ok=True)
        if files.exists(path / ENGINE_LOG):
            (folder / ENGINE_LOG).unlink(missing_ok=True)
        _move(folder, path)
        _remove(folder)


def _cannot_make(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot make the run directory {path}: {error.strerror}",
        hint="name one with --run-dir",
        code="file-not-written",
    )


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a structure as indented JSON, completely or not at all.

    Args:
        path: File to write.
        value: The structure.

    Raises:
        OSError: It cannot be written.
    """
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode_json(value, indent=2) + b"\n")
    partial.replace(path)
