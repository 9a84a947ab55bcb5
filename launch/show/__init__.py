"""`distrib-topo show`: what the files say of the cluster, as a tree, a picture or JSON."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distrib_launch.options import Once

from distrib.errors import ConfigError

if TYPE_CHECKING:
    from distrib_launch.show.view import View


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `distrib-topo show`."""
    parser.add_argument(
        "-H",
        "--hosts",
        action=Once,
        metavar="FILE|LIST",
        help="which hosts (default: a Slurm allocation, else all of the topology)",
    )
    parser.add_argument(
        "--topology", metavar="FILE", help="what they are made of (default: the YAML file beside the hostfile)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, bytes per second, seconds")
    parser.add_argument("--plot", metavar="FILE", action="append", default=[], help="draw the cluster into FILE (.svg, .png, "
                        ".pdf); may be repeated")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Show it; returns the exit code. Raises `DistribError` for files that cannot be what they should."""
    import msgspec
    from distrib_launch.console import perhaps_unread
    from distrib_launch.job import read_hosts, read_topology_for
    from distrib_launch.show.view import view_of

    hosts = read_hosts(options.hosts)
    topology = read_topology_for(options.topology, options.hosts)
    if hosts is None and topology is None:
        raise ConfigError("no hosts to show", hint="name a hostfile with -H, or a topology with --topology")
    view = view_of(hosts, topology)
    for path in options.plot:
        from distrib_launch.show.plot import plot

        plot(view, path)
    with perhaps_unread():
        if options.json:
            print(msgspec.json.encode(_as_json(view)).decode())
        else:
            _tell(view, options.plot)
    return 0


def _tell(view: View, pictures: Sequence[str]) -> None:
    from distrib_launch.show.tree import tree_text

    terminal = sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    _print(tree_text(view, colour=colour, width=shutil.get_terminal_size().columns if terminal else None))
    for note in view.notes:
        _print(f"note: {note}")
    for path in pictures:
        _print(f"the picture is in {path}")


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
