"""Cost of collectives on an idle network: all-reduce as NCCL and Gloo do it, parameter servers, gradient compression.

Formulas for n ranks and S bytes. Ring: 2(n-1) messages of S/n. Double tree: S up and S down in 2 log2(n) hops, inside each host along
a chain of its GPUs. Hierarchical: reduce-scatter in the host, all-reduce between hosts, all-gather in the host. Bandwidths are
counted as in nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import msgspec

from distrib.bandwidth_model import link_curve
from distrib.bandwidth_model.bucketing import GradientBucket
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.link_curve import Curve
from distrib.cluster.measurements import Collective
from distrib.strategy import FORMATS, Gradients

# NVIDIA/nccl@5067397 src/graph/tuning.cc: microseconds, for LL, LL128 and Simple.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_RING_HOP = {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7), "net": (2.7, 4.0, 14.0)}
_TREE_HOP = {"nvlink": (0.6, 1.25, 4.0), "pcie": (1.0, 1.9, 4.0), "net": (5.0, 8.5, 14.0)}
_RING_PART = (0.5, 0.92, 1.0)
_TREE_PART = (1 / 3.8, 0.92, 0.92)
_MANY_NODES_SIMPLE = 1.4
"""Factor of Simple's ring latency over several nodes."""

GLOO_HOP_SECONDS = 60e-6
"""Gloo's cost of a message beyond the latency of the link, where no all-reduce was measured."""

MEMORY_BYTES_PER_SECOND = 5e9
"""Copies in the memory of a CPU host, where not measured."""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one rank sends for a bucket, and the cost of packing them.

    `passes`: how often packing and unpacking read or write the bucket's own bytes.
    """

    size_bytes: float
    collective: Literal["all_reduce", "all_gather"] = "all_reduce"
    passes: float = 0.0


def payload_of(bucket: GradientBucket, gradients: Gradients) -> Payload:
    """Compute the payload of a bucket after compression.

    Args:
        bucket: The bucket.
        gradients: The format on the network.

    Returns:
        The payload of one rank.
    """
    known = FORMATS[gradients.format]
    if known.cost is None:
        return Payload(size_bytes=bucket.size_bytes)
    size, passes = known.cost(gradients, bucket.elements, bucket.tensors)
    if known.all_gather:
        return Payload(size_bytes=size, collective="all_gather", passes=passes)
    return Payload(size_bytes=min(bucket.size_bytes, size), passes=passes)


def ring_all_reduce(ranks: int, size_bytes: float, hop: Curve) -> float:
    """Compute the time of a ring all-reduce: 2(n-1) messages of S/n.

    Args:
        ranks: n.
        size_bytes: S.
        hop: The slowest link of the ring.

    Returns:
        Seconds.
    """
    return 2 * (ranks - 1) * hop.seconds(size_bytes / ranks) if ranks > 1 else 0.0


def parameter_server(workers: int, servers: int, size_bytes: float, link: Curve) -> float:
    """Compute the time of a push or a pull with dedicated servers: max(M/B, nM/(kB)), as in BytePS (OSDI '20, section 3).

    Args:
        workers: n.
        servers: k.
        size_bytes: M.
        link: The link of a host, with bandwidth B.

    Returns:
        Seconds.
    """
    return link.seconds(0) + max(1.0, workers / servers) * (link.seconds(size_bytes) - link.seconds(0))


def shared_parameter_server(hosts: int, size_bytes: float, link: Curve) -> float:
    """Compute the time of push and pull where each of n hosts serves 1/n: 2(n-1)M/(nB), as much as a ring.

    Args:
        hosts: n.
        size_bytes: M.
        link: The link of a host, with bandwidth B.

    Returns:
        Seconds.
    """
    return 2 * (link.seconds(0) + (hosts - 1) / hosts * (link.seconds(size_bytes) - link.seconds(0)))


def all_reduce(fabric: Fabric, size_bytes: float, *, hierarchical: bool = False) -> float:
    """Compute the time of an all-reduce over all ranks of a job: NCCL on GPUs, Gloo on CPUs.

    Args:
        fabric: The links of the job.
        size_bytes: Bytes of each rank's buffer.
        hierarchical: True to reduce inside each host first.

    Returns:
        Seconds.
    """
    if fabric.ranks == 1 or size_bytes <= 0:
        return 0.0
    if fabric.gpus:
        if hierarchical and fabric.network and fabric.intra_node:
            return _nccl_hierarchical(fabric, size_bytes)
        return _nccl(fabric, size_bytes)
    return _gloo_hierarchical(fabric, size_bytes) if hierarchical else _gloo_ring(fabric, size_bytes)


def _gloo_ring(fabric: Fabric, size_bytes: float) -> float:
    if fabric.network is None:
        return ring_all_reduce(fabric.ranks, size_bytes, fabric.intra_node.curve) if fabric.intra_node else 0.0
    measured = _by_count(fabric.collectives)
    if measured:
        return _from_measured(measured, fabric.ranks, size_bytes)
    return ring_all_reduce(fabric.ranks, size_bytes, _with_hop(fabric.network.curve))


def _gloo_hierarchical(fabric: Fabric, size_bytes: float) -> float:
    """Sum in shared memory inside each host; each rank all-reduces its share with its peers on other hosts."""
    inside = 0.0
    if fabric.ranks_per_host > 1:
        inside = (
            (1 + 1 / fabric.ranks_per_host) * size_bytes / (fabric.memory_bytes_per_second or MEMORY_BYTES_PER_SECOND)
        )
    if fabric.network is None:
        return inside
    measured = _by_count(fabric.collectives)
    if measured:
        return inside + _from_measured(measured, fabric.hosts, size_bytes)
    return inside + ring_all_reduce(fabric.hosts, size_bytes, _with_hop(fabric.network.curve))


def _with_hop(curve: Curve) -> Curve:
    return link_curve.linear_curve(curve.latency_seconds + GLOO_HOP_SECONDS, curve.large_bytes_per_second)


@functools.lru_cache(maxsize=256)
def _by_count(collectives: tuple[Collective, ...]) -> tuple[tuple[int, Curve], ...]:
    found = {each.ranks: link_curve.measured_curve(each.curve) for each in collectives}
    return tuple((count, curve) for count, curve in sorted(found.items()) if curve is not None)


def _from_measured(measured: tuple[tuple[int, Curve], ...], ranks: int, size_bytes: float) -> float:
    """Scale measured all-reduces to another number of ranks.

    A ring of n ranks sends 2(n-1) messages of S/n; over m measured ranks 2(m-1) such messages took the time of mS/n. Between two
    measured counts: interpolated by the logarithm of the count.
    """
    below = [item for item in measured if item[0] <= ranks][-1:] or [measured[0]]
    above = [item for item in measured if item[0] >= ranks][:1] or [measured[-1]]
    (m, low), (k, high) = below[0], above[0]
    first = (ranks - 1) / (m - 1) * low.seconds(size_bytes * m / ranks)
    if m == k:
        return first
    second = (ranks - 1) / (k - 1) * high.seconds(size_bytes * k / ranks)
    part = math.log(ranks / m) / math.log(k / m)
    return math.exp((1 - part) * math.log(first) + part * math.log(second))


def _nccl(fabric: Fabric, size_bytes: float) -> float:
    """Scale NCCL's tuner model by the measurement over the most similar number of ranks."""
    seconds = _nccl_tuned(fabric, size_bytes)
    nearest = min(fabric.collectives, key=lambda one: abs(math.log(one.ranks / fabric.ranks)), default=None)
    seen = dict(_by_count(fabric.collectives)).get(nearest.ranks) if nearest else None
    if nearest is None or seen is None:
        return seconds
    hosts = len(nearest.hosts)
    each = nearest.ranks // hosts
    there = msgspec.structs.replace(
        fabric,
        hosts=hosts,
        ranks=nearest.ranks,
        ranks_per_host=each,
        intra_node=fabric.intra_node if each > 1 else None,
    )
    return seconds * seen.seconds(size_bytes) / _nccl_tuned(there, size_bytes)


def _nccl_tuned(fabric: Fabric, size_bytes: float) -> float:
    """Compute the fastest of NCCL's algorithms and protocols by its tuner's model (src/graph/tuning.cc)."""
    inside = fabric.intra_node
    bus = "nvlink" if inside and inside.kind == "nvlink" else "pcie"
    rates = [link.bytes_per_second for link in (fabric.network, inside) if link]
    bandwidth = min(rates)
    n, hosts, each = fabric.ranks, fabric.hosts, fabric.ranks_per_host
    # The tuner assumes InfiniBand; TCP has a higher latency.
    extra_latency = max(0.0, fabric.network.curve.latency_seconds - 2.7e-6) if fabric.network else 0.0
    # Of two hosts, each is the root of one tree and the leaf of the other; of two GPUs in a host, each is an end of its chain.
    loads = ((fabric.network, 1 if hosts == 2 else 2), (inside, 1 if each == 2 else 2))
    tree = max(load / link.bytes_per_second for link, load in loads if link)
    best = math.inf
    for number, protocol in enumerate(("LL", "LL128", "Simple")):
        if protocol == "LL128" and inside and bus == "pcie":
            continue  # LL128 needs 128-byte stores, which NVLink has
        between = 2 * (hosts - 1)
        latency = _BASE["ring"][number] + (2 * (n - 1) - between) * _RING_HOP[bus][number]
        latency += between * _RING_HOP["net"][number]
        if protocol == "Simple" and hosts > 1:
            latency *= _MANY_NODES_SIMPLE
        carried = 2 * (n - 1) / n * size_bytes / (bandwidth * _RING_PART[number])
        best = min(best, latency * 1e-6 + between * extra_latency + carried)
        if hosts > 1:
            hops = math.log2(hosts)
            latency = _BASE["tree"][number] + 2 * (
                (each - 1) * _TREE_HOP[bus][number] + hops * _TREE_HOP["net"][number]
            )
            carried = tree * size_bytes / _TREE_PART[number]
            best = min(best, latency * 1e-6 + 2 * hops * extra_latency + carried)
    return best


def _nccl_hierarchical(fabric: Fabric, size_bytes: float) -> float:
    """Add three collectives in sequence: the two inside the host together cost one all-reduce there."""
    host = msgspec.structs.replace(fabric, hosts=1, ranks=fabric.ranks_per_host, network=None)
    others = msgspec.structs.replace(fabric, ranks=fabric.hosts, ranks_per_host=1, intra_node=None)
    # The shares of all local ranks use the host's NICs at the same time and take as long as the whole.
    return _nccl_tuned(host, size_bytes) + _nccl_tuned(others, size_bytes)
