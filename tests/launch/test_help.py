"""Help of both commands: the common options with `--help`, all of them with `--help-all`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distrib_launch.arguments import launch_arguments
from distrib_launch.cli import topo

pytestmark = pytest.mark.processes


def printed(command, *words, columns=80):
    """Run a command on a terminal of this width and return what it prints."""
    run = [str(Path(sys.executable).parent / command), *words]
    return subprocess.run(
        run, env={**os.environ, "COLUMNS": str(columns)}, text=True, stdout=subprocess.PIPE, check=True
    ).stdout


@pytest.mark.parametrize(
    "command", [["distrib-launch"], ["distrib-topo", "plan"], ["distrib-topo", "probe"], ["distrib-topo", "check"]]
)
def test_help_fits_a_terminal(command):
    lines = printed(*command, "--help").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: {' '.join(command)}")


def test_help_names_common_options_and_the_option_for_all():
    text = printed("distrib-launch", "--help")
    assert "-np" in text and "--hosts" in text and "--momentum-correction" not in text
    shown = len([one for one in launch_arguments.parser()._actions if one.option_strings])
    assert f"--help-all lists all {shown} options" in text


@pytest.mark.parametrize(
    ("command", "parser"),
    [
        (["distrib-launch"], launch_arguments.parser()),
        (["distrib-topo", "plan"], topo.build_parser("plan")[1]["plan"]),
        (["distrib-topo", "probe"], topo.build_parser("probe")[1]["probe"]),
    ],
)
def test_help_all_lists_every_option(command, parser):
    listed = set(re.findall(r"--?[a-zA-Z][\w-]*", printed(*command, "--help-all")))
    assert {name for action in parser._actions for name in action.option_strings} <= listed


def test_help_uses_the_width_of_the_terminal():
    narrow, wide = (printed("distrib-launch", "--help-all", columns=columns) for columns in (80, 160))
    assert max(map(len, wide.splitlines())) > 120
    assert len(wide.splitlines()) < len(narrow.splitlines())
