"""Before a launch: how far the job will scale, a warning where the wire will cap it, and what `--mode auto` chooses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from distrib_launch.outlook import beside, words
from distrib_launch.outlook.ask import workload_of
from distrib_launch.outlook.record import Outlook

from distrib.bandwidth import workloads
from distrib.bandwidth.advice import Advice, advise, best_exact, options_of
from distrib.bandwidth.prediction import Prediction
from distrib.bandwidth.scaling import foretell, note_on_processors
from distrib.bandwidth.workload import Workload
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError, DistribError
from distrib.strategy import Strategy

if TYPE_CHECKING:
    from distrib_launch.plan import LaunchPlan

WORTH = 0.02
"""What a strategy must gain, as a part of the ideal speed, to be worth a word."""


def find_workload(options: argparse.Namespace, topology: Topology | None) -> tuple[Workload, str] | None:
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
    origin = given if workloads.is_file(given) else "the catalogue"
    return workload_of(
        given, None, topology, None, hint="describe the hosts' GPUs in a topology file (--topology)"
    ), origin


def look(
    plan: LaunchPlan, options: argparse.Namespace, topology: Topology | None
) -> tuple[Outlook | None, Strategy, tuple[str, ...]]:
    """What to expect of the plan, the strategy to run it with, and notes for the user.

    Raises ConfigError for a workload that was asked for and cannot be; where the model cannot tell, a note says why.
    """
    auto = options.mode == "auto"
    strategy = plan.strategy
    try:
        found = find_workload(options, topology)
    except ConfigError as error:
        if options.workload is not None:
            raise
        return None, strategy, (f"nothing is foretold: {error}",)
    if found is None:
        if auto:
            return (
                None,
                strategy,
                (
                    "mode auto needs to know the workload (--profile measures it, --workload names it); the default is used",
                ),
            )
        return None, strategy, ()
    if plan.world_size == 1:
        return None, strategy, ()
    workload, source = found
    devices = {rank.device.partition(":")[0] for rank in plan.ranks}
    if ("cuda" in devices and workload.device == "cpu") or (devices == {"cpu"} and workload.device != "cpu"):
        other = "GPUs" if "cuda" in devices else "CPUs"
        return None, strategy, (f"nothing is foretold: {source} is of {workload.device}, the ranks run on {other}",)
    hosts = tuple(host.name for host in plan.hosts)
    each = tuple(host.ranks for host in plan.hosts)
    profiled = workload
    threads = [rank.threads for rank in plan.ranks if rank.role == "worker" and rank.threads]
    if threads:
        workload = workloads.on_processors(workload, min(threads))
    notes = note_on_processors(profiled, workload)
    try:
        foretold = foretell(topology, workload, strategy, hosts=hosts, ranks_per_host=each)
        advice = advise(topology, workload, hosts=hosts, ranks_per_host=each)
        if auto:
            strategy, foretold, why = _choose(strategy, foretold, advice, lambda s: foretell(
                topology, workload, s, hosts=hosts, ranks_per_host=each))  # fmt: skip
            notes += (why,)
    except DistribError as error:
        return None, strategy, (f"nothing is foretold: {error}",)
    outlook = Outlook(
        workload=workload.name,
        source=source,
        foretold=foretold,
        expected_error=(foretold.expected_error**2 + workload.expected_error**2) ** 0.5,
        warning=_warning(plan, foretold, advice, options.warn_below, auto=auto),
    )
    return outlook, strategy, notes


def _choose(
    strategy: Strategy, foretold: Prediction, advice: Sequence[Advice], predict: Callable[[Strategy], Prediction]
) -> tuple[Strategy, Prediction, str]:
    """The best exact strategy, with what the user has chosen himself left as it is, and a line that says what and why."""
    best = best_exact(advice)
    if best:
        chosen = msgspec.structs.replace(
            strategy,
            all_reduce=best.strategy.all_reduce if strategy.all_reduce == "auto" else strategy.all_reduce,
            bucket_bytes=strategy.bucket_bytes or best.strategy.bucket_bytes,
        )
        prediction = predict(chosen)
        if prediction.efficiency >= foretold.efficiency + 0.5 * WORTH:
            gain = f"{prediction.efficiency:.0%} of the ideal speed instead of {foretold.efficiency:.0%}"
            return (
                chosen,
                prediction,
                f"mode auto: {' '.join(options_of(chosen))}, for {gain}; the arithmetic is the same",
            )
    return (
        strategy,
        foretold,
        f"mode auto: the default is as good as any that leaves the arithmetic as it is ({foretold.efficiency:.0%} of the ideal speed)",
    )


def _warning(plan: LaunchPlan, foretold: Prediction, advice: Sequence[Advice], threshold: float, *, auto: bool) -> str:
    """What is said of a job that the wire will hold below the threshold; empty for others."""
    if foretold.efficiency >= threshold:
        return ""
    counts = {host.ranks for host in plan.hosts}
    ranks = str(counts.pop()) if len(counts) == 1 else f"up to {max(counts)}"
    hosts = f"{len(plan.hosts)} host{'' if len(plan.hosts) == 1 else 's'}"
    cap = foretold.cap
    why = foretold.losses[0].what if foretold.losses else "no link, the ranks themselves"
    if cap:
        why = f"link {cap.link}, {words.rate(cap.bandwidth_bytes_per_second)}"
        if cap.needed_bytes_per_second:
            why += f"; {cap.wanted_efficiency:.0%} needs {words.rate(cap.needed_bytes_per_second)}"
    said = f"{hosts} x {ranks} ranks will reach {foretold.efficiency:.0%} ({why})"
    exact = best_exact(advice)
    if exact and not auto and exact.prediction.efficiency >= foretold.efficiency + WORTH:
        said += f". {_named(exact)} would reach {exact.prediction.efficiency:.0%}: --mode auto"
    other = mildest(advice, threshold)
    if other and other.prediction.efficiency >= foretold.efficiency + 2 * WORTH:
        said += f". {_named(other)} would reach {other.prediction.efficiency:.0%} ({other.convergence}): {' '.join(other.options)}"
    return said


_LADDER = ("fp16", "bf16", "int8", "powersgd", "topk", "accumulate", "local", "async")
"""What changes the arithmetic, mildest first."""


def mildest(advice: Sequence[Advice], threshold: float) -> Advice | None:
    """Of the options that change the arithmetic, the mildest that reaches the threshold, else the fastest."""
    changing = [each for each in advice if not each.exact and each.options]
    enough = [each for each in changing if each.prediction.efficiency >= threshold]
    return min(enough, key=lambda each: _LADDER.index(_kind(each.strategy)), default=changing[0] if changing else None)


def _kind(strategy: Strategy) -> str:
    if strategy.mode != "sync":
        return strategy.mode
    return "accumulate" if strategy.accumulate > 1 else strategy.gradients.format


def _named(advice: Advice) -> str:
    """Such as `Gradients as bf16`."""
    strategy = advice.strategy
    parts = []
    if strategy.all_reduce == "flat":
        parts.append("one ring over all ranks")
    if not strategy.gradients.exact:
        parts.append(f"gradients as {strategy.gradients}")
    if strategy.bucket_bytes:
        parts.append(f"buckets of {words.size(strategy.bucket_bytes)}")
    if strategy.accumulate > 1:
        parts.append(f"accumulating {strategy.accumulate} batches")
    if strategy.mode == "local":
        parts.append(f"averaging every {strategy.inner_steps} steps")
    if strategy.mode == "async":
        parts.append("asynchronous servers")
    joined = " + ".join(parts) or "the default"
    return joined[0].upper() + joined[1:]
