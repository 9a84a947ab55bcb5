"""What the supervisor knows of one rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any

from distrib_launch.launch_plan import RankPlan
from distrib_launch.rank_agent.control_channel import Assignment, Channel
from distrib_launch.results import RankResult
from distrib_launch.supervisor.rank_exit import RankExit


class RankState:
    """What the supervisor knows of one rank."""

    def __init__(self, plan: RankPlan, logs: Path) -> None:
        self.plan = plan
        self.channel: Channel | None = None
        self.hello: dict[str, Any] = {}
        self.address = ""
        self.ending: RankExit | None = None
        self.assignment: Assignment | None = None
        """What it was told to run."""
        self.restarts = 0
        self.deaths = 0
        """How many of these were not because its host had been cut off."""
        self.again_at = 0.0
        """When it is started again, monotonic, if it has died and waits for that."""
        self.first_ending: RankExit | None = None
        """How it died before it was started again for the first time."""
        self.device = plan.device
        self.placed: dict[str, Any] = {}
        self.step = -1
        self.closing = False
        """Whether its script has come to its end."""
        self.independent = False
        """True if its script used torch and ended without joining a process group."""
        self.prepared = False
        """Whether it has given a model that learns to `job.prepare`."""
        self.clock_offset = 0.0
        self.best_round_trip = float("inf")
        self._logs = {1: logs / f"{plan.rank}.out", 2: logs / f"{plan.rank}.err"}
        self._files: dict[int, IO[bytes]] = {}

    @property
    def error_log(self) -> Path:
        return self._logs[2]

    def write(self, descriptor: int, data: bytes) -> str:
        """Add to a log; returns why not all of it could be written, if it could not."""
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
        for descriptor, path in self._logs.items():
            if descriptor in self._files:
                self._files.pop(descriptor).close()
            elif not path.exists():
                with contextlib.suppress(OSError):  # a full disk
                    path.touch()

    def learn_clock(self, sent: float, theirs: float, now: float) -> None:
        """Estimate how far the host's clock is ahead, from the exchange with the shortest round trip (as NTP does)."""
        if now - sent < self.best_round_trip:
            self.best_round_trip = now - sent
            self.clock_offset = theirs - (sent + now) / 2

    def result(self) -> RankResult:
        """What `result.json` says of it."""
        return RankResult(
            rank=self.plan.rank,
            host=self.plan.host,
            local_rank=self.plan.local_rank,
            role=self.plan.role,
            device=self.device,
            exit_code=self.ending.exit_code if self.ending else None,
            signal=self.ending.signal if self.ending else None,
            cpus=self.placed.get("cpus"),
            threads=self.placed.get("threads"),
            stopped_by=self.ending.stopped_by if self.ending else "",
        )
