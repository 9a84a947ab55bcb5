"""`distrib-launch` across hosts of the virtual cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import LAUNCH, ROOT, SCRIPTS

pytestmark = pytest.mark.cluster
JOB = SCRIPTS / "job.py"


def test_ranks_run_where_the_plan_says_with_words_and_paths_unchanged(make_cluster, launch, tmp_path):
    cluster = make_cluster(3, slots=2)
    folder = tmp_path / "a folder, $HOME 'quoted' \"twice\"\nand broken – ü"
    folder.mkdir()
    script = folder / "my $job; ls.py"
    script.write_text(JOB.read_text())
    words = [
        "*:environment", "x:a b", "x:'", 'x:"', "x:$HOME `id` $(id)", "x:new\nline", "x:ü–日本", "x:;&|<>*?~#!\\", "x:",
    ]  # fmt: skip
    value = "a b'c\"d $HOME `id`\nü\\"
    run = launch("-H", cluster.hostfile, "-x", f"ODD={value}", script, *words, cluster=cluster, cwd=folder)
    assert run.code == 0, run
    result = run.result
    assert result["hosts"] == ["n1", "n2", "n3"]
    assert [(r["rank"], r["host"], r["local_rank"], r["exit_code"]) for r in result["ranks"]] == [
        (0, "n1", 0, 0), (1, "n1", 1, 0), (2, "n2", 0, 0), (3, "n2", 1, 0), (4, "n3", 0, 0), (5, "n3", 1, 0),
    ]  # fmt: skip
    for rank in range(6):
        told = json.loads((run.run_dir / f"ranks/{rank}.out").read_text().splitlines()[0])
        host = rank // 2 + 1
        assert told["env"]["DISTRIB_ADDRESS"] == f"198.18.0.{host}"
        assert told["env"]["MASTER_ADDR"] == "198.18.0.1"
        assert told["argv"] == [str(script), *words]
        assert told["cwd"] == str(folder)
        assert told["env"]["ODD"] == value
    assert cluster.left_over(within_seconds=6) == {}


def test_hosts_in_any_order_with_unequal_slots_need_not_have_the_launcher(make_cluster, launch):
    cluster = make_cluster(3)
    run = launch("-H", "n3:1,n2:2", SCRIPTS / "mpi_ring.py", cluster=cluster)
    assert run.code == 0, run
    seen = [(run.run_dir / f"ranks/{rank}.out").read_text() for rank in range(3)]
    assert seen == [f"rank {rank} of 3 on {host}: 3\n" for rank, host in enumerate(["n3", "n2", "n2"])]
    assert cluster.left_over(within_seconds=6) == {}


def test_hosts_that_have_ipv6_alone(make_cluster, launch):
    cluster = make_cluster(2)
    names = "".join(f"fd00:18::{number} {host}\n" for number, host in enumerate(cluster.hosts, 1))
    for number, host in enumerate(cluster.hosts, 1):
        space = cluster.namespace(host)
        for words in (f"-6 addr add fd00:18::{number}/64 dev eth0 nodad", "-4 addr flush dev eth0"):
            subprocess.run(["ip", "-n", space, *words.split()], check=True)
        Path(f"/etc/netns/{space}/hosts").write_text(f"::1 localhost\n{names}")
    run = launch("-H", cluster.hostfile, JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    env = json.loads((run.run_dir / "ranks/1.out").read_text().splitlines()[0])["env"]
    assert (env["DISTRIB_ADDRESS"], env["MASTER_ADDR"]) == ("fd00:18::2", "fd00:18::1")


def test_a_rank_that_raises_ends_the_job_and_is_named(make_cluster, launch):
    cluster = make_cluster(2, slots=2)
    run = launch("-H", cluster.hostfile, JOB, "--mpi", "2:raise", "*:children", cluster=cluster, timeout=60)
    assert run.code == 1, run
    failure = run.result["first_failure"]
    assert (failure["rank"], failure["host"]) == (2, "n2")
    assert "RuntimeError: boom in rank 2" in failure["traceback"]
    assert "rank 2 on n2 failed first: RuntimeError: boom in rank 2" in run.err
    assert run.seconds < 50  # ranks that do not fail sleep for 60 s
    assert cluster.left_over(within_seconds=6) == {}


def test_a_lost_host_is_named_and_nothing_is_left(make_cluster, launch, tmp_path):
    cluster = make_cluster(3)
    process = cluster.popen("n1", launch_command(tmp_path, cluster, "--host-timeout", "4s", JOB, "--mpi", "*:sleep=60"))
    wait_for_line(process, "sleeps")
    lost = time.time()
    cluster.lose("n3")
    _, err = process.communicate(timeout=50)
    assert process.returncode == 1, err
    assert err.index("host n3 was lost") < err.index("stopping") < err.index("error: host n3"), err
    failure = json.loads((tmp_path / "run/result.json").read_text())["first_failure"]
    assert failure["host"] == "n3"
    assert "host n3 was lost" in failure["message"] and failure["code"] == "host-lost"
    assert (
        3 < failure["time"] - lost < 7.5
    )  # 4.7 on an idle machine: the timeout and a probe of 0.6 s; twice the timeout is 8.6
    assert cluster.left_over(within_seconds=10) == {}


@pytest.mark.prioritized
def test_a_short_cut_does_not_end_the_job(make_cluster, tmp_path):
    cluster = make_cluster(3)
    process = cluster.popen("n1", launch_command(tmp_path, cluster, JOB, "--mpi", "*:sleep=6"))
    wait_for_line(process, "sleeps")
    longest = 0.0
    for _ in range(2):
        begun = time.monotonic()
        cluster.cut("n2")
        time.sleep(0.8)
        cluster.restore("n2")
        longest = max(longest, time.monotonic() - begun)
        time.sleep(1)
    if longest > 1.6:  # before the result is known
        process.terminate()
        process.communicate(timeout=50)
        pytest.skip(f"this machine stood still, and the cut lasted {longest:.1f} s")
    _, err = process.communicate(timeout=50)
    assert process.returncode == 0, err


def test_a_host_that_is_cut_off_ends_its_own_ranks(make_cluster, tmp_path):
    cluster = make_cluster(3)
    process = cluster.popen("n1", launch_command(tmp_path, cluster, JOB, "--mpi", "*:children"))
    wait_for_line(process, "has children")
    engines_own = [Path(f"/tmp/prted.{pid}") for pid, command in cluster.processes("n2").items() if "/prted" in command]
    assert any(folder.exists() for folder in engines_own)
    cluster.cut("n2")
    _, err = process.communicate(timeout=50)
    assert process.returncode == 1, err
    assert json.loads((tmp_path / "run/result.json").read_text())["first_failure"]["host"] == "n2"
    # sshd's own session process waits for the link that stays down. It is not part of the job.
    assert no_job_process_left(cluster, within_seconds=10)
    assert [path for folder in engines_own if folder.exists() for path in (folder, *folder.rglob("*"))] == []


@pytest.mark.parametrize("victim", ["distrib-launch", "prterun"])
def test_nothing_is_left_on_any_host_when_launcher_or_engine_is_killed(make_cluster, tmp_path, victim):
    cluster = make_cluster(2)
    process = cluster.popen("n1", launch_command(tmp_path, cluster, JOB, "--mpi", "*:children"))
    wait_for_line(process, "has children")
    pids = [pid for pid, command in cluster.processes("n1").items() if f"/{victim}" in command.partition(" -H")[0]]
    assert pids and (process.pid in pids) == (victim == "distrib-launch")
    for pid in [process.pid] if victim == "distrib-launch" else pids:  # its guard has the same name
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=50)
    assert process.returncode != 0
    assert cluster.left_over(within_seconds=10) == {}


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize("where", [["n1", "n2"], ["n2"]], ids=["everywhere", "there"])
def test_a_login_shell_that_is_no_bourne_shell(make_cluster, launch, tmp_path, where):
    cluster = make_cluster(2)
    users = Path("/etc/passwd").read_text().splitlines()
    (tmp_path / "passwd").write_text(
        "\n".join(
            f"{user.rpartition(':')[0]}:{shutil.which('fish')}" if user.startswith("root:") else user for user in users
        )
        + "\n"
    )
    for host in where:
        cluster.run(host, ["mount", "--bind", tmp_path / "passwd", "/etc/passwd"], check=True)
    assert "fish" in cluster.run("n1", ["ssh", "n2", "status fish-path"], check=True).stdout
    run = launch("-H", cluster.hostfile, JOB, "--mpi", cluster=cluster)
    assert run.code == 0, run


def test_a_login_shell_reads_no_command_but_that_of_sh(make_cluster, launch, tmp_path):
    """As in tcsh, `export` fails; some settings of bash, such as `set -u`, have similar effects."""
    cluster = make_cluster(2)
    shell = tmp_path / "tcsh"
    shell.write_text(
        '#!/bin/sh\ncase "$2" in "exec /bin/sh -c "*) eval "$2";; *) echo "export: Command not found." >&2; exit 1;; esac\n'
    )
    shell.chmod(0o755)
    users = Path("/etc/passwd").read_text().splitlines()
    changed = [f"{user.rpartition(':')[0]}:{shell}" if user.startswith("root:") else user for user in users]
    (tmp_path / "passwd").write_text("\n".join(changed) + "\n")
    cluster.run("n2", ["mount", "--bind", tmp_path / "passwd", "/etc/passwd"], check=True)
    for words in ([], ["--no-preflight"]):
        run = launch(*words, "-H", cluster.hostfile, JOB, "--mpi", cluster=cluster)
        assert run.code == 0, run


def test_a_host_whose_interpreter_does_not_start_is_refused_with_the_variable(make_cluster, launch):
    cluster = make_cluster(2, login_environment={"PYTHONHOME": "/nope"})
    run = launch("-H", cluster.hostfile, JOB, cluster=cluster)
    assert run.code == 3 and "n2: python: " in run.err and "(PYTHONHOME set there)" in run.err, run


def test_the_host_where_ranks_could_not_start_is_named_and_not_those_that_were_taken_along(
    make_cluster, launch, tmp_path
):
    cluster = make_cluster(3)
    cluster.run("n2", ["mount", "--bind", tmp_path, ROOT / "distrib"], check=True)  # a broken installation
    for words in ([], ["--no-preflight"]):
        run = launch(*words, "-H", cluster.hostfile, JOB, cluster=cluster)
        assert run.code == 3, run
        assert "error: n2: distrib: " in run.err and "n1: " not in run.err and "rank 0" not in run.err, run
        assert run.result["status"] == "failed" and run.result["first_failure"]["rank"] is None


def test_a_host_with_two_names_is_refused(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", f"{cluster.address('n2')}:1,n2:1", JOB, cluster=cluster)
    assert run.code == 3, run
    assert f"n2: ssh: it is the same machine as {cluster.address('n2')}" in run.err


def test_a_daemon_of_the_engine_that_dies_is_blamed_on_its_host(make_cluster, tmp_path):
    cluster = make_cluster(3)
    process = cluster.popen("n1", launch_command(tmp_path, cluster, JOB, "--mpi", "*:sleep=60"))
    wait_for_line(process, "sleeps")
    daemons = [pid for pid, command in cluster.processes("n2").items() if "/prted" in command]
    subprocess.run(["kill", "-9", *map(str, daemons)], check=True)
    process.communicate(timeout=50)
    assert process.returncode == 1
    failure = json.loads((tmp_path / "run/result.json").read_text())["first_failure"]
    assert failure["host"] == "n2"
    assert cluster.left_over(within_seconds=10) == {}


@pytest.mark.parametrize("times", [1, 2])
def test_a_daemon_of_the_engine_that_fails_without_a_word_is_started_once_more(make_cluster, launch, tmp_path, times):
    cluster = make_cluster(2)
    ssh, counted = tmp_path / "ssh", tmp_path / "counted"
    fails = f'*prted*) echo >> {counted}; [ "$(wc -l < {counted})" -gt {times} ] || exit 213;;'
    ssh.write_text(f'#!/bin/sh\ncase "$*" in {fails} esac\nexec ssh "$@"\n')
    ssh.chmod(0o755)
    run = launch("-H", cluster.hostfile, "--ssh-command", ssh, JOB, cluster=cluster)
    assert run.err.count("could not start its daemon on n2") == 1, run
    assert run.code == (0 if times == 1 else 1), run
    if times == 2:
        assert (
            "the job did not start: the engine ended before every rank had connected (2 of 2 missing, on n1, n2)"
            in run.err
        )
    assert cluster.left_over(within_seconds=10) == {}


def test_unknown_host(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", "n1:1,n7:1", JOB, cluster=cluster)
    assert run.code == 3, run
    assert "distrib-launch: error: n7: " in run.err
    assert "resolve" in run.err
    assert cluster.left_over(within_seconds=6) == {}


def test_a_host_without_distrib_is_named(make_cluster, launch, tmp_path):
    cluster = make_cluster(2)
    # n2 has an interpreter without packages at the same path.
    interpreter = Path(run_python_of(launch, cluster))
    bare = tmp_path / "python"
    real = tmp_path / "real"
    shutil.copy(interpreter.resolve(), real)
    bare.write_text(f'#!/bin/sh\nexec {real} -I -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IEXEC)
    cluster.run("n2", ["mount", "--bind", bare, interpreter], check=True)
    run = launch("-H", "n1:1,n2:1", JOB, cluster=cluster)
    assert run.code == 3, run
    assert "distrib-launch: error: n2: " in run.err
    assert cluster.left_over(within_seconds=6) == {}


def test_a_host_whose_python_lacks_torch_is_named(make_cluster, launch, tmp_path):
    cluster = make_cluster(2)
    interpreter = run_python_of(launch, cluster)
    find = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    torch = cluster.run("n1", [interpreter, "-c", find], check=True).stdout.strip()
    cluster.run("n2", ["mount", "-t", "tmpfs", "tmpfs", torch], check=True)
    script = tmp_path / "needs_torch.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    from torch import nn  # slow where torch is\ntime.sleep(30)\n"
    )
    checked = launch("-H", "n1:1,n2:1", script, cluster=cluster)
    assert checked.code == 3, checked
    assert "error: n2: torch: no torch, n1 has" in checked.err
    run = launch("-H", "n1:1,n2:1", "--no-preflight", script, cluster=cluster)
    assert run.code != 0, run
    assert run.result["first_failure"]["host"] == "n2"
    assert "n2" in run.err and "torch" in run.err
    assert cluster.left_over(within_seconds=6) == {}


def run_python_of(launch, cluster) -> str:
    plan = launch("-H", "n1:1", "--dry-run", "--json", JOB, cluster=cluster)
    return json.loads(plan.out)["script"][0]


def launch_command(tmp_path, cluster, *arguments):
    return [LAUNCH, "--run-dir", tmp_path / "run", "-H", cluster.hostfile, *arguments]


def wait_for_line(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"no line with {word!r}: {process.communicate()}")


def no_job_process_left(cluster, *, within_seconds):
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        left = {h: [c for c in p.values() if not c.startswith("sshd")] for h, p in cluster.left_over().items()}
        if not any(left.values()):
            return True
        time.sleep(0.2)
    raise AssertionError(left)


def test_more_hosts_than_the_engine_calls_by_itself(make_cluster, launch, tmp_path):
    """Beyond its radix of 64, here 2, PRRTE lets hosts start others. If one fails, the start ends silently."""
    cluster = make_cluster(4)
    # Only the launcher's machine may connect, as where the user's keys are on no other host.
    chain, rule = "{ type filter hook input priority 0; }", f"ip saddr != {cluster.address('n1')} tcp dport 22 drop"
    for words in ("add table inet own", f"add chain inet own in {chain}", f"add rule inet own in {rule}"):
        cluster.run("n4", ["nft", words], check=True)
    script = tmp_path / "name.py"
    script.write_text("import socket\nprint(socket.gethostname())\n")
    run = launch(
        "-H", cluster.hostfile, "--no-preflight", script, cluster=cluster, env={"PRTE_MCA_rml_base_radix": "2"}
    )
    assert run.code == 0, run
    logs = (run.run_dir / "ranks").glob("*.out")
    assert {log.read_text().strip() for log in logs} == set(cluster.hosts)


def test_a_job_that_is_stopped_while_daemons_start_leaves_none(make_cluster, tmp_path):
    cluster = make_cluster(3)
    ssh, called = tmp_path / "ssh", tmp_path / "called"
    ssh.write_text(f'#!/bin/sh\ncase "$*" in *prted*) touch {called}; sleep 2;; esac\nexec ssh "$@"\n')
    ssh.chmod(0o755)
    command = [
        LAUNCH,
        "-H",
        cluster.hostfile,
        "--run-dir",
        tmp_path / "run",
        "--ssh-command",
        ssh,
        "--no-preflight",
        JOB,
    ]
    process = cluster.popen("n1", command, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not called.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "waiting for daemons that are being started" in err
    assert cluster.left_over(within_seconds=10) == {}
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "stopped"


def test_who_stops_a_job_while_hosts_are_asked_why_it_did_not_start_does_not_wait(make_cluster, tmp_path):
    cluster = make_cluster(2)
    ssh, asked = tmp_path / "ssh", tmp_path / "asked"
    ssh.write_text(f"#!/bin/sh\ntouch {asked}\nexec sleep 60\n")
    ssh.chmod(0o755)
    (tmp_path / "mpirun").symlink_to("/bin/false")
    options = ["--run-dir", "run", "--ssh-command", ssh, "--mpirun", "./mpirun", "--no-preflight"]
    process = cluster.popen("n1", [LAUNCH, "-H", "n2", *options, JOB], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not asked.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # shells that start the tests in the background ignore SIGINT
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and "error: interrupted" in err, err
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "stopped"


SPAWNS = """
import sys
from mpi4py import MPI
workers = MPI.COMM_SELF.Spawn(sys.executable, ["w.py"], int(sys.argv[1]))
print("spawned", workers.remote_size, flush=True)
workers.Disconnect()
"""


@pytest.mark.parametrize(("hosts", "count"), [("n1:3,n2:3", 3), ("n1:2,n2:2,n3:2", 5), ("n1:3,n2:3", 9)])
def test_a_script_may_spawn_as_many_processes_as_slots_are_left(make_cluster, launch, tmp_path, hosts, count):
    cluster = make_cluster(hosts.count(":"))
    (tmp_path / "p.py").write_text(SPAWNS)
    (tmp_path / "w.py").write_text(
        "import socket\nfrom mpi4py import MPI\nprint('child on', socket.gethostname(), flush=True)\n"
        "MPI.Comm.Get_parent().Disconnect()\n"
    )
    for _ in range(5):
        run = launch("-H", hosts, "-np", "1", "--timeout", "60s", "p.py", count, cluster=cluster, timeout=100)
        assert "NO PATH TO TARGET" not in (run.run_dir / "engine.log").read_text()
        # PRRTE 3.0 reads beyond an array in each spawn (connect_release in pmix_server_dyn.c): plain mpirun crashed in 5 of 25 runs.
        if count == 9 or run.code == 0:
            break
    if count == 9:
        assert run.code != 0 and "mpirun: There are not enough slots" in run.err, run
        return
    assert run.code == 0 and f"spawned {count}" in run.out and "mpirun: child on n2" in run.err, run
    assert cluster.left_over(within_seconds=6) == {}
