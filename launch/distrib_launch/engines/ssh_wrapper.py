"""Program that Open MPI runs in place of ssh: `python ssh_wrapper.py HOST COMMAND`.

Open MPI splits its ssh command at every blank, and starts its daemon on every host at the path that it has on this machine. It also
writes the command for the login shell of this machine. The wrapper is for blanks in the ssh command, for hosts with other interpreters,
and for login shells and their settings: the command runs in /bin/sh. The job's token and the user's variables go through ssh's standard
input: the daemon hands them on to the rank agents, and Open MPI's own messages are not encrypted.
It imports the standard library only, as `python -I` may not find ours; so names of variables are literals.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def rewrite(arguments: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """Return the ssh command that starts Open MPI's daemon on a host.

    Args:
        arguments: Options of ssh, a host and a remote command, as Open MPI passes them.
        settings: `ssh`: words of the ssh command; `prefix`: installation of Open MPI on this machine; `prefixes`: its possible
            installation on each host.
    """
    ssh, prefix, prefixes = settings["ssh"], settings["prefix"], settings["prefixes"]
    assert isinstance(ssh, list) and isinstance(prefix, str) and isinstance(prefixes, dict)
    host = next((word for word in arguments if word in prefixes), "")
    if not host:
        return [*ssh, *arguments]
    at = arguments.index(host) + 1
    command = " ".join(arguments[at:])
    if "setenv " in command:  # csh is the login shell of this machine
        _, daemon, after = command.rpartition(f"{prefix}/bin/prted")
        own = f"PATH={prefix}/bin:$PATH; LD_LIBRARY_PATH={prefix}/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}; PRTE_PREFIX={prefix}"
        command = f"{own}; export PATH LD_LIBRARY_PATH PRTE_PREFIX; {daemon}{after}"
    there = shlex.quote(prefixes[host])
    # Without a daemon below the host's own prefix, the command stays as it is: the host has Open MPI at the same path as this machine.
    elsewhere = command.replace(f"{prefix}/", f"{there}/").replace(f"={prefix};", f"={there};")
    choice = f"if [ -x {there}/bin/prted ]; then {elsewhere}; else {command}; fi"
    if prefixes[host] == prefix:
        choice = command
    return [*ssh, *arguments[:at], f"exec /bin/sh -c {shlex.quote(f'. /dev/stdin; {choice}')}"]  # for every login shell


def main() -> None:
    """Replace this process by the ssh command."""
    settings = Path(os.environ["DISTRIB_RUN_DIR"], "agent.json").read_text()
    command = rewrite(sys.argv[1:], json.loads(settings))
    secrets = tempfile.TemporaryFile()  # noqa: SIM115 (ssh reads it; unlike a pipe, it holds any size)
    secrets.write(b"#\n" * 16)  # for a login shell whose settings read lines
    for name, value in os.environ.items():
        if name.startswith(("DISTRIB_TOKEN", "DISTRIB_FORWARDED")):
            secrets.write(os.fsencode(f"export {name}={shlex.quote(value)}\n"))
    secrets.seek(0)
    os.dup2(secrets.fileno(), 0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
