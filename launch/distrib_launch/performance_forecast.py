"""Forecast of a job before it starts: scaling efficiency, a warning if the network limits it, the strategy of `--mode auto`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec

from distrib import units
from distrib.bandwidth_model import workload_catalog
from distrib.bandwidth_model.planner import first_gpu_kind, select_workload
from distrib.bandwidth_model.prediction import Prediction, ScalingLimit
from distrib.bandwidth_model.recommendations import (
    HostSubset,
    Recommendation,
    best_equivalent,
    find_faster_subset,
    include_option,
    is_equivalent,
    recommend,
)
from distrib.bandwidth_model.scaling import fewer_cpus_notes, predict_limit, predict_step
from distrib.bandwidth_model.workload import Workload, is_workload_file
from distrib.cluster.node import name_hosts
from distrib.cluster.topology import Topology, age_notes
from distrib.errors import ConfigError, DistribError
from distrib.strategy import FORMATS, Strategy, strategy_options
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.results import ForecastRecord

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions

MIN_GAIN = 0.02
"""Smallest gain in scaling efficiency for which another strategy is recommended; the model's error is of this size."""

UNKNOWN_WORKLOAD = (
    "mode auto needs to know the workload (--profile measures it, --workload names it); the default is used"
)


def _find_workload(
    options: LaunchOptions, topology: Topology | None, hosts: Sequence[str]
) -> tuple[Workload, str] | None:
    """Find the workload of a job."""
    given = options.workload
    if given == "none":
        return None
    if given is None:
        found = options.adjacent_profile
        if found is None:
            return None
        given = str(found)
    origin = given if is_workload_file(given) else "the catalogue"
    hint = "describe the hosts' GPUs in a topology file (--topology)"
    return select_workload(given, None, first_gpu_kind(topology, hosts), None, hint=hint), origin


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Strategy to run a plan with, its predicted performance (None: not known), and notes for the user."""

    strategy: Strategy
    record: ForecastRecord | None = None
    notes: tuple[str, ...] = ()


def forecast(plan: LaunchPlan, options: LaunchOptions, topology: Topology | None) -> Forecast:
    """Predict the performance of a job. If the model cannot, a note of the result says why.

    Args:
        plan: Plan of the job.
        options: Options of the launch.
        topology: Description of the hosts.

    Raises:
        ConfigError: `--workload` is not valid.
    """

    def nothing(why: object) -> Forecast:
        note = f"no performance forecast: {why}" + ("; mode auto uses the default" if options.auto_mode else "")
        return Forecast(strategy=plan.strategy, notes=(note,))

    try:
        found = _find_workload(options, topology, [host.name for host in plan.hosts])
    except ConfigError as error:
        if options.workload is not None:
            raise
        return nothing(error)
    if found is None:
        return Forecast(strategy=plan.strategy, notes=(UNKNOWN_WORKLOAD,) if options.auto_mode else ())
    if plan.world_size == 1:
        return Forecast(strategy=plan.strategy)
    try:
        return _predict(plan, options, topology, *found)
    except DistribError as error:
        return nothing(error)


def _predict(
    plan: LaunchPlan, options: LaunchOptions, topology: Topology | None, profiled: Workload, source: str
) -> Forecast:
    """Run the model. Raises DistribError if it does not cover the job."""
    workload = _on_ranks(plan, profiled, source)
    notes = fewer_cpus_notes(profiled, workload)
    strategy, as_placed = plan.strategy, _as_placed(plan, workload)
    working = [host for host in plan.hosts if host.workers]
    hosts = tuple(host.name for host in working)
    each = tuple(host.workers for host in working)
    prediction = predict_step(topology, workload, as_placed, hosts=hosts, ranks_per_host=each)
    advice = recommend(topology, workload, as_placed, hosts=hosts, ranks_per_host=each)
    if options.auto_mode:
        strategy, prediction, why = _choose(strategy, prediction, advice)
        notes += (why,)
    few = None
    if topology and as_placed.servers is None:  # dedicated servers remain if fewer hosts work
        few = find_faster_subset(topology, workload, as_placed, hosts=hosts, ranks_per_host=each, baseline=prediction)
    limit = None
    if len(working) > 1 and prediction.cap and not prediction.cap.needed_network:
        limit = predict_limit(topology, workload, prediction.strategy, hosts=hosts, ranks_per_host=each)
    # Beside these options `--include` would be refused, or select other ranks.
    hosts_chosen = options.host_filter
    restricted = any(
        (options.ranks, hosts_chosen.include, hosts_chosen.exclude, hosts_chosen.spread, options.min_hosts)
    )
    warning = _warning(
        plan, prediction, limit, advice, few, options.warn_below, auto=options.auto_mode, restricted=restricted
    )
    fed = prediction.loader_seconds <= (1 - options.warn_below) * prediction.step_seconds
    if warning or not fed:
        notes += tuple(note for note in prediction.notes if note not in notes)
    if warning:
        notes += age_notes(topology, datetime.now(timezone.utc))
    if prediction.fits_memory is False:
        notes += (f"{workload.name} and its buckets may need more memory than {workload.device} has",)
    record = ForecastRecord(
        workload=workload.name,
        source=source,
        predicted=prediction,
        expected_error=(prediction.expected_error**2 + workload.expected_error**2) ** 0.5,
        warning=warning,
    )
    return Forecast(strategy=strategy, record=record, notes=notes)


def _on_ranks(plan: LaunchPlan, workload: Workload, source: str) -> Workload:
    """Adapt the workload to the CPUs of the ranks. Raises ConfigError if it was profiled on another kind of device."""
    devices = {rank.device.partition(":")[0] for rank in plan.ranks}
    if ("cuda" in devices and workload.device == "cpu") or (devices == {"cpu"} and workload.device != "cpu"):
        other = "GPUs" if "cuda" in devices else "CPUs"
        raise ConfigError(f"{source} is of {workload.device}, the ranks run on {other}")
    threads = [rank.threads for rank in plan.ranks if rank.role == "worker" and rank.threads]
    return workload_catalog.on_cpus(workload, min(threads)) if threads else workload


def _as_placed(plan: LaunchPlan, workload: Workload) -> Strategy:
    """Return the strategy as the model counts servers. Raises ConfigError for placements that the model does not cover."""
    servers = _dedicated_servers(plan)
    if servers and sum(host.workers > 0 for host in plan.hosts) == 1:
        raise ConfigError("the servers are on other hosts than the only one with workers")
    as_placed = msgspec.structs.replace(plan.strategy, servers=servers)
    # NCCL chooses its own way between GPUs.
    return as_placed if workload.device == "cpu" else msgspec.structs.replace(as_placed, all_reduce="auto")


def _dedicated_servers(plan: LaunchPlan) -> int | None:
    """Return the number of dedicated parameter servers; None if every worker's host runs its share of them."""
    servers = sum(host.servers for host in plan.hosts)
    beside = sum(host.servers > 0 for host in plan.hosts if host.workers)
    return None if not servers or beside == sum(host.workers > 0 for host in plan.hosts) else servers


def _choose(
    strategy: Strategy, prediction: Prediction, advice: Sequence[Recommendation]
) -> tuple[Strategy, Prediction, str]:
    """Return the fastest strategy with identical arithmetic, its prediction, and a note with the reason."""
    best = best_equivalent(advice, prediction.strategy)
    if best and best.prediction.efficiency >= prediction.efficiency + 0.5 * MIN_GAIN:
        way = best.strategy.all_reduce if strategy.all_reduce == "auto" else strategy.all_reduce
        chosen = msgspec.structs.replace(strategy, all_reduce=way, bucket_bytes=best.strategy.bucket_bytes)
        gain = f"{best.prediction.efficiency:.0%} of the ideal speed instead of {prediction.efficiency:.0%}"
        why = f"mode auto: {' '.join(strategy_options(chosen))}, for {gain}; identical arithmetic"
        return chosen, best.prediction, why
    return (
        strategy,
        prediction,
        f"mode auto: the default is the fastest strategy with identical arithmetic ({prediction.efficiency:.0%} of the ideal speed)",
    )


def _warning(
    plan: LaunchPlan,
    prediction: Prediction,
    limit: ScalingLimit | None,
    advice: Sequence[Recommendation],
    few: HostSubset | None,
    threshold: float,
    *,
    auto: bool,
    restricted: bool,
) -> str:
    """Return a warning if the predicted efficiency is below the threshold, else an empty text.

    `limit` is the efficiency with an infinitely fast network, for a job that no network brings to the threshold.
    """
    if prediction.efficiency >= threshold:
        return ""
    counts = {host.workers for host in plan.hosts if host.workers}
    ranks = str(counts.pop()) if len(counts) == 1 else f"up to {max(counts)}"
    hosts = f"{prediction.hosts} host{'' if prediction.hosts == 1 else 's'}"
    cap = prediction.cap
    why = prediction.losses[0].what if prediction.losses else "no link, the ranks themselves"
    if cap and why == f"link {cap.link}":
        why = f"link {cap.link}, {cap.bandwidth}"
        if cap.needed_network:
            why += f"; {cap.wanted_efficiency:.0%} needs {cap.needed_network.text}"
        elif limit and limit.losses and limit.efficiency < prediction.efficiency + MIN_GAIN:
            why = f"{limit.losses[0].what}; no network brings more than {limit.efficiency:.0%}"
    lines = [
        f"predicted scaling efficiency {prediction.efficiency:.0%} on {hosts} x {ranks} rank{'' if ranks == '1' else 's'}, limited by {why}"
    ]
    chosen = prediction.strategy
    # --mode auto takes the place of another mode, with what was chosen beside it.
    same = best_equivalent(advice, chosen if chosen.mode == "sync" else Strategy())
    if same and not auto and same.prediction.efficiency >= prediction.efficiency + MIN_GAIN:
        own = () if chosen.mode == "sync" else _only_of(plan.strategy)
        without = f" without {' '.join(own)}" if own else ""
        lines.append(f"--mode auto{without}: {same.prediction.efficiency:.0%}, {same.convergence}")
    other = _mildest(advice, threshold, chosen)
    if other and other.prediction.efficiency >= prediction.efficiency + 2 * MIN_GAIN:
        lines.append(f"{' '.join(_options(other, plan))}: {other.prediction.efficiency:.0%}, {other.convergence}")
    if few:
        fewer, all_hosts = few.prediction.samples_per_second, prediction.samples_per_second
        option = f"only {name_hosts(few.hosts)}" if restricted else include_option(few)
        lines.append(f"{option}: {units.number_text(fewer)} samples/s instead of {units.number_text(all_hosts)}")
    return "\n  ".join(lines)


def _only_of(chosen: Strategy) -> tuple[str, ...]:
    """Return the options that other modes refuse."""
    shared = msgspec.structs.replace(Strategy(), gradients=chosen.gradients, accumulate=chosen.accumulate)
    elsewhere = {*strategy_options(shared), "--mode", chosen.mode}
    return tuple(word for word in strategy_options(chosen) if word.startswith("--") and word not in elsewhere)


def _options(advice: Recommendation, plan: LaunchPlan) -> tuple[str, ...]:
    """Return the options for a recommendation; servers that the hostfile places need no option."""
    servers = advice.strategy.servers
    placed = plan.strategy.servers is None and servers == _dedicated_servers(plan)
    return strategy_options(msgspec.structs.replace(advice.strategy, servers=None if placed else servers))


_SEVERITY = (*FORMATS, "accumulate", "local", "async")
"""Changes of the arithmetic, mildest first."""


def _mildest(advice: Sequence[Recommendation], threshold: float, chosen: Strategy) -> Recommendation | None:
    """Return the mildest recommendation that changes the arithmetic and reaches the threshold, else the fastest."""
    changing = [each for each in advice if not (each.exact or each.batch or is_equivalent(each.strategy, chosen))]
    enough = [each for each in changing if each.prediction.efficiency >= threshold]
    return min(enough, key=lambda each: _severity(each.strategy), default=changing[0] if changing else None)


def _severity(strategy: Strategy) -> tuple[int, ...]:
    """Return the indices in `_SEVERITY`, the most severe first."""
    steps = [strategy.mode, "accumulate" if strategy.accumulate > 1 else "", strategy.gradients.format]
    return tuple(sorted((_SEVERITY.index(step) for step in steps if step in _SEVERITY), reverse=True))
