"""What to do about the wire: every strategy that the library has, costed on the same timeline and ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from distrib import units
from distrib.bandwidth.fabric import Fabric
from distrib.bandwidth.prediction import Prediction
from distrib.bandwidth.scaling import find_job, predict
from distrib.bandwidth.workload import Workload
from distrib.bandwidth.workloads import scaled
from distrib.cluster.topology import Topology
from distrib.strategy import Gradients, Strategy

SAME = "the same as synchronous SGD: the sums are those of the gradients themselves"


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy and what it would bring."""

    strategy: Strategy
    prediction: Prediction
    exact: bool
    """Whether the arithmetic of synchronous SGD is left intact."""
    convergence: str
    """What it does to convergence, in a sentence."""
    options: tuple[str, ...]
    """Those of `distrib-launch` that choose it."""
    batch: int | None = None
    """The samples of a rank where they are more than the workload's: the script decides on them, no option does."""


def advise(
    topology: Topology | None,
    workload: Workload,
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
) -> tuple[Advice, ...]:
    """Every strategy that makes sense for these ranks, most samples a second first.

    The arguments and errors are those of `foretell`.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    found = [
        Advice(
            strategy=strategy,
            prediction=predict(fabric, workload, strategy),
            exact=strategy.exact,
            convergence=convergence_of(strategy, fabric.ranks),
            options=options_of(strategy),
        )
        for strategy in _candidates(fabric, workload)
    ]
    found += _larger_batches(fabric, workload)
    # Where two are as fast, what changes less comes first.
    return tuple(sorted(found, key=lambda advice: (-round(advice.prediction.efficiency, 3), not advice.exact)))


def best_exact(advices: Iterable[Advice]) -> Advice | None:
    """The fastest that leaves the arithmetic of synchronous SGD intact: what `--mode auto` chooses."""
    return next((advice for advice in advices if advice.exact), None)


def _candidates(fabric: Fabric, workload: Workload) -> list[Strategy]:
    found = [Strategy()]
    if fabric.ranks == 1:
        return found
    # On GPUs it is NCCL's to choose; on CPUs ranks go by hosts where nobody says anything.
    if not fabric.gpus:
        found.append(Strategy(all_reduce="flat"))
    found += [Strategy(bucket_bytes=size << 20) for size in (1, 5, 100)]
    short: list[Gradients] = [Gradients("fp16" if workload.device != "cpu" else "bf16"), Gradients("int8")]
    short += [Gradients("powersgd", rank=4), Gradients("topk", fraction=0.01)]
    found += [Strategy(gradients=each) for each in short]
    found += [Strategy(accumulate=count) for count in (4, 16)]
    found += [Strategy(mode="local", inner_steps=count) for count in (10, 100)]
    servers = sorted({1, max(1, fabric.hosts // 4)})
    found += [Strategy(mode="async"), *(Strategy(mode="async", servers=count) for count in servers)]
    return found


def _larger_batches(fabric: Fabric, workload: Workload) -> list[Advice]:
    """More samples for each rank, where its device holds them."""
    found = []
    for times in (2, 4) if fabric.ranks > 1 else ():
        larger = scaled(workload, batch=times * workload.batch)
        prediction = predict(fabric, larger, Strategy())
        if prediction.fits_memory is not False:
            found.append(
                Advice(
                    strategy=Strategy(), prediction=prediction, exact=False, convergence=_larger(times), options=(),
                    batch=larger.batch,
                )
            )  # fmt: skip
    return found


def _larger(times: int) -> str:
    return (
        f"a global batch {times} times as large: fewer updates per epoch; scale the learning rate, and beyond some batch "
        "accuracy falls"
    )


def convergence_of(strategy: Strategy, ranks: int) -> str:
    """What a strategy does to convergence, said plainly."""
    if strategy.mode == "async":
        bound = f"at most {strategy.staleness} steps" if strategy.staleness is not None else "without bound"
        return f"gradients are applied to parameters that others have changed meanwhile ({bound}): worse per step, often for good"
    if strategy.mode == "local":
        return (
            f"ranks drift apart for {strategy.inner_steps or 'H'} steps and are averaged: more samples for the same loss, "
            "more so with more ranks; tune H"
        )
    said = []
    if strategy.accumulate > 1:
        said.append(_larger(strategy.accumulate))
    gradients = strategy.gradients
    if gradients.format in ("fp16", "bf16"):
        said.append(f"gradients are rounded to {gradients}: rarely visible")
    elif gradients.format == "int8":
        said.append("gradients are rounded to 8 bits, what is lost is added to the next: often no loss, check yours")
    elif gradients.format in ("powersgd", "topk"):
        said.append(
            f"only a sketch of the gradients travels ({gradients}), the rest is added to the next: slower at first, check yours"
        )
    return "; ".join(said) or SAME


def options_of(strategy: Strategy) -> tuple[str, ...]:
    """The options of `distrib-launch` that choose this strategy."""
    plain = Strategy()
    found: list[str] = []
    if strategy.mode != plain.mode:
        found += ["--mode", strategy.mode]
    if strategy.backend != plain.backend:
        found += ["--backend", strategy.backend]
    if strategy.gradients != plain.gradients:
        found += ["--gradients", str(strategy.gradients)]
    if strategy.all_reduce != plain.all_reduce:
        found += ["--all-reduce", strategy.all_reduce]
    if strategy.bucket_bytes is not None:
        found += ["--bucket", units.format_size(strategy.bucket_bytes).replace(" ", "")]
    if strategy.accumulate != 1:
        found += ["--accumulate", str(strategy.accumulate)]
    if strategy.balance:
        found += ["--balance"]
    for option, value in (
        ("--inner-steps", strategy.inner_steps), ("--servers", strategy.servers), ("--staleness", strategy.staleness),
        ("--replicas", strategy.replicas or None),
    ):  # fmt: skip
        if value is not None:
            found += [option, str(value)]
    if not strategy.host_reduction:
        found += ["--no-host-reduction"]
    return tuple(found)
