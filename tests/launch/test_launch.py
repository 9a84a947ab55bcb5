"""`distrib-launch` on this machine: ranks, arguments, output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import JOB, LAUNCH, SCRIPTS

pytestmark = pytest.mark.processes


def test_every_rank_runs_once_and_is_in_the_result(launch):
    run = launch("-np", "4", JOB)
    assert run.code == 0, run
    assert sorted(run.out.split("\n")[:-1]) == [f"[{r}@localhost] rank {r} done" for r in range(4)]
    result = run.result
    assert (result["status"], result["exit_code"], result["world_size"]) == ("succeeded", 0, 4)
    assert [(r["rank"], r["local_rank"], r["exit_code"], r["device"]) for r in result["ranks"]] == [
        (r, r, 0, "cpu") for r in range(4)
    ]
    assert (run.run_dir / "ranks/3.out").read_text() == "rank 3 done\n"
    assert (run.run_dir / "ranks/3.err").read_text() == ""
    assert json.loads((run.run_dir / "plan.json").read_text())["world_size"] == 4


def test_training_options_without_effect_are_a_warning(launch, tmp_path):
    """The script uses none of the options. Options after the script are its own."""
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    run = launch("--mode", "local", "--accumulate", "2", script, "-np", "2")
    assert run.code == 0, run
    (warning,) = run.result["warnings"]
    assert warning.startswith("--mode local --accumulate 2 changed nothing: no model that learns")
    assert f"distrib-launch: warning: {warning}" in run.err
    assert "note: -np after the script" in run.err
    script.write_text(
        "import os; os.write(int(os.environ['DISTRIB_STATUS_FD']), b'5\\n{\"step\": 1e999}\\n{\"prepared\": true}\\n')"
    )
    assert launch("--accumulate", "2", script).result["warnings"] == []


def test_arguments_and_directory_reach_the_ranks_unchanged(launch, tmp_path):
    folder = tmp_path / "a folder, $HOME 'quoted' – ü"
    folder.mkdir()
    script = folder / "my job.py"
    script.write_text(JOB.read_text())
    words = ["*:environment", "x:a b", "x:'", 'x:"', "x:$HOME", "x:new\nline", "x:ü–", "x:;ls", "x:*", "x:"]
    run = launch("-np", "2", script, *words, cwd=folder)
    assert run.code == 0, run
    told = json.loads((run.run_dir / "ranks/1.out").read_text().splitlines()[0])
    assert told["argv"] == [str(script), *words]
    assert told["cwd"] == str(folder)


def test_long_output_is_complete_and_in_order(launch):
    run = launch("-np", "4", JOB, "*:lines=5000")
    assert run.code == 0, run
    for rank in range(4):
        expected = [f"line {n} of rank {rank} " + "x" * 40 for n in range(5000)] + [f"rank {rank} done"]
        assert (run.run_dir / f"ranks/{rank}.out").read_text().splitlines() == expected
        tag = f"[{rank}@localhost] "
        assert [line[len(tag) :] for line in run.out.splitlines() if line.startswith(tag)] == expected


def test_show_rank_prints_one_rank_and_logs_all(launch):
    run = launch("-np", "2", "--show-rank", "1", JOB)
    assert run.out == "[1@localhost] rank 1 done\n"
    assert (run.run_dir / "ranks/0.out").read_text() == "rank 0 done\n"


def test_one_rank_runs_with_a_note_without_hosts_and_gpus(launch):
    run = launch(JOB)
    assert run.code == 0, run
    assert run.result["world_size"] == 1
    assert "this machine, 1 rank (-np N for more" in run.err


def test_a_job_runs_without_home_and_path(tmp_path):
    done = subprocess.run([str(LAUNCH), str(JOB)], env={}, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "code"), [(["--dry-run"], 0), (["-q", "--json"], 0), (["-q", "--json"], 5)])
def test_a_closed_standard_output_keeps_the_exit_code(tmp_path, words, code):
    reader, writer = os.pipe()
    os.close(reader)
    command = [str(LAUNCH), *words, str(JOB), *(["0:exit=5"] if code else [])]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=200)
    os.close(writer)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_does_not_end_the_job(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=True)
    try:
        script = tmp_path / "talk.py"
        script.write_text("for _ in range(200):\n    print('x' * 1000, flush=True)\nprint('done')\n")
        done = subprocess.run(
            [str(LAUNCH), "--run-dir", str(small / "run"), str(script)], capture_output=True, text=True, timeout=200
        )
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "logs are not complete" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_loopback_address_names_this_machine(launch):
    run = launch("-H", "127.0.0.1:2", SCRIPTS / "job.py")
    assert run.code == 0, run


def test_a_job_keeps_its_exit_code_if_its_result_cannot_be_printed(tmp_path):
    script = tmp_path / "exits.py"
    script.write_text("raise SystemExit(7)\n")
    command = [LAUNCH, "--json", "-np", "1", "--run-dir", tmp_path / "run", script]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(list(map(str, command)), stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == 7 and "standard output: No space left on device" in done.stderr, done
