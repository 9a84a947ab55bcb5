"""Second pass: measure suspicious links again, and find the hosts on both sides of a shared link."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distrib.cluster import shared_links
from distrib.cluster.shared_links import Pair, Round
from distrib.probe.bench.polling import ProbeTimeout
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, RatesAlone
from distrib.probe.diagnosis.oversubscription import cpus_saturated
from distrib.probe.diagnosis.remeasure import concurrent_pairs_slowed, links_to_remeasure
from distrib.probe.measurement_runner import MeasurementRunner
from distrib.probe.records import NO_REPLY, SharedLinkSides
from distrib.probe.settings import LIMITS, Transport
from distrib.probe.stages import Stage, alone_rounds

MAX_SIDES_ATTEMPTS = 3
"""Attempts to find the sides of a shared link. Other processes on a host can disturb an attempt."""


def suspicious_stage(inputs: DiagnosisInputs, runner: MeasurementRunner, transport: Transport) -> Stage | None:
    """Plan the links to measure again, alone.

    Args:
        inputs: The measurements so far.
        runner: Contains the settings of the mode.
        transport: The transport by which links are judged.

    Returns:
        The stage, or None if no link is suspicious.
    """
    again = links_to_remeasure(inputs, runner.settings.max_remeasured)
    if not again:
        return None
    seconds = max(runner.settings.concurrent_seconds, alone_rounds(len(inputs.hosts), runner.settings)[1])
    numbers = {host: number for number, host in enumerate(inputs.hosts)}
    phases = tuple(((numbers[a], numbers[b]),) for a, b in again)
    return Stage(key="again", title="suspicious links alone", transport=transport, phases=phases, seconds=seconds)


def find_shared_link(
    inputs: DiagnosisInputs, runner: MeasurementRunner, transport: Transport, emit: Callable[[SharedLinkSides], None]
) -> Sequence[str]:
    """Find the hosts on both sides of a link that concurrent pairs share.

    Args:
        inputs: The measurements so far.
        runner: Measures pairs.
        transport: The transport by which links are judged.
        emit: Called with the two sides, if found.

    Returns:
        Notes for the user: why slowed pairs could not be assigned to two sides.
    """
    slowed = concurrent_pairs_slowed(inputs)
    if not slowed:
        return ()
    if cpus_saturated(inputs):
        return ("pairs slow each other down, and CPUs were busy: whether they share links is unknown",)
    search = _SidesSearch(runner, transport, inputs.alone)
    numbers = {host: number for number, host in enumerate(inputs.hosts)}
    worst: Round = tuple((numbers[a], numbers[b]) for a, b in slowed[0])
    seen = False
    try:
        for _ in range(MAX_SIDES_ATTEMPTS):
            load = shared_links.slowed_pairs(search.measure("repeat", worst))
            seen |= bool(load)
            paired = {host for pair in load for host in pair}
            others = tuple(n for n in runner.hosts.ranks if n not in paired and not runner.is_unresponsive(n))
            if link := shared_links.find_sides(tuple(load), search.measure, others):
                names = inputs.hosts
                emit(SharedLinkSides(sides=(tuple(names[n] for n in link.left), tuple(names[n] for n in link.right))))
                return ()
    except ProbeTimeout as problem:
        return (f"the hosts that share a link were not found: {problem}",)
    busy = "; the CPUs were busy throughout" if search.busiest > LIMITS.saturated_cpu_fraction else ""
    return (f"pairs slow each other down, but not like hosts on two sides of one link{busy}",) if seen else ()


class _SidesSearch:
    """Measurement of rounds of pairs for the search, as fractions of their rates alone."""

    def __init__(self, runner: MeasurementRunner, transport: Transport, alone: RatesAlone) -> None:
        self._runner, self._transport, self._alone = runner, transport, alone
        self.busiest = 0.0

    def measure(self, purpose: str, phase: Round) -> dict[Pair, float]:
        """Measure a round. Raises ProbeTimeout if a pair fails.

        Args:
            purpose: "repeat", "sides" or "crossing".
            phase: The pairs.

        Returns:
            Fraction of the rate alone, by pair.
        """
        # An uplink is measured for longer, so that the start and end of streams have little effect.
        seconds = 0.6 if purpose == "crossing" else self._runner.settings.concurrent_seconds
        stage = Stage(
            key=f"sharing/{purpose}", title="hosts that share a link", transport=self._transport, load="sharing",
            seconds=seconds, phases=(phase,),
        )  # fmt: skip
        numbers = {host: number for number, host in enumerate(self._runner.hosts.names)}
        parts = {}
        for record in self._runner.measure_pairs(stage, phase):
            if record.failed is None:
                alone = self._alone.expected(record.source, record.target)
                pair = numbers[record.source], numbers[record.target]
                parts[pair] = record.bandwidth_bytes_per_second / alone if alone else 1.0
                self.busiest = max(self.busiest, record.busy)
        if len(parts) < len(phase):
            raise ProbeTimeout(f"a host {NO_REPLY}")
        return parts
