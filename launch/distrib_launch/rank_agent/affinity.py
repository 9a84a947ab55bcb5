"""CPUs, GPUs and threads of each rank of a host.

Every rank computes the shares of all ranks of its host from the same data, and uses its own share. The engine must not bind the ranks
itself. `--dry-run` shows the shares on this machine. Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distrib.utils.cpus import Core, cpu_quota, physical_cores, read_cpu_list
from distrib.utils.ranges import ranges

BINDINGS = ("auto", "none", "core", "numa")
"""Values of `--bind`: `auto` binds to cores unless containers share the host, `none` never, `core` to cores, `numa` to NUMA nodes."""


WSL_DRIVER = "/usr/lib/wsl/lib/libcuda.so.1"


class LocalGpu(NamedTuple):
    """GPU of this host; GPUs are in the order of PCI addresses, as in nvidia-smi. `node` is its NUMA node, None if unknown."""

    uuid: str
    node: int | None


class HostResources(NamedTuple):
    """Resources of the host: GPUs, and the cores that this process may use, by NUMA node; nodes without cores are omitted."""

    nodes: dict[int, tuple[Core, ...]]
    gpus: tuple[LocalGpu, ...] = ()
    quota: float | None = None
    """CPU limit of the container in CPUs, None for none."""

    @property
    def cores(self) -> int:
        """Return the number of cores."""
        return sum(map(len, self.nodes.values()))

    @property
    def is_shared(self) -> bool:
        """Return True if a CPU limit shows that other containers use the same cores."""
        return self.quota is not None and self.quota < sum(len(core) for cores in self.nodes.values() for core in cores)


class Share(NamedTuple):
    """CPUs and threads of one rank; `cpus` empty: not bound."""

    cpus: tuple[int, ...]
    threads: int


# -- deciding ---------------------------------------------------------------------------------------------------------


def shares(machine: HostResources, gpu_nodes: Sequence[int | None], how: str) -> list[Share]:
    """Return each local rank's share.

    Args:
        machine: Resources of the host.
        gpu_nodes: NUMA node of each rank's GPU, None for no GPU or an unknown node.
        how: One of `BINDINGS`.
    """
    ranks = len(gpu_nodes)
    usable = min(machine.cores, int(machine.quota or machine.cores) or 1)
    unbound = [Share((), max(1, usable // ranks))] * ranks
    # Ranks that share a core could not move to another one, and containers that share a host would choose the same cores.
    if how == "none" or machine.cores < ranks or (how == "auto" and machine.is_shared):
        return unbound
    near = all(node in machine.nodes for node in gpu_nodes)
    members = {node: [r for r in range(ranks) if gpu_nodes[r] == node] for node in machine.nodes}
    if near and all(len(members[node]) <= len(cores) for node, cores in machine.nodes.items()):
        blocks = _near_gpus(machine, members, how)
    else:
        blocks = dict(enumerate(_without_gpus(machine, ranks, how)))
    return [Share(_cpus(cores), max(1, len(cores) // sharers)) for cores, sharers in (blocks[r] for r in range(ranks))]


Block = tuple[Sequence[Core], int]
"""Cores, and the number of ranks that share them."""


def _near_gpus(machine: HostResources, members: Mapping[int, Sequence[int]], how: str) -> dict[int, Block]:
    found: dict[int, Block] = {}
    for node, ranks in members.items():
        if ranks:
            found.update(zip(ranks, _divide(machine.nodes[node], len(ranks), how), strict=True))
    return found


def _without_gpus(machine: HostResources, ranks: int, how: str) -> Iterator[Block]:
    nodes = list(machine.nodes.values())
    if ranks < len(nodes):  # whole nodes for each
        for rank in range(ranks):
            own = nodes[rank * len(nodes) // ranks : (rank + 1) * len(nodes) // ranks]
            yield [core for cores in own for core in cores], 1
        return
    # Each further rank goes to the node with the most cores per rank. This maximizes the smallest share, whose rank all others wait
    # for, without dividing a rank between nodes.
    counts = [0] * len(nodes)
    for _ in range(ranks):
        counts[max(range(len(nodes)), key=lambda n: (len(nodes[n]) / (counts[n] + 1), -n))] += 1
    for cores, count in zip(nodes, counts, strict=True):
        yield from _divide(cores, count, how)


def _divide(cores: Sequence[Core], ranks: int, how: str) -> Iterator[Block]:
    """Yield a block for each rank: contiguous cores whose numbers differ by one at most, or for `numa` all cores for all ranks."""
    for rank in range(ranks):
        if how == "numa":
            yield cores, ranks
        else:
            yield cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks], 1


def _cpus(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def share_of(
    machine: HostResources,
    local_rank: int,
    local_world_size: int,
    environ: Mapping[str, str],
    how: str,
    *,
    on_gpus: bool,
) -> Share:
    """Return the share of one rank; local rank N uses the Nth visible GPU, if any.

    Args:
        machine: Resources of the host.
        local_rank: Local rank.
        local_world_size: Number of ranks that share the host.
        environ: Environment of the script.
        how: One of `BINDINGS`.
        on_gpus: True if the ranks use GPUs.
    """
    nodes: list[int | None] = [None] * local_world_size
    if on_gpus:
        visible = visible_gpus(machine.gpus, environ)
        nodes = [visible[r].node if r < len(visible) else None for r in range(local_world_size)]
    return shares(machine, nodes, how)[local_rank]


# -- GPUs -------------------------------------------------------------------------------------------------------------


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of NVIDIA GPUs that a process would see, from the device files and without the driver.

    In a Slurm job without GPUs the files exist, but its cgroup forbids them, which access(2) shows.

    Args:
        environ: Environment of the process.
    """
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = listed_gpus(chosen)
        # A process sees only the first MIG device (NVIDIA, Multi-Instance GPU User Guide).
        return 1 if any(name.startswith("MIG-") for name in names) else len(names)
    with contextlib.suppress(OSError):
        files = [f"/dev/{name}" for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
        if files:
            return sum(os.access(file, os.R_OK | os.W_OK) for file in files)
    return int(Path(WSL_DRIVER).exists())  # WSL has one device file for all GPUs; nearly all such machines have one


def device_of(local_rank: int, gpus: int, *, share: bool) -> str:
    """Return the device of a rank: the GPU with its number, the CPU without GPUs.

    Args:
        local_rank: Local rank.
        gpus: Number of visible GPUs.
        share: True to begin again with the first GPU after the last one.
    """
    if not gpus:
        return "cpu"
    return f"cuda:{local_rank % gpus if share else local_rank}"


def listed_gpus(visible: str) -> list[str]:
    """Return the names in `CUDA_VISIBLE_DEVICES`, up to the first that CUDA does not accept.

    Args:
        visible: Value of the variable.
    """
    names = map(str.strip, visible.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))


def visible_gpus(gpus: Sequence[LocalGpu], environ: Mapping[str, str]) -> list[LocalGpu]:
    """Return the GPUs that a process sees, in its own order.

    Args:
        gpus: GPUs of the host.
        environ: Environment of the process.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    found = []
    for name in listed_gpus(listed):
        if name.isascii() and name.isdigit():
            found.append(gpus[int(name)] if int(name) < len(gpus) else LocalGpu("", None))
        else:
            found.append(next((gpu for gpu in gpus if gpu.uuid.startswith(name)), LocalGpu("", None)))
    return found


def take_gpus(environ: Mapping[str, str], indices: Sequence[int], visible: int) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` for some of the visible GPUs.

    Args:
        environ: Environment of the process; indices count within the variable if it is set.
        indices: Indices of the GPUs.
        visible: Number of visible GPUs.

    Raises:
        IndexError: Names the first missing index.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    names = [part.strip() for part in listed.split(",")] if listed is not None else [str(n) for n in range(visible)]
    if missing := [index for index in indices if index >= len(names)]:
        raise IndexError(missing[0])
    return ",".join(names[index] for index in indices)


# -- binding ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bound(cpus: Sequence[int]) -> Iterator[str]:
    """Bind this thread, and so the processes started in the block, to CPUs. Yield the reason of a failure, or an empty string.

    Args:
        cpus: CPU numbers; none for no binding.
    """
    if not cpus:
        yield ""
        return
    before = os.sched_getaffinity(0)
    problem = ""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        problem = f"cannot bind to CPUs {ranges(cpus)}: {error.strerror}"
    try:
        yield problem
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_machine(root: Path = Path("/"), cpus: set[int] | None = None) -> HostResources:
    """Return the resources of this host from /sys and /proc; without them, one node of single-threaded cores.

    Args:
        root: Root of the file system.
        cpus: CPUs that may be used, None for those of this process.
    """
    allowed = os.sched_getaffinity(0) if cpus is None else cpus
    nodes: dict[int, tuple[Core, ...]] = {}
    left = set(allowed)
    for folder in sorted(root.glob("sys/devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        here = left & read_cpu_list(folder / "cpulist")
        left -= here
        if here:
            nodes[int(folder.name[4:])] = physical_cores(root, here)
    if left:
        nodes[max(nodes, default=-1) + 1] = physical_cores(root, left)
    return HostResources(nodes, _read_gpus(root), cpu_quota(root))


@functools.cache
def this_machine() -> HostResources:
    """Return the resources of this host, read once: the agents of a host share them."""
    return read_machine()


def _read_gpus(root: Path) -> tuple[LocalGpu, ...]:
    """Return the GPUs that this process may use; /proc lists all, even those that the job's cgroup forbids."""
    gpus = []
    files = any(root.glob("dev/nvidia[0-9]*"))
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        uuid, node, text = "", None, ""
        with contextlib.suppress(OSError):
            text = (folder / "information").read_text()
        if found := re.search(r"GPU UUID:\s*(\S+)", text):
            uuid = found[1]
        if found := re.search(r"Device Minor:\s*(\d+)", text):
            file = root / f"dev/nvidia{found[1]}"
            if files and not os.access(file, os.R_OK | os.W_OK):  # a container may have only some of the device files
                continue
        with contextlib.suppress(OSError, ValueError):
            node = int((root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node").read_text())
        gpus.append(LocalGpu(uuid, node if node is not None and node >= 0 else None))
    return tuple(gpus)
