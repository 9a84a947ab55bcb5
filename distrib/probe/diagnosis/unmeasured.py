"""Checks for hosts and pairs whose measurements failed. If small messages pass and large ones do not, the MTU is suspected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distrib.probe.diagnosis.check_inputs import DiagnosisInputs
from distrib.probe.diagnosis.finding import Finding, Severity
from distrib.probe.records import NO_REPLY, STALL_MESSAGES

PROBABLY_MTU = "small messages pass, large ones hardly: MTU mismatch or a nearly dead link?"
CHECK_MTU = "run distrib-topo check to test the MTU; if it is wrong, set one MTU on the hosts and all switches between"
Failures = dict[tuple[str, str], str]
"""Reason of the failure, by source and target host."""


def _find_lost_hosts(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report hosts with which most other hosts failed, or that did not reply to several hosts."""
    bad = _failures(inputs)
    for host in _failed_hosts(inputs, bad):
        own = {pair: why for pair, why in bad.items() if host in pair}
        peers = _failed_peers(host, bad)
        count = 2 * (len(inputs.hosts) - 1)
        evidence = f"{len(own)} of {count} directions: {next(iter(own.values()))}"
        silent = _is_silent(host, own)
        if not silent and all(map(_stalled, own.values())):
            yield Finding(
                kind="mtu", severity=_failure_severity(inputs), what=f"{host}, with most hosts: {PROBABLY_MTU}",
                evidence=evidence, advice=f"{CHECK_MTU}; else check rate, duplex and errors of {host}'s NIC (ethtool -S)",
                hosts=(host,), ratio=0.0, loss=1.0,
            )  # fmt: skip
            continue
        whom = "any other host" if len(own) == count else f"{len(peers)} other host(s)"
        hung = ", and what keeps its processes from running (ps, dmesg)" if silent else ""
        yield Finding(
            kind="host_lost", severity=_failure_severity(inputs), what=f"{host} could not be measured with {whom}",
            evidence=evidence, advice=f"check that {host} is up and reachable{hung}", hosts=(host,), ratio=0.0, loss=1.0,
        )  # fmt: skip


def _find_unmeasured_pairs(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report failed pairs of hosts that are not lost."""
    bad = _failures(inputs)
    lost = _failed_hosts(inputs, bad)
    for (source, target), why in bad.items():
        if not lost.isdisjoint((source, target)):
            continue
        kind: str = "not_measured"
        what, advice = "could not be measured", "check firewalls between them"
        if _stalled(why):
            kind, what, advice = "mtu", PROBABLY_MTU, f"{CHECK_MTU}; else check rate, duplex and errors (ethtool -S)"
        elif NO_REPLY in why:
            advice = "check that both hosts are up, and what keeps their processes from running"
        yield Finding(
            kind=kind, severity=_failure_severity(inputs), what=f"{source} to {target}: {what}", evidence=why, advice=advice,
            hosts=(source, target), source=source, target=target, ratio=0.0, loss=0.5,
        )  # fmt: skip


def lost_host_finding(host: str, why: str) -> Finding:
    """Build the finding of a host that the launcher lost during the probe.

    Args:
        host: Name of the host.
        why: The launcher's message.
    """
    return Finding(
        kind="host_lost", severity="error", what=f"{host} was lost during the probe",
        evidence=f"{why}; the probe continued without it",
        advice=f"check that {host} is up (distrib-topo check), then probe again", hosts=(host,), ratio=0.0, loss=1.0,
    )  # fmt: skip


def _failure_severity(inputs: DiagnosisInputs) -> Severity:
    return "error" if inputs.judges_links else "warning"


def _failures(inputs: DiagnosisInputs) -> Failures:
    """Return the first failure of each pair that never succeeded, or that lost a host since.

    A network or transport on which nothing passes has none: the probe gave it up, with a note.
    """
    if not inputs.judges_links and all(record.failed for record in inputs.attempts):
        return {}
    last = {(r.source, r.target): r.failed or "" for r in inputs.attempts}
    good = {pair for r in inputs.attempts if not r.failed and NO_REPLY not in last[pair := (r.source, r.target)]}
    bad: Failures = {}
    for record in inputs.attempts:
        if record.failed and (record.source, record.target) not in good:
            bad.setdefault((record.source, record.target), record.failed)
    return bad


def _failed_hosts(inputs: DiagnosisInputs, bad: Failures) -> set[str]:
    """Return hosts that failed with 80 % of all peers, or did not reply to two or more."""
    found = set()
    for host in inputs.hosts:
        peers = _failed_peers(host, bad)
        most = len(peers) >= max(2, (len(inputs.hosts) - 1) * 0.8)
        if most or (len(peers) > 1 and _is_silent(host, {p: why for p, why in bad.items() if host in p})):
            found.add(host)
    return found


def _failed_peers(host: str, bad: Failures) -> set[str]:
    return {peer for pair in bad if host in pair for peer in pair} - {host}


def _is_silent(host: str, own: Mapping[tuple[str, str], str]) -> bool:
    return all(f"{host} {NO_REPLY}" in why for why in own.values())


def _stalled(why: str) -> bool:
    return any(message in why for message in STALL_MESSAGES)


FAILURE_CHECKS = (_find_lost_hosts, _find_unmeasured_pairs)
