"""Cost of collectives on an idle network: all-reduce as NCCL and Gloo do it, parameter servers, gradient compression.

Formulas for n ranks and S bytes. Ring: 2(n-1) messages of S/n. Hierarchical: reduce-scatter in the host, all-reduce between hosts,
all-gather in the host. Bandwidths are counted as in nccl-tests, doc/PERFORMANCE.md. NCCL's algorithms are in `nccl_tuner`.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import msgspec

from distrib.bandwidth_model import link_curve, nccl_tuner
from distrib.bandwidth_model.bottleneck import TRANSPORTS
from distrib.bandwidth_model.bucketing import GradientBucket
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.link_curve import Curve
from distrib.cluster.measurements import Collective
from distrib.strategy import FORMATS, Gradients


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
    """
    known = FORMATS[gradients.format]
    if known.cost is None:
        return Payload(size_bytes=bucket.size_bytes)
    size, passes = known.cost(gradients, bucket.elements, bucket.tensors)
    if known.all_gather:
        return Payload(size_bytes=size, collective="all_gather", passes=passes)
    return Payload(size_bytes=min(bucket.size_bytes, size), passes=passes)


def ring_all_reduce(ranks: int, size_bytes: float, hop: Curve) -> float:
    """Compute the seconds of a ring all-reduce: 2(n-1) messages of S/n.

    Args:
        ranks: n.
        size_bytes: S.
        hop: The slowest link of the ring.
    """
    return 2 * (ranks - 1) * hop.seconds(size_bytes / ranks) if ranks > 1 else 0.0


def parameter_server(workers: int, servers: int, size_bytes: float, link: Curve) -> float:
    """Compute the seconds of a push or a pull with dedicated servers: max(M/B, nM/(kB)), as in BytePS (OSDI '20, section 3).

    Args:
        workers: n.
        servers: k.
        size_bytes: M.
        link: The link of a host, with bandwidth B.
    """
    return link.seconds(0) + max(1.0, workers / servers) * (link.seconds(size_bytes) - link.seconds(0))


def shared_parameter_server(hosts: int, size_bytes: float, link: Curve) -> float:
    """Compute the seconds of push and pull where each of n hosts serves 1/n: 2(n-1)M/(nB), as much as a ring.

    Args:
        hosts: n.
        size_bytes: M.
        link: The link of a host, with bandwidth B.
    """
    return 2 * (link.seconds(0) + (hosts - 1) / hosts * (link.seconds(size_bytes) - link.seconds(0)))


def all_reduce(fabric: Fabric, size_bytes: float, *, hierarchical: bool = False) -> float:
    """Compute the seconds of an all-reduce over all ranks of a job: NCCL on GPUs, Gloo on CPUs.

    Args:
        fabric: The links of the job.
        size_bytes: Bytes of each rank's buffer.
        hierarchical: True to reduce inside each host first.
    """
    if fabric.ranks == 1 or size_bytes <= 0:
        return 0.0
    if fabric.gpus:
        if hierarchical and fabric.network and fabric.intra_node:
            return _nccl_hierarchical(fabric, size_bytes)
        return _nccl(fabric, size_bytes)
    return _gloo_hierarchical(fabric, size_bytes) if hierarchical else _gloo_ring(fabric, size_bytes)


def all_gather(fabric: Fabric, size_bytes: float) -> float:
    """Compute the seconds of an all-gather, or of a reduce-scatter, over all ranks of a job.

    Args:
        fabric: The links of the job.
        size_bytes: Bytes of the whole buffer: what each rank has afterwards, or before a reduce-scatter.
    """
    if fabric.ranks == 1 or size_bytes <= 0:
        return 0.0
    if fabric.gpus:
        return nccl_tuner.nccl_all_gather(fabric, size_bytes) * _measured_ratio(fabric, size_bytes)
    return _gloo_ring(fabric, size_bytes) / 2


def one_host(fabric: Fabric) -> Fabric:
    """Return the ranks of one host.

    Args:
        fabric: The links of the job.
    """
    return msgspec.structs.replace(fabric, hosts=1, ranks=fabric.ranks_per_host, network=None, collectives=())


def between_hosts(fabric: Fabric, size_bytes: float) -> float:
    """Compute the seconds in which each rank of a host all-reduces its share with its peers on other hosts, all at the same time.

    Args:
        fabric: The links of the job.
        size_bytes: Bytes of all shares of a host.
    """
    if fabric.hosts == 1 or size_bytes <= 0:
        return 0.0
    if not fabric.gpus:
        return _gloo_hierarchical(msgspec.structs.replace(fabric, ranks_per_host=1), size_bytes)
    others = msgspec.structs.replace(fabric, ranks=fabric.hosts, ranks_per_host=1, intra_node=None)
    # The shares of all local ranks use the host's NICs at the same time and take as long as the whole.
    return nccl_tuner.nccl_all_reduce(others, size_bytes, channels=nccl_tuner.network_channels(fabric))


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
            (1 + 1 / fabric.ranks_per_host)
            * size_bytes
            / (fabric.memory_bytes_per_second or TRANSPORTS.memory_bytes_per_second)
        )
    if fabric.network is None:
        return inside
    measured = _by_count(fabric.collectives)
    if measured:
        return inside + _from_measured(measured, fabric.hosts, size_bytes)
    return inside + ring_all_reduce(fabric.hosts, size_bytes, _with_hop(fabric.network.curve))


def _with_hop(curve: Curve) -> Curve:
    return link_curve.linear_curve(curve.latency_seconds + TRANSPORTS.gloo_hop_seconds, curve.large_bytes_per_second)


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
    return nccl_tuner.nccl_all_reduce(fabric, size_bytes) * _measured_ratio(fabric, size_bytes)


def _measured_ratio(fabric: Fabric, size_bytes: float) -> float:
    """Divide a measured NCCL all-reduce by the tuner's time for it; 1 without a measurement."""
    nearest = min(fabric.collectives, key=lambda one: abs(math.log(one.ranks / fabric.ranks)), default=None)
    seen = dict(_by_count(fabric.collectives)).get(nearest.ranks) if nearest else None
    if nearest is None or seen is None:
        return 1.0
    hosts = len(nearest.hosts)
    each = nearest.ranks // hosts
    there = msgspec.structs.replace(
        fabric,
        hosts=hosts,
        ranks=nearest.ranks,
        ranks_per_host=each,
        intra_node=fabric.intra_node if each > 1 else None,
    )
    return seen.seconds(size_bytes) / nccl_tuner.nccl_all_reduce(there, size_bytes)


def _nccl_hierarchical(fabric: Fabric, size_bytes: float) -> float:
    """Add three collectives in sequence: the two inside the host together cost one all-reduce there."""
    return nccl_tuner.nccl_all_reduce(one_host(fabric), size_bytes) + between_hosts(fabric, size_bytes)
