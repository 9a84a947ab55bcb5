"""Control connections to the ranks: check them against the plan, read and write frames."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from typing import Any

from distrib.errors import LaunchError
from distrib.utils.framing import ProtocolError
from distrib_launch.rank_agent.control_channel import Channel, Kind, set_dead_peer_timeout
from distrib_launch.supervisor.host_liveness import HostLiveness
from distrib_launch.supervisor.listener import OnFrame
from distrib_launch.supervisor.rank_exit import Lost
from distrib_launch.supervisor.rank_state import SETTINGS, JobState, RankState


class RankConnections:
    """Control connections of all ranks.

    Args:
        job: State of the job.
        selector: Selector of the supervisor's loop.
        liveness: Gets every sign of life of a host.
        on_frame: Called with every frame of a rank.
        on_lost: Called with a rank whose connection ended before its exit record came, the reason, and how it was lost.
        may_return: Returns True for a rank that lost its connection and is restarted if it connects again.
        on_return: Called when such a rank has connected.
        on_complete: Called when all ranks have connected.
    """

    def __init__(
        self,
        job: JobState,
        selector: selectors.BaseSelector,
        liveness: HostLiveness,
        *,
        on_frame: Callable[[RankState, Kind, bytes], None],
        on_lost: Callable[[RankState, str, Lost], None],
        may_return: Callable[[RankState], bool],
        on_return: Callable[[RankState], None],
        on_complete: Callable[[], None],
    ) -> None:
        self._job, self._selector, self._liveness = job, selector, liveness
        self._on_frame, self._on_lost = on_frame, on_lost
        self._may_return, self._on_return, self._on_complete = may_return, on_return, on_complete
        self._in_start_order = [job.ranks[rank.rank] for rank in job.plan.started]

    def accept(self, channel: Channel, hello: dict[str, Any]) -> OnFrame:
        """Take over the connection of a rank.

        Args:
            channel: Its authenticated connection.
            hello: Its first message.

        Returns:
            The handler of the frames that arrived with it.

        Raises:
            LaunchError: The engine started other ranks than planned.
            ProtocolError: The rank is already connected, or no longer needed.
        """
        job = self._job
        state = self._planned(hello)
        if hello["returns"]:
            if state.channel and not state.channel.closed:
                self.disconnect_rank(state, "its connection broke")
            if job.stopping or job.failed_at or not self._may_return(state):
                raise ProtocolError(f"rank {hello['rank']} was cut off, and the job ends or continues without it")
        elif state.channel is not None:
            raise ProtocolError(f"rank {hello['rank']} is connected already")
        host = job.hosts[state.plan.host]
        if (hello["local_rank"], hello["local_world_size"]) != (state.plan.local_rank, host.ranks):
            raise self._refusal(
                f"rank {hello['rank']} is local rank {hello['local_rank']} of {hello['local_world_size']} on "
                f"{hello['host']}, not {state.plan.local_rank} of {host.ranks} on {state.plan.host}"
            )
        state.channel, state.hello, state.address = channel, hello, channel.sock.getpeername()[0]
        set_dead_peer_timeout(channel.sock, SETTINGS.dead_connection_seconds)
        if not job.is_local:
            # With srun or a jump host, sshd may be unreachable from this machine; the second port is that of the rank or its script.
            self._liveness.watch(host.name, state.address, host.port, hello["port"])
        self._selector.modify(channel.sock, selectors.EVENT_READ, lambda _s, events: self._on_event(state, events))
        if hello["returns"]:
            self._on_return(state)
        else:
            job.missing -= 1
            if not job.missing and not job.stopping:
                self._on_complete()
        return lambda kind, payload: self._on_frame(state, kind, payload)

    def _planned(self, hello: dict[str, Any]) -> RankState:
        count = len(self._in_start_order)
        if hello["world_size"] != count or not 0 <= hello["rank"] < count:
            raise self._refusal(f"the engine started {hello['world_size']} ranks")
        state: RankState = self._in_start_order[hello["rank"]]
        return state

    def _refusal(self, what: str) -> LaunchError:
        return LaunchError(
            f"{what}, but the plan has {len(self._job.ranks)}: the job is not started",
            hint=f"see {self._job.run_dir / 'engine.log'}",
            code="ranks-missing",
        )

    def _on_event(self, state: RankState, events: int) -> None:
        channel = state.channel
        assert channel
        if events & selectors.EVENT_WRITE:
            self._flush(state)
        why = "its connection closed"
        if not channel.closed:  # it may have closed after its hello
            try:
                for kind, payload in channel.receive():
                    self._on_frame(state, kind, payload)
            except (OSError, ProtocolError, ValueError) as error:
                why = str(error)
                channel.closed = True
            else:
                self._liveness.on_life(state.plan.host)
        if channel.closed:
            self.disconnect_rank(state, why)

    def send(self, state: RankState, kind: Kind, payload: dict[str, Any] | bytes) -> None:
        """Send a frame, unless the rank is not connected.

        Args:
            state: The rank.
            kind: Kind of the frame.
            payload: JSON object or bytes.
        """
        if state.channel and not state.channel.closed and state.channel.proven:
            state.channel.send(kind, payload)
            self._flush(state)

    def ping(self) -> None:
        """Ping one rank of each host to measure the host's clock."""
        for state in self._job.ranks:
            if state.plan.local_rank == 0 and not state.exit:
                self.send(state, Kind.PING, {"time": time.time()})

    def _flush(self, state: RankState) -> None:
        channel = state.channel
        assert channel
        try:
            channel.flush()
        except OSError as error:
            channel.closed = True
            self.disconnect_rank(state, str(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.waiting_bytes else 0)
        key = self._selector.get_key(channel.sock)
        if key.events != events:
            self._selector.modify(channel.sock, events, key.data)

    def disconnect_rank(self, state: RankState, why: str, lost: Lost = "closed") -> None:
        """Close the connection of a rank.

        Args:
            state: The rank.
            why: Reason in words.
            lost: `closed` if the connection closed, `silence` if the host fell silent.
        """
        assert state.channel
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(state.channel.sock)
        state.channel.close()
        if lost == "closed" and not self._job.assigned and not self._job.stopping:
            # If one rank cannot start, the engine ends all ranks; the failure is reported when the engine has ended.
            state.channel = None
            self._job.missing += 1
            return
        self._on_lost(state, why, lost)

    def close(self) -> None:
        """Close all connections and logs."""
        for state in self._job.ranks:
            state.close_files()
            if state.channel:
                state.channel.close()
