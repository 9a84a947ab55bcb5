"""`distrib-topo show`: the cluster as files or the hosts themselves describe it, as a tree, a diagram or JSON."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from distrib.cluster.hosts import HostList
from distrib.cluster.inventory import Gpu, Inventory
from distrib.cluster.measurements_writer import check_writable
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import Topology, parse_topology
from distrib.cluster.topology_draft import draft_groups, topology_yaml
from distrib.errors import ConfigError, PreflightError, TopologyError
from distrib.units import format_size
from distrib.utils import files, plotting
from distrib.utils.json_text import encode_json
from distrib.utils.log import get_logger
from distrib.utils.ranges import ranges
from distrib_launch.arguments.shared_options import add_hosts, add_ssh
from distrib_launch.cli import check
from distrib_launch.console import tolerate_closed_pipe
from distrib_launch.preflight.check_result import CheckResult
from distrib_launch.preflight.gpu_health import unhealthy_gpus
from distrib_launch.runner import read_hosts, read_topology_for
from distrib_launch.topology_view.diagram import plot
from distrib_launch.topology_view.model import View, view_of
from distrib_launch.topology_view.tree import tree_text

SOURCE = "as the hosts report"
"""Source of a topology that is made of the hosts' replies."""


class QueriedTopology(NamedTuple):
    """Inventories of hosts, and the topology that they make."""

    inventories: dict[str, Inventory]
    text: str
    """YAML of the topology."""
    topology: Topology
    problems: tuple[CheckResult, ...]
    """Hosts that did not reply."""

    def replied(self, hosts: HostList | None) -> HostList | None:
        """Return the hosts of a list that have replied.

        Args:
            hosts: Hosts of the user.
        """
        if hosts is None:
            return None
        return msgspec.structs.replace(hosts, hosts=tuple(h for h in hosts.hosts if h.name in self.inventories))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Args:
        parser: Its parser.
    """
    add_hosts(parser, "a Slurm allocation's, else all of the topology, else this machine, which is queried")
    parser.add_argument("--ask", action="store_true", help="query the hosts (default: this machine) and show their replies; no "
                        "topology file is needed")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="with --ask: write the replies to this new topology file, such as "
                        "cluster.yaml")  # fmt: skip
    add_ssh(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, bytes per second, seconds")
    parser.add_argument("--plot", metavar="FILE", action="append", default=[], help="draw the cluster into FILE (.svg, .png, .pdf), "
                        "such as cluster.svg; may be repeated")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show the cluster; return 0, or 3 if a queried host did not reply.

    Args:
        options: Parsed options.
    """
    for path in options.plot:  # before -o writes its file, which the corrected command would refuse to replace
        plotting.check_plot_path(path)
    hosts = read_hosts(options.hosts)
    # The topology beside the hostfile may be out of date, and the replies replace it.
    replaced = options.ask and options.topology is None
    topology = None if replaced else read_topology_for(options.topology, options.hosts)
    queried = None
    if options.ask or (hosts is None and topology is None):
        if options.output is not None:
            _check_new_file(options.output)
        queried = query_topology(hosts, topology, options.ssh_command, check.engine_for(options))
        view = view_of(queried.replied(hosts), queried.topology)
        if options.output:
            write_new_file(options.output, queried.text)
    elif options.output is not None:
        raise ConfigError(
            f"-o {options.output}: only the replies of hosts are written", hint="add --ask", code="option-conflict"
        )
    else:
        view = view_of(hosts, topology)
    for path in options.plot:
        plot(view, path)
    with tolerate_closed_pipe():
        if options.json:
            document = _as_json(view)
            if queried:
                document["inventories"] = msgspec.to_builtins(queried.inventories)
            print(encode_json(document).decode())
        else:
            _print_view(view, options.plot, queried, options.output)
    for problem in queried.problems if queried else ():
        get_logger("topo").error("%s", problem)
    return 3 if queried and queried.problems else 0


def query_topology(
    hosts: HostList | None, topology: Topology | None, ssh_command: str | None, engine: str
) -> QueriedTopology:
    """Query hosts for their inventories.

    Args:
        hosts: Hosts of the user; None: this machine.
        topology: Description of the hosts.
        ssh_command: Value of `--ssh-command`.
        engine: Engine that decides how hosts are reached.

    Raises:
        PreflightError: No host replied.
    """
    with check.queried_hosts(hosts, topology, ssh_command=ssh_command, engine=engine) as queried:
        replies = queried.replies.by_host
    inventories = {host: reply.inventory for host, reply in replies.items() if reply.inventory}
    problems = tuple(reply.problem for reply in replies.values() if reply.problem)
    if not inventories:
        raise PreflightError("no host replies: " + "; ".join(map(str, problems)), code="host-no-reply")
    text = topology_yaml(draft_groups(inventories))
    return QueriedTopology(inventories, text, parse_topology(text, SOURCE), problems)


def _check_new_file(path: str) -> None:
    check_writable(path)
    if files.exists(path):
        raise TopologyError(
            "the file exists already",
            source=path,
            hint="name a new file, and copy from it what you need",
            code="file-not-written",
        )


def write_new_file(path: str, text: str) -> None:
    """Write a file that does not exist yet, or leave none.

    Args:
        path: The file.
        text: Its content.

    Raises:
        TopologyError: The file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(path).unlink()  # no incomplete file must remain
        raise TopologyError(
            f"cannot write it: {error.strerror}", source=path, hint="name another file with -o", code="file-not-written"
        ) from None


def _print_view(view: View, drawn: Sequence[str], queried: QueriedTopology | None, written: str | None) -> None:
    terminal = sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    _print(tree_text(view, colour=colour, width=shutil.get_terminal_size().columns if terminal else None))
    if queried:
        if table := gpu_table(queried.inventories):
            Console(width=None if terminal else 160, highlight=False, no_color=not colour).print(table)
        for line in gpu_warnings(queried.inventories):
            _print(f"warning: {line}")
    for note in view.notes:
        _print(f"note: {note}")
    for path in drawn:
        _print(f"the picture is in {path}")
    if written:
        _print(f"written in {written}; add what hosts do not know, such as racks and their uplinks")


def gpu_warnings(inventories: Mapping[str, Inventory]) -> list[str]:
    """Return a line for GPUs that are slower or less healthy than others of their kind.

    Args:
        inventories: Inventories by host.
    """
    found = unhealthy_gpus({host: facts.gpus for host, facts in inventories.items()})
    return [f"{result.host}: {result.reason}; {result.fix}" for result in found]


def gpu_table(inventories: Mapping[str, Inventory]) -> Table | None:
    """Return a table of the current state of all GPUs, equal ones in one row; None if there are no GPUs.

    Args:
        inventories: Inventories by host.
    """
    rows: dict[tuple[str, ...], dict[str, list[Gpu]]] = {}
    for host, facts in inventories.items():
        for gpu in facts.gpus:
            rows.setdefault(_gpu_state(gpu), {}).setdefault(host, []).append(gpu)
    if not rows:
        return None
    table = Table(title="GPUs as they are", title_justify="left", box=None, pad_edge=False)
    for head in (
        "hosts", "GPUs", "kind", "used memory", "NVLinks", "power limit", "PCIe", "temperature", "memory errors",
    ):  # fmt: skip
        table.add_column(head)
    for state, members in rows.items():
        by_indices: dict[str, list[str]] = {}
        for host, gpus in members.items():
            by_indices.setdefault(ranges(gpu.index for gpu in gpus), []).append(host)
        for indices, hosts in by_indices.items():
            heat = _temperature([gpu for host in hosts for gpu in members[host]])
            table.add_row(name_hosts(hosts), indices, *state[:-1], heat, state[-1])
    return table


def _gpu_state(gpu: Gpu) -> tuple[str, ...]:
    health = gpu.health
    used = format_size(gpu.used_memory_bytes, digits=2, binary=True) if gpu.used_memory_bytes is not None else "?"
    watts = f"{health.power_limit_watts:g} W" if health.power_limit_watts is not None else "?"
    links = f"{health.nvlinks_up} of {health.nvlinks}" if health.nvlinks is not None else "-"
    errors = "?" if health.uncorrected_errors is None else str(health.uncorrected_errors)
    pcie = gpu.pcie or "?"
    if gpu.has_narrow_link:
        pcie += f" (now x{gpu.pcie_width_now})"
    return (gpu.kind or gpu.problem or "?", used, links, watts, pcie, errors)


def _temperature(gpus: Sequence[Gpu]) -> str:
    now = [gpu.health.temperature_celsius for gpu in gpus if gpu.health.temperature_celsius is not None]
    limits = [gpu.health.slowdown_celsius for gpu in gpus if gpu.health.slowdown_celsius is not None]
    if not now:
        return "?"
    text = f"{min(now)} C" if min(now) == max(now) else f"{min(now)} to {max(now)} C"
    return text + (f" (slower from {min(limits)} C)" if limits else "")


def _as_json(view: View) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(view)
    rows = [
        {"host": name, "slots": group.slots, "role": group.role, "gpus": group.gpus, "gpu_kind": group.gpu_kind}
        for group in view.groups
        for name in group.names
    ]
    return {"source": view.hostfile, **built, "hosts": rows}


def _print(text: str) -> None:
    """Print with plain characters if the terminal's encoding has no box-drawing characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        drawn = str.maketrans({"├": "+", "└": "`", "─": "-", "│": "|", "µ": "u", "\xa0": " "})
        text = text.translate(drawn).encode("ascii", "replace").decode()
    print(text)
