"""What a run leaves behind: the run directory with `plan.json`, `result.json` and `ranks/<rank>.out|.err`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from distrib.bandwidth_model.prediction import Prediction
from distrib.errors import ConfigError, DistribError
from distrib.utils import files as paths
from distrib.utils import signals
from distrib_launch.forecast_record import MeasuredPerformance

if TYPE_CHECKING:
    from distrib_launch.launch_plan import LaunchPlan

Status = Literal["succeeded", "failed", "stopped"]

ENGINE_LOG = "engine.log"
FIRST_ENGINE_LOG = "engine.first.log"
"""Of an engine that was started a second time."""

RESULT = "result.json"
LONGEST_STEM = 100
"""So many letters of a script's name are in that of its run directory: a file's name has 255 at most."""

PREFLIGHT = "preflight.json"
ATTEMPT = "attempt"
"""Begins the name of the folder of a start that failed and was followed by another."""


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


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A start of the job that failed and was followed by another; `folder`, in the run directory, has its files."""

    world_size: int
    hosts: tuple[str, ...]
    seconds: float
    first_failure: Failure | None
    folder: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, as `result.json` holds it. All but `seconds`, from its first start on, `restarts` and `warnings` is of its last start."""

    status: Status
    exit_code: int
    world_size: int
    hosts: tuple[str, ...]
    seconds: float
    restarts: int
    """How often the job was started again (`--max-restarts`), and its ranks by themselves (mode async)."""
    ranks: tuple[RankResult, ...]
    first_failure: Failure | None
    warnings: tuple[str, ...]
    attempts: tuple[Attempt, ...] = ()
    """The starts before the last one."""
    predicted: Prediction | None = None
    """What the bandwidth model said before the start, where the workload was known."""
    measured: MeasuredPerformance | None = None
    """What the ranks measured of their steps, where their script has `distrib.init()` and took enough of them."""


def not_started(plan: LaunchPlan, end: DistribError | KeyboardInterrupt, seconds: float) -> Result:
    """The result of a job of which no rank has run its script, as there was an error or somebody stopped it."""
    code = signals.exit_code(end) if isinstance(end, KeyboardInterrupt) else end.exit_code
    failure = None
    if isinstance(end, DistribError):
        failure = Failure(
            rank=None, host="", time=time.time(), exit_code=code, signal=None, message=str(end), traceback="", log=""
        )  # fmt: skip
    return Result(
        status="failed" if failure else "stopped", exit_code=code, world_size=plan.world_size,
        hosts=tuple(host.name for host in plan.hosts), seconds=seconds, restarts=0, ranks=(), first_failure=failure, warnings=(),
    )  # fmt: skip


def choose_run_dir(wanted: str | None, script: str) -> Path:
    """The run directory: the one asked for, else `distrib-runs/<time>-<script>` under the working directory."""
    if wanted:
        return paths.absolute_path(wanted)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script.removesuffix(".py")).name)[:LONGEST_STEM] or "script"
    base = paths.absolute_path("distrib-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
    return next(path for n in range(10_000) if not paths.exists(path := Path(f"{base}-{n}" if n else base)))


@contextlib.contextmanager
def claimed_run_dir(wanted: str | None, script: str) -> Iterator[Path]:
    """The run directory, made at once where its name is ours to choose: another launch may choose in this very second.

    It goes again when no plan comes of it.
    """
    if wanted:
        yield paths.absolute_path(wanted)
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

    Returns whether there was any of it. Raises ConfigError where the folder is of no run: files of these names are somebody's own then.
    """
    try:
        attempts = [*path.glob(f"{ATTEMPT}[0-9]*/")]
        names = (path / name for name in (RESULT, "report.html", "metrics.jsonl", PREFLIGHT))
        files = [old for old in (*names, *_of_a_start(path)) if os.path.lexists(old)]
        of_attempts = (old for folder in attempts for old in (folder / RESULT, *_of_a_start(folder)))
        earlier = [*files, *filter(os.path.lexists, of_attempts)]
        if earlier and not any(map(_is_of_a_run, (path, *attempts))):
            raise ConfigError(
                f"{path} holds {earlier[0].relative_to(path)}, which is of no run",
                hint="remove it, or name another folder with --run-dir",
            )
        (path / "ranks").mkdir(parents=True, exist_ok=True)
        for old in files:
            old.unlink()
        for folder in attempts:
            _remove(folder)
    except OSError as error:
        raise _unmade(path, error) from None
    return bool(earlier)


_SIGNS = (("plan.json", "job", str), (RESULT, "world_size", int), (PREFLIGHT, "inventories", dict))
"""What tells a file of a run from another of that name: a key, and what is under it."""


def _is_of_a_run(path: Path) -> bool:
    """Whether a run has been in this folder, be it one that was killed."""
    for name, key, kind in _SIGNS:
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
            if isinstance(msgspec.json.decode((path / name).read_bytes())[key], kind):
                return True
    return False


def _of_a_start(path: Path) -> Iterator[Path]:
    """What each start of a job leaves in its folder."""
    for name in ("plan.json", ENGINE_LOG, FIRST_ENGINE_LOG):
        yield path / name
    for kind in ("out", "err", "value"):
        yield from (path / "ranks").glob(f"*.{kind}")


def clear(path: Path) -> None:
    """Remove what a start has left in its folder `path`. Raises OSError."""
    for old in _of_a_start(path):
        old.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove the folder of an earlier start, but for what somebody else has put there. Raises OSError."""
    (folder / RESULT).unlink(missing_ok=True)
    clear(folder)
    for empty in (folder / "ranks", folder):
        with contextlib.suppress(OSError):
            empty.rmdir()


def _move(source: Path, target: Path) -> None:
    for old in _of_a_start(source):
        with contextlib.suppress(FileNotFoundError):
            old.rename(target / old.relative_to(source))


def set_aside(path: Path, number: int, result: Result) -> Attempt:
    """Move what start `number` left in the run directory `path` to a folder of its own there, and `result` with it. Raises OSError."""
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


def bring_back(path: Path, attempt: Attempt) -> None:
    """Undo `set_aside` where the start that followed came to nothing; what its engine said stays."""
    folder = path / attempt.folder
    with contextlib.suppress(OSError):
        for new in list(_of_a_start(path)):
            if new.name != ENGINE_LOG:
                new.unlink(missing_ok=True)
        if paths.exists(path / ENGINE_LOG):
            (folder / ENGINE_LOG).unlink(missing_ok=True)
        _move(folder, path)
        _remove(folder)


def _unmade(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot make the run directory {path}: {error.strerror}", hint="name one with --run-dir")


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a structure as indented JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    partial.replace(path)
