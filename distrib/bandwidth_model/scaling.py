"""How far a job will scale: step time, efficiency, and the link that caps it, for one configuration or many."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model import bucketing, collective_cost
from distrib.bandwidth_model import step_timeline as steps
from distrib.bandwidth_model.bottleneck import RingLink
from distrib.bandwidth_model.bucketing import GradientBucket
from distrib.bandwidth_model.collective_cost import payload_of
from distrib.bandwidth_model.fabric import Fabric, find_fabric
from distrib.bandwidth_model.prediction import Cap, Limit, Loss, Prediction
from distrib.bandwidth_model.server_throughput import asynchronous, pushed_by
from distrib.bandwidth_model.step_timeline import Step, Transfer
from distrib.bandwidth_model.workload import Workload, checked
from distrib.bandwidth_model.workload_catalog import on_processors
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.strategy import INNER_STEPS, Strategy

WANTED_EFFICIENCY = 0.9
NEGLIGIBLE = 0.02
"""A link that costs less than this part of a step caps nothing."""

GPU_OVERLAP_SLOWDOWN = 0.08
"""How much longer a GPU computes while it communicates: up to 15 % (Zhang et al. 2020, arXiv:2006.10103); half of it."""

CPU_SECONDS_PER_BYTE = 7e-9
"""What a byte over TCP, averaged, costs one processor that would compute: seen on virtual hosts (benchmarks/prediction.py)."""

CONVERSION_COPIES, BUSY_CONVERSION_COPIES = 2.5, 4.0
"""As many copies in memory cost as much as turning numbers into another format once, on a processor that idles and on one that computes;
seen there, too."""

NOT_HIDDEN = 0.25
"""Of what processors copy and convert while a wire is busy: the part that the wire, or ranks on the same processor, wait for. Seen there, too."""

HOOK_SECONDS = 2.5e-3
"""From the last piece's end to the optimizer where threads of distrib hand pieces on: seen there, too."""

TRIAL_BYTES = 2 << 20

GPU_PASSES, CPU_PASSES = (1.0, 1.0), (2.0, 1.0)
"""How often a gradient is copied before it travels and after: into DDP's bucket and back; on CPUs into shared memory too."""

_FASTEST = 1e15
"""Bytes per second; a wire that carries more caps nothing."""


def predict_step(
    topology: Topology | None,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
    timeline: bool = False,
) -> Prediction:
    """What a step of this workload takes on so many hosts.

    `hosts` are names, or the first so many of the topology; of `nodes` that are more than the names, as of more than the
    topology has, the rest is extrapolated, and a note says so.
    Raises ConfigError for a workload that cannot be, and where nothing is known of a link that is needed.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    return predict_on_fabric(fabric, workload, strategy, spans=timeline)


def needed_bandwidth(
    topology: Topology | None,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
    efficiency: float = WANTED_EFFICIENCY,
) -> float | None:
    """Bytes per second that each host's wire must carry for this efficiency; None where no wire is fast enough, or none is there."""
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    return _needed(fabric, workload, strategy, _pieces(fabric, workload, strategy), efficiency)


def unlimited(
    topology: Topology | None,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
) -> Limit:
    """How far the job would get where no wire between its hosts held it back. The arguments and errors are those of `predict_step`."""
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    parts = _pieces(fabric, workload, strategy)
    wired = fabric.with_wire(_FASTEST)
    step, free = (_step(each, workload, strategy, parts) for each in (wired, wired.with_inside(_FASTEST)))
    latency_seconds = min(free.exposed_seconds, step.exposed_seconds)
    return Limit(
        efficiency=_efficiency(wired, workload, strategy, step),
        losses=_losses(
            wired,
            workload,
            strategy,
            step,
            latency_seconds=latency_seconds,
            what=_AS_MEASURED if fabric.is_slower_than_links else _LATENCY,
        ),
    )


def find_job(
    topology: Topology | None,
    workload: Workload,
    hosts: Sequence[str] | int,
    ranks_per_host: int | Sequence[int],
    nodes: int | None = None,
) -> tuple[Fabric, Workload]:
    """What joins the ranks, and the workload as one of them has it: on CPU hosts, with its share of the processors."""
    fabric = find_fabric(topology, checked(workload), hosts, ranks_per_host, nodes)
    if fabric.processors is None:
        return fabric, workload
    own = on_processors(workload, fabric.processors)
    return msgspec.structs.replace(fabric, notes=fabric.notes + note_on_processors(workload, own)), own


def note_on_processors(profiled: Workload, own: Workload) -> tuple[str, ...]:
    """What to say where a rank has fewer processors than it was profiled with."""
    if own.processors == profiled.processors:
        return ()
    return (
        f"profiled with {profiled.processors} processors, each rank has {own.processors}: a step alone takes "
        f"{own.compute_seconds / profiled.compute_seconds:.2g} times as long",
    )


def predict_on_fabric(fabric: Fabric, workload: Workload, strategy: Strategy, *, spans: bool = False) -> Prediction:
    parts = _pieces(fabric, workload, strategy)
    step = _step(fabric, workload, strategy, parts, spans=spans)
    alone = _alone(fabric, workload, strategy)
    efficiency = _efficiency(fabric, workload, strategy, step)
    cap = _cap(fabric, workload, strategy, parts, step)
    notes = fabric.notes
    part = strategy.accumulate * workload.loader_seconds / alone
    if part > NEGLIGIBLE:
        what = "less work for each sample" if step.starved_seconds else "more num_workers"
        notes += (
            f"each step waits {part:.0%} of its time alone for data: {what}, or faster storage, would shorten it",
        )
    return Prediction(
        hosts=fabric.hosts,
        ranks_per_host=fabric.ranks_per_host,
        ranks=fabric.ranks,
        strategy=strategy,
        step_seconds=step.seconds,
        compute_seconds=alone,
        communication_seconds=step.communication_seconds,
        exposed_seconds=step.exposed_seconds,
        loader_seconds=strategy.accumulate * workload.loader_seconds + step.starved_seconds,
        samples_per_second=efficiency * fabric.ranks * workload.batch * strategy.accumulate / alone,
        efficiency=efficiency,
        cap=cap,
        losses=_losses(fabric, workload, strategy, step),
        fits_memory=_fits(fabric, workload),
        expected_error=fabric.expected_error if fabric.ranks > 1 else 0.02,
        notes=notes,
        timeline=step.spans,
    )


def _alone(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """What the step takes on one rank alone; where ranks differ, that with which each had their mean of samples a second."""
    waited = strategy.accumulate * workload.loader_seconds
    computed = strategy.accumulate * (workload.forward_seconds + workload.backward_seconds) + workload.optimizer_seconds
    if not fabric.slowness:
        return waited + computed
    ranks = sum(count for _, count in fabric.slowness)
    return ranks / sum(count / (waited + factor * computed) for factor, count in fabric.slowness)


def _efficiency(fabric: Fabric, workload: Workload, strategy: Strategy, step: Step) -> float:
    return min(1.0, _alone(fabric, workload, strategy) / step.seconds) if step.seconds > 0 else 1.0


def _step(
    fabric: Fabric, workload: Workload, strategy: Strategy, parts: tuple[GradientBucket, ...], *, spans: bool = False
) -> Step:
    step = _fed_step(fabric, workload, strategy, parts, spans=spans)
    if workload.loading_processor_seconds and workload.loader_seconds:
        # Processes that load go on while gradients travel: for data that comes meanwhile nobody waits.
        hidden = min(workload.loader_seconds, step.exposed_seconds / strategy.accumulate)
        later = msgspec.structs.replace(workload, loader_seconds=workload.loader_seconds - hidden)
        step = _fed_step(fabric, later, strategy, parts, spans=spans)
        left = max(0.0, step.exposed_seconds - strategy.accumulate * hidden)
        step = msgspec.structs.replace(step, exposed_seconds=left)
    return steps.starved(step, max(0.0, _loading_seconds(fabric, workload, strategy) - step.seconds))


def _loading_seconds(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """For how long a step of all its ranks keeps the processors of a host busy where other processes load their data."""
    if not workload.loading_processor_seconds:
        return 0.0
    wanted = strategy.accumulate * workload.loading_processor_seconds
    passes = workload.loader_seconds + workload.forward_seconds + workload.backward_seconds
    computed = strategy.accumulate * passes + workload.optimizer_seconds
    wanted += workload.processor_share * workload.processors * computed
    return fabric.ranks_per_processor * wanted


def _fed_step(
    fabric: Fabric, workload: Workload, strategy: Strategy, parts: tuple[GradientBucket, ...], *, spans: bool
) -> Step:
    """A step for which data is there as soon as it is on one rank alone."""
    slowest = _slowest(fabric, workload, strategy)
    if strategy.mode == "async":
        return asynchronous(fabric, workload, strategy, slowest)
    if strategy.mode == "local":
        return _local(fabric, workload, strategy, slowest)
    return steps.synchronous(
        workload,
        _transfers(fabric, workload, strategy, parts),
        batches=strategy.accumulate,
        slowness=slowest,
        overlap_slowdown=_overlap_slowdown(fabric, workload),
        hook_seconds=_hook_seconds(fabric, workload, strategy),
        spans=spans,
    )


def _overlap_slowdown(fabric: Fabric, workload: Workload) -> float:
    """How much longer computing takes while the wire is busy: processors that compute are wanted by the wire, too."""
    if fabric.gpus:
        return GPU_OVERLAP_SLOWDOWN
    wire = fabric.wire or fabric.inside
    taken = min(1.0, CPU_SECONDS_PER_BYTE * wire.bytes_per_second) if wire else 0.0
    return workload.processor_share * taken / workload.processors


def _hook_seconds(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    own = fabric.gpus or strategy.backend == "horovod"
    if own or bucketing.is_averaged_by_ddp(
        workload.gradient_bytes, strategy, one_rank_per_host=fabric.ranks_per_host == 1
    ):
        return 0.0
    return HOOK_SECONDS * fabric.crowding


def _transfers(
    fabric: Fabric, workload: Workload, strategy: Strategy, parts: tuple[GradientBucket, ...]
) -> list[Transfer]:
    """What averaging each piece of the gradients costs, in the order in which they travel."""
    copying = _copying(fabric)
    packing, unpacking = GPU_PASSES if fabric.gpus else CPU_PASSES
    crowded = 1 + NOT_HIDDEN * (fabric.crowding - 1)
    packing, unpacking = packing * crowded, unpacking * crowded
    # Formats are changed by the processors that would compute.
    busy = 0.0 if fabric.gpus else BUSY_CONVERSION_COPIES / copying * workload.processor_share / workload.processors
    return [
        Transfer(
            ready_seconds=piece.ready_seconds,
            network_seconds=_network_seconds(fabric, strategy, piece),
            pack_seconds=piece.size_bytes * (packing / copying + payload_of(piece, strategy.gradients).passes * busy),
            unpack_seconds=unpacking * piece.size_bytes / copying,
        )
        for piece in parts
    ]


def _pieces(fabric: Fabric, workload: Workload, strategy: Strategy) -> tuple[GradientBucket, ...]:
    """What is averaged in a step, in the order in which it travels."""
    if fabric.ranks == 1 or strategy.mode != "sync":
        return ()
    if fabric.gpus or strategy.backend == "horovod":
        return bucketing.ddp_buckets(workload.gradients, strategy.bucket_bytes)
    if fabric.wire is None:
        return bucketing.hook_buckets(workload.gradients, strategy, None, ranks_per_host=fabric.ranks_per_host)
    # What distrib.training.gradients measures before it cuts: next to nothing, and 2 MiB.
    trials = (
        GradientBucket(size_bytes=size, elements=size / 4, tensors=1, ready_seconds=0.0) for size in (64, TRIAL_BYTES)
    )
    small, large = (_network_seconds(fabric, strategy, trial) for trial in trials)
    wire = bucketing.AllReduceCost(
        overhead_seconds=small, seconds_per_byte=max(large - small, 0.1 * large) / TRIAL_BYTES
    )
    return bucketing.hook_buckets(workload.gradients, strategy, wire, ranks_per_host=fabric.ranks_per_host)


def _is_grouped(fabric: Fabric, strategy: Strategy) -> bool:
    """Whether gradients are averaged inside each host first."""
    if strategy.backend == "horovod":
        return False
    return strategy.all_reduce == "hierarchical" or (strategy.all_reduce == "auto" and not fabric.gpus)


def _copying(fabric: Fabric) -> float:
    """Bytes per second of copies in a host's memory."""
    return fabric.memory_bytes_per_second or collective_cost.MEMORY_BYTES_PER_SECOND


def _network_seconds(fabric: Fabric, strategy: Strategy, piece: GradientBucket) -> float:
    payload = payload_of(piece, strategy.gradients)
    grouped = _is_grouped(fabric, strategy)
    size = payload.size_bytes
    if payload.collective == "all_gather":  # everybody's to everybody: half of an all-reduce of n times as much
        senders = fabric.hosts if grouped and not fabric.gpus else fabric.ranks
        wire = collective_cost.all_reduce(fabric, size * senders, hierarchical=grouped) / 2
    else:
        wire = collective_cost.all_reduce(fabric, size, hierarchical=grouped)
    # One piece is packed while another travels.
    packing = payload.passes * piece.size_bytes / _copying(fabric)
    if fabric.gpus:
        return max(wire, packing)
    packing *= CONVERSION_COPIES * fabric.crowding
    return max(wire + NOT_HIDDEN * packing, packing)


def _slowness(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """What the slowest rank takes; with balanced batches, what all take; where nobody waits for anybody, what they take together.

    A bound on staleness evens out what varies from step to step, but for a rank that always is slower all wait in the end.
    On CPU hosts, all take longer where together they want more processors than there are.
    """
    if not fabric.gpus:
        return max(1.0, workload.processor_share * workload.processors * fabric.ranks_per_processor)
    if not fabric.slowness:
        return 1.0
    if strategy.balance or (strategy.mode == "async" and strategy.staleness is None):
        ranks = sum(count for _, count in fabric.slowness)
        return ranks / sum(count / factor for factor, count in fabric.slowness)
    return max(factor for factor, _ in fabric.slowness)


def _slowest(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """What the slowest rank takes in each step, of equals too, where others wait for it in each."""
    variation = workload.variation
    if strategy.mode == "local":  # ranks meet after many steps, of which the long ones and the short ones even out
        variation /= (strategy.inner_steps or INNER_STEPS) ** 0.5
    return _slowness(fabric, workload, strategy) * steps.slowest_of(_together(fabric, strategy), variation)


def _together(fabric: Fabric, strategy: Strategy) -> int:
    """How many ranks wait for each other in each step."""
    return fabric.ranks if strategy.in_step else pushed_by(fabric, strategy)


def _local(fabric: Fabric, workload: Workload, strategy: Strategy, slowest: float) -> Step:
    """Steps alone, and after `inner_steps` of them the mean of all parameters; of one step its share.

    What is exchanged while steps go on (`overlap_steps`) is hidden as far as they last.
    """
    alone = steps.synchronous(workload, (), batches=strategy.accumulate, slowness=slowest)
    if fabric.ranks == 1:
        return alone
    inner = strategy.inner_steps or INNER_STEPS
    size = workload.parameter_bytes
    if not strategy.gradients.exact:  # fp16 or bf16
        size = min(size, 2 * sum(gradient.elements for gradient in workload.gradients))
    averaging = collective_cost.all_reduce(fabric, size)
    exposed = max(0.0, averaging - strategy.outer.overlap_steps * alone.seconds)
    return Step(
        seconds=alone.seconds + exposed / inner,
        communication_seconds=averaging / inner,
        exposed_seconds=exposed / inner,
    )


_LATENCY = "the latency of messages"
_AS_MEASURED = (
    "all-reduce, which was measured slower than its links explain (look for a link that hosts share, and at processors)"
)


def _losses(
    fabric: Fabric,
    workload: Workload,
    strategy: Strategy,
    step: Step,
    *,
    latency_seconds: float = 0.0,
    what: str = _LATENCY,
) -> tuple[Loss, ...]:
    """What makes a step longer than one alone, most first; copying, sending and handing on is what is left.

    `latency_seconds`: what of the communication is told apart from what the link carries, and `what` it is.
    """
    waited = strategy.accumulate * workload.loader_seconds
    computed = strategy.accumulate * (workload.forward_seconds + workload.backward_seconds) + workload.optimizer_seconds
    own, slowest = _slowness(fabric, workload, strategy), _slowest(fabric, workload, strategy)
    link = _link(fabric)
    uneven = f"the slowest of {_together(fabric, strategy)} ranks, whose steps vary by {workload.variation:.1%}"
    losses = [
        Loss(what=what, seconds=latency_seconds),
        Loss(what=f"link {link.name}" if link else "", seconds=step.exposed_seconds - latency_seconds),
        Loss(
            what="slower GPUs" if fabric.gpus else "more ranks than processors",
            seconds=waited + own * computed - _alone(fabric, workload, strategy),
        ),
        Loss(what=uneven, seconds=(slowest - own) * computed),
        Loss(what="loading data, for which the ranks of a host share its processors", seconds=step.starved_seconds),
        Loss(
            what=f"what averaging takes of the {'GPU' if fabric.gpus else 'processors'}",
            seconds=step.seconds - step.exposed_seconds - step.starved_seconds - waited - slowest * computed,
        ),
    ]
    return tuple(sorted((loss for loss in losses if loss.seconds > 1e-9), key=lambda loss: -loss.seconds))


def _link(fabric: Fabric) -> RingLink | None:
    """The narrowest; on CPU hosts, whose ranks share memory, that between them."""
    links = [link for link in (fabric.wire, fabric.inside) if link]
    if fabric.wire and not fabric.gpus:
        links = [fabric.wire]
    return min(links, key=lambda link: link.bytes_per_second, default=None)


def _cap(
    fabric: Fabric, workload: Workload, strategy: Strategy, parts: tuple[GradientBucket, ...], step: Step
) -> Cap | None:
    link = _link(fabric)
    if link is None or step.exposed_seconds <= NEGLIGIBLE * step.seconds:
        return None
    needed = None
    if link is fabric.wire and _efficiency(fabric, workload, strategy, step) < WANTED_EFFICIENCY:
        needed = _needed(fabric, workload, strategy, parts, WANTED_EFFICIENCY)
    return Cap(
        link=link.name,
        source=link.source,
        target=link.target,
        bandwidth_bytes_per_second=link.bytes_per_second,
        needed_bytes_per_second=needed,
        wanted_efficiency=WANTED_EFFICIENCY,
        is_inside=link is not fabric.wire,
    )


def _needed(
    fabric: Fabric, workload: Workload, strategy: Strategy, parts: tuple[GradientBucket, ...], wanted: float
) -> float | None:
    """By bisection, with the gradients cut as they are for the wires that there are."""
    if not 0 < wanted <= 1:
        raise ConfigError(f"an efficiency of {wanted} cannot be", hint="it is more than 0 and at most 1")
    if fabric.wire is None:
        return None

    def reached(bytes_per_second: float) -> bool:
        faster = fabric.with_wire(bytes_per_second)
        return _efficiency(faster, workload, strategy, _step(faster, workload, strategy, parts)) >= wanted

    low, high = fabric.wire.bytes_per_second, _FASTEST
    if reached(low):
        high, low = low, 1.0
    elif not reached(high):
        return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _fits(fabric: Fabric, workload: Workload) -> bool | None:
    """Whether the device holds what it held alone, and the buckets beside it."""
    if workload.memory_bytes is None or fabric.memory_bytes is None:
        return None
    beside = workload.gradient_bytes if fabric.ranks > 1 else 0
    return workload.memory_bytes + beside <= fabric.memory_bytes
