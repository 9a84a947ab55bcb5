"""What one probe does, step by step, and how long it may take. Pure.

A step is what an interrupted probe need not repeat. Its phases run one after another; the pairs of a phase at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from distrib.probe import schedule
from distrib.probe.records import LoadPattern
from distrib.probe.schedule import Round
from distrib.probe.settings import ProbeSettings, Transport

OVERHEAD_SECONDS = 0.03
"""What a phase costs beside its stream: orders, connections, answers."""

COLLECTIVE_START_SECONDS = 4.0
LINKS_DONE = "links"
"""The step that says in what is done that all is but the all-reduces, which begin."""

LARGE_SECONDS, LARGE_BUDGET_SECONDS = (1.0, 3.0), 8.0
"""How long a round of large messages may last, least and most, and all rounds together."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """`phases` are rounds of (source, target) by the number of the host; none for steps that are no transfers."""

    key: str
    what: str
    kind: str = "transfer"
    transport: Transport = "tcp"
    load: LoadPattern = "alone"
    both_ways: bool = False
    network: str | None = None
    """The subnet whose cards are measured; None for the network of the job."""
    phases: tuple[Round, ...] = ()
    seconds: float = 0.0
    """How long each phase's stream lasts."""
    sizes: tuple[int, ...] = ()
    estimate_seconds: float = 0.0


def steps(hosts: int, settings: ProbeSettings, primary: Transport, networks: Sequence[str] = ()) -> tuple[Stage, ...]:
    """All steps of a probe of so many hosts, links first and in the order in which they tell most.

    `networks` are the subnets of further cards.
    """
    found = [Stage(key="inside", what="inside the hosts", kind="inside", estimate_seconds=0.5)]
    found += _together(hosts, settings, primary)
    found += _alone(hosts, settings, primary)
    for network in networks:
        found += _alone(hosts, settings, "tcp", network)
    if hosts > 3:
        round_ = schedule.bisection(hosts)
        found.append(
            _step(
                "bisection",
                "one half with the other",
                primary,
                "bisection",
                (round_, schedule.backward(round_)),
                settings.concurrent_seconds,
            )
        )
    if settings.both_ways:
        found += [
            _step(
                f"both/{primary}/{n}",
                f"both ways at once, round {n + 1}",
                primary,
                "together",
                (r,),
                settings.concurrent_seconds,
                both=True,
            )
            for n, r in enumerate(schedule.rounds(hosts))
        ]
    if settings.second_transport:
        second: Transport = "mpi" if primary == "tcp" else "tcp"
        found += _alone(hosts, settings, second)
        if settings.concurrent_sizes:
            found += _large(hosts, settings)
        elif hosts > 3:  # of fewer, a round is one pair, which was alone
            found += _together(hosts, settings, second)
    if settings.collective_sizes:
        seconds = COLLECTIVE_START_SECONDS + settings.collective_seconds
        found.append(Stage(key="all-reduce", what="all-reduce", kind="all_reduce", estimate_seconds=seconds))
    return tuple(found)


def _large(hosts: int, settings: ProbeSettings) -> list[Stage]:
    """Messages that take long, one way: each pair alone where there is time for that, else all of a round at once."""
    rounds = schedule.rounds(hosts)
    pairs = sum(map(len, rounds))
    alone = pairs * LARGE_SECONDS[0] <= LARGE_BUDGET_SECONDS
    share = LARGE_BUDGET_SECONDS / max(1, pairs if alone else len(rounds))
    seconds = min(max(share, LARGE_SECONDS[0]), LARGE_SECONDS[1])
    load: LoadPattern = "alone" if alone else "together"
    return [
        _step(
            f"large/{number}", f"large messages, round {number + 1}", "mpi", load,
            tuple((pair,) for pair in round_) if alone else (round_,), seconds, sizes=settings.concurrent_sizes,
        )
        for number, round_ in enumerate(rounds)
    ]  # fmt: skip


def alone_share(hosts: int, settings: ProbeSettings) -> tuple[int, float]:
    """How many rounds are measured pair by pair, and for how long each direction."""
    rounds = schedule.rounds(hosts)
    if not rounds:
        return 0, 0.0
    directions = 1 if settings.mode == "quick" else 2
    least, most = settings.alone_seconds
    links = directions * sum(map(len, rounds))
    share = settings.alone_budget_seconds / links - OVERHEAD_SECONDS
    if share >= least:
        return len(rounds), min(share, most)
    per_round = directions * len(rounds[0]) * (least + OVERHEAD_SECONDS)
    return max(1, min(len(rounds), int(settings.alone_budget_seconds / per_round))), least


def _together(hosts: int, settings: ProbeSettings, transport: Transport) -> list[Stage]:
    return [
        _step(
            f"together/{transport}/{n}",
            f"all pairs of round {n + 1}, {transport}",
            transport,
            "together" if len(r) > 1 else "alone",  # of two or three hosts
            (r, schedule.backward(r)),
            settings.concurrent_seconds,
        )
        for n, r in enumerate(schedule.rounds(hosts))
    ]


def _alone(hosts: int, settings: ProbeSettings, transport: Transport, network: str | None = None) -> list[Stage]:
    count, seconds = alone_share(hosts, settings)
    found = []
    for number, round_ in enumerate(schedule.rounds(hosts)[:count]):
        phases = [(pair,) for pair in round_]
        if settings.mode != "quick":
            phases += [(pair,) for pair in schedule.backward(round_)]
        sizes = settings.sizes if transport == "mpi" else ()
        found.append(
            _step(
                f"alone/{network or transport}/{number}",
                f"each pair alone, {network or transport}, round {number + 1}",
                transport,
                "alone",
                tuple(phases),
                seconds,
                sizes=sizes,
                network=network,
            )
        )
    return found


def _step(
    key: str, what: str, transport: Transport, load: LoadPattern, phases: tuple[Round, ...], seconds: float,
    *, both: bool = False, sizes: tuple[int, ...] = (), network: str | None = None,
) -> Stage:  # fmt: skip
    return Stage(
        key=key, what=what, transport=transport, load=load, both_ways=both, phases=phases, seconds=seconds, sizes=sizes,
        network=network, estimate_seconds=len(phases) * (seconds + OVERHEAD_SECONDS),
    )  # fmt: skip
