"""Findings about uplinks that racks of hosts share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distrib.cluster import shared_links
from distrib.cluster.links import link_between
from distrib.cluster.node import NodeGroup
from distrib.cluster.shared_links import groups_of
from distrib.cluster.topology import Topology
from distrib.probe.diagnosis.checks import check_records
from distrib.probe.records import PairMeasurement, SharedLinkSides, build_measured
from distrib.probe.settings import DEFAULT, FULL, QUICK
from tests.support.simulated_network import MB, Network, facts


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10_000), st.sampled_from([2.0, 4.0]))
def test_an_oversubscribed_uplink_is_found_with_both_sides_and_its_ratio(half, seed, ratio):
    if half / ratio < 2 and ratio > 2:
        return  # so few hosts do not saturate the uplink
    network = Network(2 * half, noise=0.005, seed=seed, racks=[0] * half + [1] * half, uplink=119.5 * MB * half / ratio)
    records = network.records()
    found = check_records(records)
    if half == 3:  # too few streams to compare the sides while the uplink is saturated
        assert all(finding.kind == "oversubscribed_uplink" for finding in found)
        return
    assert [finding.kind for finding in found] == ["oversubscribed_uplink"]
    assert f"n[1-{half}]" in found[0].what and f"n[{half + 1}-{2 * half}]" in found[0].what
    assert found[0].ratio == pytest.approx(ratio, rel=0.05)
    groups = next(record for record in records if isinstance(record, SharedLinkSides))
    assert {frozenset(side) for side in groups.sides} == {
        frozenset(network.names[:half]),
        frozenset(network.names[half:]),
    }


def test_pairs_that_share_processors_have_no_sides():
    load = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shared_links.find_sides(load, lambda key, phase: {pair: 2.0 / len(phase) / 2 for pair in phase}) is None


def test_a_nic_behind_a_narrow_uplink_is_not_below_its_nominal_rate():
    """A quick probe may never measure the pairs behind an uplink alone. The matrix shows the rate of each NIC."""
    own = tuple(facts(f"n{number}") for number in range(1, 5))
    records = Network(4, noise=0.002, racks=[0, 0, 1, 1], uplink=60 * MB).records(QUICK, own)
    assert {finding.kind for finding in check_records(records)} == {"oversubscribed_uplink"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 8), min_size=2, max_size=4),
    st.sampled_from([1.5, 2.0, 4.0]),
    st.booleans(),
    st.sampled_from([QUICK, DEFAULT]),
    st.integers(0, 10_000),
)
def test_no_host_or_link_is_blamed_for_a_shared_uplink(sizes, ratio, all_narrow, mode, seed):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(racks)
    uplinks = {rack: 119.5 * MB * size / ratio for rack, size in enumerate(sizes) if all_narrow or not rack}
    # It does not slow a single pair.
    uplinks = {rack: max(rate, 119.5 * MB) for rack, rate in uplinks.items()}
    found = check_records(Network(len(racks), noise=0.005, racks=racks, uplink=uplinks, seed=seed).records(mode))
    assert {f.kind for f in found} <= {"oversubscribed_uplink"}


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 4, 4), (8, 8, 8), (4, 8, 4)])
@pytest.mark.parametrize("mode", [QUICK, DEFAULT])
def test_the_narrow_uplinks_of_several_racks_are_found_with_their_hosts(sizes, mode):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    uplinks = {rack: 119.5 * MB * size / 2 for rack, size in enumerate(sizes)}
    (found,) = check_records(Network(len(racks), noise=0.005, racks=racks, uplink=uplinks).records(mode))
    assert (found.kind, found.severity) == ("oversubscribed_uplink", "warning")
    assert found.ratio == pytest.approx(2.0, abs=0.1)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    names = [f"n[{end - size + 1}-{end}]" for end, size in zip(ends, sizes, strict=True)]
    assert found.what.startswith(f"the uplinks of {', '.join(names[:-1])} and {names[-1]} are oversubscribed")


def test_the_oversubscription_of_an_uplink_is_relative_to_the_rate_of_its_hosts():
    """An uplink narrower than one host's link slows even a single pair."""
    network = Network(8, noise=0.005, racks=[0] * 4 + [1] * 4, uplink=119.5 * MB * 0.1)
    (found,) = check_records(network.records(DEFAULT))
    assert found.kind == "oversubscribed_uplink" and found.ratio == pytest.approx(40, rel=0.05)
    assert "4 concurrent pairs" in found.evidence


def test_pairs_that_slow_each_other_down_are_an_uplink_finding_without_known_sides():
    racks = [0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 1, 2]  # not in rack order
    records = Network(12, noise=0.005, racks=racks, uplink=119.5 * MB * 2).records()
    assert not any(isinstance(record, SharedLinkSides) for record in records)
    (found,) = check_records(records)
    assert (found.kind, found.severity) == ("oversubscribed_uplink", "warning")
    assert "share seem to be oversubscribed" in found.what
    busy = [structs.replace(r, busy=0.95) if isinstance(r, PairMeasurement) else r for r in records]
    assert check_records(busy) == ()  # the pairs may share the CPUs
    assert " to " in found.evidence and "%" in found.evidence


@pytest.mark.parametrize(
    ("sizes", "rate", "mode"), [((4, 8, 8, 8), 2, QUICK), ((6, 8, 8, 8), 1, DEFAULT), ((8, 8), 2, QUICK)]
)
def test_hosts_behind_a_narrow_uplink_are_not_slow_themselves(sizes, rate, mode):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    network = Network(len(racks), noise=0.005, racks=racks, uplink={0: 119.5 * MB * rate})
    assert {f.kind for f in check_records(network.records(mode))} == {"oversubscribed_uplink"}
    network.slow[1] = 0.5
    found = check_records(network.records(mode))
    assert [f.hosts for f in found if f.kind == "slow_host"] == [("n2",)]


@pytest.mark.parametrize("mode", [QUICK, DEFAULT, FULL])
@pytest.mark.parametrize(
    ("sizes", "uplink", "alone"),
    [
        ((4, 4), 1.0, 1.0),
        ((4, 5), 1.5, 1.0),
        ((5, 5), 0.4, 0.4),
        ((6, 10), 2.0, 1.0),
        ((8, 8, 8), 2.0, 1.0),
        ((4, 4, 4), 1.0, 1.0),
        ((8, 8), 0.4, 0.4),
    ],
)
def test_a_ring_gets_the_rate_of_one_stream_through_a_shared_uplink(sizes, uplink, alone, mode):
    racks = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    network = Network(len(racks), noise=0.005, racks=racks, uplink=119.5 * MB * uplink)
    nodes = (NodeGroup(hosts=f"n[1-{len(racks)}]"),)
    topology = Topology(nodes=nodes, measured=build_measured(network.records(mode)))
    for count in range(2, len(racks) + 1):
        ring = zip(network.names[:count], [*network.names[1:count], network.names[0]], strict=True)
        for a, b in ring:
            crosses = racks[int(a[1:]) - 1] != racks[int(b[1:]) - 1]
            expected = 119.5 * MB * (alone if crosses else 1.0)
            assert link_between(topology, a, b).bandwidth_bytes_per_second == pytest.approx(expected, rel=0.05), (a, b)


def test_a_single_slow_pair_does_not_split_a_group_of_hosts():
    hosts = [f"n{n}" for n in range(12)]
    slowed = {frozenset((a, b)) for a in hosts for b in hosts if hosts.index(a) // 4 != hosts.index(b) // 4}
    slowed -= {frozenset(("n4", "n9"))}  # no other pair crossed their uplinks in that round
    slowed |= {frozenset(("n4", "n5")), frozenset(("n8", "n9"))}
    assert groups_of(hosts, slowed) == [tuple(hosts[:4]), tuple(hosts[4:8]), tuple(hosts[8:])]
