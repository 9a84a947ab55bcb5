"""Comparison of a probe with an earlier one."""

from __future__ import annotations

from msgspec import structs

from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, Measurements, Point
from distrib.probe import schedule
from distrib.probe.diagnosis.regressions import describe_comparison, find_regressions
from distrib.probe.records import build_measured
from distrib.probe.settings import DEFAULT, QUICK
from tests.support.simulated_network import MB, Network, links_of_further_network


def test_slower_hosts_and_links_are_worse_than_the_baseline():
    before = build_measured(Network(6).records(DEFAULT))
    same = build_measured(Network(6, noise=0.01, seed=3).records(DEFAULT))
    assert find_regressions(before, same) == ()
    found = find_regressions(before, build_measured(Network(6, slow={2: 0.6}).records(DEFAULT)))
    assert [(f.kind, f.hosts, f.severity) for f in found] == [("worse_than_baseline", ("n3",), "error")]
    found = find_regressions(before, build_measured(Network(6, one_way={(0, 1): 0.8}).records(DEFAULT)))
    assert [(f.source, f.target, f.severity) for f in found] == [("n1", "n2", "warning")]
    assert find_regressions(build_measured(Network(6, slow={2: 0.6}).records(DEFAULT)), before) == ()


def test_links_measured_together_are_compared_if_their_rounds_are_equal():
    a, b = schedule.round_robin(32)[-1][3]
    before = build_measured(Network(32, noise=0.005).records(QUICK))
    now = build_measured(Network(32, noise=0.005, seed=1, one_way={(a, b): 0.5}).records(QUICK))
    assert [(f.source, f.target) for f in find_regressions(before, now)] == [(f"n{a + 1}", f"n{b + 1}")]
    others = build_measured(Network(31, noise=0.005).records(QUICK))  # other rounds
    assert find_regressions(others, now) == ()
    directions = len({(p.source, p.target) for p in now.pairs})
    assert f": {directions} of {directions} directions" in describe_comparison(before, now)
    assert f": {directions} of {directions} directions" not in describe_comparison(others, now)


def test_shares_of_a_narrow_uplink_are_not_compared():
    before = build_measured(Network(8, racks=[0] * 4 + [1] * 4, uplink=119.5 * MB * 2).records(QUICK))
    shares = iter([1.3, 0.7] * 100)  # the share of each pair is random
    other = structs.replace(
        before,
        pairs=tuple(
            structs.replace(p, bandwidth_bytes_per_second=p.bandwidth_bytes_per_second * next(shares))
            if p.bandwidth_bytes_per_second < 100 * MB
            else p
            for p in before.pairs
        ),
    )
    assert find_regressions(before, other) == ()


def test_each_network_is_compared_with_its_own_baseline():
    own = build_measured(Network(4).records(DEFAULT))
    before, now = (
        structs.replace(own, pairs=(*own.pairs, *links_of_further_network("10.9.0.0/24", ("n1", "n2"), rate)))
        for rate in (1e9, 5e8)
    )
    found = find_regressions(before, now)
    assert [(f.source, f.target) for f in found] == [("n1", "n2"), ("n2", "n1")]
    assert found[0].what == "n1 to n2: 50% of the earlier bandwidth (tcp on 10.9.0.0/24)"
    slow = structs.replace(
        own,
        pairs=(
            *own.pairs,
            *links_of_further_network("10.9.0.0/24", rate=4e8),
            *links_of_further_network("10.8.0.0/24"),
        ),
    )
    fast = structs.replace(
        own, pairs=(*own.pairs, *links_of_further_network("10.9.0.0/24"), *links_of_further_network("10.8.0.0/24"))
    )
    (found,) = find_regressions(fast, slow)  # no single host has the fault
    assert found.what == "nearly all links on 10.9.0.0/24 have 33% of the earlier bandwidth"


def test_nearly_all_links_worse_are_one_finding():
    before = build_measured(Network(6).records(DEFAULT))
    (found,) = find_regressions(before, build_measured(Network(6, rate=60 * MB).records(DEFAULT)))
    assert (found.severity, sorted(found.hosts)) == ("error", sorted(before.hosts))
    assert found.what == "nearly all links have 50% of the earlier bandwidth"
    few = build_measured(Network(3).records(DEFAULT))
    assert len(find_regressions(few, build_measured(Network(3, rate=60 * MB).records(DEFAULT)))) > 1


def with_gpus(nvlink=270e9, memory=25e9, seconds=0.01, own=10e9):
    ways = {("memory", "memory"): own, ("gpu0", "gpu1"): nvlink, ("memory", "gpu0"): memory}
    return Measurements(
        when="2026-11-01", software={}, hosts=("n1", "n2"),
        inside=tuple(
            IntraNodeLinkMeasurement(host=host, source=a, target=b, path="NVLink" if a != "memory" else "PCIe", variation=0.0,
                       bandwidth_bytes_per_second=rate if host == "n1" else ways[a, b])
            for host in ("n1", "n2") for (a, b), rate in ways.items()
        ),
        collectives=(
            Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=4,
                       curve=(Point(1 << 20, 1e-3), Point(64 << 20, seconds))),
        ),
    )  # fmt: skip


def test_copies_of_gpus_and_all_reduces_are_compared():
    before = with_gpus()
    assert find_regressions(before, with_gpus(nvlink=250e9, seconds=0.0105, own=1e9)) == ()  # host memory varies
    said = describe_comparison(before, before)
    assert said.endswith("0 of 0 directions, 4 copies inside hosts, 1 all-reduce(s)")
    (found,) = find_regressions(before, with_gpus(seconds=0.0125))
    assert (found.severity, found.hosts) == ("warning", ("n1", "n2"))
    assert found.what == "all-reduce over 2 hosts, 4 ranks: 80% of the earlier speed"
    assert found.evidence == "64 MiB took 10 ms on 2026-11-01, 12.5 ms now"
    found = find_regressions(before, with_gpus(nvlink=24e9))
    assert {f.what for f in found} == {
        f"{host}: gpu0 to gpu1 (NVLink) has 9% of the earlier bandwidth" for host in ("n1", "n2")
    }
    assert "24 GB/s now (NVLink), 270 GB/s (NVLink) on 2026-11-01" in found[0].evidence
