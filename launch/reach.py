"""Whether the hosts reach each other, and this machine, on ports of the kernel's choice, as ranks must.

A firewall that lets ssh through and nothing else is what many systems come with; a network that every host is in may
yet not lead from one to another. Both are found here, in milliseconds, rather than by ranks that wait for each other.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
from distrib_launch.checks import Check, error
from distrib_launch.connections import Connections

from distrib.cluster import host_program
from distrib.cluster.inventory import read_answer

CALL_SECONDS = 3.0
"""A lost first packet is sent again after one second (RFC 6298) and after two more."""
ASK_SECONDS = CALL_SECONDS + 5.0
NEAR = 16
"""Up to so many others, a host calls all of them; of more, those whose distance in the list is a power of two."""


class Callee(msgspec.Struct, frozen=True, kw_only=True):
    """What is called: a host, or this machine, "", at any of these addresses. `network` is what to let in there."""

    host: str
    addresses: tuple[str, ...]
    port: int
    network: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """`source`, which called so many, could not connect to `callee` at `address`."""

    source: str
    callee: Callee
    address: str
    reason: str
    called: int

    @property
    def target(self) -> str:
        return self.callee.host


def call_all(
    callees: Sequence[Callee], sources: Collection[str], own_names: Collection[str], connections: Connections
) -> tuple[Failure, ...]:
    """Let every source call the callees that are due to it, all at once; `own_names` are the hosts that are this machine.

    A host whose program has ended says nothing and is accused of nothing.
    """
    due = {source: list(_due(source, callees)) for source in sources}

    def call(source: str) -> list[Failure]:
        calls = [(callee, address) for callee in due[source] for address in callee.addresses]
        targets = [(address, callee.port) for callee, address in calls]
        if source in own_names and not connections.holds(source):
            reasons: list[str] | None = host_program.reach(targets, CALL_SECONDS)
        else:
            asked = msgspec.json.encode({"targets": targets, "seconds": CALL_SECONDS}).decode()
            reasons = read_answer(connections.ask_again(source, asked, ASK_SECONDS), list[str])
        told = list(zip(calls, reasons or [""] * len(calls), strict=True))
        reached = {callee.host for (callee, _), reason in told if not reason}
        return [
            Failure(
                source=source,
                callee=callee,
                address=address,
                reason=reason,
                called=sum(bool(callee.host) for callee in due[source]),
            )
            for (callee, address), reason in told
            if callee.host not in reached
        ]

    if not any(due.values()):
        return ()
    found = [failure for failures in connections.all_at_once(call, list(due)) for failure in failures]
    return tuple(f for f in found if not f.target or f.target in own_names or connections.holds(f.target))


def _due(source: str, callees: Sequence[Callee]) -> Iterable[Callee]:
    """Whom a host calls: this machine, and of the others so many that every host is called, and calls, several times."""
    ring = [callee for callee in callees if callee.host]
    yield from (callee for callee in callees if not callee.host)
    place = next((number for number, callee in enumerate(ring) if callee.host == source), None)
    if place is None:
        return
    size = len(ring)
    far = {1 << power for power in range(size.bit_length()) if 1 << power < size}
    steps = range(1, size) if size - 1 <= NEAR else sorted(far | {size - step for step in far})
    yield from (ring[(place + step) % size] for step in steps)


# -- in words ---------------------------------------------------------------------------------------------------------


def explain(failures: Sequence[Failure], hosts: Collection[str]) -> list[Check]:
    """Who is to blame, as errors: a host that reaches none of the others, which get through, else the one not reached.

    `hosts` are all that called.
    """
    found = [_launcher(tried[0]) for tried in _by(lambda f: f.source, (f for f in failures if not f.target))]
    between = [failure for failure in failures if failure.target]
    mute = {
        tried[0].source: tried
        for tried in _by(lambda f: f.source, between)
        if 1 < len({f.target for f in tried}) == tried[0].called
    }
    if len(mute) == len(hosts):
        mute = {}
    for source, tried in mute.items():
        what = f"it reaches none of the other hosts: not {tried[0].target} at {tried[0].address} ({tried[0].reason})"
        fix = f"is outgoing traffic filtered there, or does its route lead elsewhere? see: ip route get {tried[0].address}"
        found.append(error(source, "network", what, fix))
    told: dict[str, str] = {}
    for tried in _by(lambda f: f.target, (f for f in between if f.source not in mute)):
        first = tried[0]
        who = ", ".join(f.source for f in tried[:4]) + (f" and {len(tried) - 4} more" if len(tried) > 4 else "")
        what = (
            f"{who} cannot reach it at {first.address} ({first.reason}) on a port of the kernel's choice, as ranks use"
        )
        before = told.setdefault(first.callee.network, first.target)
        fix = _let_in(first) if before == first.target else f"as for {before}"
        found.append(error(first.target, "network", what, fix))
    return found


def _by(key: Callable[[Failure], str], failures: Iterable[Failure]) -> list[list[Failure]]:
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(key(failure), []).append(failure)
    return list(groups.values())


def _launcher(failure: Failure) -> Check:
    what = (
        f"it cannot reach this machine, {socket.gethostname()}, at {failure.address} ({failure.reason}), where its ranks "
        "must report"
    )
    return error(failure.source, "network", what, f"{_let_in(failure)}; or launch from one of the hosts")


def _let_in(failure: Failure) -> str:
    net = failure.callee.network
    return (
        f"does a firewall let in ssh alone? let in all TCP from {net}: ufw allow from {net}, or firewall-cmd "
        f"--permanent --zone=trusted --add-source={net}; or choose another network with --interface"
    )
