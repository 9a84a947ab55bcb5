"""Python API `distrib_launch.run`: launch a script or a function with the options of `distrib-launch`."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from distrib.errors import ConfigError, JobFailed
from distrib.utils import files
from distrib_launch import results, run_directory, runner
from distrib_launch.arguments import launch_arguments
from distrib_launch.arguments.shared_options import option_words
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.rank_exit import signal_name

NOT_HERE = ("dry-run", "json", "version", "help", "module", "stdin")
"""Options of the command that `run` does not accept."""


class RunResult(results.Result, frozen=True, kw_only=True):
    """Result of a job that succeeded: the content of `result.json`, the run directory, and a function's return value on each rank."""

    run_dir: str
    return_values: tuple[Any, ...] = ()


def run(
    target: str | os.PathLike[str] | Callable[..., Any],
    *args: Any,
    hosts: str | os.PathLike[str] | Iterable[str] | Mapping[str, int] | None = None,
    np: int | None = None,
    **options: Any,
) -> RunResult:
    """Run a script or a function on every rank, and wait for its end.

    Output of the ranks is written to `sys.stdout` and `sys.stderr`. `run` may be called from any thread; it handles signals if that is
    the main thread. A function may be defined anywhere, also in a notebook, and need not exist on the hosts. Modules that it imports
    must exist there; `sync="."` copies them.

    Args:
        target: Path of a script, or a function.
        *args: Arguments of the script or function.
        hosts: Hostfile, list such as `"a:2,b:2"`, its items, or slots by host; None: this machine or Slurm's allocation.
        np: Number of ranks; None: one for each slot.
        **options: Options of `distrib-launch` with underscores, such as `timeout="10m"`, `env={"NAME": "value"}`, `quiet=True` or
            `host_reduction=False`. dry_run, json, module, stdin and version do not exist here.

    Returns:
        The result; `return_values` has what the function returned on each rank.

    Raises:
        JobFailed: The job failed; `errors` has the error of each rank.
        KeyboardInterrupt: Ctrl-C interrupted the job.
        DistribError: The job could not be started.

    Example:
        result = distrib_launch.run(train, 0.1, hosts="a:2,b:2", timeout="10m")
        print(result.return_values[0])
    """
    files.working_directory()  # raises ConfigError if the folder was deleted
    named = {"hosts": hosts_argument(hosts), "np": np, **options}
    words = option_words(launch_arguments.parser(), named, "distrib_launch.run", excluded=NOT_HERE)
    if callable(target):
        name = getattr(target, "__name__", type(target).__name__)
        wanted = launch_arguments.parse([*words, "--module", "distrib_launch.rank_agent.run_function"])
        script_input = _pickled(target, args, name)
    else:
        name = Path(target).stem
        wanted = launch_arguments.parse([*words, str(files.absolute_path(target)), *map(str, args)])
        script_input = b""
    if wanted.engine == "kubernetes":
        raise ConfigError("engine='kubernetes' writes a manifest", hint="use the command distrib-launch")
    with run_directory.claimed_run_dir(wanted.run_dir, name) as run_dir:
        wanted = msgspec.structs.replace(wanted, run_dir=str(run_dir))
        plan = runner.plan_launch(wanted)
    result = runner.launch(plan, wanted, streams=(sys.stdout, sys.stderr), script_input=script_input)
    if result.status != "succeeded":
        failure = _failed(result, run_dir)
        if result.exit_code == 130:
            raise KeyboardInterrupt from failure
        raise failure
    values = tuple(_value(run_dir, rank) for rank in range(result.world_size)) if script_input else ()
    fields = {field: getattr(result, field) for field in result.__struct_fields__}
    return RunResult(**fields, run_dir=str(run_dir), return_values=values)


def hosts_argument(hosts: str | os.PathLike[str] | Iterable[str] | Mapping[str, int] | None) -> str | None:
    """Return hosts in the form of `-H`.

    Args:
        hosts: Hostfile, host list, names, or slots by name; None: those of the default.
    """
    if hosts is None:
        return None
    if isinstance(hosts, Mapping):
        hosts = [
            f"[{host}]:{slots}" if host.count(":") > 1 and host[0] != "[" else f"{host}:{slots}"
            for host, slots in hosts.items()
        ]
    return os.fspath(hosts) if isinstance(hosts, (str, os.PathLike)) else ",".join(hosts)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> bytes:
    import cloudpickle  # start-up time: scripts need none

    try:
        call = cloudpickle.dumps((function, args))
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to other processes: {error}",
            hint="open files, locks and connections inside the function, not outside",
            code="function-unpicklable",
        ) from error
    if len(call) > 1 << 30:
        raise ConfigError(
            f"{name} with its arguments and what it refers to is {len(call) >> 20} MiB",
            hint="have the function read its data itself",
            code="function-unpicklable",
        )
    path = [str(Path(folder).absolute()) for folder in sys.path]
    return pickle.dumps({"name": name, "path": path, "call": call})


def _value(run_dir: Path, rank: int) -> Any:
    try:
        return pickle.loads((run_dir / f"ranks/{rank}.value").read_bytes())
    except OSError:
        return None  # the function ended with sys.exit(0)


def _failed(result: results.Result, run_dir: Path) -> JobFailed:
    first = result.first_failure
    errors = {}
    for rank in result.ranks:
        if (rank.exit_code == 0 and not rank.signal) or rank.stopped_by:
            continue
        if first and first.rank == rank.rank:
            # The stack of a process that a signal killed does not name the signal.
            parts = [first.message, first.traceback] if rank.signal else [first.traceback or first.message]
            errors[rank.rank] = "\n".join(filter(None, parts))
            continue
        error = root_cause.error_in(root_cause.tail(run_dir / f"ranks/{rank.rank}.err")) if rank.exit_code else None
        ended = f"killed by {signal_name(rank.signal)}" if rank.signal else f"exit code {rank.exit_code}"
        errors[rank.rank] = (
            error.traceback if error else (ended if rank.exit_code is not None else "lost without an exit record")
        )
    if first is None:
        what = f"the job was {result.status} (exit code {result.exit_code})"
        code = "timeout" if result.exit_code == 124 else "stopped"
    else:
        who = (
            f"rank {first.rank} on {first.host} failed first: "
            if first.rank is not None and not first.names_its_place
            else ""
        )
        what, code = who + first.message, first.code
    return JobFailed(what, errors=errors, result=result, hint=f"everything is in {run_dir}", code=code)
