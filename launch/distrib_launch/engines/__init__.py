"""Other people's runtimes: each module turns a LaunchPlan into a running job on one of them.

`mpirun` and `srun` start one `distrib_launch.rank_agent` per planned rank, in the plan's order; the supervisor watches both
alike. `kubernetes` writes what starts the launcher itself inside a cluster, and runs nothing here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from distrib_launch.engines.remote_shell import RemoteShell
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan

NAMES = ("mpirun", "srun", "kubernetes")
NOT_ASKED = "no host is asked that Slurm has yet to give; inside an allocation all are"


class Planner(Protocol):
    """What planning asks of an engine's module."""

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        """The command line on this machine that starts the plan's ranks; the control token is never in it."""

    def notes(self, plan: LaunchPlan) -> tuple[str, ...]:
        """What the user should know about this engine's part; `plan` has its command already."""


class Runtime(Planner, Protocol):
    """What `launch` asks of an engine's module that starts ranks from here."""

    PATIENCE_SECONDS: float
    """How long the engine is left to end by itself once the launcher was killed, before it is made to."""

    def remote(self, plan: LaunchPlan) -> RemoteShell | None:
        """How the plan's hosts are asked before it starts; None where they cannot be, as they are not ours yet."""

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the engine's process finds of the launcher's environment."""

    def write_files(self, run_dir: Path, plan: LaunchPlan) -> None:
        """Write what the command line refers to."""

    def queued(self, log: Path) -> str:
        """What the engine says while it waits for hosts, empty where it does not; `log` holds what it printed."""

    def explain(self, words: str) -> tuple[str, str] | None:
        """What went wrong, with the line that says so, and what to do, from what the engine printed; None where that says it best."""

    def may_succeed(self, words: str) -> bool:
        """Whether what it printed is no reason why it should fail to start the ranks another time."""

    def lost_host(self, words: str) -> str:
        """The host that the engine lost, from what it printed; empty where it says nothing of one."""

    def cancelled(self, words: str, *, for_a_reason: bool = False) -> str:
        """Who ended the ranks, from what the engine printed; empty where it was not the engine's doing, or gave no reason for it."""

    def give_up(self, plan: LaunchPlan) -> tuple[str, ...] | None:
        """A command that ends whatever is left of the job after the engine's process was killed; None: nothing can be."""


def planner(name: str) -> Planner:
    """The engine of that name, one of `NAMES`."""
    return cast(Planner, importlib.import_module(f"{__name__}.{name}"))


def runtime(name: str) -> Runtime:
    """The same, of those that start ranks from here: not Kubernetes, whose manifest has been written instead."""
    return cast(Runtime, planner(name))


def shell_to_hosts(plan: LaunchPlan, *, preflight: bool = True) -> RemoteShell | None:
    """How the plan's hosts are asked before it starts; None where they are not, as the user wants it so, or they are not ours yet."""
    return runtime(plan.engine).remote(plan) if preflight else None


def default(hosts_given: bool, environ: Mapping[str, str]) -> str:
    """The engine where none was asked for: inside Slurm's allocation, if its hosts are used, Slurm's own, else mpirun."""
    from distrib_launch.engines import srun

    return "srun" if not hosts_given and srun.in_allocation(environ) and srun.find_srun() else "mpirun"
