"""`distrib-topo`: what the cluster is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from distrib.errors import DistribError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    from distrib_launch import check

    parser = argparse.ArgumentParser(prog="distrib-topo", description="What the cluster is made of.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="show|check")
    show = verbs.add_parser("show", help="hosts, their slots and GPUs, as the files tell")
    show.add_argument("-H", "--hosts", required=True, metavar="FILE|LIST")
    show.add_argument("--topology", metavar="FILE")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=_show)
    check_verb = verbs.add_parser("check", help="ask every host whether it is fit to run a job, and start nothing")
    check.add_options(check_verb)
    check_verb.set_defaults(run=check.run)
    options = parser.parse_args(argv)
    try:
        code: int = options.run(options)
        return code
    except DistribError as error:
        print(f"distrib-topo: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("distrib-topo: error: interrupted", file=sys.stderr)
        return 130


def _show(options: argparse.Namespace) -> int:
    import msgspec
    from distrib_launch.job import read_hosts, read_topology_for

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
