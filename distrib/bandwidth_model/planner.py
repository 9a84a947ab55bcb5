"""Plans of `distrib-topo plan`: predictions, needed bandwidth and recommendations for a workload on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TypedDict

import msgspec

from distrib.bandwidth_model import workload_catalog
from distrib.bandwidth_model.bottleneck import RingLink
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.hypothetical import NetworkOption
from distrib.bandwidth_model.memory_estimate import MemoryEstimate
from distrib.bandwidth_model.network_catalog import find_network
from distrib.bandwidth_model.prediction import NeededNetwork, Prediction, ScalingLimit
from distrib.bandwidth_model.recommendations import (
    HostSubset,
    Recommendation,
    best_equivalent,
    find_faster_subset,
    recommend,
)
from distrib.bandwidth_model.scaling import find_job, find_needed_network, predict_limit, predict_step
from distrib.bandwidth_model.shard_choice import ShardChoice, choose_shard, explain_choices
from distrib.bandwidth_model.sharding import shard_group
from distrib.bandwidth_model.training_cost import (
    AMORTIZATION_YEARS,
    HostPrices,
    Price,
    TrainingEstimate,
    TrainingGoal,
    estimate_training,
    peak_flop_per_second,
)
from distrib.bandwidth_model.workload import Workload, is_workload_file, read_workload
from distrib.bandwidth_model.workload_catalog import WorkloadOptions
from distrib.cluster.hardware_catalog import find_gpu
from distrib.cluster.topology import Topology, age_notes
from distrib.errors import ConfigError
from distrib.strategy import Strategy
from distrib.units import bit_rate_text, count_text


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
    network_choice: str = ""
    """The network of the predictions and its origin, if an option names it, such as `HDR, the first of --compare`."""
    goal: TrainingGoal = TrainingGoal()
    prices: HostPrices = HostPrices()
    network_price: Price | None = None
    """The price of the network of the predictions, for one host."""

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
    """The same job on one of several networks."""

    network: str
    predictions: tuple[Prediction, ...]
    estimates: tuple[TrainingEstimate, ...]
    """One for each prediction, with the price of the network."""
    network_price: Price | None = None
    """The price of the network of one host."""


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
    """The output of `--json`. `needed_network`: for `wanted_efficiency` on the largest number of hosts."""

    workload: WorkloadSummary
    topology: str
    network: str
    """The network of the predictions between hosts, such as `HDR`; empty for one host."""
    ranks_per_node: int
    """The most ranks of a host."""
    predictions: tuple[Prediction, ...]
    estimates: tuple[TrainingEstimate, ...]
    """One for each prediction."""
    assumptions: tuple[str, ...]
    """Assumptions about the network, the prices and the ranges."""
    wanted_efficiency: float
    needed_bytes_per_second: float | None
    needed_network: NeededNetwork | None
    limit: ScalingLimit | None
    """The limit of the largest job with any network, if below the target."""
    fewer: HostSubset | None
    """Hosts that would train faster than all of the largest job."""
    memory: MemoryEstimate | None
    """Memory of a rank of the largest job, for networks of the catalogue on GPUs."""
    advice: tuple[Recommendation, ...]
    compared: tuple[NetworkComparison, ...]
    """Lowest cost per sample first, where the costs are known."""
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
    fabric, _ = find_job(request.topology, workload, **largest)
    needed = None
    if request.largest > 1:
        needed = find_needed_network(request.topology, workload, strategy, **largest, efficiency=request.efficiency)
    last = base[-1]
    return ScalingPlan(
        workload=WorkloadSummary(
            name=workload.name, origin=workload.origin, device=workload.device, batch=workload.batch,
            compute_seconds=workload.compute_seconds, loader_seconds=workload.loader_seconds,
            gradient_bytes=workload.gradient_bytes, gradients=len(workload.gradients), memory_bytes=workload.memory_bytes,
            expected_error=workload.expected_error, source=workload.software.get("speed", "a profile"),
        ),
        topology=request.topology.source,
        network=request.network_choice or (fabric.network.text if fabric.network else ""),
        ranks_per_node=last.ranks_per_host,
        predictions=base,
        estimates=_estimates(request, request.topology, base, request.network_price),
        assumptions=(*_assumptions(request, fabric), *(explain_choices(choices) if request.chooses_shard else ())),
        wanted_efficiency=request.efficiency,
        needed_bytes_per_second=needed.bytes_per_second if needed else None,
        needed_network=needed,
        limit=None if needed or request.largest == 1 else predict_limit(request.topology, workload, strategy, **largest),
        fewer=find_faster_subset(
            request.topology, workload, strategy, hosts=largest["hosts"], ranks_per_host=largest["ranks_per_host"],
            baseline=max(base, key=lambda each: each.hosts),
        ),
        memory=_memory(workload, fabric, strategy),
        advice=() if last.ranks == 1 else recommend(request.topology, workload, strategy, **largest),
        compared=_compare(request, [predicted(topology) for _, topology in request.networks]),
        expected_error=(last.expected_error**2 + workload.expected_error**2) ** 0.5,
        notes=(*last.notes, *age_notes(request.topology, datetime.now(timezone.utc))),
    )  # fmt: skip


def _predict(request: PlanRequest, topology: Topology, nodes: int) -> ShardChoice:
    """Predict one number of hosts, with the given sharding or the best one."""

    def predict(strategy: Strategy) -> Prediction:
        return predict_step(topology, request.workload, strategy, **request.job(nodes))

    if request.chooses_shard:
        return choose_shard(predict, request.strategy)
    prediction = predict(request.strategy)
    return ShardChoice(chosen=prediction, candidates=(prediction,))


def _memory(workload: Workload, fabric: Fabric, strategy: Strategy) -> MemoryEstimate | None:
    if not workload.has_network:
        return None
    return workload_catalog.catalog_memory(
        workload, ranks=fabric.ranks, device_bytes=fabric.memory_bytes, shards=shard_group(fabric, strategy),
        gathers_all=strategy.shard == "grads",
    )  # fmt: skip


def _estimates(
    request: PlanRequest, topology: Topology, predictions: tuple[Prediction, ...], network_price: Price | None
) -> tuple[TrainingEstimate, ...]:
    workload = request.workload
    one_host = next((each for each in predictions if each.hosts == 1), _predict(request, topology, 1).chosen)
    kinds = {gpus.kind for host in request.hosts if (gpus := topology.gpus_of(host)) and gpus.kind}
    is_mixed = any(find_gpu(kind) != find_gpu(workload.device) for kind in kinds)
    return tuple(
        estimate_training(
            prediction,
            one_host,
            workload,
            goal=request.goal,
            prices=request.prices,
            network_price=network_price,
            peak=None if is_mixed else peak_flop_per_second(workload),
        )
        for prediction in predictions
    )


def _compare(request: PlanRequest, predictions: list[tuple[Prediction, ...]]) -> tuple[NetworkComparison, ...]:
    """Compare the networks, lowest cost per sample on the most hosts first; those of unknown cost last, in the given order."""
    is_priced = any(network.price for network, _ in request.networks)
    found = [
        NetworkComparison(
            network=network.text,
            predictions=each,
            estimates=_estimates(
                # Without the price of its network, the cost of a job would be too low beside others.
                msgspec.structs.replace(request, prices=HostPrices()) if is_priced and not network.price else request,
                topology,
                each,
                network.price,
            ),
            network_price=network.price,
        )
        for (network, topology), each in zip(request.networks, predictions, strict=True)
    ]

    def cost(compared: NetworkComparison) -> float:
        last = compared.estimates[-1].cost_per_million_samples
        return last.value if last else float("inf")

    return tuple(sorted(found, key=cost))


def _assumptions(request: PlanRequest, fabric: Fabric) -> tuple[str, ...]:
    choice = request.network_choice
    if fabric.network and request.networks and not choice:
        choice = f"{fabric.network.text} of {request.topology.source}, none of --compare"
    found = [_network_text(fabric.network, choice, gpus=fabric.gpus), *request.notes] if fabric.network else []
    if request.networks and not fabric.network:
        found.append(f"one host uses no network; {request.network_choice} is not used")
    spec = find_gpu(request.workload.device)
    if spec and fabric.ranks_per_host > 8 and spec.gpus_per_host == fabric.ranks_per_host:
        found.append(f"a host is a rack of {spec.gpus_per_host} GPUs that NVLink joins")
    prices = [request.prices.host, *(network.price for network, _ in request.networks)]
    if any(price and not price.is_hourly for price in prices):
        found.append(f"purchase prices are spread over {AMORTIZATION_YEARS} years of continuous use")
    return tuple(found)


def _network_text(link: RingLink, choice: str, *, gpus: bool) -> str:
    """Describe the network that was assumed: NICs, transport and GPUDirect RDMA."""
    text = f"network {choice or link.text or 'as measured'}: {count_text(link.ports, 'NIC')} a host"
    if link.kind == "ethernet":
        return f"{text}, of which TCP carries {bit_rate_text(link.bytes_per_second)}; for RDMA write such as 'RoCE 100Gb/s'"
    if link.kind not in ("infiniband", "roce"):
        return text
    if not gpus:
        return f"{text}, RDMA"
    setting = {None: "assumed on", True: "on", False: "off"}[link.gpudirect]
    return f"{text}, RDMA, GPUDirect RDMA {setting}"
