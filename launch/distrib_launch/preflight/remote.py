"""How a command is run on another host while the job is not there yet: over ssh, or as a step of Slurm's job."""

from __future__ import annotations

import msgspec

from distrib_launch.preflight.check_result import Way


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """What runs a line in a shell of any of the plan's hosts."""

    by: Way
    words: tuple[str, ...]
    """The program and its options."""
    environment: dict[str, str] | None = None
    """The program's, where it is not this process's own."""

    def command(self, host: str, line: str) -> list[str]:
        if self.by == "ssh":
            return [*self.words, host, line]
        return [*self.words, f"--nodelist={host}", "/bin/sh", "-c", line]
