"""CPU binding and thread counts of ranks: every rank computes the same, and the result records it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.utils.ranges import ranges
from distrib_launch.rank_agent import affinity
from distrib_launch.rank_agent.affinity import HostResources, LocalGpu, Share, read_machine, share_of, shares, take_gpus
from tests.conftest import LAUNCH, SCRIPTS

JOB = SCRIPTS / "job.py"


def machine(
    *nodes: int, threads: int = 1, gpus: Sequence[int | None] = (), quota: float | None = None
) -> HostResources:
    """Return a machine with these cores per NUMA node, numbered as Linux does: second hyperthreads last."""
    total = sum(nodes)
    made, first = {}, 0
    for number, cores in enumerate(nodes):
        made[number] = tuple(tuple(c + total * t for t in range(threads)) for c in range(first, first + cores))
        first += cores
    return HostResources(made, tuple(LocalGpu(f"GPU-{n}", node) for n, node in enumerate(gpus)), quota)


def shown(found: list[Share]) -> list[tuple[str, int]]:
    return [(ranges(share.cpus), share.threads) for share in found]


def test_cpu_hosts_share_their_cores():
    assert shown(shares(machine(2), [None] * 2, "auto")) == [("0", 1), ("1", 1)]
    assert shown(shares(machine(8), [None], "auto")) == [("0-7", 8)]
    assert shown(shares(machine(8), [None] * 3, "auto")) == [("0-1", 2), ("2-4", 3), ("5-7", 3)]


def test_hyperthreads_stay_together_and_count_once():
    assert shown(shares(machine(4, threads=2), [None] * 2, "auto")) == [("0-1,4-5", 2), ("2-3,6-7", 2)]


def test_no_block_crosses_from_node_to_node():
    assert shown(shares(machine(4, 4), [None] * 2, "auto")) == [("0-3", 4), ("4-7", 4)]
    assert shown(shares(machine(4, 4), [None] * 3, "auto")) == [("0-1", 2), ("2-3", 2), ("4-7", 4)]
    assert shown(shares(machine(2, 6), [None] * 4, "auto")) == [("0-1", 2), ("2-3", 2), ("4-5", 2), ("6-7", 2)]
    # With fewer ranks than nodes, each rank has whole nodes.
    assert shown(shares(machine(2, 2, 2, 2), [None] * 2, "auto")) == [("0-3", 4), ("4-7", 4)]


def test_more_ranks_than_cores_are_not_bound():
    assert shown(shares(machine(2), [None] * 3, "auto")) == [("", 1)] * 3
    assert shown(shares(machine(2), [None] * 3, "core")) == [("", 1)] * 3


def test_gpu_ranks_get_cores_near_their_gpu():
    assert shown(shares(machine(4, 4), [1, 1, 0, 0], "auto")) == [("4-5", 2), ("6-7", 2), ("0-1", 2), ("2-3", 2)]
    assert shown(shares(machine(4, 4), [1], "auto")) == [("4-7", 4)]


def test_gpus_of_which_nobody_knows_where_they_are_share_all_cores():
    assert shown(shares(machine(4, 4), [None, None], "auto")) == [("0-3", 4), ("4-7", 4)]
    assert shown(shares(machine(4, 4), [0, 7], "auto")) == [("0-3", 4), ("4-7", 4)]  # a node without CPUs of this job
    assert shown(shares(machine(1, 7), [0, 0], "auto")) == [("1-3", 3), ("4-7", 4)]  # too few CPUs there


def test_other_ways_to_bind():
    assert shown(shares(machine(4, 4), [None] * 4, "none")) == [("", 2)] * 4
    assert shown(shares(machine(4, 4), [None] * 4, "numa")) == [("0-3", 2), ("0-3", 2), ("4-7", 2), ("4-7", 2)]
    assert shown(shares(machine(4, 4), [1, 1], "numa")) == [("4-7", 2), ("4-7", 2)]


def test_a_container_with_a_part_of_the_machines_time_is_not_bound_but_has_its_threads():
    assert shown(shares(machine(16, quota=4.0), [None] * 2, "auto")) == [("", 2)] * 2
    assert shown(shares(machine(16, quota=0.5), [None], "auto")) == [("", 1)]
    assert shown(shares(machine(16, quota=4.0), [None] * 2, "core")) == [("0-7", 8), ("8-15", 8)]
    assert shown(shares(machine(4, quota=4.0), [None] * 2, "auto")) == [("0-1", 2), ("2-3", 2)]


nodes_of = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(nodes_of, st.integers(1, 2), st.integers(1, 40), st.sampled_from(affinity.BINDINGS))
def test_shares_of_cpu_hosts_are_fair(nodes, threads, ranks, how):
    host = machine(*nodes, threads=threads)
    found = shares(host, [None] * ranks, how)
    assert len(found) == ranks
    assert all(share.threads >= 1 for share in found)
    bound = [set(share.cpus) for share in found if share.cpus]
    assert len(bound) == (0 if how == "none" or ranks > sum(nodes) else ranks)
    every_core = [core for cores in host.nodes.values() for core in cores]
    for block in bound:
        assert all(set(core) <= block or not set(core) & block for core in every_core)  # whole cores
        touched = [cores for cores in host.nodes.values() if any(set(core) & block for core in cores)]
        assert len(touched) == 1 or ranks < len(nodes)
        if len(touched) > 1:
            assert block == {cpu for cores in touched for core in cores for cpu in core}
    if how in ("auto", "core") and bound:
        assert sum(map(len, bound)) == len(set().union(*bound))  # disjoint
        assert [share.threads * threads for share in found] == [len(block) for block in bound]
        for cores in host.nodes.values():
            inside = {cpu for core in cores for cpu in core}
            sizes = [len(block) // threads for block in bound if block <= inside]
            assert not sizes or max(sizes) - min(sizes) <= 1
    if how != "none" and bound and ranks < len(nodes):
        assert set().union(*bound) == {cpu for core in every_core for cpu in core}


@given(nodes_of, st.lists(st.integers(0, 5) | st.none(), min_size=1, max_size=16), st.sampled_from(["auto", "core"]))
def test_shares_of_gpu_hosts_never_overlap(nodes, gpus, how):
    host = machine(*nodes)
    found = shares(host, gpus, how)
    bound = [set(share.cpus) for share in found if share.cpus]
    assert len(bound) in (0, len(gpus))
    assert sum(map(len, bound)) == len(set().union(*bound))
    if bound and all(gpu in host.nodes and gpus.count(gpu) <= nodes[gpu] for gpu in gpus):
        for gpu, block in zip(gpus, bound, strict=True):
            assert block <= {cpu for core in host.nodes[gpu] for cpu in core}


def test_a_rank_takes_the_share_of_the_gpu_that_it_sees():
    host = machine(4, 4, gpus=[0, 0, 1, 1])
    both = {"CUDA_VISIBLE_DEVICES": "3,0"}
    assert shown([share_of(host, rank, 2, both, "auto", on_gpus=True) for rank in range(2)]) == [("4-7", 4), ("0-3", 4)]
    named = {"CUDA_VISIBLE_DEVICES": "GPU-2,MIG-whatever"}
    assert shown([share_of(host, 0, 1, named, "auto", on_gpus=True)]) == [("4-7", 4)]
    assert shown([share_of(host, 1, 2, named, "auto", on_gpus=True)]) == [("4-7", 4)]  # shared as without GPUs
    assert shown([share_of(host, 1, 2, {}, "auto", on_gpus=False)]) == [("4-7", 4)]


def test_indices_count_within_what_the_host_shows():
    assert take_gpus({}, [0, 2], 4) == "0,2"
    assert take_gpus({"CUDA_VISIBLE_DEVICES": "4, 5,GPU-x"}, [0, 2], 3) == "4,GPU-x"
    with pytest.raises(IndexError, match="4"):
        take_gpus({}, [0, 4, 5], 4)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_machine_is_read_from_sys_and_proc(tmp_path):
    files = {"sys/devices/system/node/node0/cpulist": "0-1,4-5\n", "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
             "sys/devices/system/node/node10/cpulist": "\n"}  # fmt: skip
    for cpu in range(8):
        siblings = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[siblings] = f"{cpu % 4},{cpu % 4 + 4}\n"
    for address, node in (("0000:65:00.0", "1"), ("0000:17:00.0", "0"), ("0000:CA:00.0", "-1")):
        files[f"proc/driver/nvidia/gpus/{address}/information"] = f"Model: X\nGPU UUID:\t GPU-{address[5:7]}\n"
        files[f"sys/bus/pci/devices/{address.lower()}/numa_node"] = f"{node}\n"
    files["proc/self/cgroup"] = "0::/a/b\n"
    files["sys/fs/cgroup/a/b/cpu.max"] = "max 100000\n"
    files["sys/fs/cgroup/a/cpu.max"] = "350000 100000\n"
    write(tmp_path, files)
    found = read_machine(tmp_path, {0, 1, 2, 4, 5})
    assert found.nodes == {0: ((0, 4), (1, 5)), 1: ((2,),)}
    assert found.gpus == (LocalGpu("GPU-17", 0), LocalGpu("GPU-65", 1), LocalGpu("GPU-CA", None))
    assert found.quota == 3.5


def test_gpus_of_other_jobs_are_left_out(tmp_path, monkeypatch):
    """Slurm's cgroup forbids the other GPUs, and CUDA numbers the rest from 0."""
    for number, address in enumerate(("0000:17:00.0", "0000:65:00.0", "0000:ca:00.0")):
        minor = 2 - number  # device files and addresses may have different orders
        files = {f"proc/driver/nvidia/gpus/{address}/information": f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {minor}\n",
                 f"sys/bus/pci/devices/{address}/numa_node": f"{number}\n", f"dev/nvidia{minor}": ""}  # fmt: skip
        write(tmp_path, files)
    assert len(read_machine(tmp_path, {0}).gpus) == 3
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "nvidia2")
    found = read_machine(tmp_path, {0}).gpus
    assert found == (LocalGpu("GPU-1", 1), LocalGpu("GPU-2", 2))
    assert affinity.visible_gpus(found, {"CUDA_VISIBLE_DEVICES": "1"}) == [LocalGpu("GPU-2", 2)]


def test_gpus_without_a_file_in_the_container_are_left_out(tmp_path):
    """A container runtime need not hide other GPUs in /proc."""
    for number in range(3):
        address = f"0000:0{number}:00.0"
        words = f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n"
        write(tmp_path, {f"proc/driver/nvidia/gpus/{address}/information": words})
    assert len(read_machine(tmp_path, {0}).gpus) == 3  # WSL has no such files
    write(tmp_path, {"dev/nvidia1": "", "dev/nvidiactl": ""})
    assert read_machine(tmp_path, {0}).gpus == (LocalGpu("GPU-1", None),)


def test_a_machine_that_tells_nothing_is_one_node(tmp_path):
    assert read_machine(tmp_path, {0, 3}) == HostResources({0: ((0,), (3,))}, (), None)
    write(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"})
    assert read_machine(tmp_path, {0}).quota == 2.0


def test_binding_that_fails_says_so_and_starts_the_script_all_the_same(monkeypatch):
    def deny(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", deny)
    with affinity.bound([0, 1, 2]) as problem:
        pass
    assert problem == "cannot bind to CPUs 0-2: Operation not permitted"


# -- through the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "where.py"
    path.write_text("import os\nprint(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])\n")
    return path


def run(tmp_path: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command = [str(LAUNCH), "--run-dir", str(tmp_path / "run"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**environ, **(env or {})})
    assert done.returncode == 0, done
    return done


@pytest.mark.processes
def test_ranks_run_where_plan_and_result_say(tmp_path, script):
    ranks = min(2, len(os.sched_getaffinity(0)))
    expected = shares(read_machine(), [None] * ranks, "auto")
    run(tmp_path, "-np", str(ranks), script)
    for name in ("plan", "result"):
        told = json.loads((tmp_path / f"run/{name}.json").read_text())["ranks"]
        assert [(rank["cpus"], rank["threads"]) for rank in told] == shown(expected)
    for rank, share in enumerate(expected):
        cpus = share.cpus or sorted(os.sched_getaffinity(0))
        assert (tmp_path / f"run/ranks/{rank}.out").read_text() == f"{list(cpus)} {share.threads}\n"


@pytest.mark.processes
def test_what_the_user_says_about_threads_and_binding_is_kept(tmp_path, script):
    every = sorted(os.sched_getaffinity(0))
    run(tmp_path, "-np", "2", "--bind", "none", script, env={"OMP_NUM_THREADS": "3"})
    assert (tmp_path / "run/ranks/1.out").read_text() == f"{every} 3\n"
    told = json.loads((tmp_path / "run/result.json").read_text())["ranks"]
    assert [(rank["cpus"], rank["threads"]) for rank in told] == [("", 3)] * 2
    assert json.loads((tmp_path / "run/plan.json").read_text())["bind"] == "none"


@pytest.mark.processes
def test_the_plan_shows_processors_as_far_as_they_are_known(tmp_path, script):
    told = run(tmp_path, "--dry-run", "-np", "1", script).stdout
    assert f"CPUs {ranges(sorted(os.sched_getaffinity(0)))}, " in told
    told = run(tmp_path, "--dry-run", "-H", "far:2", script).stdout
    assert "far: ranks 0 to 1, device auto (its GPUs, if it has any), CPUs decided on the host" in told


@pytest.mark.processes
def test_a_host_that_forbids_binding_runs_the_job_unbound_and_says_so(tmp_path, script):
    (tmp_path / "customs").mkdir()
    (tmp_path / "customs/sitecustomize.py").write_text(
        "import os\ndef deny(*_):\n    raise PermissionError(1, 'Operation not permitted')\nos.sched_setaffinity = deny\n"
    )
    python = tmp_path / "python"  # without the agent's -E
    python.write_text(f'#!/bin/sh\n[ "$1" != -E ] || shift\nPYTHONPATH={tmp_path}/customs exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "hosts.txt").write_text(f"localhost python={python}\n")
    run(tmp_path, "-H", tmp_path / "hosts.txt", script)
    every = sorted(os.sched_getaffinity(0))
    assert (tmp_path / "run/ranks/0.out").read_text() == f"{every} {read_machine().cores}\n"
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert [(rank["cpus"], rank["threads"]) for rank in result["ranks"]] == [("", read_machine().cores)]
    (warning,) = result["warnings"]
    assert f"rank 0 on localhost ran unbound: cannot bind to CPUs {ranges(every)}: Operation not permitted" in warning


@pytest.mark.cluster
def test_every_host_decides_for_its_own_ranks(make_cluster, launch, script):
    cluster = make_cluster(3)
    run = launch("-H", "n1:2,n2:1,n3:3", script, cluster=cluster, env={})
    assert run.code == 0, run
    every = [share for count in (2, 1, 3) for share in shown(shares(read_machine(), [None] * count, "auto"))]
    # The launch fixture sets OMP_NUM_THREADS=1; the launcher keeps it.
    assert [(rank["cpus"], rank["threads"]) for rank in run.result["ranks"]] == [(cpus, 1) for cpus, _ in every]
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [rank["cpus"] for rank in plan["ranks"]] == [every[0][0], every[1][0], None, None, None, None]
