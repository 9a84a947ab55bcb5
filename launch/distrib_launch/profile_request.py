"""`distrib-launch --profile FILE`: one rank measures a step of its script, and what it found is written to FILE."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib import units
from distrib.bandwidth_model.workload import Workload, write_workload
from distrib.environment import DISTRIB_PROFILE
from distrib.errors import ConfigError, LaunchError
from distrib.utils import files

if TYPE_CHECKING:
    from distrib_launch.console import Console
    from distrib_launch.results import Result


class _Answer(msgspec.Struct, kw_only=True):
    workload: Workload | None = None
    steps: int = 0
    problem: str = ""


def prepare(options: argparse.Namespace) -> dict[str, str]:
    """What the rank is told. Raises ConfigError for options that do not go with a profile."""
    if options.ranks not in (None, 1):
        raise ConfigError(f"--profile measures one rank alone, not {options.ranks}", hint="leave out -np")
    if options.mode not in ("sync", "auto"):
        raise ConfigError(
            f"--profile measures a rank without others, so not in mode {options.mode}", hint="leave out --mode"
        )
    if options.accumulate > 1:
        raise ConfigError(
            f"--profile measures a step of one batch, not of {options.accumulate}",
            hint="leave out --accumulate; the launch that you plan for takes it",
        )
    if options.module and options.script == "distrib_launch.rank_agent.run_function":
        raise ConfigError("profile= measures a script, not a function", hint="use job.profile(FILE) in the function")
    if options.engine == "kubernetes":
        raise ConfigError(
            "--profile cannot bring its file back from Kubernetes", hint="profile on one of your machines"
        )
    if what := files.write_problem(options.profile):
        raise ConfigError(f"--profile {options.profile}: {what}", hint="name a file to write")
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    return {DISTRIB_PROFILE: msgspec.json.encode({"name": name}).decode()}


def keep(options: argparse.Namespace, result: Result, run_dir: Path, console: Console) -> None:
    """Write the profile where it was wanted and say what is in it. Raises LaunchError where the script gave none."""
    if result.status != "succeeded":
        return  # it has been told why
    try:
        answer = msgspec.json.decode((run_dir / "ranks/0.value").read_bytes(), type=_Answer)
    except (OSError, msgspec.DecodeError):
        raise LaunchError(
            f"no profile: {options.script} ended without calling distrib.init()",
            hint="a profile needs distrib.init() and job.prepare(model, optimizer, loader) in the script",
        ) from None
    if answer.workload is None:
        raise LaunchError(
            answer.problem, hint="let the script run on for longer" if "step(s); a" in answer.problem else ""
        )
    write_workload(options.profile, answer.workload)
    console.say(f"{summary(answer.workload, answer.steps)}; written to {options.profile}")


def summary(workload: Workload, steps: int) -> str:
    """What a profile says, in a line."""

    def time(seconds: float) -> str:
        return units.format_duration(seconds, digits=3)

    whole = workload.compute_seconds + workload.loader_seconds
    loading = workload.loading_processor_seconds
    loaded = f" (which takes {time(loading)} of processors)" if loading else ""
    return (
        f"{workload.name} on {workload.device}, {steps} steps of {workload.batch} samples: {time(whole)} a step (forward "
        f"{time(workload.forward_seconds)}, backward {time(workload.backward_seconds)}, optimizer "
        f"{time(workload.optimizer_seconds)}, waiting for data {time(workload.loader_seconds)}{loaded}; variation "
        f"{workload.variation:.1%}), {len(workload.gradients)} gradients, "
        f"{units.format_size(workload.gradient_bytes, digits=3, binary=False)} together"
    )
