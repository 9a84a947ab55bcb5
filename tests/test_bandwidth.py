"""Bandwidth model: curves, collectives, step timeline, scaling and advice, against known results and invariants."""

from __future__ import annotations

import itertools
import math
import time

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distrib.bandwidth_model import bucketing, collective_cost, link_curve, step_timeline, workload_catalog
from distrib.bandwidth_model.bottleneck import slowest_between_hosts, slowest_inside_host
from distrib.bandwidth_model.bucketing import AllReduceCost
from distrib.bandwidth_model.fabric import find_fabric
from distrib.bandwidth_model.recommendations import (
    best_equivalent,
    convergence_effect,
    is_equivalent,
    recommend,
)
from distrib.bandwidth_model.scaling import needed_bandwidth, predict_limit, predict_step
from distrib.bandwidth_model.step_timeline import Transfer
from distrib.bandwidth_model.workload import Gradient, Workload
from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, LinkMeasurement, Measurements, Point
from distrib.cluster.topology import Topology, parse_topology
from distrib.errors import ConfigError
from distrib.strategy import Gradients, OuterOptimizer, Strategy, strategy_options, validate_strategy
from tests.conftest import ROOT

MB = 1_000_000
POD = """
nodes:
  - hosts: a[1-8]
    gpus: {kind: V100, count: 8}
    links: {nvlink: NVLink2 x6, nvswitch: yes, pcie: PCIe3 x16}
    nics: [{name: "mlx5_[0-3]", rate: EDR, gpudirect: yes}]
"""
LAB = """
nodes:
  - hosts: n[1-4]
    gpus: {kind: RTX A6000, count: 2}
    links: {pcie: PCIe4 x16}
    nics: [{name: eno1, rate: RATE}]
"""


def lab(rate: str = "10 GbE") -> Topology:
    return parse_topology(LAB.replace("RATE", rate), "lab.yaml")


def job(
    megabytes: float = 100, tensors: int = 20, backward: float = 0.1, forward: float = 0.05, device: str = "RTX A6000"
) -> Workload:
    size = max(4, int(megabytes * MB / tensors / 4) * 4)
    return Workload(
        name="job", origin="measured", device=device, batch=32, forward_seconds=forward, backward_seconds=backward,
        optimizer_seconds=0.002, parameter_bytes=size * tensors, memory_bytes=10**10,
        gradients=tuple(
            Gradient(name=f"w{n}", elements=size // 4, size_bytes=size, ready_seconds=backward * (n + 1) / tensors)
            for n in range(tensors)
        ),
    )  # fmt: skip


def measured_lab(
    seconds_per_megabyte: float = 0.016,
    ranks: tuple[int, ...] = (2, 4),
    each: int = 1,
    machines: tuple[tuple[tuple[str, ...], int], ...] = (),
) -> Topology:
    """Return a cluster of CPU hosts with measured all-reduces: 1 ms of latency plus a fixed time per 10^6 bytes.

    `machines`: for each machine the hosts that run on it, and its number of CPUs.
    """
    curve = [[4**k, 0.001 + 4**k / MB * seconds_per_megabyte, 0.0] for k in range(4, 14)]
    found = [
        {
            "name": "all_reduce",
            "backend": "gloo",
            "hosts": [f"n{i + 1}" for i in range(n)],
            "ranks": n * each,
            "curve": curve,
        }
        for n in ranks
    ]
    pairs = [
        {"source": f"n{a}", "target": f"n{b}", "way": "tcp", "load": "alone", "bandwidth_bytes_per_second": 120e6,
         "variation": 0.001, "latency_seconds": 1e-4}
        for a in range(1, 5) for b in range(1, 5) if a != b
    ]  # fmt: skip
    text = msgspec.json.encode(
        {
            "nodes": [{"hosts": "n[1-4]", "nics": [{"name": "eth0", "rate": "1 GbE"}]}],
            "measured": {"when": "2026-01-01T00:00:00Z", "software": {}, "hosts": ["n1", "n2", "n3", "n4"],
                         "machines": [{"hosts": hosts, "processors": count} for hosts, count in machines],
                         "pairs": pairs, "collectives": found},
        }
    ).decode()  # fmt: skip
    return parse_topology(text, "measured.yaml")


# Curves


def test_a_curve_goes_through_what_was_measured_and_between():
    seen = [Point(4**k, 1e-4 + 4**k / 1e8) for k in range(3, 14)]
    curve = link_curve.measured_curve(seen)
    for point in seen:
        assert curve.seconds(point.size_bytes) == pytest.approx(point.seconds)
    for size in (100, 3000, 20_000, 7 * MB):
        assert curve.seconds(size) == pytest.approx(1e-4 + size / 1e8, rel=0.01)
    assert curve.seconds(400 * MB) == pytest.approx(4.0, rel=0.01)


def test_a_message_that_took_longer_than_a_larger_one_was_disturbed():
    curve = link_curve.measured_curve([Point(1000, 0.002), Point(4000, 0.001), Point(16_000, 0.004)])
    assert curve.seconds(1000) == curve.seconds(2000) == pytest.approx(0.001)


@given(
    points=st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=2, max_size=12),
    sizes=st.lists(st.floats(0, 1e10), min_size=2, max_size=6),
    factor=st.floats(0.1, 10),
)
def test_a_curve_never_falls(points, sizes, factor):
    curve = link_curve.measured_curve([Point(size, seconds) for size, seconds in points])
    if curve is None:
        return
    for each in (curve, curve.slower(factor)):
        taken = [each.seconds(size) for size in sorted(sizes)]
        assert all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(taken))
        assert all(0 <= seconds < math.inf for seconds in taken)


# Collectives


def test_formulas():
    link = link_curve.linear_curve(1e-3, 1e8)
    assert collective_cost.ring_all_reduce(4, 100 * MB, link) == pytest.approx(6 * (1e-3 + 0.25))
    # max(M/B, nM/(kB)) for k servers and n workers: fewer servers than workers are the bottleneck.
    assert collective_cost.parameter_server(8, 8, 100 * MB, link) == pytest.approx(1e-3 + 1.0)
    assert collective_cost.parameter_server(8, 2, 100 * MB, link) == pytest.approx(1e-3 + 4.0)
    assert collective_cost.shared_parameter_server(4, 100 * MB, link) == pytest.approx(2e-3 + 2 * 3 / 4 * 1.0)


def test_nccl_on_one_host_as_published():
    """8 x H200 have 220 GB/s of bus bandwidth at 16 MiB, 367 GB/s in large rings (stas00/ml-engineering@744d01e)."""
    text = "nodes: [{hosts: h, gpus: {kind: H200, count: 8}, links: {nvlink: NVLink4 x18, nvswitch: yes}}]"
    fabric = find_fabric(parse_topology(text, "h200"), job(device="H200"), 1, 8)
    for size, published in ((16 << 20, 220e9), (16 << 30, 367e9)):
        bus = size / collective_cost.all_reduce(fabric, size) * 2 * 7 / 8
        assert bus == pytest.approx(published, rel=0.1)


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


def test_an_all_reduce_that_was_measured_is_read_from_its_curve():
    fabric = find_fabric(measured_lab(), job(device="cpu"), 4, 1)
    assert collective_cost.all_reduce(fabric, 10 * MB) == pytest.approx(0.161, rel=0.01)


def test_a_ring_of_other_ranks_is_put_together_from_the_steps_of_a_measured_one():
    fabric = find_fabric(measured_lab(ranks=(2,)), job(device="cpu"), 4, 1)
    # 2(m-1) messages of S/m took 0.161 s, so 2(n-1) of S/n take (n-1)/(m-1) times as long as mS/n.
    assert collective_cost.all_reduce(fabric, 10 * MB) == pytest.approx(3 * 0.081, rel=0.01)


def test_an_all_reduce_through_a_bad_link_is_not_that_of_hosts_without_it():
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


def test_ranks_of_one_host_share_its_wire():
    """A flat ring of n ranks sends 2(n-1)/n of the bytes over each link. Hierarchical over h hosts sends 2(h-1)/h."""
    fabric = find_fabric(lab("1 GbE"), job(device="cpu"), 4, 2)
    rate = 1e9 / 8 * 0.94
    assert collective_cost.all_reduce(fabric, 100 * MB) == pytest.approx(2 * 7 / 8 * 100 * MB / rate, rel=0.01)
    inside = (1 + 1 / 2) * 100 * MB / 5e9
    grouped = collective_cost.all_reduce(fabric, 100 * MB, hierarchical=True)
    assert grouped == pytest.approx(2 * 3 / 4 * 100 * MB / rate + inside, rel=0.01)


def test_a_message_that_was_disturbed_is_read_like_its_neighbours():
    """The curve ignores an outlier: 1 MiB took three times as long as a link of 0.1 GB/s and 1 ms needs."""
    sizes = [4**n << 10 for n in range(9)]
    points = [Point(size, 1e-3 + size / 1e8 * (3 if size == 1 << 20 else 1), 0.0) for size in sizes]
    curve = link_curve.measured_curve(points)
    for size in sizes:
        assert curve.seconds(size) == pytest.approx(1e-3 + size / 1e8, rel=0.05)


# The timeline


def test_buckets_are_those_of_ddp():
    """DDP fills 1 MiB, then 25 MiB. The gradient that fills a bucket closes it (torch/nn/parallel/distributed.py)."""
    found = bucketing.ddp_buckets(job(megabytes=100, tensors=20).gradients)
    assert [part.size_bytes / MB for part in found] == [5, 30, 30, 30, 5]
    assert [round(part.ready_seconds, 6) for part in found] == [0.005, 0.035, 0.065, 0.095, 0.1]
    assert len(bucketing.ddp_buckets(job(tensors=20).gradients, 1)) == 20


def test_the_pieces_of_distrib_are_all_of_the_gradients():
    gradients = job(megabytes=50, tensors=7).gradients
    wire = AllReduceCost(overhead_seconds=1e-3, seconds_per_byte=1e-8)
    for strategy in (Strategy(), Strategy(bucket_bytes=3 << 20)):
        for found in (bucketing.hook_buckets(gradients, strategy, known, ranks_per_host=2) for known in (wire, None)):
            assert sum(piece.size_bytes for piece in found) == sum(gradient.size_bytes for gradient in gradients)
            assert sum(piece.elements for piece in found) == pytest.approx(sum(g.elements for g in gradients))
            ready = [piece.ready_seconds for piece in found]
            assert ready == sorted(ready)
            assert ready[-1] == gradients[-1].ready_seconds


def transfers(*network_seconds_at: tuple[float, float]) -> list[Transfer]:
    return [Transfer(ready_seconds=at, network_seconds=seconds) for at, seconds in network_seconds_at]


def test_the_last_piece_is_exposed():
    step = step_timeline.synchronous_step(job(), transfers((0.02, 0.03), (0.1, 0.03)), spans=True)
    # forward 0.05, backward 0.1 beside the first bucket, 0.03 for the last bucket, optimizer 0.002
    assert step.seconds == pytest.approx(0.182)
    assert (step.communication_seconds, step.exposed_seconds) == (pytest.approx(0.06), pytest.approx(0.03))
    assert {span.phase for span in step.spans} == {"forward", "backward", "communication", "wait", "optimizer"}
    assert max(span.end_seconds for span in step.spans) == pytest.approx(step.seconds)


def test_a_piece_waits_for_the_one_before():
    step = step_timeline.synchronous_step(job(), transfers((0.02, 0.2), (0.1, 0.2)))
    assert step.seconds == pytest.approx(0.05 + 0.02 + 0.2 + 0.2 + 0.002)


def test_packing_makes_backward_longer_and_unpacking_follows_the_wire():
    parts = [Transfer(ready_seconds=0.1, network_seconds=0.03, pack_seconds=0.01, unpack_seconds=0.005)]
    assert step_timeline.synchronous_step(job(), parts).seconds == pytest.approx(
        0.05 + 0.1 + 0.01 + 0.03 + 0.005 + 0.002
    )


def test_computing_is_slower_while_the_wire_is_busy():
    step = step_timeline.synchronous_step(job(), transfers((0.02, 0.055)), overlap_slowdown=0.1)
    # At a slowdown of 0.1, 0.055 s beside communication complete 0.05 s of backward.
    assert step.seconds == pytest.approx(0.05 + 0.1 + 0.005 + 0.002)


def test_the_slowest_of_many_is_slower():
    assert step_timeline.slowest_of(1, 0.1) == 1.0
    assert step_timeline.slowest_of(100, 0.0) == 1.0
    # the expected largest of 100 normal errors is 2.51 standard deviations
    assert step_timeline.slowest_of(100, 0.1) == pytest.approx(1.251, abs=0.01)


# Scaling


def test_one_rank_needs_nobody():
    told = predict_step(None, job(), hosts=1)
    assert (told.efficiency, told.exposed_seconds, told.cap, told.notes) == (1.0, 0.0, None, ())
    assert told.step_seconds == pytest.approx(0.152)


def test_the_wire_that_caps_is_named_and_what_would_do():
    told = predict_step(lab(), job(), hosts=4, ranks_per_host=2)
    assert told.efficiency < 0.8
    assert told.cap.link == "n1-n2, 10 GbE"
    assert told.cap.bandwidth_bytes_per_second == pytest.approx(1.1375e9)
    wanted = needed_bandwidth(lab(), job(), hosts=4, ranks_per_host=2, efficiency=0.9)
    assert wanted == told.cap.needed_bytes_per_second
    # A link of exactly this rate. Ethernet between 25 and 40 Gb/s uses 90 % of it.
    rate = f"'{wanted * 8e-6 / 0.9:.3f}Mb/s', kind: Ethernet"
    again = predict_step(lab(rate), job(), hosts=4, ranks_per_host=2)
    assert again.efficiency == pytest.approx(0.9, abs=0.005)


def test_a_fast_wire_caps_nothing():
    assert (
        predict_step(parse_topology(POD, "pod"), job(megabytes=20, device="V100"), hosts=8, ranks_per_host=8).cap
        is None
    )


def test_the_slow_link_is_the_one_that_is_named():
    text = LAB.replace("n[1-4]", "n[1-2],n4").replace("RATE", "10 GbE")
    slow = "  - {hosts: n3, gpus: {kind: RTX A6000, count: 2}, nics: [{name: eno1, rate: 1 GbE}]}\n"
    told = predict_step(parse_topology(text + slow, "x"), job(), hosts=["n1", "n2", "n3", "n4"], ranks_per_host=2)
    assert told.cap.link == "n2-n3, 1 GbE"


def test_hosts_that_the_topology_does_not_have_are_extrapolated_and_said_so():
    told = predict_step(lab(), job(), hosts=100, ranks_per_host=2)
    assert any("100 are extrapolated" in note for note in told.notes)
    assert any("was not measured" in note for note in told.notes)
    assert told.efficiency < predict_step(lab(), job(), hosts=4, ranks_per_host=2).efficiency


def test_what_follows_the_hosts_that_are_named_is_like_them():
    """Extrapolated nodes copy the named hosts a1 and a2, not a3 and a4 with 1 GbE."""
    text = LAB.replace("n[1-4]", "a[1-2]").replace("RATE", "10 GbE") + LAB[LAB.index("  -") :].replace(
        "n[1-4]", "a[3-4]"
    ).replace("RATE", "1 GbE")
    told = predict_step(parse_topology(text, "x"), job(), hosts=["a1", "a2"], nodes=4, ranks_per_host=2)
    assert told.cap.link == "a1-a2, 10 GbE" and told.ranks == 8
    assert told.notes[0].startswith("2 hosts are known; 4 are extrapolated")


def test_measured_links_make_a_smaller_error_to_expect():
    measured = predict_step(measured_lab(), job(device="cpu"), hosts=4)
    assert measured.expected_error < predict_step(lab("1 GbE"), job(device="cpu"), hosts=4).expected_error
    assert not any("not measured" in note for note in measured.notes)


def test_nothing_is_known_of_the_link():
    with pytest.raises(ConfigError, match="distrib-topo probe"):
        predict_step(None, job(), hosts=2)
    with pytest.raises(ConfigError, match="between x and y"):
        predict_step(lab(), job(), hosts=["x", "y"])
    with pytest.raises(ConfigError, match="0 hosts"):
        predict_step(lab(), job(), hosts=0)


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("backward_seconds", math.nan, r"\$\.backward_seconds"),
        ("loader_seconds", math.inf, r"\$\.loader_seconds"),
        ("gradients", (), r"\$\.gradients"),
        ("batch", 0, r"\$\.batch"),
        ("parameter_bytes", 0, r"\$\.parameter_bytes"),
        ("gradients", (Gradient(name="w", elements=0, size_bytes=0, ready_seconds=0.0),), r"\$\.gradients\[0\]"),
        ("gradients", (Gradient(name="w", elements=1, size_bytes=4, ready_seconds=math.nan),), r"ready_seconds"),
    ],
)
def test_a_workload_that_cannot_be(field, value, where):
    with pytest.raises(ConfigError, match=where):
        predict_step(lab(), msgspec.structs.replace(job(), **{field: value}), hosts=2)


def test_gpus_of_two_kinds_wait_for_the_slower():
    text = LAB.replace("RATE", "100 GbE") + LAB[LAB.index("  -") :].replace("n[1-4]", "old[1-4]").replace(
        "RTX A6000", "T4"
    ).replace("RATE", "100 GbE")
    told = predict_step(parse_topology(text, "x"), job(megabytes=1), hosts=8, ranks_per_host=2)
    alone = predict_step(parse_topology(text, "x"), job(megabytes=1), hosts=4, ranks_per_host=2)
    assert told.step_seconds == pytest.approx(alone.step_seconds * 154.8 / 65, rel=0.05)
    assert any("T4 takes 2.4 times as long" in note for note in told.notes)
    balanced = predict_step(
        parse_topology(text, "x"), job(megabytes=1), Strategy(balance=True), hosts=8, ranks_per_host=2
    )
    assert balanced.samples_per_second > told.samples_per_second
    free, bounded = (
        predict_step(
            parse_topology(text, "x"),
            job(megabytes=1),
            Strategy(mode="async", staleness=bound),
            hosts=8,
            ranks_per_host=2,
        )
        for bound in (None, 4)
    )
    assert free.samples_per_second > bounded.samples_per_second  # with a bound, all ranks wait for the slow ones


def test_the_ranks_of_a_host_cross_the_wire_once_in_mode_async():
    wide, work = lab(), job(megabytes=100, backward=0.01)
    for servers in (None, 4):
        once, each = (
            predict_step(
                wide, work, Strategy(mode="async", servers=servers, host_reduction=way), hosts=4, ranks_per_host=2
            )
            for way in (True, False)
        )
        # The bytes double, but several pushing ranks use more of the link's bandwidth.
        assert 1.8 * once.communication_seconds < each.communication_seconds < 2.05 * once.communication_seconds
    alone = [
        predict_step(wide, work, Strategy(mode="async", host_reduction=way), hosts=1, ranks_per_host=2)
        for way in (True, False)
    ]
    assert alone[0].step_seconds == alone[1].step_seconds


def test_mode_local_exchanges_parameters_after_its_inner_steps():
    wide, work = lab(), msgspec.structs.replace(job(megabytes=100), variation=0.2)
    default, every, half, hidden = (
        predict_step(wide, work, Strategy(mode="local", **settings), hosts=4)
        for settings in (
            {}, {"inner_steps": 10}, {"inner_steps": 10, "gradients": Gradients("bf16")},
            {"inner_steps": 10, "outer": OuterOptimizer(overlap_steps=5)},
        )
    )  # fmt: skip
    assert every.communication_seconds == pytest.approx(50 * default.communication_seconds)
    assert half.communication_seconds == pytest.approx(every.communication_seconds / 2, rel=0.05)
    assert hidden.exposed_seconds == 0 and hidden.communication_seconds == every.communication_seconds
    # Ranks synchronize rarely, so they do not wait for the slowest rank in each step.
    assert default.step_seconds < 1.02 * work.compute_seconds


def test_gradients_of_which_the_largest_travel_cross_once_for_each_host():
    work, most = job(megabytes=100, device="cpu"), Strategy(gradients=Gradients("topk", fraction=0.1))
    one, four = (
        predict_step(measured_lab(each=each), work, most, hosts=4, ranks_per_host=each).communication_seconds
        for each in (1, 4)
    )
    assert four == pytest.approx(one, rel=0.25)


def test_horovod_does_not_average_inside_hosts_first():
    plain, horovod = (
        predict_step(
            lab("1 GbE"), job(megabytes=50, device="cpu"), Strategy(backend=backend), hosts=2, ranks_per_host=4
        )
        for backend in ("torch", "horovod")
    )
    assert horovod.communication_seconds == pytest.approx(1.75 * plain.communication_seconds, rel=0.1)


def test_a_measured_cluster_of_cpu_hosts_with_several_ranks_is_known():
    told = predict_step(measured_lab(each=2), job(megabytes=400, device="cpu"), hosts=4, ranks_per_host=2)
    assert told.expected_error == predict_step(measured_lab(), job(device="cpu"), hosts=4).expected_error
    assert not any("loopback" in note for note in told.notes)
    assert told.cap and told.cap.link.startswith("n1-n2")


def test_what_nccl_was_measured_to_do_corrects_what_its_tuner_says():
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


def test_a_wire_that_was_measured_is_no_way_around_host_memory():
    """Probe measured transfers from host memory, not from GPU memory."""
    text = LAB.replace("rate: RATE", "rate: HDR, gpudirect: no")
    pair = '{"source": "%s", "target": "%s", "way": "mpi", "load": "alone", "bandwidth_bytes_per_second": 23.0e9, "variation": 0.0}'
    pairs = "".join(f"    - {pair % (a, b)}\n" for a, b in (("n1", "n2"), ("n2", "n1")))
    measured = f'measured:\n  when: "now"\n  software: {{}}\n  hosts: ["n1", "n2"]\n  pairs:\n{pairs}'
    staged = find_fabric(parse_topology(text + measured, "x"), job(), 2, 1).network
    assert staged.text.endswith("through host memory")
    assert staged.bytes_per_second == find_fabric(parse_topology(text, "x"), job(), 2, 1).network.bytes_per_second


ONE_MACHINE = measured_lab(machines=((("n1", "n2", "n3", "n4"), 2),))
FOUR_MACHINES = measured_lab(machines=tuple(((f"n{n}",), 2) for n in range(1, 5)))


def test_hosts_that_are_one_machine_share_its_processors():
    work = job(10, device="cpu")
    assert find_fabric(ONE_MACHINE, work, 4, 1).ranks_per_cpu == 2
    assert find_fabric(ONE_MACHINE, work, 4, 1, nodes=8).ranks_per_cpu == 4  # more nodes on the same machine
    assert find_fabric(FOUR_MACHINES, work, 4, 1, nodes=8).ranks_per_cpu == 0.5
    assert find_fabric(FOUR_MACHINES, work, 4, (1, 4, 2, 1)).ranks_per_cpu == 2
    assert find_fabric(measured_lab(), work, 4, 1).ranks_per_cpu == 0
    two = measured_lab(machines=((("n1", "n2"), 2), (("n3", "n4"), 2)))
    assert find_fabric(two, work, 4, 1, nodes=64).ranks_per_cpu == 1  # more machines of the same kind
    assert find_fabric(ONE_MACHINE, work, 4, 1).cpus_per_rank == 1
    for strategy, each in ((Strategy(gradients=Gradients("bf16")), 1), (Strategy(), 4)):
        crowded = predict_step(ONE_MACHINE, work, strategy, hosts=4, ranks_per_host=each)
        assert any("n1 and n4, for one, are one machine" in note for note in crowded.notes)
        own = predict_step(
            measured_lab(machines=tuple(((f"n{n}",), 8) for n in range(1, 5))),
            work,
            strategy,
            hosts=4,
            ranks_per_host=each,
        )
        assert own.step_seconds < crowded.step_seconds < 2 * own.step_seconds
        assert not any("processor" in note for note in own.notes)


def test_ranks_that_compute_with_more_processors_than_there_are_take_longer():
    busy = msgspec.structs.replace(job(1, device="cpu"), processor_share=0.9, processors=1)
    own, crowded = (predict_step(topology, busy, hosts=4) for topology in (FOUR_MACHINES, ONE_MACHINE))
    assert own.efficiency > 0.8
    assert crowded.step_seconds / own.step_seconds == pytest.approx(0.9 * 2, rel=0.1)
    assert crowded.losses[0].what == "more ranks than CPUs"


def test_staging_through_host_memory_halves_the_bus():
    """100 Gb/s InfiniBand carries 6 of 12 GB/s without GPUDirect RDMA (NVIDIA/nccl#465)."""
    text = POD.replace("mlx5_[0-3]", "mlx5_0")
    direct = find_fabric(parse_topology(text, "x"), job(device="V100"), 2, 8).network
    staged = find_fabric(
        parse_topology(text.replace("gpudirect: yes", "gpudirect: no"), "x"), job(device="V100"), 2, 8
    ).network
    assert direct.bytes_per_second == pytest.approx(12.07e9, rel=0.01)
    assert staged.bytes_per_second == pytest.approx(6e9, rel=0.01)


def test_what_of_the_way_is_narrowest_is_named():
    racks = 'switches: [{name: r1, hosts: "a[1-4]", uplink: 25Gb/s}, {name: r2, hosts: "a[5-8]", uplink: 50Gb/s}]'
    told = predict_step(parse_topology(POD + racks, "x"), job(1000, device="V100"), hosts=8, ranks_per_host=8)
    assert told.cap.link == "a4-a5, uplink of r1, 25Gb/s"
    assert told.cap.bandwidth_bytes_per_second == pytest.approx(0.95 * 25e9 / 8)  # the usable fraction, as with a ratio
    assert find_fabric(parse_topology(POD + racks, "x"), job(device="V100"), 4, 8).network.name == "a1-a2, 4 x EDR"
    staged = predict_step(parse_topology(POD.replace("gpudirect: yes", "gpudirect: no").replace("[0-3]", "0"), "x"),
                      job(1000, device="V100"), hosts=2, ranks_per_host=8)  # fmt: skip
    assert staged.cap.link == "a1-a2, EDR through host memory"


def test_gpus_whose_links_nobody_describes_have_those_of_the_catalogue():
    bare = POD.replace("    links: {nvlink: NVLink2 x6, nvswitch: yes, pcie: PCIe3 x16}\n", "").replace(
        "V100", "V100-SXM2-16GB"
    )
    work = job(device="V100-SXM2-16GB")
    told = predict_step(parse_topology(bare, "bare"), work, hosts=1, ranks_per_host=8)
    described = predict_step(
        parse_topology(POD.replace("V100", "V100-SXM2-16GB"), "pod"), work, hosts=1, ranks_per_host=8
    )
    assert told.step_seconds == described.step_seconds
    assert any("`links` are not described for a1: NVLink2 x6 is assumed" in note for note in told.notes)
    pcie = POD.replace("nvlink: NVLink2 x6, nvswitch: yes, ", "").replace("V100", "V100-SXM2-16GB")
    assert predict_step(parse_topology(pcie, "pcie"), work, hosts=1, ranks_per_host=8).step_seconds > told.step_seconds


@pytest.mark.parametrize("ranks", [2, [2, 2, 2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1, 2]])
def test_the_slowest_links_inside_hosts_count_wherever_they_are(ranks):
    fast = LAB.replace("RATE", "NDR").replace("eno1", "'ib[0-7]'")
    both = fast + fast[fast.index("  -") :].replace("n[1-4]", "old[1-4]").replace("PCIe4", "PCIe3")
    hosts = [*(f"n{n}" for n in range(1, 5)), *(f"old{n}" for n in range(1, 5))]
    inside = find_fabric(parse_topology(both, "x"), job(), hosts, ranks).intra_node
    assert inside.text == "PCIe3 x16" and inside.host == ("old4" if ranks == [1] * 7 + [2] else "old1")


def test_a_gpu_that_nobody_knows_is_said_to_be_so():
    (note,) = predict_step(None, job(device="GPU9"), hosts=1).notes
    assert note.startswith("GPU9 is not in the catalogue")


# Bottlenecks


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
def test_what_makes_a_step_longer_is_named_and_adds_up(change, topology, hosts, says):
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
def test_what_no_network_would_help_is_named(work, hosts, each, says):
    where = {"hosts": hosts, "ranks_per_host": each}
    assert needed_bandwidth(lab(), work, **where) is None
    limit = predict_limit(lab(), work, **where)
    assert predict_step(lab(), work, **where).efficiency <= limit.efficiency < 0.9
    assert limit.losses[0].what.startswith(says), limit


@pytest.mark.parametrize(
    ("times", "says"), [(1.1, None), (5.0, "all-reduce, which was measured slower than its links explain")]
)
def test_an_all_reduce_that_links_do_not_explain_is_not_called_latency(times, says):
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


def test_an_uplink_is_shared_by_as_many_as_cross_it():
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
def test_an_uplink_above_racks_counts(narrow):
    leaves = ", ".join(f"{{name: l{n}, hosts: 'a[{2 * n - 1}-{2 * n}]'}}" for n in range(1, 5))
    pods = ", ".join(f"{{name: p{n}, switches: [l{2 * n - 1}, l{2 * n}], {narrow}}}" for n in (1, 2))
    wide, tight = (
        find_fabric(
            parse_topology(f"{POD}switches: [{switches}]", "x"), job(device="V100"), [f"a{n}" for n in range(1, 9)], 8
        )
        for switches in (leaves, f"{leaves}, {pods}")
    )
    assert tight.network.bytes_per_second < 0.9 * wide.network.bytes_per_second and "uplink of p1" in tight.network.text


def test_memory():
    assert predict_step(lab(), job(), hosts=2).fits_memory is True
    large = msgspec.structs.replace(job(), memory_bytes=48 * 10**9)
    assert predict_step(lab(), large, hosts=2).fits_memory is False
    assert predict_step(lab(), msgspec.structs.replace(job(), memory_bytes=None), hosts=2).fits_memory is None


def test_a_slow_loader_is_told_of():
    told = predict_step(lab(), msgspec.structs.replace(job(), loader_seconds=0.1), hosts=2)
    assert any("for data" in note for note in told.notes)


def test_data_that_comes_while_gradients_travel_is_not_waited_for():
    """Loader processes load data during communication. A script that loads data by itself adds the time to the step."""
    slow = lab("1 GbE")
    plain, free = predict_step(slow, job(), hosts=2), job().compute_seconds
    exposed = plain.exposed_seconds
    for loader_seconds in (0.5 * exposed, 2 * exposed):
        itself = msgspec.structs.replace(job(), loader_seconds=loader_seconds)
        processes = msgspec.structs.replace(itself, loading_processor_seconds=1e-3)
        told = predict_step(slow, processes, hosts=2)
        assert told.step_seconds == pytest.approx(plain.step_seconds + max(0.0, loader_seconds - exposed))
        assert told.exposed_seconds == pytest.approx(max(0.0, exposed - loader_seconds))
        assert told.efficiency == pytest.approx((free + loader_seconds) / told.step_seconds)
        assert predict_step(slow, itself, hosts=2).step_seconds == pytest.approx(plain.step_seconds + loader_seconds)


def test_servers_are_no_faster_than_processors_and_tcp():
    """The measured throughput of a server caps its share of a fast NIC, for any number of servers."""
    work = job(1000, 40)
    ndr, hdr = (
        predict_step(lab(name), work, Strategy(mode="async"), hosts=2).communication_seconds for name in ("NDR", "HDR")
    )
    assert ndr == pytest.approx(hdr)
    assert ndr > 1e9 / 3.4e9 / 2


def test_processes_that_load_data_share_the_processors_of_their_host():
    """Eight batches of 0.4 CPU seconds keep 16 CPUs busy for 0.2 s. A step without loading takes 0.152 s."""
    described = parse_topology(LAB.replace("RATE", "HDR").replace("count: 2", "count: 8") + "    cores: 16\n", "x")
    hungry = msgspec.structs.replace(job(1), loading_processor_seconds=0.4)
    alone, few, all_eight = (predict_step(described, hungry, hosts=1, ranks_per_host=count) for count in (1, 4, 8))
    assert alone.efficiency == 1 and few.efficiency > 0.95
    assert all_eight.step_seconds == pytest.approx(0.2)
    assert all_eight.loader_seconds == pytest.approx(
        0.2 - predict_step(described, job(1), hosts=1, ranks_per_host=8).step_seconds
    )
    assert all_eight.losses[0].what.startswith("loading data") and all_eight.cap is None
    assert predict_step(described, hungry, hosts=4, ranks_per_host=8).step_seconds == pytest.approx(0.2)
    held = predict_limit(described, hungry, hosts=4, ranks_per_host=8)
    assert held.efficiency == pytest.approx(0.152 / 0.2) and held.losses[0].what.startswith("loading data")
    assert predict_step(lab(), hungry, hosts=4, ranks_per_host=8).loader_seconds == 0  # the number of CPUs is unknown
    (first, *_) = predict_step(described, hungry, hosts=1, ranks_per_host=8, timeline=True).timeline
    assert first.phase == "loader" and first.end_seconds == pytest.approx(all_eight.loader_seconds)


def test_on_cpu_hosts_what_loads_data_takes_it_from_what_computes():
    """Two ranks compute for 0.152 s and load for 0.1 CPU seconds: 0.252 s on two CPUs, less on eight."""
    work = msgspec.structs.replace(job(0.001, 1, device="cpu"), processor_share=1.0, loading_processor_seconds=0.1)
    small, large = (
        predict_step(measured_lab(machines=((("n1",), cores), (("n2",), cores))), work, hosts=2, ranks_per_host=2)
        for cores in (2, 8)
    )
    assert small.step_seconds == pytest.approx(0.252)
    assert large.loader_seconds == 0 and large.step_seconds < 0.2


jobs = st.builds(
    job,
    megabytes=st.floats(0.1, 1000),
    tensors=st.integers(1, 80),
    backward=st.floats(0.001, 2),
    forward=st.floats(0.001, 1),
)
ways = st.sampled_from(
    [
        Strategy(),
        Strategy(all_reduce="hierarchical"),
        Strategy(bucket_bytes=4 << 20),
        Strategy(gradients=Gradients("bf16")),
        Strategy(gradients=Gradients("topk", fraction=0.01)),
        Strategy(gradients=Gradients("powersgd", rank=4)),
        Strategy(accumulate=4),
        Strategy(mode="local", inner_steps=10),
        Strategy(mode="async"),
        Strategy(mode="async", servers=2),
    ]
)


@settings(max_examples=150, deadline=None)
@given(workload=jobs, strategy=ways, hosts=st.integers(1, 300), each=st.integers(1, 2), cpu=st.booleans())
def test_what_always_holds(workload, strategy, hosts, each, cpu):
    if cpu:
        workload = msgspec.structs.replace(workload, device="cpu")
    told = predict_step(lab(), workload, strategy, hosts=hosts, ranks_per_host=each)
    assert 0 < told.efficiency <= 1
    assert 0 <= told.exposed_seconds <= told.step_seconds
    assert told.step_seconds >= told.compute_seconds * (1 - 1e-9)
    assert told.samples_per_second == pytest.approx(
        told.efficiency * hosts * each * 32 * strategy.accumulate / told.compute_seconds
    )
    if strategy.mode == "sync":
        assert told.exposed_seconds <= told.communication_seconds + 1e-9
    faster = predict_step(lab("25 GbE"), workload, strategy, hosts=hosts, ranks_per_host=each)
    # A faster link gets bucket boundaries chosen for uncompressed buckets. Compression may then be less hidden.
    if not cpu or strategy.gradients.exact:
        assert faster.step_seconds <= told.step_seconds * (1.01 if cpu else 1 + 1e-9)
    if hosts == each == 1:
        assert told.efficiency == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(workload=jobs, hosts=st.integers(2, 64), times=st.floats(1.1, 5))
def test_more_bytes_are_never_faster(workload, hosts, times):
    larger = msgspec.structs.replace(
        workload,
        gradients=tuple(
            msgspec.structs.replace(
                each, elements=int(each.elements * times), size_bytes=4 * int(each.elements * times)
            )
            for each in workload.gradients
        ),
    )
    one = Strategy(bucket_bytes=1 << 50)  # one bucket: its boundaries have no effect
    assert (
        predict_step(lab(), larger, one, hosts=hosts).step_seconds
        >= predict_step(lab(), workload, one, hosts=hosts).step_seconds * (1 - 1e-9)
    )  # fmt: skip


def test_a_hundred_thousand_gpus_take_no_time():
    topology = parse_topology(POD, "pod")
    counts = sorted({round(1.15**k) for k in range(68)} | {12_500})
    begun = time.process_time()
    workload = job(device="V100", tensors=160)
    told = [predict_step(topology, workload, hosts=count, ranks_per_host=8) for count in counts]
    assert time.process_time() - begun < 5  # the benchmark checks 1 s; a loaded machine takes longer
    assert told[-1].hosts * told[-1].ranks_per_host == 100_000
    efficiencies = [each.efficiency for each in told]
    assert efficiencies[0] > efficiencies[-1] > 0


# Recommendation


def test_advice_is_ranked_and_says_what_it_costs():
    found = recommend(lab(), job(), hosts=4, ranks_per_host=2)
    rates = [advice.prediction.samples_per_second for advice in found]
    assert all(a > 0.999 * b for a, b in itertools.pairwise(rates)), rates
    assert {advice.strategy.mode for advice in found} == {"sync", "async", "local"}
    best = best_equivalent(found)
    assert best.exact
    plain = next(advice for advice in found if advice.strategy == Strategy() and not advice.batch)
    assert best.prediction.efficiency >= plain.prediction.efficiency
    assert plain.options == ()
    for advice in found:
        assert advice.exact == advice.convergence.startswith("same as synchronous SGD")


def test_mode_async_without_corrections_is_named_so():
    """Momentum correction matters most (docs/explanation/staleness.md)."""
    assert "not corrected" not in convergence_effect(Strategy(mode="async"))
    assert "not corrected" in convergence_effect(Strategy(mode="async", momentum_correction=False))


@pytest.mark.parametrize(("device", "flat"), [("cpu", True), ("RTX A6000", False)])
def test_every_strategy_is_advised_once(device, flat):
    """On CPU hosts `auto` is hierarchical, so only `flat` is a different setting. On GPUs NCCL chooses."""
    found = recommend(lab(), job(device=device), hosts=4, ranks_per_host=2)
    assert (("--all-reduce", "flat") in [advice.options for advice in found]) is flat
    assert not any("hierarchical" in advice.options for advice in found)
    assert len({(advice.options, advice.batch) for advice in found}) == len(found)


@pytest.mark.parametrize(
    "chosen",
    [
        Strategy(gradients=Gradients("bf16")),
        Strategy(gradients=Gradients("fp16"), accumulate=4),
        Strategy(gradients=Gradients("powersgd", rank=8), accumulate=16),
        Strategy(all_reduce="flat", bucket_bytes=1 << 20),
        Strategy(backend="horovod"),
        Strategy(mode="local"),
        Strategy(mode="local", inner_steps=20, outer=OuterOptimizer(overlap_steps=15)),
        Strategy(mode="async", staleness=4),
        Strategy(mode="async", servers=2, replicas=1),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "RTX A6000"])
def test_what_was_chosen_stays_in_what_is_advised(chosen, device):
    topology, work = (measured_lab(), job(device="cpu")) if device == "cpu" else (lab(), job())
    found = recommend(topology, work, chosen, hosts=4, ranks_per_host=2)
    (own,) = [each for each in found if each.strategy == chosen and not each.batch]
    assert own.prediction == predict_step(topology, work, chosen, hosts=4, ranks_per_host=2)
    assert best_equivalent(found, chosen).prediction.efficiency >= own.prediction.efficiency
    if chosen.mode == "sync":
        others = [each.strategy for each in found if each.strategy.mode == "sync"]
        assert all(each.accumulate >= chosen.accumulate and each.backend == chosen.backend for each in others)
        assert chosen.gradients.exact or not any(each.gradients.exact for each in others)
        assert chosen.bucket_bytes is None or {each.bucket_bytes for each in others} == {chosen.bucket_bytes}
        elsewhere = [each.strategy for each in found if each.strategy.mode != "sync"]
        half = chosen.gradients.format in ("fp16", "bf16")
        assert {each.accumulate for each in elsewhere} <= {chosen.accumulate}
        assert {each.gradients for each in elsewhere} <= {chosen.gradients if half else Gradients()}
    else:
        assert any(each.strategy == Strategy() for each in found)
    assert len({(each.options, each.batch) for each in found}) == len(found)


def test_what_helps_alone_is_combined():
    """Smaller buckets help evenly ready gradients, and bf16 helps slow links. Both together are the best."""
    work = job(240, 60, backward=0.5, forward=0.2, device="cpu")
    found = {each.strategy: each.prediction for each in recommend(measured_lab(), work, hosts=4) if not each.batch}
    best = best_equivalent(recommend(measured_lab(), work, hosts=4)).strategy
    both = msgspec.structs.replace(best, gradients=Gradients("bf16"))
    assert is_equivalent(best, Strategy()) and found[both].efficiency >= found[best].efficiency
    more = msgspec.structs.replace(both, accumulate=4)
    assert found[more].efficiency > found[both].efficiency


def test_larger_batches_are_advised_where_they_fit():
    def batches(memory_bytes: int) -> dict:
        work = msgspec.structs.replace(job(), memory_bytes=memory_bytes, parameter_bytes=10**8)
        return {each.batch: each for each in recommend(lab(), work, hosts=4, ranks_per_host=2) if each.batch}

    found = batches(10**10)
    assert sorted(found) == [64, 128] and sorted(batches(2 * 10**10)) == [64]
    assert found[128].prediction.efficiency > found[64].prediction.efficiency
    assert "global batch x 4" in found[128].convergence and not found[128].exact


def test_options_choose_the_strategy():
    from distrib_launch.arguments import training_options
    from distrib_launch.cli import launch

    for advice in recommend(lab(), job(), hosts=4, ranks_per_host=2):
        chosen = training_options.strategy_of(launch.parser().parse_args([*advice.options, "train.py"]))
        assert chosen == advice.strategy
    assert strategy_options(Strategy(bucket_bytes=5 << 20)) == ("--bucket", "5MiB")


counts = st.none() | st.integers(1, 1000)
outers = st.builds(
    OuterOptimizer,
    lr=st.floats(1e-6, 99),
    momentum=st.floats(0, 0.999),
    fragments=st.integers(1, 9),
    overlap_steps=st.integers(0, 9),
)
formats = st.sampled_from(["fp32", "fp16", "bf16", "int8"]).map(Gradients)
formats |= st.integers(1, 9999).map(lambda rank: Gradients("powersgd", rank=rank))
formats |= st.floats(1e-9, 1).map(lambda fraction: Gradients("topk", fraction=fraction))


@given(
    st.builds(
        Strategy, gradients=formats, all_reduce=st.sampled_from(["auto", "flat", "hierarchical"]), balance=st.booleans(),
        bucket_bytes=st.none() | st.integers(1, 1 << 40), accumulate=st.integers(1, 100),
        backend=st.sampled_from(["torch", "horovod"]),
    )
    | st.builds(Strategy, mode=st.just("local"), gradients=formats, inner_steps=st.none() | st.integers(10, 1000), outer=outers)
    | st.builds(
        Strategy, mode=st.just("async"), gradients=formats, servers=counts, staleness=st.none() | st.integers(0, 100),
        replicas=st.integers(0, 1), stale_rate=st.booleans(), momentum_correction=st.booleans(), host_reduction=st.booleans(),
        delay_compensation=st.none() | st.floats(1e-6, 1e5),
    )
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])  # most draws are invalid
def test_every_strategy_has_options_that_choose_it(strategy):
    from distrib_launch.arguments import training_options
    from distrib_launch.cli import launch

    try:
        validate_strategy(strategy)
    except ConfigError:
        assume(False)
    words = [*strategy_options(strategy), "train.py"]
    assert training_options.strategy_of(launch.parser().parse_args(words)) == strategy


def test_gpus_of_which_bridges_join_some_are_as_slow_as_the_way_between_the_bridges():
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
def test_of_a_link_with_two_rates_the_one_that_the_ring_sends_over_counts(slow, gloo, nccl):
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


def test_ports_that_mpi_leaves_unused_count_all_the_same():
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
