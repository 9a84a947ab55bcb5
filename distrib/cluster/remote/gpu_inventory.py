"""GPU inventory of a host: NVML, the device files of the driver, processes that hold GPUs."""

from __future__ import annotations

import ctypes
import os
import pwd
import re

from distrib.cluster.remote.sysfs import current_pcie_width, list_entries, numa_node, pcie_link, read_proc_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DRIVER_FILE = "/proc/driver/nvidia/version"
DAEMONS = ("nvidia-persiste", "nvidia-cuda-mps", "nv-hostengine", "dcgm", "nvidia-smi", "Xorg", "gnome-shell")
"""Processes that open a GPU's device file without computing."""


def user_name(uid: int) -> str:
    """Look up the name of a user.

    Args:
        uid: The user id.

    Returns:
        The name, or the number if unknown.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def has_gpudirect() -> bool:
    """Test for GPUDirect RDMA: a peer-memory module, or DMA-BUF (open driver on Linux 5.12 or later)."""
    if any(os.path.isdir("/sys/module/" + name) for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    recent = release is not None and (int(release.group(1)), int(release.group(2))) >= (5, 12)
    return recent and "Open Kernel Module" in read_proc_text(DRIVER_FILE)


def driver_version() -> str | None:
    """Read the version of the NVIDIA driver; None without it."""
    match = re.search(r"Kernel Module(?: for \S+)? +(\d[\d.]*)", read_proc_text(DRIVER_FILE))
    return match.group(1) if match else None


def read_gpus() -> tuple[list[dict[str, Any]], list[dict[str, Any]], str | None]:
    """Read the GPUs, the processes that hold them, and the error of NVML, None without one."""
    minors = sorted(int(name[6:]) for name in list_entries("/dev") if re.match(r"nvidia\d+$", name))
    if not minors and not os.path.exists("/dev/dxg"):
        return [], [], None
    try:
        gpus, listed = _query_nvml()
        error = None
    except Exception as problem:  # NVML or its absence may raise anything; the device files still give the count
        gpus, listed = [_gpu_from_proc(index, minor) for index, minor in enumerate(minors)], {}
        error = f"{type(problem).__name__}: {problem}"
    open_files = gpu_file_owners()
    index_of = {gpu["minor"]: gpu["index"] for gpu in gpus}
    holders = []
    for pid in sorted(set(listed) | set(open_files)):
        if pid == os.getpid():
            continue
        used = listed.get(pid, {})
        command = read_proc_text(f"/proc/{pid}/cmdline", 400).replace("\0", " ") or read_proc_text(f"/proc/{pid}/comm")
        if os.path.basename(command.split(" ")[0]).startswith(DAEMONS):
            continue
        where = set(used) | {index_of[minor] for minor in open_files.get(pid, ()) if minor in index_of}
        try:
            user = user_name(os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            user = None
        holders.append({"pid": pid, "user": user, "command": command[:200], "gpus": sorted(where),
                        "memory_bytes": sum(used.values()) if used else None, "listed": pid in listed})  # fmt: skip
    return gpus, holders, error


def _query_nvml() -> tuple[list[dict[str, Any]], dict[int, dict[int, int]]]:
    """Query NVML for the GPUs, and for the memory in use by process id and GPU index."""
    import pynvml  # optional

    pynvml.nvmlInit()
    gpus: list[dict[str, Any]] = []
    listed: dict[int, dict[int, int]] = {}
    # MIG instances, integrated GPUs and WSL refuse some queries and work.
    refusals = pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission

    def query(request: Any, otherwise: Any, tolerated: Any = refusals) -> Any:
        try:
            return request()
        except tolerated:
            return otherwise

    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            index = len(gpus)
            try:
                device = pynvml.nvmlDeviceGetHandleByIndex(number)
                name = pynvml.nvmlDeviceGetName(device)
                bus = pynvml.nvmlDeviceGetPciInfo(device).busId
                total, used = query(lambda device=device: _read_gpu_memory(pynvml, device), (None, None))
            except pynvml.NVMLError_NoPermission:  # NVML counts it, CUDA does not
                continue
            except pynvml.NVMLError as problem:  # a GPU that has fallen off the bus does not affect the others
                gpus.append({"index": index, "minor": -1, "kind": None, "memory_bytes": None, "used_memory_bytes": None,
                             "bus_id": None, "numa_node": None, "problem": str(problem)})  # fmt: skip
                continue
            bus = (bus.decode() if isinstance(bus, bytes) else bus).lower()[-12:]
            folder = f"/sys/bus/pci/devices/{bus}"
            minor = query(lambda device=device: pynvml.nvmlDeviceGetMinorNumber(device), -1, pynvml.NVMLError)
            uuid = query(lambda device=device: pynvml.nvmlDeviceGetUUID(device), None, pynvml.NVMLError)
            gpus.append({"index": index, "minor": minor, "uuid": uuid.decode() if isinstance(uuid, bytes) else uuid,
                         "kind": name.decode() if isinstance(name, bytes) else name,
                         "memory_bytes": total, "used_memory_bytes": used,
                         "bus_id": bus, "numa_node": numa_node(folder), "pcie": pcie_link(folder),
                         "pcie_width_now": current_pcie_width(folder),
                         "nvlink_to": _nvlink_peers(pynvml, device), "health": _read_gpu_health(pynvml, device)})  # fmt: skip
            for process in query(lambda device=device: _compute_processes(pynvml, device), [], pynvml.NVMLError):
                used = process.usedGpuMemory
                listed.setdefault(int(process.pid), {})[index] = 0 if used is None else int(used)
    finally:
        pynvml.nvmlShutdown()
    return gpus, listed


SLOWDOWN_CAUSES = {0x20: "heat", 0x40: "heat", 0x80: "its power supply"}
"""Bits of nvmlClocksThrottleReasons. The bit of any slowdown (0x8) is set at times on healthy GPUs."""


def _read_gpu_health(pynvml: Any, device: Any) -> dict[str, Any]:
    """Read the state of a GPU that may make it slow or end a job; None where the driver does not report it."""

    def first_result(*queries: Any) -> Any:
        """Return the first result: NVML has renamed some functions."""
        for request in queries:
            try:
                return request()
            except Exception:  # drivers and bindings differ; the GPU works
                continue
        return None

    links = []
    for link in range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = first_result(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(device, link))
        if state is None:
            break
        links.append(bool(state))
    reasons = first_result(
        lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(device),
        lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device),
    )
    celsius = first_result(
        lambda: pynvml.nvmlDeviceGetTemperatureV(device, pynvml.NVML_TEMPERATURE_GPU),
        lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU),
    )
    slowdown = first_result(
        lambda: pynvml.nvmlDeviceGetTemperatureThreshold(device, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        lambda: celsius + pynvml.nvmlDeviceGetMarginTemperature(device),  # from Ada on there may be no threshold
    )
    remapped = first_result(lambda: pynvml.nvmlDeviceGetRemappedRows(device)) or (0, 0, 0, 0)
    limits = (
        first_result(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(device)),
        first_result(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device)),
    )
    return {
        "nvlinks_up": sum(links) if links else None,
        "nvlinks": len(links) or None,
        "slowed_by": sorted({why for bit, why in SLOWDOWN_CAUSES.items() if (reasons or 0) & bit}),
        "power_limit_watts": limits[0] / 1000 if limits[0] else None,
        "usual_power_limit_watts": limits[1] / 1000 if limits[1] else None,
        "temperature_celsius": celsius,
        "slowdown_celsius": slowdown,
        "uncorrected_errors": first_result(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                device, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        "needs_reset": bool(remapped[2] or first_result(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(device))),
        "has_bad_memory": bool(remapped[3]),
        # NVML_GPU_FABRIC_STATE_NOT_STARTED and _IN_PROGRESS: the fabric manager has not set up the NVSwitches (yet).
        "has_fabric": first_result(lambda: _fabric_state(pynvml, device) not in (1, 2)),
    }


def _nvlink_peers(pynvml: Any, device: Any) -> list[str]:
    """List the peers of a GPU's active NVLinks."""
    ends = []
    for link in range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(device, link):
                continue
            if pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                ends.append("switch")
                continue
            bus = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId
        except Exception:
            break
        ends.append((bus.decode() if isinstance(bus, bytes) else bus).lower()[-12:])
    return ends


def _fabric_state(pynvml: Any, device: Any) -> int:
    """Read the state of NVIDIA's fabric manager."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    return int(info.state)


def _compute_processes(pynvml: Any, device: Any) -> Any:
    """List the processes that compute on a GPU; none if the driver is older than the binding."""
    try:
        return pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except (AttributeError, getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError_FunctionNotFound)):
        return []


def _read_gpu_memory(pynvml: Any, device: Any) -> tuple[int, int]:
    """Read the memory of a GPU without the driver's reserve of up to 1 GB, which NVML's first version counts as used."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
        return int(memory.total), int(memory.total - memory.free - memory.reserved)
    except (AttributeError, TypeError, pynvml.NVMLError):  # an old binding, or an old driver
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        return int(memory.total), int(memory.used)


def _gpu_from_proc(index: int, minor: int) -> dict[str, Any]:
    """Describe a GPU from /proc, without NVML."""
    for bus in list_entries("/proc/driver/nvidia/gpus"):
        text = read_proc_text(f"/proc/driver/nvidia/gpus/{bus}/information")
        if re.search(rf"Device Minor:\s*{minor}$", text, re.MULTILINE):
            model = re.search(r"Model:\s*(.+)", text)
            return {"index": index, "minor": minor, "kind": model.group(1).strip() if model else None,
                    "memory_bytes": None, "used_memory_bytes": None, "bus_id": bus, "numa_node": numa_node(f"/sys/bus/pci/devices/{bus}")}  # fmt: skip
    return {"index": index, "minor": minor, "kind": None, "memory_bytes": None, "used_memory_bytes": None,
            "bus_id": None, "numa_node": None}  # fmt: skip


def gpu_file_owners() -> dict[int, set[int]]:
    """Find the processes that have a GPU's device file open, as `fuser -v /dev/nvidia*` does.

    NVML does not list what a crashed job left behind, although it holds memory.

    Returns:
        Device numbers by process id.
    """
    found: dict[int, set[int]] = {}
    for pid in list_entries("/proc"):
        if pid.isdigit():
            for descriptor in list_entries(f"/proc/{pid}/fd"):
                try:
                    match = re.match(r"/dev/nvidia(\d+)$", os.readlink(f"/proc/{pid}/fd/{descriptor}"))
                except OSError:
                    continue
                if match:
                    found.setdefault(int(pid), set()).add(int(match.group(1)))
    return found
