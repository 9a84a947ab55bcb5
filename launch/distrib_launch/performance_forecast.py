"""Before a launch: how far the job will scale, a warning where the wire will cap it, and what `--mode auto` chooses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec

from distrib import units
from distrib.bandwidth_model import workload_catalog
from distrib.bandwidth_model.planner import first_kind, workload_of
from distrib.bandwidth_model.prediction import Limit, Prediction
from distrib.bandwidth_model.recommendations import (
    HostSubset,
    Recommendation,
    best_equivalent,
    faster_subset_text,
    find_faster_subset,
    include_option,
    is_equivalent,
    launch_options,
    recommend,
)
from distrib.bandwidth_model.scaling import note_on_processors, predict_step, unlimited
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.topology import Topology, age_notes
from distrib.errors import ConfigError, DistribError
from distrib.strategy import INNER_STEPS, Strategy
from distrib_launch.cli.plan import beside
from distrib_launch.forecast_record import Outlook

if TYPE_CHECKING:
    from distrib_launch.launch_plan import LaunchPlan

WORTH = 0.02
"""What a strategy must gain, as a part of the ideal speed, to be worth a word."""

_UNKNOWN = "mode auto needs to know the workload (--profile measures it, --workload names it); the default is used"


def find_workload(
    options: argparse.Namespace, topology: Topology | None, hosts: Sequence[str]
) -> tuple[Workload, str] | None:
    """The workload of `--workload`, else the profile `NAME.profile.json` beside the script `NAME.py`; and where it is from.

    Raises ConfigError for one that cannot be.
    """
    given = options.workload
    if given == "none":
        return None
    if given is None:
        found = beside(options)
        if found is None:
            return None
        given = str(found)
    origin = given if workload_catalog.is_file(given) else "the catalogue"
    hint = "describe the hosts' GPUs in a topology file (--topology)"
    return workload_of(given, None, first_kind(topology, hosts), None, hint=hint), origin


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """The strategy to run a plan with, what is to be expected of it (None: nothing can be said), and notes for the user."""

    strategy: Strategy
    outlook: Outlook | None = None
    notes: tuple[str, ...] = ()


def look(plan: LaunchPlan, options: argparse.Namespace, topology: Topology | None) -> Look:
    """Look ahead at the job of this plan.

    Raises ConfigError for a workload that was asked for and cannot be; where the model cannot tell, a note says why.
    """
    auto = options.mode == "auto"

    def nothing(why: object) -> Look:
        note = f"nothing is predicted: {why}" + ("; mode auto uses the default" if auto else "")
        return Look(strategy=plan.strategy, notes=(note,))

    try:
        found = find_workload(options, topology, [host.name for host in plan.hosts])
    except ConfigError as error:
        if options.workload is not None:
            raise
        return nothing(error)
    if found is None:
        return Look(strategy=plan.strategy, notes=(_UNKNOWN,) if auto else ())
    if plan.world_size == 1:
        return Look(strategy=plan.strategy)
    try:
        return _foresee(plan, options, topology, *found)
    except DistribError as error:
        return nothing(error)


def _foresee(
    plan: LaunchPlan, options: argparse.Namespace, topology: Topology | None, profiled: Workload, source: str
) -> Look:
    """What the model says. Raises DistribError where it cannot tell."""
    auto = options.mode == "auto"
    workload = _on_ranks(plan, profiled, source)
    notes = note_on_processors(profiled, workload)
    strategy, as_placed = plan.strategy, _as_placed(plan, workload)
    working = [host for host in plan.hosts if host.workers]
    hosts = tuple(host.name for host in working)
    each = tuple(host.workers for host in working)
    predicted = predict_step(topology, workload, as_placed, hosts=hosts, ranks_per_host=each)
    advice = recommend(topology, workload, as_placed, hosts=hosts, ranks_per_host=each)
    if auto:
        strategy, predicted, why = _choose(strategy, predicted, advice)
        notes += (why,)
    few = None
    if topology and as_placed.servers is None:  # those that stand apart remain, however few hosts work
        few = find_faster_subset(topology, workload, as_placed, hosts=hosts, ranks_per_host=each, baseline=predicted)
    limit = None
    if len(working) > 1 and predicted.cap and not predicted.cap.needed_bytes_per_second:
        limit = unlimited(topology, workload, predicted.strategy, hosts=hosts, ranks_per_host=each)
    # With what was chosen otherwise the option would be refused, or mean other ranks.
    restricted = any((options.ranks, options.include, options.exclude, options.spread, options.min_hosts))
    warning = _warning(plan, predicted, limit, advice, few, options.warn_below, auto=auto, restricted=restricted)
    fed = predicted.loader_seconds <= (1 - options.warn_below) * predicted.step_seconds
    if warning or not fed:
        notes += tuple(note for note in predicted.notes if note not in notes)
    if warning:
        notes += age_notes(topology, datetime.now(timezone.utc))
    if predicted.fits_memory is False:
        notes += (f"{workload.name} and its buckets may need more memory than {workload.device} has",)
    outlook = Outlook(
        workload=workload.name,
        source=source,
        predicted=predicted,
        expected_error=(predicted.expected_error**2 + workload.expected_error**2) ** 0.5,
        warning=warning,
    )
    return Look(strategy=strategy, outlook=outlook, notes=notes)


def _on_ranks(plan: LaunchPlan, workload: Workload, source: str) -> Workload:
    """The workload with the processors that ranks have. Raises ConfigError for one of other devices than theirs."""
    devices = {rank.device.partition(":")[0] for rank in plan.ranks}
    if ("cuda" in devices and workload.device == "cpu") or (devices == {"cpu"} and workload.device != "cpu"):
        other = "GPUs" if "cuda" in devices else "CPUs"
        raise ConfigError(f"{source} is of {workload.device}, the ranks run on {other}")
    threads = [rank.threads for rank in plan.ranks if rank.role == "worker" and rank.threads]
    return workload_catalog.on_processors(workload, min(threads)) if threads else workload


def _as_placed(plan: LaunchPlan, workload: Workload) -> Strategy:
    """The plan's strategy as the model counts. Raises ConfigError where that knows no such placement."""
    servers = _servers_apart(plan)
    if servers and sum(host.workers > 0 for host in plan.hosts) == 1:
        raise ConfigError("the servers are on other hosts than the only one with workers")
    as_placed = msgspec.structs.replace(plan.strategy, servers=servers)
    # NCCL chooses its own way between GPUs.
    return as_placed if workload.device == "cpu" else msgspec.structs.replace(as_placed, all_reduce="auto")


def _servers_apart(plan: LaunchPlan) -> int | None:
    """How many parameter servers the model is to count as dedicated; None where each worker's host has its share of them."""
    servers = sum(host.servers for host in plan.hosts)
    beside = sum(host.servers > 0 for host in plan.hosts if host.workers)
    return None if not servers or beside == sum(host.workers > 0 for host in plan.hosts) else servers


def _choose(
    strategy: Strategy, predicted: Prediction, advice: Sequence[Recommendation]
) -> tuple[Strategy, Prediction, str]:
    """The fastest with the arithmetic of what the user has chosen himself, and a line that says what and why."""
    best = best_equivalent(advice, predicted.strategy)
    if best and best.prediction.efficiency >= predicted.efficiency + 0.5 * WORTH:
        way = best.strategy.all_reduce if strategy.all_reduce == "auto" else strategy.all_reduce
        chosen = msgspec.structs.replace(strategy, all_reduce=way, bucket_bytes=best.strategy.bucket_bytes)
        gain = f"{best.prediction.efficiency:.0%} of the ideal speed instead of {predicted.efficiency:.0%}"
        why = f"mode auto: {' '.join(launch_options(chosen))}, for {gain}; the arithmetic is the same"
        return chosen, best.prediction, why
    return (
        strategy,
        predicted,
        f"mode auto: the default is as good as any that leaves the arithmetic as it is ({predicted.efficiency:.0%} of the ideal speed)",
    )


def _warning(
    plan: LaunchPlan,
    predicted: Prediction,
    limit: Limit | None,
    advice: Sequence[Recommendation],
    few: HostSubset | None,
    threshold: float,
    *,
    auto: bool,
    restricted: bool,
) -> str:
    """What is said of a job that the wire will hold below the threshold; empty for others.

    `limit` is what it would reach where wires held nothing back, for a job that no wire brings to what is wanted.
    """
    if predicted.efficiency >= threshold:
        return ""
    counts = {host.workers for host in plan.hosts if host.workers}
    ranks = str(counts.pop()) if len(counts) == 1 else f"up to {max(counts)}"
    hosts = f"{predicted.hosts} host{'' if predicted.hosts == 1 else 's'}"
    cap = predicted.cap
    why = predicted.losses[0].what if predicted.losses else "no link, the ranks themselves"
    if cap and why == f"link {cap.link}":
        why = f"link {cap.link}, {units.rate_text(cap.bandwidth_bytes_per_second)}"
        if cap.needed_bytes_per_second:
            why += f"; {cap.wanted_efficiency:.0%} needs {units.rate_text(cap.needed_bytes_per_second)}"
        elif limit and limit.losses and limit.efficiency < predicted.efficiency + WORTH:
            why = f"{limit.losses[0].what}; no network brings more than {limit.efficiency:.0%}"
    said = f"{hosts} x {ranks} rank{'' if ranks == '1' else 's'} will reach {predicted.efficiency:.0%} ({why})"
    if few:
        said += f". {faster_subset_text(few, predicted)}{'' if restricted else f': {include_option(few)}'}"
    chosen = predicted.strategy
    # --mode auto takes the place of another mode, with what was chosen beside it.
    same = best_equivalent(advice, chosen if chosen.mode == "sync" else Strategy())
    if same and not auto and same.prediction.efficiency >= predicted.efficiency + WORTH:
        own = () if chosen.mode == "sync" else _only_of(plan.strategy)
        said += f". {_named(same)} would reach {same.prediction.efficiency:.0%}: --mode auto"
        said += f" without {' '.join(own)}" if own else ""
    other = mildest(advice, threshold, chosen)
    if other and other.prediction.efficiency >= predicted.efficiency + 2 * WORTH:
        said += f". {_named(other)} would reach {other.prediction.efficiency:.0%} ({other.convergence}): {' '.join(_options(other, plan))}"
    return said


def _only_of(chosen: Strategy) -> tuple[str, ...]:
    """The options that mean something in its mode alone, and would be refused in another."""
    shared = msgspec.structs.replace(Strategy(), gradients=chosen.gradients, accumulate=chosen.accumulate)
    elsewhere = {*launch_options(shared), "--mode", chosen.mode}
    return tuple(word for word in launch_options(chosen) if word.startswith("--") and word not in elsewhere)


def _options(advice: Recommendation, plan: LaunchPlan) -> tuple[str, ...]:
    """What to give for it: servers that the hostfile places need no option."""
    servers = advice.strategy.servers
    placed = plan.strategy.servers is None and servers == _servers_apart(plan)
    return launch_options(msgspec.structs.replace(advice.strategy, servers=None if placed else servers))


_LADDER = ("fp16", "bf16", "int8", "powersgd", "topk", "accumulate", "local", "async")
"""What changes the arithmetic, mildest first."""


def mildest(advice: Sequence[Recommendation], threshold: float, chosen: Strategy) -> Recommendation | None:
    """Of what changes the arithmetic from that of `chosen`, the mildest that reaches the threshold, else the fastest."""
    changing = [each for each in advice if not (each.exact or each.batch or is_equivalent(each.strategy, chosen))]
    enough = [each for each in changing if each.prediction.efficiency >= threshold]
    return min(enough, key=lambda each: _harshness(each.strategy), default=changing[0] if changing else None)


def _harshness(strategy: Strategy) -> tuple[int, ...]:
    """The steps of the ladder that it takes, the harshest first."""
    steps = [strategy.mode, "accumulate" if strategy.accumulate > 1 else "", strategy.gradients.format]
    return tuple(sorted((_LADDER.index(step) for step in steps if step in _LADDER), reverse=True))


def _named(advice: Recommendation) -> str:
    """Such as `Gradients as bf16`."""
    strategy = advice.strategy
    parts = []
    if strategy.all_reduce == "flat":
        parts.append("one ring over all ranks")
    if not strategy.gradients.exact:
        parts.append(f"gradients as {strategy.gradients}")
    if strategy.bucket_bytes:
        parts.append(f"buckets of {units.format_size(strategy.bucket_bytes)}")
    if strategy.accumulate > 1:
        parts.append(f"accumulating {strategy.accumulate} batches")
    if strategy.mode == "local":
        parts.append(f"averaging every {strategy.inner_steps or INNER_STEPS} steps")
    if strategy.mode == "async":
        parts.append("asynchronous servers")
    joined = " + ".join(parts) or "the default"
    return joined[0].upper() + joined[1:]
