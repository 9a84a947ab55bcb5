"""Findings: defects of hosts, NICs or links, with evidence and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A defect of the cluster."""

    kind: str
    """Name of the defect, such as `slow_host` or `noisy_link`."""
    severity: Severity
    what: str
    """The affected host or link, and the defect."""
    evidence: str
    """Measured and expected values."""
    advice: str
    hosts: tuple[str, ...]
    source: str | None = None
    target: str | None = None
    ratio: float | None = None
    """Measured over expected rate; of an uplink, the rate that its hosts can send over the rate they got."""
    loss: float = 0.0
    """Rank among findings of one severity, 0 to 1: the estimated fraction of speed that a job over all hosts loses."""


def first_of(texts: Sequence[str]) -> str:
    """Join the first six texts, with the number of further ones.

    Args:
        texts: Descriptions of links or groups.
    """
    return ", ".join(texts[:6]) + f" and {len(texts) - 6} more" * (len(texts) > 6)


def rank_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity, then by loss.

    Args:
        findings: Findings of any kinds, in any order.
    """
    return tuple(sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), -f.loss, f.kind, f.hosts)))
