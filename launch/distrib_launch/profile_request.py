"""Profile of a step for `distrib-launch --profile FILE`: request to the rank, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib import units
from distrib.bandwidth_model.workload import Workload, validate_workload, write_workload
from distrib.environment import DISTRIB_PROFILE
from distrib.errors import ConfigError, LaunchError
from distrib.utils import files
from distrib.utils.json_text import decode_json, encode_json

if TYPE_CHECKING:
    from distrib_launch.console import Console
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.results import Result


class _ProfileReply(msgspec.Struct, kw_only=True):
    """Result file of the profiled rank (`distrib.training.profiler`)."""

    workload: Workload | None = None
    steps: int = 0
    problem: str = ""


def prepare(options: LaunchOptions) -> dict[str, str]:
    """Return the variables that request a profile from the rank.

    Args:
        options: Options with `profile` and `engine` set.

    Raises:
        ConfigError: An option does not go with a profile, or its file cannot be written.
    """
    assert options.profile
    if options.ranks not in (None, 1):
        raise ConfigError(
            f"--profile measures one rank, not {options.ranks}", hint="leave out -np", code="option-conflict"
        )
    if options.strategy.mode != "sync":
        raise ConfigError(
            f"--profile measures one rank, so not in mode {options.strategy.mode}",
            hint="leave out --mode",
            code="option-conflict",
        )
    if options.strategy.accumulate > 1:
        raise ConfigError(
            f"--profile measures a step of one batch, not of {options.strategy.accumulate}",
            hint="leave out --accumulate; the launch that you plan for takes it",
            code="option-conflict",
        )
    if options.module and options.script == "distrib_launch.rank_agent.run_function":
        raise ConfigError(
            "profile= measures a script, not a function",
            hint="use job.profile(FILE) in the function",
            code="option-conflict",
        )
    if options.engine == "kubernetes":
        raise ConfigError(
            "--profile cannot bring its file back from Kubernetes",
            hint="profile on one of your machines",
            code="option-conflict",
        )
    if problem := files.write_problem(options.profile):
        raise ConfigError(
            f"--profile {options.profile}: {problem}", hint="name a file to write", code="file-not-written"
        )
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    return {DISTRIB_PROFILE: encode_json({"name": name}).decode()}


def save(options: LaunchOptions, result: Result, run_dir: Path, console: Console) -> None:
    """Write the profile to its file and show a summary; do nothing if the job failed.

    Args:
        options: Options with `profile` set.
        result: Result of the job.
        run_dir: Run directory with the rank's result file.
        console: Receives the summary.

    Raises:
        LaunchError: The script did not yield a profile.
    """
    if result.status != "succeeded":
        return  # the failure has been reported
    assert options.profile
    try:
        reply = decode_json((run_dir / "ranks/0.value").read_bytes(), _ProfileReply)
    except (OSError, msgspec.DecodeError):
        raise LaunchError(
            f"no profile: {options.script} ended without calling distrib.init()",
            hint="a profile needs distrib.init() and job.prepare(model, optimizer, loader) in the script",
            code="profile-failed",
        ) from None
    if reply.workload is None:
        raise LaunchError(
            reply.problem or f"no profile: {options.script} wrote another result",
            hint="let the script run for longer" if "step(s); a" in reply.problem else "",
            code="profile-failed",
        )
    write_workload(options.profile, validate_workload(reply.workload, "profile of rank 0"))
    console.say(f"{summary(reply.workload, reply.steps)}; written to {options.profile}")


def summary(workload: Workload, steps: int) -> str:
    """Describe a profile in one line.

    Args:
        workload: The profile.
        steps: Number of measured steps.
    """

    whole = workload.compute_seconds + workload.loader_seconds
    loading = workload.loading_processor_seconds
    loaded = f" (which takes {units.duration_text(loading)} of processors)" if loading else ""
    return (
        f"{workload.name} on {workload.device}, {steps} steps of {workload.batch} samples: {units.duration_text(whole)} a step (forward "
        f"{units.duration_text(workload.forward_seconds)}, backward {units.duration_text(workload.backward_seconds)}, optimizer "
        f"{units.duration_text(workload.optimizer_seconds)}, waiting for data {units.duration_text(workload.loader_seconds)}{loaded}; variation "
        f"{workload.variation:.1%}), {len(workload.gradients)} gradients, "
        f"{units.size_text(workload.gradient_bytes)} together"
    )
