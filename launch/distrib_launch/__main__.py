"""Command `distrib-launch` as `python -m distrib_launch`."""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the working directory, whose modules could hide ours

from distrib_launch.cli.main import main

sys.exit(main())
