"""Entry point of `distrib-launch`. It imports the other modules late: that takes seconds on a slow file system and can be interrupted."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit code."""
    try:
        from distrib_launch.cli import launch
    except KeyboardInterrupt:
        print("distrib-launch: error: interrupted", file=sys.stderr)
        return 130
    return launch.main()
