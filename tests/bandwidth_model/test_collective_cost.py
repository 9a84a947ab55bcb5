"""Predicted times of messages and collectives: link curves, rings, trees, parameter servers."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.bandwidth_model import collective_cost, link_curve
from distrib.bandwidth_model.fabric import find_fabric
from distrib.cluster.measurements import Point
from distrib.cluster.topology import parse_topology
from tests.support.predicted_jobs import LAB, MB, job, lab, measured_lab


def test_a_curve_passes_through_measured_points_and_interpolates():
    seen = [Point(4**k, 1e-4 + 4**k / 1e8) for k in range(3, 14)]
    curve = link_curve.measured_curve(seen)
    for point in seen:
        assert curve.seconds(point.size_bytes) == pytest.approx(point.seconds)
    for size in (100, 3000, 20_000, 7 * MB):
        assert curve.seconds(size) == pytest.approx(1e-4 + size / 1e8, rel=0.01)
    assert curve.seconds(400 * MB) == pytest.approx(4.0, rel=0.01)


def test_a_curve_is_the_monotone_cubic_of_scipy_between_its_ends():
    import scipy.interpolate  # half a second, in each process of pytest-xdist

    sizes = [1, 15, 100, 700, 1500, 40_000, 1_000_000]
    points = [Point(size, 1e-4 + size / 1e8) for size in sizes]
    curve = link_curve.measured_curve([*points, Point(0, 1.0), Point(700, 1.0)])
    reference = scipy.interpolate.PchipInterpolator(
        [math.log(point.size_bytes) for point in points], [math.log(point.seconds) for point in points]
    )
    for size in (*sizes[1:-1], 20, 90, 300, 1000, 5000, 30_000):
        assert curve.seconds(size) == pytest.approx(math.exp(reference(math.log(size))), rel=1e-9)


def test_a_curve_is_straight_beyond_its_measurements():
    points = [Point(100, 1e-3), Point(200, 2e-3)]
    curve = link_curve.measured_curve(points, latency_seconds=2e-4, bandwidth=1e6)
    assert [curve.seconds(size) for size in (0, 0.5, 50, 100, 200)] == pytest.approx([2e-4, 2.04e-4, 6e-4, 1e-3, 2e-3])
    assert curve.seconds(10**6) == pytest.approx(2e-3 + 1 - 200e-6)
    slow = curve.slower(2).slower(3)
    assert [slow.seconds(size) for size in (0, 50, 200)] == pytest.approx([2e-4, 2.6e-3, 11e-3])
    assert slow.large_bytes_per_second == pytest.approx(1e6 / 6)
    assert link_curve.measured_curve(points).seconds(50) == pytest.approx(1e-3)
    assert link_curve.measured_curve(points, latency_seconds=1.0).seconds(0) == pytest.approx(1e-3)
    assert link_curve.measured_curve(points[:1] * 2) is None


@pytest.mark.parametrize("exponent", range(1, 40))
def test_a_curve_has_its_own_smallest_and_largest_size(exponent):
    small, large = 2**exponent, 2 ** (exponent + 1)  # exp(log(4 MiB)) is above 4 MiB, exp(log(64 MiB)) below 64 MiB
    curve = link_curve.measured_curve([Point(small, 1e-3), Point(large, 2e-3)])
    assert [curve.seconds(small), curve.seconds(large)] == pytest.approx([1e-3, 2e-3])


def test_a_message_slower_than_a_larger_one_takes_the_time_of_the_larger():
    curve = link_curve.measured_curve([Point(1000, 0.002), Point(4000, 0.001), Point(16_000, 0.004)])
    assert curve.seconds(1000) == curve.seconds(2000) == pytest.approx(0.001)


@given(
    points=st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=2, max_size=12),
    sizes=st.lists(st.floats(0, 1e10), min_size=2, max_size=6),
    factor=st.floats(0.1, 10),
)
def test_the_time_of_a_curve_never_decreases_with_size(points, sizes, factor):
    curve = link_curve.measured_curve([Point(size, seconds) for size, seconds in points])
    if curve is None:
        return
    for each in (curve, curve.slower(factor)):
        taken = [each.seconds(size) for size in sorted(sizes)]
        assert all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(taken))
        assert all(0 <= seconds < math.inf for seconds in taken)


def test_times_of_ring_all_reduce_and_parameter_servers():
    link = link_curve.linear_curve(1e-3, 1e8)
    assert collective_cost.ring_all_reduce(4, 100 * MB, link) == pytest.approx(6 * (1e-3 + 0.25))
    # max(M/B, nM/(kB)) for k servers and n workers: fewer servers than workers are the bottleneck.
    assert collective_cost.parameter_server(8, 8, 100 * MB, link) == pytest.approx(1e-3 + 1.0)
    assert collective_cost.parameter_server(8, 2, 100 * MB, link) == pytest.approx(1e-3 + 4.0)
    assert collective_cost.shared_parameter_server(4, 100 * MB, link) == pytest.approx(2e-3 + 2 * 3 / 4 * 1.0)


def test_nccl_bus_bandwidth_on_one_host_matches_published_figures():
    """8 x H200 have 473 GB/s of bus bandwidth at 4 GiB with NVLS (stas00/ml-engineering@744d01e)."""
    text = "nodes: [{hosts: h, gpus: {kind: H200, count: 8}, links: {nvlink: NVLink4 x18, nvswitch: yes}}]"
    fabric = find_fabric(parse_topology(text, "h200"), job(device="H200"), 1, 8)
    bus = (4 << 30) / collective_cost.all_reduce(fabric, 4 << 30) * 2 * 7 / 8
    assert bus == pytest.approx(473e9, rel=0.1)


def test_a_rank_gets_no_more_of_the_nics_than_its_slot_carries():
    text = """nodes: [{hosts: 'h[1-2]', gpus: {kind: H100, count: 8}, links: {nvlink: NVLink4 x18, nvswitch: yes},
        nics: [{name: 'mlx5_[0-7]', rate: XDR, gpudirect: yes}]}]"""
    topology = parse_topology(text, "h100")
    one, all_of_them = (find_fabric(topology, job(device="H100"), 2, each).network for each in (1, 8))
    assert one.bytes_per_second == pytest.approx(16 * 3.93846154e9 * 0.88)
    assert "PCIe5 x16" in one.text
    assert all_of_them.bytes_per_second == pytest.approx(8 * 16 * 3.93846154e9 * 0.88)


def test_gpudirect_tcpx_has_rings_only():
    host = "nodes: [{hosts: 'h[1-2]', gpus: {kind: H100, count: 8}, links: {nvlink: NVLink4 x18, nvswitch: yes}, nics: [NIC]}]"
    named, plain = (
        find_fabric(parse_topology(host.replace("NIC", nic), "h100"), job(device="H100"), 2, 8)
        for nic in ("{name: 'tcpx[0-3]', kind: RoCE, rate: 200Gb/s}", "{name: 'gve[0-3]', kind: RoCE, rate: 200Gb/s}")
    )
    assert collective_cost.all_reduce(named, 1 << 20) > 2 * collective_cost.all_reduce(plain, 1 << 20)
    assert collective_cost.all_reduce(named, 4 << 30) > collective_cost.all_reduce(plain, 4 << 30)


def test_the_latency_of_a_network_follows_from_the_names_of_its_devices():
    def latency(nic: str) -> float:
        text = f"nodes: [{{hosts: 'h[1-2]', gpus: {{kind: H100, count: 8}}, nics: [{{{nic}, kind: RoCE, gpudirect: yes}}]}}]"
        return find_fabric(parse_topology(text, "cloud"), job(device="H100"), 2, 8).network.curve.latency_seconds

    assert latency("name: 'efa[0-31]', rate: 100Gb/s") == pytest.approx(75e-6)
    assert latency("name: 'efa[0-15]', rate: 200Gb/s") == pytest.approx(35e-6)
    assert latency("name: 'mlx5_[0-7]', rate: 200Gb/s") == pytest.approx(2.7e-6)


@pytest.mark.parametrize("each", [2, 4, 8])
@pytest.mark.parametrize("rate", ["NDR", "8 x NDR", "100 GbE"])
def test_two_hosts_are_never_faster_than_one(each, rate):
    """GPUs in the middle of a chain send all bytes in both directions, however few hosts there are."""
    count, _, rate = rate.rpartition(" x ")
    nic = f"name: 'ib[1-{count or 1}]', rate: {rate}"
    text = f"nodes: [{{hosts: 'h[1-4]', gpus: {{kind: RTX-4090, count: 8}}, links: {{pcie: PCIe4 x16}}, nics: [{{{nic}}}]}}]"
    topology = parse_topology(text, "pcie")
    for size in (MB, 30 * MB, 1000 * MB):
        one, two, four = (
            collective_cost.all_reduce(find_fabric(topology, job(device="RTX-4090"), hosts, each), size)
            for hosts in (1, 2, 4)
        )
        assert one <= two * (1 + 1e-9) and two <= four * (1 + 1e-9), size


def test_a_measured_all_reduce_is_read_from_its_curve():
    fabric = find_fabric(measured_lab(), job(device="cpu"), 4, 1)
    assert collective_cost.all_reduce(fabric, 10 * MB) == pytest.approx(0.161, rel=0.01)


def test_a_ring_of_another_size_is_scaled_from_the_steps_of_a_measured_ring():
    fabric = find_fabric(measured_lab(ranks=(2,)), job(device="cpu"), 4, 1)
    # 2(m-1) messages of S/m took 0.161 s, so 2(n-1) of S/n take (n-1)/(m-1) times as long as mS/n.
    assert collective_cost.all_reduce(fabric, 10 * MB) == pytest.approx(3 * 0.081, rel=0.01)


def test_an_all_reduce_measured_over_a_slow_link_does_not_slow_hosts_without_it():
    """The all-reduce over n1 to n4 is limited by n3-n4 (10 MB/s). The link n1-n2 has 120 MB/s."""
    topology = measured_lab(seconds_per_megabyte=2 * 3 / 4 / 10, ranks=(4,))
    measured = topology.measured
    slow = [
        msgspec.structs.replace(pair, bandwidth_bytes_per_second=10e6)
        if {pair.source, pair.target} == {"n3", "n4"}
        else pair
        for pair in measured.pairs
    ]
    topology = msgspec.structs.replace(topology, measured=msgspec.structs.replace(measured, pairs=tuple(slow)))

    def seconds(*hosts: str) -> float:
        return collective_cost.all_reduce(find_fabric(topology, job(device="cpu"), hosts, 1), 10 * MB)

    assert seconds("n1", "n2", "n3", "n4") == pytest.approx(1.5, rel=0.01)
    assert seconds("n3", "n4") == pytest.approx(1.0, rel=0.01)
    assert seconds("n1", "n2") == pytest.approx(10 / 120, rel=0.05)


def test_ranks_of_one_host_share_its_link():
    """A flat ring of n ranks sends 2(n-1)/n of the bytes over each link. Hierarchical over h hosts sends 2(h-1)/h."""
    fabric = find_fabric(lab("1 GbE"), job(device="cpu"), 4, 2)
    rate = 1e9 / 8 * 0.94
    assert collective_cost.all_reduce(fabric, 100 * MB) == pytest.approx(2 * 7 / 8 * 100 * MB / rate, rel=0.01)
    inside = (1 + 1 / 2) * 100 * MB / 5e9
    grouped = collective_cost.all_reduce(fabric, 100 * MB, hierarchical=True)
    assert grouped == pytest.approx(2 * 3 / 4 * 100 * MB / rate + inside, rel=0.01)


def test_an_outlier_of_a_curve_is_interpolated():
    """The curve ignores an outlier: one size took three times as long as a link of 0.1 GB/s and 1 ms needs."""
    sizes = [4**n << 10 for n in range(9)]
    for outlier in sizes[1:-1]:
        points = [Point(size, (1e-3 + size / 1e8) * (3 if size == outlier else 1), 0.0) for size in sizes]
        curve = link_curve.measured_curve(points)
        for size in sizes:
            assert curve.seconds(size) == pytest.approx(1e-3 + size / 1e8, rel=0.1), outlier


def test_measured_nccl_all_reduces_correct_the_tuner_model():
    topology = lab("25 GbE")
    work = job(device="RTX A6000")
    model = collective_cost.all_reduce(find_fabric(topology, work, 4, 2), 100 * MB)
    curve = [[1 << 20, 0.01, 0.0], [100_000_000, 1.25 * model, 0.0], [1 << 28, 4 * model, 0.0]]
    found = [
        {"name": "all_reduce", "backend": "nccl", "hosts": ["n1", "n2", "n3", "n4"], "ranks": 8, "gpudirect": gpudirect,
         "curve": [[size, seconds * times, 0.0] for size, seconds, _ in curve]}
        for gpudirect, times in ((True, 1.0), (False, 2.0))
    ]  # fmt: skip
    measured = {"when": "now", "software": {}, "hosts": ["n1", "n2", "n3", "n4"], "collectives": found}
    known = parse_topology(LAB.replace("RATE", "25 GbE") + f"measured: {msgspec.json.encode(measured).decode()}\n", "x")
    assert collective_cost.all_reduce(find_fabric(known, work, 4, 2), 100 * MB) == pytest.approx(1.25 * model, rel=0.01)
    more = collective_cost.all_reduce(find_fabric(topology, work, 4, 2, nodes=16), 100 * MB)
    assert collective_cost.all_reduce(find_fabric(known, work, 4, 2, nodes=16), 100 * MB) == pytest.approx(
        1.25 * more, rel=0.01
    )
