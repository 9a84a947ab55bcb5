"""The topology file of `distrib-topo probe -o`: tried before the probe, so that nothing that was measured is lost after it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.measurements import Measurements
from distrib.cluster.node import name_hosts
from distrib.errors import ConfigError, DistribError
from distrib.utils import files

if TYPE_CHECKING:
    from distrib.cluster.hosts import HostList
    from distrib.probe.settings import Mode

FEW = 0.5
"""A probe that has less than this part of its hosts left, or of the links that the file has, does not take their place."""


def look(
    path: str, listed: HostList, hosts: Collection[str], mode: Mode, *, without_gpus: bool = False
) -> Measurements | None:
    """What was measured earlier, of which is said what will be gone. Raises TopologyError where nothing could be written later.

    `without_gpus`: the ranks of this probe are shown no GPU.
    """
    from distrib.cluster.measurements_io import check_takes, check_writable
    from distrib.cluster.topology import check_hosts, read_topology

    check_writable(path)
    earlier = None
    notes: tuple[str, ...] = ()
    if files.exists(path) and Path(path).stat().st_size:
        # What is measured of hosts that the file does not know could not be written into it afterwards.
        topology = read_topology(path)
        chosen = tuple(host for host in listed.hosts if host.name in hosts)
        notes = check_hosts(topology, msgspec.structs.replace(listed, hosts=chosen))
        if len(chosen) < len(listed.hosts):
            notes = ()  # the others are left out on purpose
        earlier = topology.measured
    check_takes(path, hosts)
    _refuse_a_part(path, earlier, hosts)
    for note in (*notes, *_replaced(path, earlier, hosts, mode, without_gpus)):
        print(f"distrib-topo: note: {note}", file=sys.stderr)
    return earlier


def _refuse_a_part(path: str, earlier: Measurements | None, hosts: Collection[str]) -> None:
    """A probe of a few hosts must not take the place of one of many."""
    had = {(pair.source, pair.target) for pair in earlier.pairs} if earlier else set()
    left = [ends for ends in had if set(ends) <= set(hosts)]
    if earlier and len(left) < FEW * len(had):
        raise ConfigError(
            f"-o {path}: it has {len(had)} links, measured {earlier.when}, and these hosts have {len(left)} of them",
            hint="name another file, or take its `measured:` part out",
        )


def _replaced(
    path: str, earlier: Measurements | None, hosts: Collection[str], mode: Mode, without_gpus: bool
) -> list[str]:
    """What the file has that this probe does not measure."""
    if earlier is None:
        return []
    found = []
    curves = ["curves"] if any(pair.curve for pair in earlier.pairs) else []
    if mode == "quick" and (had := ["all-reduce"] * bool(earlier.collectives) + curves):
        what, not_measured = " and ".join(had), "neither" if len(had) > 1 else "none"
        found.append(f"{path} has {what} of {earlier.when}; --quick measures {not_measured}, and will take their place")
    by_gpus = ["copies of GPUs"] if any({link.source, link.target} != {"memory"} for link in earlier.inside) else []
    by_nccl = mode != "quick" and any(each.backend == "nccl" for each in earlier.collectives)
    by_gpus += ["all-reduce over NCCL"] * by_nccl
    if without_gpus and by_gpus:
        found.append(
            f"{path} has {' and '.join(by_gpus)} of {earlier.when}; this probe leaves GPUs alone, and will take their place"
        )
    if gone := [host for host in earlier.hosts if host not in hosts]:
        found.append(f"{path} has links of {name_hosts(gone)}, measured {earlier.when}; this probe leaves them out, and will take their place")  # fmt: skip
    return found


def why_not(earlier: Measurements | None, now: Measurements, *, whole: bool, lost: Collection[str]) -> str:
    """Why what the file has stays there; empty where what was measured now takes its place.

    A probe that lost some hosts does: its links are true. One without its end does not, nor one that measured next to
    nothing.
    """
    if not (now.pairs or now.inside):
        return "nothing was measured"
    if earlier is None:
        return ""
    if not whole:
        return "the probe did not come to its end"
    hosts = set(now.hosts) - set(lost)
    if len(hosts) < FEW * len(now.hosts):
        return f"{len(lost)} of {len(now.hosts)} hosts were lost"
    links, had = (
        {(p.source, p.target) for p in each.pairs if {p.source, p.target} <= hosts} for each in (now, earlier)
    )
    if len(links) < FEW * len(had):
        return f"of {len(had)} links that it has, {len(links)} could be measured now"
    return ""


def description(run_dir: Path, hosts: Sequence[str]) -> str:
    """What the hosts said of themselves before the probe, as a topology file; empty where not all were asked."""
    from distrib.cluster.topology import parse_topology
    from distrib.cluster.topology_draft import as_yaml, describe
    from distrib_launch.preflight.preflight import Report
    from distrib_launch.results import PREFLIGHT

    try:
        told = msgspec.json.decode((run_dir / PREFLIGHT).read_bytes(), type=Report).inventories
    except (OSError, msgspec.DecodeError):
        return ""
    if not set(hosts) <= set(told):
        return ""
    try:
        text = as_yaml(describe({host: told[host] for host in hosts}))
        parse_topology(text, "")
    except (ValueError, DistribError):  # hosts of a build that nobody thought of: what was measured is worth more
        return ""
    return text
