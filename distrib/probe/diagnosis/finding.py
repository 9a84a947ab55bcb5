"""A finding: something that is wrong with the wire, with its evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from distrib.units import format_rate

Kind = Literal[
    "slow_host", "slow_link", "below_nominal", "asymmetric_link", "oversubscribed_uplink", "half_duplex", "mtu",
    "noisy_link", "wrong_interface", "gpudirect_off", "narrow_pcie", "host_lost", "not_measured", "worse_than_baseline",
    "mixed_cards", "not_compared", "no_such_card", "slow_copies",
]  # fmt: skip
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong. `ratio` is found over expected (for an uplink: wanted over had); `loss` ranks findings."""

    kind: Kind
    severity: Severity
    what: str
    evidence: str
    advice: str
    hosts: tuple[str, ...]
    source: str | None = None
    target: str | None = None
    ratio: float | None = None
    loss: float = 0.0


def ranked(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, and what costs most first among equals."""
    return tuple(sorted(found, key=lambda f: (SEVERITIES.index(f.severity), -f.loss, f.kind, f.hosts)))


def bit_rate_text(bytes_per_second: float) -> str:
    """A rate as people say it of networks: in bits."""
    return format_rate(bytes_per_second, digits=3, bits=True)
