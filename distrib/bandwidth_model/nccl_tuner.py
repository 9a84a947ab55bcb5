"""Tuner model of NCCL: time of an all-reduce by the fastest algorithm and protocol on an idle network.

Formulas and constants: NVIDIA/nccl@5067397 (2.30.7) src/graph/tuning.cc, search.cc. Ring: 2(n-1) messages of S/n. Double tree: S up and S down
in 2 log2(hosts) hops, inside each host along a chain of its GPUs. NVLS: switches of the host add and multicast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import msgspec

from distrib.bandwidth_model.fabric import Fabric

Value = TypeVar("Value")
_Since: TypeAlias = tuple[tuple[float, Value], ...]
"""Values by the first compute capability that they hold for, oldest first."""
_ByHosts: TypeAlias = tuple[float, float, float]
"""Values for one, two and more hosts."""


class NcclProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """A protocol of NCCL: latencies in microseconds of an operation and of hops over NVLink, PCIe and the network."""

    name: str
    ring: tuple[float, float, float, float]
    tree: tuple[float, float, float, float]
    ring_fraction: float
    """Fraction of the link's bandwidth that carries data."""
    tree_fractions: tuple[float, float]
    """The same on one host and over several, beyond `tree_fraction`."""
    tree_correction: tuple[float, ...]
    """Factors of a tree's bandwidth at 64 B, 128 B and so on; 1 from 512 MiB."""


class NcclTuner(msgspec.Struct, frozen=True):
    """Constants of the tuner; bandwidths in bytes per second."""

    protocols: tuple[NcclProtocol, ...] = (
        NcclProtocol(
            name="LL", ring=(6.6, 0.6, 1.0, 2.7), tree=(6.8, 0.6, 1.0, 5.0), ring_fraction=0.5, tree_fractions=(1 / 3.8, 1 / 3.8),
            tree_correction=(1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1, 1),
        ),
        NcclProtocol(
            name="LL128", ring=(14.0, 1.9, 2.5, 4.0), tree=(14.0, 1.25, 1.9, 8.5), ring_fraction=0.92, tree_fractions=(7 / 9, 120 / 128),
            tree_correction=(1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1, 1),
        ),
        NcclProtocol(
            name="Simple", ring=(8.4, 3.4, 5.7, 14.0), tree=(8.4, 4.0, 4.0, 14.0), ring_fraction=1.0, tree_fractions=(1.0, 1.0),
            tree_correction=(.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9, 1),
        ),
    )  # fmt: skip
    tree_fraction: float = 0.92
    ll_max: _Since[_ByHosts] = (
        (0.0, (39e9, 39e9, 20.4e9)), (8.0, (87.7e9, 39e9, 20.4e9)), (9.0, (141e9, 39e9, 20.4e9)), (10.0, (282e9, 39e9, 20.4e9)),
    )  # fmt: skip
    """Limits of LL: by the GPU on one host, by the CPU (as of Intel) over several."""
    channel_ring_ll128: _Since[_ByHosts] = (
        (0.0, (20e9, 20e9, 20e9)), (9.0, (36.7e9, 36.7e9, 36.7e9)), (10.0, (40e9, 40e9, 40e9)),
    )  # fmt: skip
    channel_tree_ll128: _Since[_ByHosts] = (
        (0.0, (20e9, 20e9, 20e9)), (9.0, (36.7e9, 36.7e9, 29e9)), (10.0, (55.6e9, 31.67e9, 20e9)),
    )  # fmt: skip
    channel_tree: _Since[_ByHosts] = (
        (0.0, (26.5e9, 18.5e9, 10e9)), (8.0, (24e9, 23.6e9, 17.8e9)), (9.0, (38.7e9, 41.4e9, 36e9)), (10.0, (70e9, 42.8e9, 24e9)),
    )  # fmt: skip
    channel_nvls_tree: _Since[_ByHosts] = ((9.0, (0.0, 57.7e9, 45.5e9)), (10.0, (0.0, 96e9, 80e9)))
    channel_nvlink: _Since[float] = ((0.0, 20e9), (9.0, 30e9), (10.0, 45e9))
    """Bandwidth of a channel over NVLink inside one host."""
    nvls_efficiency: _Since[float] = ((9.0, 0.85), (10.0, 0.74))
    nvls_latency: float = 46.0
    """Two passes of 23 microseconds, reduction and multicast (aws/aws-ofi-nccl@2daf7d3 src/tuner/nccl_ofi_model.cpp)."""
    nvls_channels: _Since[int] = ((9.0, 16), (10.0, 24))
    """Channels of NVLS on one host (`ncclNvlsTuning` in src/transport/nvls.cc)."""
    nvls_chunks: tuple[tuple[int, int], ...] = ((128 << 10, 64), (64 << 10, 8), (32 << 10, 2), (16 << 10, 0))
    """Bytes of a chunk, and how many of it each channel and GPU must have at least (`calcCollChunking` in src/enqueue.cc)."""
    nvls_stages: int = 4
    """Stages of the pipeline of chunks: scatter, reduce, multicast, gather (src/device/all_reduce.h)."""
    nvls_tree_latency: float = 25.0
    nvls_tree_hop: float = 20.9
    post_overhead: float = 1.0
    """Microseconds for posting a message of a ring over several hosts; three times as much in Simple."""
    ring_plateau: _Since[float] = ((0.0, 1.9), (8.0, 1.4))
    """Factor of a ring's latency in Simple over several hosts, from 64 bytes per channel and rank."""
    ring_families: tuple[str, ...] = ("GPUDirect-TCPX",)
    """Networks with `NCCL_ALGO=Ring` and `NCCL_PROTO=Simple` (Google's guide to GPUDirect-TCPX, as dstack's example of
    A3 High quotes it)."""
    network_latency_seconds: float = 2.7e-6
    """Latency of InfiniBand, which the hops over the network contain."""


NCCL_TUNER = NcclTuner()
UNKNOWN_CAPABILITY = 8.0
"""Compute capability of GPUs without one in the catalogue, those of AMD among them."""


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a fabric that all algorithms use; latencies in microseconds, bandwidths in bytes per second."""

    ranks: int
    hosts: int
    each: int
    capability: float
    has_nvlink: bool
    has_nvls: bool
    inside: float
    """Bandwidth inside hosts, infinite for one rank per host."""
    network: float
    """Bandwidth between hosts, infinite for one host."""
    channels: int
    extra: float
    """Latency of the network beyond InfiniBand's."""
    extra_simple: float
    """The same in Simple: twice as much with RDMA, for the flush of the NIC's writes to GPU memory."""

    @property
    def place(self) -> int:
        """The place in values by number of hosts."""
        return min(self.hosts, 3) - 1

    @property
    def tree_load(self) -> float:
        """Seconds per byte of a tree.

        Of two hosts, each is the root of one tree and the leaf of the other; of two GPUs in a host, each is an end of its chain.
        """
        return max((1 if self.hosts == 2 else 2) / self.network, (1 if self.each == 2 else 2) / self.inside)


def nccl_all_reduce(fabric: Fabric, size_bytes: float, *, channels: int | None = None) -> float:
    """Compute the seconds of the fastest algorithm and protocol.

    Args:
        fabric: The links of the job.
        size_bytes: Bytes of each rank's buffer.
        channels: Channels over the network; None: derived from the NICs.
    """
    job = _job(fabric, channels)
    algorithms = (time for protocol in _protocols(fabric, job) for time in _ring_and_tree(job, protocol, size_bytes))
    if fabric.network and fabric.network.family in NCCL_TUNER.ring_families:
        return next(algorithms)
    return min([*algorithms, *_nvls(job, size_bytes)])


def nccl_all_gather(fabric: Fabric, size_bytes: float) -> float:
    """Compute the seconds of an all-gather or a reduce-scatter: half of the ring of an all-reduce, as both have n-1 messages of S/n.

    Args:
        fabric: The links of the job.
        size_bytes: Bytes of the whole buffer.
    """
    job = _job(fabric, None)
    return min(next(_ring_and_tree(job, protocol, size_bytes)) for protocol in _protocols(fabric, job)) / 2


def network_channels(fabric: Fabric) -> int:
    """Count NCCL's channels over the network: one for each NIC, those of one GPU joined, two over fast ones.

    Args:
        fabric: The links of the job.
    """
    if fabric.network is None:
        return 1
    channels = max(1, min(fabric.network.ports, fabric.ranks_per_host))
    each = fabric.network.bytes_per_second / channels
    capability = _capability(fabric)
    is_split = each >= 25e9 and not (capability > 8.0 and each < 50e9 and channels > 4)
    return 2 * channels if is_split else channels


def _job(fabric: Fabric, channels: int | None) -> _Job:
    inside, network = fabric.intra_node, fabric.network
    has_nvlink = inside is not None and inside.kind == "nvlink"
    capability = _capability(fabric)
    extra = 0.0
    if network:
        extra = 1e6 * max(0.0, network.curve.latency_seconds - NCCL_TUNER.network_latency_seconds)
        channels = channels or network_channels(fabric)
    elif has_nvlink and inside:
        channels = max(1, round(inside.bytes_per_second / _since(NCCL_TUNER.channel_nvlink, capability)))
    return _Job(
        ranks=fabric.ranks,
        hosts=fabric.hosts,
        each=fabric.ranks_per_host,
        capability=capability,
        has_nvlink=has_nvlink,
        has_nvls=has_nvlink and fabric.nvswitch and capability >= NCCL_TUNER.nvls_efficiency[0][0],
        inside=inside.bytes_per_second if inside else math.inf,
        network=network.bytes_per_second if network else math.inf,
        channels=channels or 2,
        extra=extra,
        extra_simple=2 * extra if network and network.kind != "ethernet" else extra,
    )


def _capability(fabric: Fabric) -> float:
    return UNKNOWN_CAPABILITY if fabric.compute_capability is None else fabric.compute_capability


def _since(values: _Since[Value], capability: float) -> Value:
    """Return the value of the newest generation up to `capability`."""
    return [value for first, value in values if first <= capability][-1]


def _protocols(fabric: Fabric, job: _Job) -> Iterator[NcclProtocol]:
    """Yield the possible protocols.

    LL128 needs 128-byte stores, which NVLink has, from compute capability 7.0. EFA keeps the order of bytes from the P5 instances on
    (aws/aws-ofi-nccl@2daf7d3 src/platform-aws.cpp); on older ones its plugin selects Simple.
    """
    for protocol in NCCL_TUNER.protocols:
        if protocol.name == "LL128" and (job.capability < 7.0 or (job.each > 1 and not job.has_nvlink)):
            continue
        family = fabric.network.family if fabric.network else ""
        is_simple_only = family in NCCL_TUNER.ring_families or (family == "EFA" and job.capability < 9.0)
        if is_simple_only and protocol.name != "Simple":
            continue
        yield protocol


def _ring_and_tree(job: _Job, protocol: NcclProtocol, size_bytes: float) -> Iterator[float]:
    inside_hop = 1 if job.has_nvlink else 2
    is_simple = protocol.name == "Simple"
    extra = job.extra_simple if is_simple else job.extra
    bandwidth = min(job.inside, job.network) * protocol.ring_fraction
    ll_max = _since(NCCL_TUNER.ll_max, job.capability)[job.place]
    if protocol.name == "LL":
        bandwidth = min(bandwidth, ll_max)
    elif protocol.name == "LL128":
        bandwidth = min(bandwidth, job.channels * _since(NCCL_TUNER.channel_ring_ll128, job.capability)[job.place])
    inside = protocol.ring[inside_hop]
    if job.hosts > 1:
        inside = max(inside, NCCL_TUNER.post_overhead * (3 if is_simple else 1))
    # One rank per host hides nothing of the network's latency.
    network = (protocol.tree if job.each == 1 else protocol.ring)[3] + extra
    between = 2 * (job.hosts - 1)
    latency = protocol.ring[0] + (2 * (job.ranks - 1) - between) * inside + between * network
    if is_simple and job.hosts > 1 and size_bytes >= 64 * job.channels * job.ranks:
        latency *= _since(NCCL_TUNER.ring_plateau, job.capability)
    yield latency * 1e-6 + 2 * (job.ranks - 1) / job.ranks * size_bytes / bandwidth

    # The limits are of bus bandwidth, twice what a tree reduces.
    rate = NCCL_TUNER.tree_fraction / job.tree_load
    rate = min(rate, job.channels * _since(NCCL_TUNER.channel_tree, job.capability)[job.place] / 2)
    rate *= protocol.tree_fractions[0 if job.hosts == 1 else 1]
    if protocol.name == "LL":
        rate = min(rate, ll_max / 2)
    elif protocol.name == "LL128":
        rate = min(rate, job.channels * _since(NCCL_TUNER.channel_tree_ll128, job.capability)[job.place] / 2)
    rate *= _correction(protocol, size_bytes)
    hops = math.log2(job.hosts)
    latency = protocol.tree[0] + 2 * ((job.each - 1) * protocol.tree[inside_hop] + hops * (protocol.tree[3] + extra))
    yield latency * 1e-6 + size_bytes / rate


def _nvls(job: _Job, size_bytes: float) -> Iterator[float]:
    """Yield the time of NVLS on one host, or of NVLSTree over several.

    A GPU sends its whole buffer to the switches and its share of the sum: S (1 + 1/n).
    """
    if not job.has_nvls:
        return
    rate = _since(NCCL_TUNER.nvls_efficiency, job.capability) * job.inside / (1 + 1 / job.each)
    if job.hosts == 1:
        filling = (NCCL_TUNER.nvls_stages - 1) * _nvls_chunk_bytes(job, size_bytes) / rate
        yield NCCL_TUNER.nvls_latency * 1e-6 + filling + size_bytes / rate
        return
    limit = job.channels * _since(NCCL_TUNER.channel_nvls_tree, job.capability)[job.place]
    reduced = job.ranks / (2 * (job.ranks - 1))  # of the bus bandwidth
    rate = min(rate, limit * reduced, job.network / (1 if job.hosts == 2 else 2))
    if job.capability >= 10.0:
        rate *= _correction(NCCL_TUNER.protocols[-1], size_bytes)
    hops = 2 * math.log2(job.hosts)
    latency = NCCL_TUNER.nvls_tree_latency + hops * (NCCL_TUNER.nvls_tree_hop + job.extra_simple)
    yield latency * 1e-6 + size_bytes / rate


def _nvls_chunk_bytes(job: _Job, size_bytes: float) -> float:
    """Return the bytes that all channels and GPUs have in one stage of the pipeline; less for small buffers."""
    parallel = job.each * _since(NCCL_TUNER.nvls_channels, job.capability)
    larger = [parallel * chunk for chunk, least in NCCL_TUNER.nvls_chunks if size_bytes >= least * parallel * chunk]
    return larger[0]


def _correction(protocol: NcclProtocol, size_bytes: float) -> float:
    """Interpolate the factor of a tree's bandwidth, so that more bytes are never faster."""
    factors = protocol.tree_correction
    place = min(max(0.0, math.log2(max(size_bytes, 64.0) / 64)), len(factors) - 1.0)
    low = min(int(place), len(factors) - 2)
    return factors[low] + (place - low) * (factors[low + 1] - factors[low])
