"""Remote shell for commands on the hosts before the job starts: over ssh, or as a step of a Slurm job."""

from __future__ import annotations

import shlex
from typing import Literal

import msgspec

Transport = Literal["ssh", "srun"]
"""Program that reaches the hosts; also the name of its column in the preflight's table."""


class RemoteShell(msgspec.Struct, frozen=True, kw_only=True):
    """Program that runs a line in the shell of any host of a plan."""

    transport: Transport
    words: tuple[str, ...]
    """The program and its options."""
    environment: dict[str, str] | None = None
    """Environment of the program; None: that of this process."""

    def command(self, host: str, line: str) -> list[str]:
        """Return the command that runs a line.

        Args:
            host: Name of the host.
            line: Shell command.
        """
        if self.transport == "ssh":
            return [*self.words, host, f"exec /bin/sh -c {shlex.quote(line)}"]  # for every login shell
        return [*self.words, f"--nodelist={host}", "/bin/sh", "-c", line]
