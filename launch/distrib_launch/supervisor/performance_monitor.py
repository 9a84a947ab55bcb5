"""Performance of a running job: compare measured steps with the prediction, and warn at most once of each kind."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from distrib import units
from distrib.cluster.links import link_between
from distrib.cluster.topology import read_topology
from distrib.errors import ConfigError
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.results import LinkUsage, MeasuredPerformance
from distrib_launch.supervisor import rank_report
from distrib_launch.supervisor.loading_check import LoadingCheck
from distrib_launch.supervisor.rank_report import RankReport
from distrib_launch.supervisor.slowdown import Slowdown, find_cause


class MonitorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits beyond which the performance of a running job is reported."""

    min_slowdown_fraction: float = 0.15
    """Relative excess over the predicted step time that causes a warning; steps vary by half of it."""
    slow_link_fraction: float = 0.7
    """Fraction of its expected rate below which a link is reported."""
    similar_link_factor: float = 2.0
    """Ratio to the slowest link up to which links are reported with it."""
    min_bytes_per_step: float = 1 << 20
    """Traffic of a step from which the rate that ranks saw is the link's. With less, it is that of processes on busy CPUs."""
    default_bytes_per_second: float = 1.25e8
    """Assumed rate of a link with an unknown rate and too little traffic to measure it: 1 Gb/s, the slowest common network."""
    max_reports_ahead: int = 2
    """Reports of one rank after which the monitor stops waiting for those of other ranks: in mode async reports may be lost."""


MONITOR = MonitorSettings()

KINDS = {"loader": "data", "waiting": "network"}
"""Kinds of warnings that are reported once, by cause, where they differ."""


class PerformanceMonitor:
    """Monitor of the performance: collects the reports of the workers."""

    def __init__(self, plan: LaunchPlan, warn: Callable[[str], None], host_of: Callable[[str], str | None]) -> None:
        self._plan = plan
        self._on_warning = warn
        self._host_of = host_of
        self._workers = sum(rank.role == "worker" for rank in plan.ranks)
        self._pending: dict[int, RankReport] = {}
        self._reports: Counter[int] = Counter()
        self._rounds: list[
            MeasuredPerformance
        ] = []  # without their links: in a job of days these would need too much memory
        self._last: MeasuredPerformance | None = None
        self._expected: Callable[[str, str], tuple[float | None, str]] | None = None
        self._warned: set[str] = set()
        self._loading = LoadingCheck()

    def add_report(self, rank: int, report: Any) -> None:
        """Add the measured steps of a rank.

        Args:
            rank: Global rank.
            report: JSON object of its status line.

        Raises:
            ValueError: The object is not valid.
        """
        self._pending[rank] = rank_report.parse(report)
        self._reports[rank] += 1
        if len(self._pending) == self._workers or self._reports[rank] > MONITOR.max_reports_ahead:
            self._reports.clear()
            round_ = self._summary(self._pending)
            loading = {number: each.loading for number, each in self._pending.items() if each.loading}
            if late := self._loading.update(loading, {n: self._pending[n].exposed_seconds for n in loading}):
                self._warn("data", late)
            reports, self._pending = self._pending, {}
            self._last = round_
            self._rounds.append(msgspec.structs.replace(round_, links=()))
            self._check(round_, reports)

    @property
    def measured(self) -> MeasuredPerformance | None:
        """Return medians over the whole run, None without reports."""
        if self._last is None:
            return None

        rates = [each.samples_per_second for each in self._rounds if each.samples_per_second]
        loading = [each.loader_seconds for each in self._rounds if each.loader_seconds is not None]

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
            samples_per_second=statistics.median(rates) if rates else None,
            loader_seconds=statistics.median(loading) if loading else None,
            prediction_error=step / self._predicted_seconds - 1 if self._predicted_seconds else None,
        )

    @property
    def _predicted_seconds(self) -> float | None:
        return self._plan.forecast.predicted.step_seconds if self._plan.forecast else None

    def _summary(self, reports: Mapping[int, RankReport]) -> MeasuredPerformance:
        """Summarize one report of each rank: the slowest computes, the rest of the step is waiting."""
        step = max(each.step_seconds for each in reports.values())
        slowest = max(reports, key=lambda rank: reports[rank].compute_seconds)
        compute = min(step, reports[slowest].compute_seconds) if len(reports) > 1 or self._workers > 1 else step
        forecast = self._plan.forecast
        alone = (
            forecast.predicted.compute_seconds
            if forecast
            else statistics.median(r.compute_seconds for r in reports.values())
        )
        sent = self._between_hosts({rank: each.sent_bytes_per_second for rank, each in reports.items()})
        sizes = self._between_hosts({rank: each.sent_bytes_per_step for rank, each in reports.items()})
        samples = [each.samples for each in reports.values()]
        return MeasuredPerformance(
            samples_per_second=sum(samples) / step if step > 0 and all(samples) else None,
            steps=max(each.steps for each in reports.values()),
            step_seconds=step,
            compute_seconds=compute,
            exposed_seconds=step - compute,
            loader_seconds=max(
                (each.loading.loader_seconds for each in reports.values() if each.loading), default=None
            ),
            efficiency=min(1.0, alone / step) if step > 0 else 1.0,
            slowest_rank=slowest,
            links=tuple(
                LinkUsage(source=a, target=b, bytes_per_second=rate, expected_bytes_per_second=self._expect(a, b)[0])
                for (a, b), rate in sorted(sent.items())
            ),
            network_seconds=self._network_seconds(sizes, sent),
        )

    def _between_hosts(self, reported: Mapping[int, Mapping[str, float]]) -> dict[tuple[str, str], float]:
        """Add up the values that ranks report by address, for each pair of hosts."""
        found: dict[tuple[str, str], float] = {}
        for rank, by_address in reported.items():
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
            seen = rates.get((source, target)) if size >= MONITOR.min_bytes_per_step else None
            rate = seen or self._expect(source, target)[0] or MONITOR.default_bytes_per_second
            seconds[source] = seconds.get(source, 0.0) + size / rate
        return max(seconds.values(), default=None)

    # -- warnings ----------------------------------------------------------------------------------------------------

    def _check(self, seen: MeasuredPerformance, reports: Mapping[int, RankReport]) -> None:
        if len(self._plan.hosts) < 2:
            return
        forecast = self._plan.forecast
        # CPUs that are busy on all hosts delay all ranks alike, which the efficiency does not show.
        queued = max(report.queued_seconds for report in reports.values())
        lost = max((1 - seen.efficiency) * seen.step_seconds, queued)
        found = find_cause(
            reports,
            lost_seconds=lost,
            exposed_seconds=seen.exposed_seconds,
            network_seconds=seen.network_seconds,
            predicted_compute_seconds=forecast.predicted.compute_seconds if forecast else None,
        )
        tolerated = max(MONITOR.min_slowdown_fraction, forecast.expected_error) if forecast else math.inf
        is_slower = forecast and seen.step_seconds > (1 + tolerated) * forecast.predicted.step_seconds
        is_inefficient = lost > (1 - self._plan.warn_below) * seen.step_seconds
        if found and is_inefficient and (found.rank < 0 or not is_slower):
            self._warn(KINDS.get(found.cause, found.cause), self._describe(found, seen))
        if forecast and is_slower:
            times = f"{units.duration_text(seen.step_seconds)}, predicted {units.duration_text(forecast.predicted.step_seconds)}"
            self._warn("slower", f"a step takes {times}\n  {self._cause(found, seen)}")

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._on_warning(what)

    def _slowest_link(self, seen: MeasuredPerformance) -> str:
        """Return the link with the lowest measured rate, else the predicted bottleneck."""
        if seen.links:
            worst = min(seen.links, key=lambda link: link.bytes_per_second)
            named = self._expect(worst.source, worst.target)[1]
            return f"\n  slowest link: {worst.source}-{worst.target}{', ' + named if named else ''}, {units.bit_rate_text(worst.bytes_per_second)}"
        cap = self._plan.forecast.predicted.cap if self._plan.forecast else None
        return f"\n  slowest link: {cap.link}" if cap else ""

    def _describe(self, found: Slowdown, seen: MeasuredPerformance) -> str:
        """Return the warning of a low efficiency, with a hint on its second line."""
        if found.rank >= 0:
            return f"{found.cause}: " + "\n  ".join(self._in_rank(found, seen))
        forecast = self._plan.forecast
        predicted = f" (predicted {forecast.predicted.efficiency:.0%})" if forecast else ""
        step, waits = units.duration_text(seen.step_seconds), units.duration_text(seen.exposed_seconds)
        what = f"{seen.efficiency:.0%} scaling efficiency{predicted}, step {step}, {waits} of it waiting for gradients"
        if found.cause == "network":
            return f"network-bound: {what}{self._slowest_link(seen)}"
        return (
            f"ranks wait for each other: {what}\n  the network needs {units.duration_text(seen.network_seconds or 0.0)} of it: "
            "look for latency if gradients are small, and for ranks that are late in turn"
        )

    def _in_rank(self, found: Slowdown, seen: MeasuredPerformance) -> tuple[str, str]:
        """Return what takes time in one rank, and a hint."""
        rank = self._plan.ranks[found.rank]
        where, seconds = f"rank {rank.rank} on {rank.host}", units.duration_text(found.seconds)
        of_step = f"of a step of {units.duration_text(seen.step_seconds)}"
        if found.cause == "loader":
            return f"{where} waits {seconds} {of_step} for data", "check its storage, and num_workers of its DataLoader"
        if found.cause == "busy CPUs":
            hint = f"look for other processes on {rank.host}, or give its ranks more cores"
            return f"{where} waits {seconds} {of_step} for a CPU", hint
        than = "predicted" if self._plan.forecast else "the others"
        what = f"{where} computes {seconds}, {than} {units.duration_text(found.usual_seconds)}"
        return what, "check the clocks of its GPU, its CPUs and the size of its batches"

    def _cause(self, found: Slowdown | None, seen: MeasuredPerformance) -> str:
        """Return what takes time in one rank, else the slow links."""
        assert self._plan.forecast
        predicted = self._plan.forecast.predicted
        if found and found.rank >= 0:
            return "; ".join(self._in_rank(found, seen))
        below = _slow_links(seen.links)
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
            beside = f", expected {units.bit_rate_text(usual)}" if usual else " while the others carry more"
            return f"{where} {carries} {units.bit_rate_text(worst.bytes_per_second)}{beside}; check cable, port and NIC, and who else uses it"
        cap = predicted.cap
        guess = f"; link {cap.link} has most to carry" if cap else ""
        return f"{units.duration_text(seen.exposed_seconds)} are waiting for gradients, predicted {units.duration_text(predicted.exposed_seconds)}{guess}"

    def _expect(self, source: str, target: str) -> tuple[float | None, str]:
        """Return the rate of a link by the topology, None if unknown, and its name."""
        if self._expected is None:
            self._expected = _lookup(self._plan.topology)
        return self._expected(source, target)


def _slow_links(links: tuple[LinkUsage, ...]) -> list[LinkUsage]:
    """Return the links that are clearly slower than expected, the slowest first. Without expected rates, the median is the reference.

    Links much faster than the slowest are omitted: on a busy host, small messages are slow on every link. Links that reach the lowest
    expected rate are omitted too: in a ring, all other links wait for that link.
    """
    slowest = min(
        (link.expected_bytes_per_second for link in links if link.expected_bytes_per_second), default=math.inf
    )
    usual = statistics.median(link.bytes_per_second for link in links) if links else 0.0

    def fraction(link: LinkUsage) -> float:
        return link.bytes_per_second / min(link.expected_bytes_per_second or usual, slowest)

    least = min(map(fraction, links), default=0.0)
    return sorted(
        (
            link
            for link in links
            if fraction(link) < MONITOR.slow_link_fraction and fraction(link) <= MONITOR.similar_link_factor * least
        ),
        key=fraction,
    )


def _lookup(path: str | None) -> Callable[[str, str], tuple[float | None, str]]:
    if path is None:
        return lambda *_: (None, "")
    try:
        topology = read_topology(path)
    except ConfigError:  # the topology file has changed since the job began
        return lambda *_: (None, "")

    @functools.cache
    def expect(source: str, target: str) -> tuple[float | None, str]:
        link = link_between(topology, source, target)
        return (link.bandwidth_bytes_per_second, link.text) if link else (None, "")

    return expect
