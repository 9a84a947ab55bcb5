"""The hosts of a Slurm allocation, and how many ranks each may run, from the variables that Slurm sets in a job."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from distrib.cluster.host_expression import MAX_SLOTS, list_mentions, parse_number, split_list
from distrib.cluster.hosts import Host, HostList, Notes, Place, each_once, shown
from distrib.errors import HostfileError

SOURCE = "Slurm"
NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS = "SLURM_TASKS_PER_NODE"
CPUS = "SLURM_JOB_CPUS_PER_NODE"
OFTEN_ASKED_FOR = "SLURM_NTASKS_PER_NODE"
ASKED_FOR = (OFTEN_ASKED_FOR, "SLURM_NTASKS", "SLURM_NPROCS")
"""Set where somebody asked for tasks; without them Slurm counts as many tasks as there are CPUs for."""

_TIMES = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_GPUS = re.compile(r"(?:[A-Za-z0-9_./-]+[:=])*([0-9]{1,4})|[A-Za-z][A-Za-z0-9_./:-]*")
_SOCKETS = re.compile(r"\([^()]*\)")


def slurm_hosts(environ: Mapping[str, str]) -> HostList | None:
    """The hosts of the Slurm allocation that `environ` describes; None outside one.

    `slots` are one per GPU where Slurm gave GPUs and was asked for one task on each host or none at all, else the tasks
    that were asked for; None where nobody asked. `max_slots` are the GPUs, or the CPUs where there are none. Raises
    HostfileError where Slurm's variables contradict each other.
    """
    notes = Notes()
    hosts = _named(environ, notes)
    components = _heterogeneous(environ)
    if not hosts and components:
        raise Place(f"{NODES[0]}_HET_GROUP_0").error(
            f"a heterogeneous job of {components} components, which no single step of Slurm's spans",
            "name the hosts with -H: they are then reached over ssh",
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
    """The GPUs that the allocation has on every host; 0 where it has none, or not as many on each, or nobody knows."""
    try:
        hosts = len(_named(environ, Notes()))
        counts = set(_gpus(environ, hosts, _tasks(environ, hosts, Notes())) or ()) if hosts else set()
    except HostfileError:  # said where the allocation's hosts are used
        return 0
    return counts.pop() if len(counts) == 1 else 0


def _named(environ: Mapping[str, str], notes: Notes) -> tuple[Host, ...]:
    variable = next((name for name in NODES if environ.get(name, "").strip()), None)
    if variable is None:
        return ()
    return each_once(list_mentions(environ[variable], Place(variable, column=1), notes), notes)


def _tasks(environ: Mapping[str, str], hosts: int, notes: Notes) -> list[int] | None:
    """The tasks on each host, None where nobody asked for any."""
    if "SLURM_STEP_ID" in environ and _is_of_step(environ, hosts):
        notes.add("step", f"inside a step of Slurm's, which hides how many tasks the {hosts} hosts of its job have")
        each = environ.get(OFTEN_ASKED_FOR, "")
        return [parse_number(each, Place(OFTEN_ASKED_FOR, column=1), "tasks", MAX_SLOTS)] * hosts if each else None
    counts = _counts(environ, TASKS, "tasks", hosts)
    return counts if any(name in environ for name in ASKED_FOR) else None


def _is_of_step(environ: Mapping[str, str], hosts: int) -> bool:
    """Whether the tasks are the step's, on some hosts of its job: srun replaces the job's number, but not its hosts."""
    return sum(int(match[2] or 1) for match in _TIMES.finditer(environ.get(TASKS, ""))) != hosts


def _counts(environ: Mapping[str, str], variable: str, what: str, hosts: int) -> list[int] | None:
    """A number for each host from `2(x3),1`; None where Slurm does not say."""
    text = environ.get(variable, "")
    if not text.strip():
        return None
    place = Place(variable, column=1)
    counts: list[int] = []
    for item, at in split_list(text, place):
        match = _TIMES.fullmatch(item)
        if not match:
            raise at.error(f"{shown(item)} is not a count of {what}", "Slurm writes them as 2(x3),1")
        times = int(match[2] or 1)
        if len(counts) + times > hosts:
            raise at.error(f"{what} for more than the {hosts} hosts that Slurm lists")
        counts += [parse_number(match[1], at, what, MAX_SLOTS)] * times
    if len(counts) != hosts:
        raise place.error(f"{what} for {len(counts)} of the {hosts} hosts that Slurm lists")
    return counts


def _cpus(environ: Mapping[str, str], hosts: int) -> list[int] | None:
    try:
        return _counts(environ, CPUS, "CPUs", hosts)
    except HostfileError:  # of a step, as it may be; and it only says how far -np may go
        return None


def _gpus(environ: Mapping[str, str], hosts: int, tasks: list[int] | None) -> list[int] | None:
    """The GPUs of each host; None where there are none, or nobody knows how many are where."""
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
    """`8`, `gpu:8`, `a100:4,h100:2` or `gpu:a100:4(S:0-1)`; a kind without a number is one."""
    matches = [_GPUS.fullmatch(item.strip()) for item in _SOCKETS.sub("", text).split(",") if item.strip()]
    return sum(int(match[1] or 1) for match in matches if match)


def _heterogeneous(environ: Mapping[str, str]) -> int:
    """How many components a heterogeneous job has; 0 for any other job."""
    if (told := environ.get("SLURM_HET_SIZE", "")).isdecimal():
        return int(told)
    return sum(name.startswith(f"{NODES[0]}_HET_GROUP_") for name in environ)
