"""Output file of a probe: checked before the probe, so that measurements are not lost after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from distrib.cluster.measurements import IntraNodeLinkMeasurement, Measurements
from distrib.cluster.measurements_writer import check_accepts_measurements, check_writable
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import check_hosts, parse_topology, read_topology
from distrib.cluster.topology_draft import draft_groups, topology_yaml
from distrib.errors import ConfigError, DistribError
from distrib.utils import files

if TYPE_CHECKING:
    from distrib.cluster.hosts import HostList
    from distrib.cluster.inventory import Inventory

MIN_REPLACED_FRACTION = 0.5
"""A probe replaces earlier measurements only if it has this fraction of its hosts, and of the file's links."""


def check_output(path: str, listed: HostList, hosts: Collection[str]) -> tuple[Measurements | None, list[str]]:
    """Check that a topology file can take the measurements of a probe.

    Args:
        path: The file; it may not exist yet.
        listed: All hosts that the user named.
        hosts: Names of the hosts to probe.

    Returns:
        The earlier measurements of the file, and notes for the user.

    Raises:
        ConfigError: The file is not writable, or has measurements of many more hosts.
    """
    check_writable(path)
    earlier = None
    notes: Sequence[str] = ()
    if files.exists(path) and Path(path).stat().st_size:
        topology = read_topology(path)
        chosen = tuple(host for host in listed.hosts if host.name in hosts)
        notes = check_hosts(topology, msgspec.structs.replace(listed, hosts=chosen))  # raises for hosts that it lacks
        if len(chosen) < len(listed.hosts):
            notes = ()  # other records are left out on purpose
        earlier = topology.measured
    check_accepts_measurements(path, hosts)
    if earlier is None:
        return None, list(notes)
    links = {(pair.source, pair.target) for pair in earlier.pairs}
    kept = [ends for ends in links if set(ends) <= set(hosts)]
    if len(kept) < MIN_REPLACED_FRACTION * len(links):
        raise ConfigError(
            f"-o {path}: it has {len(links)} links of {earlier.when}, and these hosts have {len(kept)} of them",
            hint="name another file, or delete its `measured:` part",
        )
    parts = {"links": earlier.pairs, "GPU copies": _of_gpus(earlier), "all-reduce": earlier.collectives}
    parts["curves"] = [pair for pair in earlier.pairs if pair.curve]
    listed_parts = ", ".join(name for name, measured in parts.items() if measured)
    gone = [host for host in earlier.hosts if host not in hosts]
    without = f", and leaves out {name_hosts(gone)}" if gone else ""
    return earlier, [
        *notes,
        f"the probe replaces the measurements of {earlier.when} in {path} ({listed_parts}){without}",
    ]


def _of_gpus(measured: Measurements) -> list[IntraNodeLinkMeasurement]:
    return [link for link in measured.inside if {link.source, link.target} != {"memory"}]


def why_kept(earlier: Measurements | None, now: Measurements, *, complete: bool, lost: Collection[str]) -> str:
    """Explain why the earlier measurements stay in the file.

    Links of hosts that were not lost are valid. A probe that was cut short, or that measured little, replaces nothing.

    Args:
        earlier: The measurements in the file.
        now: The measurements of this probe.
        complete: True if the probe was completed.
        lost: Hosts that were lost during the probe.

    Returns:
        The reason; empty if the new measurements replace them.
    """
    if not (now.pairs or now.inside):
        return "nothing was measured"
    if earlier is None:
        return ""
    if not complete:
        return "the probe was not completed"
    hosts = set(now.hosts) - set(lost)
    if len(hosts) < MIN_REPLACED_FRACTION * len(now.hosts):
        return f"{len(lost)} of {len(now.hosts)} hosts were lost"
    links, had = (
        {(p.source, p.target) for p in each.pairs if {p.source, p.target} <= hosts} for each in (now, earlier)
    )
    if len(links) < MIN_REPLACED_FRACTION * len(had):
        return f"only {len(links)} of its {len(had)} links were measured"
    return ""


def draft_topology(inventories: Mapping[str, Inventory], hosts: Sequence[str]) -> str:
    """Write the hosts' inventories as a topology file.

    Args:
        inventories: Inventories by host.
        hosts: Names of the hosts.

    Returns:
        YAML text; empty if an inventory is missing or cannot be described.
    """
    if not set(hosts) <= set(inventories):
        return ""
    try:
        text = topology_yaml(draft_groups({host: inventories[host] for host in hosts}))
        parse_topology(text, "")
    except (ValueError, DistribError):  # unusual hardware must not cost the measurements
        return ""
    return text
