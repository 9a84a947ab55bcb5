"""Links between hosts and inside a host: catalogued, measured, oversubscribed."""

from __future__ import annotations

import pytest

from distrib.cluster import data_nics, uplinks
from distrib.cluster.link_spec import parse_bus_link
from distrib.cluster.links import intra_node_link, link_between
from distrib.cluster.measurements import IntraNodeLinkMeasurement
from distrib.cluster.measurements_io import encode_measured
from distrib.cluster.topology import parse_topology, read_topology
from distrib.cluster.uplinks import switch_oversubscription
from tests.support.topologies import EXAMPLES, NODE, dgx_and_old_hosts, measured, pair


def test_the_link_between_hosts_uses_their_fastest_common_nics():
    link = link_between(dgx_and_old_hosts(), "dgx01", "dgx02")
    assert link.text == "8 x HDR" and link.rate_bytes_per_second == 200e9 and link.gpudirect is True
    assert link.kind == "infiniband" and len(link.nics) == 8 and link.switches == ("rack1",)
    assert link.bandwidth_bytes_per_second == pytest.approx(190e9) and link.origin == "catalogued"
    assert link.oversubscription == 1
    across = link_between(dgx_and_old_hosts(), "dgx01", "dgx03")
    assert across.oversubscription == 2 and across.switches == ("rack1", "spine", "rack2")
    assert across.shared_bandwidth_bytes_per_second == pytest.approx(95e9)
    slow = parse_topology(
        "nodes: [{hosts: 'a[1-4]', nics: [{name: e, rate: 100GbE}]}]\nswitches:\n"
        "  - {name: r1, hosts: 'a[1-2]', uplink: 100Gb/s}\n  - {name: r2, hosts: 'a[3-4]'}\n",
        "t",
    )
    link = link_between(slow, "a1", "a3")  # TCP is below half of the NIC rate: two pairs do not fill the uplink
    assert link.oversubscription == 2
    assert link.shared_bandwidth_bytes_per_second == link.bandwidth_bytes_per_second < 6.25e9
    wide = parse_topology(
        "nodes: [{hosts: 'a[1-2]', nics: [{name: e, rate: 10GbE}]}]\nswitches:\n"
        "  - {name: r1, hosts: 'a[1-2]', uplink: 100Gb/s}\n  - {name: up, switches: [r1], uplink: 20Gb/s}\n",
        "t",
    )  # the uplink carries no more than its hosts send
    assert [switch_oversubscription(wide, switch) for switch in wide.switches] == [1, 1]
    mixed = link_between(dgx_and_old_hosts(), "dgx01", "old1")
    assert mixed.kind == "ethernet" and mixed.nics == ("eno1",) and mixed.rate_bytes_per_second == 1.25e9
    assert link_between(parse_topology("nodes: [{hosts: 'n[1-2]'}]", "t"), "n1", "n2") is None


def test_the_rate_of_an_uplink_gives_its_oversubscription():
    topology = read_topology(EXAMPLES / "mixed-gpus.yaml")
    found = {switch.name: switch_oversubscription(topology, switch) for switch in topology.switches}
    assert found == {"new rack": pytest.approx(1.2), "old rack": 2.0, "core": 1.0}


def test_rates_of_equal_hosts_are_computed_once_for_many_links(monkeypatch):
    """Hosts of one kind have identical NICs. The model computes their rate once, not for each pair."""
    asked = []
    own = data_nics.data_nics
    for module in (data_nics, uplinks):
        monkeypatch.setattr(module, "data_nics", lambda nics: asked.append(1) or own(nics))
    text = "nodes: [{hosts: 'n[1-40]', nics: [{name: 'm[0-7]', rate: HDR}]}]\nswitches:\n"
    text += "  - {name: a, hosts: 'n[1-20]', uplink: 2 x HDR}\n  - {name: b, hosts: 'n[21-40]', uplink: 4 x HDR}\n"
    topology = parse_topology(text, "t")
    found = {(a, b): link_between(topology, a, b) for a in topology.hosts for b in topology.hosts if a != b}
    assert found["n1", "n2"].oversubscription == 1 and found["n1", "n40"].oversubscription == 80
    assert len(asked) < 100


def test_a_pair_measured_only_together_has_that_bandwidth():
    def pair(source: str, target: str, load: str, rate: float) -> str:
        return f"{{source: {source}, target: {target}, way: tcp, load: {load}, bandwidth_bytes_per_second: {rate}, variation: 0.0}}"

    pairs = [pair("a", "b", "together", 1e8), pair("a", "c", "together", 9e7), pair("c", "a", "alone", 1.1e8)]
    text = "nodes: [{hosts: 'a,b,c'}]\nmeasured:\n  when: '2026-01-01T00:00:00Z'\n  software: {}\n  hosts: [a, b, c]\n"
    topology = parse_topology(text + f"  pairs: [{', '.join(pairs)}]\n", "t")
    assert link_between(topology, "b", "a").bandwidth_bytes_per_second == 1e8
    assert link_between(topology, "a", "c").bandwidth_bytes_per_second == 1.1e8
    assert link_between(topology, "b", "c") is None


def test_a_narrow_pcie_slot_limits_its_nic():
    text = "nodes: [{hosts: 'n[1-2]', nics: [{name: e, rate: HDR, pcie: PCIe3 x4}]}]"
    link = link_between(parse_topology(text, "t"), "n1", "n2")
    assert link.bandwidth_bytes_per_second == parse_bus_link("PCIe3 x4").usable_bytes_per_second


def test_links_inside_a_host_are_nvlink_or_pcie():
    switched = intra_node_link(dgx_and_old_hosts(), "dgx01", "gpu0", "gpu7")
    assert switched.text == "NVLink3 x12" and switched.rate_bytes_per_second == 300e9
    assert intra_node_link(dgx_and_old_hosts(), "dgx01", "memory", "gpu0").text == "PCIe4 x16"
    assert intra_node_link(dgx_and_old_hosts(), "dgx01", "gpu0", "gpu8") is None
    assert intra_node_link(dgx_and_old_hosts(), "old1", "gpu0", "gpu1").text == "PCIe3 x16"  # in the catalogue
    mesh = read_topology(EXAMPLES / "dgx1-v100-edr.yaml")
    assert intra_node_link(mesh, "dgx1-01", "gpu0", "gpu3").text == "NVLink2 x2"
    assert intra_node_link(mesh, "dgx1-01", "gpu3", "gpu0").rate_bytes_per_second == 50e9
    assert intra_node_link(mesh, "dgx1-01", "gpu0", "gpu7").text == "PCIe3 x16"
    four = parse_topology(NODE + "    gpus: {count: 4}\n    links: {nvlink: NVLink3 x12}", "t")
    assert intra_node_link(four, "a", "gpu1", "gpu2").text == "NVLink3 x4"


def test_measured_links_take_precedence_over_catalogued_ones():
    found = measured(
        pair("dgx01", "dgx02", 11e9),
        pair("dgx01", "dgx02", 12e9, transport="tcp", latency_seconds=3e-5),
        pair("dgx01", "dgx02", 99e9, load="together"),
        pair("dgx01", "dgx02", 99e9, both_ways=True),
        inside=(
            IntraNodeLinkMeasurement(
                host="dgx01", source="gpu0", target="gpu1", bandwidth_bytes_per_second=5e9, variation=0.0
            ),
        ),
    )
    topology = dgx_and_old_hosts(encode_measured(found))
    assert topology.measured == found
    link = link_between(topology, "DGX01", "dgx02")
    assert (link.origin, link.bandwidth_bytes_per_second, link.latency_seconds) == ("measured", 12e9, 3e-5)
    assert link.rate_bytes_per_second == 200e9
    back = link_between(topology, "dgx02", "dgx01")  # a measurement of the other direction is better than a data sheet
    assert back.origin == "measured"
    assert link_between(topology, "dgx01", "dgx03").origin == "catalogued"
    inside = intra_node_link(topology, "dgx01", "gpu0", "gpu1")
    assert (inside.origin, inside.bandwidth_bytes_per_second) == ("measured", 5e9)
    several = dgx_and_old_hosts(
        encode_measured(measured(*(pair("dgx01", "dgx02", 20e9, interface=f"mlx5_{n}") for n in range(4))))
    )
    assert link_between(several, "dgx01", "dgx02").bandwidth_bytes_per_second == 80e9


@pytest.mark.parametrize(
    ("transport", "interface", "text", "rate"),
    [
        ("tcp", "eno1", "TCP on eno1", None),  # MPI could not use the NICs of the file
        ("tcp", "mlx5_0", "8 x HDR", 200e9),
        ("tcp", None, "8 x HDR", 200e9),  # a file of an older probe
        ("mpi", "eno1", "8 x HDR", 200e9),  # MPI uses the RDMA NICs
    ],
)
def test_a_measured_link_is_named_after_the_nics_that_carried_it(transport, interface, text, rate):
    found = measured(pair("dgx01", "dgx02", 1.1e9, transport=transport, interface=interface))
    seen = link_between(dgx_and_old_hosts(encode_measured(found)), "dgx01", "dgx02")
    assert (seen.text, seen.rate_bytes_per_second, seen.bandwidth_bytes_per_second) == (text, rate, 1.1e9)
    ethernet = measured(pair("dgx01", "old1", 1.1e9, transport="tcp", interface="bond0"), hosts=("dgx01", "old1"))
    assert link_between(dgx_and_old_hosts(encode_measured(ethernet)), "dgx01", "old1").text == "10 GbE"
