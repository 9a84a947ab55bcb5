"""Throughput, MFU, time and cost of a training, with answers computed by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.training_cost import (
    Estimate,
    HostPrices,
    Price,
    TrainingGoal,
    efficiency_range,
    estimate_training,
    parse_amount,
    parse_price,
    peak_flop_per_second,
    throughput_range,
)
from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.bandwidth_model.workload_catalog import catalog_workload
from distrib.strategy import Strategy


def work(**changes: object) -> Workload:
    gradient = Gradient(name="w", elements=1000, size_bytes=4000, ready_seconds=0.1)
    plain = Workload(
        name="net", origin="measured", device="A100", batch=4, forward_seconds=0.1, backward_seconds=0.2, optimizer_seconds=0.1,
        gradients=(gradient,), parameter_bytes=4000, sample_tokens=1000, sample_flop=10**12, software={"precision": "amp"},
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def predicted(hosts: int, ranks: int, samples_per_second: float, efficiency: float, error: float = 0.0) -> Prediction:
    return Prediction(
        hosts=hosts, ranks_per_host=ranks // hosts, ranks=ranks, strategy=Strategy(), step_seconds=0.5, compute_seconds=0.4,
        communication_seconds=0.2, exposed_seconds=0.1, samples_per_second=samples_per_second, efficiency=efficiency, cap=None,
        expected_error=error,
    )  # fmt: skip


ONE_HOST = predicted(1, 8, 72, 0.9)
FOUR_HOSTS = predicted(4, 32, 256, 0.8)


def test_answers_of_four_hosts():
    # 32 ranks, 256 samples/s of 1,000 tokens and 10^12 operations.
    found = estimate_training(
        FOUR_HOSTS, ONE_HOST, work(), goal=TrainingGoal(tokens=921.6e6),
        prices=HostPrices(gpu_hour=2.0), network_price=Price(amount=4.0, is_hourly=True), peak=312e12,
    )  # fmt: skip
    assert (found.global_batch_samples, found.global_batch_tokens) == (128, 128_000)
    assert found.tokens_per_second.value == 256_000
    assert found.efficiency_of_one_rank.value == 0.8
    assert found.efficiency_of_one_host.value == pytest.approx(8 / 9)  # 8 samples/s of a rank, 9 on one host
    assert found.model_flop_utilization.value == pytest.approx(8 / 312)
    assert found.training_seconds.value == pytest.approx(3600)  # 921,600 samples
    assert found.gpu_hours.value == pytest.approx(32)
    assert found.total_cost.value == pytest.approx(32 * 2 + 4 * 4)
    assert found.cost_per_million_samples.value == pytest.approx(80 / 0.9216)
    assert found.cost_per_million_tokens.value == pytest.approx(80 / 921.6)


def test_answers_that_were_not_asked_for_or_are_unknown_are_none():
    found = estimate_training(FOUR_HOSTS, ONE_HOST, work(sample_tokens=0, sample_flop=0), peak=312e12)
    assert found.tokens_per_second is found.model_flop_utilization is found.training_seconds is None
    assert found.gpu_hours is found.total_cost is found.cost_per_million_samples is None
    cpus = estimate_training(FOUR_HOSTS, ONE_HOST, work(device="cpu"), goal=TrainingGoal(samples=256))
    assert cpus.training_seconds.value == pytest.approx(1) and cpus.gpu_hours is None


def test_a_range_follows_from_the_expected_error():
    # Normal errors of 10 % on average have a standard deviation of 12.53 %, and 1.2816 of these are 16.06 %.
    found = throughput_range(100.0, 0.1, Estimate(value=0.8, p10=0.8, p90=0.8))
    assert (found.p10, found.p90) == (pytest.approx(100 / 1.1742, rel=1e-4), pytest.approx(117.42, rel=1e-4))
    assert found.dividing(1000.0).p90 == pytest.approx(1000 / found.p10)


def test_the_range_of_an_efficiency_grows_with_the_time_lost():
    # Collectives off by 15 % are 8.4 % of a step of which 56 % are lost; with 3.5 % beside, 9.1 %, and exp(1.6062 x 0.091) = 1.157.
    found = efficiency_range(0.44, 0.15)
    assert (found.p10, found.p90) == (pytest.approx(0.44 / 1.1574, rel=1e-4), pytest.approx(0.44 * 1.1574, rel=1e-4))
    nothing_lost = efficiency_range(0.99, 0.15)
    assert (nothing_lost.p10, nothing_lost.p90) == (pytest.approx(0.99 / 1.0579, rel=1e-3), 1.0)
    assert efficiency_range(1.2, 0.15).p90 == 1.2  # as with fewer waits in mode async


def test_the_error_of_one_ranks_step_does_not_widen_efficiencies():
    prediction = predicted(4, 32, 256, 0.8, error=0.1)
    narrow, wide = (estimate_training(prediction, ONE_HOST, work(expected_error=error)) for error in (0.0, 0.5))
    assert narrow.efficiency_of_one_rank == wide.efficiency_of_one_rank
    assert wide.samples_per_second.p90 > narrow.samples_per_second.p90
    alone = estimate_training(predicted(1, 1, 10, 1.0, error=0.1), predicted(1, 1, 10, 1.0), work())
    assert alone.efficiency_of_one_rank.p10 == alone.efficiency_of_one_host.p10 == 1.0


@given(st.floats(1e-3, 2), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_error_gives_a_wider_range(efficiency, error, more):
    narrow, wide = efficiency_range(efficiency, error), efficiency_range(efficiency, error + more)
    assert wide.p10 <= narrow.p10 <= efficiency <= narrow.p90 <= wide.p90 <= max(1.0, efficiency)
    narrow, wide = throughput_range(7.0, error, narrow), throughput_range(7.0, error + more, wide)
    assert wide.p10 <= narrow.p10 <= 7.0 <= narrow.p90 <= wide.p90


@given(st.floats(0.01, 1e3), st.floats(0, 1e6), st.floats(1, 1e6), st.integers(1, 1000))
def test_a_cost_grows_with_prices_and_falls_with_speed(gpu_hour, network, rate, hosts):
    def cost(price: float, samples_per_second: float) -> float:
        prediction = predicted(hosts, 8 * hosts, samples_per_second, 0.8)
        prices, own = HostPrices(gpu_hour=price), Price(amount=network)
        found = estimate_training(prediction, ONE_HOST, work(), prices=prices, network_price=own)
        return found.cost_per_million_samples.value

    assert cost(gpu_hour, rate) <= cost(2 * gpu_hour, rate)
    assert cost(gpu_hour, 2 * rate) == pytest.approx(cost(gpu_hour, rate) / 2)


def test_purchase_prices_are_spread_over_four_years():
    assert Price(amount=35_040).per_hour == 1.0
    assert parse_price("0.5/h").per_hour == parse_price("0.5 / hour").per_hour == 0.5
    assert HostPrices(host=Price(amount=35_040)).job_per_hour(4, 32) == 4.0
    assert HostPrices().job_per_hour(4, 32, Price(amount=1.0)) is None
    for text in ("", "x", "-1", "1e3", "nan", "$5", "5/d"):
        with pytest.raises(ValueError, match="is not a price"):
            parse_price(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("300B", 3e11), ("1.5T", 1.5e12), ("15 T", 1.5e13), ("90e6", 9e7), ("1,000", 1000), ("7G", 7e9)],
)
def test_amounts(text, amount):
    assert parse_amount(text) == pytest.approx(amount)


@given(st.text(max_size=12))
def test_what_is_no_amount_is_refused(text):
    try:
        assert 0 < parse_amount(text) <= 1e18
    except ValueError as error:
        assert "write such as 300B" in str(error)


def test_the_peak_is_that_of_the_precision():
    assert peak_flop_per_second(catalog_workload("BERT-large", "A100")) == 312e12
    assert peak_flop_per_second(catalog_workload("ResNet-50", "A100", precision="tf32")) == 156e12
    assert peak_flop_per_second(catalog_workload("ResNet-50", "V100")) == 125e12  # fp16: it has no bf16
    assert peak_flop_per_second(work(device="cpu")) is peak_flop_per_second(work(software={})) is None
