"""Open files that the launcher needs: the usual limit of 1024 is too low for hundreds of ranks."""

from __future__ import annotations

from distrib.errors import LaunchError
from distrib.utils.rlimits import raise_open_files


def require_open_files(hosts: int, ranks: int) -> None:
    """Raise the limit of open files to what a job needs.

    Args:
        hosts: Number of hosts.
        ranks: Number of ranks.

    Raises:
        LaunchError: The hard limit is too low.
    """
    # The pipes of each host's ssh; each rank's connection and two logs; all others.
    needed = 4 * hosts + 3 * ranks + 128
    if (allowed := raise_open_files(needed + ranks + 256)) < needed:  # more for connections without proof of the token
        raise LaunchError(
            f"{ranks} ranks on {hosts} hosts need about {needed} open files here, but the limit is {allowed}",
            hint="raise the hard limit (ulimit -Hn): nofile in /etc/security/limits.conf, or LimitNOFILE of a service",
            code="too-many-open-files",
        )
