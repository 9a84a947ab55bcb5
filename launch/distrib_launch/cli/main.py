"""Where `distrib-launch` begins: importing the rest takes seconds on a cold network file system, and may be interrupted."""

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
