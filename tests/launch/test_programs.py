"""Programs that Python does not run, and placeholders in arguments."""

from __future__ import annotations

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
