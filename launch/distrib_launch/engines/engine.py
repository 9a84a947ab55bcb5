"""Base class of the engines: each turns a LaunchPlan into a running job on one runtime.

A new engine is a module of this package with a subclass as `ENGINE`, and its name in `engines.NAMES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distrib_launch.engines.remote_shell import RemoteShell

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.rank_placement import HostPlan

AGENT = (
    *("-E", "-X", "utf8", "-c"),
    'import os, sys; sys.path[0] or sys.path.pop(0); sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(":")); '
    'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__")',
    "distrib_launch.rank_agent",
)
"""Arguments of Python that start a rank agent. Neither the working directory nor PYTHONPATH may hide our modules; PYTHONPATH may hold them.
Names are in UTF-8 in every locale, as the launcher sends them."""


class Engine:
    """A runtime that starts one `distrib_launch.rank_agent` for each planned rank, in the order of `LaunchPlan.started`."""

    starts_ranks = True
    """False: the engine writes a manifest and starts no process on this machine."""
    uses_ssh_daemons = False
    """The engine starts daemons over ssh. A daemon that is still starting when the engine ends may outlive it."""
    limits_cpus = False
    """Ranks may get fewer CPUs than their host has."""
    forwards_environment = False
    """The engine gives the launcher's environment to every rank by itself."""
    shutdown_seconds = 0.0
    """Time that the engine has to end by itself after the launcher was killed."""

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        """Return the command line that starts the ranks. The control token is never in it.

        Args:
            plan: Plan without its command.
            options: Options of the launch.

        Raises:
            ConfigError: The engine cannot run the plan.
        """
        raise NotImplementedError

    def notes(self, plan: LaunchPlan) -> tuple[str, ...]:
        """Return notes for the user.

        Args:
            plan: Plan with its command.
        """
        return ()

    def shell(self, plan: LaunchPlan) -> RemoteShell | None:
        """Return the program that reaches the hosts before the start; None if they are not allocated yet.

        Args:
            plan: Plan of the launch.
        """
        return None

    def required_programs(self, plan: LaunchPlan, host: HostPlan) -> tuple[str, ...]:
        """Return the absolute paths of programs that a host needs.

        Args:
            plan: Plan of the launch.
            host: Host of the plan.
        """
        return ()

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the engine's process.

        Args:
            environ: Environment of the launcher.
        """
        return dict(environ)

    def write_files(self, run_dir: Path, plan: LaunchPlan) -> None:
        """Write the files that the command line refers to.

        Args:
            run_dir: Run directory.
            plan: Plan of the launch.
        """

    def queued(self, log: Path) -> str:
        """Return the engine's message while it waits for hosts; empty if it does not wait.

        Args:
            log: File with the engine's output.
        """
        return ""

    def explain(self, output: str) -> tuple[str, str] | None:
        """Return the cause of a failure and a hint; None to show the output unchanged.

        Args:
            output: Output of the engine.
        """
        return None

    def messages(self, output: str) -> list[str]:
        """Return messages for the user while ranks run, without those about ranks that ended.

        Args:
            output: Output of the engine; an incomplete message at its end is left out.
        """
        return []

    def is_transient_failure(self, output: str) -> bool:
        """Return True if a second start may succeed.

        Args:
            output: Output of the engine.
        """
        return False

    def lost_host(self, output: str) -> str:
        """Return the host that the engine lost; empty if it reports none.

        Args:
            output: Output of the engine.
        """
        return ""

    def cancelled(self, output: str, *, for_a_reason: bool = False) -> str:
        """Return a message that names the system which ended the ranks; empty if the engine did not end them.

        Args:
            output: Output of the engine.
            for_a_reason: True to return a message only if the engine gives a reason.
        """
        return ""

    def cleanup_command(self, plan: LaunchPlan) -> tuple[str, ...] | None:
        """Return a command that ends the rest of the job after the engine was killed; None: nothing remains.

        Args:
            plan: Plan of the launch.
        """
        return None
