"""Findings about NICs, MTUs, RDMA ports and further networks."""

from __future__ import annotations

import pytest
from msgspec import structs

from distrib.cluster.inventory import Interface, RdmaPort
from distrib.cluster.node import Nic
from distrib.probe import stages
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.host_facts import ports_of_job, used_ports
from distrib.probe.records import GpuPcieLink, HostFacts, PairMeasurement, ProbeStarted
from distrib.probe.secondary_networks import other_networks
from distrib.probe.settings import DEFAULT, QUICK
from tests.support.simulated_network import MB, Network, address, facts, two_nics


def test_a_further_network_without_any_connection_is_no_finding():
    records = Network(4).records(DEFAULT, tuple(two_nics(n, 9, "eth9") for n in range(1, 5)))
    names = [f"n{number}" for number in range(1, 5)]
    other = [
        PairMeasurement(stage="other/0", source=a, target=b, transport="tcp", load="together", network="10.9.0.0/16", interface="eth9",
                 failed=f"{b}: no connection in 2 s")
        for a in names for b in names if a != b
    ]  # fmt: skip
    assert check_records([*records, *other]) == ()
    some = [structs.replace(other[0], failed=None, bandwidth_bytes_per_second=119.5 * MB), *other[1:2]]
    assert [(f.kind, f.severity) for f in check_records([*records, *some])] == [("not_measured", "warning")]


def test_a_faster_network_of_some_hosts_is_reported_with_the_hosts_that_lack_it():
    own = two_nics(1, 1), two_nics(2, 1), facts("n3")
    faster = [
        PairMeasurement(stage="alone/10.1.0.0/16/0", source=a, target=b, transport="tcp", load="alone", network="10.1.0.0/16", interface="eth1",
                 bandwidth_bytes_per_second=240 * MB, variation=0.01, repetitions=10, seconds=0.1)
        for a, b in (("n1", "n2"), ("n2", "n1"))
    ]  # fmt: skip
    (found,) = check_records([*Network(3, noise=0.002).records(QUICK, own), *faster])
    assert found.kind == "wrong_interface" and found.advice.startswith("bring up the NICs of n3 on it, or leave")


def test_a_different_mtu_and_a_narrow_pcie_slot_are_findings():
    jumbo = Interface(name="eth0", mtu=9000, speed_bytes_per_second=125 * MB)
    gpu = GpuPcieLink(
        index=3, name="H100", pcie_generation=5, pcie_generation_possible=5, pcie_width=4, pcie_width_possible=16
    )
    said = (facts("n1"), facts("n2", interfaces=(jumbo,)), facts("n3", gpus=(gpu,)), facts("n4"))
    found = check_records(Network(4).records(facts=said))
    assert {(f.kind, f.hosts) for f in found} == {("mtu", ("n2",)), ("narrow_pcie", ("n3",))}


@pytest.mark.parametrize(("mtus", "told"), [
    ((1500, 9000), {"n1: MTU 1500, other hosts have 9000"}),
    ((9000, 9000, 1500, 1500), {"n3: MTU 1500, other hosts have 9000", "n4: MTU 1500, other hosts have 9000"}),
    ((9000, 1500, 1500), {"n1: MTU 9000, most hosts have 1500"}),
])  # fmt: skip
def test_the_most_common_mtu_is_the_reference_except_in_a_tie(mtus, told):
    said = tuple(facts(f"n{n + 1}", interfaces=(Interface(name="eth0", mtu=mtu),)) for n, mtu in enumerate(mtus))
    found = check_records(Network(len(mtus)).records(facts=said))
    assert {f.what for f in found} == told
    assert all(f.advice.startswith("ip link set" if "most" in f.what else "set one MTU on all hosts") for f in found)


def test_mpi_over_tcp_beside_infiniband_is_a_wrong_interface():
    """MPI may lack the RDMA libraries. The finding prevents a comparison of its rate with that of the ports."""
    said = tuple(facts(f"n{n}", rdma_bytes_per_second=25e9, mpi_over_rdma=n != 2) for n in (1, 2, 3))
    (found,) = check_records(Network(3).records(facts=said))
    assert (found.kind, found.severity, found.hosts) == ("wrong_interface", "warning", ("n2",))
    assert found.what.startswith("n2: MPI uses TCP")


def test_other_networks_are_found_by_their_subnets():
    def interface(name, text, **said):
        return Interface(**{"name": name, "up": True, "kind": "physical", "addresses": (text,), **said})

    hosts = [
        facts(
            f"n{n}",
            interfaces=(
                interface("eth0", address(n, 0)),
                interface("ib0" if n < 3 else "ib9", address(n, 1)),  # names differ, the subnet is the same
                interface("docker0", "172.17.0.1/16", kind="bridge"),
                interface("eth8", "192.168.0.7/24"),  # same address on every host: these NICs do not reach each other
                interface("eth9", address(n, 2), up=False),
                interface("own", address(n, 10 + n)),
            ),
        )
        for n in (1, 2, 3)
    ]
    (network,) = other_networks(hosts)
    assert network.name == "10.1.0.0/16"
    assert network.nics == {"n1": ("ib0", "10.1.0.1"), "n2": ("ib0", "10.1.0.2"), "n3": ("ib9", "10.1.0.3")}
    planned = stages.plan_stages(3, DEFAULT, "tcp", (network.name,))
    pairs = sorted(pair for step in planned if step.network == network.name for phase in step.phases for pair in phase)
    assert pairs == [(a, b) for a in range(3) for b in range(3) if a != b]


def two_networks(rates, hosts=4, gbits=10):
    """Return records of hosts with a second NIC, whose pairs have these rates in one direction."""
    said = tuple(
        facts(
            f"n{n}",
            interfaces=tuple(
                Interface(name=f"eth{net}", kind="physical", mtu=1500, addresses=(address(n, net),),
                          speed_bytes_per_second=(gbits if net else 1) * 125 * MB)
                for net in (0, 1)
            ),
        )
        for n in range(1, hosts + 1)
    )  # fmt: skip
    over_second_nic = [
        PairMeasurement(stage="alone/10.1.0.0/16/0", source=f"n{a}", target=f"n{b}", transport="tcp", load="alone", network="10.1.0.0/16",
                 interface="eth1", bandwidth_bytes_per_second=rates(a, b), variation=0.01, repetitions=10, seconds=0.1)
        for a in range(1, hosts + 1) for b in range(a + 1, hosts + 1)
    ]  # fmt: skip
    return [*Network(hosts, noise=0.002).records(QUICK, said), *over_second_nic]


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
def test_a_quick_probe_finds_a_slow_nic_of_a_further_network(slow):
    found = check_records(two_networks(lambda a, b: (60 if slow in (a, b) else 118) * MB, gbits=1))
    assert [(f.kind, f.hosts) for f in found] == [("slow_host", (f"n{slow}",))]
    assert found[0].what.startswith(f"n{slow}: slow link: runs at 51%")
    assert found[0].what.endswith(f"(on 10.1.0.0/16, n{slow}'s eth1)")


def test_a_nic_measured_only_as_a_target_counts_as_measured():
    found = check_records(two_networks(lambda a, b: 1100 * MB))
    assert [f.what for f in found] == ["10.1.0.0/16 is faster than the network that is used"]


def ethernet(gbits):
    interface = Interface(name="eth0", mtu=1500, speed_bytes_per_second=gbits * 125 * MB)
    return (interface,)


def test_a_nic_below_its_nominal_rate_is_a_finding():
    said = tuple(facts(f"n{n}", interfaces=ethernet(10)) for n in (1, 2, 3))
    found = check_records(Network(3).records(facts=said))
    assert [(f.kind, f.hosts) for f in found] == [("below_nominal", ("n1", "n2", "n3"))]  # a limit common to all hosts
    assert "of 10 Gb/s" in found[0].evidence and "provider" in found[0].advice
    unequal = Network(3, slow={0: 0.8}).records(facts=said)
    assert {f.hosts for f in check_records(unequal) if f.kind == "below_nominal"} == {(f"n{n}",) for n in (1, 2, 3)}
    said = (said[0], *(facts(f"n{n}", interfaces=ethernet(1)) for n in (2, 3)))  # the other hosts' NICs have this limit
    assert check_records(Network(3).records(facts=said)) == ()


@pytest.mark.parametrize(
    ("gbits", "part", "told"),
    [(25, 0.85, False), (50, 0.55, False), (100, 0.4, False), (100, 0.2, True), (400, 0.1, False)],
)
def test_a_nic_is_compared_with_the_usual_tcp_rate_of_its_speed(gbits, part, told):
    said = tuple(facts(f"n{n}", interfaces=ethernet(gbits)) for n in (1, 2, 3, 4))
    network = Network(4, rate=part * gbits * 125 * MB)
    assert {f.kind for f in check_records(network.records(DEFAULT, facts=said))} == (
        {"below_nominal"} if told else set()
    )


def test_rdma_is_compared_with_one_of_the_fastest_ports_of_one_kind():
    def port(gbits, layer, active=True):
        return RdmaPort(device="mlx5", port=1, link_layer=layer, active=active, rate_bytes_per_second=gbits * 125 * MB)

    hdr, login = [port(200, "InfiniBand")] * 8, [port(100, "Ethernet"), port(25, "Ethernet")]
    assert used_ports([*login, *hdr, port(400, "InfiniBand", active=False)]) == tuple(hdr)
    assert used_ports(login) == (login[0],)
    assert ports_of_job(hdr, {}) == tuple(hdr)
    named = {"NCCL_IB_HCA": f"={hdr[0].device}:1"}
    assert ports_of_job(hdr, named) == tuple(port for port in hdr if port.device == hdr[0].device)
    assert ports_of_job(hdr, {"NCCL_IB_DISABLE": "1", **named}) == ()
    said = tuple(
        facts(f"n{n}", rdma_bytes_per_second=8 * 25e9, rdma_ports=8, rdma_kind="infiniband") for n in range(1, 5)
    )
    for rate, kinds in ((23e9, set()), (46e9, set()), (12e9, {"below_nominal"})):
        records = Network(4, rate=rate).records(DEFAULT, facts=said)
        over_mpi = [structs.replace(r, primary="mpi") if isinstance(r, ProbeStarted) else structs.replace(r, transport="mpi") if
                    isinstance(r, PairMeasurement) else r for r in records]  # fmt: skip
        assert {f.kind for f in check_records(over_mpi)} == kinds


@pytest.mark.parametrize("mode", [QUICK, DEFAULT])
def test_hosts_with_slower_nics_are_a_note_and_a_slow_host_among_them_is_an_error(mode):
    slow = dict.fromkeys((0, 2, 7), 0.25)
    said = tuple(facts(f"n{n + 1}", interfaces=ethernet(0.25 if n in slow else 1)) for n in range(8))
    (found,) = check_records(Network(8, noise=0.005, slow=slow).records(mode, facts=said))
    assert (found.kind, found.severity, found.hosts) == ("mixed_nics", "note", ("n1", "n3", "n8"))
    for worse, ratio in ((2, 0.5), (1, 0.6)):  # the slow NICs, then the fast NICs
        found = check_records(
            Network(8, noise=0.005, slow={**slow, worse: slow.get(worse, 1.0) * ratio}).records(mode, facts=said)
        )
        (host,) = [f for f in found if f.kind == "slow_host"]
        assert (host.hosts, host.severity) == ((f"n{worse + 1}",), "error")
        assert host.ratio == pytest.approx(ratio, abs=0.03)
    unknown = (*said[:1], facts("n2", interfaces=()), *said[2:])  # then all hosts are in one class
    found = check_records(Network(8, noise=0.005, slow=slow).records(mode, facts=unknown))
    assert {f.hosts for f in found if f.kind == "slow_host"} == {("n1",), ("n3",), ("n8",)}


def test_a_single_nic_that_negotiated_a_lower_rate_is_a_warning():
    said = tuple(facts(f"n{n}", interfaces=ethernet(0.1 if n == 3 else 1)) for n in range(1, 6))
    found = check_records(Network(5, slow={2: 0.1}).records(facts=said))
    assert [(f.kind, f.severity, f.hosts) for f in found] == [("mixed_nics", "warning", ("n3",))]


@pytest.mark.parametrize("gbits", [(25, 10), (10, 25)])
def test_the_slower_of_two_nics_is_the_finding(gbits):
    said = tuple(facts(f"n{n + 1}", interfaces=ethernet(rate)) for n, rate in enumerate(gbits))
    found = [f for f in check_records(Network(2).records(facts=said)) if f.kind == "mixed_nics"]
    slower = gbits.index(10) + 1
    assert [f.what for f in found] == [f"n{slower}: NIC rate 10 Gb/s, other hosts have 25 Gb/s"]


def described_network(nics, name="eth0"):
    facts = tuple(
        HostFacts(
            host=f"n{i}",
            address=f"10.0.0.{i}",
            interface=name,
            cpus=2,
            interfaces=(Interface(name=name, kind="veth"),),
        )
        for i in (1, 2, 3)
    )
    (nic,) = (Nic(**nics),)
    records = Network(3).records(facts=facts)
    return check_records(records, {f"n{i}": (nic,) for i in (1, 2, 3)})


def test_links_are_compared_with_the_rate_of_the_topology_file():
    """A virtual NIC reports no rate, or a wrong one. 955 Mb/s is full 1 GbE, and a tenth of 10 GbE."""
    assert described_network({"name": "eth0", "rate": "1GbE"}) == ()
    found = described_network({"name": "eth0", "rate": "10GbE"})
    assert [(f.kind, f.hosts) for f in found] == [("below_nominal", ("n1", "n2", "n3"))]
    assert all(f.ratio == pytest.approx(0.1, abs=0.02) for f in found)


def test_a_nic_that_only_the_topology_file_has_is_a_note():
    (found,) = described_network({"name": "ens5", "rate": "1GbE"})
    assert (found.kind, found.severity, found.hosts) == ("unknown_nic", "note", ("n1", "n2", "n3"))
    assert "ens5" in found.what and "eth0" in found.evidence


@pytest.mark.parametrize(("nic", "told"), [
    ({"name": "mlx5_0", "kind": "InfiniBand", "rate": "100Gb/s"}, set()),  # behind a switch slower than the NIC
    ({"name": "mlx5_0", "kind": "InfiniBand", "rate": "200Gb/s"}, {"below_nominal"}),
    ({"name": "ens1", "kind": "Ethernet", "rate": "10Gb/s"}, {"below_nominal", "unknown_nic"}),
    ({"name": "eth0", "kind": "Ethernet", "rate": "1GbE"}, {"below_nominal"}),
])  # fmt: skip
def test_links_over_rdma_are_compared_with_the_rate_of_the_topology_file(nic, told):
    said = tuple(facts(f"n{n}", rdma_bytes_per_second=25e9, rdma_kind="infiniband") for n in (1, 2, 3))
    records = [
        structs.replace(record, primary="mpi")
        if isinstance(record, ProbeStarted)
        else structs.replace(record, transport="mpi")
        for record in Network(3, rate=11.5e9).records(DEFAULT, facts=said)
        if isinstance(record, (ProbeStarted, PairMeasurement))
    ]
    found = check_records(records, {f"n{n}": (Nic(**nic),) for n in (1, 2, 3)})
    assert {finding.kind for finding in found} == told


@pytest.mark.parametrize(("name", "kind", "told"), [
    ("mlx5_0", "RoCE", False), ("mlx5_0:1", "RoCE", False), ("eth0", "RoCE", False), ("mlx5_1", "RoCE", True), ("ens9", "RoCE", True),
    ("mlx5_1", "InfiniBand", False),
])  # fmt: skip
def test_a_roce_nic_that_only_the_topology_file_has_is_a_finding(name, kind, told):
    said = tuple(facts(f"n{n}", rdma_devices=("mlx5_0",)) for n in (1, 2, 3))
    nic = Nic(name=name, kind=kind, rate="100Gb/s")
    found = check_records(Network(3).records(facts=said), {f"n{n}": (nic,) for n in (1, 2, 3)})
    assert ("unknown_nic" in {finding.kind for finding in found}) == told


def test_a_nic_whose_carrier_changed_often_is_a_note():
    def changed_carrier(changes):
        return (Interface(name="eth0", mtu=1500, carrier_changes=changes),)

    said = tuple(facts(f"n{n}", interfaces=changed_carrier(400 if n == 2 else 3)) for n in (1, 2, 3, 4))
    (found,) = check_records(Network(4).records(facts=said))
    assert (found.kind, found.severity, found.hosts) == ("noisy_link", "note", ("n2",))
    assert "400 times" in found.what
    often = tuple(
        facts(f"n{n}", interfaces=changed_carrier(300 + n)) for n in (1, 2, 3, 4)
    )  # each host boots several times
    assert check_records(Network(4).records(facts=often)) == ()


@pytest.mark.parametrize(
    ("worst", "failed", "told"),
    [(300 * MB, None, True), (1 * MB, None, False), (0.0, "n2: no connection in 2 s", False)],
)
def test_a_further_network_is_recommended_if_its_worst_pair_is_faster(worst, failed, told):
    names = ("n1", "n2", "n3")
    over_second_nic = [
        PairMeasurement(stage="alone/10.1.0.0/16/0", source=a, target=b, transport="tcp", load="alone", network="10.1.0.0/16", interface="eth1",
                 bandwidth_bytes_per_second=worst if "n2" in (a, b) else 400 * MB, variation=0.01, repetitions=10, seconds=0.1,
                 failed=failed if "n2" in (a, b) else None)
        for a in names for b in names if a != b
    ]  # fmt: skip
    said = tuple(two_nics(number, 1) for number in (1, 2, 3))
    kinds = {
        finding.kind for finding in check_records([*Network(3, noise=0.002).records(QUICK, said), *over_second_nic])
    }
    assert ("wrong_interface" in kinds) == told, kinds
