"""Command `distrib-launch` as `python -m distrib_launch`."""

import sys

from distrib_launch.cli.main import main

sys.exit(main())
