"""Engines: runtimes that start the ranks. `mpirun` and `srun` start them, `kubernetes` writes a manifest."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from distrib_launch.engines.engine import Engine
    from distrib_launch.engines.remote_shell import RemoteShell
    from distrib_launch.launch_plan import LaunchPlan

NAMES = ("mpirun", "srun", "kubernetes")
"""Names of the engines: each is a module of this package with an `ENGINE`."""
NOT_ASKED = "Slurm has not allocated the hosts yet; inside an allocation hosts are checked"
"""Reason in messages why the preflight did not check the hosts."""


def get(name: str) -> Engine:
    """Return an engine.

    Args:
        name: One of `NAMES`.
    """
    return cast("Engine", importlib.import_module(f"{__name__}.{name}").ENGINE)


def shell_to_hosts(plan: LaunchPlan, *, preflight: bool = True) -> RemoteShell | None:
    """Return the program that reaches the hosts before the start; None if they are not checked.

    Args:
        plan: Plan of the launch.
        preflight: False with `--no-preflight`.
    """
    return get(plan.engine).shell(plan) if preflight else None


def default(hosts_given: bool, environ: Mapping[str, str]) -> str:
    """Return the engine to use without `--engine`: srun inside a Slurm allocation whose hosts are used, else mpirun.

    Args:
        hosts_given: The user named hosts.
        environ: Environment of the launcher.
    """
    return "srun" if not hosts_given and "SLURM_JOB_ID" in environ and shutil.which("srun") else "mpirun"
