"""What a run leaves behind: the run directory with `plan.json`, `result.json` and `ranks/<rank>.out|.err`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from distrib_launch.outlook.record import Measured

from distrib.bandwidth.prediction import Prediction
from distrib.errors import ConfigError

Status = Literal["succeeded", "failed", "stopped"]


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended; `exit_code` None: nobody ever told. `signal` is the number it died of, if of one.

    `cpus` are the processors that it was bound to (`0-3`; empty: not bound), `threads` its OMP_NUM_THREADS; None where
    nobody ever told. `stopped_by` says who ended it; it is empty where it ended of its own accord.
    """

    rank: int
    host: str
    local_rank: int
    role: str
    device: str
    exit_code: int | None
    signal: int | None
    cpus: str | None = None
    threads: int | None = None
    stopped_by: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first failure of a job: what it died of, where, and where to read on.

    `time` is Unix time on the launcher's clock; `log` the path of the rank's error output; `traceback` the script's own.
    """

    rank: int | None
    host: str
    time: float
    exit_code: int | None
    signal: int | None
    message: str
    traceback: str
    log: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, as `result.json` holds it."""

    status: Status
    exit_code: int
    world_size: int
    hosts: tuple[str, ...]
    seconds: float
    restarts: int
    """How often a rank was started again (mode async)."""
    ranks: tuple[RankResult, ...]
    first_failure: Failure | None
    warnings: tuple[str, ...]
    foretold: Prediction | None = None
    """What the bandwidth model said before the start, where the workload was known."""
    measured: Measured | None = None
    """What the ranks measured of their steps, where their script has `distrib.init()` and took enough of them."""


def choose_run_dir(wanted: str | None, script: str) -> Path:
    """The run directory: the one asked for, else `distrib-runs/<time>-<script>` under the working directory."""
    if wanted:
        return Path(wanted).absolute()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem) or "script"
    base = Path("distrib-runs").absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
    return next(path for n in range(10_000) if not (path := Path(f"{base}-{n}" if n else base)).exists())


@contextlib.contextmanager
def claimed_run_dir(wanted: str | None, script: str) -> Iterator[Path]:
    """The run directory, made at once where its name is ours to choose: another launch may choose in this very second.

    It goes again when no plan comes of it.
    """
    if wanted:
        yield Path(wanted).absolute()
        return
    while True:
        path = choose_run_dir(None, script)
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:  # taken meanwhile
            continue
        except OSError as error:
            raise _unmade(path, error) from None
    try:
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()
            path.parent.rmdir()
        raise


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """A run directory, made if need be, that no other launch uses meanwhile."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _unmade(path, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another job is running in {path}", hint="name another place with --run-dir, or wait for its end"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # for copies in processes that were forked meanwhile, too
        os.close(descriptor)


def make_run_dir(path: Path) -> bool:
    """Create the run directory with its `ranks/`; what an earlier run left there under our names is removed.

    Returns whether there was such a run.
    """
    try:
        earlier = (path / "result.json").exists()
        (path / "ranks").mkdir(parents=True, exist_ok=True)
        for old in (
            path / "result.json",
            path / "report.html",
            path / "metrics.jsonl",
            path / "engine.first.log",
            *(path / "ranks").glob("*.out"),
            *(path / "ranks").glob("*.err"),
            *(path / "ranks").glob("*.value"),
        ):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise _unmade(path, error) from None
    return earlier


def _unmade(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot make the run directory {path}: {error.strerror}", hint="name one with --run-dir")


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a structure as indented JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    partial.replace(path)
