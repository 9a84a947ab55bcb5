"""Environment of the ranks: variables, secrets, threads."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from distrib_launch.rank_environment import forwarded_variables, is_secret
from tests.conftest import JOB, LAUNCH


def test_ranks_have_the_variables_that_torchrun_sets(launch):
    run = launch("-np", "2", "-x", "COLOUR=blue sky", "-x", "TASTE", JOB, "*:environment", env={"TASTE": "sweet"})
    assert run.code == 0, run
    seen = [json.loads((run.run_dir / f"ranks/{r}.out").read_text().splitlines()[0])["env"] for r in range(2)]
    for rank, env in enumerate(seen):
        assert (env["RANK"], env["LOCAL_RANK"], env["ROLE_RANK"]) == (str(rank), str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("2", "2", "0")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["OMP_NUM_THREADS"] == "1"
        assert (env["COLOUR"], env["TASTE"]) == ("blue sky", "sweet")
        assert "DISTRIB_TOKEN" not in env
        assert env["DISTRIB_DEVICE"] != "cpu" or env["ACCELERATE_USE_CPU"] == "1"
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]


def test_variables_of_common_libraries_are_shown_in_plans_and_others_are_not():
    forwarded = [
        "ACCELERATE_MIXED_PRECISION",
        "DS_ACCELERATOR",
        "PL_GLOBAL_SEED",
        "FSDP_VERSION",
        "MLFLOW_TRACKING_URI",
        "PYTHONHASHSEED",
    ]
    others = ["PATH", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH"]
    assert list(forwarded_variables(dict.fromkeys(forwarded + others, "1"), [])) == forwarded


def test_secrets_are_recognized_by_the_names_of_variables():
    secrets = (
        "HF_TOKEN WANDB_API_KEY COMET_APIKEY PGPASSWORD MYSQL_PWD API_KEYS GITHUB_PAT SSHPASS AWS_SECRET_ACCESS_KEY my_passwd "
        "MYACCESSKEY SSHKEY PRIVATEKEY DBPASS HTTP_AUTHORIZATION OAUTH2 APIKEY2"
    )
    others = "TOKENIZERS_PARALLELISM PWD OLDPATH KEYBOARD NCCL_DEBUG AUTHOR PATH COMPASS_X GHPAT PASSES MONKEY"
    assert [name for name in secrets.split() if not is_secret(name)] == []
    assert [name for name in others.split() if is_secret(name)] == []


def test_secrets_reach_the_ranks_and_no_file(launch):
    secrets = {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret"}
    run = launch("-np", "2", "-x", "MY_PASSWORD=s3cret", JOB, "*:environment", env={**secrets, "HF_HOME": "/here"})
    assert run.code == 0 and run.out.count("s3cret") in (3, 6), run  # identical lines are shown as one
    for path in run.run_dir.rglob("*"):
        assert path.suffix == ".out" or not path.is_file() or b"s3cret" not in path.read_bytes(), path
    told = json.loads((run.run_dir / "plan.json").read_text())["ranks"][1]["environment"]
    assert told["HF_HOME"] == "/here" and told["HF_TOKEN"] == told["MY_PASSWORD"] == "***"


def test_omp_threads_are_the_share_of_cores_unless_set(launch, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = launch("-np", "1", JOB, "*:environment", env={})
    # The launch fixture sets 1 for speed, and the launcher keeps it. Otherwise each rank gets its share of the cores.
    assert '"OMP_NUM_THREADS": "1"' in run.out
    command = [str(LAUNCH), "-np", "2", "--run-dir", str(run.run_dir), str(JOB), "*:environment"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.count(f'"OMP_NUM_THREADS": "{share}"') == 2, done


@pytest.mark.processes
def test_the_file_limit_of_a_rank_is_raised(tmp_path):
    """A thousand ranks need a thousand connections in each rank. The usual soft limit is 1024 files."""
    script = tmp_path / "limits.py"
    script.write_text("import resource\nprint('files', *resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    command = f"ulimit -Sn 900 && exec {LAUNCH} -np 1 --run-dir {tmp_path / 'run'} {script}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done
    soft, hard = map(int, (tmp_path / "run/ranks/0.out").read_text().split()[1:])
    assert soft == min(65536, hard)
