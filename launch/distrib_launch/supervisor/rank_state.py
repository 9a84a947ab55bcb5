"""State of one start of a job and of each rank, as known to the supervisor."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from distrib_launch.console import Console
from distrib_launch.launch_plan import LaunchPlan, RankPlan
from distrib_launch.rank_agent.control_channel import Assignment, Channel
from distrib_launch.results import RankResult
from distrib_launch.supervisor.rank_exit import RankExit


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the supervisor, in seconds."""

    connect_seconds: float = 120.0
    """Time in which the next rank must connect; Python starts slowly from a network file system without a cache."""
    cause_seconds: float = 0.3
    """Wait after the first failure for an earlier one that is still on the network."""
    late_cause_seconds: float = 2.5
    """The same while all failed ranks only lost their connections: a lost host is detected later."""
    ping_seconds: float = 0.4
    """Interval of the pings that measure the clocks of the hosts."""
    dead_connection_seconds: float = 30.0
    """Time after which the kernel closes a connection whose bytes stay unacknowledged; a vanished host is noticed earlier."""
    exit_record_seconds: float = 3.0
    """Time beyond the grace time in which a rank that is being stopped must send its exit record."""
    engine_start_seconds: float = 15.0
    """Time in which mpirun may complete a cancelled start: a daemon that has not connected when mpirun is killed waits forever."""
    engine_end_seconds: float = 1.0
    """Time in which the engine must end after its ranks, and then after SIGTERM; mpirun was seen to hang forever."""
    orphan_seconds: float = 30.0
    """Time in which the daemons of an engine that has ended may still end their ranks."""


SETTINGS = SupervisorSettings()


class RankState:
    """State of one rank."""

    def __init__(self, plan: RankPlan, logs: Path) -> None:
        self.plan = plan
        self.channel: Channel | None = None
        self.hello: dict[str, Any] = {}
        self.address = ""
        """Source address of its agent's connection."""
        self.exit: RankExit | None = None
        self.assignment: Assignment | None = None
        self.restarts = 0
        self.own_restarts = 0
        """Restarts after failures on a reachable host, which are limited."""
        self.restart_at = 0.0
        """Monotonic time of a restart that is due, 0 for none."""
        self.first_exit: RankExit | None = None
        """Exit before its first restart."""
        self.device = plan.device
        self.placed: dict[str, Any] = {}
        self.step = -1
        """Last reported step, -1 for none."""
        self.closing = False
        """True if it reported the end of its script."""
        self.independent = False
        """True if its script used torch and ended without joining a process group."""
        self.prepared = False
        """True if its script gave a model that learns to `job.prepare`."""
        self.clock_offset = 0.0
        """Seconds by which the clock of its host is ahead."""
        self._best_round_trip = float("inf")
        self._logs = {1: logs / f"{plan.rank}.out", 2: logs / f"{plan.rank}.err"}
        self._files: dict[int, IO[bytes]] = {}

    @property
    def is_worker(self) -> bool:
        """Return True for a worker, False for a parameter server."""
        return self.plan.role == "worker"

    @property
    def error_log(self) -> Path:
        """Return the path of its stderr log."""
        return self._logs[2]

    def write(self, descriptor: int, data: bytes) -> str:
        """Append to a log.

        Args:
            descriptor: 1 for stdout, 2 for stderr.
            data: Output of the script.

        Returns:
            Reason why the log is incomplete; empty if it is complete.
        """
        try:
            if descriptor not in self._files:
                self._files[descriptor] = self._logs[descriptor].open("ab", buffering=0)
            left = memoryview(data)
            while left:
                left = left[self._files[descriptor].write(left) :]
        except OSError as error:
            return f"{self._logs[descriptor]}: {error.strerror}"
        return ""

    def close_files(self) -> None:
        """Close the logs; create those that are empty."""
        for descriptor, path in self._logs.items():
            if descriptor in self._files:
                self._files.pop(descriptor).close()
            elif not path.exists():
                with contextlib.suppress(OSError):  # a full disk
                    path.touch()

    def measure_clock(self, sent: float, remote: float, now: float) -> None:
        """Estimate the clock offset of the host from the exchange with the shortest round trip, as NTP does.

        Args:
            sent: Unix time of the ping.
            remote: Unix time of the host when it replied.
            now: Unix time of the reply's arrival.
        """
        if now - sent < self._best_round_trip:
            self._best_round_trip = now - sent
            self.clock_offset = remote - (sent + now) / 2

    def result(self) -> RankResult:
        """Return the rank's entry in `result.json`."""
        return RankResult(
            rank=self.plan.rank,
            host=self.plan.host,
            local_rank=self.plan.local_rank,
            role=self.plan.role,
            device=self.device,
            exit_code=self.exit.exit_code if self.exit else None,
            signal=self.exit.signal if self.exit else None,
            cpus=self.placed.get("cpus"),
            threads=self.placed.get("threads"),
            stopped_by=self.exit.stopped_by if self.exit else "",
        )


class JobState:
    """State of one start of a job, shared by the parts of the supervisor."""

    def __init__(self, plan: LaunchPlan, console: Console, grace_seconds: float) -> None:
        self.plan, self.console, self.grace_seconds = plan, console, grace_seconds
        self.run_dir = Path(plan.run_dir)
        self.hosts = {host.name: host for host in plan.hosts}
        self.ranks = [RankState(rank, self.run_dir / "ranks") for rank in plan.ranks]
        self.workers = [state for state in self.ranks if state.is_worker]
        """Ranks that run the script."""
        self.servers = [state for state in self.ranks if not state.is_worker]
        self.is_local = all(host.name == "localhost" for host in plan.hosts)
        self.missing = len(self.ranks)
        """Number of ranks that have not connected."""
        self.assigned = False
        """True if all ranks have connected and have their assignments."""
        self.stopping = False
        self.failed_at = 0.0
        """Monotonic time of the first failure that ends the job, 0 for none."""
        self.started = time.time()
        self.warnings: list[str] = []
        self.rank_warnings: list[str] = []
        """Warnings of the library in the ranks, a part of `warnings`."""
        self._log_is_incomplete = False

    @property
    def all_ended(self) -> bool:
        """Return True if every rank has ended."""
        return all(state.exit for state in self.ranks)

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for `result.json`.

        Args:
            text: The warning.
        """
        self.warnings.append(text)
        self.console.say(f"warning: {text}")

    def warn_log(self, problem: str) -> None:
        """Warn once that logs are not complete; the job continues.

        Args:
            problem: Path of a log and the error.
        """
        if not self._log_is_incomplete:
            self._log_is_incomplete = True
            self.warn(f"logs are not complete, the job continues: {problem}")

    def host_of(self, address: str) -> str | None:
        """Return the host with an address, None if it is unknown.

        Args:
            address: IP address of a peer of a rank.
        """
        address = address.removeprefix("::ffff:")
        known = (host.name for host in self.plan.hosts if host.address == address)
        return next(known, None) or next((state.plan.host for state in self.ranks if state.address == address), None)
