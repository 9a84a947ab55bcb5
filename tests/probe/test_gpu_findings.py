"""Findings about GPUs: copies, NVLinks, PCIe slots, GPUDirect."""

from __future__ import annotations

import pytest
from msgspec import structs

from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, Point
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.records import CollectiveMeasurement, GpuLinkStates, GpuPcieLink, IntraNodeMeasurement
from tests.support.simulated_network import Network, facts


@pytest.mark.parametrize(("gain", "told"), [(1.9, False), (1.2, False), (1.0, True), (0.9, True)])
def test_gpudirect_without_gain_is_a_note(gain, told):
    def curve(gpudirect, seconds, hosts=2):
        points = (Point(1 << 20, 1.0), Point(64 << 20, seconds))
        names = tuple(f"n{n + 1}" for n in range(hosts))
        return Collective(
            name="all_reduce", backend="nccl", hosts=names, ranks=8 * hosts, gpudirect=gpudirect, curve=points
        )

    def gain_findings(collectives):
        records = [*Network(2).records(), *(CollectiveMeasurement(collective=each) for each in collectives)]
        return [finding for finding in check_records(records) if finding.kind == "gpudirect_off"]

    few = [curve(True, 1.0), curve(False, 1.0)]  # fewer hosts than the job has
    found = gain_findings([*few, curve(True, 1.0, 4), curve(False, gain, 4)])
    # GPUDirect may bring no gain: host memory keeps up with a single NIC.
    assert [(f.kind, f.severity, f.ratio) for f in found] == ([("gpudirect_off", "note", gain)] if told else [])
    assert gain_findings([curve(None, 1.0)]) == gain_findings([]) == []


def copies(host, rates, path="PCIe"):
    return [
        IntraNodeMeasurement(link=IntraNodeLinkMeasurement(host=host, source="memory", target=f"gpu{n}", path=path,
                                                  bandwidth_bytes_per_second=rate, variation=0.01))
        for n, rate in enumerate(rates)
    ]  # fmt: skip


def test_a_gpu_with_slow_copies_is_a_finding():
    h100, t4 = (tuple(GpuPcieLink(index=n, name=name) for n in range(4)) for name in ("H100", "T4"))
    said = (facts("n1", gpus=h100), facts("n2", gpus=h100), facts("n3", gpus=t4))
    records = Network(3).records(facts=said)
    assert (
        check_records([*records, *copies("n1", [54e9] * 4), *copies("n2", [54e9] * 4), *copies("n3", [12e9] * 4)]) == ()
    )
    found = check_records([*records, *copies("n1", [54e9] * 4), *copies("n2", [54e9, 54e9, 13e9, 54e9])])
    assert [(f.kind, f.severity, f.hosts) for f in found] == [("slow_copies", "warning", ("n2",))]
    assert "n2: memory to gpu2 (PCIe) at 24%" in found[0].what
    assert "8 comparable copies on n[1-2]" in found[0].evidence


def test_pairs_with_fewer_nvlinks_than_others_are_not_slow():
    mesh = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}  # pairs with two links in a DGX-1
    said = tuple(facts(f"n{n}", gpus=tuple(GpuPcieLink(index=g, name="V100") for g in range(8))) for n in range(1, 5))

    def between(host, slow=None):
        return [
            IntraNodeMeasurement(link=IntraNodeLinkMeasurement(
                host=host, source=f"gpu{a}", target=f"gpu{b}", path="NVLink", variation=0.01,
                bandwidth_bytes_per_second=(48e9 if (a, b) in mesh else 24e9) * (0.5 if (a, b) == slow else 1.0)))
            for a in range(8) for b in range(a + 1, 8)
        ]  # fmt: skip

    records = [*Network(4).records(facts=said), *between("n1"), *between("n2"), *between("n3")]
    assert check_records([*records, *between("n4")]) == ()
    (found,) = check_records([*records, *between("n4", slow=(2, 3))])
    assert (found.kind, found.hosts) == ("slow_copies", ("n4",)) and "gpu2 to gpu3 (NVLink)" in found.what


def test_a_narrow_pcie_slot_is_judged_by_the_link_of_a_busy_gpu():
    """An idle GPU reduces the speed of its PCIe link."""
    idle = GpuPcieLink(
        index=0, name="RTX 4090", pcie_generation=1, pcie_generation_possible=4, pcie_width=8, pcie_width_possible=16
    )
    records = Network(2).records(facts=(facts("n1", gpus=(idle,)), facts("n2")))
    assert check_records(records) == ()
    used = structs.replace(idle, pcie_generation=4)
    assert [f.kind for f in check_records([*records, GpuLinkStates(host="n1", gpus=(used,))])] == ["narrow_pcie"]
    assert check_records([*records, GpuLinkStates(host="n1", gpus=(structs.replace(used, pcie_width=16),))]) == ()
