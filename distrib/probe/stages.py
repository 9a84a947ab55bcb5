"""Stages of a probe and their estimated durations.

An interrupted probe does not repeat completed stages. The phases of a stage run one after another, the pairs of a phase at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from distrib.cluster.shared_links import Round
from distrib.probe import schedule
from distrib.probe.records import LoadPattern
from distrib.probe.settings import ProbeSettings, Transport

OVERHEAD_SECONDS = 0.03
"""Duration of a phase besides its stream: tasks, connections, replies."""

COLLECTIVE_START_SECONDS = 4.0
"""Time for torch to load and ranks to join a process group."""

LINKS_DONE = "links"
"""Key of the stage that records that only all-reduces are left."""

SECOND_PASS = "second pass"
"""Key of the stage that measures suspicious links again."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the probe. `phases` are rounds of source and target hosts by number, for transfers only."""

    key: str
    title: str
    kind: Literal["transfer", "inside", "all_reduce"] = "transfer"
    transport: Transport = "tcp"
    load: LoadPattern = "alone"
    both_ways: bool = False
    network: str | None = None
    """The subnet whose NICs are measured; None for the network of the job."""
    phases: tuple[Round, ...] = ()
    seconds: float = 0.0
    """Duration of each phase's streams."""
    sizes: tuple[int, ...] = ()
    """Message sizes of a curve over MPI, in bytes; without any, one large size is streamed."""

    @property
    def estimate_seconds(self) -> float:
        """The estimated duration of a transfer stage, else `seconds`."""
        return len(self.phases) * (self.seconds + OVERHEAD_SECONDS) if self.kind == "transfer" else self.seconds


def plan_stages(
    hosts: int, settings: ProbeSettings, primary: Transport, networks: Sequence[str] = ()
) -> tuple[Stage, ...]:
    """List the stages of a probe, links first, in the order of their information.

    Args:
        hosts: Number of hosts.
        settings: Settings of the probe mode.
        primary: The transport by which links are judged.
        networks: Subnets of NICs besides those of the job.
    """
    found = [Stage(key="inside", title="inside hosts", kind="inside", seconds=0.5)]
    found += _concurrent_stages(hosts, settings, primary)
    found += _alone_stages(hosts, settings, primary)
    for network in networks:
        found += _alone_stages(hosts, settings, "tcp", network)
    if hosts > 3:
        round_ = schedule.bisection_round(hosts)
        phases = round_, _reversed_round(round_)
        found.append(
            Stage(key="bisection", title="one half with the other", transport=primary, load="bisection", phases=phases,
                  seconds=settings.concurrent_seconds)
        )  # fmt: skip
    if settings.both_ways:
        found += [
            Stage(key=f"both/{primary}/{n}", title=f"both directions at once, round {n + 1}", transport=primary,
                  load="together", both_ways=True, phases=(round_,), seconds=settings.concurrent_seconds)
            for n, round_ in enumerate(schedule.round_robin(hosts))
        ]  # fmt: skip
    if settings.second_transport:
        other: Transport = "tcp" if primary == "mpi" else "mpi"
        found += _alone_stages(hosts, settings, other)
        if settings.concurrent_sizes:
            found += _large_message_stages(hosts, settings)
        elif hosts > 3:  # with fewer hosts a round is a single pair, which was measured alone
            found += _concurrent_stages(hosts, settings, other)
    if settings.collective_sizes:
        seconds = COLLECTIVE_START_SECONDS + settings.collective_seconds
        found.append(Stage(key="all-reduce", title="all-reduce", kind="all_reduce", seconds=seconds))
    return tuple(found)


def alone_rounds(hosts: int, settings: ProbeSettings) -> tuple[int, float]:
    """Compute how many rounds are measured pair by pair within the budget of the mode.

    Args:
        hosts: Number of hosts.
        settings: Settings of the probe mode.

    Returns:
        The number of rounds, and the seconds of each direction.
    """
    rounds = schedule.round_robin(hosts)
    if not rounds:
        return 0, 0.0
    directions = 1 if settings.mode == "quick" else 2
    least, most = settings.alone_seconds
    share = settings.alone_budget_seconds / (directions * sum(map(len, rounds))) - OVERHEAD_SECONDS
    if share >= least:
        return len(rounds), min(share, most)
    per_round = directions * len(rounds[0]) * (least + OVERHEAD_SECONDS)
    return max(1, min(len(rounds), int(settings.alone_budget_seconds / per_round))), least


def _large_message_stages(hosts: int, settings: ProbeSettings) -> list[Stage]:
    """Plan large messages in one direction: each pair alone if there is time, else all of a round at once."""
    rounds = schedule.round_robin(hosts)
    pairs = sum(map(len, rounds))
    least, most = settings.large_seconds
    alone = pairs * least <= settings.large_budget_seconds
    share = settings.large_budget_seconds / max(1, pairs if alone else len(rounds))
    return [
        Stage(
            key=f"large/{number}", title=f"large messages, round {number + 1}", transport="mpi",
            load="alone" if alone else "together", phases=tuple((pair,) for pair in round_) if alone else (round_,),
            seconds=min(max(share, least), most), sizes=settings.concurrent_sizes,
        )
        for number, round_ in enumerate(rounds)
    ]  # fmt: skip


def _concurrent_stages(hosts: int, settings: ProbeSettings, transport: Transport) -> list[Stage]:
    return [
        Stage(
            key=f"together/{transport}/{number}", title=f"all pairs of round {number + 1}, {transport}", transport=transport,
            load="together" if len(round_) > 1 else "alone",  # two or three hosts
            phases=(round_, _reversed_round(round_)), seconds=settings.concurrent_seconds,
        )
        for number, round_ in enumerate(schedule.round_robin(hosts))
    ]  # fmt: skip


def _alone_stages(hosts: int, settings: ProbeSettings, transport: Transport, network: str | None = None) -> list[Stage]:
    count, seconds = alone_rounds(hosts, settings)
    found = []
    for number, round_ in enumerate(schedule.round_robin(hosts)[:count]):
        phases = [(pair,) for pair in round_]
        if settings.mode != "quick":
            phases += [(pair,) for pair in _reversed_round(round_)]
        found.append(
            Stage(
                key=f"alone/{network or transport}/{number}",
                title=f"each pair alone, {network or transport}, round {number + 1}", transport=transport, network=network,
                phases=tuple(phases), seconds=seconds, sizes=settings.sizes if transport == "mpi" else (),
            )
        )  # fmt: skip
    return found


def _reversed_round(pairs: Round) -> Round:
    return tuple((target, source) for source, target in pairs)
