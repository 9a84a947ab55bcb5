"""Rules of thumb for the hardware of a host."""

from __future__ import annotations

from distrib.cluster.hardware_checks import check_hardware
from distrib.cluster.topology import parse_topology, read_topology
from tests.support.topologies import EXAMPLES, NODE


def test_rules_of_thumb_that_a_host_breaks_are_listed():
    text = NODE + (
        "    gpus: {kind: RTX 4090, count: 4}\n    memory: 128GiB\n    cores: 2\n    links: {pcie: PCIe4 x4}\n"
        "    nics: [{name: ib0, rate: NDR, gpudirect: no, pcie: PCIe4 x16}]\n"
    )
    rules = {rule.rule: rule for rule in check_hardware(parse_topology(text, "t").nodes[0])}
    assert not any(rule.kept for rule in rules.values())
    assert "PCIe4 x4" in rules["PCIe"].text and "PCIe4 x16" in rules["PCIe"].text
    assert "ib0 supports 400 Gb/s" in rules["NIC slots"].text
    assert "nvidia_peermem" in rules["GPUDirect"].text
    assert check_hardware(parse_topology(NODE, "t").nodes[0]) == ()
    assert all(rule.kept for rule in check_hardware(read_topology(EXAMPLES / "h100-ndr.yaml").nodes[0]))
