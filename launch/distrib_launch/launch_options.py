"""Options of a launch as one typed value: the command line and `distrib_launch.run` make it, everything below reads it."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path

import msgspec

from distrib.strategy import Strategy
from distrib.utils import files
from distrib_launch.host_selection import HostFilter

GRACE_SECONDS = 30.0
"""Default of `--grace`: time for a checkpoint in a signal handler, as torchrun and Slurm (KillWait) leave."""

HOST_FILE_NAME = re.compile(r"/|\.(txt|hosts|hostfile|list|cfg|conf|ini|ya?ml)$|^(hosts|hostfile)$")
"""Names of files about hosts: neither a host nor a script has such a name."""


class PodOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for `--engine kubernetes` alone."""

    image: str | None = None
    manifest: str | None = None
    """File to write; None: standard output."""
    resources: dict[str, str] = {}
    """Extended resources of each worker besides GPUs, such as `rdma/hca_shared_devices_a`, with their number."""
    runtime_class: str = ""


class ContainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Container in which each host runs its ranks."""

    image: str = ""
    """Empty: the ranks run on the host itself."""
    runtime: str = "auto"
    mounts: tuple[str, ...] = ()
    """Absolute paths to mount besides the working folder, the script's folder, the run directory and /tmp."""


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `distrib-launch`. The runner fills in `engine`, `environment`, `run_dir` and the names of the attempt."""

    script: str
    """Path of a Python file, or the name of a module (`module`)."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    """True if the script is a program that Python does not run."""
    interpreter: str = sys.executable
    directory: str = msgspec.field(default_factory=lambda: str(files.working_directory()))
    run_dir: str = ""
    """Empty: `distrib-runs/<time>-<script>`."""

    hosts: str | None = None
    """Hostfile or list of hosts; None: Slurm's allocation, else this machine."""
    topology: str | None = None
    ranks: int | None = None
    """None: one rank for each slot."""
    oversubscribe: bool = False
    """Allow any number of ranks per core of this machine."""
    share_gpus: bool = False
    """Allow more ranks than GPUs on a host."""
    host_filter: HostFilter = HostFilter()
    interface: str | None = None
    mpirun: str | None = None
    ssh_command: str | None = None
    preflight: bool = True
    drop_bad_hosts: bool = False
    min_hosts: int | None = None

    engine: str = ""
    """Empty: srun inside a Slurm allocation, else mpirun."""
    bind: str = "auto"
    sync: str | None = None
    """Folder to copy to every host before the start."""
    variables: tuple[str, ...] = ()
    """Values of `-x`: `NAME` or `NAME=VALUE`."""
    environment: dict[str, str] = {}
    """Variables that every rank gets from the user."""
    timeout_seconds: float | None = None
    hang_timeout_seconds: float | None = None
    host_timeout_seconds: float | None = None
    grace_seconds: float = GRACE_SECONDS
    """Time between SIGTERM and SIGKILL."""
    max_restarts: int = 0
    pods: PodOptions = PodOptions()
    container: ContainerOptions = ContainerOptions()

    strategy: Strategy = Strategy()
    auto_mode: bool = False
    """`--mode auto`: the runner replaces `strategy` by the fastest one with identical arithmetic."""
    workload: str | None = None
    """Name of the catalogue or profile file; `none`: no forecast."""
    profile: str | None = None
    """File for the profile of a step; the script ends when it is written."""
    warn_below: float = 0.8
    """Scaling efficiency, from 0 to 1, below which a warning is given."""

    quiet: bool = False
    status_lines: bool = False
    """Show start, progress and end of the run on standard error."""
    show_rank: int | None = None
    dedup: bool = True
    verbose: bool = False

    attempt_id: str = msgspec.field(default_factory=lambda: secrets.token_hex(4))
    """Name of this attempt. A plan for fewer hosts keeps it, because connections are open in its name."""
    job_id: str | None = None
    """Name of the first attempt; None: this is the first."""
    restarts: int = 0
    """Number of restarts before this attempt."""

    @property
    def adjacent_profile(self) -> Path | None:
        """The file `NAME.profile.json` beside the script `NAME.py`, None if there is none."""
        script = Path(self.script)
        path = script.parent / f"{script.stem}.profile.json"
        return path if not self.module and not self.profile and files.is_file(path) else None

    @property
    def wants_forecast(self) -> bool:
        """True if the performance of the job is to be predicted; other launches need not load the model."""
        return self.workload is not None or self.auto_mode or self.adjacent_profile is not None
