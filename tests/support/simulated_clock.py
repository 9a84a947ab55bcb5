"""A clock for tests of time limits, which no test waits for."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest


class SimulatedClock:
    """A clock that replaces `time` in modules; it moves when they sleep, and in `seconds_until`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        self.now = 1000.0
        for module in modules:
            clock = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self.sleep)
            monkeypatch.setattr(module, "time", clock)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def seconds_until(self, condition: Callable[[], object], step_seconds: float = 0.1) -> float:
        """Return the seconds until `condition()` is true, called at every step."""
        begun = self.now
        while not condition():
            self.now += step_seconds
            assert self.now - begun < 4000
        return self.now - begun
