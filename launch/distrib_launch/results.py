"""Result of a run as `result.json` contains it, and the forecast as `plan.json` does."""

from __future__ import annotations

from typing import Literal

import msgspec

from distrib.bandwidth_model.prediction import Prediction

Status = Literal["succeeded", "failed", "stopped"]


class ForecastRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted performance of a job with its strategy."""

    workload: str
    source: str
    """Origin of the workload: a file, or the catalogue."""
    predicted: Prediction
    expected_error: float
    """Relative error to expect of the step time, of links and workload together."""
    warning: str = ""


class LinkUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Rate of a link while it was in use, and the rate that the topology predicts."""

    source: str
    target: str
    bytes_per_second: float
    expected_bytes_per_second: float | None


class MeasuredPerformance(msgspec.Struct, frozen=True, kw_only=True):
    """Measured steps of a job. Times are medians of the slowest rank."""

    steps: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """Time of a step beyond computing."""
    efficiency: float
    """Step time of one rank alone, as profiled or else computing only, divided by the step time."""
    slowest_rank: int
    samples_per_second: float | None = None
    """Rate of all ranks; None if the batches are not known."""
    links: tuple[LinkUsage, ...] = ()
    prediction_error: float | None = None
    """Relative excess of the step time over the predicted one."""
    loader_seconds: float | None = None
    """Wait for data in a step, part of `compute_seconds`, on the rank that waits longest; None: no prepared loader."""
    network_seconds: float | None = None
    """Time that the links of the busiest host need for a step at their rates; None: traffic was not counted."""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """End of one rank."""

    rank: int
    host: str
    local_rank: int
    role: str
    device: str
    exit_code: int | None
    """None if no exit record came."""
    signal: int | None
    """Signal that ended it, None for none."""
    cpus: str | None = None
    """CPUs that it was bound to (`0-3`; empty: not bound), None if unknown."""
    threads: int | None = None
    """Its OMP_NUM_THREADS, None if unknown."""
    stopped_by: str = ""
    """`launcher`, `engine` or `lost`; empty if it ended of its own accord."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """First failure of a job."""

    rank: int | None = None
    """None for a failure of no rank."""
    host: str
    time: float
    """Unix time on the launcher's clock."""
    exit_code: int | None = None
    signal: int | None = None
    code: str = "rank-failed"
    """Kind of the failure, one of `distrib.errors.ERROR_CODES`."""
    message: str
    traceback: str = ""
    """Traceback of the script, empty for none."""
    log: str = ""
    """Path of the rank's stderr."""

    @property
    def names_its_place(self) -> bool:
        """Return True if the message names the ranks or the host."""
        return self.code in ("hang", "host-lost")

    @property
    def headline(self) -> str:
        """First line of the message."""
        return self.message.partition("\n")[0]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a job that failed and was followed by another."""

    world_size: int
    hosts: tuple[str, ...]
    seconds: float
    first_failure: Failure | None
    folder: str
    """Folder of its files in the run directory."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run: of its last start, but for `seconds`, `restarts` and `warnings`, which are of all starts."""

    status: Status
    exit_code: int
    world_size: int
    hosts: tuple[str, ...]
    seconds: float
    restarts: int
    """Restarts of the job (`--max-restarts`) and of single ranks (mode async)."""
    ranks: tuple[RankResult, ...]
    first_failure: Failure | None
    warnings: tuple[str, ...]
    attempts: tuple[Attempt, ...] = ()
    """Starts before the last one."""
    predicted: Prediction | None = None
    """Prediction of the bandwidth model, None if the workload was unknown."""
    measured: MeasuredPerformance | None = None
    """Measured steps, None if the script reported none."""
