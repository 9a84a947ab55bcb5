"""Bottlenecks of a predicted step: links, uplinks, latency, slow ranks."""

from __future__ import annotations

import msgspec
import pytest

from distrib.bandwidth_model import workload_catalog
from distrib.bandwidth_model.bottleneck import slowest_between_hosts, slowest_inside_host
from distrib.bandwidth_model.fabric import find_fabric
from distrib.bandwidth_model.scaling import find_needed_network, predict_limit, predict_step
from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, LinkMeasurement, Measurements, Point
from distrib.cluster.topology import parse_topology
from tests.conftest import ROOT
from tests.support.predicted_jobs import LAB, POD, job, lab


def test_the_limiting_link_is_named_with_the_bandwidth_it_would_need():
    told = predict_step(lab(), job(), hosts=4, ranks_per_host=2)
    assert told.efficiency < 0.8
    assert told.cap.link == "n1-n2, 10 GbE"
    assert told.cap.bandwidth_bytes_per_second == pytest.approx(1.1375e9)
    wanted = find_needed_network(lab(), job(), hosts=4, ranks_per_host=2, efficiency=0.9).bytes_per_second
    assert wanted == told.cap.needed_bytes_per_second
    # A link of exactly this rate. Ethernet between 25 and 40 Gb/s uses 90 % of it.
    rate = f"'{wanted * 8e-6 / 0.9:.3f}Mb/s', kind: Ethernet"
    again = predict_step(lab(rate), job(), hosts=4, ranks_per_host=2)
    assert again.efficiency == pytest.approx(0.9, abs=0.005)


def test_a_fast_link_is_no_limit():
    assert (
        predict_step(parse_topology(POD, "pod"), job(megabytes=20, device="V100"), hosts=8, ranks_per_host=8).cap
        is None
    )


def test_the_slowest_link_of_unequal_hosts_is_the_limit():
    text = LAB.replace("n[1-4]", "n[1-2],n4").replace("RATE", "10 GbE")
    slow = "  - {hosts: n3, gpus: {kind: RTX A6000, count: 2}, nics: [{name: eno1, rate: 1 GbE}]}\n"
    told = predict_step(parse_topology(text + slow, "x"), job(), hosts=["n1", "n2", "n3", "n4"], ranks_per_host=2)
    assert told.cap.link == "n2-n3, 1 GbE"


def test_a_measured_link_does_not_remove_staging_through_host_memory():
    """Probe measured transfers from host memory, not from GPU memory."""
    text = LAB.replace("rate: RATE", "rate: HDR, gpudirect: no")
    pair = '{"source": "%s", "target": "%s", "way": "mpi", "load": "alone", "bandwidth_bytes_per_second": 23.0e9, "variation": 0.0}'
    pairs = "".join(f"    - {pair % (a, b)}\n" for a, b in (("n1", "n2"), ("n2", "n1")))
    measured = f'measured:\n  when: "now"\n  software: {{}}\n  hosts: ["n1", "n2"]\n  pairs:\n{pairs}'
    staged = find_fabric(parse_topology(text + measured, "x"), job(), 2, 1).network
    assert staged.text.endswith("through host memory")
    assert staged.bytes_per_second == find_fabric(parse_topology(text, "x"), job(), 2, 1).network.bytes_per_second


def test_staging_through_host_memory_halves_the_bus():
    """100 Gb/s InfiniBand carries 6 of 12 GB/s without GPUDirect RDMA (NVIDIA/nccl#465)."""
    text = POD.replace("mlx5_[0-3]", "mlx5_0")
    direct = find_fabric(parse_topology(text, "x"), job(device="V100"), 2, 8).network
    staged = find_fabric(
        parse_topology(text.replace("gpudirect: yes", "gpudirect: no"), "x"), job(device="V100"), 2, 8
    ).network
    assert direct.bytes_per_second == pytest.approx(12.07e9, rel=0.01)
    assert staged.bytes_per_second == pytest.approx(6e9, rel=0.01)


def test_the_narrowest_part_of_a_link_is_named():
    racks = 'switches: [{name: r1, hosts: "a[1-4]", uplink: 25Gb/s}, {name: r2, hosts: "a[5-8]", uplink: 50Gb/s}]'
    told = predict_step(parse_topology(POD + racks, "x"), job(1000, device="V100"), hosts=8, ranks_per_host=8)
    assert told.cap.link == "a4-a5, uplink of r1, 25Gb/s"
    assert told.cap.bandwidth_bytes_per_second == pytest.approx(0.95 * 25e9 / 8)  # the usable fraction, as with a ratio
    assert find_fabric(parse_topology(POD + racks, "x"), job(device="V100"), 4, 8).network.name == "a1-a2, 4 x EDR"
    staged = predict_step(parse_topology(POD.replace("gpudirect: yes", "gpudirect: no").replace("[0-3]", "0"), "x"),
                      job(1000, device="V100"), hosts=2, ranks_per_host=8)  # fmt: skip
    assert staged.cap.link == "a1-a2, EDR through host memory"


@pytest.mark.parametrize("ranks", [2, [2, 2, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 2]])
def test_the_slowest_intra_node_link_of_any_host_counts(ranks):
    fast = LAB.replace("RATE", "NDR").replace("eno1", "'ib[0-7]'")
    both = fast + fast[fast.index("  -") :].replace("n[1-4]", "old[1-4]").replace("PCIe4", "PCIe3")
    hosts = [*(f"n{n}" for n in range(1, 5)), *(f"old{n}" for n in range(1, 5))]
    inside = find_fabric(parse_topology(both, "x"), job(), hosts, ranks).intra_node
    assert inside.text == "PCIe3 x16" and inside.host == ("old4" if ranks == [1] * 7 + [2] else "old1")


@pytest.mark.parametrize(
    ("change", "topology", "hosts", "says"),
    [
        ({}, LAB.replace("RATE", "10 GbE"), 4, "link n1-n2, 10 GbE"),
        ({"variation": 0.3}, LAB.replace("RATE", "'4000 GbE'"), 4, "the slowest of 8 ranks, whose steps vary by 30.0%"),
        (
            {},
            LAB.replace("RATE", "400 GbE") + LAB[LAB.index("  -") :].replace("n[1-4]", "old[1-4]").replace("RTX A6000", "T4").replace("RATE", "400 GbE"),
            8,
            "slower GPUs",
        ),
        ({"device": "cpu", "forward_seconds": 1e-4, "backward_seconds": 0.1}, LAB.replace("RATE", "400 GbE"), 4, "work of the CPUs"),
    ],
)  # fmt: skip
def test_the_losses_of_a_step_are_named_and_add_up(change, topology, hosts, says):
    work = msgspec.structs.replace(job(10), **change)
    told = predict_step(parse_topology(topology, "x"), work, hosts=hosts, ranks_per_host=2)
    assert told.losses[0].what.startswith(says), told.losses
    assert sum(loss.seconds for loss in told.losses) == pytest.approx(told.step_seconds - told.compute_seconds)


@pytest.mark.parametrize(
    ("work", "hosts", "each", "says"),
    [
        (job(2000, backward=0.05), 4, 2, "link n1 gpu0-gpu1, PCIe4 x16"),
        (
            msgspec.structs.replace(job(0.1, backward=1e-4, forward=5e-5), optimizer_seconds=1e-5),
            256,
            1,
            "the latency of messages",
        ),
        (msgspec.structs.replace(job(1), variation=0.5), 4, 2, "the slowest of 8 ranks"),
    ],
)
def test_the_limit_with_an_infinite_network_is_named(work, hosts, each, says):
    where = {"hosts": hosts, "ranks_per_host": each}
    assert find_needed_network(lab(), work, **where) is None
    limit = predict_limit(lab(), work, **where)
    assert predict_step(lab(), work, **where).efficiency <= limit.efficiency < 0.9
    assert limit.losses[0].what.startswith(says), limit


@pytest.mark.parametrize(
    ("times", "says"), [(1.1, None), (5.0, "all-reduce, which was measured slower than its links explain")]
)
def test_an_all_reduce_slower_than_its_links_is_not_attributed_to_latency(times, says):
    """A link that hosts share, missing in the description, does not show in any single pair."""
    hosts = ("n1", "n2", "n3", "n4")
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", interface="eth0", latency_seconds=2e-5, variation=0.01,
                 bandwidth_bytes_per_second=1.1e9)
        for a in hosts for b in hosts if a != b
    )  # fmt: skip
    curve = tuple(Point(1 << power, 1e-4 + times * 1.5 * (1 << power) / 1.1e9) for power in range(10, 27, 2))
    seen = Collective(name="all_reduce", backend="nccl", hosts=hosts, ranks=4, curve=curve)
    measured = Measurements(
        when="2026", software={}, hosts=hosts, pairs=pairs, collectives=(seen, msgspec.structs.replace(seen, curve=()))
    )
    limit = predict_limit(msgspec.structs.replace(lab(), measured=measured), job(), hosts=list(hosts))
    if says is None:
        assert limit.efficiency > 0.8
    else:
        assert limit.efficiency < 0.5 and limit.losses[0].what.startswith(says), limit


def test_an_uplink_is_shared_by_the_streams_that_cross_it():
    """A ring in rack order crosses each uplink once. A ring that alternates between racks crosses it at every host."""
    racks = 'switches: [{name: r1, hosts: "a[1-4]", oversubscription: 4:1}, {name: r2, hosts: "a[5-8]", oversubscription: 4:1}]'
    topology = parse_topology(POD + racks, "x")
    in_order = [f"a{n}" for n in range(1, 9)]
    to_and_fro = ["a1", "a5", "a2", "a6", "a3", "a7", "a4", "a8"]
    rates = [
        find_fabric(topology, job(device="V100"), hosts, 8).network.bytes_per_second for hosts in (in_order, to_and_fro)
    ]
    assert rates[0] == pytest.approx(4 * rates[1], rel=0.03)


@pytest.mark.parametrize("narrow", ["oversubscription: '8:1'", "uplink: 100Gb/s"])
def test_an_uplink_above_racks_limits_the_ring(narrow):
    leaves = ", ".join(f"{{name: l{n}, hosts: 'a[{2 * n - 1}-{2 * n}]'}}" for n in range(1, 5))
    pods = ", ".join(f"{{name: p{n}, switches: [l{2 * n - 1}, l{2 * n}], {narrow}}}" for n in (1, 2))
    wide, tight = (
        find_fabric(
            parse_topology(f"{POD}switches: [{switches}]", "x"), job(device="V100"), [f"a{n}" for n in range(1, 9)], 8
        )
        for switches in (leaves, f"{leaves}, {pods}")
    )
    assert tight.network.bytes_per_second < 0.9 * wide.network.bytes_per_second and "uplink of p1" in tight.network.text


def test_gpus_with_nvlink_bridges_in_pairs_are_limited_by_pcie_between_pairs():
    """A ring through all GPUs is as slow as its slowest link."""
    cards = "nodes:\n  - hosts: a\n    gpus: {kind: A100 80GB PCIe, count: 8}\n"
    workload = workload_catalog.catalog_workload("ResNet-50", "A100 80GB PCIe")

    def inside(rate):
        links = tuple(
            IntraNodeLinkMeasurement(host="a", source=f"gpu{i}", target=f"gpu{j}", path="NVLink" if i // 2 == j // 2 else "PCIe peer",
                       bandwidth_bytes_per_second=rate(i, j), variation=0.01)
            for i in range(8) for j in range(8) if i != j
        )  # fmt: skip
        measured = Measurements(when="2026", software={}, hosts=("a",), inside=links)
        return slowest_inside_host(
            msgspec.structs.replace(parse_topology(cards, "a.yaml"), measured=measured), "a", workload, 8
        )

    wire = inside(lambda i, j: 260e9 if i // 2 == j // 2 else 20e9)
    assert (wire.text, wire.bytes_per_second) == ("PCIe4 x16", 20e9)
    # With two sockets the ring crosses between them. Elsewhere it can avoid the slow links.
    wire = inside(lambda i, j: 260e9 if i // 2 == j // 2 else 20e9 if i // 4 == j // 4 else 9e9)
    assert wire.bytes_per_second == 9e9


@pytest.mark.parametrize(
    ("slow", "gloo", "nccl"), [(("n2", "n1"), 24e6, 24e6), (("n1", "n2"), 120e6, 24e6), (("n1", "n3"), 120e6, 120e6)]
)
def test_the_direction_that_the_ring_sends_over_counts_for_an_asymmetric_link(slow, gloo, nccl):
    """Gloo's ring sends from each rank to the previous rank. NCCL's trees use both directions."""
    hosts = ("n1", "n2", "n3", "n4")
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", interface="eth0", latency_seconds=2e-5, variation=0.01,
                 bandwidth_bytes_per_second=24e6 if (a, b) == slow else 120e6)
        for a in hosts for b in hosts if a != b
    )  # fmt: skip
    topology = parse_topology('nodes: [{hosts: "n[1-4]"}]', "t.yaml")
    topology = msgspec.structs.replace(
        topology, measured=Measurements(when="2026", software={}, hosts=hosts, pairs=pairs)
    )
    assert slowest_between_hosts(topology, hosts, gpus=False).bytes_per_second == gloo
    assert slowest_between_hosts(topology, hosts, gpus=True).bytes_per_second == nccl


def test_rdma_ports_unused_by_mpi_count_for_nccl():
    """MPI uses two of eight ports between two hosts. NCCL uses all of them."""
    text = (ROOT / "hostfiles/h100-ndr.yaml").read_text()
    hosts = [f"h100-{n}" for n in range(1, 5)]

    def wire(rate):
        pairs = tuple(
            LinkMeasurement(source=a, target=b, transport="mpi", load="alone", interface="ib0", bandwidth_bytes_per_second=rate,
                     latency_seconds=2e-6, variation=0.01)
            for a in hosts for b in hosts if a != b
        )  # fmt: skip
        measured = Measurements(when="2026", software={}, hosts=tuple(hosts), pairs=pairs)
        return slowest_between_hosts(
            msgspec.structs.replace(parse_topology(text, "h100.yaml"), measured=measured), tuple(hosts), gpus=True
        )

    described = slowest_between_hosts(parse_topology(text, "h100.yaml"), tuple(hosts), gpus=True).bytes_per_second
    assert wire(96e9).bytes_per_second == pytest.approx(described, rel=0.06)
    assert wire(48e9).bytes_per_second == pytest.approx(192e9)


PCIE_HOST = "nodes: [{hosts: 'n[1-2]', SOCKETS gpus: {kind: GPU, count: 8}, links: {pcie: PCIe4 x16, LINKS}, nics: [{name: eth0, rate: 10 GbE}]}]"


@pytest.mark.parametrize(
    ("gpu", "links", "sockets", "ranks", "gigabytes", "text"),
    [
        ("RTX-4090", "nvswitch: no", "", 2, 7.8, "through host memory"),
        ("RTX-4090", "peer_to_peer: yes", "", 2, 26.2, "PCIe4 x16"),
        ("L40S", "peer_to_peer: no", "", 2, 7.8, "through host memory"),
        ("L40S", "nvswitch: no", "sockets: 2,", 4, 26.2, "PCIe4 x16"),
        ("L40S", "nvswitch: no", "sockets: 2,", 5, 16, "across sockets"),
    ],
)
def test_copies_through_host_memory_and_across_sockets_limit_pcie(gpu, links, sockets, ranks, gigabytes, text):
    host = PCIE_HOST.replace("GPU", gpu).replace("LINKS", links).replace("SOCKETS", sockets)
    found = slowest_inside_host(parse_topology(host, "x"), "n1", job(device=gpu), ranks)
    assert found.bytes_per_second == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert text in found.text


@pytest.mark.parametrize(("ranks", "nics"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_a_rank_uses_the_nics_near_its_gpu(ranks, nics):
    text = POD.replace("rate: EDR", "rate: EDR, gpudirect: yes")
    one, used = (
        find_fabric(parse_topology(each, "x"), job(device="V100"), 2, count).network.bytes_per_second
        for each, count in ((text.replace("mlx5_[0-3]", "mlx5_0"), 8), (text, ranks))
    )
    assert used == pytest.approx(nics * one, rel=0.1)
