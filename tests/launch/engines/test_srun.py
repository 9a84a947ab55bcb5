"""Engine srun without Slurm: commands, GPUs, identities of tasks, explained messages."""

from __future__ import annotations

import os
import re
import shlex

import msgspec
import pytest

from distrib.errors import ConfigError
from distrib.utils.mpi_env import rank_identity
from distrib_launch import engines
from distrib_launch import runner as job
from distrib_launch.arguments import launch_arguments
from distrib_launch.engines import srun
from distrib_launch.engines.engine import AGENT
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent.affinity import count_gpus
from distrib_launch.rank_agent.control_channel import connect_to_launcher
from tests.conftest import JOB


@pytest.mark.parametrize("engine", ["mpirun", "srun"])
def test_hosts_need_the_daemon_of_the_engine_that_starts_the_ranks(tmp_path, engine):
    """Engine srun does not require the daemon of an Open MPI installed beside it."""
    daemon = tmp_path / "prted"
    daemon.touch()
    plan = job.plan_launch(launch_arguments.parse(["-H", "a", "--run-dir", str(tmp_path), str(JOB)]))
    plan = msgspec.structs.replace(plan, engine=engine, command=(str(tmp_path / engine),))
    assert engines.get(engine).required_programs(plan, plan.hosts[0]) == ((str(daemon),) if engine == "mpirun" else ())


def test_the_reason_of_a_queued_job_is_read_from_the_log(tmp_path):
    (log := tmp_path / "engine.log").write_text("")
    assert srun.ENGINE.queued(log) == ""
    log.write_text(
        "srun: Requested partition configuration not available now\nsrun: job 7 queued and waiting for resources\n"
    )
    assert srun.ENGINE.queued(log) == "Requested partition configuration not available now"
    log.write_text("srun: job 7 queued and waiting for resources\n")
    assert srun.ENGINE.queued(log) == "job 7 queued and waiting for resources"
    log.write_text(log.read_text() + "srun: job 7 has been allocated resources\n")
    assert srun.ENGINE.queued(log) == ""


def test_a_launcher_started_by_srun_for_each_task_is_refused():
    environ = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(ConfigError, match="2 times"):
        srun.refuse_several_launchers(environ)
    srun.refuse_several_launchers({**environ, "SLURM_STEP_NUM_TASKS": "1"})
    srun.refuse_several_launchers({"SLURM_JOB_ID": "7"})  # a batch script
    srun.refuse_several_launchers({**environ, "SLURM_PTY_PORT": "40000"})  # an interactive shell


def test_a_slurm_task_has_rank_size_local_rank_and_local_size():
    told = {
        "SLURM_PROCID": "2", "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_GTIDS": "1,2,3",
    }  # fmt: skip
    assert rank_identity(told) == (2, 6, 1, 3)
    assert rank_identity({**told, "SLURM_GTIDS": "2"}) == (2, 6, 1, 1)
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert rank_identity({**told, **mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == (0, 2, 0, 2)


def test_gpus_forbidden_by_the_cgroup_do_not_count(monkeypatch):
    allowed = {"/dev/nvidia2"}
    monkeypatch.setattr(os, "listdir", lambda _: ["null", "nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"])
    monkeypatch.setattr(os, "access", lambda path, _: path in allowed)
    assert count_gpus({}) == 1
    allowed.clear()
    assert count_gpus({}) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1c, MIG-2d"}) == 1  # CUDA shows a process one MIG instance


@pytest.mark.parametrize(("engine", "advice"), [("OMPI_COMM_WORLD_RANK", True), ("SLURM_PROCID", False)])
def test_another_interface_is_advised_only_for_mpirun(monkeypatch, engine, advice):
    monkeypatch.setenv(engine, "0")
    with pytest.raises(SystemExit) as refused:
        connect_to_launcher("127.0.0.1:1", "token", timeout_seconds=0.1)
    assert ("--interface" in str(refused.value)) == advice


def test_a_missing_srun_is_refused(launch_in_process, tmp_path):
    run = launch_in_process("--engine", "srun", "-H", "a:1", JOB, env={"PATH": str(tmp_path)})
    assert run.code == 2, run
    assert (
        run.err == "distrib-launch: error: --engine srun: no srun here; run it where Slurm is, or use --engine mpirun\n"
    )


@pytest.mark.parametrize(("words", "kind"), [("", "pmix"), ("srun: error: Invalid MPI type 'pmix'", "none")])
def test_pmix_is_used_if_slurm_has_it(launch_in_process, tmp_path, words, kind):
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho {shlex.quote(words)} >&2\n")
    (tmp_path / "srun").chmod(0o755)
    run = launch_in_process(
        "--engine", "srun", "-H", "a:2,b:1", "--dry-run", "-v", JOB, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    assert run.code == 0, run
    assert f"--mpi={kind} " in run.out
    assert ("this Slurm has no PMIx" in run.out) == (kind == "none")


def test_gpus_that_slurm_binds_to_tasks_are_shown_to_all_ranks_of_a_host(launch_in_process, tmp_path):
    """Each rank takes its own GPU among those of its host."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    words = ("--engine", "srun", "-H", "a:2", "--dry-run", "-v", JOB)
    assert "--gpu-bind" not in launch_in_process(*words, env=env).out
    assert "--gpu-bind=none " in launch_in_process(*words, env={**env, "SLURM_GPUS_PER_TASK": "1"}).out


@pytest.mark.parametrize(
    ("knows", "words", "gpus"),
    [
        ("a gpu:8\nb gpu:a100:8(S:0-1),nvme:1", (), 3),
        ("a gpu:a100:1,gpu:h100:1\nb gpu:8", (), 2),
        ("a gpu:8\nb (null)", (), 0),
        ("a (null)\nb (null)", (), 0),
        ("", (), 0),
        ("a gpu:8\nb gpu:8", ("-x", "CUDA_VISIBLE_DEVICES="), 0),
    ],
)
def test_gpus_are_requested_if_all_hosts_have_them_in_slurm(launch_in_process, tmp_path, knows, words, gpus):
    for name, text in (("srun", ""), ("sinfo", f"cat <<'E'\n{knows}\nE\n")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = launch_in_process("--engine", "srun", "-H", "a:3,b:1", *words, "--dry-run", "-v", JOB, env=env)
    assert run.code == 0, run
    assert re.findall(r"--gres=gpu:(\d+) ", run.out) == ([str(gpus)] if gpus else [])
    assert (f"{gpus} GPU(s) are requested on each host" in run.out) == bool(gpus)
    assert (
        "--gres"
        not in launch_in_process(
            "--engine", "srun", "-H", "a:3,b:1", "--dry-run", "-v", JOB, env={**env, "SLURM_GPUS": "4"}
        ).out
    )


@pytest.mark.parametrize(("grace", "before"), [("5s", 30), ("20.5s", 31), ("2m", 130), ("30d", 65535)])
def test_slurm_signals_a_job_early_enough_for_the_grace(launch_in_process, tmp_path, grace, before):
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    run = launch_in_process(
        *("--engine", "srun", "-H", "a:2", "--grace", grace, "--dry-run", "-v", JOB),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert f" --signal=TERM@{before} " in run.out, run


def test_hosts_with_their_own_interpreter_get_a_program_file(launch_in_process, tmp_path):
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "hosts.txt").write_text("a slots=2\nb slots=1 python=/opt/b/bin/python\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = launch_in_process("--engine", "srun", "-H", tmp_path / "hosts.txt", "--dry-run", "--json", JOB, env=env)
    plan = msgspec.json.decode(run.out, type=LaunchPlan)
    srun.ENGINE.write_files(tmp_path, plan)
    assert plan.command[-2:] == ("--multi-prog", f"{plan.run_dir}/srun-programs.txt")
    here = plan.script[0]
    assert (tmp_path / "srun-programs.txt").read_text().splitlines() == [
        f"{rank} {python} {shlex.join(AGENT)}" for rank, python in enumerate((here, here, "/opt/b/bin/python"))
    ]
    assert (tmp_path / "srun-hosts.txt").read_text() == "a\na\nb\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("srun: error: Unable to allocate resources: Invalid node name specified\n", "does not know every host"),
        ("srun: error: Unable to create step for job 3: Job/step already completing or completed\n", "job is over"),
        ("srun: job 4 queued and waiting for resources\n", None),
        ("", None),
    ],
)
def test_messages_of_srun_are_explained(words, what):
    explained = srun.ENGINE.explain(words)
    assert (explained is None) if what is None else (explained is not None and what in explained[0])


def test_a_job_is_queued_until_resources_are_allocated(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("srun: job 4 queued and waiting for resources\n")
    assert srun.ENGINE.queued(log)
    log.write_text(log.read_text() + "srun: job 4 has been allocated resources\n")
    assert not srun.ENGINE.queued(log)
