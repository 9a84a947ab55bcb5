"""Jobs whose workers push once per host, while workers, servers and hosts fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import LAUNCH, SCRIPTS
from tests.virtual_cluster import Cluster

pytestmark = pytest.mark.forked
STEPS = 40


def started(
    cluster: Cluster, folder: Path, *words: object, hosts: str = "n1:2,n2:2", until: str = ""
) -> subprocess.Popen[str]:
    """Start a job whose ranks count their steps on several hosts. Return when all ranks have begun."""
    command = [LAUNCH, "--run-dir", folder / "run", "-H", hosts, "--mode", "async", "--no-stale-rate", *words]
    lesson = [SCRIPTS / "asynchronous.py", "counting", folder, STEPS, 0.05, until]
    job = cluster.popen("n1", [*command, *lesson], env={"OMP_NUM_THREADS": "1"})
    ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
    reaches(job, lambda: len(acknowledged(folder)) == ranks)
    return job


def reaches(job: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    """Wait until a condition holds while the job runs."""
    deadline = time.monotonic() + 150
    while not what():
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[1]
        time.sleep(0.05)


def acknowledged(folder: Path) -> dict[int, int]:
    return {int(path.suffix[1:]): int(path.read_text() or 0) for path in folder.glob("acknowledged.*")}


def check_counts(folder: Path, full: set[int], *, until: str = "") -> None:
    """Check the servers' counts. A step counts 1, or 1/2 if it was averaged with a rank that counts elsewhere.

    The ranks of `full` took all steps: `STEPS`, or more in jobs that run `until` a file exists.
    """
    steps = acknowledged(folder)
    assert all(steps[rank] >= STEPS if until else steps[rank] == STEPS for rank in full)
    lives = [len((folder / f"lives.{other}").read_text()) for other in range(4)]
    for rank in full:
        before, after = json.loads((folder / f"noted.{rank}").read_text())
        for values in torch.load(folder / f"held.{rank}.pt", weights_only=True).values():
            for other in range(4):
                low, high = values[other::4].min().item(), values[other::4].max().item()
                least, most = before[str(other)] / 2, after[str(other)] + lives[other]  # one note may be missing
                assert least <= low <= high <= most, (other, before, after, lives)


def sent_bytes(cluster: Cluster) -> int:
    """Return the bytes that n1 has sent to other hosts."""
    lines = cluster.run("n1", ["cat", "/proc/net/dev"]).stdout.splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def kill_rank(cluster: Cluster, folder: Path, rank: int) -> None:
    """Kill a rank of the job and its rank agent."""
    mark = f"DISTRIB_PROCESS_TAG={json.loads((folder / 'run/plan.json').read_text())['job']}.{rank}".encode()
    killed = []
    for host in cluster.hosts:
        for pid in cluster.processes(host):
            with contextlib.suppress(OSError):  # it has ended, perhaps with one that was killed before
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
    assert killed


@pytest.mark.cluster
def test_a_server_dies_then_who_speaks_for_its_host_and_then_the_neighbour_of_another(make_cluster, tmp_path):
    cluster = make_cluster(2)
    job = started(cluster, tmp_path, "--replicas", "1", until="enough")
    for rank, others in (4, (0, 1, 2, 3)), (2, (0, 1, 3)), (1, (0, 3)):
        kill_rank(cluster, tmp_path, rank)
        before = acknowledged(tmp_path)
        reaches(
            job, lambda before=before, others=others: all(acknowledged(tmp_path)[n] > before[n] + 10 for n in others)
        )
    (tmp_path / "enough").touch()
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    check_counts(tmp_path, {0, 3}, until="enough")


@pytest.mark.cluster
def test_a_job_goes_on_without_its_engine_and_sends_the_gradients_of_a_host_once(make_cluster, tmp_path):
    cluster = make_cluster(2)
    before = sent_bytes(cluster)
    job = started(cluster, tmp_path)
    for pid, command in cluster.processes("n1").items():
        if "/prterun" in command.partition(" -H")[0]:
            os.kill(pid, signal.SIGKILL)
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert "mpirun was killed by SIGKILL while its ranks were running; mode async" in err
    check_counts(tmp_path, {0, 1, 2, 3})
    # n1 pushes half of 960 kB of gradients and replies as much to n2's push. Without aggregation both double.
    assert 0.45 < (sent_bytes(cluster) - before) / (2 * STEPS * 960_000) < 0.65
    assert cluster.left_over(within_seconds=10) == {}


@pytest.mark.cluster
def test_a_host_that_boots_again_takes_nobody_along(make_cluster, tmp_path):
    """The engine notices that its daemon there exited, and would end all ranks."""
    cluster = make_cluster(3)
    job = started(cluster, tmp_path, "--replicas", "1", hosts="n2:1,n3:1", until="enough")
    cluster.lose("n3")
    time.sleep(6)
    cluster.restore("n3")
    reaches(job, lambda: "lost communication with a remote daemon" in (tmp_path / "run/engine.log").read_text())
    before = acknowledged(tmp_path)[0]
    reaches(job, lambda: acknowledged(tmp_path)[0] > before + 10)
    (tmp_path / "enough").touch()
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert "host n3 was lost" in err and "mode async" in err
    assert cluster.left_over(within_seconds=10) == {}


@pytest.mark.cluster
def test_who_waited_elsewhere_goes_on_when_the_one_that_spoke_for_it_has_died(make_cluster, launch):
    cluster = make_cluster(2, slots=2)
    script = SCRIPTS / "asynchronous.py"
    run = launch(
        "--mode",
        "async",
        "--no-stale-rate",
        "--timeout",
        "200",
        "-H",
        cluster.hostfile,
        script,
        "elsewhere",
        cluster=cluster,
    )
    assert run.code == 0 and re.search(r"worker rank 2 on n2 (died|was lost) \(.*SIGKILL", run.err), run
    assert all(f"rank {rank} took all steps" in run.out for rank in (0, 1, 3)), run
    # 40 from one host. From the other host 20, and 37 of the rank that waited after its third step.
    assert 94 <= int(re.search(r"(\d+) updates", run.out)[1]) <= 98, run


@pytest.mark.cluster
def test_a_host_is_cut_off_and_joins_the_others_again(make_cluster, tmp_path):
    cluster = make_cluster(2)
    job = started(cluster, tmp_path)
    cluster.cut("n2")
    time.sleep(7)  # longer than the other hosts wait for it
    cluster.restore("n2")
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert acknowledged(tmp_path) == dict.fromkeys(range(4), STEPS)


@pytest.mark.cluster
def test_a_host_that_comes_back_too_late_is_started_again_and_one_that_is_lost_for_good_ends_nothing(
    make_cluster, tmp_path
):
    """The host returns before its ranks notice that the launcher gave them up, or after they have ended.

    The lost host ends no other rank. The engine and its ssh would end all ranks after 15 s.
    """
    cluster = make_cluster(3)
    words = ["--host-timeout", "3", "--servers", "3", "--replicas", "1"]
    job = started(cluster, tmp_path, *words, hosts="n3:1,n1:1,n2:1", until="enough")

    def get_on(*ranks: int) -> None:
        for rank in ranks:
            before = acknowledged(tmp_path)[rank]
            reaches(job, lambda rank=rank, before=before: acknowledged(tmp_path)[rank] > before + 10)

    for lives, seconds in ((2, 5), (3, 11)):
        cluster.cut("n3")
        time.sleep(seconds)
        cluster.restore("n3")
        reaches(job, lambda lives=lives: len((tmp_path / "lives.0").read_text()) == lives)
        get_on(0, 1, 2)
    cluster.lose("n2")  # n3's server has the replica of n2's again
    time.sleep(20)
    get_on(0, 1)
    (tmp_path / "enough").touch()
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert err.count("worker rank 0 on n3 was lost") == err.count("worker rank 0 on n3 is reachable again") == 2, err
    assert "rank 2 on n2 was lost" in err and "rank 1 on" not in err and "rank 4 on" not in err, err
    assert err.count("the next worker prints and saves now") == 1 and "no worker has connected" not in err, err
    assert json.loads((tmp_path / "run/result.json").read_text())["restarts"] == 4
    assert not cluster.left_over(within_seconds=10.0)
