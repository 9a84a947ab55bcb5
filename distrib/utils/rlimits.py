"""How many files the launcher may have open: every host takes some, and every rank, and the usual limit is 1024."""

from __future__ import annotations

import contextlib
import resource

from distrib.errors import LaunchError

OF_A_HOST = 4
"""Pipes to an ssh, and one for its errors."""
OF_A_RANK = 3
"""Its connection and its two logs."""
OTHERS = 128


def allow(hosts: int, ranks: int) -> None:
    """Raise the limit as far as so many need. Raises LaunchError where the hard limit forbids it."""
    needed = OF_A_HOST * hosts + OF_A_RANK * ranks + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"{ranks} ranks on {hosts} hosts need about {needed} open files here, and no more than {hard} are allowed",
            hint="raise the hard limit (ulimit -Hn; nofile in /etc/security/limits.conf, LimitNOFILE of a service)",
        )
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
