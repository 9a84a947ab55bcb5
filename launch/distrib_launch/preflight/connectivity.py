"""Whether the hosts reach each other, and this machine, on ports of the kernel's choice, as ranks must.

A firewall that lets ssh through and nothing else is what many systems come with; a network that every host is in may
yet not lead from one to another. Both are found here, in milliseconds, rather than by ranks that wait for each other.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Sequence

import msgspec

from distrib.cluster.inventory import parse_reply
from distrib.cluster.node import name_hosts
from distrib.cluster.remote import connectivity_agent
from distrib_launch.preflight.check_result import Check, error
from distrib_launch.preflight.host_sessions import Connections

CALL_SECONDS = 4.0
"""A first packet that was lost is sent again after one second (RFC 6298) and after two more."""
ASK_SECONDS = CALL_SECONDS + 10.0
NEAR = 16
"""Up to so many others, a host calls all of them; of more, those whose distance in the list is a power of two."""


class Callee(msgspec.Struct, frozen=True, kw_only=True):
    """What is called: a host, or this machine, "", at any of these addresses, on all these ports. `by_all`: by every host, however many."""

    host: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    by_all: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """`source` tried to connect to `target`, "" for this machine, at `address`. `reason` is why it could not, or empty.

    Where packets of `lost_bytes` get lost on the way those of `passed_bytes` arrive; else both are 0.
    """

    source: str
    target: str
    address: str
    reason: str
    lost_bytes: int = 0
    passed_bytes: int = 0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """All calls on one network. `subnet` is None where the hosts share none."""

    subnet: str | None
    calls: tuple[Call, ...]

    @property
    def failures(self) -> list[Call]:
        return [call for call in self.calls if call.reason]

    def among(self, hosts: Collection[str]) -> Round:
        """The calls between these hosts, and from them to this machine."""
        left = (call for call in self.calls if call.source in hosts and (not call.target or call.target in hosts))
        return Round(subnet=self.subnet, calls=tuple(left))


def call_all(callees: Sequence[Callee], sources: Sequence[str], subnet: str | None, connections: Connections) -> Round:
    """Let every source call the callees that are due to it, all at once.

    A host whose program has ended says nothing and is accused of nothing.
    """

    def call(source: str) -> list[Call]:
        due = list(_due(source, callees))
        targets = [(address, port) for callee in due for address in callee.addresses for port in callee.ports]
        if connections.asked(source):
            asked = msgspec.json.encode({"targets": targets, "seconds": CALL_SECONDS}).decode()
            told = parse_reply(connections.ask_again(source, asked, ASK_SECONDS), list[tuple[str, int, int]])
        else:  # this machine, without a connection
            told = connectivity_agent.test_targets(targets, CALL_SECONDS)
        if told is None or len(told) != len(targets):
            return []
        outcomes = iter(told)
        return [
            _best(
                source, callee, [_worst([(port, *next(outcomes)) for port in callee.ports]) for _ in callee.addresses]
            )
            for callee in due
        ]

    calls = [call for calls in connections.all_at_once(call, sources) for call in calls]
    return Round(subnet=subnet, calls=tuple(c for c in calls if not (c.reason and connections.ended(c.target))))


def _worst(outcomes: Sequence[tuple[int, str, int, int]]) -> tuple[str, int, int]:
    """What came of the calls to all ports of an address: each must be let through, as a rank may be given any."""
    bad = [outcome for outcome in outcomes if outcome[1]]
    if not bad:
        return "", 0, 0
    port, reason, lost, passed = bad[0]
    some = f" on {len(bad)} of {len(outcomes)} ports, such as {port}" if len(bad) < len(outcomes) and not lost else ""
    return reason + some, lost, passed


def _best(source: str, callee: Callee, outcomes: Sequence[tuple[str, int, int]]) -> Call:
    """What came of the calls to all addresses of one: it is enough to get through at one."""
    place = next((number for number, (reason, _, _) in enumerate(outcomes) if not reason), 0)
    reason, lost, passed = outcomes[place]
    return Call(
        source=source,
        target=callee.host,
        address=callee.addresses[place],
        reason=reason,
        lost_bytes=lost,
        passed_bytes=passed,
    )


def _due(source: str, callees: Sequence[Callee]) -> Iterator[Callee]:
    """Whom a host calls: who is called by all, and of the others so many that each calls, and is called, several times."""
    size = len(callees)
    place = next((number for number, callee in enumerate(callees) if callee.host == source), None)
    far = {1 << power for power in range(size.bit_length())}
    for step in range(1, size) if place is not None else range(size):
        callee = callees[((place or 0) + step) % size]
        if size - 1 <= NEAR or step in far or size - step in far or callee.by_all:
            yield callee


# -- in words ---------------------------------------------------------------------------------------------------------


def explain(calls: Round) -> list[Check]:
    """Who is to blame, as errors: a host that does not get through where others do, else the one that is not reached."""
    found = _explain_sizes([call for call in calls.calls if call.target and call.lost_bytes])
    between = [call for call in calls.calls if call.target and not call.lost_bytes]
    reached = {call.target for call in between if not call.reason}
    mute = {}
    for source in dict.fromkeys(call.source for call in between):
        own = [call for call in between if call.source == source]
        if all(call.reason for call in own) and len(own) > 1 and any(call.target in reached for call in own):
            mute[source] = next(call for call in own if call.target in reached)
    for source, call in mute.items():
        found.append(
            error(
                source, "network", f"it reaches none of the other hosts: not {call.target} at {call.address} ({call.reason})",
                f"is outgoing traffic filtered there, or does its route lead elsewhere? see: ip route get {call.address}",
            )
        )  # fmt: skip
    first = ""
    for target in dict.fromkeys(call.target for call in between):
        missed = [call for call in between if call.target == target and call.reason and call.source not in mute]
        if missed:
            who = name_hosts(call.source for call in missed)
            what = f"{who} cannot reach it at {missed[0].address} ({missed[0].reason}) on a port of the kernel's choice, as ranks use"
            found.append(error(target, "network", what, f"as for {first}" if first else _let_in(calls.subnet)))
            first = first or target
    return found


def explain_launcher(calls: Round) -> list[Check]:
    """The hosts that do not reach this machine."""
    fix = "does a firewall here let in ssh alone? let in all TCP from the hosts, or launch from one of them"
    return [
        error(
            call.source, "network", f"it cannot reach this machine, {socket.gethostname()}, at {call.address} ({call.reason}), "
            "where its ranks must report", same_mtu(call.lost_bytes, call.passed_bytes) if call.lost_bytes else fix,
        )
        for call in calls.failures
        if not call.target
    ]  # fmt: skip


def _explain_sizes(lost: Sequence[Call]) -> list[Check]:
    """Between whom large packets get lost: the one host that is at an end of every such way, or each that misses some."""
    if not lost:
        return []
    ends = [{call.source, call.target} for call in lost]
    fix = same_mtu(max(call.lost_bytes for call in lost), min(call.passed_bytes for call in lost))
    common = set.intersection(*ends)
    hosts = list(dict.fromkeys(call.target for call in lost))
    if len(common) == 1 and len(set.union(*ends)) > 2:
        hosts = list(common)
    found = []
    for number, host in enumerate(hosts):
        own = [call for call in lost if host in (call.source, call.target)]
        others = name_hosts(dict.fromkeys(end for call in own for end in (call.source, call.target) if end != host))
        what = f"between it and {others} {own[0].reason}"
        found.append(error(host, "network", what, f"as for {hosts[0]}" if number else fix))
    return found


def same_mtu(lost_bytes: int, passed_bytes: int) -> str:
    """What to do where packets get lost for their size."""
    return (
        f"set the MTU of the hosts' interfaces to {passed_bytes} (ip link set dev NAME mtu {passed_bytes}), or that of every "
        f"switch port and tunnel between to {lost_bytes}"
    )


def _let_in(subnet: str | None) -> str:
    if subnet is None:
        return "does a firewall let in ssh alone? let in all TCP from the other hosts"
    return (
        f"does a firewall let in ssh alone? let in all TCP from {subnet}: ufw allow from {subnet}, or firewall-cmd "
        f"--permanent --zone=trusted --add-source={subnet}; or choose another network with --interface"
    )
