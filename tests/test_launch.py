"""`distrib-launch` on this machine: plans, placement, environment, output, exit codes and cleanup."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from distrib.errors import ConfigError
from distrib_launch import runner as job
from distrib_launch.arguments import launch_arguments
from distrib_launch.cli import launch as cli
from distrib_launch.engines import ssh
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_environment import is_secret
from distrib_launch.run_directory import choose_run_dir, prepare_run_dir
from distrib_launch.runner import read_hosts
from distrib_launch.supervisor.engine_process import EngineProcess
from tests.conftest import LAUNCH, SCRIPTS, TOPO, call, our_processes

JOB = SCRIPTS / "job.py"


def test_every_rank_runs_once_and_leaves_a_record(launch):
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


def test_options_that_changed_nothing_are_told_of(launch, tmp_path):
    """The script uses none of the options. Options after the script are its own."""
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    run = launch("--mode", "local", "--accumulate", "2", script, "-np", "2")
    assert run.code == 0, run
    (warning,) = run.result["warnings"]
    assert warning.startswith("--mode local --accumulate 2 changed nothing: no model that learns")
    assert f"distrib-launch: warning: {warning}" in run.err
    assert "note: -np after the script is an argument of the script" in run.err
    script.write_text(
        "import os; os.write(int(os.environ['DISTRIB_STATUS_FD']), b'5\\n{\"step\": 1e999}\\n{\"prepared\": true}\\n')"
    )
    assert launch("--accumulate", "2", script).result["warnings"] == []


def test_the_environment_is_the_one_that_torchrun_sets(launch):
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
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "WANDB_API_KEY", "COMET_APIKEY", "PGPASSWORD", "MYSQL_PWD", "API_KEYS")
        ),
        *((name, True) for name in ("GITHUB_PAT", "SSHPASS", "AWS_SECRET_ACCESS_KEY", "my_passwd")),
        *(
            (name, True)
            for name in ("MYACCESSKEY", "SSHKEY", "PRIVATEKEY", "DBPASS", "HTTP_AUTHORIZATION", "OAUTH2", "APIKEY2")
        ),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "PWD", "OLDPATH", "KEYBOARD", "NCCL_DEBUG", "AUTHOR")),
        *((name, False) for name in ("PATH", "COMPASS_X", "GHPAT", "PASSES", "MONKEY")),
    ],
)
def test_secrets_are_known_by_their_names(name, secret):
    assert is_secret(name) == secret


def test_secrets_reach_the_ranks_and_no_file(launch):
    secrets = {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret"}
    run = launch("-np", "2", "-x", "MY_PASSWORD=s3cret", JOB, "*:environment", env={**secrets, "HF_HOME": "/here"})
    assert run.code == 0 and run.out.count("s3cret") in (3, 6), run  # identical lines are shown as one
    for path in run.run_dir.rglob("*"):
        assert path.suffix == ".out" or not path.is_file() or b"s3cret" not in path.read_bytes(), path
    told = json.loads((run.run_dir / "plan.json").read_text())["ranks"][1]["environment"]
    assert told["HF_HOME"] == "/here" and told["HF_TOKEN"] == told["MY_PASSWORD"] == "***"


def test_threads_share_the_cores_when_nobody_set_them(launch, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = launch("-np", "1", JOB, "*:environment", env={})
    # The launch fixture sets 1 for speed, and the launcher keeps it. Otherwise each rank gets its share of the cores.
    assert '"OMP_NUM_THREADS": "1"' in run.out
    command = [str(LAUNCH), "-np", "2", "--run-dir", str(run.run_dir), str(JOB), "*:environment"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.count(f'"OMP_NUM_THREADS": "{share}"') == 2, done


def test_a_run_that_takes_the_place_of_an_earlier_one_says_so(launch):
    run = launch("-np", "2", JOB)
    assert run.code == 0 and "earlier run" not in run.err, run
    command = [str(LAUNCH), "-np", "1", "--run-dir", str(run.run_dir), str(JOB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    assert f"note: {run.run_dir} held the logs and results of an earlier run: they are gone" in done.stderr
    assert not (run.run_dir / "ranks/1.out").exists()


def test_arguments_and_directory_arrive_unchanged(launch, tmp_path):
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


@pytest.mark.parametrize(
    ("orders", "code", "rank", "message"),
    [
        (["1:raise"], 1, 1, "RuntimeError: boom in rank 1"),
        (["1:exit=7", "*:sleep=60"], 7, 1, "exit code 7"),
        (["0:signal=9", "*:sleep=60"], 137, 0, "killed by SIGKILL"),
        (["1:signal=11", "*:sleep=60"], 139, 1, "killed by SIGSEGV"),
        (["1:kill-parent", "*:sleep=60"], 1, 1, "the process around it was killed, it left no exit record"),
        (["--mpi", "1:raise", "*:sleep=60"], 1, 1, "RuntimeError: boom in rank 1"),
        (["--mpi", "0:signal=9", "*:sleep=60"], 137, 0, "killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_named_and_ends_the_job(launch, orders, code, rank, message):
    run = launch("-np", "2", JOB, *orders, timeout=60)
    assert run.code == code, run
    failure = run.result["first_failure"]
    assert failure["rank"] == rank
    assert message in failure["message"]
    assert f"rank {rank} on localhost failed first: " in run.err
    assert message in run.err
    assert run.result["status"] == "failed"
    assert run.seconds < 50


def test_a_rank_is_blamed_and_not_the_engine_when_both_are_seen_to_end_at_once(tmp_path):
    process = start(tmp_path / "run", "-np", "2", str(JOB), "*:sleep=60")
    task = psutil.Process(a_script()).parent()
    assert task
    engine = task.parent()
    assert engine and "prterun" in " ".join(engine.cmdline())
    process.send_signal(signal.SIGSTOP)  # Ctrl-Z
    task.kill()  # as the OOM killer does
    deadline = time.monotonic() + 30
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "failed first: the process around it was killed" in err, err


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(launch):
    run = launch("-np", "2", JOB, "0:ignore", "1:raise-then", timeout=200)
    assert run.code == 1, run
    assert run.result["first_failure"]["rank"] == 1
    assert [r["signal"] for r in run.result["ranks"]] == [signal.SIGKILL, None]


def test_a_failed_rank_takes_all_its_descendants_along(launch):
    run = launch("-np", "2", JOB, "0:children", "1:raise", timeout=50)
    assert run.code == 1, run
    assert not orphans()


def a_script() -> int:
    """Return the process of `job.py` on one of the ranks."""
    return next(
        pid for pid, command in our_processes().items() if re.match(r"\S*python\S* (\S+ )?\S+/job.py ", command)
    )


def orphans() -> list[str]:
    """List the live children that `job.py` started. One of them has an empty environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[0] == b"sleep" and command[1].endswith(b".%d" % os.getpid()):
                found.append(f"{entry.name}: {command}")
    return found


def start(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [str(LAUNCH), "--run-dir", str(run_dir), *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=run_dir.parent,
    )  # fmt: skip
    assert process.stdout
    assert "rank" in process.stdout.readline()
    return process


def test_ctrl_c_stops_everything_and_exits_130(tmp_path):
    process = start(tmp_path / "run", "-np", "2", str(JOB), "*:children")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130, err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("stopped", 130)


def test_the_grace_is_the_same_when_the_engine_stops_a_rank(tmp_path):
    """Slurm stops a rank this way at its time limit."""
    process = start(tmp_path / "run", "-np", "1", "--grace", "1s", str(JOB), "*:ignore")
    script = a_script()
    started = time.monotonic()
    os.kill(psutil.Process(script).ppid(), signal.SIGTERM)
    psutil.Process(script).wait(timeout=15)
    assert 1 <= time.monotonic() - started < 4
    process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGKILL


def test_daemons_that_are_starting_are_waited_for_when_the_launcher_is_killed(tmp_path, monkeypatch):
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


def test_a_terminal_that_closes_sends_two_hangups_and_the_grace_holds(tmp_path):
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
        process = start(tmp_path / "run", "-np", "1", str(script))
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.01)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 129 and "saved" in out


def test_ctrl_c_twice_does_not_wait_for_the_grace(tmp_path):
    process = start(tmp_path / "run", "-np", "2", "--grace", "60s", str(JOB), "*:ignore")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=70)
    assert process.returncode == 130
    assert time.monotonic() - begun < 20


def test_ctrl_c_after_a_failure_hides_it_not(tmp_path):
    process = start(tmp_path / "run", "-np", "2", "--grace", "60s", str(JOB), "0:ignore", "1:raise-then")
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
def test_nothing_survives_a_killed_launcher_or_engine(tmp_path, victim):
    process = start(tmp_path / "run", "-np", "2", str(JOB), "*:children")
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
    while (left := orphans() or list(our_processes().values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_time_limit(launch):
    run = launch("-np", "2", "--timeout", "1s", JOB, "*:sleep=60", timeout=50)
    assert run.code == 124, run
    assert run.result["status"] == "stopped"
    assert "time limit" in run.err


def test_long_output_arrives_whole_and_in_order(launch):
    run = launch("-np", "4", JOB, "*:lines=5000")
    assert run.code == 0, run
    for rank in range(4):
        expected = [f"line {n} of rank {rank} " + "x" * 40 for n in range(5000)] + [f"rank {rank} done"]
        assert (run.run_dir / f"ranks/{rank}.out").read_text().splitlines() == expected
        tag = f"[{rank}@localhost] "
        assert [line[len(tag) :] for line in run.out.splitlines() if line.startswith(tag)] == expected


def test_only_one_rank_is_shown_and_all_are_kept(launch):
    run = launch("-np", "2", "--show-rank", "1", JOB)
    assert run.out == "[1@localhost] rank 1 done\n"
    assert (run.run_dir / "ranks/0.out").read_text() == "rank 0 done\n"


def test_without_hosts_and_gpus_one_rank_runs_and_a_line_says_so(launch):
    run = launch(JOB)
    assert run.code == 0, run
    assert run.result["world_size"] == 1
    assert "this machine, 1 rank (-np N for more" in run.err


def test_a_run_directory_can_be_used_again(launch, tmp_path):
    for orders in (["0:raise"], ["0:signal=9"]):
        subprocess.run([str(LAUNCH), "--run-dir", str(tmp_path / "same"), str(JOB), *orders], capture_output=True)
    result = json.loads((tmp_path / "same/result.json").read_text())
    assert result["first_failure"]["traceback"] == ""
    assert result["first_failure"]["message"] == "killed by SIGKILL"


@pytest.mark.parametrize("mark", ["plan.json", "result.json", "preflight.json", "attempt0/plan.json"])
def test_a_folder_that_no_run_has_made_keeps_its_files(tmp_path, mark):
    """A new run deletes the files of an earlier run, killed or not, and no other files."""
    own = ["metrics.jsonl", "ranks/0.out", "attempt0/result.json"]
    for name in own:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"accuracy": 0.9}')
    (tmp_path / mark).write_text('{"accuracy": 0.9}')
    with pytest.raises(ConfigError, match=r"holds \S+, which is of no run; remove it, or name another folder"):
        prepare_run_dir(tmp_path)
    assert all((tmp_path / name).read_text() for name in own)
    (tmp_path / mark).write_text('{"job": "4f", "world_size": 1, "inventories": {}}')
    assert prepare_run_dir(tmp_path) is True
    assert not any((tmp_path / name).exists() for name in own)
    assert prepare_run_dir(tmp_path) is False


def test_launches_of_the_same_second_have_run_directories_of_their_own(tmp_path):
    command = [str(LAUNCH), "-q", "--json", str(JOB)]
    running = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(3)
    ]
    assert [process.communicate(timeout=50) and process.returncode for process in running] == [0, 0, 0]
    results = [json.loads(path.read_text()) for path in tmp_path.glob("distrib-runs/*/result.json")]
    assert [result["status"] for result in results] == ["succeeded"] * 3


def test_a_run_directory_in_use_is_refused(tmp_path):
    process = start(tmp_path / "run", "-np", "1", str(JOB), "*:sleep=60")
    other = subprocess.run([str(LAUNCH), "--run-dir", str(tmp_path / "run"), str(JOB)], capture_output=True, text=True)
    assert other.returncode == 2
    assert f"another job is running in {tmp_path / 'run'}" in other.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode == 130


def test_nohup_is_respected(tmp_path):
    process = subprocess.Popen(
        ["nohup", str(LAUNCH), "--run-dir", str(tmp_path / "run"), str(JOB), "*:sleep=3"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout
    assert "rank" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=50)
    assert process.returncode == 0


def test_without_home_and_path(tmp_path):
    done = subprocess.run([str(LAUNCH), str(JOB)], env={}, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("words", "code"), [(["--dry-run"], 0), (["-q", "--json"], 0), (["-q", "--json"], 5)])
def test_nobody_need_read_what_is_printed(tmp_path, words, code):
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
    assert "logs are not complete, the job continues" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_python_module_of_that_name(launch, tmp_path):
    script = tmp_path / "imports.py"
    script.write_text("import no_such_module_at_all\n")
    run = launch("-np", "2", script)
    assert run.code == 1
    assert "No module named 'no_such_module_at_all' (install no_such_module_at_all for " in run.err
    assert str(LAUNCH.parent / "python") in run.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-H", "missing.txt", "JOB"], "missing.txt: no such hostfile"),
        (["-H", "empty.txt", "JOB"], "empty.txt: no hosts in the file"),
        (["-H", "zero.txt", "JOB"], "zero.txt:2:9: slots must be"),
        (["-H", "negative.txt", "JOB"], "negative.txt:1:9: slots must be"),
        (["-H", "a:2,b:2", "-np", "5", "JOB"], "5 ranks requested with -np, but -H has 4 slot(s) on 2 host(s)"),
        (["-np", "0", "JOB"], "'0' is not a valid number of ranks"),
        (["nowhere.py"], "nowhere.py: no such script"),
        (["-np", "2", "."], "is a directory"),
        (["/bin/true"], "/bin/true: it is a program, and distrib-launch starts Python scripts"),
        (
            [LAUNCH.with_name("python"), "JOB"],
            "and distrib-launch starts Python scripts; leave out python: every host starts its own",
        ),
        (["-x", "NOT_SET_ANYWHERE", "JOB"], "-x NOT_SET_ANYWHERE: this variable is not set here"),
        (["-x", "RANK=7", "JOB"], "-x RANK: the launcher sets this variable itself"),
        (["-x", "LATIN", "JOB"], "LATIN=/data/m\\udcfcller: not UTF-8 text"),
        (["--timeout", "soon", "JOB"], "'soon' is not a valid time"),
        (["--mpirun", "/nowhere/mpirun", "JOB"], "--mpirun /nowhere/mpirun: no such command"),
        (["--topology", "bad.yaml", "JOB"], "bad.yaml"),
        (["--no-such-option", "JOB"], "--no-such-option"),
        (["--nproc_per_node=2", "JOB"], "-np N starts N ranks on this machine"),
        (["--nnodes", "2", "JOB"], "-H FILE or -H HOST,HOST names the hosts"),
        (["--ssh-command", "ssh '", "JOB"], "--ssh-command ssh ': no closing quotation"),
        (["--ssh-command", "nowhere/ssh -v", "JOB"], "--ssh-command nowhere/ssh: there is no such command"),
        (["--dry-run", "--interface", "10.0.0.0/33", "JOB"], "--interface 10.0.0.0/33: not a valid network"),
        (["-np", "2", "--show-rank", "2", "JOB"], "--show-rank 2: there are ranks 0 to 1"),
        (["x" * 300], "no such script"),
        (["--sync", "", "JOB"], "--sync: it is empty; is a variable not set?"),
        (["--image", "i", "JOB"], "--image applies to pods only; add --engine kubernetes, or leave out --image"),
        (["--pod-resource", "rdma/hca=1", "JOB"], "--pod-resource applies to pods only"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_with_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("# nobody\n\n")
    (tmp_path / "zero.txt").write_text("a slots=2\nb slots=0\n")
    (tmp_path / "negative.txt").write_text("a slots=-1\n")
    (tmp_path / "bad.yaml").write_text("nodes: [{hosts: a, gpus: {count: -2}}]\n")
    latin = os.fsdecode(b"/data/m\xfcller")
    done = call(cli.main, *(JOB if word == "JOB" else word for word in arguments), cwd=tmp_path, LATIN=latin)
    assert done.returncode == 2, done
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("distrib-launch: error: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "distrib-runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["-np", "99999999999999", "JOB"],
            "'99999999999999' is not a valid number of ranks; give 1 or more, of at most 9 digits",
        ),
        (["-np", "9" * 5000, "JOB"], "is not a valid number of ranks"),
        (["--hostfile", "n1", "JOB"], "--hostfile; -H FILE or -H HOST,HOST names the hosts"),
        (["--num_gpus=8", "JOB"], "; -np N starts N ranks on this machine"),
        (["--num_nodes", "2", "JOB"], "; -H FILE or -H HOST,HOST names the hosts"),
        (["--rdzv_backend=c10d", "JOB"], "; leave it out"),
        (["--standalone", "JOB"], "; leave it out"),
        (["hosts.txt", "JOB"], "hosts.txt is not a script; hosts are named with -H hosts.txt"),
        (["-np", "2", "--include", "localhost", "JOB"], "; -H localhost:N gives this machine N slots"),
        (["--oversubscribe", "-np", "100001", "JOB"], "-np 100001: more than the 100000 ranks that a host may have"),
        *(
            ([option, "", "JOB"], f"{option}: it is empty; is a variable not set?")
            for option in ("--profile", "--run-dir", "--topology", "--interface", "--mpirun", "--hosts")
        ),
        (["--manifest", "", "JOB"], "--manifest: it is empty"),
        (["--manifest", "m.yaml", "JOB"], "--manifest applies to pods only"),
        (["--runtime-class", "nvidia", "JOB"], "--runtime-class applies to pods only"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_else(tmp_path, monkeypatch, capsys, arguments, words):
    """The error is the command's. Each case runs in this process to save a start."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(JOB) if word == "JOB" else word for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not os.listdir(tmp_path)


def test_a_script_that_may_not_be_read_here_is_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(JOB))  # root may read any file
    assert cli.main(["--run-dir", str(tmp_path / "run"), str(JOB)]) == 2
    assert f"{JOB}: cannot read it: no permission; chmod a+r {JOB}" in capsys.readouterr().err


def test_a_working_directory_that_was_removed_is_told_of(tmp_path):
    for command in (f"{LAUNCH} {JOB}", f"{TOPO} show"):
        script = f"mkdir -p gone && cd gone && rmdir ../gone && {command}"
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2, done
        assert "error: the working directory" in done.stderr


def test_a_profile_that_could_not_be_written_is_refused_at_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write any file
    assert cli.main(["--profile", str(tmp_path / "p.json"), str(JOB)]) == 2
    assert "p.json: cannot write it: no permission; name a file to write" in capsys.readouterr().err


def dry_run(tmp_path: Path, *arguments: str) -> dict:
    done = call(cli.main, "--dry-run", "--json", *arguments, JOB, cwd=tmp_path)
    assert done.returncode == 0, done
    assert os.listdir(tmp_path) == sorted(p.name for p in tmp_path.iterdir() if p.suffix in (".txt", ".yaml"))
    return json.loads(done.stdout)


def test_dry_run_shows_every_rank_and_starts_nothing(tmp_path):
    plan = dry_run(tmp_path, "-H", "a:2,b:3")
    assert (plan["world_size"], plan["engine"]) == (5, "mpirun")
    assert [(r["rank"], r["host"], r["local_rank"], r["role"]) for r in plan["ranks"]] == [
        (0, "a", 0, "worker"), (1, "a", 1, "worker"), (2, "b", 0, "worker"), (3, "b", 1, "worker"), (4, "b", 2, "worker"),
    ]  # fmt: skip
    assert plan["ranks"][3]["environment"]["GROUP_RANK"] == "1"
    assert plan["command"][0].endswith("/mpirun")
    assert Path(plan["script"][0]).parent == LAUNCH.parent
    assert plan["script"][0] in plan["command"]


def test_modules_that_other_hosts_do_not_find_are_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    note = "PYTHONPATH is set here but not for ranks on other hosts; -x PYTHONPATH forwards it"
    assert note in dry_run(tmp_path, "-H", "a:2,b:3")["notes"]
    assert note not in dry_run(tmp_path, "-H", "a:2,b:3", "-x", "PYTHONPATH")["notes"]
    assert note not in dry_run(tmp_path, "-H", "localhost:2")["notes"]


def test_gpus_that_are_chosen_on_this_machine_alone_are_noted(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    told = lambda *words: "CUDA_VISIBLE_DEVICES is set here" in str(dry_run(tmp_path, "-H", *words)["notes"])  # noqa: E731
    assert told("a:2,b:3") and not told("a:2,b:3", "-x", "CUDA_VISIBLE_DEVICES") and not told("localhost:2")


def test_folders_go_by_the_name_that_the_shell_has_for_them(tmp_path):
    """On another host the link may lead elsewhere, so the plan keeps the shell's name."""
    (tmp_path / "export/home").mkdir(parents=True)
    (tmp_path / "home").symlink_to("export/home")
    (tmp_path / "home/train.py").write_text("")
    home = tmp_path / "home"
    command = [str(LAUNCH), "--dry-run", "--json", "-np", "1", "--sync", ".", "train.py"]
    for called, physical in ((home, home), (tmp_path, home.resolve()), ("home", home.resolve())):
        done = subprocess.run(command, cwd=home, env={**os.environ, "PWD": str(called)}, capture_output=True, text=True)
        plan = json.loads(done.stdout)
        assert (plan["directory"], plan["sync"]) == (str(physical), str(physical)), called
        assert plan["script"][-1] == f"{physical}/train.py" and plan["run_dir"].startswith(f"{physical}/distrib-runs/")


def test_fewer_ranks_than_slots_fill_the_hosts_in_order(tmp_path):
    plan = dry_run(tmp_path, "-H", "a:2,b:2,c:2", "-np", "3")
    assert [r["host"] for r in plan["ranks"]] == ["a", "a", "b"]
    assert any("leaves 1 host(s) idle" in note for note in plan["notes"])


def test_a_host_without_a_count_gets_its_gpus_from_the_topology(tmp_path):
    (tmp_path / "lab.txt").write_text("gpu1\ngpu2\nother\n")
    (tmp_path / "lab.yaml").write_text("nodes:\n  - hosts: gpu[1-2]\n    gpus: {kind: A100, count: 4}\n")
    plan = dry_run(tmp_path, "-H", "lab.txt")
    assert [r["device"] for r in plan["ranks"] if r["host"] == "gpu2"] == [f"cuda:{i}" for i in range(4)]
    assert [r["device"] for r in plan["ranks"] if r["host"] == "other"] == ["auto"]
    assert any("one per GPU of the topology, 4" in note for note in plan["notes"])
    assert any(note.startswith("other: no slots given; 1 rank each") for note in plan["notes"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["s.py", "--", "--x"], ["--", "--x"]),
        (["-np", "2", "--", "s.py", "--", "--x", "--"], ["--", "--x", "--"]),
        (["s.py"], []),
        (["s.py", "-r", "last.pt", "-no", "-ma"], ["-r", "last.pt", "-no", "-ma"]),
        (["s.py", "-np", "3", "a", "--", "b"], ["-np", "3", "a", "--", "b"]),
        (["-q", "-m", "s.py", "--", "--x"], ["--", "--x"]),
    ],
)
def test_arguments_are_passed_on_untouched(words, told):
    options = cli.parser().parse_args(words)
    assert (options.script, options.arguments) == ("s.py", told)


@pytest.mark.parametrize(
    ("command", "words", "included"),
    [
        ("ssh -F my.conf", ["ssh"], "my.conf"),
        ("ssh -i key -4Fmy.conf -v", ["ssh", "-i", "key", "-4", "-v"], "my.conf"),
        ("ssh -F one -Fmy.conf", ["ssh"], "my.conf"),
        ("ssh -o ProxyCommand=none -i -F", ["ssh", "-o", "ProxyCommand=none", "-i", "-F"], None),
        ("ssh -F none", ["ssh"], ""),
        ("sshpass -e ssh -F my.conf", ["sshpass", "-e", "ssh"], "my.conf"),
    ],
)
def test_ssh_reads_the_users_configuration_beside_ports_and_users_of_hosts(
    tmp_path, tmp_path_factory, monkeypatch, command, words, included
):
    sshpass = tmp_path_factory.mktemp("bin") / "sshpass"
    sshpass.write_text("#!/bin/sh\n")
    sshpass.chmod(0o755)
    monkeypatch.setenv("PATH", str(sshpass.parent), prepend=os.pathsep)
    (tmp_path / "lab.txt").write_text("a slots=1 port=2222\nb slots=1\n")
    plan = msgspec.convert(dry_run(tmp_path, "-H", "lab.txt", "--ssh-command", command), LaunchPlan)
    assert list(plan.ssh[: len(words)]) == words and plan.ssh[len(words)] == "-o"
    assert plan.ssh[-2:] == ("-F", f"{plan.run_dir}/ssh_config") and plan.ssh.count("-F") == 1 + words.count("-F")
    ssh.write_ssh_config(tmp_path, plan)
    includes = [
        line.split(maxsplit=1)[1] for line in (tmp_path / "ssh_config").read_text().splitlines() if "Include" in line
    ]
    default = ["~/.ssh/config", "/etc/ssh/ssh_config"]
    assert includes == (default if included is None else [f'"{tmp_path}/{included}"'] if included else [])


def test_ranks_beyond_the_slots_up_to_max_slots(tmp_path, launch):
    (tmp_path / "lab.txt").write_text("a slots=2 max_slots=4\nb slots=1\nc slots=1 max_slots=8\n")
    count = lambda *words: [rank["host"] for rank in dry_run(tmp_path, "-H", "lab.txt", *words)["ranks"]]  # noqa: E731
    assert count() == ["a", "a", "b", "c"]
    assert count("-np", "7") == ["a"] * 4 + ["b"] + ["c"] * 2
    assert count("-np", "13") == ["a"] * 4 + ["b"] + ["c"] * 8
    run = launch("-H", tmp_path / "lab.txt", "-np", "14", "--dry-run", JOB)
    assert run.code == 2 and "has 4 slot(s) on 3 host(s), 13 with max_slots;" in run.err, run


@pytest.mark.parametrize(
    ("slurm", "words", "ranks"),
    [
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_GPUS_PER_NODE": "8"}, (), [8, 8]),
        ({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2", "SLURM_GPUS_PER_NODE": "8"}, ("-np", "2", "--spread"), [1, 1]),
        ({"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4", "SLURM_GPUS_PER_NODE": "8"}, ("-np", "16"), [8, 8]),
        ({"SLURM_TASKS_PER_NODE": "128(x2)", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, (), [1, 1]),
        ({"SLURM_TASKS_PER_NODE": "128(x2)", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}, ("-np", "6"), [3, 3]),
    ],
)  # fmt: skip
def test_ranks_in_an_allocation_of_slurm(tmp_path, monkeypatch, slurm, words, ranks):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **slurm}.items():
        monkeypatch.setenv(name, value)
    plan = dry_run(tmp_path, "--engine", "mpirun", *words)
    assert [sum(rank["host"] == host for rank in plan["ranks"]) for host in ("n1", "n2")] == ranks
    unasked = "n1, n2: no slots given; 1 rank each (--ntasks-per-node=N or -np N for more)"
    assert (unasked in plan["notes"]) == (not words and "SLURM_NTASKS" not in slurm)


def test_open_mpi_takes_no_slots_from_slurm(launch):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_NODELIST": os.uname().nodename,
        "SLURM_TASKS_PER_NODE": "1",
    }
    run = launch("-H", "localhost:2", JOB, env=slurm)
    assert run.code == 0 and run.result["world_size"] == 2, run


def test_a_thousand_hosts_are_planned_at_once(tmp_path):
    (tmp_path / "big.txt").write_text("".join(f"node{i:04d} slots=8\n" for i in range(1000)))
    assert dry_run(tmp_path, "-H", "big.txt")["world_size"] == 8000


@pytest.mark.parametrize(
    ("script", "name"), [("train.py", "train"), ("pkg.sub.tool", "pkg.sub.tool"), ("a/b c.v2.py", "b-c.v2")]
)
def test_run_directories_are_named_after_what_runs(script, name):
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{re.escape(name)}", choose_run_dir(None, script).name)


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
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, save)
print("rank", os.environ["RANK"], "is ready", flush=True)
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


def test_at_the_time_limit_the_script_has_a_chance_to_save(launch, tmp_path):
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    for limit in ("5s", "30s"):  # the limit counts from the start of the launcher
        run = launch("-np", "2", "--timeout", limit, script, timeout=200)
        if run.out.count("is ready") == 2:
            break
    assert run.code == 124, run
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_sigusr1_reaches_every_rank_and_the_job_goes_on(tmp_path):
    (tmp_path / "saver.py").write_text(SAVER)
    process = start(tmp_path / "run", "-np", "2", "saver.py")
    process.stdout.readline()  # the line of the other rank
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not all((tmp_path / f"saved-{r}").exists() for r in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all((tmp_path / f"saved-{r}").exists() for r in range(2))
    assert process.poll() is None
    (tmp_path / "enough").touch()
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert out.count("saving SIGUSR1") in (1, 2), out  # one line if both print at the same time


def test_so_does_a_signal_of_slurm_to_the_processes_that_it_started(tmp_path):
    (tmp_path / "saver.py").write_text(SAVER)
    process = start(tmp_path / "run", "-np", "1", "saver.py")
    (job,) = psutil.Process(process.pid).children()
    (task,) = [one for one in job.children(recursive=True) if "distrib_launch.rank_agent" in one.cmdline()]
    task.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not (tmp_path / "saved-0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "enough").touch()
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0 and "saving SIGUSR1" in out, err


def test_a_list_of_hosts_may_be_longer_than_a_file_name():
    names = [f"ip-10-0-12-{n}.us-west-2.compute.internal" for n in range(1, 201)]
    assert [host.name for host in read_hosts(",".join(f"{name}:8" for name in names)).hosts] == names


def test_this_machine_may_be_named_by_a_loopback_address(launch):
    run = launch("-H", "127.0.0.1:2", SCRIPTS / "job.py")
    assert run.code == 0, run


def test_fewer_ranks_than_planned_are_refused(launch, tmp_path):
    """A job never runs silently on fewer ranks than planned. Here a runtime starts two of four."""
    folder = tmp_path / "site/bin"
    folder.mkdir(parents=True)
    mpirun = folder / "mpirun"
    mpirun.write_text(
        "#!/usr/bin/env python3\nimport os, sys\nwords = sys.argv[1:]\nwords[words.index('-np') + 1] = '2'\n"
        f"words[words.index('--prefix') + 1] = {str(LAUNCH.parent.parent)!r}\n"
        f"os.execv({str(LAUNCH.parent / 'mpirun')!r}, ['mpirun', *words])\n"
    )
    mpirun.chmod(0o755)
    run = launch("-np", "4", "--mpirun", mpirun, JOB)
    assert run.code == 1, run
    assert "the engine started 2 ranks, but the plan has 4: the job is not started" in run.err
    assert "done" not in run.out


def test_an_engine_that_starts_nothing_is_reported_with_its_own_words(launch, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho no licence today >&2\nexit 0\n")
    mpirun.chmod(0o755)
    run = launch("-np", "2", "--mpirun", mpirun, JOB)
    assert run.code == 1, run
    assert "the job did not start" in run.err
    assert "no licence today" in run.err


def test_a_start_that_fails_in_the_listener_of_pmix_is_tried_once_more(launch, tmp_path):
    mpirun, failed = tmp_path / "mpirun", tmp_path / "failed"
    real = LAUNCH.parent / "mpirun"
    mpirun.write_text(
        f'#!/bin/sh\n[ -e {failed} ] && shift 2 && exec {real} --prefix {real.parent.parent} "$@"\n'  # another --prefix
        f'touch {failed}\nprintf "The PMIx server\'s listener thread failed to start. We cannot\\ncontinue.\\n" >&2\nexit 1\n'
    )
    mpirun.chmod(0o755)
    run = launch("-np", "2", "--mpirun", mpirun, JOB)
    assert run.code == 0, run
    assert run.err.count("trying once more") == 1


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        ("[mpiexec@n1] match_arg (hydra/lib/utils/args.c:166): unrecognized argument prefix", "MPICH's"),  # MPICH 5.0.2
        ("mpirun: Error: unknown option \"--prtemca\"\nType 'mpirun --help' for usage.", "older Open MPI"),  # 4.1.4
    ],
)
def test_another_mpi_is_told_from_open_mpi_5(launch, tmp_path, words, whose):
    other = tmp_path / "mpirun"
    other.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\nexit 1\n")
    other.chmod(0o755)
    run = launch("-np", "2", "--mpirun", other, JOB)
    assert run.code == 1
    assert whose in run.err
    assert "not that of Open MPI 5" in run.err
    assert "leave --mpirun out" in run.err


def test_json_tells_of_a_launch_that_never_began(tmp_path):
    command = [str(LAUNCH), "--json", "-H", "missing.txt", str(JOB)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"], told["exit_code"]) == (2, "failed", 2)
    assert "missing.txt: no such hostfile" in told["error"]


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ([LAUNCH, "--json", "--run-dir", "run"], signal.SIGINT), ([LAUNCH, "--run-dir", "run", "--sync", "."], signal.SIGTERM),
        ([TOPO, "check"], signal.SIGTERM), ([TOPO, "check"], signal.SIGHUP),
    ],
)  # fmt: skip
def test_who_stops_a_command_while_hosts_are_spoken_with_finds_all_in_order(tmp_path, command, number):
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
        assert json.loads(out) == {"status": "stopped", "exit_code": 130, "error": "interrupted"}


def test_json_tells_of_options_that_cannot_be_read(capsys):
    assert cli.main(["--json", "--timout", "3", str(JOB)]) == 2
    assert "did you mean --timeout?" in json.loads(capsys.readouterr().out)["error"]


def test_a_job_keeps_its_exit_code_where_its_result_cannot_be_printed(tmp_path):
    script = tmp_path / "exits.py"
    script.write_text("raise SystemExit(7)\n")
    command = [LAUNCH, "--json", "-np", "1", "--run-dir", tmp_path / "run", script]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(list(map(str, command)), stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode == 7 and "standard output: No space left on device" in done.stderr, done


@pytest.mark.parametrize(
    "first", ["#!/usr/bin/env -S uv run --script", "#!/bin/sh\n'''exec' /a/long/path \"$0\" \"$@\"\n' '''"]
)
def test_python_is_known_whatever_starts_it_elsewhere(tmp_path, capsys, first):
    script = tmp_path / "train.py"
    script.write_text(f"{first}\nprint('\\d')\n")  # newer Pythons warn of this escape
    assert cli.main(["-np", "1", "--dry-run", str(script)]) == 0, capsys.readouterr().err


def test_hosts_with_the_same_ranks_share_a_line_of_the_plan(tmp_path, capsys):
    script = tmp_path / "a.py"
    script.write_text("")
    assert cli.main(["-H", "n[1-100]:8,m1:4", "--dry-run", str(script)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1].startswith("  n[1-100]: ranks 0 to 799, 8 on each, device ")
    assert told[2].startswith("  m1: ranks 800 to 803, device ")


def test_a_rank_may_open_as_many_files_as_are_allowed(tmp_path):
    """A thousand ranks need a thousand connections in each rank. The usual soft limit is 1024 files."""
    script = tmp_path / "limits.py"
    script.write_text("import resource\nprint('files', *resource.getrlimit(resource.RLIMIT_NOFILE))\n")
    command = f"ulimit -Sn 900 && exec {LAUNCH} -np 1 --run-dir {tmp_path / 'run'} {script}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done
    soft, hard = map(int, (tmp_path / "run/ranks/0.out").read_text().split()[1:])
    assert soft == min(65536, hard)
