"""Checks of the GPUs: GPUDirect RDMA off, narrow PCIe links, slow copies."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from distrib.cluster.measurements import IntraNodeLinkMeasurement
from distrib.cluster.node import shown_hosts
from distrib.probe.diagnosis.check_inputs import DiagnosisInputs
from distrib.probe.diagnosis.finding import Finding
from distrib.probe.settings import LIMITS
from distrib.units import format_rate, format_size

GpuName = tuple[str, str]
"""Host and GPU, such as `("n1", "gpu0")`."""


def _find_gpudirect_without_gain(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report that all-reduce over the whole cluster is no faster with GPUDirect RDMA than without."""
    times: dict[bool, dict[int, float]] = {True: {}, False: {}}
    most = max((each.ranks for each in inputs.collectives), default=0)
    for each in inputs.collectives:
        if each.ranks == most and each.gpudirect is not None:
            times[each.gpudirect] = {point.size_bytes: point.seconds for point in each.curve}
    size = max(times[True].keys() & times[False].keys(), default=0)
    ratio = times[False][size] / times[True][size] if size else 0.0
    if 0 < ratio <= LIMITS.gpudirect_gain:
        yield Finding(
            kind="gpudirect_off", severity="note",
            what="all-reduce is no faster with GPUDirect RDMA: it is not used, or host memory keeps up with the NICs",
            evidence=f"{format_size(size, binary=True)} take {ratio:.2f} times as long without it (NCCL_NET_GDR_LEVEL=LOC)",
            advice="check NCCL_DEBUG=INFO for GDRDMA, that nvidia_peermem is loaded, and that GPU and NIC share a PCIe switch",
            hosts=inputs.collectives[-1].hosts, ratio=ratio, loss=0.3,
        )  # fmt: skip


def _find_narrow_pcie(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report GPUs with fewer PCIe lanes than possible. Idle GPUs reduce their link, so only active GPUs count."""
    for host, facts in inputs.facts.items():
        for gpu in inputs.gpus_after_use.get(host, facts.gpus):
            width, possible = gpu.pcie_width, gpu.pcie_width_possible
            active = host in inputs.gpus_after_use or gpu.pcie_generation == gpu.pcie_generation_possible
            if active and width and possible and width < possible:
                yield Finding(
                    kind="narrow_pcie", severity="warning",
                    what=f"{host}: GPU {gpu.index} has a PCIe x{width} link, x{possible} is possible",
                    evidence=f"NVML, {gpu.name}",
                    advice="reseat the GPU and check its riser; the possible width already considers the slot",
                    hosts=(host,), ratio=width / possible, loss=0.3 * (1 - width / possible),
                )  # fmt: skip


def _find_slow_gpu_copies(inputs: DiagnosisInputs) -> Iterator[Finding]:
    """Report GPUs with slower copies than GPUs of the same name."""
    slow: dict[GpuName, list[tuple[float, IntraNodeLinkMeasurement, list[IntraNodeLinkMeasurement]]]] = {}
    for comparable in _comparable_copies(inputs):
        median = statistics.median(link.bandwidth_bytes_per_second for link in comparable)
        for link in comparable if len(comparable) > 2 else ():
            ratio = link.bandwidth_bytes_per_second / median
            if ratio < LIMITS.severe_fraction:
                gpu = link.source if link.source != "memory" else link.target
                slow.setdefault((link.host, gpu), []).append((ratio, link, comparable))
    for (host, gpu), copies in slow.items():
        ratio, link, comparable = min(copies, key=lambda copy: copy[0])
        hosts = shown_hosts(tuple(dict.fromkeys(each.host for each in comparable)))
        rate, path = link.bandwidth_bytes_per_second, link.path or "copy"
        more = f", and {len(copies) - 1} more of its copies" if len(copies) > 1 else ""
        yield Finding(
            kind="slow_copies", severity="warning",
            what=f"{host}: {link.source} to {link.target} ({path}) at {ratio:.0%} of the median{more}",
            evidence=f"{format_rate(rate)}, median {format_rate(rate / ratio)} of {len(comparable)} comparable copies on {hosts}",
            advice=f"nvidia-smi -q -i {gpu[3:]}: check link width and generation under load, replays, throttling and other users",
            hosts=(host,), ratio=ratio, loss=0.2 * (1 - ratio),
        )  # fmt: skip


def _comparable_copies(inputs: DiagnosisInputs) -> list[list[IntraNodeLinkMeasurement]]:
    """Group copies by the GPUs' names, the path and the direction.

    Pairs of GPUs have different numbers of NVLinks: each is compared with the same pair of other hosts. Copies within host
    memory are left out, as CPUs differ.
    """
    names = {(host, f"gpu{gpu.index}"): gpu.name for host, each in inputs.facts.items() for gpu in each.gpus}
    groups: dict[tuple[str, ...], list[IntraNodeLinkMeasurement]] = {}
    for link in inputs.copies:
        ends = tuple(end if end == "memory" else names.get((link.host, end), "") for end in (link.source, link.target))
        if "" in ends or ends == ("memory", "memory"):
            continue
        pair = (link.source, link.target) if "memory" not in ends and link.source != link.target else ()
        groups.setdefault((*ends, *pair, link.path or ""), []).append(link)
    return list(groups.values())


GPU_CHECKS = (_find_gpudirect_without_gain, _find_narrow_pcie, _find_slow_gpu_copies)
