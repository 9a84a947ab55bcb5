"""Signals, time limits and kills of a launch, and the time that scripts get to save."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time

import msgspec
import psutil
import pytest

from distrib_launch import runner as job
from distrib_launch.arguments import launch_arguments
from distrib_launch.supervisor.engine_process import EngineProcess
from tests.conftest import JOB, LAUNCH, TOPO, our_processes
from tests.support.launched_jobs import live_children, rank_process, start_job

pytestmark = pytest.mark.processes


def test_ctrl_c_stops_the_job_with_exit_code_130(tmp_path):
    process = start_job(tmp_path / "run", "-np", "2", str(JOB), "*:children")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130, err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("stopped", 130)


def test_a_rank_stopped_by_the_engine_gets_the_same_grace(tmp_path):
    """Slurm stops a rank this way at its time limit."""
    process = start_job(tmp_path / "run", "-np", "1", "--grace", "1s", str(JOB), "*:ignore")
    script = rank_process()
    started = time.monotonic()
    os.kill(psutil.Process(script).ppid(), signal.SIGTERM)
    psutil.Process(script).wait(timeout=15)
    assert 1 <= time.monotonic() - started < 4
    process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGKILL


def test_a_killed_launcher_waits_for_starting_daemons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = job.plan_launch(launch_arguments.parse(["-H", "n1", "--run-dir", ".", str(JOB)]))
    plan = msgspec.structs.replace(plan, command=("sh", "-c", "sleep 1; touch all-there"))
    if not (launcher := os.fork()):
        try:
            EngineProcess(plan, token="", addresses="")
        finally:
            os._exit(0)
    os.waitpid(launcher, 0)
    deadline = time.monotonic() + 10
    while not (tmp_path / "all-there").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_sighup_of_a_closing_terminal_keeps_the_grace(tmp_path):
    """The shell forwards its SIGHUP, and the kernel sends another one as the shell ends."""
    script = tmp_path / "saves.py"
    script.write_text(
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(1)\n    print('saved', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('rank is ready', flush=True)\ntime.sleep(60)\n"
    )
    with contextlib.ExitStack() as stack:
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # the tests run under nohup
            stack.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL))
        process = start_job(tmp_path / "run", "-np", "1", str(script))
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.01)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 129 and "saved" in out


def test_ctrl_c_twice_does_not_wait_for_the_grace(tmp_path):
    process = start_job(tmp_path / "run", "-np", "2", "--grace", "60s", str(JOB), "*:ignore")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=70)
    assert process.returncode == 130
    assert time.monotonic() - begun < 20


def test_ctrl_c_after_a_failure_keeps_the_first_failure(tmp_path):
    process = start_job(tmp_path / "run", "-np", "2", "--grace", "60s", str(JOB), "0:ignore", "1:raise-then")
    log = tmp_path / "run/ranks/1.err"
    deadline = time.monotonic() + 20
    while not log.exists() or "boom" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, err = process.communicate(timeout=70)
    assert process.returncode == 130
    assert "rank 1 on localhost failed first: RuntimeError: boom in rank 1" in err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["first_failure"]["rank"]) == ("stopped", 1)


@pytest.mark.parametrize("victim", ["launcher", "mpirun"])
def test_no_process_survives_a_killed_launcher_or_engine(tmp_path, victim):
    process = start_job(tmp_path / "run", "-np", "2", str(JOB), "*:children")
    engine = [pid for pid, command in our_processes().items() if "prterun" in command or "bin/mpirun" in command]
    assert engine
    if victim == "launcher":
        process.kill()
    else:
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=50)
    assert process.returncode != 0
    deadline = time.monotonic() + 10
    while (left := live_children() or list(our_processes().values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_a_job_at_its_time_limit_is_stopped_with_exit_code_124(launch):
    run = launch("-np", "2", "--timeout", "1s", JOB, "*:sleep=60", timeout=50)
    assert run.code == 124, run
    assert run.result["status"] == "stopped"
    assert "time limit" in run.err


def test_a_job_under_nohup_ignores_sighup(tmp_path):
    process = subprocess.Popen(
        ["nohup", str(LAUNCH), "--run-dir", str(tmp_path / "run"), str(JOB), "*:sleep=3"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout
    assert "rank" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=50)
    assert process.returncode == 0


SAVER = """
import os, signal, sys, time
worker = os.fork()  # as a loader's, which its script needs while it saves
if not worker:
    time.sleep(600)
def save(number, frame):
    print("saving", signal.Signals(number).name, flush=True)
    time.sleep(0.5)
    assert os.waitpid(worker, os.WNOHANG) == (0, 0)
    open(f"saved-{os.environ['RANK']}", "w").close()
    if number == signal.SIGTERM:
        sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, save)
print("rank", os.environ["RANK"], "is ready", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


def test_scripts_can_save_at_the_time_limit(launch, tmp_path):
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    for limit in ("5s", "30s"):  # the limit counts from the start of the launcher
        run = launch("-np", "2", "--timeout", limit, script, timeout=200)
        if run.out.count("is ready") == 2:
            break
    assert run.code == 124, run
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_for_scripts_reach_every_rank_and_the_job_continues(tmp_path, number):
    (tmp_path / "saver.py").write_text(SAVER)
    process = start_job(tmp_path / "run", "-np", "2", "saver.py")
    process.stdout.readline()  # the line of the other rank
    process.send_signal(number)
    deadline = time.monotonic() + 10
    while not all((tmp_path / f"saved-{r}").exists() for r in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all((tmp_path / f"saved-{r}").exists() for r in range(2))
    assert process.poll() is None
    (tmp_path / "enough").touch()
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert out.count(f"saving {number.name}") in (1, 2), out  # one line if both print at the same time


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGALRM])
def test_other_signals_of_schedulers_stop_the_job_with_its_result(tmp_path, number):
    (tmp_path / "saver.py").write_text(SAVER)
    process = start_job(tmp_path / "run", "-np", "1", "saver.py")
    process.send_signal(number)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 128 + number and number.name in err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "stopped"
    assert (tmp_path / "saved-0").exists()


def test_ctrl_backslash_shows_the_stacks_and_the_job_continues(tmp_path):
    (tmp_path / "saver.py").write_text(SAVER)
    process = start_job(tmp_path / "run", "-np", "1", "saver.py")
    process.send_signal(signal.SIGQUIT)
    assert any("rank 0" in line and "saver.py:" in line for line in process.stderr)
    (tmp_path / "enough").touch()
    process.communicate(timeout=50)
    assert process.returncode == 0


def test_sigusr1_to_a_rank_agent_reaches_its_rank_and_the_job_continues(tmp_path):
    (tmp_path / "saver.py").write_text(SAVER)
    process = start_job(tmp_path / "run", "-np", "1", "saver.py")
    (job,) = psutil.Process(process.pid).children()
    (task,) = [one for one in job.children(recursive=True) if "distrib_launch.rank_agent" in one.cmdline()]
    task.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not (tmp_path / "saved-0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "enough").touch()
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0 and "saving SIGUSR1" in out, err


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ([LAUNCH, "--json", "--run-dir", "run"], signal.SIGINT), ([LAUNCH, "--run-dir", "run", "--sync", "."], signal.SIGTERM),
        ([TOPO, "check"], signal.SIGTERM), ([TOPO, "check"], signal.SIGHUP),
    ],
)  # fmt: skip
def test_a_command_interrupted_during_ssh_cleans_up_and_reports_it(tmp_path, command, number):
    ssh, temporary = tmp_path / "ssh", tmp_path / "tmp"
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 60\n")
    ssh.chmod(0o755)
    temporary.mkdir()
    process = subprocess.Popen(
        [*command, "-H", "nowhere", "--ssh-command", ssh, JOB], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup or a background shell may ignore them
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "asked").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 128 + number and "error: interrupted" in err, err
    assert not os.listdir(temporary)
    if "--json" in command:
        told = json.loads((tmp_path / "run/result.json").read_text())
        assert (told["status"], told["exit_code"], told["hosts"]) == ("stopped", 130, ["nowhere"])
        assert json.loads(out) == {"status": "stopped", "exit_code": 130, "code": "stopped", "error": "interrupted"}
