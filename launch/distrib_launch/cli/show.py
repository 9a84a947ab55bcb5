"""`distrib-topo show`: what the files say of the cluster, as a tree, a picture or JSON."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distrib.errors import ConfigError
from distrib.utils import plotting
from distrib_launch.cli.options import add_hosts, add_ssh

if TYPE_CHECKING:
    from distrib_launch.cli.topology_query import Said
    from distrib_launch.topology_view.model import View


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `distrib-topo show`."""
    add_hosts(parser, "a Slurm allocation's, else all of the topology, else this machine, which is asked")
    parser.add_argument("--ask", action="store_true", help="ask the hosts what they are (this machine where none is named) and show "
                        "that; a topology file is not needed")  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="with --ask: write what they say into this new topology file"
    )
    add_ssh(parser)
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, bytes per second, seconds")
    parser.add_argument("--plot", metavar="FILE", action="append", default=[], help="draw the cluster into FILE (.svg, .png, "
                        ".pdf); may be repeated")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show it; returns the exit code, 3 where a host that was asked has not answered. Raises `DistribError` for files that cannot be
    what they should."""
    import msgspec

    from distrib_launch.console import tolerate_closed_pipe
    from distrib_launch.runner import read_hosts, read_topology_for
    from distrib_launch.topology_view.model import view_of

    for path in options.plot:  # what is written before would stand in the way of the corrected command
        plotting.check_plot_path(path)
    hosts = read_hosts(options.hosts)
    # What is beside the hostfile may be of other days; hosts that are asked tell all that is needed.
    unread = options.ask and options.topology is None
    topology = None if unread else read_topology_for(options.topology, options.hosts)
    said = None
    if options.ask or (hosts is None and topology is None):
        from distrib_launch.cli import check, topology_query

        if options.output is not None:
            topology_query.check_new(options.output)
        said = topology_query.ask(hosts, topology, options.ssh_command, check.engine_for(options))
        view = view_of(topology_query.answered(hosts, said), said.topology)
        if options.output:
            topology_query.write_new(options.output, said.text)
    elif options.output is not None:
        raise ConfigError(f"-o {options.output}: nothing is written of what files say", hint="--ask asks the hosts")
    else:
        view = view_of(hosts, topology)
    for path in options.plot:
        from distrib_launch.topology_view.diagram import plot

        plot(view, path)
    with tolerate_closed_pipe():
        if options.json:
            told = _as_json(view)
            if said:
                told["inventories"] = msgspec.to_builtins(said.inventories)
            print(msgspec.json.encode(told).decode())
        else:
            _tell(view, options.plot, said, options.output)
    for problem in said.silent if said else ():
        print(f"distrib-topo: error: {problem}", file=sys.stderr)
    return 3 if said and said.silent else 0


def _tell(view: View, drawn: Sequence[str], said: Said | None, written: str | None) -> None:
    from distrib_launch.topology_view.tree import tree_text

    terminal = sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    _print(tree_text(view, colour=colour, width=shutil.get_terminal_size().columns if terminal else None))
    if said:
        from rich.console import Console

        from distrib_launch.cli import topology_query

        if table := topology_query.gpu_table(said.inventories):
            Console(width=None if terminal else 160, highlight=False, no_color=not colour).print(table)
        for line in topology_query.ailments(said.inventories):
            _print(f"warning: {line}")
    for note in view.notes:
        _print(f"note: {note}")
    for path in drawn:
        _print(f"the picture is in {path}")
    if written:
        _print(f"written in {written}: what is not known there, such as racks and their uplinks, is for you to add")


def _as_json(view: View) -> dict[str, Any]:
    import msgspec

    built: dict[str, Any] = msgspec.to_builtins(view)
    rows = [
        {"host": name, "slots": group.slots, "role": group.role, "gpus": group.gpus, "gpu_kind": group.gpu_kind}
        for group in view.groups
        for name in group.names
    ]
    return {"source": view.hostfile, **built, "hosts": rows}


def _print(text: str) -> None:
    """Print for any terminal: where it has no lines to draw with, plain characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        drawn = str.maketrans({"├": "+", "└": "`", "─": "-", "│": "|", "µ": "u", "\xa0": " "})
        text = text.translate(drawn).encode("ascii", "replace").decode()
    print(text)
