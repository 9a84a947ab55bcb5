"""Step model: one step of a workload on a fabric, by strategy, with the costs of the all-reduce on CPUs and GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from distrib.bandwidth_model import bucketing, collective_cost, step_timeline
from distrib.bandwidth_model.bottleneck import TRANSPORTS
from distrib.bandwidth_model.bucketing import AllReduceCost, GradientBucket
from distrib.bandwidth_model.collective_cost import payload_of
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.server_throughput import parameter_server_step, ranks_per_push
from distrib.bandwidth_model.sharding import sharded_step
from distrib.bandwidth_model.step_timeline import Step, Transfer
from distrib.bandwidth_model.workload import Workload
from distrib.strategy import Strategy


@dataclass(frozen=True)
class StepModelSettings:
    """Calibrated costs; measured on virtual hosts (benchmarks/prediction.py) where no other source is named."""

    gpu_overlap_slowdown: float = 0.08
    """Slowdown of a GPU while it communicates: up to 15 % (Zhang et al. 2020, arXiv:2006.10103), half of it on average."""
    cpu_seconds_per_byte: float = 7e-9
    """CPU time of an averaged byte over TCP."""
    conversion_copies: float = 2.5
    """Cost of converting a byte on an idle CPU, in copies in memory."""
    busy_conversion_copies: float = 4.0
    """The same on a CPU that also computes."""
    not_hidden_fraction: float = 0.25
    """Fraction of copies and conversions that delays the network or other ranks of the CPU."""
    hook_seconds: float = 2.5e-3
    """From the last bucket to the optimizer where threads of distrib pass buckets on."""
    trial_bytes: int = 2 << 20
    """The size with which the cost per byte is derived, as the communication hook measures it."""
    gpu_copies: tuple[float, float] = (1.0, 1.0)
    """Copies of a gradient before and after the network: into DDP's bucket and back."""
    cpu_copies: tuple[float, float] = (2.0, 1.0)
    """The same on CPUs: into shared memory, too."""


SETTINGS = StepModelSettings()


def plan_buckets(fabric: Fabric, workload: Workload, strategy: Strategy) -> tuple[GradientBucket, ...]:
    """Predict the buckets that are averaged in a step.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.

    Returns:
        The buckets in order; none without all-reduce.
    """
    if fabric.ranks == 1 or strategy.mode != "sync" or strategy.shard != "none":
        return ()
    if fabric.gpus or strategy.backend == "horovod":
        return bucketing.ddp_buckets(workload.gradients, strategy.bucket_bytes)
    cost = None
    if fabric.network is not None:
        sizes = (64, SETTINGS.trial_bytes)
        trials = (GradientBucket(size_bytes=size, elements=size / 4, tensors=1, ready_seconds=0.0) for size in sizes)
        small, large = (_network_seconds(fabric, strategy, trial) for trial in trials)
        seconds_per_byte = max(large - small, 0.1 * large) / SETTINGS.trial_bytes
        cost = AllReduceCost(overhead_seconds=small, seconds_per_byte=seconds_per_byte)
    return bucketing.hook_buckets(workload.gradients, strategy, cost, ranks_per_host=fabric.ranks_per_host)


def predict_fabric_step(
    fabric: Fabric, workload: Workload, strategy: Strategy, buckets: tuple[GradientBucket, ...], *, spans: bool = False
) -> Step:
    """Predict one step of a job.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.
        buckets: The buckets of `plan_buckets`.
        spans: True to record the timeline.

    Returns:
        The step. It is longer than computing and communication where data loading needs more CPU time than there is.
    """
    step = _step_with_data(fabric, workload, strategy, buckets, spans=spans)
    if workload.loading_processor_seconds and workload.loader_seconds:
        # Loader processes continue while gradients travel; data that arrives meanwhile costs no wait.
        hidden = min(workload.loader_seconds, step.exposed_seconds / strategy.accumulate)
        later = msgspec.structs.replace(workload, loader_seconds=workload.loader_seconds - hidden)
        step = _step_with_data(fabric, later, strategy, buckets, spans=spans)
        exposed = max(0.0, step.exposed_seconds - strategy.accumulate * hidden)
        step = msgspec.structs.replace(step, exposed_seconds=exposed)
    return step_timeline.delay_for_data(step, max(0.0, _loading_seconds(fabric, workload, strategy) - step.seconds))


def step_alone_seconds(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """Compute the seconds of a step of one rank alone; where ranks differ, that of their mean samples per second.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.
    """
    waited = strategy.accumulate * workload.loader_seconds
    computed = compute_seconds(workload, strategy)
    if not fabric.slowness:
        return waited + computed
    ranks = sum(count for _, count in fabric.slowness)
    return ranks / sum(count / (waited + factor * computed) for factor, count in fabric.slowness)


def compute_seconds(workload: Workload, strategy: Strategy) -> float:
    """Compute the seconds of forward and backward passes and the optimizer of a step.

    Args:
        workload: One rank's step.
        strategy: The strategy, with the batches per step.
    """
    return strategy.accumulate * (workload.forward_seconds + workload.backward_seconds) + workload.optimizer_seconds


def rank_slowness(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """Compute the slowdown of the rank that sets the pace, without variation between steps.

    On GPUs: the slowest kind, or the mean if batches are balanced or no rank waits. On CPUs: ranks share the CPUs of a host.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.

    Returns:
        A factor, 1 for the workload's own device.
    """
    if not fabric.gpus:
        return max(1.0, workload.processor_share * workload.processors * fabric.ranks_per_cpu)
    if not fabric.slowness:
        return 1.0
    if strategy.balance or (strategy.mode == "async" and strategy.staleness is None):
        ranks = sum(count for _, count in fabric.slowness)
        return ranks / sum(count / factor for factor, count in fabric.slowness)
    return max(factor for factor, _ in fabric.slowness)


def slowest_rank_factor(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """Compute the slowdown of the slowest rank of a step, with the variation between equal ranks.

    Args:
        fabric: The links of the job.
        workload: One rank's step.
        strategy: The strategy of the job.

    Returns:
        A factor, 1 for the workload's own device.
    """
    variation = workload.variation
    if strategy.mode == "local":  # long and short steps of a round even out
        variation /= strategy.steps_per_round**0.5
    ranks = synchronized_ranks(fabric, strategy)
    return rank_slowness(fabric, workload, strategy) * step_timeline.slowest_of(ranks, variation)


def synchronized_ranks(fabric: Fabric, strategy: Strategy) -> int:
    """Count the ranks that wait for each other in every step.

    Args:
        fabric: The links of the job.
        strategy: The strategy of the job.
    """
    return fabric.ranks if strategy.in_step else ranks_per_push(fabric, strategy)


def _step_with_data(
    fabric: Fabric, workload: Workload, strategy: Strategy, buckets: tuple[GradientBucket, ...], *, spans: bool
) -> Step:
    """Predict a step whose data is loaded as fast as on one rank alone."""
    slowest = slowest_rank_factor(fabric, workload, strategy)
    if strategy.mode == "async":
        return parameter_server_step(fabric, workload, strategy, slowest)
    if strategy.mode == "local":
        return _local_sgd_step(fabric, workload, strategy, slowest)
    if strategy.shard != "none" and fabric.ranks > 1:
        overlap_slowdown = _overlap_slowdown(fabric, workload)
        return sharded_step(
            fabric, workload, strategy, slowness=slowest, overlap_slowdown=overlap_slowdown, spans=spans
        )
    return step_timeline.synchronous_step(
        workload,
        _transfers(fabric, workload, strategy, buckets),
        batches=strategy.accumulate,
        slowness=slowest,
        overlap_slowdown=_overlap_slowdown(fabric, workload),
        hook_seconds=_hook_seconds(fabric, workload, strategy),
        spans=spans,
    )


def _local_sgd_step(fabric: Fabric, workload: Workload, strategy: Strategy, slowest: float) -> Step:
    """Spread the averaging of a round over its inner steps; `overlap_steps` of them hide it."""
    alone = step_timeline.synchronous_step(workload, (), batches=strategy.accumulate, slowness=slowest)
    if fabric.ranks == 1:
        return alone
    inner = strategy.steps_per_round
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


def _loading_seconds(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    """Compute the CPU time of a host for loading the data of a step of its ranks, with what they compute themselves."""
    if not workload.loading_processor_seconds:
        return 0.0
    loading = strategy.accumulate * workload.loading_processor_seconds
    busy = strategy.accumulate * workload.loader_seconds + compute_seconds(workload, strategy)
    return fabric.ranks_per_cpu * (loading + workload.processor_share * workload.processors * busy)


def _overlap_slowdown(fabric: Fabric, workload: Workload) -> float:
    """Compute the slowdown of computing while the network is busy: on CPUs, TCP needs them, too."""
    if fabric.gpus:
        return SETTINGS.gpu_overlap_slowdown
    link = fabric.network or fabric.intra_node
    used = min(1.0, SETTINGS.cpu_seconds_per_byte * link.bytes_per_second) if link else 0.0
    return workload.processor_share * used / workload.processors


def _hook_seconds(fabric: Fabric, workload: Workload, strategy: Strategy) -> float:
    has_no_hook = fabric.gpus or strategy.backend == "horovod"
    one_rank_per_host = fabric.ranks_per_host == 1
    if has_no_hook or bucketing.is_averaged_by_ddp(
        workload.gradient_bytes, strategy, one_rank_per_host=one_rank_per_host
    ):
        return 0.0
    return SETTINGS.hook_seconds * fabric.crowding


def _transfers(
    fabric: Fabric, workload: Workload, strategy: Strategy, buckets: tuple[GradientBucket, ...]
) -> list[Transfer]:
    """Compute the cost of averaging each bucket."""
    rate = _copy_rate(fabric)
    crowded = 1 + SETTINGS.not_hidden_fraction * (fabric.crowding - 1)
    packing, unpacking = (copies * crowded for copies in (SETTINGS.gpu_copies if fabric.gpus else SETTINGS.cpu_copies))
    # The CPUs that compute also convert.
    conversion = 0.0
    if not fabric.gpus:
        conversion = SETTINGS.busy_conversion_copies / rate * workload.processor_share / workload.processors
    # Blocks of transformers are equal, so that many buckets cost the same.
    costs = {_same_cost(bucket): bucket for bucket in buckets}
    seconds = {key: _network_seconds(fabric, strategy, bucket) for key, bucket in costs.items()}
    return [
        Transfer(
            ready_seconds=bucket.ready_seconds if workload.overlaps else workload.backward_seconds,
            network_seconds=seconds[_same_cost(bucket)],
            pack_seconds=bucket.size_bytes
            * (packing / rate + payload_of(bucket, strategy.gradients).passes * conversion),
            unpack_seconds=unpacking * bucket.size_bytes / rate,
        )
        for bucket in buckets
    ]


def _same_cost(bucket: GradientBucket) -> tuple[float, float, int]:
    return bucket.size_bytes, bucket.elements, bucket.tensors


def _network_seconds(fabric: Fabric, strategy: Strategy, bucket: GradientBucket) -> float:
    """Compute the time of a bucket on the network; the next bucket is packed meanwhile."""
    payload = payload_of(bucket, strategy.gradients)
    is_hierarchical = strategy.all_reduce == "hierarchical" or (strategy.all_reduce == "auto" and not fabric.gpus)
    is_hierarchical = is_hierarchical and strategy.backend != "horovod"
    if payload.collective == "all_gather":  # half of an all-reduce of n times as much
        senders = fabric.hosts if is_hierarchical and not fabric.gpus else fabric.ranks
        seconds = collective_cost.all_reduce(fabric, payload.size_bytes * senders, hierarchical=is_hierarchical) / 2
    else:
        seconds = collective_cost.all_reduce(fabric, payload.size_bytes, hierarchical=is_hierarchical)
    packing = payload.passes * bucket.size_bytes / _copy_rate(fabric)
    if fabric.gpus:
        return max(seconds, packing)
    packing *= SETTINGS.conversion_copies * fabric.crowding
    return max(seconds + SETTINGS.not_hidden_fraction * packing, packing)


def _copy_rate(fabric: Fabric) -> float:
    """Return the bytes per second of copies in memory."""
    return fabric.memory_bytes_per_second or TRANSPORTS.memory_bytes_per_second
