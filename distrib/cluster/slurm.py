"""Hosts and slots of a Slurm allocation, from the environment variables of the job."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from distrib.cluster.host_expression import MAX_SLOTS, list_mentions, parse_number, split_list
from distrib.cluster.hosts import Host, HostList, Notes, SourcePlace, merge_mentions, shown
from distrib.errors import HostfileError
from distrib.utils.ranges import is_whole_number

SOURCE = "Slurm"
NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS = "SLURM_TASKS_PER_NODE"
CPUS = "SLURM_JOB_CPUS_PER_NODE"
TASKS_PER_NODE = "SLURM_NTASKS_PER_NODE"
TASK_REQUESTS = (TASKS_PER_NODE, "SLURM_NTASKS", "SLURM_NPROCS")
"""Set if the user requested tasks; otherwise Slurm counts one task per CPU."""

_TIMES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_GPUS = re.compile(r"(?:[A-Za-z0-9_./-]+[:=])*([0-9]{1,4})|[A-Za-z][A-Za-z0-9_./:-]*")


def slurm_hosts(environ: Mapping[str, str]) -> HostList | None:
    """Read the hosts of the current Slurm allocation.

    `slots` is the number of GPUs if Slurm gave GPUs and one task per host or none was requested, else the requested tasks, None
    without a request. `max_slots` is the number of GPUs, or of CPUs without GPUs.

    Args:
        environ: The environment variables.

    Returns:
        The hosts, None outside an allocation.

    Raises:
        HostfileError: The variables contradict each other.
    """
    notes = Notes()
    hosts = _named(environ, notes)
    components = _heterogeneous(environ)
    if not hosts and components:
        raise SourcePlace(f"{NODES[0]}_HET_GROUP_0").error(
            f"a heterogeneous job of {components} components, expected one component: no Slurm step spans several",
            "name the hosts with -H: they are then reached over ssh",
            code="slurm-allocation",
        )
    if not hosts:
        return None
    if components > 1:
        notes.add(
            "heterogeneous", f"a heterogeneous job of {components} components: only the hosts of its first are used"
        )
    tasks = _tasks(environ, len(hosts), notes)
    gpus = _gpus(environ, len(hosts), tasks)
    if gpus and (tasks is None or set(tasks) == {1}):
        if set(gpus) != {1}:
            notes.add(
                "gpus",
                f"Slurm gave {max(gpus)} GPU(s) on each host: one rank for each (one on each host: "
                f"-np {len(hosts)} --spread)",
            )
        tasks = gpus
    most = gpus or _cpus(environ, len(hosts))
    hosts = tuple(
        msgspec.structs.replace(
            host,
            slots=tasks[n] if tasks else None,
            max_slots=max(most[n], tasks[n] if tasks else 1) if most else None,
        )
        for n, host in enumerate(hosts)
    )
    return HostList(hosts=hosts, source=SOURCE, dialect="slurm", notes=notes.lines())


def gpus_per_host(environ: Mapping[str, str]) -> int:
    """Return the GPUs of every host of the allocation.

    Args:
        environ: The environment variables.

    Returns:
        The count; 0 without GPUs, or if hosts differ or the count is unknown.
    """
    try:
        hosts = len(_named(environ, Notes()))
        counts = set(_gpus(environ, hosts, _tasks(environ, hosts, Notes())) or ()) if hosts else set()
    except HostfileError:  # reported where the hosts are used
        return 0
    return counts.pop() if len(counts) == 1 else 0


def _named(environ: Mapping[str, str], notes: Notes) -> tuple[Host, ...]:
    variable = next((name for name in NODES if environ.get(name, "").strip()), None)
    if variable is None:
        return ()
    return merge_mentions(list_mentions(environ[variable], SourcePlace(variable, column=1)), notes)


def _tasks(environ: Mapping[str, str], hosts: int, notes: Notes) -> list[int] | None:
    """Return the requested tasks of each host, None without a request."""
    if "SLURM_STEP_ID" in environ and _is_of_step(environ, hosts):
        notes.add("step", f"inside a Slurm step, which hides the task counts of the {hosts} hosts of its job")
        each = environ.get(TASKS_PER_NODE, "")
        return [parse_number(each, SourcePlace(TASKS_PER_NODE, column=1), "tasks", MAX_SLOTS)] * hosts if each else None
    counts = _counts(environ, TASKS, "tasks", hosts)
    return counts if any(name in environ for name in TASK_REQUESTS) else None


def _is_of_step(environ: Mapping[str, str], hosts: int) -> bool:
    """Test if the task counts are those of a step: srun replaces them, but not the hosts of the job."""
    return sum(int(match[2] or 1) for match in _TIMES.finditer(environ.get(TASKS, ""))) != hosts


def _counts(environ: Mapping[str, str], variable: str, what: str, hosts: int) -> list[int] | None:
    """Expand `2(x3),1` to a number for each host; None if not set."""
    text = environ.get(variable, "")
    if not text.strip():
        return None
    place = SourcePlace(variable, column=1)
    counts: list[int] = []
    for item, at in split_list(text, place):
        match = _TIMES.fullmatch(item)
        if not match:
            raise at.error(
                f"{shown(item)} is not a count of {what}", "Slurm writes them as 2(x3),1", code="slurm-allocation"
            )
        times = int(match[2] or 1)
        if len(counts) + times > hosts:
            raise at.error(f"{what} for more than the {hosts} hosts that Slurm lists", code="slurm-allocation")
        counts += [parse_number(match[1], at, what, MAX_SLOTS)] * times
    if len(counts) != hosts:
        raise place.error(f"{what} for {len(counts)} of the {hosts} hosts that Slurm lists", code="slurm-allocation")
    return counts


def _cpus(environ: Mapping[str, str], hosts: int) -> list[int] | None:
    try:
        return _counts(environ, CPUS, "CPUs", hosts)
    except HostfileError:  # of a step perhaps; it only limits -np
        return None


def _gpus(environ: Mapping[str, str], hosts: int, tasks: list[int] | None) -> list[int] | None:
    """Return the GPUs of each host; None without GPUs or if their places are unknown."""
    if each := _gpu_count(environ.get("SLURM_GPUS_PER_NODE", "")):
        return [each] * hosts
    if tasks and (each := _gpu_count(environ.get("SLURM_GPUS_PER_TASK", ""))):
        return [each * count for count in tasks]
    here = _gpu_count(environ.get("SLURM_GPUS_ON_NODE", ""))
    if total := _gpu_count(environ.get("SLURM_GPUS", "")):
        even = total % hosts == 0 and here in (0, total // hosts)
        return [total // hosts] * hosts if even else None
    return [here] * hosts if here else None


def _gpu_count(text: str) -> int:
    """Parse `8`, `gpu:8`, `a100:4,h100:2` or `gpu:a100:4(S:0-1)`; a kind without a number counts one."""
    matches = [_GPUS.fullmatch(item.partition("(")[0].strip()) for item in re.split(r",(?![^(]*\))", text)]
    return sum(int(match[1] or 1) for match in matches if match)


def _heterogeneous(environ: Mapping[str, str]) -> int:
    """Return the components of a heterogeneous job, 0 for any other job."""
    if is_whole_number(size := environ.get("SLURM_HET_SIZE", "")):
        return int(size)
    return sum(name.startswith(f"{NODES[0]}_HET_GROUP_") for name in environ)
