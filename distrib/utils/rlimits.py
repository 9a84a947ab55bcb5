"""Resource limits of this process. Standard library only: rank agents import it."""

from __future__ import annotations

import contextlib
import resource


def raise_open_files(wanted: int) -> int:
    """Raise the limit of open files, which is often 1024, as far as the hard limit allows.

    Args:
        wanted: Number of open files; a higher limit is kept.

    Returns:
        `wanted`, or the hard limit if that is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
