"""The table of checks. To add a finding, write a function that yields it and register it here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from distrib.cluster.node import Nic
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs, collect_inputs
from distrib.probe.diagnosis.finding import Finding, rank_findings
from distrib.probe.diagnosis.gpus import GPU_CHECKS
from distrib.probe.diagnosis.link_quality import LINK_QUALITY_CHECKS
from distrib.probe.diagnosis.nics import NIC_CHECKS
from distrib.probe.diagnosis.outliers import OUTLIER_CHECKS
from distrib.probe.diagnosis.oversubscription import find_oversubscribed_uplinks
from distrib.probe.diagnosis.unmeasured import FAILURE_CHECKS
from distrib.probe.records import Record

Check = Callable[[DiagnosisInputs], Iterable[Finding]]

LINK_CHECKS: tuple[Check, ...] = (*FAILURE_CHECKS, *OUTLIER_CHECKS)
"""Checks of every network. Over the transport by which links are not judged, only `FAILURE_CHECKS` are run."""

CHECKS: tuple[Check, ...] = (
    *LINK_CHECKS,
    find_oversubscribed_uplinks,
    *LINK_QUALITY_CHECKS,
    *NIC_CHECKS,
    *GPU_CHECKS,
)
"""Checks of the network of the job, over the transport by which links are judged."""


def check_records(
    records: Sequence[Record], configured_nics: Mapping[str, Sequence[Nic]] | None = None
) -> tuple[Finding, ...]:
    """Run all checks on a probe's records.

    Args:
        records: The records, oldest first.
        configured_nics: The NICs that the topology file gives each host.

    Returns:
        The findings, ranked; none if the probe did not start.
    """
    inputs = collect_inputs(records, configured_nics)
    if inputs is None:
        return ()
    found = _apply(CHECKS, inputs)
    failed = [{*finding.hosts} for finding in _apply(FAILURE_CHECKS, inputs)]
    other = inputs.over("mpi" if inputs.primary == "tcp" else "tcp")
    for finding in _apply(FAILURE_CHECKS, other):
        if not any(hosts <= {*finding.hosts} for hosts in failed):
            found.append(_append(finding, f"over {other.transport}"))
    for network in inputs.networks:
        for finding in _apply(LINK_CHECKS, network):
            nics = sorted(f"{host}'s {name}" for host, name in network.nic_names.items() if host in finding.hosts)
            found.append(_append(finding, f"on {', '.join([str(network.network), *nics])}"))
    return rank_findings(found)


def _apply(checks: Sequence[Check], inputs: DiagnosisInputs) -> list[Finding]:
    return [finding for check in checks for finding in check(inputs)]


def _append(finding: Finding, where: str) -> Finding:
    return msgspec.structs.replace(finding, what=f"{finding.what} ({where})")
