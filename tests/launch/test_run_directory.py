"""Run directories: names, reuse, locks, protected files."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from distrib.errors import ConfigError
from distrib_launch.run_directory import choose_run_dir, prepare_run_dir
from tests.conftest import JOB, LAUNCH
from tests.support.launched_jobs import start_job


def test_a_run_that_replaces_an_earlier_one_prints_a_note(launch):
    run = launch("-np", "2", JOB)
    assert run.code == 0 and "earlier run" not in run.err, run
    command = [str(LAUNCH), "-np", "1", "--run-dir", str(run.run_dir), str(JOB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    assert f"earlier run in {run.run_dir}\n" in done.stderr
    assert not (run.run_dir / "ranks/1.out").exists()


def test_a_run_directory_can_be_used_again(launch, tmp_path):
    for orders in (["0:raise"], ["0:signal=9"]):
        subprocess.run([str(LAUNCH), "--run-dir", str(tmp_path / "same"), str(JOB), *orders], capture_output=True)
    result = json.loads((tmp_path / "same/result.json").read_text())
    assert result["first_failure"]["traceback"] == ""
    assert result["first_failure"]["message"] == "killed by SIGKILL"


@pytest.mark.parametrize("mark", ["plan.json", "result.json", "preflight.json", "attempt0/plan.json"])
def test_a_folder_of_no_earlier_run_keeps_its_files(tmp_path, mark):
    """A new run deletes the files of an earlier run, killed or not, and no other files."""
    own = ["metrics.jsonl", "ranks/0.out", "attempt0/result.json"]
    for name in own:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"accuracy": 0.9}')
    (tmp_path / mark).write_text('{"accuracy": 0.9}')
    with pytest.raises(ConfigError, match=r"holds \S+, which is of no run"):
        prepare_run_dir(tmp_path)
    assert all((tmp_path / name).read_text() for name in own)
    (tmp_path / mark).write_text('{"job": "4f", "world_size": 1, "inventories": {}}')
    assert prepare_run_dir(tmp_path) is True
    assert not any((tmp_path / name).exists() for name in own)
    assert prepare_run_dir(tmp_path) is False


@pytest.mark.processes
def test_launches_of_the_same_second_have_separate_run_directories(tmp_path):
    command = [str(LAUNCH), "-q", "--json", str(JOB)]
    running = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(3)
    ]
    assert [process.communicate(timeout=50) and process.returncode for process in running] == [0, 0, 0]
    results = [json.loads(path.read_text()) for path in tmp_path.glob("distrib-runs/*/result.json")]
    assert [result["status"] for result in results] == ["succeeded"] * 3


@pytest.mark.processes
def test_a_run_directory_in_use_is_refused(tmp_path):
    process = start_job(tmp_path / "run", "-np", "1", str(JOB), "*:sleep=60")
    other = subprocess.run([str(LAUNCH), "--run-dir", str(tmp_path / "run"), str(JOB)], capture_output=True, text=True)
    assert other.returncode == 2
    assert f"another job is running in {tmp_path / 'run'}" in other.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("script", "name"), [("train.py", "train"), ("pkg.sub.tool", "pkg.sub.tool"), ("a/b c.v2.py", "b-c.v2")]
)
def test_run_directories_are_named_after_time_and_script(script, name):
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{re.escape(name)}", choose_run_dir(None, script).name)
