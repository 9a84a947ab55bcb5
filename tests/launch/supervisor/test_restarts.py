"""Restarts of a failed job: `--max-restarts`, `--min-hosts`, and the checkpoints from which it continues."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Part

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distrib.errors import ConfigError, PreflightError
from distrib.training.checkpoint import checkpoint_format, replicas
from distrib.training.checkpoint.replicas import Stamp
from distrib.utils import signals
from distrib_launch import runner
from distrib_launch.arguments import launch_arguments
from distrib_launch.preflight.gate import PreflightGate
from distrib_launch.results import Failure
from distrib_launch.supervisor import attempts
from tests.conftest import LAUNCH, SCRIPTS
from tests.launch.test_launch_cluster import wait_for_line

TRAINING = SCRIPTS / "restarts.py"
STARTS = SCRIPTS / "starts.py"


@pytest.mark.forked
def test_a_job_that_failed_goes_on_from_its_checkpoint(launch, tmp_path):
    whole = launch("-np", "2", TRAINING, "5", cwd=_folder(tmp_path / "whole"))
    assert whole.code == 0, whole
    run = launch(
        "-np", "2", "--max-restarts", "3", TRAINING, "5", "0:1:1:boom", "1:0:3:bang", cwd=_folder(tmp_path / "a")
    )
    assert run.code == 0, run
    assert "start 1 of 2 ranks from epoch 2" in run.out and "start 2 of 2 ranks from epoch 4" in run.out
    assert _parameters(run.out) == _parameters(whole.out)
    result = run.result
    assert (result["status"], result["restarts"], result["first_failure"]) == ("succeeded", 2, None)
    assert [attempt["first_failure"]["message"] for attempt in result["attempts"]] == [
        "RuntimeError: boom",
        "RuntimeError: bang",
    ]
    assert result["seconds"] > sum(attempt["seconds"] for attempt in result["attempts"])
    for number, attempt in enumerate(result["attempts"]):
        assert "RuntimeError" in Path(attempt["first_failure"]["log"]).read_text()
        folder = run.run_dir / f"attempt{number}"
        assert folder == run.run_dir / attempt["folder"]
        assert f"start {number} of 2 ranks" in (folder / "ranks/0.out").read_text()
        assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert "start 2" in (run.run_dir / "ranks/0.out").read_text()
    assert "RuntimeError: boom" in (run.run_dir / "report.html").read_text()


def test_the_last_failure_is_the_jobs(launch):
    run = launch("-np", "2", "--max-restarts", "1", STARTS, "boom", "bang")
    assert run.code == 1, run
    assert run.result["first_failure"]["message"] == "RuntimeError: bang"
    assert run.result["restarts"] == 1
    assert Path(run.result["first_failure"]["log"]).parent == run.run_dir / "ranks"


def test_a_mistake_in_the_script_is_not_made_again_and_again(launch, tmp_path):
    script = tmp_path / "mistake.py"
    script.write_text("import os, time\nprint('begun')\nraise KeyError(f'not there: {os.getpid()} at {time.time()}')\n")
    run = launch("-np", "2", "--max-restarts", "9", script)
    assert run.code == 1, run
    assert run.result["restarts"] == 1
    assert "failed twice with the same error" in run.err
    assert "KeyError: 'not there" in run.result["first_failure"]["message"]


def test_the_time_limit_is_that_of_all_starts(launch, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text(
        "import os, sys, time\ntime.sleep(3)\nsys.exit(1 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n"
    )
    run = launch("--max-restarts", "9", "--timeout", "8", script)
    assert (run.code, run.result["status"]) == (124, "stopped"), run
    assert 1 <= run.result["restarts"] <= 2
    assert run.seconds < 30


@pytest.mark.processes
def test_who_interrupts_the_job_ends_it(tmp_path):
    command = [LAUNCH, "--run-dir", tmp_path / "run", "--max-restarts", "9", "-np", "2", STARTS, "boom", "wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    wait_for_line(process, "start 1")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["restarts"]) == ("stopped", 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-H", "a,b", "--min-hosts", "3"], "--min-hosts 3: the job has 2 host(s)"),
        (["-H", "a,b", "--min-hosts", "1", "--no-preflight"], "--no-preflight does not check any host"),
        (["-H", "a,b", "--min-hosts", "1", "--engine", "srun"], "Slurm has not allocated the hosts yet"),
        (["-x", "TORCHELASTIC_RESTART_COUNT=3"], "the launcher sets this variable itself"),
    ],
)
def test_what_cannot_be_is_refused(words, told):
    with pytest.raises(
        ConfigError, match="^" + told.replace("(", r"\(").replace(")", r"\)") if told.startswith("--min") else told[:30]
    ):
        runner.plan_launch(launch_arguments.parse([*words, str(TRAINING)]))


def test_a_job_that_is_started_again_keeps_its_run_and_may_have_fewer_ranks():
    options = launch_arguments.parse(
        ["-H", "a:2,b:2,c:2", "-np", "6", "--min-hosts", "1", "--max-restarts", "4", str(TRAINING)]
    )
    first = runner.plan_launch(options)
    again = runner.plan_launch(options, before=first, restart=True)
    rest = runner.plan_launch(options, ["b"], again)
    assert first.world_size == again.world_size == 6 and rest.world_size == 4
    assert (
        first.job_id == first.attempt_id == again.job_id == rest.job_id
        and again.attempt_id == rest.attempt_id != first.attempt_id
    )
    environment = rest.ranks[0].environment
    assert environment["TORCHELASTIC_RUN_ID"] == first.attempt_id and environment["DISTRIB_JOB"] == rest.attempt_id
    assert (environment["TORCHELASTIC_RESTART_COUNT"], environment["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "4")
    options = msgspec.structs.replace(options, min_hosts=None)
    with pytest.raises(ConfigError, match="6 ranks requested"):
        runner.plan_launch(options, ["b"], again)


def test_a_hostfile_that_was_changed_meanwhile_is_what_counts(tmp_path):
    (file := tmp_path / "hosts.txt").write_text("a slots=2\nb slots=2\nc slots=2\n")
    words = ["-H", str(file), "-np", "6", "--show-rank", "5", "--min-hosts", "2", "--max-restarts", "4", str(TRAINING)]
    options = launch_arguments.parse(words)
    first = runner.plan_launch(options)
    file.write_text("a slots=2\nc slots=2\n")
    assert runner.plan_launch(options, before=first, restart=True).world_size == 4
    file.write_text("c slots=2\n")
    alone = runner.plan_launch(options, before=first, restart=True)
    with pytest.raises(PreflightError, match=r"there are 1 host\(s\).*expected 2 or more"):
        PreflightGate(options, None, None, None, None).run(alone)


def test_an_idle_host_takes_the_place_of_all_that_are_not_fit(launch, tmp_path):
    script = tmp_path / "hello.py"
    script.write_text("print('hello')\n")
    run = launch("-H", "nosuchhost.invalid:1,localhost:1", "-np", "1", "--min-hosts", "1", script)
    assert run.code == 0 and run.result["hosts"] == ["localhost"], run
    assert "left out: nosuchhost.invalid" in run.err


def _ended(message: str, **changes: object) -> attempts.CompletedAttempt:
    values = {"rank": 0, "host": "n1", "time": 0.0, "exit_code": 1, "signal": None, "traceback": "", "log": ""}
    failure = Failure(**{**values, "message": message, **changes.pop("failure", {})})
    told = Part(first_failure=failure, seconds=changes.pop("seconds", 2.0))
    return attempts.CompletedAttempt(
        plan=None, result=told, exits=(), started=0.0, stepped=changes.pop("stepped", False)
    )


def test_which_failures_are_the_same_mistake_again():
    alike = attempts.is_same_failure
    mistake = _ended("error: no such dataset")
    assert alike(mistake, _ended("error: no such dataset"))
    assert not alike(mistake, _ended("error: another"))
    assert not alike(_ended("boom", stepped=True), _ended("boom"))
    assert not alike(_ended("boom", seconds=90000.0), _ended("boom"))
    gone = {"exit_code": None}
    assert not alike(_ended("host n2 was lost", failure=gone), _ended("host n2 was lost", failure=gone))
    killed = {"exit_code": 137, "signal": 9}
    assert not alike(_ended("killed", failure=killed), _ended("killed", failure=killed))


@pytest.mark.processes
def test_a_signal_to_save_ends_nothing_between_two_starts():
    before = signal.getsignal(signal.SIGUSR1)
    with signals.ignored(signal.SIGUSR1):
        os.kill(os.getpid(), signal.SIGUSR1)
        told = subprocess.run(["sh", "-c", "kill -USR1 $$"], check=False)
    assert told.returncode == -signal.SIGUSR1  # a child process has the default handler
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.processes
def test_a_start_that_comes_to_nothing_leaves_the_one_before_as_it_was(tmp_path):
    (own, once) = (Path(sys.executable).parent / "mpirun", tmp_path / "once")
    mpirun = _folder(tmp_path / "bin") / "mpirun"
    mpirun.write_text(f'#!/bin/sh\nif [ -e {once} ]; then echo no more; exit 1; fi\ntouch {once}\nexec {own} "$@"\n')
    mpirun.chmod(0o755)
    folder = tmp_path / "run"
    command = [LAUNCH, "-np", "2", "--mpirun", mpirun, "--max-restarts", "2", "--run-dir", folder]
    with (tmp_path / "err").open("w+") as file:
        process = subprocess.Popen([*command, STARTS, "boom"], stderr=file, cwd=tmp_path)
        deadline = time.monotonic() + 120
        while "checking again for 10 minutes" not in (tmp_path / "err").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, (tmp_path / "err").read_text()
    err = (tmp_path / "err").read_text()
    assert "no more" in err and err.count("failed first") == 1, err
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["restarts"], result["attempts"]) == ("stopped", 0, [])
    assert result["first_failure"]["message"] == "RuntimeError: boom"
    assert "RuntimeError: boom" in Path(result["first_failure"]["log"]).read_text()
    assert not (folder / "attempt0").exists()
    assert "no more" in (folder / "engine.log").read_text()


def test_the_next_run_in_a_folder_clears_the_starts_and_nothing_else(launch, tmp_path):
    words = ("--run-dir", tmp_path / "again", "--max-restarts", "1", STARTS)
    assert launch(*words, "boom").code == 0
    assert (tmp_path / "again/attempt0/ranks/0.out").exists()
    (_folder(tmp_path / "again/attempt1") / "mine.txt").write_text("kept")
    (tmp_path / "again/attempt.md").write_text("kept")
    assert launch(*words).code == 0
    assert not (tmp_path / "again/attempt0").exists()
    assert (tmp_path / "again/attempt1/mine.txt").exists() and (tmp_path / "again/attempt.md").exists()


# -- selection of the newest checkpoint -------------------------------------------------------------------------------


def _stamp(run: str, start: int, number: int, time: float = 0.0) -> Stamp:
    return Stamp(run, start, number, time)


def test_the_newest_checkpoint_of_the_run_is_the_one():
    run = replicas.Run(name="r", restarts=2, max_restarts=3)
    assert replicas.newest([None, None], run) == 0
    assert replicas.newest([_stamp("other", 9, 9), _stamp("r", 0, 1)], run) == 1
    own = [_stamp("r", 0, 9), _stamp("r", 1, 1), _stamp("r", 1, 2), _stamp("r", 1, 2)]
    assert replicas.newest(own, run) == 2


def test_a_new_run_goes_on_from_the_newest_of_the_run_that_its_main_rank_knows():
    """A host that was lost returns with an old checkpoint, and runs the main rank of the next run."""
    run = replicas.Run(name="new", restarts=0, max_restarts=3)
    assert replicas.newest([_stamp("r", 0, 5), _stamp("r", 1, 20), _stamp("r", 1, 19)], run) == 1
    assert replicas.newest([_stamp("r", 0, 5, 100.0), _stamp("other", 1, 20, 200.0)], run) == 0
    assert replicas.newest([None, _stamp("r", 0, 5, 100.0), _stamp("other", 0, 2, 200.0)], run) == 2
    assert replicas.newest([None, replicas.NO_STAMP, _stamp("other", 9, 9, 9.0)], run) == 2
    assert replicas.newest([replicas.NO_STAMP, replicas.NO_STAMP], run) == 0


def test_a_checkpoint_that_another_run_wrote_later_is_told_of():
    own, older, newer = _stamp("r", 0, 5, 100.0), _stamp("other", 9, 9, 90.0), _stamp("other", 0, 1, 200.0)
    assert replicas.later([own, newer, older], 0) == (1, own, newer)
    assert replicas.later([own, older, None], 0) is None
    assert replicas.later([own, _stamp("r", 0, 6, 300.0), None], 0) is None
    assert replicas.later([None, newer], 0) is None and replicas.later([replicas.NO_STAMP, newer], 0) is None


stamps = st.none() | st.builds(
    Stamp, st.sampled_from(["r", "", "other"]), st.integers(0, 3), st.integers(0, 5), st.floats(0, 9)
)


@given(st.lists(stamps, min_size=1, max_size=6))
def test_no_host_has_a_newer_one(given_stamps):
    chosen = given_stamps[replicas.newest(given_stamps, replicas.Run(name="r", restarts=1, max_restarts=3))]
    own = [stamp for stamp in given_stamps if stamp and stamp.run == "r"]
    if own:
        assert chosen is not None and chosen.run == "r"
        assert (chosen.start, chosen.number) == max((stamp.start, stamp.number) for stamp in own)
    else:
        assert (chosen is None) == all(stamp is None for stamp in given_stamps)


def test_a_checkpoint_tells_when_it_was_written(tmp_path):
    assert replicas.stamp_of(tmp_path / "none.pt") is None
    checkpoint_format.write(tmp_path / "a.pt", {"x": 1}, stamp=_stamp("r", 1, 7, 3.5))
    assert replicas.stamp_of(tmp_path / "a.pt") == _stamp("r", 1, 7, 3.5)
    torch.save({"x": 1}, tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"nothing of the kind")
    assert replicas.stamp_of(tmp_path / "b.pt") == replicas.stamp_of(tmp_path / "c.pt") == replicas.NO_STAMP


def test_which_file_systems_hosts_have_in_common(monkeypatch, tmp_path):
    scratch = _folder(tmp_path / "scratch")
    (link := tmp_path / "link").symlink_to(scratch)
    parts = {"/": "ext4", "/home": "nfs4", "/home/me/scratch": "xfs", "/data": "fuse.sshfs", "/ntfs": "fuseblk"}
    parts[str(scratch)] = "lustre"
    monkeypatch.setattr(
        replicas.psutil, "disk_partitions", lambda all: [Part(mountpoint=m, fstype=f) for m, f in parts.items()]
    )
    places = ("/x.pt", "/home/me/x.pt", "/home/me/scratch/a/x.pt", "/data/x", "/homeless/x", "/ntfs/x", link / "x.pt")
    shared = {str(path): replicas.is_shared(path) for path in places}
    assert shared == {
        "/x.pt": False,
        "/home/me/x.pt": True,
        "/home/me/scratch/a/x.pt": False,
        "/data/x": True,
        "/homeless/x": False,
        "/ntfs/x": False,
        str(link / "x.pt"): True,
    }


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint_format.write(tmp_path / "a.pt", {"x": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_what_a_killed_process_has_left_half_written_goes_with_the_next_checkpoint(tmp_path):
    if not (child := os.fork()):
        try:
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            checkpoint_format.write(tmp_path / "a.pt", {"x": 1})
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.pt.")
    checkpoint_format.write(tmp_path / "b.pt", {"x": 1})
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a process that is still writing
        checkpoint_format.write(tmp_path / "a.pt", {"x": 1})
        assert left.exists()
    checkpoint_format.write(tmp_path / "a.pt", {"x": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


# -- hosts that are lost and return -----------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.forked
def test_a_job_outlives_its_hosts_and_finds_its_newest_checkpoint(make_cluster, tmp_path):
    """Each host has its own disk. The main rank's host is lost, and returns with an outdated checkpoint."""
    cluster = make_cluster(4)
    work = _folder(tmp_path / "work")

    def mount(host: str) -> None:
        cluster.run(host, ["mount", "--bind", _folder(tmp_path / f"disk-{host}"), work], check=True)

    for host in ("n2", "n3", "n4"):
        mount(host)
    orders = ("0:0:1:wait", "1:1:3:wait")
    command = [
        LAUNCH,
        "-H",
        "n[2-4]",
        "--run-dir",
        tmp_path / "run",
        "--max-restarts",
        "2",
        "--min-hosts",
        "2",
        "--sync",
        work,
        TRAINING,
        "6",
        *orders,
    ]
    process = cluster.popen("n1", command, env={"OMP_NUM_THREADS": "1"}, cwd=work)
    wait_for_line(process, "epoch 1 is done")
    (stale := work / "last.pt").write_text("of another day, where nobody trains")
    os.utime(stale, (0, 0))
    cluster.lose("n2")
    wait_for_line(process, "start 1 of 2 ranks from epoch 2")
    wait_for_line(process, "epoch 3 is done")
    cluster.restore("n2")
    mount("n2")
    cluster.lose("n4")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "start 2 of 2 ranks from epoch 4" in out
    assert "last.pt: the newest copy" in err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert [attempt["hosts"] for attempt in result["attempts"]] == [["n2", "n3", "n4"], ["n3", "n4"]]
    assert result["hosts"] == ["n2", "n3"]
    own, other = (replicas.stamp_of(tmp_path / f"disk-{host}/last.pt") for host in ("n2", "n3"))
    assert own[:3] == other[:3]
    assert sorted(path.name for path in (tmp_path / "disk-n3").iterdir()) == ["last.pt"]
    assert cluster.left_over(within_seconds=10) == {}


@pytest.mark.cluster
@pytest.mark.forked
def test_a_host_that_the_job_needs_is_waited_for(make_cluster, tmp_path):
    cluster = make_cluster(2)
    command = [
        LAUNCH,
        "-H",
        cluster.hostfile,
        "--run-dir",
        tmp_path / "run",
        "--max-restarts",
        "1",
        TRAINING,
        "3",
        "0:0:1:wait",
    ]
    process = cluster.popen("n1", command, env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    wait_for_line(process, "epoch 1 is done")
    cluster.lose("n2")
    begun = time.monotonic()
    while "check that n2 is up" not in (tmp_path / "run/preflight.json").read_text():
        assert time.monotonic() - begun < 60
        time.sleep(0.2)
    cluster.restore("n2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "checking again for 10 minutes" in err
    assert "start 1 of 2 ranks from epoch 2" in out


@pytest.mark.cluster
def test_a_host_that_cannot_be_given_the_folder_is_left_out(make_cluster, launch, tmp_path):
    cluster = make_cluster(3)
    project = _folder(tmp_path / "project")
    (project / "where.py").write_text((SCRIPTS / "where.py").read_text())
    cluster.lose("n2")
    words = ("-H", cluster.hostfile, "--sync", project, "--min-hosts")
    run = launch(*words, "2", project / "where.py", cluster=cluster, cwd=project)
    assert run.code == 0, run
    assert run.result["hosts"] == ["n1", "n3"]
    assert "1 host(s) left out (--min-hosts 2); 2 rank(s) remain" in run.err
    assert "left out: n2: --sync" in run.err
    few = launch(*words, "3", project / "where.py", cluster=cluster, cwd=project)
    assert few.code == 3, few
    assert "without n2 there are 2 host(s)" in few.err


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _parameters(out: str) -> str:
    (line,) = (line for line in out.splitlines() if "parameters" in line)
    return line.partition("parameters")[2]
