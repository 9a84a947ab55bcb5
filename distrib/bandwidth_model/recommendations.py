"""Recommendations: every strategy costed on the same step timeline and ranked, and subsets of hosts that would train faster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from distrib import units
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import find_job, predict_on_fabric, predict_step
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import scaled_workload
from distrib.cluster.node import name_hosts, shown_hosts
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.strategy import (
    FORMATS,
    AllReduce,
    Gradients,
    Mode,
    Strategy,
    parse_gradients,
    strategy_options,
    validate_strategy,
)

SAME_AS_SYNC = "same as synchronous SGD"


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy with its predicted performance and its effect on convergence."""

    strategy: Strategy
    prediction: Prediction
    exact: bool
    """True if numerically equivalent to synchronous SGD."""
    convergence: str
    """The effect on convergence, in a few words."""
    options: tuple[str, ...]
    """The options of `distrib-launch` that select the strategy."""
    batch: int | None = None
    """Samples per rank where larger than the workload's. The script sets them, no option does."""


class HostSubset(msgspec.Struct, frozen=True, kw_only=True):
    """Some hosts of a job, in its order, and the prediction for them alone."""

    hosts: tuple[str, ...]
    prediction: Prediction


def recommend(
    topology: Topology | None,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
) -> tuple[Recommendation, ...]:
    """Cost every strategy that makes sense for a job.

    Args:
        topology: The cluster. None: one host that is not described.
        workload: One rank's step.
        strategy: The chosen strategy. Each recommendation changes only what it is about.
        hosts: Host names, or a number of the topology's hosts.
        nodes: The number of hosts, where more than the names.
        ranks_per_host: One number, or one for each host.

    Returns:
        Recommendations, most samples per second first, the chosen strategy among them.

    Raises:
        ConfigError: The workload is invalid, or a link is unknown.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    predictions = {
        each: predict_on_fabric(fabric, workload, each) for each in [strategy, *_equivalent(fabric, strategy)]
    }
    fastest = max(predictions, key=lambda each: round(predictions[each].efficiency, 3))  # the first of equals
    for each in _approximate(fabric, workload, strategy, fastest):
        if each not in predictions:
            predictions[each] = predict_on_fabric(fabric, workload, each)
    shown = (each for each in predictions if each == fastest or not _changes_algorithm_and_buckets(each, strategy))
    found = [_recommendation(each, predictions[each], convergence_effect(each)) for each in shown]
    found += _larger_batches(fabric, workload, strategy)
    # Of two that are equally fast, the one that changes less comes first.
    most = max(one.prediction.samples_per_second for one in found)
    return tuple(sorted(found, key=lambda one: (-round(one.prediction.samples_per_second / most, 3), not one.exact)))


def best_equivalent(
    recommendations: Iterable[Recommendation],
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
) -> Recommendation | None:
    """Select the fastest strategy that is numerically equivalent: the choice of `--mode auto`.

    Args:
        recommendations: Fastest first.
        strategy: The strategy to compare with.

    Returns:
        The recommendation, or None.
    """
    return next((each for each in recommendations if not each.batch and is_equivalent(each.strategy, strategy)), None)


def is_equivalent(one: Strategy, other: Strategy) -> bool:
    """Test if two strategies compute the same: at most the all-reduce algorithm and the buckets differ.

    Args:
        one: A strategy.
        other: A strategy.
    """
    plain, plain_other = (msgspec.structs.replace(each, all_reduce="auto", bucket_bytes=None) for each in (one, other))
    return plain == plain_other


def find_faster_subset(
    topology: Topology,
    workload: Workload,
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str],
    ranks_per_host: int | Sequence[int] = 1,
    baseline: Prediction,
    min_speedup: float = 1.1,
) -> HostSubset | None:
    """Find hosts that would train faster alone, as where a link is slow or one kind of host is.

    Candidates are the first 1, 2, 4, ... hosts, and one or all hosts of each kind.

    Args:
        topology: The cluster.
        workload: One rank's step.
        strategy: The strategy of the job.
        hosts: All hosts of the job.
        ranks_per_host: One number, or one for each host.
        baseline: The prediction for all hosts.
        min_speedup: The least gain in samples per second: twice the expected error of measured links.

    Returns:
        The best subset, None if none exceeds the baseline by `min_speedup`.
    """
    each = [ranks_per_host] * len(hosts) if isinstance(ranks_per_host, int) else list(ranks_per_host)
    kinds: dict[tuple[int, int], list[int]] = {}
    for place, host in enumerate(hosts):
        kinds.setdefault((id(topology.group_of(host)), each[place]), []).append(place)
    candidates = {tuple(range(1 << power)) for power in range(len(hosts).bit_length())}
    candidates |= {tuple(places) for members in kinds.values() for places in (members[:1], members)}
    found = []
    for places in sorted(candidates, key=lambda places: (len(places), places)):
        if len(places) >= baseline.hosts:
            continue
        names, ranks = tuple(hosts[place] for place in places), [each[place] for place in places]
        try:
            prediction = predict_step(topology, workload, strategy, hosts=names, ranks_per_host=ranks)
        except ConfigError:  # a link is unknown that the whole job does not use
            continue
        found.append(HostSubset(hosts=names, prediction=prediction))
    best = max(found, key=lambda one: one.prediction.samples_per_second, default=None)
    is_faster = best and best.prediction.samples_per_second > min_speedup * baseline.samples_per_second
    return best if is_faster else None


def faster_subset_text(subset: HostSubset, baseline: Prediction, *, has_names: bool = True) -> str:
    """Describe a faster subset: `n1 alone would be faster, 370 samples/s instead of 125`.

    Args:
        subset: The subset.
        baseline: The prediction for all hosts.
        has_names: False if the user named no hosts.
    """
    names, count = name_hosts(subset.hosts), len(subset.hosts)
    who = f"{names} alone" if count == 1 else f"{count} of the hosts ({names})"
    if not has_names:
        who = units.count_text(count, "host") + " alone"
    unit, field = ("tokens", "tokens_per_second") if baseline.tokens_per_second else ("samples", "samples_per_second")
    faster, slower = (units.compact_text(getattr(each, field)) for each in (subset.prediction, baseline))
    return f"{who} would be faster, {faster} {unit}/s instead of {slower}"


def include_option(subset: HostSubset) -> str:
    """Return the option that selects a subset of hosts: `--include n[1-2]`.

    Args:
        subset: The subset.
    """
    folded = shown_hosts(subset.hosts)
    is_one_range = "," not in re.sub(r"\[[^\]]*\]", "", folded) and ":" not in folded
    separate = "@".join(f"[{name}]" if ":" in name else name for name in subset.hosts)
    return f"--include {folded if is_one_range else separate}"


def _equivalent(fabric: Fabric, strategy: Strategy) -> list[Strategy]:
    """Vary the all-reduce algorithm and the buckets where the user chose none."""
    if fabric.ranks == 1 or strategy.mode != "sync" or strategy.backend != "torch" or strategy.shard != "none":
        return []
    # NCCL chooses on GPUs. On CPUs, "auto" is hierarchical.
    algorithms: tuple[AllReduce, ...] = (strategy.all_reduce,)
    if strategy.all_reduce == "auto" and not fabric.gpus:
        algorithms = ("auto", "flat")
    sizes = (None, 1 << 20, 5 << 20, 100 << 20) if strategy.bucket_bytes is None else (strategy.bucket_bytes,)
    return [
        msgspec.structs.replace(strategy, all_reduce=algorithm, bucket_bytes=size)
        for algorithm in algorithms
        for size in sizes
    ]


def _changes_algorithm_and_buckets(candidate: Strategy, strategy: Strategy) -> bool:
    """Test for a change of both algorithm and buckets, shown only if it is the fastest."""
    changes_algorithm = candidate.all_reduce != strategy.all_reduce
    return changes_algorithm and candidate.bucket_bytes != strategy.bucket_bytes and is_equivalent(candidate, strategy)


def _approximate(fabric: Fabric, workload: Workload, strategy: Strategy, fastest: Strategy) -> list[Strategy]:
    """List strategies that are not equivalent, some combined with `fastest`, the best equivalent one."""
    if fabric.ranks == 1:
        return []
    half = Gradients("fp16" if workload.device != "cpu" else "bf16")
    found = _smaller_messages(strategy, fastest, half) if strategy.mode == "sync" else [Strategy()]
    if strategy.backend == "torch" and strategy.shard == "none":
        found += _local_sgd(strategy) + _parameter_servers(strategy, fabric.hosts)
        if strategy.mode != "sync":
            found.append(msgspec.structs.replace(strategy, gradients=half))
    return [each for each in found if _is_valid(each)]


def _smaller_messages(strategy: Strategy, fastest: Strategy, half: Gradients) -> list[Strategy]:
    """List strategies with fewer bytes per message or fewer messages."""
    order = list(FORMATS)
    coarser = order[order.index(strategy.gradients.format) + 1 :]
    formats = [half] if strategy.gradients.exact else []
    formats += [parse_gradients(FORMATS[name].recommended) for name in coarser if FORMATS[name].recommended]
    found = [msgspec.structs.replace(strategy, gradients=each) for each in formats]
    shortest = msgspec.structs.replace(fastest, gradients=half) if strategy.gradients.exact else fastest
    more = [count for count in (4, 16) if count > strategy.accumulate]
    found += [msgspec.structs.replace(strategy, accumulate=count) for count in more]
    return [*found, shortest, *(msgspec.structs.replace(shortest, accumulate=count) for count in more[:1])]


def _local_sgd(strategy: Strategy) -> list[Strategy]:
    """List local SGD with longer rounds."""
    local = strategy if strategy.mode == "local" else _in_mode(strategy, "local", inner_steps=1)
    fewest = local.steps_per_round
    return [msgspec.structs.replace(local, inner_steps=count) for count in (10, 100) if count > fewest]


def _parameter_servers(strategy: Strategy, hosts: int) -> list[Strategy]:
    """List asynchronous training with shared and dedicated parameter servers."""
    plain = strategy if strategy.mode == "async" else _in_mode(strategy, "async")
    if plain.servers:
        return []
    return [plain, *(msgspec.structs.replace(plain, servers=count) for count in sorted({1, max(1, hosts // 4)}))]


def _in_mode(strategy: Strategy, mode: Mode, **more: Any) -> Strategy:
    """Change the mode and keep the settings that are valid in it."""
    half = strategy.gradients.format in ("fp16", "bf16")
    return Strategy(
        mode=mode, gradients=strategy.gradients if half else Gradients(), accumulate=strategy.accumulate, **more
    )


def _is_valid(strategy: Strategy) -> bool:
    try:
        validate_strategy(strategy)
    except ConfigError:
        return False
    return True


def _larger_batches(fabric: Fabric, workload: Workload, strategy: Strategy) -> list[Recommendation]:
    """Double and quadruple the batch of a rank where its device memory allows."""
    found = []
    for times in (2, 4) if fabric.ranks > 1 else ():
        larger = scaled_workload(workload, batch=times * workload.batch)
        prediction = predict_on_fabric(fabric, larger, strategy)
        if prediction.fits_memory is not False:
            found.append(_recommendation(strategy, prediction, f"global batch x {times}", batch=larger.batch))
    return found


def _recommendation(
    strategy: Strategy, prediction: Prediction, convergence: str, batch: int | None = None
) -> Recommendation:
    return Recommendation(
        strategy=strategy,
        prediction=prediction,
        exact=strategy.exact and batch is None,
        convergence=convergence,
        options=strategy_options(strategy),
        batch=batch,
    )


def convergence_effect(strategy: Strategy) -> str:
    """Describe the effect of a strategy on convergence: `stale gradients, in 16 bits`.

    Args:
        strategy: The strategy.
    """
    effects = []
    if strategy.mode == "async":
        bound = f", at most {strategy.staleness} steps late" if strategy.staleness is not None else ""
        # Measured with and without these corrections: docs/explanation/staleness.md.
        is_corrected = strategy.stale_rate and strategy.momentum_correction
        effects.append(f"stale gradients{bound}" + ("" if is_corrected else ", not corrected"))
    if strategy.mode == "local":
        effects.append(f"parameters averaged every {strategy.steps_per_round} steps")
    if strategy.accumulate > 1:
        effects.append(f"global batch x {strategy.accumulate}")
    if not strategy.gradients.exact:
        effects.append(FORMATS[strategy.gradients.format].effect)
    return "; ".join(effects) or SAME_AS_SYNC
