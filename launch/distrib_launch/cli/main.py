"""Entry points of the two commands. They import the other modules late: that takes seconds on a slow file system and can be interrupted."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run `distrib-launch` and return its exit code."""
    isolate_modules()
    try:
        from distrib_launch.cli import launch
    except KeyboardInterrupt:
        print("distrib-launch: error: interrupted", file=sys.stderr)
        return 130
    return launch.main()


def topo_main() -> int:
    """Run `distrib-topo` and return its exit code."""
    isolate_modules()
    from distrib_launch.cli import topo

    return topo.main()


def isolate_modules() -> None:
    """Search PYTHONPATH last, whose modules could hide ours. Start again with names in UTF-8 in a locale of another encoding."""
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    library = os.path.dirname(os.__file__)  # noqa: PTH120  (pathlib may be hidden)
    if library in sys.path:
        at = sys.path.index(library)
        sys.path[:] = sys.path[at:] + sys.path[:at]
