"""A step against parameter servers: nobody waits for the others, but all of them use the servers' wires."""

from __future__ import annotations

import msgspec

from distrib.bandwidth_model import bucketing, collective_cost, step_timeline
from distrib.bandwidth_model.bottleneck import RingLink
from distrib.bandwidth_model.collective_cost import payload_of
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.step_timeline import Step
from distrib.bandwidth_model.workload import Workload
from distrib.strategy import Strategy

LARGEST_CHUNK_BYTES = 4 << 20
SMALLEST_CHUNK_BYTES = 64 << 10
"""Below it the fixed cost of a chunk (a header, two system calls, one optimizer step) is more than its time on a 1 Gb/s wire."""

CHUNKS = 32
"""Of a model that is large enough: while one is on its way back, others are on theirs, and processors have time to serve them."""

MOST_IN_FLIGHT, LEAST_IN_FLIGHT = 16, 4
"""Chunks of each server."""

SMALLEST_SHARED_BYTES = 1 << 20
"""The same where workers and servers share memory, which is faster than a wire."""

GOODPUT_LOST, LEAST_GOODPUT = 0.05, 0.7
"""What of the wire each further host leaves unused, as all send to all in their own time, where a host's workers push as one, and what is
left of it with many: 0.95 with 2 and 0.7 with 7 virtual hosts (benchmarks/prediction.py). Several that push for themselves fill each
other's pauses."""

TOGETHER = 2.5
"""Computing and the wire hide each other but for what one waits for the other now and then, most where they take equally long: the
step is the norm of this order of the two; seen there, too."""

TURNAROUND_SECONDS = 10e-3
"""From the last gradient to the parameters that it has changed, but for the wire; seen there, too."""


SERVER_BYTES_PER_SECOND = 3.4e9
"""What a server takes in, adds up and gives back at most, each way: 6.8 GB/s in both together with worker and server on one host
(docs/parameter_server.md). It works on processors and over TCP, however fast the cards are."""


def chunk_bytes(total_bytes: int, servers: int, *, shared: bool = False) -> int:
    """How large a chunk of the parameters is at most: what travels and is updated at once.

    `shared`: it does not travel, as workers and servers share memory.
    """
    if shared:  # a few: while one is copied another is updated
        return min(LARGEST_CHUNK_BYTES, max(SMALLEST_SHARED_BYTES, total_bytes // (servers * LEAST_IN_FLIGHT)))
    each = min(MOST_IN_FLIGHT, max(LEAST_IN_FLIGHT, CHUNKS // servers))
    return min(LARGEST_CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, total_bytes // (servers * each)))


def pushed_by(fabric: Fabric, strategy: Strategy) -> int:
    """How many ranks of a host make one push together; 1: each makes its own."""
    return fabric.ranks_per_host if strategy.host_reduction and fabric.wire else 1


def asynchronous(fabric: Fabric, workload: Workload, strategy: Strategy, slowness: float) -> Step:
    """A worker's own time, or that for which the wires are busy with a step of every worker, whichever is longer, and a little more.

    Gradients are pushed while backward goes on, and the answer brings the new parameters, for which the next
    forward pass waits layer by layer; so only what is pushed last is on the way while nothing is computed. With `staleness`
    0 the slowest worker sets the pace (`slowness` is then that of the slowest).
    """
    alone = step_timeline.synchronous(workload, (), batches=strategy.accumulate, slowness=slowness).seconds
    wire = _way_to_servers(fabric)
    if wire is None:
        return Step(seconds=alone, communication_seconds=0.0, exposed_seconds=0.0)
    pushed = sum(
        payload_of(piece, strategy.gradients).size_bytes for piece in bucketing.ddp_buckets(workload.gradients)
    )
    pushing = fabric.ranks_per_host / pushed_by(fabric, strategy)
    goodput = max(LEAST_GOODPUT, 1 - GOODPUT_LOST * (fabric.hosts - 1) / pushing)
    busy = _busy_seconds(fabric, strategy, pushed) / goodput
    servers = strategy.servers or fabric.hosts
    chunk = min(chunk_bytes(int(pushed), servers), pushed)
    own = alone + TURNAROUND_SECONDS + 2 * wire.curve.seconds(chunk)
    longer, shorter = max(own, busy), min(own, busy)
    seconds = longer * (1 + (shorter / longer) ** TOGETHER) ** (1 / TOGETHER)
    return Step(seconds=seconds, communication_seconds=busy, exposed_seconds=seconds - alone)


def _way_to_servers(fabric: Fabric) -> RingLink | None:
    wire = fabric.wire or fabric.inside
    if wire is None or wire.bytes_per_second <= SERVER_BYTES_PER_SECOND:
        return wire
    return msgspec.structs.replace(wire, curve=wire.curve.slower(wire.bytes_per_second / SERVER_BYTES_PER_SECOND))


def _busy_seconds(fabric: Fabric, strategy: Strategy, size_bytes: float) -> float:
    """How long one step of every worker keeps the busiest wire busy; parameters come back as large as gradients go."""
    wire = _way_to_servers(fabric)
    assert wire is not None
    together = pushed_by(fabric, strategy)
    each = fabric.ranks_per_host // together
    if strategy.servers:
        own = wire.curve.seconds(each * size_bytes)
        pushes = fabric.hosts if together > 1 else fabric.ranks
        return max(own, collective_cost.parameter_server(pushes, strategy.servers, size_bytes, wire.curve))
    if fabric.hosts == 1:
        return 2 * wire.curve.seconds(each * size_bytes)
    return collective_cost.shared_parameter_server(fabric.hosts, each * size_bytes, wire.curve)
