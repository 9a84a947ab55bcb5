"""Shell completion, in the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.conftest import LAUNCH

pytestmark = pytest.mark.processes

BASH = """
eval "$(register-python-argcomplete distrib-launch distrib-topo)"
complete_line() { COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_TYPE=9
  _python_argcomplete "$1"; echo "${COMPREPLY[@]}"; }
"""
FISH = "register-python-argcomplete --shell fish distrib-launch distrib-topo | source; "


def in_shell(shell: str, code: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    environment = {**os.environ, "PATH": f"{LAUNCH.parent}:{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("distrib-launch --hos", "--hosts"),
        ("distrib-launch --mode ''", "async"),
        ("distrib-topo probe --bas", "--baseline"),
    ],
)
def test_options_and_their_values_are_completed(line, expected):
    assert expected in in_shell("bash", f"{BASH}complete_line {line}").split()
    assert expected in in_shell("fish", FISH + f'complete -C "{line}"'.replace("''", "")).split()
