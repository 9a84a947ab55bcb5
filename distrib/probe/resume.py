"""From which earlier records a probe may go on: those of the same hosts, measured in the same way over the same network. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from distrib.probe.records import ProbeStarted, Record, StageDone


def other_network(before: ProbeStarted, now: ProbeStarted) -> str:
    """Why what was measured then would not be what is measured now; empty where it would.

    Hosts that are missing in one of them, lost or not there yet, are not compared.
    """
    if (before.hosts, before.mode) != (now.hosts, now.mode):
        return "it was of other hosts, or in another mode"
    if before.primary != now.primary:
        return f"its links were judged by {before.primary}, not {now.primary}"
    then = {facts.host: f"{facts.address} ({facts.interface})" for facts in before.facts}
    for facts in now.facts:
        place = f"{facts.address} ({facts.interface})"
        if then.get(facts.host, place) != place:
            return f"{facts.host} was reached at {then[facts.host]}, and is at {place} now"
    return ""


def current(records: Iterable[Record]) -> list[Record]:
    """The records without those of probes over another network, after which one was begun anew."""
    kept: list[Record] = []
    for record in records:
        if isinstance(record, ProbeStarted) and any(other_network(start, record) for start in starts(kept)):
            kept = []
        kept.append(record)
    return kept


def starts(records: Iterable[Record]) -> list[ProbeStarted]:
    """The first lines of a probe and of each time that it was gone on with."""
    return [record for record in records if isinstance(record, ProbeStarted)]


def done_steps(records: Iterable[Record], present: Collection[str] = ()) -> tuple[str, ...]:
    """The steps that need not be done again with the hosts that are `present`."""
    done = (record for record in records if isinstance(record, StageDone) and record.whole)
    return tuple(dict.fromkeys(record.stage for record in done if set(record.without).isdisjoint(present)))
