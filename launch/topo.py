"""`distrib-topo`: what the cluster is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from distrib.errors import DistribError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="distrib-topo", description="What the cluster is made of.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="show")
    show = verbs.add_parser("show", help="hosts, their slots and GPUs, as the files tell")
    show.add_argument("-H", "--hosts", required=True, metavar="FILE|LIST")
    show.add_argument("--topology", metavar="FILE")
    show.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        return _show(options)
    except DistribError as error:
        print(f"distrib-topo: error: {error}", file=sys.stderr)
        return error.exit_code


def _show(options: argparse.Namespace) -> int:
    import msgspec
    from distrib_launch.cli import read_hosts, read_topology_for

    hosts = read_hosts(options.hosts)
    topology = read_topology_for(options.topology, options.hosts)
    assert hosts is not None
    rows = []
    for host in hosts.hosts:
        gpus = topology.gpus_of(host.name) if topology else None
        rows.append({"host": host.name, "slots": host.slots, "role": host.role,
                     "gpus": gpus.count if gpus else None, "gpu_kind": gpus.kind if gpus else None})  # fmt: skip
    if options.json:
        print(msgspec.json.encode({"source": hosts.source, "dialect": hosts.dialect, "hosts": rows}).decode())
        return 0
    print(f"{hosts.source} ({hosts.dialect}): {len(rows)} host(s)")
    for row in rows:
        slots = "slots not said" if row["slots"] is None else f"{row['slots']} slot(s)"
        gpus_text = "" if row["gpus"] is None else f", {row['gpus']} x {row['gpu_kind'] or 'GPU'}"
        print(f"  {row['host']}: {slots}{gpus_text}" + (", server" if row["role"] == "server" else ""))
    for note in hosts.notes:
        print(f"note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
