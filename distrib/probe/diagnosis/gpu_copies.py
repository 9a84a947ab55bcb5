"""Copies to, from and between GPUs that are slower than the others of their kind. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from distrib.cluster.measurements import InsideLink
from distrib.cluster.node import shown_hosts
from distrib.probe.diagnosis.finding import Finding
from distrib.probe.records import Facts
from distrib.units import format_rate

SLOW = 0.75
"""Of what is usual; copies of one kind differ by some per cent, and by the socket that the memory belongs to."""

LEAST = 3
"""So many of a kind say what is usual."""


def slow_copies(links: Sequence[InsideLink], facts: Mapping[str, Facts]) -> list[Finding]:
    """GPUs whose copies are slow, judged by those of GPUs of the same name, the same way and direction; of two GPUs, by those of
    the same two of other hosts."""
    names = {(host, f"gpu{gpu.index}"): gpu.name for host, each in facts.items() for gpu in each.gpus}
    kinds: dict[tuple[str, ...], list[InsideLink]] = {}
    for link in links:
        ends = tuple(end if end == "memory" else names.get((link.host, end), "") for end in (link.source, link.target))
        if "" in ends or ends == ("memory", "memory"):  # copies of processors, which may differ
            continue
        # Two GPUs have as many NVLinks, and the sockets, of the same two of another host.
        pair = (link.source, link.target) if "memory" not in ends and link.source != link.target else ()
        kinds.setdefault((*ends, *pair, link.path or ""), []).append(link)
    slow: dict[tuple[str, str], list[tuple[float, InsideLink, list[InsideLink]]]] = {}
    for of_kind in kinds.values():
        usual = statistics.median(link.bandwidth_bytes_per_second for link in of_kind)
        for link in of_kind if len(of_kind) >= LEAST else ():
            part = link.bandwidth_bytes_per_second / usual
            if part < SLOW:
                gpu = link.source if link.source != "memory" else link.target
                slow.setdefault((link.host, gpu), []).append((part, link, of_kind))
    found = []
    for (host, gpu), ways in slow.items():
        part, link, of_kind = min(ways, key=lambda way: way[0])
        rate = link.bandwidth_bytes_per_second
        hosts = shown_hosts(tuple(dict.fromkeys(each.host for each in of_kind)))
        others = f", and {len(ways) - 1} more of its ways" if len(ways) > 1 else ""
        found.append(
            Finding(
                kind="slow_copies", severity="warning",
                what=f"{host}: from {link.source} to {link.target} ({link.path or 'copy'}) bytes go at {part:.0%} of what is usual here{others}",
                evidence=f"{format_rate(rate)}, of {format_rate(rate / part)} usual between {len(of_kind)} of its kind on {hosts}",
                advice="nvidia-smi -q -i "
                f"{gpu[3:]}: link width and generation under load, replays, throttling; see what else uses the GPU, and reseat it",
                hosts=(host,), ratio=part, loss=0.2 * (1 - part),
            )
        )  # fmt: skip
    return found
