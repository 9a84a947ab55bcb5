"""Status lines of a run: its start and its end. `Console.status` shows them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from distrib import units
from distrib.cluster.node import name_hosts
from distrib_launch import run_directory
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.results import Failure, Result

MAX_MESSAGE_LENGTH = 160
"""Characters of the first failure's message in the end line: two lines of a terminal. The report before it has all."""
MIN_LOADER_FRACTION = 0.1
"""Part of a step above which the end line names the wait for data; less is within the variation of steps."""
MIN_LOADER_SECONDS = 0.005
"""Wait for data above which the end line names it: loader processes cost nearly as much as shorter ones."""


def start_line(plan: LaunchPlan) -> str:
    """Return ranks, hosts, mode and run directory of a job.

    Args:
        plan: Plan of the job.
    """
    hosts = [host.name for host in plan.hosts]
    where = (
        "this machine" if hosts == ["localhost"] else f"{units.count_text(len(hosts), 'host')} ({name_hosts(hosts)})"
    )
    return f"{rank_count(plan)} on {where}, mode {plan.mode}, run directory {short_path(plan.run_dir)}"


def rank_count(plan: LaunchPlan) -> str:
    """Return the number of ranks and of parameter servers.

    Args:
        plan: Plan of the job.
    """
    servers = len(plan.ranks) - plan.world_size
    and_servers = f" and {units.count_text(servers, 'parameter server')}" if servers else ""
    return units.count_text(plan.world_size, "rank") + and_servers


def end_line(result: Result, run_dir: Path) -> str:
    """Return status, duration and speed of a run, its first failure, and where the details are.

    Args:
        result: Result of the run.
        run_dir: Its run directory.
    """
    line = f"{result.status} after {result.seconds:.1f} s"
    failure = result.first_failure
    if (
        result.status == "failed" and failure and failure.host
    ):  # without a host, the command prints the error before this line
        shown = failure.message.partition("; " if failure.code == "hang" else "\n")[0]  # a hang was reported at length
        message = textwrap.shorten(shown, MAX_MESSAGE_LENGTH)
        line += f": {message}" if failure.names_its_place else f": {failed_part(failure)}: {message}"
    elif measured := result.measured:
        baseline = "one rank's profiled speed" if result.predicted else "the speed without waiting"
        parts = [f"{measured.samples_per_second:,.0f} samples/s"] if measured.samples_per_second else []
        if result.world_size > 1 or result.predicted:
            parts.append(f"scaling efficiency {measured.efficiency:.0%} of {baseline}")
        loading = measured.loader_seconds or 0.0
        if loading > max(MIN_LOADER_SECONDS, MIN_LOADER_FRACTION * measured.step_seconds):
            parts.append(f"{loading / measured.step_seconds:.0%} of a step waiting for data")
        line += f": {', '.join(parts)}" if parts else ""
    details = next(
        (path for name in ("report.html", run_directory.RESULT) if (path := run_dir / name).exists()), run_dir
    )
    return f"{line}; see {short_path(details)}"


def warning_line(warnings: Sequence[str]) -> str:
    """Return a reminder of warnings that scrolled by: their number and the first one.

    Args:
        warnings: At least one.
    """
    first = textwrap.shorten(warnings[0].partition("\n")[0], MAX_MESSAGE_LENGTH)
    return f"warning: {first}" if len(warnings) == 1 else f"{len(warnings)} warnings, the first: {first}"


def failed_part(failure: Failure) -> str:
    """Return the rank or host that failed, such as `rank 1 on n2`.

    Args:
        failure: First failure of a job.
    """
    return f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host


def short_path(path: str | os.PathLike[str]) -> str:
    """Return a path relative to the working directory if it is inside it, else the absolute path.

    Args:
        path: Absolute path.
    """
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return os.fspath(path)
