"""Plans of `distrib-topo plan`: predictions, needed bandwidth and recommendations for a workload on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TypedDict

import msgspec

from distrib.bandwidth_model import workload_catalog
from distrib.bandwidth_model.hypothetical import NetworkOption
from distrib.bandwidth_model.memory_estimate import MemoryEstimate
from distrib.bandwidth_model.network_catalog import find_network
from distrib.bandwidth_model.prediction import Prediction, ScalingLimit
from distrib.bandwidth_model.recommendations import (
    HostSubset,
    Recommendation,
    best_equivalent,
    find_faster_subset,
    recommend,
)
from distrib.bandwidth_model.scaling import find_job, needed_bandwidth, predict_limit, predict_step
from distrib.bandwidth_model.shard_choice import ShardChoice, choose_shard, explain_choices
from distrib.bandwidth_model.sharding import shard_group
from distrib.bandwidth_model.workload import Workload, is_workload_file, read_workload
from distrib.bandwidth_model.workload_catalog import WorkloadOptions
from distrib.cluster.topology import Topology, age_notes
from distrib.errors import ConfigError
from distrib.strategy import Strategy


class JobPlace(TypedDict):
    """Arguments of the model for the hosts of a job."""

    hosts: tuple[str, ...]
    nodes: int
    ranks_per_host: int | tuple[int, ...]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A workload on a cluster: `hosts` by name, with their `ranks`; `nodes` may exceed the names."""

    workload: Workload
    topology: Topology
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    efficiency: float
    strategy: Strategy = Strategy()  # frozen
    chooses_shard: bool = False
    """True to choose `shard` of the strategy for each number of hosts (`--shard auto`)."""
    chooses_mode: bool = False
    """True to choose the fastest equivalent of the strategy (`--mode auto`)."""
    notes: tuple[str, ...] = ()
    networks: tuple[tuple[NetworkOption, Topology], ...] = ()
    """Networks to compare, each with the cluster that has it."""

    @property
    def largest(self) -> int:
        """The largest number of hosts."""
        return max(self.nodes)

    def job(self, nodes: int) -> JobPlace:
        """Return the arguments for a number of hosts: the first names, extrapolated beyond the last.

        Args:
            nodes: The number of hosts.
        """
        ranks: int | tuple[int, ...] = self.ranks[0]
        if len(set(self.ranks)) > 1:
            ranks = tuple(self.ranks[place % len(self.ranks)] for place in range(nodes))
        return {"hosts": self.hosts[:nodes], "nodes": nodes, "ranks_per_host": ranks}


class NetworkComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The same job on one of several networks; prices are those of all hosts of the largest job."""

    network: str
    predictions: tuple[Prediction, ...]
    price: float | None = None
    price_per_efficiency_percent: float | None = None


class WorkloadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A workload without its gradients."""

    name: str
    origin: str
    device: str
    batch: int
    compute_seconds: float
    loader_seconds: float
    gradient_bytes: int
    gradients: int
    memory_bytes: int | None
    expected_error: float
    source: str


class ScalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `--json`. `needed_bytes_per_second`: of each host, for `wanted_efficiency` on the largest number of hosts."""

    workload: WorkloadSummary
    topology: str
    ranks_per_node: int
    """The most ranks of a host."""
    predictions: tuple[Prediction, ...]
    wanted_efficiency: float
    needed_bytes_per_second: float | None
    limit: ScalingLimit | None
    """The limit of the largest job with any network, if below the target."""
    fewer: HostSubset | None
    """Hosts that would train faster than all of the largest job."""
    memory: MemoryEstimate | None
    """Memory of a rank of the largest job, for networks of the catalogue on GPUs."""
    advice: tuple[Recommendation, ...]
    compared: tuple[NetworkComparison, ...]
    expected_error: float
    """Expected relative error of the step time, of links and workload together."""
    notes: tuple[str, ...]


def first_gpu_kind(topology: Topology | None, hosts: Iterable[str]) -> str | None:
    """Find the first described GPU of some hosts.

    Args:
        topology: The cluster.
        hosts: Host names.

    Returns:
        The kind; None if none is described.
    """
    known = (topology.gpus_of(host) for host in hosts) if topology else ()
    return next((gpus.kind for gpus in known if gpus and gpus.kind), None)


def select_workload(
    given: str,
    gpu: str | None,
    cluster_gpu: str | None,
    batch: int | None,
    *,
    hint: str,
    options: WorkloadOptions = WorkloadOptions(),  # noqa: B008  # frozen
) -> Workload:
    """Read the workload of `--workload`: a file, or a network of the catalogue.

    Args:
        given: The value of the option.
        gpu: The value of `--gpu`.
        cluster_gpu: The GPU of the hosts, for a network of the catalogue without `--gpu`.
        batch: Samples per rank. None: the workload's own.
        hint: The advice if no GPU is known.
        options: Settings of a network of the catalogue.

    Raises:
        ConfigError: The workload is unknown or invalid, or no GPU is known.
    """
    if is_workload_file(given):
        if options != WorkloadOptions():
            raise ConfigError(
                f"--workload {given}: --seq, --precision, --checkpointing and --compile do not apply to a profile",
                hint="measure the script with these settings: distrib-launch --profile FILE SCRIPT",
                code="option-conflict",
            )
        found = read_workload(given)
        return workload_catalog.scaled_workload(found, batch=batch, gpu=gpu) if batch or gpu else found
    kind = gpu or cluster_gpu
    if kind is None:
        find_network(given)  # an unknown name is reported first
        raise ConfigError(
            f"--workload {given}: the GPU is unknown",
            hint=f"{hint}, or profile your script: distrib-launch --profile FILE SCRIPT",
            code="gpu-unknown",
        )
    return workload_catalog.catalog_workload(given, kind, batch, options=options)


def make_plan(request: PlanRequest) -> ScalingPlan:
    """Predict all configurations of a request.

    Args:
        request: The request.

    Raises:
        ConfigError: A link is unknown.
    """
    workload = request.workload
    largest = request.job(request.largest)
    if request.chooses_mode:
        best = best_equivalent(recommend(request.topology, workload, request.strategy, **largest), request.strategy)
        request = msgspec.structs.replace(request, strategy=best.strategy if best else request.strategy)
    choices = [_predict(request, request.topology, count) for count in request.nodes]

    def predicted(topology: Topology) -> tuple[Prediction, ...]:
        return tuple(_predict(request, topology, count).chosen for count in request.nodes)

    base = tuple(choice.chosen for choice in choices)
    strategy = max(base, key=lambda each: each.hosts).strategy
    needed = None
    if request.largest > 1:
        needed = needed_bandwidth(request.topology, workload, strategy, **largest, efficiency=request.efficiency)
    last = base[-1]
    return ScalingPlan(
        workload=WorkloadSummary(
            name=workload.name, origin=workload.origin, device=workload.device, batch=workload.batch,
            compute_seconds=workload.compute_seconds, loader_seconds=workload.loader_seconds,
            gradient_bytes=workload.gradient_bytes, gradients=len(workload.gradients), memory_bytes=workload.memory_bytes,
            expected_error=workload.expected_error, source=workload.software.get("speed", "a profile"),
        ),
        topology=request.topology.source,
        ranks_per_node=last.ranks_per_host,
        predictions=base,
        wanted_efficiency=request.efficiency,
        needed_bytes_per_second=needed,
        limit=None if needed or request.largest == 1 else predict_limit(request.topology, workload, strategy, **largest),
        fewer=find_faster_subset(
            request.topology, workload, strategy, hosts=largest["hosts"], ranks_per_host=largest["ranks_per_host"],
            baseline=max(base, key=lambda each: each.hosts),
        ),
        memory=_memory(request.topology, workload, strategy, largest),
        advice=() if last.ranks == 1 else recommend(request.topology, workload, strategy, **largest),
        compared=tuple(_compare(network, predicted(topology), request.largest) for network, topology in request.networks),
        expected_error=(last.expected_error**2 + workload.expected_error**2) ** 0.5,
        notes=(*(explain_choices(choices) if request.chooses_shard else ()), *request.notes, *last.notes, *age_notes(request.topology, datetime.now(timezone.utc))),
    )  # fmt: skip


def _predict(request: PlanRequest, topology: Topology, nodes: int) -> ShardChoice:
    """Predict one number of hosts, with the given sharding or the best one."""

    def predict(strategy: Strategy) -> Prediction:
        return predict_step(topology, request.workload, strategy, **request.job(nodes))

    if request.chooses_shard:
        return choose_shard(predict, request.strategy)
    prediction = predict(request.strategy)
    return ShardChoice(chosen=prediction, candidates=(prediction,))


def _memory(topology: Topology, workload: Workload, strategy: Strategy, job: JobPlace) -> MemoryEstimate | None:
    if not workload.has_network:
        return None
    fabric, _ = find_job(topology, workload, job["hosts"], job["ranks_per_host"], job["nodes"])
    return workload_catalog.catalog_memory(
        workload, ranks=fabric.ranks, device_bytes=fabric.memory_bytes, shards=shard_group(fabric, strategy),
        gathers_all=strategy.shard == "grads",
    )  # fmt: skip


def _compare(network: NetworkOption, predictions: tuple[Prediction, ...], nodes: int) -> NetworkComparison:
    price = network.price * nodes if network.price is not None else None
    per = price / (100 * predictions[-1].efficiency) if price is not None else None
    return NetworkComparison(
        network=network.text, predictions=predictions, price=price, price_per_efficiency_percent=per
    )
