"""Programs that Python does not run, and placeholders in arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib_launch.supervisor.assignments import fill_placeholders


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{rank}", "3"),
        ("--log=out-{rank}-of-{world_size}.txt", "--log=out-3-of-8.txt"),
        ("{{rank}}", "{rank}"),
        ('{"lr": 0.1}', '{"lr": 0.1}'),
        ("{unknown} {} {0}", "{unknown} {} {0}"),
        ("{{unknown}}", "{{unknown}}"),
    ],
)
def test_placeholders(word, filled):
    assert fill_placeholders(word, {"rank": 3, "world_size": 8}) == filled


@given(st.text())
def test_other_text_is_unchanged(text):
    assert fill_placeholders(text, {}) == text


def test_a_script_gets_its_rank_in_its_arguments(launch, tmp_path):
    script = tmp_path / "old.py"
    script.write_text(
        "import os, sys\nassert sys.argv[1:] == [os.environ['RANK'], os.environ['MASTER_PORT'], '{rank}']\n"
    )
    run = launch("-np", "2", script, "{rank}", "{master_port}", "{{rank}}")
    assert run.code == 0, run


def test_braces_and_any_other_characters_in_the_path_of_a_script_stay(launch, tmp_path):
    script = tmp_path / "{rank} \n'\"$x`id`.py"
    script.write_text("import sys\nassert sys.argv[0].endswith('`id`.py') and sys.argv[1] == '\\n'\n")
    run = launch("-np", "2", script, "\n")
    assert run.code == 0, run


def test_a_program_runs_on_every_rank(launch, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('#!/bin/sh\necho "shell $1 of $WORLD_SIZE"\nexit $1\n')
    script.chmod(0o755)
    run = launch("-np", "2", "--no-python", script, "{local_rank}")
    assert "shell 0 of 2" in run.out and "shell 1 of 2" in run.out, run
    assert run.code == 1 and run.result["first_failure"]["rank"] == 1
    assert launch("-np", "1", "--no-python", "true").code == 0  # found on PATH
    script.chmod(0o644)
    run = launch("-np", "1", "--no-python", script)
    assert run.code == 2 and "chmod +x" in run.err


HIDING = (
    "select", "struct", "socket", "signal", "selectors", "json", "hmac", "enum", "re", "typing", "math", "subprocess", "pathlib",
    "urllib", "resource", "fnmatch", "traceback", "pickle", "runpy", "distrib", "distrib_launch",
)  # fmt: skip
"""Names of modules of the standard library and of distrib."""


@pytest.fixture
def hiding_folder(tmp_path):
    """Return a folder with a module of each of these names."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in HIDING:
        (folder / f"{name}.py").write_text("X = 1\n")
    return folder


def test_modules_beside_the_script_hide_none_of_the_launcher(launch, hiding_folder):
    (hiding_folder / "p.py").write_text("import select, sys\nprint(select.X, sys.path[0])\n1 / len(sys.argv[1:])\n")
    run = launch("-np", "2", "--no-dedup", "p.py", "x", cwd=hiding_folder)
    assert run.out.count(f"1 {hiding_folder}\n") == 2, run
    failed = launch("-np", "2", "-m", "p", cwd=hiding_folder)
    assert " on localhost failed first: ZeroDivisionError: division by zero" in failed.err, failed
    assert failed.result["first_failure"]["traceback"].startswith("Traceback"), failed


@pytest.mark.processes
def test_modules_in_the_working_directory_hide_none_of_the_function_runner(hiding_folder, tmp_path):
    script = tmp_path / "runs.py"
    script.write_text(
        "import os, sys, distrib_launch\n\ndef here():\n    import select\n    return select.X, sys.path[0]\n\n"
        "print(distrib_launch.run(here, np=2, quiet=True).return_values)\n"
    )
    done = subprocess.run([sys.executable, script], cwd=hiding_folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and str(hiding_folder) in done.stdout, done
