"""Known answers of NCCL's tuner, computed by hand from its constants.

Source: NVIDIA/nccl@5067397 (2.30.7), src/graph/tuning.cc: latencies of operations and of hops, bandwidth factors. Times in
microseconds, LL / LL128 / Simple:

- base: ring 6.6 / 14 / 8.4, tree 6.8 / 14 / 8.4
- hop of a ring: NVLink 0.6 / 1.9 / 3.4, PCIe 1.0 / 2.5 / 5.7, network 2.7 / 4 / 14
- hop of a tree: NVLink 0.6 / 1.25 / 4, PCIe 1.0 / 1.9 / 4, network 5 / 8.5 / 14
- ring = base + (2(n-1) - 2(hosts-1)) inside + 2(hosts-1) network, Simple over several hosts times 1.4, before compute capability 8.0
  times 1.9. One rank per host: the tree's hop over the network.
- tree = base + 2((n/hosts - 1) inside + log2(hosts) network)
- fraction of the bandwidth: ring 0.5 / 0.92 / 1; tree 0.92, of it 1/3.8 / 0.9375 (one host: 7/9) / 1; and tree corrections by size
- limits of a channel in a tree, compute capability 8.0: 24 GB/s on one host, 23.6 on two, 17.8 on more; LL128 20
"""

from __future__ import annotations

import msgspec
import pytest

from distrib.bandwidth_model import collective_cost, link_curve
from distrib.bandwidth_model.bottleneck import RingLink
from distrib.bandwidth_model.fabric import Fabric

INFINIBAND_SECONDS = 2.7e-6


def link(rate: float, latency_seconds: float = INFINIBAND_SECONDS, kind: str | None = None) -> RingLink:
    curve = link_curve.linear_curve(latency_seconds, rate)
    return RingLink(source="a", target="b", text="", kind=kind, curve=curve, measured=False)  # type: ignore[arg-type]


def microseconds(
    hosts: int, each: int, size: float, *, inside: str = "nvlink", latency_seconds: float = INFINIBAND_SECONDS, hierarchical: bool = False
) -> float:  # fmt: skip
    """Return the time of an all-reduce over 25 GB/s between hosts, and 150 GB/s of NVLink or 12 GB/s of PCIe inside."""
    fabric = Fabric(
        hosts=hosts, ranks=hosts * each, ranks_per_host=each, gpus=True, cpus_per_rank=None, ranks_per_cpu=0.0,
        network=link(25e9, latency_seconds) if hosts > 1 else None,
        intra_node=link(150e9 if inside == "nvlink" else 12e9, kind=inside) if each > 1 else None,
    )  # fmt: skip
    return collective_cost.all_reduce(fabric, size, hierarchical=hierarchical) * 1e6


@pytest.mark.parametrize(
    ("hosts", "each", "size", "expected"),
    [
        # Ring LL: 6.6 + 2 x 5.0, and 1 kB / 12.5 GB/s. The tree would take 16.98.
        (2, 1, 1e3, 16.68),
        # Tree LL: 6.8 + 2 x 3 x 5.0, and 2 x 3.8 kB / (0.92 x 0.9034 x 25 GB/s). The correction is between 1 (512 B) and 0.9 (1 KiB).
        (8, 1, 1e3, 37.16576),
        # Tree LL: 6.8 + 2 (7 x 0.6 + 6 x 5.0), and the same. The ring would take 884.
        (64, 8, 1e3, 75.56576),
        # Ring LL on one host: 6.6 + 14 x 0.6, and 1.75 kB / 75 GB/s.
        (1, 8, 1e3, 15.0233),
        # Tree LL128: 14 + 2 (7 x 1.25 + 3 x 8.5), and 2 MB / (0.92 x 0.9375 x 0.6 x 25 GB/s).
        (8, 8, 1e6, 237.08937),
        # Tree LL128 over two hosts, whose trees share the link: 14 + 2 (7 x 1.25 + 8.5), and 1 MB / (0.6 x 20 GB/s) in two channels.
        (2, 8, 1e6, 131.83333),
        # Ring Simple: 1.4 (8.4 + 112 x 3.4 + 14 x 14), and 2 x 63/64 GB / 25 GB/s. The tree would take 87,105.
        (8, 8, 1e9, 79_569.28),
        # Ring Simple on one host: 8.4 + 14 x 3.4, and 2 x 7/8 GB / 150 GB/s.
        (1, 8, 1e9, 11_722.667),
        # Ring Simple over two hosts: 1.4 (8.4 + 2 x 14), and 1 GB / 25 GB/s.
        (2, 1, 1e9, 40_050.96),
    ],
)
def test_the_fastest_of_ring_and_tree_counts(hosts, each, size, expected):
    assert microseconds(hosts, each, size) == pytest.approx(expected, rel=1e-5)


def test_hops_over_pcie_and_without_ll128():
    # Tree Simple: 8.4 + 2 (4 + 3 x 14), and 1 MB / (0.92 x 0.5 x 12 GB/s): a chain of two GPUs sends all bytes once.
    assert microseconds(8, 2, 1e6, inside="pcie") == pytest.approx(281.5594, rel=1e-5)
    # Ring LL on one host: 6.6 + 14 x 1.0, and 1.75 kB / 6 GB/s.
    assert microseconds(1, 8, 1e3, inside="pcie") == pytest.approx(20.8917, rel=1e-5)
    # Ring Simple on one host: 8.4 + 14 x 5.7, and 1.75 MB / 12 GB/s. LL128 would take 207, but PCIe lacks it.
    assert microseconds(1, 8, 1e6, inside="pcie") == pytest.approx(234.0333, rel=1e-5)


def test_hops_over_tcp_take_its_latency_too():
    """Each of the 6 hops of the tree takes 28 microseconds more than over InfiniBand; the ring's 14 would take 436."""
    assert microseconds(8, 1, 1e3, latency_seconds=30.7e-6) == pytest.approx(205.16576, rel=1e-5)
    assert microseconds(2, 1, 1e3, latency_seconds=30.7e-6) == pytest.approx(72.68, rel=1e-5)  # ring: 2 hops
    assert microseconds(8, 1, 1e3, latency_seconds=1e-6) == pytest.approx(37.16576, rel=1e-5)  # never below NCCL's own


def test_a_hierarchical_all_reduce_is_one_inside_and_one_between_hosts():
    # Ring LL inside: 6.6 + 14 x 0.6 + 1.75 MB / 75 GB/s. Ring LL128 between: 14 + 14 x 8.5 + 1.75 MB / (0.92 x 25 GB/s).
    assert microseconds(8, 8, 1e6, hierarchical=True) == pytest.approx(38.3333 + 209.0870, rel=1e-5)


def nvidia(
    hosts: int, size: float, capability: float, *, rate: float = 400e9, nvlink: float = 360e9, **network: object
) -> float:
    """Return the time of an all-reduce over hosts with 8 GPUs at a switch and 8 NICs."""
    between = msgspec.structs.replace(link(rate), ports=8, gpudirect=True, **network) if hosts > 1 else None
    fabric = Fabric(
        hosts=hosts, ranks=hosts * 8, ranks_per_host=8, gpus=True, cpus_per_rank=None, ranks_per_cpu=0.0,
        network=between, intra_node=link(nvlink, kind="nvlink"), nvswitch=True, compute_capability=capability,
    )  # fmt: skip
    return collective_cost.all_reduce(fabric, size) * 1e6


def test_switches_reduce_from_hopper_on():
    # NVLS: 2 x 23, and 1 GB x (1 + 1/8) / (0.85 x 360 GB/s). The ring would take 4917.
    # Three stages of the pipeline fill with 8 x 16 chunks of 64 KiB at 272 GB/s.
    assert nvidia(1, 1e9, 9.0) == pytest.approx(46 + 3 * 128 * 65536 / 272e3 + 3676.4706, rel=1e-5)
    assert nvidia(1, 1e9, 8.0) == pytest.approx(8.4 + 14 * 3.4 + 4861.1111, rel=1e-5)
    # NVLSTree: 25 + 2 x 20.9, and 1 GB / (8 x 57.7 GB/s x 16/30).
    assert nvidia(2, 1e9, 9.0, rate=368e9) == pytest.approx(66.8 + 1e9 / (8 * 57.7e3 * 16 / 30), rel=1e-5)


def test_a_tree_is_limited_by_its_channels():
    """8 NICs of 23 GB/s are 8 channels of at most 17.8 GB/s in a tree over four hosts with A100."""
    # Tree Simple: 8.4 + 2 (7 x 4 + 2 x 14), and 1 GB / (8 x 17.8 GB/s / 2). The ring has less bandwidth per byte but takes 10,900.
    ring = 1.4 * (8.4 + 56 * 3.4 + 6 * 14) + 2 * 31 / 32 * 1e9 / 184e3
    tree = 8.4 + 2 * (7 * 4 + 2 * 14) + 1e9 / 71.2e3
    assert nvidia(4, 1e9, 8.0, rate=184e9) == pytest.approx(min(ring, tree), rel=1e-5) == pytest.approx(ring, rel=1e-5)


def test_the_ring_plateau_is_higher_before_ampere():
    assert nvidia(4, 1e10, 7.0, rate=100e9) - nvidia(4, 1e10, 8.0, rate=100e9) == pytest.approx(
        0.5 * (8.4 + 56 * 3.4 + 6 * 14), rel=1e-4
    )


def test_efa_before_p5_has_one_protocol_and_counts_its_latency_twice():
    """Its plugin reports 75 microseconds; Simple waits as long again for the flush. Tree Simple of two hosts with 8 GPUs."""
    slow = link_curve.linear_curve(77.7e-6, 48e9)
    taken = nvidia(2, 64, 8.0, curve=slow, family="EFA")
    assert taken == pytest.approx(8.4 + 2 * (7 * 4 + 14 + 150), rel=1e-3)
    assert nvidia(2, 64, 9.0, curve=slow, family="EFA") == pytest.approx(6.8 + 2 * (7 * 0.6 + 5 + 75), rel=1e-3)
