"""Open files that the launcher needs: the usual limit of 1024 is too low for hundreds of ranks."""

from __future__ import annotations

from distrib.errors import LaunchError
from distrib.utils.rlimits import raise_open_files

FILES_PER_HOST = 4
"""Pipes to an ssh, and one for its stderr."""
FILES_PER_RANK = 3
"""Its connection and its two logs."""
OTHER_FILES = 128


def require_open_files(hosts: int, ranks: int) -> None:
    """Raise the limit of open files to what a job needs.

    Args:
        hosts: Number of hosts.
        ranks: Number of ranks.

    Raises:
        LaunchError: The hard limit is too low.
    """
    needed = FILES_PER_HOST * hosts + FILES_PER_RANK * ranks + OTHER_FILES
    if (allowed := raise_open_files(needed)) < needed:
        raise LaunchError(
            f"{ranks} ranks on {hosts} hosts need about {needed} open files here, and no more than {allowed} are allowed",
            hint="raise the hard limit (ulimit -Hn; nofile in /etc/security/limits.conf, LimitNOFILE of a service)",
        )
