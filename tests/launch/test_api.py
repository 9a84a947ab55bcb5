"""`distrib_launch.run`: scripts and functions launched from Python, from any thread, and from a notebook."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import distrib
import distrib_launch
from distrib.errors import ConfigError, DistribError, JobFailed
from distrib_launch import api
from distrib_launch.runner import read_hosts
from tests.conftest import SCRIPTS

JOB = SCRIPTS / "job.py"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def scaled(factor: int) -> tuple[int, str]:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} scales")
    return rank * factor, socket.gethostname()


def test_a_function_runs_on_every_rank_and_its_values_come_back(tmp_path):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        result = distrib_launch.run(scaled, 10, np=3)
    assert result.return_values == ((0, socket.gethostname()), (10, socket.gethostname()), (20, socket.gethostname()))
    assert (result.status, result.world_size, result.exit_code) == ("succeeded", 3, 0)
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}@localhost] rank {rank} scales" for rank in range(3)]
    assert Path(result.run_dir).parent == tmp_path / "distrib-runs"
    assert Path(result.run_dir).name.endswith("-scaled")
    assert json.loads(Path(result.run_dir, "result.json").read_text())["status"] == "succeeded"


def test_hosts_may_be_a_dict_of_slots():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert distrib_launch.run(scaled, 1, hosts={"localhost": 2}).world_size == 2
        with pytest.raises(ConfigError, match="exclude"):  # both names are excluded
            distrib_launch.run(scaled, 1, hosts=["localhost", "127.0.0.1"], exclude=["localhost", "127.0.0.1"])


def test_hosts_of_a_dict_may_be_addresses():
    assert read_hosts(api.hosts_argument({"fd00::1": 2, "[fd00::2]": 3, "n1": 4})).hosts == (
        read_hosts("[fd00::1]:2,[fd00::2]:3,n1:4").hosts
    )
    assert [host.slots for host in read_hosts(api.hosts_argument({"fd00::1": 2})).hosts] == [2]


def test_a_script_runs_as_from_the_command(tmp_path):
    result = distrib_launch.run(
        JOB, "1:environment", np=2, run_dir=tmp_path / "run", env={"COLOUR": "blue = sky"}, quiet=True
    )
    assert result.return_values == ()
    told = json.loads((tmp_path / "run/ranks/1.out").read_text().splitlines()[0])
    assert told["env"]["COLOUR"] == "blue = sky"
    assert told["argv"] == [str(JOB), "1:environment"]


def test_a_module_runs_as_with_python_m(launch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    run = launch("-np", "2", "-m", "package.train", "--epochs", "3", cwd=tmp_path)
    assert run.code == 0, run
    assert (run.run_dir / "ranks/1.out").read_text() == "__main__ package ['--epochs', '3']\n"


def test_more_arguments_than_fit_one_packet_arrive(tmp_path):
    long = "x:" + "y" * 100_000
    result = distrib_launch.run(JOB, "*:environment", long, np=1, quiet=True)
    told = json.loads(Path(result.run_dir, "ranks/0.out").read_text().splitlines()[0])
    assert told["argv"][2] == long


def test_closures_and_lambdas_travel():
    offset = 5
    values = distrib_launch.run(lambda: int(os.environ["RANK"]) + offset, np=2, quiet=True).return_values
    assert values == (5, 6)


def test_large_arguments_and_values_arrive_whole():
    data = os.urandom(20 << 20)
    values = distrib_launch.run(lambda given: given[::-1], data, np=2, quiet=True).return_values
    assert values == (data[::-1], data[::-1])


def test_a_function_that_raises_is_told_by_rank():
    def fail_in_one() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("boom in a function")
        time.sleep(30)

    with pytest.raises(JobFailed) as caught:
        distrib_launch.run(fail_in_one, np=3, quiet=True)
    error = caught.value
    assert list(error.errors) == [1]
    first, *_, last = error.errors[1].strip().splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "ValueError: boom in a function"
    assert "function.py" not in error.errors[1]
    assert "rank 1 on localhost failed first: ValueError: boom in a function; everything is in " in str(error)
    assert (error.exit_code, error.result.status, error.result.first_failure.rank) == (1, "failed", 1)
    assert isinstance(error, distrib.DistribError)


def test_every_rank_that_fails_by_itself_has_its_own_error():
    with pytest.raises(JobFailed) as caught:
        distrib_launch.run(JOB, "0:raise", "1:exit=3", "2:signal=11", np=3, quiet=True, run_dir="run")
    errors = caught.value.errors
    for rank, word in ((0, "RuntimeError: boom in rank 0"), (1, "exit code 3"), (2, "killed by SIGSEGV")):
        # A rank that the launcher stopped before its failure has no error of its own.
        assert rank not in errors or word in errors[rank]
    assert caught.value.result.first_failure.rank in errors


def test_a_time_limit_is_a_failed_job_too():
    with pytest.raises(JobFailed, match=r"was stopped \(exit code 124\)") as caught:
        distrib_launch.run(JOB, "*:sleep=60", np=1, timeout=1, quiet=True)
    assert caught.value.errors == {}


def test_two_runs_at_once_from_other_threads():
    values: dict[int, object] = {}

    def one(number: int) -> None:
        values[number] = distrib_launch.run(lambda: number, np=1, quiet=True).return_values

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values == {0: (0,), 1: (1,)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"colour": "blue"}, "distrib_launch.run has no option 'colour'"),
        (
            {"dry_run": True},
            "no option 'dry_run'; its options are those of distrib-launch --help-all, except dry-run, json",
        ),
        ({"sync": ""}, "--sync: it is empty"),
        ({"np": 0}, "'0' is not a valid number of ranks"),
        ({"hosts": "nowhere.txt"}, "nowhere.txt: no such hostfile"),
        ({"hosts": ["a:2", "b:2"], "np": 5}, "-H has 4 slot(s) on 2 host(s)"),
        ({"timeout": "soon"}, "'soon' is not a valid time"),
        ({"host_reduction": False}, "--no-host-reduction does not apply in mode sync"),
        ({"no_momentum_correction": True}, "--no-momentum-correction does not apply in mode sync"),
        ({"engine": "kubernetes"}, "use the command distrib-launch"),
    ],
)
def test_wrong_options_are_errors_that_leave_nothing(tmp_path, options, words):
    with pytest.raises(ConfigError) as caught:
        distrib_launch.run(JOB, **options)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_sent_says_so():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"<lambda> cannot be sent .*lock"):
        distrib_launch.run(lambda: lock, np=1)


def test_a_value_that_cannot_come_back_fails_its_rank():
    def opened() -> object:
        return threading.Lock()

    with pytest.raises(JobFailed) as caught:
        distrib_launch.run(opened, np=1, quiet=True)
    assert "cannot pickle '_thread.lock' object" in caught.value.errors[0]


NOTEBOOK = """
import distrib_launch, sys
def helper(x):
    return x + 1
class Point:
    def __init__(self, x): self.x = x
def cell():
    import os
    return Point(helper(int(os.environ["RANK"])))
if __name__ == "__main__":
    print([type(p) is Point and p.x for p in distrib_launch.run(cell, np=2, quiet=True).return_values], file=sys.stderr)
"""


@pytest.mark.processes
def test_functions_and_classes_of_a_notebook_need_no_file(tmp_path):
    done = subprocess.run([sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    assert done.stderr.splitlines()[-1] == "[1, 2]"


@pytest.mark.cluster
def test_what_ranks_return_and_no_disk_takes_is_named(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        code = (
            f"import distrib_launch; distrib_launch.run(lambda: bytes(16 << 20), np=2, run_dir={str(small / 'run')!r})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    finally:
        subprocess.run(["umount", small], check=True)
    assert done.returncode != 0
    assert re.search(r"return value of rank [01]: .*\.value: No space left on device", done.stderr), done


def test_arguments_that_are_too_long_to_send_are_refused():
    with pytest.raises(DistribError, match="rank 0 are too long"):
        distrib_launch.run(JOB, *["a" * 1000] * 5000, np=2, quiet=True)


@pytest.mark.processes
def test_an_interrupted_cell_stops_the_job(tmp_path):
    code = f"import distrib_launch; distrib_launch.run({str(JOB)!r}, '*:children', np=2, run_dir='run')"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and "has children" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert json.loads((tmp_path / "run/result.json").read_text())["exit_code"] == 130


@pytest.mark.cluster
def test_a_function_reaches_hosts_that_share_no_files(make_cluster, tmp_path):
    cluster = make_cluster(3, slots=2)
    for host in ("n2", "n3"):
        cluster.run(host, ["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True)
    code = f"""
        import distrib_launch, socket, os
        def where(x):
            return socket.gethostname(), int(os.environ["RANK"]), x
        values = distrib_launch.run(where, "x", hosts={str(cluster.hostfile)!r}, quiet=True).return_values
        print(values)
    """
    done = cluster.run("n1", [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path)
    assert done.returncode == 0, done
    hosts = ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert done.stdout.strip() == str(tuple((host, rank, "x") for rank, host in enumerate(hosts)))
    assert cluster.left_over(within_seconds=6) == {}
