"""Answers of a plan in the user's terms: throughput, MFU, efficiency, training time, GPU-hours and cost, with their ranges."""

from __future__ import annotations

import math
import re
import statistics

import msgspec

from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.hardware_catalog import DataType, find_gpu

AMORTIZATION_YEARS = 4
"""Years over which a purchase price is spread, in use all the time. An assumption, which the output states."""
AMORTIZATION_HOURS = AMORTIZATION_YEARS * 8760

ERROR_TO_P90 = statistics.NormalDist().inv_cdf(0.9) * math.sqrt(math.pi / 2)
"""The logarithm of the 90th percentile for an expected error of 1: normal errors with a mean absolute value of m have a standard
deviation of m sqrt(pi / 2), and their 90th percentile is 1.28 standard deviations above the median.
"""

UNMODELLED_ERROR = 0.035
"""Expected error of an efficiency by what the model does not know, such as software. With 15 % for links by data sheets, 81 % of the
published scaling results of the tuning half lie between the 10th and the 90th percentile, and 85 % of the held-out half.
"""

_MAGNITUDES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted quantity with its 10th and 90th percentile."""

    value: float
    p10: float
    p90: float

    def times(self, factor: float) -> Estimate:
        """Multiply by a positive number.

        Args:
            factor: The number.
        """
        return Estimate(value=self.value * factor, p10=self.p10 * factor, p90=self.p90 * factor)

    def dividing(self, amount: float) -> Estimate:
        """Divide an amount by the quantity: the low end of one is the high end of the other.

        Args:
            amount: Positive, such as the samples of a training for samples per second.
        """
        return Estimate(value=amount / self.value, p10=amount / self.p90, p90=amount / self.p10)


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A price of one host or network port, for an hour or of its purchase."""

    amount: float
    is_hourly: bool = False

    @property
    def per_hour(self) -> float:
        """The price of an hour; a purchase is spread over `AMORTIZATION_HOURS`."""
        return self.amount if self.is_hourly else self.amount / AMORTIZATION_HOURS


class HostPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a job: of a GPU for an hour, and of a host beside its GPUs or with them."""

    gpu_hour: float | None = None
    host: Price | None = None

    def job_per_hour(self, hosts: int, ranks: int, network: Price | None = None) -> float | None:
        """Compute the price of a job for an hour, with a GPU for each rank.

        Args:
            hosts: Hosts of the job.
            ranks: Ranks of the job.
            network: The price of the network of one host, if it is not a part of the host's.

        Returns:
            The price; None if neither GPUs nor hosts have one.
        """
        if self.gpu_hour is None and self.host is None:
            return None
        each = sum(price.per_hour for price in (self.host, network) if price)
        return ranks * (self.gpu_hour or 0.0) + hosts * each


class TrainingGoal(msgspec.Struct, frozen=True, kw_only=True):
    """The length of a training, in tokens or samples; None where the user gave none."""

    tokens: float | None = None
    samples: float | None = None

    def in_samples(self, workload: Workload) -> float | None:
        """Return the samples of the training.

        Args:
            workload: The workload, with the tokens of a sample if the goal is in tokens.
        """
        return self.tokens / workload.sample_tokens if self.tokens is not None else self.samples


class TrainingEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The answers for one number of hosts; None where they are unknown or were not asked for. Costs are in the unit of the prices."""

    hosts: int
    ranks: int
    global_batch_samples: int
    global_batch_tokens: int | None
    step_seconds: Estimate
    samples_per_second: Estimate
    tokens_per_second: Estimate | None
    efficiency_of_one_rank: Estimate
    """Samples per second and rank, as a fraction of those of one rank alone."""
    efficiency_of_one_host: Estimate
    """Samples per second and rank, as a fraction of those of a job on one host."""
    model_flop_utilization: Estimate | None
    """MFU: operations of the model per second, as a fraction of the GPUs' dense peak in the precision of the workload."""
    training_seconds: Estimate | None
    gpu_hours: Estimate | None
    cost_per_million_samples: Estimate | None
    cost_per_million_tokens: Estimate | None
    total_cost: Estimate | None


def efficiency_range(efficiency: float, communication_error: float) -> Estimate:
    """Compute the range of an efficiency, for log-normal errors around it.

    Args:
        efficiency: The prediction.
        communication_error: The mean absolute relative error of a collective, which counts for the lost part of a step.
    """
    lost = max(0.0, 1 - efficiency)
    factor = math.exp(ERROR_TO_P90 * math.hypot(UNMODELLED_ERROR, lost * communication_error))
    return Estimate(value=efficiency, p10=efficiency / factor, p90=max(efficiency, min(1.0, efficiency * factor)))


def throughput_range(rate: float, compute_error: float, efficiency: Estimate) -> Estimate:
    """Compute the range of a throughput from those of one rank's speed and of the efficiency, which are independent.

    Args:
        rate: The prediction.
        compute_error: The mean absolute relative error of one rank's step.
        efficiency: The efficiency relative to one rank.
    """
    alone = ERROR_TO_P90 * compute_error
    low = math.hypot(alone, math.log(efficiency.value / efficiency.p10))
    high = math.hypot(alone, math.log(efficiency.p90 / efficiency.value))
    return Estimate(value=rate, p10=rate * math.exp(-low), p90=rate * math.exp(high))


def peak_flop_per_second(workload: Workload) -> float | None:
    """Return the dense peak of the workload's GPU, in the precision of its matrix products.

    Args:
        workload: The workload.

    Returns:
        Operations per second; None on CPUs and for GPUs or precisions that the catalogue does not have.
    """
    spec = find_gpu(workload.device)
    precision = workload.software.get("precision", "")
    kinds: dict[str, tuple[DataType, ...]] = {"amp": ("bf16", "fp16"), "tf32": ("tf32", "fp32"), "fp32": ("fp32",)}
    found = [spec.tflops[kind] for kind in kinds.get(precision, ()) if kind in spec.tflops] if spec else []
    return found[0].value * 1e12 if found else None


def estimate_training(
    prediction: Prediction,
    one_host: Prediction,
    workload: Workload,
    *,
    goal: TrainingGoal = TrainingGoal(),  # noqa: B008  # frozen
    prices: HostPrices = HostPrices(),  # noqa: B008  # frozen
    network_price: Price | None = None,
    peak: float | None = None,
) -> TrainingEstimate:
    """Turn a prediction into throughput, MFU, training time and cost.

    Ranges follow from the expected errors of the efficiency and of one rank's step, which are independent.

    Args:
        prediction: The predicted step.
        one_host: The predicted step of the same job on one host.
        workload: One rank's step.
        goal: The length of the training.
        prices: Prices of GPUs and hosts.
        network_price: The price of the network of one host.
        peak: Dense peak of one GPU in operations per second; None if unknown.
    """
    links, ranks = prediction.expected_error, prediction.ranks
    exact = Estimate(value=1.0, p10=1.0, p90=1.0)
    efficiency = efficiency_range(prediction.efficiency, links) if ranks > 1 else exact
    rate = throughput_range(prediction.samples_per_second, workload.expected_error, efficiency)
    per_rank = prediction.samples_per_second / ranks
    against_host = per_rank / (one_host.samples_per_second / one_host.ranks)
    tokens, samples = workload.sample_tokens, goal.in_samples(workload)
    batch = round(prediction.strategy.accumulate * workload.batch) * ranks
    seconds = rate.dividing(samples) if samples is not None else None
    per_hour = prices.job_per_hour(prediction.hosts, ranks, network_price)
    per_million = rate.dividing(1e6 * per_hour / 3600) if per_hour else None
    known_peak = peak if workload.sample_flop else None
    return TrainingEstimate(
        hosts=prediction.hosts,
        ranks=ranks,
        global_batch_samples=batch,
        global_batch_tokens=batch * tokens if tokens else None,
        step_seconds=rate.dividing(rate.value * prediction.step_seconds),
        samples_per_second=rate,
        tokens_per_second=rate.times(tokens) if tokens else None,
        efficiency_of_one_rank=efficiency,
        efficiency_of_one_host=efficiency_range(against_host, links) if prediction.hosts > 1 else exact,
        model_flop_utilization=rate.times(workload.sample_flop / (ranks * known_peak)) if known_peak else None,
        training_seconds=seconds,
        gpu_hours=seconds.times(ranks / 3600) if seconds and workload.device != "cpu" else None,
        cost_per_million_samples=per_million,
        cost_per_million_tokens=per_million.times(1 / tokens) if per_million and tokens else None,
        total_cost=seconds.times(per_hour / 3600) if seconds and per_hour else None,
    )


def parse_price(text: str) -> Price:
    """Parse a price: `1000` of a purchase, `0.4/h` of an hour.

    Args:
        text: The price.

    Raises:
        ValueError: The text is not a price.
    """
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)( */ *h(?:our)?)?", text.strip())
    if not match:
        raise ValueError(f"{text or repr(text)} is not a price; write 900 for a purchase or 0.4/h for an hour")
    return Price(amount=float(match[1]), is_hourly=bool(match[2]))


def parse_amount(text: str) -> float:
    """Parse a number of tokens or samples: `300B`, `1.5T`, `90e6`, `1,000,000`.

    Args:
        text: The number, with k, M, B (or G) or T.

    Raises:
        ValueError: The text is not a positive number.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([kmbgt]?)", text.strip().replace(",", "").lower())
    amount = float(match[1]) * _MAGNITUDES[match[2].replace("g", "b")] if match else 0.0
    if not 0 < amount <= 1e18:
        raise ValueError(f"{text!r} is not a number above 0; write such as 300B, 1.5T or 1000000")
    return amount
