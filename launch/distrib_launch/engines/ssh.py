"""ssh command of a launch: options, users and ports of the hostfile, shared connections of the preflight."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distrib.errors import ConfigError

if TYPE_CHECKING:
    from distrib_launch.launch_plan import LaunchPlan
    from distrib_launch.rank_placement import HostPlan

SSH_CONFIG = "ssh_config"
"""Generated configuration in the run directory, with users and ports of hosts."""
ALIVE = "ServerAliveInterval=5"
"""Option with which ssh closes a connection whose server sends nothing for three intervals of 5 s."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", ALIVE)
CONTROL_PATH = "ControlPath="


def ssh_words(
    ssh_command: str | None, run_dir: str, hosts: Sequence[HostPlan], job: str
) -> tuple[list[str], str | None]:
    """Return the ssh command that reaches the hosts without prompts.

    It uses connections that the preflight left open and leaves none itself.

    Args:
        ssh_command: Value of `--ssh-command`.
        run_dir: Run directory, for the generated configuration.
        hosts: Hosts of the plan, with users and ports of the hostfile.
        job: Name of the start, for the folder of control sockets.

    Returns:
        The command, and the user's configuration file if the generated one replaces it: ssh reads only one.

    Raises:
        ConfigError: The command is not valid.
    """
    try:
        words = shlex.split(ssh_command) if ssh_command is not None else ["ssh"]
    except ValueError as error:
        raise ConfigError(f"--ssh-command {ssh_command}: {str(error).lower()}") from None
    if not words:
        raise ConfigError("--ssh-command: no command", hint="name one, such as: --ssh-command 'ssh -i KEY'")
    if ssh_command is not None and not shutil.which(words[0]):
        raise ConfigError(
            f"--ssh-command {words[0]}: there is no such command here", hint="see: which ssh", code="tool-missing"
        )
    if "/" in words[0]:  # a path, which may be relative to the working directory
        words[0] = str(Path(words[0]).absolute())
    config = None
    special = any(host.user or host.port for host in hosts)
    if special:
        words, config = _without_config(words)
        if config and config != "none":  # `none` means no file; ssh resolves relative paths in ~/.ssh, not here
            config = str(Path(config).absolute())
    words += SSH_OPTIONS
    if Path(words[0]).name == "ssh":
        # In /tmp, because a socket's path must be short; `job` is random, so no other user can have created the folder.
        words += ["-o", "ControlMaster=no", "-o", "ControlPersist=no", "-o", f"{CONTROL_PATH}/tmp/distrib-{job}/%C"]
    if special:
        words += ["-F", f"{run_dir}/{SSH_CONFIG}"]
    return words, config


def _without_config(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Remove `-F FILE` and `-FFILE` from an ssh command and return that file; the last one counts."""
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
                ]  # the value of an option, even if it begins with a dash
    return left, config


def sockets(plan: LaunchPlan) -> Path | None:
    """Return the folder of the plan's control sockets; None if the ssh command has none of the launcher's.

    Args:
        plan: Plan of the launch.
    """
    paths = [word.removeprefix(CONTROL_PATH) for word in filter(is_control_path, plan.ssh)]
    return Path(paths[0]).parent if paths else None


def write_ssh_config(run_dir: Path, plan: LaunchPlan) -> None:
    """Write the configuration that `ssh_words` refers to.

    Args:
        run_dir: Run directory.
        plan: Plan of the launch.
    """
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
        (run_dir / SSH_CONFIG).write_bytes(os.fsencode("\n".join(lines) + "\n"))


def is_control_path(word: str) -> bool:
    """Return True for the option with the launcher's control sockets.

    Args:
        word: Word of the command.
    """
    return word.startswith(f"{CONTROL_PATH}/tmp/distrib-")  # a ControlPath of the user is elsewhere
