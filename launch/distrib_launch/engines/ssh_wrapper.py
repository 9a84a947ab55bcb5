"""What Open MPI calls in place of ssh where ssh's own words hold blanks, hosts have interpreters of their own, or the login shell
is one for which it cannot write.

Open MPI splits its agent's command at every blank, and starts its daemon on every host from the path that it has here;
a host that keeps Python elsewhere has the daemon elsewhere too, beside its interpreter. Standard library only.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from distrib.environment import DISTRIB_RUN_DIR


def rewrite(arguments: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """The command line that starts what Open MPI wants started: `arguments` are a host and a remote command.

    Of `settings`, `ssh` are the words that reach a host, `prefix` is where Open MPI is here, and `prefixes` says where
    it may be, by host.
    """
    ssh, prefix, prefixes = settings["ssh"], settings["prefix"], settings["prefixes"]
    assert isinstance(ssh, list) and isinstance(prefix, str) and isinstance(prefixes, dict)
    host = next((word for word in arguments if word in prefixes), "")
    if not host:
        return [*ssh, *arguments]
    at = arguments.index(host) + 1
    command = " ".join(arguments[at:])
    there = shlex.quote(prefixes[host])
    # What Open MPI has prepared stands for hosts that do have it at the same place as here.
    elsewhere = command.replace(f"{prefix}/", f"{there}/").replace(f"={prefix};", f"={there};")
    choice = f"if [ -x {there}/bin/prted ]; then {elsewhere}; else {command}; fi"
    return [*ssh, *arguments[:at], f"exec /bin/sh -c {shlex.quote(choice)}"]  # whatever the login shell there is


def main() -> None:
    settings = Path(os.environ[DISTRIB_RUN_DIR], "agent.json").read_text()
    command = rewrite(sys.argv[1:], json.loads(settings))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
