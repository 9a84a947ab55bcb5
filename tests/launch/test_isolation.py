"""Own processes beside a hostile user: folders, variables, locales and login files change scripts only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import LAUNCH, TOPO

HIDDEN = (
    "hmac", "json", "logging", "msgspec", "runpy", "select", "selectors", "shlex", "signal", "socket", "struct", "subprocess", "tempfile",
    "typing", "yaml",
)  # fmt: skip
"""Modules that ours import, and the scripts that pip generates do not."""
LATIN = os.fsdecode(b"two\nlines caf\xe9")
SCRIPT = """
import os, sys
print(os.environ["RANK"], sys.flags.optimize, os.fsencode(sys.argv[1]).hex(), os.environ.get("LC_ALL"), os.environ.get("FROM_LOGIN"))
"""
LOGIN_FILE = """
echo "a line from a login file"
read -r line
set -e
export FROM_LOGIN=1 PYTHONPATH={folder} PYTHONOPTIMIZE=1 PYTHONWARNINGS=error PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=tr_TR LANG=tr_TR
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a script, with modules that hide those of others, and one that every Python would run at its start."""
    folder = tmp_path / LATIN
    folder.mkdir()
    for name in (*HIDDEN, "distrib", "distrib_launch", "re"):
        (folder / f"{name}.py").write_text("X = 1\n")
    (folder / "sitecustomize.py").write_text("raise SystemExit('sitecustomize')\n")
    (folder / "train.py").write_text(SCRIPT)
    on_path = tmp_path / "on_path"
    on_path.mkdir()
    for name in HIDDEN:
        (on_path / f"{name}.py").write_text("X = 1\n")
    return folder


@pytest.mark.cluster
def test_own_processes_ignore_folders_variables_and_login_files_of_the_user(make_cluster, folder):
    cluster = make_cluster(2)
    login = folder.parent / "bashrc"
    login.write_text(LOGIN_FILE.format(folder=folder.parent / "on_path"))
    cluster.run("n2", ["mount", "--bind", login, Path.home() / ".bashrc"], check=True)
    hostile = {
        "PYTHONPATH": str(folder.parent / "on_path"), "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "PYTHONSTARTUP": str(folder / "re.py"),
        "PYTHONSAFEPATH": "1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "TMPDIR": "/nonexistent", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = ["-H", cluster.hostfile, "--run-dir", folder / "run", "train.py", LATIN]
    for start in ([LAUNCH], [sys.executable, "-m", "distrib_launch"], [LAUNCH, "--no-preflight"]):
        done = cluster.run("n1", [*start, *words], env=hostile, cwd=folder, timeout=90)
        assert done.returncode == 0, done
        for rank in range(2):
            expected = f"{rank} 2 {os.fsencode(LATIN).hex()} C None\n"
            assert (folder / f"run/ranks/{rank}.out").read_text() == expected, start
    done = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile], env=hostile, cwd=folder, timeout=90)
    assert done.returncode == 0, done
