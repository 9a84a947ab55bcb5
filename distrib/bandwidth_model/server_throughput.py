"""Steps with asynchronous parameter servers: workers do not wait for each other, but share the links of the servers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from distrib.bandwidth_model import bucketing, collective_cost, step_timeline
from distrib.bandwidth_model.bottleneck import RingLink
from distrib.bandwidth_model.collective_cost import payload_of
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.step_timeline import Step
from distrib.bandwidth_model.workload import Workload
from distrib.strategy import Strategy


@dataclass(frozen=True)
class ChunkSettings:
    """Limits of a chunk of the parameters, the unit of transfer and update."""

    min_bytes: int = 64 << 10
    """A smaller one costs more in headers, system calls and optimizer steps than its time at 1 Gb/s."""
    max_bytes: int = 4 << 20
    target_count: int = 32
    """Chunks of a large model: while one returns, others are in flight."""
    min_per_server: int = 4
    max_per_server: int = 16
    min_shared_bytes: int = 1 << 20
    """The lower limit in shared memory, which is faster than a network."""


CHUNKS = ChunkSettings()


@dataclass(frozen=True)
class ServerModelSettings:
    """Calibrated behaviour of parameter servers, measured on virtual hosts (benchmarks/prediction.py)."""

    goodput_loss_per_host: float = 0.05
    """Unused bandwidth per further host, as all send to all at their own pace, if the workers of a host push together."""
    min_goodput: float = 0.7
    """Goodput with many hosts: 0.95 with 2 and 0.7 with 7."""
    overlap_norm: float = 2.5
    """The step is the norm of this order of computing and communication, which hide each other imperfectly."""
    turnaround_seconds: float = 10e-3
    """From the last gradient to the updated parameters, without the network."""
    memory_bytes_per_second: float = 3.4e9
    """Throughput of one server over shared memory, gradients and values together.

    Measured between 2.6 GB/s with 10 MB and 4.2 GB/s with 100 MB (docs/benchmarks/parameter-server.md).
    """
    socket_bytes_per_second: float = 1.75e9
    """Throughput of one server over sockets, gradients and values together.

    Measured with one worker on an H200: a step of GPT-2 took 569 ms with 498 MB in each direction. ResNet-50 agrees: 102 MB in 91 to
    120 ms (docs/benchmarks/gpu.md).
    """


SETTINGS = ServerModelSettings()


def chunk_bytes(total_bytes: int, servers: int, *, shared: bool = False) -> int:
    """Compute the size of a chunk of the parameters, the unit of transfer and update.

    Args:
        total_bytes: All parameters.
        servers: Servers that share them.
        shared: True if workers and servers share memory.

    Returns:
        Bytes, at most.
    """
    fewest, most = CHUNKS.min_per_server, CHUNKS.max_per_server
    if shared:  # one chunk is copied while another is updated
        return min(CHUNKS.max_bytes, max(CHUNKS.min_shared_bytes, total_bytes // (servers * fewest)))
    each = min(most, max(fewest, CHUNKS.target_count // servers))
    return min(CHUNKS.max_bytes, max(CHUNKS.min_bytes, total_bytes // (servers * each)))


def ranks_per_push(fabric: Fabric, strategy: Strategy) -> int:
    """Count the ranks of a host that push together.

    Args:
        fabric: The links of the job.
        strategy: The strategy of the job.

    Returns:
        1 if each rank pushes its own gradients.
    """
    return fabric.ranks_per_host if strategy.host_reduction and fabric.network else 1


def parameter_server_step(fabric: Fabric, workload: Workload, strategy: Strategy, slowness: float) -> Step:
    """Predict a step: the longer of a worker's own time and the time for which the links serve all workers, and a little more.

    Gradients are pushed during backward, and the next forward waits for the new parameters layer by layer; so only the last push is
    exposed. With `staleness` 0 the slowest worker sets the pace.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.
        slowness: The slowdown of the rank that sets the pace.
    """
    alone = step_timeline.synchronous_step(workload, (), batches=strategy.accumulate, slowness=slowness).seconds
    link = _server_link(fabric, workload, strategy)
    if link is None:
        return Step(seconds=alone, communication_seconds=0.0, exposed_seconds=0.0)
    pushed = sum(
        payload_of(bucket, strategy.gradients).size_bytes for bucket in bucketing.ddp_buckets(workload.gradients)
    )
    pushing = fabric.ranks_per_host / ranks_per_push(fabric, strategy)
    goodput = max(SETTINGS.min_goodput, 1 - SETTINGS.goodput_loss_per_host * (fabric.hosts - 1) / pushing)
    busy = _busy_seconds(fabric, link, strategy, pushed) / goodput
    servers = strategy.servers or fabric.hosts
    chunk = min(chunk_bytes(int(pushed), servers), pushed)
    own = alone + SETTINGS.turnaround_seconds + 2 * link.curve.seconds(chunk)
    longer, shorter = max(own, busy), min(own, busy)
    seconds = longer * (1 + (shorter / longer) ** SETTINGS.overlap_norm) ** (1 / SETTINGS.overlap_norm)
    return Step(seconds=seconds, communication_seconds=busy, exposed_seconds=seconds - alone)


def server_bytes_per_second(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """Return the link rate in one direction at which the thread of a server is fully busy.

    A link to dedicated servers carries gradients in one direction and values in the other. Beside the workers, it carries both in
    each direction.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.
    """
    is_shared = fabric.network is None and workload.device == "cpu"
    both = SETTINGS.memory_bytes_per_second if is_shared else SETTINGS.socket_bytes_per_second
    return both / 2 if strategy.servers else both


def _server_link(fabric: Fabric, workload: Workload, strategy: Strategy) -> RingLink | None:
    link, most = fabric.network or fabric.intra_node, server_bytes_per_second(fabric, workload, strategy)
    if link is None or link.bytes_per_second <= most:
        return link
    return msgspec.structs.replace(link, curve=link.curve.slower(link.bytes_per_second / most))


def _busy_seconds(fabric: Fabric, link: RingLink, strategy: Strategy, size_bytes: float) -> float:
    """Compute the time for which one step of all workers occupies the busiest link; parameters are as large as gradients."""
    together = ranks_per_push(fabric, strategy)
    each = fabric.ranks_per_host // together
    if strategy.servers:
        own = link.curve.seconds(each * size_bytes)
        pushes = fabric.hosts if together > 1 else fabric.ranks
        return max(own, collective_cost.parameter_server(pushes, strategy.servers, size_bytes, link.curve))
    if fabric.hosts == 1:
        return 2 * link.curve.seconds(each * size_bytes)
    return collective_cost.shared_parameter_server(fabric.hosts, each * size_bytes, link.curve)
