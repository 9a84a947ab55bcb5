"""Test connections between the hosts, and to this machine, on free ports that the kernel chooses, as for ranks.

Many systems come with a firewall that lets only ssh through. Hosts of one subnet may not reach each other. The test
detects both in milliseconds; without it, ranks would wait for each other.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Sequence

import msgspec

from distrib.cluster.inventory import parse_reply
from distrib.cluster.node import name_hosts
from distrib.cluster.remote import connectivity_agent
from distrib_launch.preflight.check_result import CheckResult, error
from distrib_launch.preflight.host_sessions import HostSessions

MTU_HINT = "set the same MTU on all interfaces and switch ports between them (ip link set dev NAME mtu 1500)"


class ProbeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Target of test connections: a host, or this machine."""

    host: str
    """Empty: this machine."""
    addresses: tuple[str, ...]
    """Addresses of the target; one that accepts connections is enough."""
    ports: tuple[int, ...]
    """Ports that must all accept connections."""
    from_all: bool = False
    """True if every host must reach it."""


class ConnectionAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Result of connecting from one host to another."""

    source: str
    target: str
    """Empty: this machine."""
    address: str
    reason: str
    """Reason of the failure; empty: it succeeded."""


class ConnectionRound(msgspec.Struct, frozen=True, kw_only=True):
    """All test connections on one network."""

    subnet: str | None
    """None: the hosts share no subnet."""
    attempts: tuple[ConnectionAttempt, ...]

    @property
    def failures(self) -> list[ConnectionAttempt]:
        """Return the attempts that failed."""
        return [attempt for attempt in self.attempts if attempt.reason]

    def among(self, hosts: Collection[str]) -> ConnectionRound:
        """Return the attempts between some hosts, and from them to this machine.

        Args:
            hosts: Names of the hosts.
        """
        left = (each for each in self.attempts if each.source in hosts and (not each.target or each.target in hosts))
        return ConnectionRound(subnet=self.subnet, attempts=tuple(left))


def connect_all(
    targets: Sequence[ProbeTarget],
    sources: Sequence[str],
    subnet: str | None,
    sessions: HostSessions,
    timeout_seconds: float = 4.0,
) -> ConnectionRound:
    """Let every source connect to its targets, all at once. Hosts whose session has ended are not reported.

    Args:
        targets: Targets, in the order of the hosts.
        sources: Hosts that connect.
        subnet: Network of the addresses, for messages.
        sessions: Sessions of the hosts.
        timeout_seconds: A lost first packet is sent again after one second (RFC 6298) and after two more.
    """

    def connect(source: str) -> list[ConnectionAttempt]:
        due = list(_targets_of(source, targets))
        places = [(address, port) for target in due for address in target.addresses for port in target.ports]
        if sessions.has_session(source):
            request = msgspec.json.encode({"targets": places, "seconds": timeout_seconds}).decode()
            reasons = parse_reply(sessions.query_again(source, request, timeout_seconds + 10.0), list[str])
        else:  # this machine, without a session
            reasons = connectivity_agent.test_targets(places, timeout_seconds)
        if reasons is None or len(reasons) != len(places):
            return []
        following = iter(reasons)
        attempts = []
        for target in due:
            found = [_worst_port([(port, next(following)) for port in target.ports]) for _ in target.addresses]
            best = next((number for number, reason in enumerate(found) if not reason), 0)
            attempts.append(
                ConnectionAttempt(source=source, target=target.host, address=target.addresses[best], reason=found[best])
            )
        return attempts

    attempts = [attempt for found in sessions.map_hosts(connect, sources) for attempt in found]
    reported = (attempt for attempt in attempts if not (attempt.reason and sessions.has_ended(attempt.target)))
    return ConnectionRound(subnet=subnet, attempts=tuple(reported))


def _worst_port(outcomes: Sequence[tuple[int, str]]) -> str:
    """Return the reason why some port does not accept connections, empty if all do."""
    bad = [(port, reason) for port, reason in outcomes if reason]
    if not bad:
        return ""
    port, reason = bad[0]
    return reason + (f" on {len(bad)} of {len(outcomes)} ports, such as {port}" if len(bad) < len(outcomes) else "")


def _targets_of(source: str, targets: Sequence[ProbeTarget], all_pairs_hosts: int = 16) -> Iterator[ProbeTarget]:
    """Yield the targets of one host. With more than `all_pairs_hosts`, it connects to those at a power of two in the list."""
    size = len(targets)
    place = next((number for number, target in enumerate(targets) if target.host == source), None)
    far = {1 << power for power in range(size.bit_length())}
    for step in range(1, size) if place is not None else range(size):
        target = targets[((place or 0) + step) % size]
        if size - 1 <= all_pairs_hosts or step in far or size - step in far or target.from_all:
            yield target


# -- explanations -----------------------------------------------------------------------------------------------------


def explain_host_failures(tested: ConnectionRound) -> list[CheckResult]:
    """Return errors for the hosts at fault: those that reach no reachable host, else those that are not reachable.

    Args:
        tested: Test connections.
    """
    between = [attempt for attempt in tested.attempts if attempt.target]
    reached = {attempt.target for attempt in between if not attempt.reason}
    found, isolated = [], set()
    for source in dict.fromkeys(attempt.source for attempt in between):
        own = [attempt for attempt in between if attempt.source == source]
        example = next((attempt for attempt in own if attempt.target in reached), None)
        if example and len(own) > 1 and all(attempt.reason for attempt in own):
            isolated.add(source)
            what = f"it reaches none of the other hosts: not {example.target} at {example.address} ({example.reason})"
            fix = f"check for filtered outgoing traffic and wrong routes there: ip route get {example.address}"
            found.append(error(source, "network", what, MTU_HINT if _loses_packets(example) else fix))
    first = ""
    for target in dict.fromkeys(attempt.target for attempt in between):
        missed = [a for a in between if a.target == target and a.reason and a.source not in isolated]
        if missed:
            who = name_hosts(attempt.source for attempt in missed)
            what = f"{who} cannot reach it at {missed[0].address} ({missed[0].reason}) on a port that the kernel chose, as ranks use"
            fix = MTU_HINT if _loses_packets(missed[0]) else _firewall_hint(tested.subnet)
            found.append(error(target, "network", what, f"as for {first}" if first else fix))
            first = first or target
    return found


def explain_launcher_failures(tested: ConnectionRound) -> list[CheckResult]:
    """Return errors for the hosts that do not reach this machine.

    Args:
        tested: Test connections.
    """
    fix = "if a firewall here lets only ssh through: allow all TCP from the hosts, or launch from one of them"
    return [
        error(
            attempt.source, "network", f"it cannot reach this machine, {socket.gethostname()}, at {attempt.address} ({attempt.reason}), "
            "where its ranks must report", MTU_HINT if _loses_packets(attempt) else fix,
        )
        for attempt in tested.failures
        if not attempt.target
    ]  # fmt: skip


def _loses_packets(attempt: ConnectionAttempt) -> bool:
    return attempt.reason.startswith("packets of")


def _firewall_hint(subnet: str | None) -> str:
    if subnet is None:
        return "if a firewall lets only ssh through: allow all TCP from the other hosts"
    return (
        f"if a firewall lets only ssh through: allow all TCP from {subnet} (ufw allow from {subnet}); or choose another "
        "network with --interface"
    )
