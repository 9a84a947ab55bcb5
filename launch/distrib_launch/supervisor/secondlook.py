"""A second look at the hosts and the network between them, beside a job whose ranks all wait for each other."""

from __future__ import annotations

import threading
import time

from distrib_launch import engines
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import preflight
from distrib_launch.preflight.host_sessions import Connections

CLOSE_SECONDS = 1.0
PATIENCE_SECONDS = 20.0
"""A host that hangs does not answer; the others' calls fail within `reach.CALL_SECONDS`."""


class SecondLook:
    """Asks the plan's hosts what they are and whom they reach, in a thread of its own."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._connections = Connections()
        self._found: list[str] | None = None
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._thread = threading.Thread(target=self._look, name="second look", daemon=True)
        self._thread.start()

    @staticmethod
    def is_possible(plan: LaunchPlan) -> bool:
        """Whether there is a network between the plan's hosts that was tried before the start."""
        return len(plan.hosts) > 1 and bool(plan.network) and engines.way_to_ask(plan) is not None

    def found(self) -> list[str] | None:
        """What is wrong, in lines, none where all reach each other; None while it is not known."""
        if self._found is None and time.monotonic() > self._deadline:
            self._found = [f"the hosts were asked again, and did not all answer within {PATIENCE_SECONDS:.0f} s"]
            self._connections.close()
        return self._found

    def close(self) -> None:
        """Nobody wants to know any more."""
        self._connections.close()
        self._thread.join(CLOSE_SECONDS)  # which this machine itself may hold up, as a lost GPU or file system does

    def _look(self) -> None:
        try:
            found = preflight.look_again(self._plan, self._connections)
        except Exception as problem:  # closed, too: what may go wrong beside a job is no matter of its own
            found = [f"the hosts could not be asked again: {problem}"]
        if self._found is None:
            self._found = found
