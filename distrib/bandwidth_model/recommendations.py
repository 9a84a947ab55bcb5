"""What to do about the wire: every strategy that the library has, costed on the same timeline and ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from distrib import units
from distrib.bandwidth_model.fabric import Fabric
from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import find_job, predict_on_fabric
from distrib.bandwidth_model.workload import Workload
from distrib.bandwidth_model.workload_catalog import scaled
from distrib.cluster.topology import Topology
from distrib.errors import ConfigError
from distrib.strategy import INNER_STEPS, AllReduce, Gradients, Mode, Strategy, checked

BUCKETS_MIB, ACCUMULATED, INNER = (1, 5, 100), (4, 16), (10, 100)
"""What is tried of bucket sizes, batches of a step, and steps of a round."""

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
    strategy: Strategy = Strategy(),  # noqa: B008  # frozen
    *,
    hosts: Sequence[str] | int,
    nodes: int | None = None,
    ranks_per_host: int | Sequence[int] = 1,
) -> tuple[Advice, ...]:
    """Every strategy that makes sense for these ranks where `strategy` is what was chosen, most samples a second first.

    What was chosen stays as it is but for what an advice is about. The other arguments and the errors are those of `predict_step`.
    """
    fabric, workload = find_job(topology, workload, hosts, ranks_per_host, nodes)
    predictions = {each: predict_on_fabric(fabric, workload, each) for each in [strategy, *_as_exact(fabric, strategy)]}
    fastest = max(predictions, key=lambda each: round(predictions[each].efficiency, 3))  # the first of equals
    for each in _changing(fabric, workload, strategy, fastest):
        if each not in predictions:
            predictions[each] = predict_on_fabric(fabric, workload, each)
    shown = (each for each in predictions if each == fastest or not _is_pair(each, strategy))
    found = [
        Advice(
            strategy=each,
            prediction=predictions[each],
            exact=each.exact,
            convergence=convergence_of(each),
            options=options_of(each),
        )
        for each in shown
    ]
    found += _larger_batches(fabric, workload, strategy)
    # Where two are as fast, what changes less comes first.
    most = max(advice.prediction.samples_per_second for advice in found)
    return tuple(
        sorted(found, key=lambda advice: (-round(advice.prediction.samples_per_second / most, 3), not advice.exact))
    )


def best_alike(advices: Iterable[Advice], strategy: Strategy = Strategy()) -> Advice | None:  # noqa: B008  # frozen
    """The fastest with the arithmetic of `strategy`: what `--mode auto` chooses."""
    return next((each for each in advices if not each.batch and is_alike(each.strategy, strategy)), None)


def is_alike(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies compute the same: they differ in how gradients travel, if at all."""
    plain, plain_other = (msgspec.structs.replace(each, all_reduce="auto", bucket_bytes=None) for each in (one, other))
    return plain == plain_other


def _as_exact(fabric: Fabric, strategy: Strategy) -> list[Strategy]:
    """The same arithmetic over other ways, where nobody has chosen one."""
    if fabric.ranks == 1 or strategy.mode != "sync" or strategy.backend != "torch":
        return []
    # On GPUs it is NCCL's to choose; on CPUs ranks go by hosts where nobody says anything.
    ways: tuple[AllReduce, ...] = (strategy.all_reduce,)
    if strategy.all_reduce == "auto" and not fabric.gpus:
        ways = ("auto", "flat")
    sizes = (None, *(size << 20 for size in BUCKETS_MIB)) if strategy.bucket_bytes is None else (strategy.bucket_bytes,)
    return [msgspec.structs.replace(strategy, all_reduce=way, bucket_bytes=size) for way in ways for size in sizes]


def _is_pair(candidate: Strategy, strategy: Strategy) -> bool:
    """Whether it differs by the way and the buckets alone, and by both: worth a line only where that is the fastest."""
    way, buckets = candidate.all_reduce != strategy.all_reduce, candidate.bucket_bytes != strategy.bucket_bytes
    return way and buckets and is_alike(candidate, strategy)


def _changing(fabric: Fabric, workload: Workload, strategy: Strategy, fastest: Strategy) -> list[Strategy]:
    """What changes the arithmetic, some of it together with `fastest`, which does not."""
    if fabric.ranks == 1:
        return []
    half = Gradients("fp16" if workload.device != "cpu" else "bf16")
    found = _shorter(strategy, fastest, half) if strategy.mode == "sync" else [Strategy()]
    if strategy.backend == "torch":
        found += _seldom(strategy) + _servers(strategy, fabric.hosts)
        if strategy.mode != "sync":
            found.append(msgspec.structs.replace(strategy, gradients=half))
    return [each for each in found if _goes_together(each)]


def _shorter(strategy: Strategy, fastest: Strategy, half: Gradients) -> list[Strategy]:
    """Fewer bytes in each step, and fewer steps in which they travel."""
    formats = [half, Gradients("int8"), Gradients("powersgd", rank=4), Gradients("topk", fraction=0.01)]
    own = strategy.gradients.format
    if own in ("fp16", "bf16"):
        formats = formats[1:]
    elif own != "fp32":
        formats = formats[[each.format for each in formats].index(own) + 1 :]
    found = [msgspec.structs.replace(strategy, gradients=each) for each in formats]
    shortest = msgspec.structs.replace(fastest, gradients=half) if strategy.gradients.exact else fastest
    more = [count for count in ACCUMULATED if count > strategy.accumulate]
    found += [msgspec.structs.replace(strategy, accumulate=count) for count in more]
    return [*found, shortest, *(msgspec.structs.replace(shortest, accumulate=count) for count in more[:1])]


def _seldom(strategy: Strategy) -> list[Strategy]:
    """Steps alone, and now and then a mean of parameters."""
    local = strategy if strategy.mode == "local" else _in_mode(strategy, "local", inner_steps=1)
    fewest = local.inner_steps or INNER_STEPS
    return [msgspec.structs.replace(local, inner_steps=count) for count in INNER if count > fewest]


def _servers(strategy: Strategy, hosts: int) -> list[Strategy]:
    """A share of the parameters on every host, or servers apart."""
    plain = strategy if strategy.mode == "async" else _in_mode(strategy, "async")
    if plain.servers:
        return []
    return [plain, *(msgspec.structs.replace(plain, servers=count) for count in sorted({1, max(1, hosts // 4)}))]


def _in_mode(strategy: Strategy, mode: Mode, **more: Any) -> Strategy:
    """Another mode, with what was chosen beside the mode and means something there."""
    half = strategy.gradients.format in ("fp16", "bf16")
    return Strategy(
        mode=mode, gradients=strategy.gradients if half else Gradients(), accumulate=strategy.accumulate, **more
    )


def _goes_together(strategy: Strategy) -> bool:
    try:
        checked(strategy)
    except ConfigError:
        return False
    return True


def _larger_batches(fabric: Fabric, workload: Workload, strategy: Strategy) -> list[Advice]:
    """More samples for each rank, where its device holds them."""
    found = []
    for times in (2, 4) if fabric.ranks > 1 else ():
        larger = scaled(workload, batch=times * workload.batch)
        prediction = predict_on_fabric(fabric, larger, strategy)
        if prediction.fits_memory is not False:
            found.append(
                Advice(
                    strategy=strategy, prediction=prediction, exact=False, convergence=_larger(times), options=options_of(strategy),
                    batch=larger.batch,
                )
            )  # fmt: skip
    return found


def _larger(times: int) -> str:
    return (
        f"a global batch {times} times as large: fewer updates per epoch; scale the learning rate, and beyond some batch "
        "accuracy falls"
    )


def convergence_of(strategy: Strategy) -> str:
    """What a strategy does to convergence, said plainly."""
    said = []
    if strategy.mode == "async":
        bound = f"at most {strategy.staleness} steps" if strategy.staleness is not None else "without bound"
        # What docs/parameter_server.md saw, with and without what makes up for the delay.
        made_up_for = strategy.stale_rate and strategy.momentum_correction
        effect = "a sample teaches about as much, check yours" if made_up_for else "worse per step, check yours"
        said.append(f"gradients are applied to parameters that others have changed meanwhile ({bound}): {effect}")
    if strategy.mode == "local":
        said.append(
            f"ranks drift apart for {strategy.inner_steps or INNER_STEPS} steps and are averaged: more samples for the same loss, "
            "more so with more ranks; tune H"
        )
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
    plain = _options(Strategy())
    return tuple(word for option, words in _options(strategy).items() if words != plain[option] for word in words)


def _options(strategy: Strategy) -> dict[str, tuple[str, ...]]:
    """Every option with its words, those for what is the default anyway, too."""
    bucket, outer = strategy.bucket_bytes, strategy.outer
    valued = {
        "mode": strategy.mode,
        "backend": strategy.backend,
        "gradients": strategy.gradients,
        "all-reduce": strategy.all_reduce,
        "bucket": None if bucket is None else units.format_size(bucket).replace(" ", ""),
        "accumulate": strategy.accumulate,
        "inner-steps": strategy.inner_steps,
        "outer": f"{outer.lr}:{outer.momentum}",
        "fragments": outer.fragments,
        "overlap-steps": outer.overlap_steps,
        "servers": strategy.servers,
        "staleness": strategy.staleness,
        "replicas": strategy.replicas,
        "delay-compensation": strategy.delay_compensation,
    }
    flags = {
        "balance": strategy.balance,
        "stale-rate": strategy.stale_rate,
        "momentum-correction": strategy.momentum_correction,
        "host-reduction": strategy.host_reduction,
    }
    found = {option: () if value is None else (f"--{option}", str(value)) for option, value in valued.items()}
    return found | {option: (f"--{option}" if on else f"--no-{option}",) for option, on in flags.items()}
