"""Recommended strategies, and the options that choose them."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distrib.bandwidth_model.recommendations import best_equivalent, convergence_effect, is_equivalent, recommend
from distrib.bandwidth_model.scaling import predict_step
from distrib.errors import ConfigError
from distrib.strategy import Gradients, OuterOptimizer, Strategy, strategy_options, validate_strategy
from tests.support.predicted_jobs import job, lab, measured_lab


def test_advice_is_ranked_and_states_its_effect_on_convergence():
    found = recommend(lab(), job(), hosts=4, ranks_per_host=2)
    rates = [advice.prediction.samples_per_second for advice in found]
    assert all(a > 0.999 * b for a, b in itertools.pairwise(rates)), rates
    assert {advice.strategy.mode for advice in found} == {"sync", "async", "local"}
    best = best_equivalent(found)
    assert best.exact
    plain = next(advice for advice in found if advice.strategy == Strategy() and not advice.batch)
    assert best.prediction.efficiency >= plain.prediction.efficiency
    assert plain.options == ()
    for advice in found:
        assert advice.exact == advice.convergence.startswith("same as synchronous SGD")


def test_mode_async_without_momentum_correction_is_stated():
    """Momentum correction matters most (docs/explanation/staleness.md)."""
    assert "not corrected" not in convergence_effect(Strategy(mode="async"))
    assert "not corrected" in convergence_effect(Strategy(mode="async", momentum_correction=False))


@pytest.mark.parametrize(("device", "flat"), [("cpu", True), ("RTX A6000", False)])
def test_every_strategy_is_advised_once(device, flat):
    """On CPU hosts `auto` is hierarchical, so only `flat` is a different setting. On GPUs NCCL chooses."""
    found = recommend(lab(), job(device=device), hosts=4, ranks_per_host=2)
    assert (("--all-reduce", "flat") in [advice.options for advice in found]) is flat
    assert not any("hierarchical" in advice.options for advice in found)
    assert len({(advice.options, advice.batch) for advice in found}) == len(found)


@pytest.mark.parametrize(
    "chosen",
    [
        Strategy(gradients=Gradients("bf16")),
        Strategy(gradients=Gradients("fp16"), accumulate=4),
        Strategy(gradients=Gradients("powersgd", rank=8), accumulate=16),
        Strategy(all_reduce="flat", bucket_bytes=1 << 20),
        Strategy(backend="horovod"),
        Strategy(mode="local"),
        Strategy(mode="local", inner_steps=20, outer=OuterOptimizer(overlap_steps=15)),
        Strategy(mode="async", staleness=4),
        Strategy(mode="async", servers=2, replicas=1),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "RTX A6000"])
def test_the_chosen_strategy_is_kept_in_the_advice(chosen, device):
    topology, work = (measured_lab(), job(device="cpu")) if device == "cpu" else (lab(), job())
    found = recommend(topology, work, chosen, hosts=4, ranks_per_host=2)
    (own,) = [each for each in found if each.strategy == chosen and not each.batch]
    assert own.prediction == predict_step(topology, work, chosen, hosts=4, ranks_per_host=2)
    assert best_equivalent(found, chosen).prediction.efficiency >= own.prediction.efficiency
    if chosen.mode == "sync":
        others = [each.strategy for each in found if each.strategy.mode == "sync"]
        assert all(each.accumulate >= chosen.accumulate and each.backend == chosen.backend for each in others)
        assert chosen.gradients.exact or not any(each.gradients.exact for each in others)
        assert chosen.bucket_bytes is None or {each.bucket_bytes for each in others} == {chosen.bucket_bytes}
        elsewhere = [each.strategy for each in found if each.strategy.mode != "sync"]
        half = chosen.gradients.format in ("fp16", "bf16")
        assert {each.accumulate for each in elsewhere} <= {chosen.accumulate}
        assert {each.gradients for each in elsewhere} <= {chosen.gradients if half else Gradients()}
    else:
        assert any(each.strategy == Strategy() for each in found)
    assert len({(each.options, each.batch) for each in found}) == len(found)


def test_settings_that_help_alone_are_combined():
    """Smaller buckets help evenly ready gradients, and bf16 helps slow links. Both together are the best."""
    work = job(240, 60, backward=0.5, forward=0.2, device="cpu")
    found = {each.strategy: each.prediction for each in recommend(measured_lab(), work, hosts=4) if not each.batch}
    best = best_equivalent(recommend(measured_lab(), work, hosts=4)).strategy
    both = msgspec.structs.replace(best, gradients=Gradients("bf16"))
    assert is_equivalent(best, Strategy()) and found[both].efficiency >= found[best].efficiency
    more = msgspec.structs.replace(both, accumulate=4)
    assert found[more].efficiency > found[both].efficiency


def test_larger_batches_are_advised_if_they_fit_in_memory():
    def batches(memory_bytes: int) -> dict:
        work = msgspec.structs.replace(job(), memory_bytes=memory_bytes, parameter_bytes=10**8)
        return {each.batch: each for each in recommend(lab(), work, hosts=4, ranks_per_host=2) if each.batch}

    found = batches(10**10)
    assert sorted(found) == [64, 128] and sorted(batches(2 * 10**10)) == [64]
    assert found[128].prediction.efficiency > found[64].prediction.efficiency
    assert "global batch x 4" in found[128].convergence and not found[128].exact


def test_the_options_of_an_advice_choose_its_strategy():
    from distrib_launch.arguments import training_options
    from distrib_launch.cli import launch

    for advice in recommend(lab(), job(), hosts=4, ranks_per_host=2):
        chosen = training_options.strategy_of(launch.parser().parse_args([*advice.options, "train.py"]))
        assert chosen == advice.strategy
    assert strategy_options(Strategy(bucket_bytes=5 << 20)) == ("--bucket", "5MiB")


counts = st.none() | st.integers(1, 1000)
outers = st.builds(
    OuterOptimizer,
    lr=st.floats(1e-6, 99),
    momentum=st.floats(0, 0.999),
    fragments=st.integers(1, 9),
    overlap_steps=st.integers(0, 9),
)
formats = st.sampled_from(["fp32", "fp16", "bf16", "int8"]).map(Gradients)
formats |= st.integers(1, 9999).map(lambda rank: Gradients("powersgd", rank=rank))
formats |= st.floats(1e-9, 1).map(lambda fraction: Gradients("topk", fraction=fraction))


@given(
    st.builds(
        Strategy, gradients=formats, all_reduce=st.sampled_from(["auto", "flat", "hierarchical"]), balance=st.booleans(),
        bucket_bytes=st.none() | st.integers(1, 1 << 40), accumulate=st.integers(1, 100),
        backend=st.sampled_from(["torch", "horovod"]),
    )
    | st.builds(Strategy, mode=st.just("local"), gradients=formats, inner_steps=st.none() | st.integers(10, 1000), outer=outers)
    | st.builds(
        Strategy, mode=st.just("async"), gradients=formats, servers=counts, staleness=st.none() | st.integers(0, 100),
        replicas=st.integers(0, 1), stale_rate=st.booleans(), momentum_correction=st.booleans(), host_reduction=st.booleans(),
        delay_compensation=st.none() | st.floats(1e-6, 1e5),
    )
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])  # most draws are invalid
def test_every_strategy_has_options_that_choose_it(strategy):
    from distrib_launch.arguments import training_options
    from distrib_launch.cli import launch

    try:
        validate_strategy(strategy)
    except ConfigError:
        assume(False)
    words = [*strategy_options(strategy), "train.py"]
    assert training_options.strategy_of(launch.parser().parse_args(words)) == strategy
