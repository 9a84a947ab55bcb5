"""While a job runs: what its ranks measured, set against what was predicted, and at most one warning of each kind."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from distrib import units
from distrib_launch.forecast_record import LinkUsage, MeasuredPerformance
from distrib_launch.launch_plan import LaunchPlan

SLOWER = 0.15
"""By how much a step may take longer than predicted before something is said to be wrong."""

UNKNOWN = 1.25e8
"""Bytes per second of a link of which nobody knows better, as too little went over it to measure: 1 Gb/s, the slowest that is usual."""

TOLD = 0.02
"""What of a step is lost otherwise is told of from here on."""

LESS = 0.7
"""A link that carries less than this part of what is expected of it is named."""

ALIKE = 2.0
"""With the worst link, those are named that do at most so many times as well."""

PATIENCE = 2
"""How often a rank tells something before it is looked at without those that told nothing: in mode async some may be lost."""


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of some of its steps; see docs/contracts.md."""

    steps: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    sent_bytes_per_second: dict[str, float] = {}
    sent_bytes_per_step: dict[str, float] = {}


class PerformanceMonitor:
    """Hears what ranks measure. `say` gets each warning; `host_of` knows hosts by their addresses."""

    def __init__(self, plan: LaunchPlan, say: Callable[[str], None], host_of: Callable[[str], str | None]) -> None:
        self._plan = plan
        self._say = say
        self._host_of = host_of
        self._workers = sum(rank.role == "worker" for rank in plan.ranks)
        self._pending: dict[int, _Told] = {}
        self._times: Counter[int] = Counter()
        self._rounds: list[
            MeasuredPerformance
        ] = []  # without their links, of which there are too many to keep for days
        self._last: MeasuredPerformance | None = None
        self._expected: Callable[[str, str], tuple[float | None, str]] | None = None
        self._warned: set[str] = set()

    def hear(self, rank: int, told: Any) -> None:
        """What one rank measured. Raises ValueError for what is no such thing."""
        try:
            self._pending[rank] = _checked(msgspec.convert(told, _Told))
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        self._times[rank] += 1
        if len(self._pending) == self._workers or self._times[rank] > PATIENCE:
            self._times.clear()
            round_ = self._summary(self._pending)
            self._pending = {}
            self._last = round_
            self._rounds.append(msgspec.structs.replace(round_, links=()))
            self._judge(round_)

    @property
    def measured(self) -> MeasuredPerformance | None:
        """What was measured over the whole run; None where the ranks told nothing."""
        if self._last is None:
            return None

        def median(field: str) -> float:
            return float(statistics.median(getattr(each, field) for each in self._rounds))

        step, compute = median("step_seconds"), median("compute_seconds")
        return msgspec.structs.replace(
            self._last,
            steps=sum(each.steps for each in self._rounds),
            step_seconds=step,
            compute_seconds=compute,
            exposed_seconds=max(0.0, step - compute),
            efficiency=median("efficiency"),
            prediction_error=step / self._predicted_seconds - 1 if self._predicted_seconds else None,
        )

    @property
    def _predicted_seconds(self) -> float | None:
        return self._plan.forecast.predicted.step_seconds if self._plan.forecast else None

    def _summary(self, told: Mapping[int, _Told]) -> MeasuredPerformance:
        """One look at all ranks: the slowest computes, and what is left of the step is the wire's."""
        step = max(each.step_seconds for each in told.values())
        slowest = max(told, key=lambda rank: told[rank].compute_seconds)
        compute = min(step, told[slowest].compute_seconds)
        forecast = self._plan.forecast
        alone = (
            forecast.predicted.compute_seconds
            if forecast
            else statistics.median(t.compute_seconds for t in told.values())
        )
        sent = self._between_hosts({rank: each.sent_bytes_per_second for rank, each in told.items()})
        sizes = self._between_hosts({rank: each.sent_bytes_per_step for rank, each in told.items()})
        return MeasuredPerformance(
            steps=max(each.steps for each in told.values()),
            step_seconds=step,
            compute_seconds=compute,
            exposed_seconds=step - compute,
            efficiency=min(1.0, alone / step) if step > 0 else 1.0,
            slowest_rank=slowest,
            links=tuple(
                LinkUsage(source=a, target=b, bytes_per_second=rate, expected_bytes_per_second=self._expect(a, b)[0])
                for (a, b), rate in sorted(sent.items())
            ),
            network_seconds=self._network_seconds(sizes, sent),
        )

    def _between_hosts(self, told: Mapping[int, Mapping[str, float]]) -> dict[tuple[str, str], float]:
        """What ranks tell of other hosts' addresses, added up for each pair of hosts."""
        found: dict[tuple[str, str], float] = {}
        for rank, by_address in told.items():
            source = self._plan.ranks[rank].host
            for address, value in by_address.items():
                target = self._host_of(address)
                if target is not None and target != source:
                    found[source, target] = found.get((source, target), 0.0) + value
        return found

    def _network_seconds(
        self, sizes: Mapping[tuple[str, str], float], rates: Mapping[tuple[str, str], float]
    ) -> float | None:
        seconds: dict[str, float] = {}
        for (source, target), size in sizes.items():
            rate = rates.get((source, target)) or self._expect(source, target)[0] or UNKNOWN
            seconds[source] = seconds.get(source, 0.0) + size / rate
        return max(seconds.values(), default=None)

    # -- judging ----------------------------------------------------------------------------------------------------

    def _judge(self, seen: MeasuredPerformance) -> None:
        if len(self._plan.hosts) < 2:
            return
        forecast = self._plan.forecast
        waits = seen.exposed_seconds / seen.step_seconds if seen.step_seconds else 0.0
        # Of what is lost, the rest of which is data, or slower ranks.
        most = seen.exposed_seconds >= (1 - seen.efficiency) * seen.step_seconds / 2
        if seen.efficiency < self._plan.warn_below and waits > (1 - self._plan.warn_below) / 2 and most:
            predicted = f" ({forecast.predicted.efficiency:.0%} was predicted)" if forecast else ""
            rest = (1 - seen.efficiency) * seen.step_seconds - seen.exposed_seconds
            computing = f"rank {seen.slowest_rank} computing for longer than {'was predicted' if forecast else 'most'}"
            more = f" and {units.duration_text(rest)} {computing}" if rest > TOLD * seen.step_seconds else ""
            by_wire = seen.network_seconds is None or seen.network_seconds > seen.exposed_seconds / 2
            who = "the wire holds" if by_wire else "waiting for each other holds"
            what = (
                self._narrowest(seen)
                if by_wire
                else f"; the wires need {units.duration_text(seen.network_seconds or 0.0)} for them: look for ranks that are late, for processors that "
                "too many ranks share, and, where gradients are small, at the wires' latency"
            )
            self._warn(
                "wire",
                f"{who} this job at {seen.efficiency:.0%} of its speed{predicted}: of {units.duration_text(seen.step_seconds)} a step, "
                f"{units.duration_text(seen.exposed_seconds)} are waiting for gradients{more}{what}",
            )
        if forecast is None:
            return
        tolerated = max(SLOWER, forecast.expected_error)
        if seen.step_seconds > (1 + tolerated) * forecast.predicted.step_seconds:
            self._warn(
                "slower",
                f"a step takes {units.duration_text(seen.step_seconds)}, {units.duration_text(forecast.predicted.step_seconds)} was predicted: "
                + self._suspect(seen),
            )

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(what)

    def _narrowest(self, seen: MeasuredPerformance) -> str:
        """The link that carries least, by what was seen, else by what was predicted."""
        if seen.links:
            worst = min(seen.links, key=lambda link: link.bytes_per_second)
            named = self._expect(worst.source, worst.target)[1]
            return f"; link {worst.source}-{worst.target}{', ' + named if named else ''} carries {units.rate_text(worst.bytes_per_second)}"
        cap = self._plan.forecast.predicted.cap if self._plan.forecast else None
        return f"; link {cap.link}" if cap else ""

    def _suspect(self, seen: MeasuredPerformance) -> str:
        """What is wrong: the link that carries less than it should, or the rank that computes for longer."""
        assert self._plan.forecast
        predicted = self._plan.forecast.predicted
        below = suspects(seen.links)
        if below:
            worst = below[0]
            common = set.intersection(*({link.source, link.target} for link in below))
            where, carries = f"link {worst.source}-{worst.target}", "carries"
            if len(below) > 1 and len(common) == 1:
                named = ", ".join(f"{link.source}-{link.target}" for link in below)
                where, carries = f"the links of {common.pop()} ({named})", "carry"
            elif len(below) > 1 and not common:
                where, carries = f"{len(below)} links, {worst.source}-{worst.target} the worst of them,", "carry"
            usual = worst.expected_bytes_per_second
            beside = f", {units.rate_text(usual)} was expected" if usual else " while the others carry more"
            return f"{where} {carries} {units.rate_text(worst.bytes_per_second)}{beside}; look at cable, port and card, and who else uses it"
        rank = self._plan.ranks[seen.slowest_rank]
        more = seen.step_seconds - predicted.step_seconds
        expected = predicted.step_seconds - predicted.exposed_seconds
        if seen.compute_seconds - expected > more / 2:
            return (
                f"rank {rank.rank} on {rank.host} computes and loads data for {units.duration_text(seen.compute_seconds)}, "
                f"{units.duration_text(expected)} was predicted; is its processor shared, or hot, or its storage slow?"
            )
        cap = predicted.cap
        guess = f"; link {cap.link} has most to carry" if cap else ""
        return f"{units.duration_text(seen.exposed_seconds)} are waiting for gradients, {units.duration_text(predicted.exposed_seconds)} was predicted{guess}"

    def _expect(self, source: str, target: str) -> tuple[float | None, str]:
        """What a link should carry by the topology, and what it is."""
        if self._expected is None:
            self._expected = _lookup(self._plan.topology)
        return self._expected(source, target)


def suspects(links: tuple[LinkUsage, ...]) -> list[LinkUsage]:
    """Links that carry clearly less than what is expected of them, or where nothing is, than the others; the worst first.

    Those that do much better than the worst are left out: on a busy host, small pieces are slow on every link. So are those that carry
    as much as the slowest is expected to, for which a ring makes all others wait.
    """
    slowest = min(
        (link.expected_bytes_per_second for link in links if link.expected_bytes_per_second), default=math.inf
    )
    usual = statistics.median(link.bytes_per_second for link in links) if links else 0.0

    def part(link: LinkUsage) -> float:
        return link.bytes_per_second / min(link.expected_bytes_per_second or usual, slowest)

    least = min(map(part, links), default=0.0)
    return sorted((link for link in links if part(link) < LESS and part(link) <= ALIKE * least), key=part)


def _checked(told: _Told) -> _Told:
    """`told` itself. Raises ValueError for times and rates that cannot be."""
    times = (
        told.step_seconds,
        told.compute_seconds,
        told.exposed_seconds,
        *told.sent_bytes_per_second.values(),
        *told.sent_bytes_per_step.values(),
    )
    if not all(math.isfinite(value) and value >= 0 for value in times) or not told.step_seconds or told.steps < 1:
        raise ValueError(f"a step of {told.step_seconds} s cannot be")
    return told


def _lookup(path: str | None) -> Callable[[str, str], tuple[float | None, str]]:
    if path is None:
        return lambda *_: (None, "")
    from distrib.cluster.links import link_between
    from distrib.cluster.topology import read_topology
    from distrib.errors import ConfigError

    try:
        topology = read_topology(path)
    except ConfigError:  # it has changed since the job began
        return lambda *_: (None, "")

    @functools.cache
    def expect(source: str, target: str) -> tuple[float | None, str]:
        way = link_between(topology, source, target)
        return (way.bandwidth_bytes_per_second, way.text) if way else (None, "")

    return expect
