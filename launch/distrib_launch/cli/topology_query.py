"""What hosts say of themselves when they are asked: as a topology, and how their GPUs are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from distrib.cluster.inventory import Gpu, Inventory
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import Topology, parse_topology
from distrib.cluster.topology_draft import as_yaml, describe
from distrib.errors import PreflightError, TopologyError
from distrib.units import format_size
from distrib.utils import files
from distrib.utils.ranges import ranges
from distrib_launch.cli import check
from distrib_launch.host_selection import HostFilter
from distrib_launch.preflight.check_result import Check
from distrib_launch.preflight.host_checks import ailing

if TYPE_CHECKING:
    from rich.table import Table

    from distrib.cluster.hosts import HostList

SOURCE = "as the hosts say"


class Said(NamedTuple):
    """The hosts' answers, the topology file that they make, and the hosts of which there is none."""

    inventories: dict[str, Inventory]
    text: str
    topology: Topology
    silent: tuple[Check, ...]


def ask(hosts: HostList | None, topology: Topology | None, ssh_command: str | None, engine: str) -> Said:
    """Ask the hosts, or this machine where there are none. Raises PreflightError where none answers."""
    with check.asked(hosts, topology, host_filter=HostFilter(), ssh_command=ssh_command, engine=engine) as found:
        answers = found.answers.by_host
    inventories = {host: answer.inventory for host, answer in answers.items() if answer.inventory}
    silent = tuple(answer.problem for answer in answers.values() if answer.problem)
    if not inventories:
        raise PreflightError("no host answers: " + "; ".join(map(str, silent)))
    text = as_yaml(describe(inventories))
    return Said(inventories, text, parse_topology(text, SOURCE), silent)


def check_new(path: str) -> None:
    """Raises TopologyError where a draft may not, or cannot, be written."""
    from distrib.cluster.measurements_io import check_writable

    check_writable(path)
    if files.exists(path):
        raise TopologyError("it is there already", source=path, hint="name a new file, and take from it what you want")


def write_new(path: str, text: str) -> None:
    """Raises TopologyError where the draft cannot be written; then no part of it is there."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise TopologyError(
            f"cannot write it: {error.strerror}", source=path, hint="name another file with -o"
        ) from None


def ailments(inventories: Mapping[str, Inventory]) -> list[str]:
    """GPUs that are slower or less sound than others of their kind, in lines."""
    found = ailing({host: facts.gpus for host, facts in inventories.items()})
    return [f"{check.host}: {check.reason}; {check.fix}" for check in found]


def gpu_table(inventories: Mapping[str, Inventory]) -> Table | None:
    """How the GPUs are at present, those that are alike in one row; None where there are none."""
    from rich.table import Table

    rows: dict[tuple[str, ...], dict[str, list[Gpu]]] = {}
    for host, facts in inventories.items():
        for gpu in facts.gpus:
            rows.setdefault(_state(gpu), {}).setdefault(host, []).append(gpu)
    if not rows:
        return None
    table = Table(title="GPUs as they are", title_justify="left", box=None, pad_edge=False)
    for head in (
        "hosts",
        "GPUs",
        "kind",
        "used memory",
        "NVLinks",
        "power limit",
        "PCIe",
        "temperature",
        "memory errors",
    ):
        table.add_column(head)
    for state, members in rows.items():
        alike: dict[str, list[str]] = {}
        for host, gpus in members.items():
            alike.setdefault(ranges(gpu.index for gpu in gpus), []).append(host)
        for numbers, hosts in alike.items():
            table.add_row(
                name_hosts(hosts), numbers, *state[:-1], _heat([g for h in hosts for g in members[h]]), state[-1]
            )
    return table


def _state(gpu: Gpu) -> tuple[str, ...]:
    health = gpu.health
    used = format_size(gpu.used_memory_bytes, digits=2, binary=True) if gpu.used_memory_bytes is not None else "?"
    watts = f"{health.power_limit_watts:g} W" if health.power_limit_watts is not None else "?"
    links = f"{health.nvlinks_up} of {health.nvlinks}" if health.nvlinks is not None else "-"
    errors = "?" if health.uncorrected_errors is None else str(health.uncorrected_errors)
    pcie = gpu.pcie or "?"
    if gpu.has_narrow_link:
        pcie += f" (now x{gpu.pcie_width_now})"
    return (gpu.kind or gpu.problem or "?", used, links, watts, pcie, errors)


def _heat(gpus: Sequence[Gpu]) -> str:
    now = [gpu.health.temperature_celsius for gpu in gpus if gpu.health.temperature_celsius is not None]
    most = [gpu.health.slowdown_celsius for gpu in gpus if gpu.health.slowdown_celsius is not None]
    if not now:
        return "?"
    told = f"{min(now)} C" if min(now) == max(now) else f"{min(now)} to {max(now)} C"
    return told + (f" (slower from {min(most)} C)" if most else "")


def answered(hosts: HostList | None, said: Said) -> HostList | None:
    """The hosts of the list that have answered."""
    if hosts is None:
        return None
    return msgspec.structs.replace(hosts, hosts=tuple(host for host in hosts.hosts if host.name in said.inventories))
