"""Scaling: step time, efficiency and limiting link of a job."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.bandwidth_model.bottleneck import RingLink
from distrib.bandwidth_model.fabric import Fabric, find_fabric
from distrib.bandwidth_model.memory_estimate import USABLE_FRACTION
from distrib.bandwidth_model.prediction import Bottleneck, NeededNetwork, Overhead, Prediction, ScalingLimit
from distrib.bandwidth_model.server_throughput import server_bytes_per_second
from distrib.bandwidth_model.sharding import on_shard, shard_group, sharded_memory_bytes
from distrib.bandwidth_model.step_model import (
    compute_seconds,
    plan_buckets,
    predict_fabric_step,
    rank_slowness,
    slowest_rank_factor,
    step_alone_seconds,
    synchronized_ranks,
)
from distrib.bandwidth_model.step_timeline import Step
from distrib.bandwidth_model.workload import Workload, validate_workload
from distrib.bandwidth_model.workload_catalog import on_cpus
from distrib.cluster.topology import LIMITS, Topology
from distrib.errors import ConfigError
from distrib.strategy import Strategy
from distrib.units import bit_rate_text

TARGET_EFFICIENCY = 0.9
NEGLIGIBLE_FRACTION = 0.02
"""A cost below this fraction of a step is not reported: it is within the error of the prediction."""

_LATENCY = "the latency of messages"
_AS_MEASURED = (
    "all-reduce, which was measured slower than its links explain (look for a link that hosts share, and at CPU load)"
)


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
    """Predict one step of a job.

    Args:
        topology: The cluster. None: one host that is not described.
        workload: One rank's step.
        strategy: The strategy of the job.
        hosts: Host names, or a number of the topology's hosts.
        nodes: The number of hosts, where more than the names; the rest is extrapolated, with a note.
        ranks_per_host: One number, or one for each host.
        timeline: True to record the timeline.

    Raises:
        ConfigError: The workload is invalid, or a link is unknown.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    return predict_on_fabric(fabric, workload, strategy, spans=timeline)


def find_needed_network(
    topology: Topology | None,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
    efficiency: float = TARGET_EFFICIENCY,
) -> NeededNetwork | None:
    """Find the slowest network that gives an efficiency: of the present type, else with a port of InfiniBand for each rank.

    Args:
        topology: The cluster. None: one host that is not described.
        workload: One rank's step.
        strategy: The strategy of the job.
        hosts: Host names, or a number of the topology's hosts.
        nodes: The number of hosts, where more than the names.
        ranks_per_host: One number, or one for each host.
        efficiency: More than 0, at most 1.

    Returns:
        The network; None if none suffices, or the job has one host.

    Raises:
        ConfigError: The workload or the efficiency is invalid, or a link is unknown.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    return _needed_network(fabric, on_shard(fabric, workload, strategy), strategy, efficiency)


def predict_limit(
    topology: Topology | None,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
) -> ScalingLimit:
    """Predict the efficiency with the fastest network: a port of InfiniBand for each rank, as fast as PCIe slots are.

    Args:
        topology: The cluster. None: one host that is not described.
        workload: One rank's step.
        strategy: The strategy of the job.
        hosts: Host names, or a number of the topology's hosts.
        nodes: The number of hosts, where more than the names.
        ranks_per_host: One number, or one for each host.

    Raises:
        ConfigError: The workload is invalid, or a link is unknown.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    workload = on_shard(fabric, workload, strategy)
    best = fabric.with_best_network()
    buckets = plan_buckets(best, workload, strategy)
    without_links = best.with_network_bandwidth(LIMITS.max_bytes_per_second).with_intra_node_bandwidth(
        LIMITS.max_bytes_per_second
    )
    step, free = (predict_fabric_step(each, workload, strategy, buckets) for each in (best, without_links))
    is_latency = not _server_limit(best, workload, strategy)
    latency_seconds = min(free.exposed_seconds, step.exposed_seconds) if is_latency else 0.0
    cause = _AS_MEASURED if fabric.is_slower_than_links else _LATENCY
    return ScalingLimit(
        efficiency=_efficiency(best, workload, strategy, step),
        losses=_overheads(best, workload, strategy, step, latency_seconds=latency_seconds, latency_cause=cause),
    )


def find_job(
    topology: Topology | None,
    workload: Workload,
    hosts: Sequence[str] | int,
    ranks_per_host: int | Sequence[int],
    nodes: int | None = None,
) -> tuple[Fabric, Workload]:
    """Find the links of a job, and the workload of one of its ranks: on CPU hosts, with its share of the CPUs.

    Args:
        topology: The cluster. None: one host that is not described.
        workload: The profiled step.
        hosts: Host names, or a number of the topology's hosts.
        ranks_per_host: One number, or one for each host.
        nodes: The number of hosts, where more than the names.

    Raises:
        ConfigError: The workload is invalid, or a link is unknown.
    """
    fabric = find_fabric(topology, validate_workload(workload), hosts, ranks_per_host, nodes)
    if fabric.cpus_per_rank is None:
        return fabric, workload
    own = on_cpus(workload, fabric.cpus_per_rank)
    return msgspec.structs.replace(fabric, notes=fabric.notes + fewer_cpus_notes(workload, own)), own


def fewer_cpus_notes(profiled: Workload, own: Workload) -> tuple[str, ...]:
    """Note that a rank has fewer CPUs than it was profiled with.

    Args:
        profiled: The profiled workload.
        own: The workload on the CPUs of a rank.
    """
    if own.processors == profiled.processors:
        return ()
    return (
        f"profiled with {profiled.processors} CPUs, each rank has {own.processors}: a step alone takes "
        f"{own.compute_seconds / profiled.compute_seconds:.2g} times as long",
    )


def predict_on_fabric(fabric: Fabric, workload: Workload, strategy: Strategy, *, spans: bool = False) -> Prediction:
    """Predict one step of a job whose links are known.

    Args:
        fabric: The links of the job.
        workload: The workload of `find_job`.
        strategy: The strategy of the job.
        spans: True to record the timeline.
    """
    workload = on_shard(fabric, workload, strategy)
    buckets = plan_buckets(fabric, workload, strategy)
    step = predict_fabric_step(fabric, workload, strategy, buckets, spans=spans)
    alone = step_alone_seconds(fabric, workload, strategy)
    efficiency = _efficiency(fabric, workload, strategy, step)
    notes = fabric.notes
    if _has_one_server(fabric, strategy):
        notes += (
            f"mode async on one host: each of {fabric.ranks} ranks sends its own gradients to the one server; "
            "on several hosts, the ranks of a host send their mean",
        )
    loading = strategy.accumulate * workload.loader_seconds / alone
    if loading > NEGLIGIBLE_FRACTION:
        advice = "less work for each sample" if step.starved_seconds else "more num_workers"
        notes += (f"each step alone waits {loading:.0%} of its time for data: use {advice}, or faster storage",)
    samples_per_second = efficiency * fabric.ranks * workload.batch * strategy.accumulate / alone
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
        samples_per_second=samples_per_second,
        tokens_per_second=samples_per_second * workload.sample_tokens,
        efficiency=efficiency,
        cap=_bottleneck(fabric, workload, strategy, step),
        losses=_overheads(fabric, workload, strategy, step),
        fits_memory=_fits_memory(fabric, workload, strategy),
        expected_error=fabric.expected_error if fabric.ranks > 1 else 0.02,
        notes=notes,
        timeline=step.spans,
    )


def _efficiency(fabric: Fabric, workload: Workload, strategy: Strategy, step: Step) -> float:
    return min(1.0, step_alone_seconds(fabric, workload, strategy) / step.seconds) if step.seconds > 0 else 1.0


def _overheads(
    fabric: Fabric,
    workload: Workload,
    strategy: Strategy,
    step: Step,
    *,
    latency_seconds: float = 0.0,
    latency_cause: str = _LATENCY,
) -> tuple[Overhead, ...]:
    """Attribute the time of a step beyond one alone, largest first; copies and sends are the remainder."""
    waited = strategy.accumulate * workload.loader_seconds
    computed = compute_seconds(workload, strategy)
    own, slowest = rank_slowness(fabric, workload, strategy), slowest_rank_factor(fabric, workload, strategy)
    link = _narrowest_link(fabric)
    ranks = synchronized_ranks(fabric, strategy)
    exposed_by = _server_limit(fabric, workload, strategy) or (f"link {link.name}" if link else "")
    overheads = [
        Overhead(what=latency_cause, seconds=latency_seconds),
        Overhead(what=exposed_by, seconds=step.exposed_seconds - latency_seconds),
        Overhead(
            what="slower GPUs" if fabric.gpus else "more ranks than CPUs",
            seconds=waited + own * computed - step_alone_seconds(fabric, workload, strategy),
        ),
        Overhead(
            what=f"the slowest of {ranks} ranks, whose steps vary by {workload.variation:.1%}",
            seconds=(slowest - own) * computed,
        ),
        Overhead(what="loading data: the ranks of a host share its CPUs", seconds=step.starved_seconds),
        Overhead(
            what=f"work of the {'GPU' if fabric.gpus else 'CPUs'} for averaging",
            seconds=step.seconds - step.exposed_seconds - step.starved_seconds - waited - slowest * computed,
        ),
    ]
    return tuple(sorted((one for one in overheads if one.seconds > 1e-9), key=lambda one: -one.seconds))


def _has_one_server(fabric: Fabric, strategy: Strategy) -> bool:
    """Test if all ranks share a host with its parameter server."""
    return strategy.mode == "async" and fabric.network is None and fabric.ranks > 1


def _server_limit(fabric: Fabric, workload: Workload, strategy: Strategy) -> str:
    """Describe the parameter servers if they are slower than the link; empty if they are not."""
    if _has_one_server(fabric, strategy):
        return f"the one parameter server: each of {fabric.ranks} ranks sends its own gradients"
    if strategy.mode != "async" or fabric.network is None:
        return ""
    most = server_bytes_per_second(fabric, workload, strategy)
    if fabric.network.bytes_per_second <= most:
        return ""
    return f"the parameter servers: one thread each, {bit_rate_text(most)}"


def _narrowest_link(fabric: Fabric) -> RingLink | None:
    """Return the narrowest link; on CPU hosts, whose ranks share memory, the one between hosts."""
    links = [link for link in (fabric.network, fabric.intra_node) if link]
    if fabric.network and not fabric.gpus:
        links = [fabric.network]
    return min(links, key=lambda link: link.bytes_per_second, default=None)


def _bottleneck(fabric: Fabric, workload: Workload, strategy: Strategy, step: Step) -> Bottleneck | None:
    link = _narrowest_link(fabric)
    if (
        link is None
        or _server_limit(fabric, workload, strategy)
        or step.exposed_seconds <= NEGLIGIBLE_FRACTION * step.seconds
    ):
        return None
    needed = None
    if link is fabric.network and _efficiency(fabric, workload, strategy, step) < TARGET_EFFICIENCY:
        needed = _needed_network(fabric, workload, strategy, TARGET_EFFICIENCY)
    return Bottleneck(
        link=link.name,
        source=link.source,
        target=link.target,
        bandwidth_bytes_per_second=link.bytes_per_second,
        needed_bytes_per_second=needed.bytes_per_second if needed else None,
        needed_network=needed,
        wanted_efficiency=TARGET_EFFICIENCY,
        is_inside=link is not fabric.network,
    )


def _needed_network(fabric: Fabric, workload: Workload, strategy: Strategy, target: float) -> NeededNetwork | None:
    """Find the first type of network that reaches the target at full speed, and bisect its bandwidth."""
    if not 0 < target <= 1:
        raise ConfigError(
            f"efficiency {target}, expected more than 0 and at most 1", hint="give a fraction such as 0.9"
        )
    if fabric.network is None:
        return None
    for fastest in (fabric.at_full_speed(), fabric.with_best_network()):
        network = fastest.network
        if network is None or not _is_reached(fastest, network.bytes_per_second, workload, strategy, target):
            continue
        low, high = 1.0, network.bytes_per_second
        while high / low > 1.001:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if _is_reached(fastest, middle, workload, strategy, target) else (middle, high)
        return NeededNetwork(
            bytes_per_second=high, network=network.network_text, ports=network.ports, latency_seconds=network.curve.latency_seconds
        )  # fmt: skip
    return None


def _is_reached(fabric: Fabric, bytes_per_second: float, workload: Workload, strategy: Strategy, target: float) -> bool:
    slower = fabric.with_network_bandwidth(bytes_per_second)
    step = predict_fabric_step(slower, workload, strategy, plan_buckets(slower, workload, strategy))
    return _efficiency(slower, workload, strategy, step) >= target


def _fits_memory(fabric: Fabric, workload: Workload, strategy: Strategy) -> bool | None:
    """Test if the device holds the workload and the buckets beside it, or its shard; None if unknown."""
    if workload.memory_bytes is None or fabric.memory_bytes is None:
        return None
    if shard_group(fabric, strategy) > 1:
        sharded = sharded_memory_bytes(fabric, workload, strategy)
        return None if sharded is None else sharded <= USABLE_FRACTION * fabric.memory_bytes
    buckets = workload.gradient_bytes if fabric.ranks > 1 else 0
    return workload.memory_bytes + buckets <= USABLE_FRACTION * fabric.memory_bytes
