"""Check of data loading: find a rank that waits for data, and the number of loader processes that would hide the wait."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from distrib import units


class LoadingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits beyond which a wait for data is reported."""

    min_steps: int = 15
    """Measured steps before a decision: a window of 20 may contain first steps of epochs, which do not count."""
    bursts: int = 4
    """Batches of each loader process before a decision; batches come in bursts."""
    min_wait_fraction: float = 0.1
    min_wait_seconds: float = 0.005
    """Loader processes cost up to a millisecond per batch for its transfer, so shorter waits are not worth it."""
    spare_fraction: float = 0.1
    """Excess of the recommended number over the computed one, for batches that take longer."""
    min_hidden_fraction: float = 0.75
    """Part of the wait that more loader processes must hide to be recommended."""
    max_queued_fraction: float = 0.25
    """Part of their time that loader processes may wait for a CPU. Above it, more of them would wait longer."""
    max_workers: int = 64
    """Most processes to recommend: each has a copy of the data set's Python objects."""


SETTINGS = LoadingSettings()


class LoadingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Means per step of one rank, measured by `distrib.training.telemetry.loader_waits`."""

    steps: int
    step_seconds: float
    loader_seconds: float
    """Wait for data."""
    batch_seconds: float
    """Time in which one process loads the data of a step."""
    loading_processor_seconds: float
    """CPU time of loading."""
    processor_seconds: float
    """CPU time of everything else in the rank's process."""
    queued_seconds: float
    """Time in which its loader processes, all together, waited for a CPU."""
    cores: float
    """Cores of the rank."""
    workers: int
    """Processes of its DataLoader."""
    is_stream: bool = False
    """True for an IterableDataset."""
    is_regular: bool = True
    """False if few steps wait long, as for a storage that stalls."""

    @property
    def is_valid(self) -> bool:
        """Return True if all numbers are finite and positive or zero."""
        numbers = [value for value in msgspec.structs.astuple(self) if not isinstance(value, bool)]
        return all(math.isfinite(value) and value >= 0 for value in numbers) and bool(self.steps and self.step_seconds)

    def joined(self, later: LoadingReport) -> LoadingReport:
        """Return the means over this report and a later one; the later one alone if its DataLoader is another.

        Args:
            later: Report of the same rank.
        """
        if later.workers != self.workers:
            return later
        steps = self.steps + later.steps
        means = {
            name: (self.steps * getattr(self, name) + later.steps * getattr(later, name)) / steps
            for name in (
                "step_seconds", "loader_seconds", "batch_seconds", "loading_processor_seconds", "processor_seconds",
                "queued_seconds",
            )
        }  # fmt: skip
        return msgspec.structs.replace(later, steps=steps, is_regular=self.is_regular and later.is_regular, **means)


class LoadingCheck:
    """Check of a job's data loading, over all reports of its ranks since the last decision."""

    def __init__(self) -> None:
        self._sums: dict[int, LoadingReport] = {}

    def update(self, reports: Mapping[int, LoadingReport], exposed_seconds: Mapping[int, float]) -> str:
        """Add the reports of the ranks.

        Args:
            reports: Reports by rank.
            exposed_seconds: Each rank's wait for gradients in a step.

        Returns:
            A warning with a hint on its second line; empty if no rank waits much, or not enough is known.
        """
        for rank, report in reports.items():
            self._sums[rank] = self._sums[rank].joined(report) if rank in self._sums else report
        if not self._sums:
            return ""
        worst = max(self._sums, key=lambda rank: self._sums[rank].loader_seconds / self._sums[rank].step_seconds)
        seen = self._sums[worst]
        if seen.steps < max(SETTINGS.min_steps, SETTINGS.bursts * seen.workers):
            return ""
        self._sums.clear()  # a wait may begin later
        # Other ranks may wait for data, too, and this rank then for their gradients.
        for_others = exposed_seconds.get(worst, 0.0) - min(exposed_seconds.values(), default=0.0)
        hint = recommend_workers(seen, for_others_seconds=for_others)
        share = seen.loader_seconds / seen.step_seconds
        return hint and (
            f"rank {worst} waits {share:.0%} of each step for data ({units.duration_text(seen.loader_seconds)} of "
            f"{units.duration_text(seen.step_seconds)})\n  {hint}"
        )


def recommend_workers(seen: LoadingReport, *, for_others_seconds: float = 0.0) -> str:
    """Return the number of loader processes that would hide a rank's wait for data, as a sentence; empty if none is certain to.

    Args:
        seen: Report of the rank.
        for_others_seconds: Time of a step in which the rank waits for slower ranks.
    """
    is_long = seen.loader_seconds > max(SETTINGS.min_wait_seconds, SETTINGS.min_wait_fraction * seen.step_seconds)
    # Each process of an IterableDataset reads all data, unless the script divides them.
    if not is_long or not seen.is_regular or (seen.is_stream and not seen.workers):
        return ""
    busy = seen.step_seconds - seen.loader_seconds
    without = max(busy - max(0.0, for_others_seconds), 0.1 * busy, 1e-6)
    by_cores = (seen.processor_seconds + seen.loading_processor_seconds) / max(seen.cores, 0.01)
    is_queued = seen.queued_seconds > SETTINGS.max_queued_fraction * seen.batch_seconds
    if is_queued or seen.step_seconds - max(without, by_cores) < SETTINGS.min_hidden_fraction * seen.loader_seconds:
        return (
            f"its {units.count_text(max(1, round(seen.cores)), 'core')} cannot hide it: loading takes "
            f"{units.duration_text(seen.loading_processor_seconds)} of CPU time per step, and the CPUs are busy\n"
            "  give the rank more cores, or store the data so that it loads faster"
        )
    needed = math.ceil((1 + SETTINGS.spare_fraction) * seen.batch_seconds / without)
    workers = max(seen.workers + 1, min(needed, SETTINGS.max_workers))
    would = "hide" if workers >= needed else "shorten"
    return f"DataLoader(num_workers={workers}) would {would} it (now {seen.workers})"
