"""On which processors and GPUs of its host a rank runs, and with how many threads.

Every rank of a host decides for all of them and takes its own share, from the same facts and without talking: so the
engine must not have bound them before. Standard library only, since each rank decides on its host; `--dry-run` shows
what it would decide where the host is this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distrib.utils.cpus import Core, cpu_quota, physical_cores, read_cpu_list
from distrib.utils.ranges import ranges

HOW = ("auto", "none", "core", "numa")
"""`--bind`: cores where that is sure to help, not at all, cores always, or whole NUMA nodes."""


WSL_DRIVER = "/usr/lib/wsl/lib/libcuda.so.1"


class Gpu(NamedTuple):
    """One GPU of the host, in the order of PCI addresses, which is nvidia-smi's; `node` None: nobody knows."""

    uuid: str
    node: int | None


class Machine(NamedTuple):
    """What counts of a host. `nodes` are the cores this process may use, by NUMA node, nodes without any left out."""

    nodes: dict[int, tuple[Core, ...]]
    gpus: tuple[Gpu, ...] = ()
    quota: float | None = None
    """How many processors' time the container may use, where it is limited."""

    @property
    def cores(self) -> int:
        return sum(map(len, self.nodes.values()))

    @property
    def is_shared(self) -> bool:
        """Whether a limit shows that others have a part of its processors' time."""
        return self.quota is not None and self.quota < sum(len(core) for cores in self.nodes.values() for core in cores)


class Share(NamedTuple):
    """One rank's part. `cpus` empty: not bound."""

    cpus: tuple[int, ...]
    threads: int


# -- deciding ---------------------------------------------------------------------------------------------------------


def shares(machine: Machine, gpu_nodes: Sequence[int | None], how: str) -> list[Share]:
    """Each local rank's share of the machine; `gpu_nodes` has the NUMA node of each rank's GPU, None for no GPU."""
    ranks = len(gpu_nodes)
    usable = min(machine.cores, int(machine.quota or machine.cores) or 1)
    unbound = [Share((), max(1, usable // ranks))] * ranks
    # Ranks that are bound to one core each cannot make room for one another; and whoever gets a part of a machine's
    # time is not alone on it: its neighbours would choose the same cores.
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
"""Cores, and how many ranks share them."""


def _near_gpus(machine: Machine, members: Mapping[int, Sequence[int]], how: str) -> dict[int, Block]:
    found: dict[int, Block] = {}
    for node, ranks in members.items():
        if ranks:
            found.update(zip(ranks, _divide(machine.nodes[node], len(ranks), how), strict=True))
    return found


def _without_gpus(machine: Machine, ranks: int, how: str) -> Iterator[Block]:
    nodes = list(machine.nodes.values())
    if ranks < len(nodes):  # whole nodes for each
        for rank in range(ranks):
            part = nodes[rank * len(nodes) // ranks : (rank + 1) * len(nodes) // ranks]
            yield [core for cores in part for core in cores], 1
        return
    # Each further rank goes where a rank has the most cores, so that the smallest share, which the others wait for, is
    # as large as can be without crossing from node to node.
    counts = [0] * len(nodes)
    for _ in range(ranks):
        counts[max(range(len(nodes)), key=lambda n: (len(nodes[n]) / (counts[n] + 1), -n))] += 1
    for cores, count in zip(nodes, counts, strict=True):
        yield from _divide(cores, count, how)


def _divide(cores: Sequence[Core], ranks: int, how: str) -> Iterator[Block]:
    """Contiguous blocks that differ by one core at most, or all the cores for everyone."""
    for rank in range(ranks):
        if how == "numa":
            yield cores, ranks
        else:
            yield cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks], 1


def _cpus(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def share_of(
    machine: Machine, local_rank: int, local_world_size: int, environ: Mapping[str, str], how: str, *, on_gpus: bool
) -> Share:
    """The share of one rank that is started with `environ`; rank N of the host runs on its Nth visible GPU, if any."""
    nodes: list[int | None] = [None] * local_world_size
    if on_gpus:
        visible = visible_gpus(machine.gpus, environ)
        nodes = [visible[r].node if r < len(visible) else None for r in range(local_world_size)]
    return shares(machine, nodes, how)[local_rank]


# -- GPUs -------------------------------------------------------------------------------------------------------------


def count_gpus(environ: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs a process started with `environ` would see; device files tell, no driver call is made.

    In a job of Slurm's without GPUs the files are there, but its cgroup forbids them, which access(2) heeds.
    """
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = listed_gpus(chosen)
        # Of the parts of GPUs (MIG) a process sees the first alone, as NVIDIA's user guide of MIG has it.
        return 1 if any(name.startswith("MIG-") for name in names) else len(names)
    with contextlib.suppress(OSError):
        files = [f"/dev/{name}" for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
        if files:
            return sum(os.access(file, os.R_OK | os.W_OK) for file in files)
    return int(Path(WSL_DRIVER).exists())  # Windows' Linux has one device file for all; nearly always that is one GPU


def listed_gpus(visible: str) -> list[str]:
    """The names in `CUDA_VISIBLE_DEVICES`, up to the first that is no GPU's, where CUDA stops, too."""
    names = map(str.strip, visible.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names))


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that a process started with `environ` sees, in its own order."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(gpus)
    found = []
    for name in listed_gpus(listed):
        if name.isascii() and name.isdigit():
            found.append(gpus[int(name)] if int(name) < len(gpus) else Gpu("", None))
        else:
            found.append(next((gpu for gpu in gpus if gpu.uuid.startswith(name)), Gpu("", None)))
    return found


def take_gpus(environ: Mapping[str, str], indices: Sequence[int], visible: int) -> str:
    """`CUDA_VISIBLE_DEVICES` that leaves those of the `visible` GPUs which `indices` name.

    They count within the variable where the host has it set already. Raises IndexError naming the first that is not
    there.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    names = [part.strip() for part in listed.split(",")] if listed is not None else [str(n) for n in range(visible)]
    if missing := [index for index in indices if index >= len(names)]:
        raise IndexError(missing[0])
    return ",".join(names[index] for index in indices)


# -- binding ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bound(cpus: Sequence[int]) -> Iterator[str]:
    """What is started inside runs on these processors; gives why that cannot be, or nothing.

    This thread itself is bound for the while: a child takes that over from its first instruction on.
    """
    if not cpus:
        yield ""
        return
    before = os.sched_getaffinity(0)
    problem = ""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        problem = f"cannot bind to processors {ranges(cpus)}: {error.strerror}"
    try:
        yield problem
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_machine(root: Path = Path("/"), cpus: set[int] | None = None) -> Machine:
    """This machine as /sys and /proc tell it; what they do not tell is taken as one node of single-threaded cores."""
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
    return Machine(nodes, _read_gpus(root), cpu_quota(root))


def _read_gpus(root: Path) -> tuple[Gpu, ...]:
    """The GPUs that this process may use: CUDA counts no others, and /proc has all, also where a job's cgroup forbids some."""
    gpus = []
    files = any(root.glob("dev/nvidia[0-9]*"))
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        uuid, node, words = "", None, ""
        with contextlib.suppress(OSError):
            words = (folder / "information").read_text()
        if told := re.search(r"GPU UUID:\s*(\S+)", words):
            uuid = told[1]
        if told := re.search(r"Device Minor:\s*(\d+)", words):
            file = root / f"dev/nvidia{told[1]}"
            if files and not os.access(file, os.R_OK | os.W_OK):  # a container may have files of some
                continue
        with contextlib.suppress(OSError, ValueError):
            node = int((root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node").read_text())
        gpus.append(Gpu(uuid, node if node is not None and node >= 0 else None))
    return tuple(gpus)
