"""How a job recovers from ranks that die: others take their place, or it goes on without. What it bears is `tolerance`'s to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from distrib_launch import rank_environment
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.rank_agent.control_channel import Kind
from distrib_launch.supervisor import tolerance_rules
from distrib_launch.supervisor.rank_exit import RankExit
from distrib_launch.supervisor.rank_state import RankState

Send = Callable[[RankState, Kind, dict[str, Any]], None]


class Recovery:
    """Starts `ranks` again by what `send` tells them; `warn` says what became of each that died."""

    def __init__(self, plan: LaunchPlan, ranks: Sequence[RankState], send: Send, warn: Callable[[str], None]) -> None:
        self._plan, self._ranks, self._send, self._warn = plan, ranks, send, warn

    @property
    def endings(self) -> list[RankExit]:
        """How the ranks ended, of those that have."""
        return [state.ending for state in self._ranks if state.ending]

    @property
    def first_endings(self) -> list[RankExit]:
        """The same, but of workers that were started again how they died first: what came then was not their failure."""
        found = [state.first_ending or state.ending for state in self._ranks]
        return [ending for ending in found if ending]

    @property
    def main(self) -> int | None:
        """The worker that prints and saves."""
        return tolerance_rules.main(self._plan, self.endings, self._again)

    @property
    def is_over(self) -> bool:
        """Whether nobody needs those any more that are still there."""
        return tolerance_rules.is_over(self._plan, self.endings, self._again)

    @property
    def succeeded(self) -> bool:
        """Whether the job reached its end in spite of failed ranks."""
        return tolerance_rules.succeeded(self._plan, self.endings)

    def may_return(self, state: RankState) -> bool:
        """Whether a rank that was cut off, and calls again, is started anew."""
        ending = state.ending
        return ending is not None and tolerance_rules.may_return(
            self._plan, ending, self.endings, self._again, state.deaths
        )

    def left(self, state: RankState) -> None:
        """A rank ended well. A worker that did so before it came to be one is not waited for, either."""
        if state.plan.role == "worker" and not state.prepared:
            self._tell_servers(state)

    def died(self, state: RankState) -> bool:
        """A rank failed. Whether the job is to go on."""
        ending = state.ending
        assert ending
        self._tell_servers(state)
        may = tolerance_rules.may_start_again(self._plan, ending, state.deaths)
        if may and state.plan.role == "server":
            self.start_again(state)
        elif may and self._is_training:
            state.again_at = time.monotonic() + tolerance_rules.AGAIN_SECONDS
        elif tolerance_rules.goes_on_without(self._plan, ending, self.endings, self._again):
            self._say(state, again=False)
        else:
            if self._is_training and (why := tolerance_rules.why_over(self._plan, ending)):
                self._warn(why)
            return False
        return True

    def start_waiting(self, now: float) -> None:
        """Workers that died a moment ago are started again, or given up: nobody is left to be helped, or no way to them."""
        for state in self._ranks:
            if not state.again_at:
                continue
            reached = state.channel is not None and not state.channel.closed
            if not reached or not self._is_training:
                state.again_at = 0.0
                self._say(state, again=False)
            elif now >= state.again_at:
                self.start_again(state)
                return  # what comes of it may be the end of the job

    def start_again(self, state: RankState) -> None:
        """A rank died and its host is there, or is there again: another takes its place."""
        self._say(state, again=True)
        assert state.ending and state.assignment
        if state.plan.role == "worker":
            state.first_ending = state.first_ending or state.ending
        state.restarts += 1
        state.deaths += not state.ending.lost
        state.ending, state.again_at, state.step, state.closing = None, 0.0, -1, False
        environment = rank_environment.restarted(state.assignment.environment)
        self._send(state, Kind.ASSIGN, state.assignment._replace(environment=environment)._asdict())
        self._tell_servers(state)
        if state.plan.role == "server":
            for other in self._ranks:
                if other.ending and other.ending.failed:
                    self._send(state, Kind.NEWS, {"rank": other.plan.rank, "dead": True})

    @property
    def _again(self) -> set[int]:
        """The workers that were started again."""
        return {state.plan.rank for state in self._ranks if state.first_ending}

    @property
    def _is_training(self) -> bool:
        return tolerance_rules.is_training(self._plan, self.endings, self._again)

    def _tell_servers(self, state: RankState) -> None:
        """Whether a rank is dead: no server is to wait for its voice, or for what it may know."""
        for server in self._ranks:
            if server.plan.role == "server" and not server.ending:
                self._send(server, Kind.NEWS, {"rank": state.plan.rank, "dead": state.ending is not None})

    def _say(self, state: RankState, *, again: bool) -> None:
        ending = state.ending
        assert ending
        others = [other for other in self.endings if other is not ending]
        was_main = ending.rank == tolerance_rules.main(self._plan, others, self._again)
        told = again and ending.lost  # when it was lost
        was_main = was_main and not told and self._is_training
        self._warn(
            tolerance_rules.lines(self._plan, ending, ending.message or ending.how, again=again, was_main=was_main)
        )
